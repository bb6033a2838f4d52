"""The radix tree itself: match, split, insert, pin and plain eviction (TREE scenarios)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.core.coverage import WholePath
from hicache.core.structure import StaleCursor
from hicache.core.words import Tier

from .rig import Rig

DEVICE = Tier.DEVICE


def test_a_pinned_match_keeps_its_own_pages(full: Rig) -> None:
    """TREE-01: the pages of the matched node itself are protected, not only its ancestors."""
    full.insert("abcd")
    full.insert("wxyz")
    match = full.index.match(full.namespace(), full.tokens("abcd"))
    receipt = full.index.pin(match.cursor, 4, tier=DEVICE)
    assert full.evict("full", 8) == (4, 4)
    assert full.boundary("abcd") == 4
    assert full.boundary("wxyz") == 0
    full.index.unpin(receipt)
    assert full.evict("full", 4) == (4, 0)
    assert full.used("full") == 0


def test_a_match_is_as_deep_as_what_it_matched(full: Rig) -> None:
    """TREE-02."""
    full.insert("abcdef")
    match = full.index.match(full.namespace(), full.tokens("abcdef"))
    assert match.cursor.boundary == 6
    receipt = full.index.pin(match.cursor, 6, tier=DEVICE)
    assert full.evict("full", 100) == (0, 100)
    full.index.unpin(receipt)
    assert full.evict("full", 100) == (6, 94)


def test_a_partial_match_pins_exactly_what_it_matched(full: Rig) -> None:
    """TREE-03: also when a later insert divides the node."""
    full.insert("abcdefgh")
    match = full.index.match(full.namespace(), full.tokens("abcX"))
    assert match.n_pages == 3
    receipt = full.index.pin(match.cursor, 3, tier=DEVICE)
    full.insert("abcdeY")
    full.index.unpin(receipt)
    again = full.index.pin(full.index.match(full.namespace(), full.tokens("abc")).cursor, 3, tier=DEVICE)
    assert full.evict("full", 100) == (6, 94)
    assert full.boundary("abcdefgh") == 3
    full.index.unpin(again)
    assert full.evict("full", 100) == (3, 97)
    assert full.used("full") == 0


def test_the_loser_of_a_race_learns_the_canonical_slots(full: Rig) -> None:
    """TREE-04: redundant slots go back once, and the caller is told which slots to use instead."""
    first = full.insert("abcd")
    mine = full.pools["full", DEVICE].alloc(4)
    assert mine is not None
    second = full.index.insert(full.namespace(), full.tokens("abcd"), {"full": mine}, tier=DEVICE)
    assert sorted(second.redundant["full"]) == sorted(mine)
    assert np.array_equal(second.canonical["full"], first.canonical["full"])
    full.pools["full", DEVICE].free(second.redundant["full"])
    third = full.index.insert(full.namespace(), full.tokens("abcd"), second.canonical, tier=DEVICE)
    assert len(third.redundant["full"]) == 0


def test_a_match_refreshes_what_it_used_and_nothing_else(full: Rig) -> None:
    """TREE-05, to the page: the part beyond the match stays old."""
    full.insert("abcd")
    full.insert("wxyz")
    match = full.index.match(full.namespace(), full.tokens("abX"))
    full.index.touch(match.cursor, 2)
    assert full.evict("full", 2) == (2, 0)
    assert full.boundary("abcd") == 2
    assert full.evict("full", 2) == (2, 0)
    assert full.boundary("wxyz") == 2
    assert full.evict("full", 2) == (2, 0)
    assert full.boundary("wxyz") == 0
    assert full.boundary("abcd") == 2


@pytest.mark.parametrize(
    ("n_tokens", "expected"), [(0, 0), (1, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2), (129, 2)]
)
def test_remainders_shorter_than_a_page_match_whole_pages(n_tokens: int, expected: int) -> None:
    """TREE-06."""
    rig = Rig({"full": WholePath()}, page_size=64)
    rig.insert("ab")
    tokens = rig.tokens("abc")[:n_tokens]
    assert rig.index.match(rig.namespace(), tokens).boundaries[DEVICE] == expected
    rig.check()


@pytest.mark.parametrize("n_tokens", [0, 1, 63])
def test_inserting_less_than_a_page_changes_nothing(n_tokens: int) -> None:
    """TREE-06."""
    rig = Rig({"full": WholePath()}, page_size=64)
    nothing = np.empty(0, dtype=np.int32)
    done = rig.index.insert(
        rig.namespace(), np.arange(n_tokens, dtype=np.int32), {"full": nothing}, tier=DEVICE
    )
    assert (done.n_pages, done.tail_tokens) == (0, n_tokens)
    assert not rig.index._tree.roots
    rig.check()


def test_eviction_frees_what_was_asked_and_then_the_parent(full: Rig) -> None:
    """TREE-08, to the page: three asked, three freed; parents of freed leaves are looked at again."""
    for letter in "0123456789":
        full.insert("ab" + letter + "z")
    assert full.evict("full", 3) == (3, 0)
    assert full.evict("full", 100) == (19, 81)
    assert not full.index._tree.roots


def test_the_tail_that_fills_no_page_is_reported(rigs: list[Rig]) -> None:
    """TREE-11."""
    rig = Rig({"full": WholePath()}, page_size=64)
    rigs.append(rig)
    done = rig.insert("a", tail=36)
    assert (done.n_pages, done.tail_tokens) == (1, 36)
    assert rig.boundary("a", tail=36) == 1
    assert rig.boundary("ab") == 1
    assert rig.used("full") == 1


def test_a_conversation_is_one_node_and_a_branch_divides_it(full: Rig) -> None:
    for turn in range(1, 20):
        full.insert("abcdefghijklmnopqrst"[:turn])
    assert len(list(full.index._occupancy.nodes())) == 1
    full.insert("abcX")
    assert len(list(full.index._occupancy.nodes())) == 3


def test_a_cursor_whose_pages_are_gone_is_stale(full: Rig) -> None:
    cursor = full.insert("abcdef").cursor
    full.evict("full", 2)
    with pytest.raises(StaleCursor):
        full.index.slots(cursor, "full", DEVICE, 0, 6)
    assert len(full.index.slots(cursor, "full", DEVICE, 0, 4)) == 4
    full.insert("abcdXY")
    with pytest.raises(StaleCursor):
        full.index.pin(cursor, 6, tier=DEVICE)


def test_a_receipt_is_spent_once(full: Rig) -> None:
    receipt = full.index.pin(full.insert("ab").cursor, 2, tier=DEVICE)
    full.index.unpin(receipt)
    with pytest.raises(ValueError, match="spent"):
        full.index.unpin(receipt)


def test_namespaces_do_not_see_each_other(full: Rig) -> None:
    """KEY-01, KEY-02 as far as the index decides: equal tokens under another salt are another prompt."""
    full.insert("abcd", salt="one")
    assert [full.boundary("abcd", salt=salt) for salt in ("one", "two", "", "on", "one ")] == [4, 0, 0, 0, 0]


def test_bad_slots_are_refused_before_any_change(full: Rig) -> None:
    for slots in ([1, 2], [1, 2, 3, -2]):
        with pytest.raises(ValueError, match="full"):
            full.index.insert(
                full.namespace(), full.tokens("abcd"), {"full": np.array(slots, np.int32)}, tier=DEVICE
            )
    with pytest.raises(ValueError, match="nothing"):
        full.index.evict("nothing", DEVICE, 1)
    assert full.boundary("abcd") == 0


def test_reserved_pages_become_ready_or_go(full: Rig) -> None:
    tokens = full.tokens("abcd")
    slots = full.pools["full", DEVICE].alloc(4)
    assert slots is not None
    pages = np.arange(4, dtype=np.int32)
    reservation = full.index.reserve(full.namespace(), tokens, {"full": (pages, slots)}, tier=DEVICE)
    full.check()
    assert full.boundary("abcd") == 0
    assert full.evict("full", 4) == (0, 4)
    with pytest.raises(ValueError, match="ABSENT"):
        full.index.reserve(full.namespace(), tokens, {"full": (pages, slots)}, tier=DEVICE)
    full.insert("abX")
    surplus = full.index.publish(reservation)
    assert surplus["full"].tolist() == slots[:2].tolist()
    full.free(surplus, DEVICE)
    assert full.boundary("abcd") == 4
    with pytest.raises(ValueError, match="spent"):
        full.index.withdraw(reservation)


def test_a_withdrawn_reservation_leaves_nothing_behind(full: Rig) -> None:
    slots = full.pools["full", DEVICE].alloc(4)
    assert slots is not None
    placements = {"full": (np.arange(4, dtype=np.int32), slots)}
    reservation = full.index.reserve(full.namespace(), full.tokens("abcd"), placements, tier=DEVICE)
    full.free(full.index.withdraw(reservation), DEVICE)
    assert full.used("full") == 0
    assert not full.index._tree.roots


def test_a_cursor_remembers_the_deepest_of_several_cuts(full: Rig) -> None:
    """Cut back to 5, lengthened, cut back to 3, lengthened again: the first cursor is good for 3 pages."""
    cursor = full.insert("abcdefgh").cursor
    full.evict("full", 3)
    later = full.insert("abcdeXYZ").cursor
    full.evict("full", 5)
    full.insert("abcUVWST")
    for old in (cursor, later):
        assert len(full.index.slots(old, "full", DEVICE, 0, 3)) == 3
        with pytest.raises(StaleCursor):
            full.index.slots(old, "full", DEVICE, 0, 4)


def test_pinned_pages_do_not_hide_their_neighbours_from_eviction(hybrid: Rig) -> None:
    cursor = hybrid.insert("abcdefgh").cursor
    receipt = hybrid.index.pin_pages(cursor, {"swa": np.array([3], np.int32)}, tier=DEVICE)
    assert [hybrid.evict("swa", 1) for _ in range(8)] == [(1, 0)] * 7 + [(0, 1)]
    hybrid.check()
    hybrid.index.unpin(receipt)
    assert hybrid.evict("swa", 2) == (1, 1)


def test_a_page_left_behind_by_its_prefix_is_known_to_be_dead(hybrid: Rig) -> None:
    """Its window payload was pinned when FULL went: it stays, serves nothing, and goes first."""
    cursor = hybrid.insert("a").cursor
    receipt = hybrid.index.pin_pages(cursor, {"swa": np.array([0], np.int32)}, tier=DEVICE)
    hybrid.insert("wxyz")
    assert hybrid.evict("full", 5) == (5, 0)
    hybrid.check()
    hybrid.insert("wxyz", full=[])
    hybrid.index.touch(cursor, 1)
    hybrid.index.unpin(receipt)
    assert hybrid.boundary("a") == 0
    assert hybrid.evict("swa", 5) == (5, 0)
    assert not hybrid.index._tree.roots


def test_a_prompt_may_be_what_follows_a_cursor(full: Rig) -> None:
    """Only the continuation is given, and only that is compared; a stale cursor is refused."""
    cursor = full.insert("abcd").cursor
    slots = full.pools["full", DEVICE].alloc(3)
    assert slots is not None
    done = full.index.insert(full.namespace(), full.tokens("efg"), {"full": slots}, tier=DEVICE, after=cursor)
    assert (done.n_pages, done.cursor.boundary) == (7, 7)
    assert full.boundary("abcdefg") == 7
    found = full.index.match(full.namespace(), full.tokens("efX"), after=cursor)
    assert (found.n_pages, found.boundaries[DEVICE]) == (6, 6)
    assert full.index.match(full.namespace(), full.tokens("efX"), after=cursor, limit_pages=2).n_pages == 2
    with pytest.raises(ValueError, match="namespace"):
        full.index.match(full.namespace("other"), full.tokens("e"), after=cursor)
    full.evict("full", 4)
    with pytest.raises(StaleCursor):
        full.index.match(full.namespace(), full.tokens("e"), after=cursor)


def test_counts_equal_a_recount_after_every_step() -> None:
    """TREE-07: page 16, two thousand inserts of odd lengths; matches, pins, unpins, evictions between."""
    rig, rng = Rig({"full": WholePath()}, page_size=16), random.Random(3)
    receipts = []
    for step in range(2000):
        pages = "".join(rng.choice("ab") for _ in range(rng.randrange(7)))
        rig.insert(pages, tail=rng.randrange(16))
        match = rig.index.match(rig.namespace(), rig.tokens(pages))
        if rng.random() < 0.3:
            receipts.append(rig.index.pin(match.cursor, match.boundaries[DEVICE], tier=DEVICE))
        if receipts and rng.random() < 0.4:
            rig.index.unpin(receipts.pop(rng.randrange(len(receipts))))
        if rng.random() < 0.5:
            rig.evict("full", rng.randrange(1, 6))
        assert rig.index.resident("full", DEVICE) == rig.used("full")
        if step % 20 == 0:
            rig.check()
    for receipt in receipts:
        rig.index.unpin(receipt)
    rig.evict("full", 10_000)
    assert rig.index.resident("full", DEVICE) == rig.used("full") == 0
    rig.check()
