"""Eviction order: policies, demotion, thinning of checkpoints, branching boundaries."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.core.coverage import Checkpoint, WholePath
from hicache.core.policies import Policy
from hicache.core.words import Tier

from .rig import Rig

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
PROMPTS = ("ab", "cd", "ef")


def order_of(rig: Rig) -> list[str]:
    """Evicts prompt by prompt and says in which order they went."""
    gone: list[str] = []
    while len(gone) < len(PROMPTS):
        rig.evict("full", 2)
        gone += [prompt for prompt in PROMPTS if not rig.boundary(prompt) and prompt not in gone]
    return gone


def touch(rig: Rig, prompt: str) -> None:
    rig.index.touch(rig.index.match(rig.namespace(), rig.tokens(prompt)).cursor, len(prompt))


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Policy.LRU, ["cd", "ab", "ef"]),
        (Policy.LFU, ["cd", "ef", "ab"]),
        (Policy.SLRU, ["cd", "ab", "ef"]),
        (Policy.FIFO, ["ab", "cd", "ef"]),
    ],
)
def test_policies_order_by_use(rigs: list[Rig], policy: Policy, order: list[str]) -> None:
    """ab is used thrice early, cd not at all, ef once last."""
    rig = Rig({"full": WholePath()}, policies={"full": policy})
    rigs.append(rig)
    for prompt in PROMPTS:
        rig.insert(prompt)
    for prompt in ("ab", "ab", "ab", "ef"):
        touch(rig, prompt)
    assert order_of(rig) == order


def test_protected_goes_after_probation_however_recent(rigs: list[Rig]) -> None:
    rig = Rig({"full": WholePath()}, policies={"full": Policy.SLRU})
    rigs.append(rig)
    rig.insert("ab")
    touch(rig, "ab")
    rig.insert("cd")
    rig.insert("ef")
    assert order_of(rig) == ["cd", "ef", "ab"]


def test_priority_comes_before_recency(rigs: list[Rig]) -> None:
    rig = Rig({"full": WholePath()}, policies={"full": Policy.PRIORITY})
    rigs.append(rig)
    for prompt, priority in zip(PROMPTS, (5, 1, 0), strict=True):
        slots = rig.pools["full", DEVICE].alloc(2)
        assert slots is not None
        rig.index.insert(rig.namespace(), rig.tokens(prompt), {"full": slots}, tier=DEVICE, priority=priority)
    touch(rig, "ef")
    assert order_of(rig) == ["ef", "cd", "ab"]
    with pytest.raises(ValueError, match="priority"):
        rig.index.insert(rig.namespace(), rig.tokens(""), {}, tier=DEVICE, priority=-1)


def test_each_component_has_its_own_policy(rigs: list[Rig]) -> None:
    rig = Rig({"full": WholePath(), "mamba": Checkpoint()}, policies={"mamba": Policy.FIFO})
    rigs.append(rig)
    rig.insert("ab")
    rig.insert("cd")
    touch(rig, "ab")
    rig.evict("mamba", 1)
    assert rig.resident("ab", "mamba") == [1]
    rig.evict("mamba", 1)
    assert rig.resident("ab", "mamba") == []
    rig.evict("full", 1)
    assert rig.resident("cd", "full") == [0]
    with pytest.raises(ValueError, match="policies"):
        Rig({"full": WholePath()}, policies={"mamba": Policy.LRU})


def test_what_is_ready_one_tier_down_goes_before_what_would_be_lost(rigs: list[Rig]) -> None:
    """Demotion: two checkpoints of one use; the stored one goes, also when it was pinned as it was stored."""
    for pages in ([0], [1]):
        rig = Rig({"mamba": Checkpoint()}, tiers=(HOST, STORAGE))
        rigs.append(rig)
        cursor = rig.insert("abc").cursor
        rig.evict("mamba", 0, HOST)
        receipt = rig.index.pin_pages(cursor, {"mamba": np.array(pages, np.int32)}, tier=HOST)
        rig.index.mark_stored(cursor, "mamba", np.array(pages, dtype=np.int32))
        rig.index.unpin(receipt)
        rig.evict("mamba", 1, HOST)
        assert rig.resident("abc", "mamba", HOST) == [page for page in range(3) if page not in pages]


def test_thinning_keeps_the_frontier_the_forks_and_what_is_pinned(recurrent: Rig) -> None:
    recurrent.insert("abcdefgh")
    recurrent.insert("abcXY")
    cursor = recurrent.index.match(recurrent.namespace(), recurrent.tokens("abcdefgh")).cursor
    receipt = recurrent.index.pin_pages(cursor, {"mamba": np.array([4], np.int32)}, tier=DEVICE)
    done = recurrent.index.thin(cursor, "mamba", DEVICE, 5)
    recurrent.free(done.freed, DEVICE)
    assert (done.n_freed, done.short) == (3, 0)
    done = recurrent.index.thin(cursor, "mamba", DEVICE, 1)
    recurrent.free(done.freed, DEVICE)
    assert (done.n_freed, done.short) == (2, 2)
    assert recurrent.resident("abcdefgh", "mamba") == [2, 4, 7]
    assert recurrent.resident("abcXY", "mamba") == [2, 3, 4]
    recurrent.index.unpin(receipt)
    with pytest.raises(ValueError, match="every boundary"):
        recurrent.index.thin(cursor, "full", DEVICE, 1)


@pytest.mark.parametrize(("interval", "expected"), [(1, 7), (2, 6), (4, 4), (8, 0)])
def test_branching_boundaries_lie_on_the_interval(rigs: list[Rig], interval: int, expected: int) -> None:
    """MAMBA-08: where the engine can take a checkpoint."""
    rig = Rig({"full": WholePath(), "mamba": Checkpoint()}, branch_interval_pages=interval)
    rigs.append(rig)
    rig.insert("abcdefghij", mamba=[9])
    assert rig.index.match(rig.namespace(), rig.tokens("abcdefgXY")).branching_boundary == expected


def test_what_is_asked_is_what_goes_whatever_the_sizes(full: Rig) -> None:
    """SESSION-08: prompts of one and of fifty pages; ten asked, ten freed, not one more."""
    long = "".join(chr(0x4E00 + n) for n in range(50))
    full.insert("a")
    full.insert(long)
    full.insert("b")
    for left in (41, 31, 21):
        assert full.evict("full", 10) == (10, 0)
        assert full.boundary(long) == left
    assert (full.boundary("a"), full.boundary("b")) == (0, 1)
