"""What comes next is what goes next."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.core.coverage import Checkpoint, Component, SlidingWindow, WholePath
from hicache.core.foresight import Foresight
from hicache.core.identity import Namespace
from hicache.core.tree import Index
from hicache.core.words import Tier

PAGE = 2
NAMESPACE = Namespace("m", "", b"f" * 16, PAGE)
COMPONENTS = (
    Component("full", WholePath()),
    Component("swa", SlidingWindow(2)),
    Component("mamba", Checkpoint()),
)


@settings(deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=6),
    which=st.sampled_from(["full", "swa", "mamba"]),
    pinned=st.integers(0, 5),
    pages=st.integers(1, 4),
)
def test_the_pages_that_come_next_are_those_that_eviction_gives_up(
    prompts: list[list[int]], which: str, pinned: int, pages: int
) -> None:
    """Looking changes nothing. Pages of equal age are as good as each other."""
    index, slot = Index(PAGE, COMPONENTS, (Tier.DEVICE,)), 0
    for prompt in prompts:
        tokens = np.repeat(np.array(prompt, np.int32), PAGE)
        slots = {}
        for component in COMPONENTS:
            slots[component.name] = np.arange(slot, slot + len(prompt), dtype=np.int32)
            slot += len(prompt)
        inserted = index.insert(NAMESPACE, tokens, slots, tier=Tier.DEVICE)
    if pinned < len(prompts):
        index.pin(inserted.cursor, inserted.n_pages, tier=Tier.DEVICE)
    ahead = Foresight(index)
    while True:
        before = index.resident(which, Tier.DEVICE)
        first = ahead.next_victims(which, Tier.DEVICE, pages)
        again = ahead.next_victims(which, Tier.DEVICE, pages)
        assert index.resident(which, Tier.DEVICE) == before
        if first is None:
            assert again is None
            assert index.evict(which, Tier.DEVICE, pages).n_freed == 0
            return
        assert again is not None
        n = len(first.pages)
        assert 1 <= n <= pages
        ages = ages_of(index, which)
        named = index.slots(first.cursor, which, Tier.DEVICE, 0, first.cursor.boundary)[first.pages].tolist()
        freed = index.evict(which, Tier.DEVICE, n).freed[which].tolist()
        assert sorted(ages[slot] for slot in freed) == sorted(ages[slot] for slot in named)


def ages_of(index: Index, component: str) -> dict[int, int]:
    """By slot: when its page was used last, and whether it is dead weight."""
    lane, ages = index.shape.lane(component, Tier.DEVICE), {}
    for node in index._occupancy.nodes():
        keys = index._queues.keys(node, lane, slice(0, node.n))
        ages |= dict(zip(node.block[lane.row, : node.n].tolist(), keys.tolist(), strict=True))
    return ages
