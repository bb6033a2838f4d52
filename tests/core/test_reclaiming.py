"""Giving up what is coldest among lanes and indexes, one tenant's pages, pages by name; other slots."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.core.audit import audit
from hicache.core.coverage import Checkpoint, Component, WholePath
from hicache.core.identity import Namespace
from hicache.core.queues import LAST_KEY
from hicache.core.structure import Cursor, Ticks
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, Residency, Tier, TokenArray

HOST = Tier.HOST


def make_index(ticks: Ticks | None = None) -> Index:
    components = (Component("full", WholePath()), Component("mamba", Checkpoint()))
    return Index(1, components, (HOST, Tier.STORAGE), ticks=ticks)


def space(salt: str = "") -> Namespace:
    return Namespace("m", "r", b"f" * 16, 1, salt=salt)


def enter(index: Index, tokens: list[int], first_slot: int, salt: str = "") -> Cursor:
    """Every page in FULL, the last in MAMBA; slots from `first_slot` on."""
    n = len(tokens)
    full = np.arange(first_slot, first_slot + n, dtype=np.int32)
    mamba = np.full(n, NO_SLOT, dtype=np.int32)
    mamba[-1] = first_slot
    prompt: TokenArray = np.array(tokens, dtype=np.int32)
    return index.insert(space(salt), prompt, {"full": full, "mamba": mamba}, tier=HOST).cursor


def test_the_colder_index_is_known_when_time_is_shared() -> None:
    ticks = Ticks()
    one, two = make_index(ticks), make_index(ticks)
    enter(one, [1, 2], 0)
    for first in range(10, 60, 10):
        enter(two, [first, first + 1], first)
    assert one.reclaiming.coldest("full", HOST) < two.reclaiming.coldest("full", HOST)
    cursor = enter(one, [1, 2], 0)
    one.touch(cursor, 2)
    key = two.reclaiming.coldest("full", HOST)
    assert not one.reclaiming.evict_colder("full", HOST, 9, key).n_freed
    assert one.reclaiming.coldest("full", HOST) > key


def test_only_what_is_colder_than_the_key_goes() -> None:
    index = make_index()
    enter(index, [1, 2, 3], 0)
    bound = index.reclaiming.coldest("full", HOST)
    assert index.reclaiming.evict_colder("full", HOST, 9, bound).n_freed == 0  # only a bound, as yet
    old = index.reclaiming.coldest("full", HOST)
    enter(index, [7, 8], 10)
    eviction = index.reclaiming.evict_colder("full", HOST, 9, old)
    assert sorted(eviction.freed["full"].tolist()) == [0, 1, 2]
    assert eviction.freed["mamba"].tolist() == [0]  # its prefix is gone
    assert index.reclaiming.evict_colder("full", HOST, 9, LAST_KEY).n_freed == 2
    assert audit(index, {}) == []


def test_a_tenants_pages_go_coldest_first_and_nobody_elses() -> None:
    """SESSION-10"""
    index = make_index()
    kept = enter(index, [1, 2, 3], 0, "other")
    enter(index, [1, 2, 3, 4], 10, "flood")
    enter(index, [1, 2, 9], 20, "flood")  # branches off: its first two pages are there already
    eviction = index.reclaiming.evict_of("flood", HOST, 3, {"full": 1, "mamba": 1})
    assert sorted(eviction.freed["full"].tolist()) == [12, 13]
    assert eviction.freed["mamba"].tolist() == [10]
    eviction = index.reclaiming.evict_of("flood", HOST, 100, {"full": 1, "mamba": 1})
    assert sorted(eviction.freed["full"].tolist()) == [10, 11, 22]
    assert index.slots(kept, "full", HOST, 0, 3).tolist() == [0, 1, 2]
    assert audit(index, {}) == []


def test_pages_named_are_given_up_unless_somebody_holds_them() -> None:
    index = make_index()
    cursor = enter(index, [1, 2, 3, 4], 0)
    index.mark_stored(cursor, "full", np.arange(4, dtype=np.int32))
    receipt = index.pin_pages(cursor, {"full": np.array([1], dtype=np.int32)}, tier=HOST)
    eviction = index.reclaiming.give_up(cursor, {"full": np.array([0, 1, 3], dtype=np.int32)}, tier=HOST)
    assert sorted(eviction.freed["full"].tolist()) == [0, 3]
    assert index.slots(cursor, "full", HOST, 0, 4).tolist() == [NO_SLOT, 1, 2, NO_SLOT]
    assert audit(index, {}) == []
    index.unpin(receipt)
    everything = {"full": np.arange(4, dtype=np.int32), "mamba": np.array([3], dtype=np.int32)}
    index.reclaiming.give_up(cursor, everything, tier=HOST)
    assert not index.resident("full", HOST)
    assert not index.resident("mamba", HOST)
    assert index.resident("full", Tier.STORAGE) == 4
    assert audit(index, {}) == []


def test_a_page_changes_its_slot_unless_it_is_pinned_or_gone() -> None:
    index = make_index()
    cursor = enter(index, [1, 2], 0)
    assert index.reclaiming.movable(cursor, "full", HOST, 1, 1)
    assert not index.reclaiming.movable(cursor, "full", HOST, 1, 7)
    receipt = index.pin(cursor, 2, tier=HOST)
    with pytest.raises(ValueError, match="unpinned"):
        index.reclaiming.reslot(cursor, "full", HOST, 1, 1, 9)
    index.unpin(receipt)
    index.reclaiming.reslot(cursor, "full", HOST, 1, 1, 9)
    assert index.slots(cursor, "full", HOST, 0, 2).tolist() == [0, 9]
    assert index.residency(cursor, "full", HOST, 1, 2)[0] == Residency.READY
    index.evict("full", HOST, 2)
    assert not index.reclaiming.movable(cursor, "full", HOST, 1, 9)
