"""Sizes at the edge: nothing, one, a page more or less, a million; memory per page; no recursion."""

from __future__ import annotations

import gc
import inspect
import sys
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from hicache.core.bigrams import bigrams
from hicache.core.coverage import Checkpoint, Component, SlidingWindow, WholePath
from hicache.core.identity import Namespace
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, SlotArray, Tier

from .rig import Rig

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
HYBRID = (
    Component("full", WholePath()),
    Component("swa", SlidingWindow(4)),
    Component("mamba", Checkpoint()),
)


def slots_for(index: Index, n_pages: int, first: int = 0) -> dict[str, SlotArray]:
    """Everything for every component, numbered from `first`."""
    return {part.name: np.arange(first, first + n_pages, dtype=np.int32) for part in index.shape.components}


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_around_a_page(page_size: int) -> None:
    for n_tokens in (0, 1, page_size - 1, page_size, page_size + 1):
        index = Index(page_size, HYBRID, (DEVICE,))
        namespace = Namespace("m", "", b"", page_size)
        tokens = np.arange(n_tokens, dtype=np.int32)
        n_pages = n_tokens // page_size
        done = index.insert(namespace, tokens, slots_for(index, n_pages), tier=DEVICE)
        assert (done.n_pages, done.tail_tokens) == (n_pages, n_tokens % page_size)
        found = index.match(namespace, tokens, cursor=done.cursor)
        assert found.boundaries[DEVICE] == n_pages
        index.touch(found.cursor, n_pages)
        index.unpin(index.pin(found.cursor, n_pages, tier=DEVICE))
        assert len(index.hashes(found.cursor, 0, n_pages)) == n_pages
        assert index.evict("full", DEVICE, 5).n_freed == n_pages


def test_a_million_tokens_of_one_token_pages() -> None:
    """One node, a million pages: whole life of a prompt, and every slot comes back once."""
    index = Index(1, HYBRID, (DEVICE,))
    namespace, n = Namespace("m", "", b"", 1), 1_000_000
    tokens = np.arange(n, dtype=np.int32)
    cursor = index.insert(namespace, tokens, slots_for(index, n), tier=DEVICE).cursor
    assert len(list(index._occupancy.nodes())) == 1
    found = index.match(namespace, np.append(tokens, np.int32(5)), cursor=cursor)
    assert found.boundaries[DEVICE] == n
    receipt = index.pin(found.cursor, n, tier=DEVICE)
    assert index.evict("full", DEVICE, 10).short == 10
    index.unpin(receipt)
    assert index.evict("swa", DEVICE, 999_996).n_freed == 999_996
    assert index.match(namespace, tokens).boundaries[DEVICE] == n
    done = index.drop(DEVICE)
    assert sorted(done.freed["full"]) == list(range(n))
    assert not index._tree.roots


def test_a_hundred_thousand_sessions(full: Rig) -> None:
    cursor = full.insert("abcd").cursor
    sessions = full.index.sessions
    for number in range(100_000):
        sessions.finish(sessions.begin(str(number)), cursor, 4)
    assert sessions.references(cursor, "full", 0, 4) == [100_000] * 4
    for number in range(100_000):
        sessions.close(str(number))
    assert sessions.references(cursor, "full", 0, 4) == [0] * 4


def test_a_deep_chain_of_branches_needs_no_recursion(rigs: list[Rig]) -> None:
    """Three hundred forks, one under the other, with far fewer calls allowed on the stack."""
    rig = Rig({"full": WholePath(), "swa": SlidingWindow(4)}, n_slots=5000)
    rigs.append(rig)
    trunk = "".join(chr(0x4E00 + n) for n in range(300))
    allowed = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        rig.insert(trunk)
        for depth in range(1, len(trunk)):
            rig.insert(trunk[:depth] + "!", full=[depth], swa=[])
        assert rig.boundary(trunk) == 300
        assert len(list(rig.index._occupancy.nodes())) == 2 * 300 - 1
        cursor = rig.index.match(rig.namespace(), rig.tokens(trunk)).cursor
        assert len(rig.index.hashes(cursor, 0, 300)) == 300
        rig.check()
        assert rig.evict("full", 5000) == (599, 4401)
        assert rig.used("swa") == 0
        assert not rig.index._tree.roots
    finally:
        sys.setrecursionlimit(allowed)


def grown_index(n_pages: int) -> tuple[Index, Namespace]:
    """One conversation with everything in every tier and all hashes, grown in hundred-page steps."""
    index = Index(16, HYBRID, (DEVICE, HOST, STORAGE))
    namespace = Namespace("m", "", b"", 16)
    tokens = np.arange(16 * n_pages, dtype=np.int32)
    for stop in range(100, n_pages + 1, 100):
        prompt = tokens[: 16 * stop]
        offered = slots_for(index, 100, stop - 100)
        done = index.insert(namespace, prompt, offered, tier=DEVICE, first_page=stop - 100)
        fresh = np.arange(stop - 100, stop, dtype=np.int32)
        placements = {part.name: (fresh, fresh) for part in HYBRID}
        index.publish(index.reserve(namespace, prompt, placements, tier=HOST))
        for part in HYBRID:
            index.mark_stored(done.cursor, part.name, fresh)
    cursor = index.match(namespace, tokens).cursor
    index.hashes(cursor, 0, n_pages)
    return index, namespace


def test_a_page_takes_at_most_200_bytes_beside_its_tokens_and_gives_them_back() -> None:
    """Three components, all tiers, hashes kept."""
    n_pages = 20_000
    gc.collect()
    tracemalloc.start()
    try:
        index, _ = grown_index(n_pages)
        gc.collect()
        full = tracemalloc.get_traced_memory()[0]
        assert full / n_pages - 4 * 16 * 1.125 <= 200
        for tier in (DEVICE, HOST, STORAGE):
            index.drop(tier)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < full / 50
    finally:
        tracemalloc.stop()


def test_columns_that_nobody_uses_cost_nothing() -> None:
    """No session: no reference column; no ranked policy: no rank; STORAGE: no pins."""
    index = Index(16, HYBRID, (HOST, STORAGE))
    namespace = Namespace("m", "", b"", 16)
    index.insert(namespace, np.arange(160, dtype=np.int32), slots_for(index, 10), tier=HOST)
    (node,) = index._occupancy.nodes()
    assert node.rank is None
    assert node.refs is None
    assert node.hashes is None
    assert len(node.block) == 3 * 2 + 3


@pytest.mark.parametrize(("n_tokens", "pages"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_draft_keys_need_one_token_more_than_a_page(n_tokens: int, pages: int) -> None:
    """TREE-06, the draft half: pairs of neighbours, 64 to a page."""
    index = Index(128, (Component("draft", WholePath()),), (DEVICE,))
    namespace = Namespace("m", "", b"", 128)
    tokens = np.arange(n_tokens, dtype=np.int32)
    keys = bigrams(tokens)
    assert keys.tolist() == [t for pair in pairwise(tokens) for t in pair]
    done = index.insert(namespace, keys, slots_for(index, len(keys) // 128), tier=DEVICE)
    assert done.n_pages == pages
    longer = bigrams(np.arange(200, dtype=np.int32))
    assert index.match(namespace, longer).boundaries[DEVICE] == pages
    other = np.arange(200, dtype=np.int32)
    other[64] = 9999
    expected = 0 if pages else pages
    assert index.match(namespace, bigrams(other)).boundaries[DEVICE] == expected
    assert NO_SLOT not in done.canonical["draft"]
