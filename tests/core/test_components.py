"""Windows and checkpoints in the index (SWA and MAMBA scenarios, as far as the index decides them)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.core.coverage import Checkpoint, SlidingWindow, WholePath
from hicache.core.layout import ComponentSpec, Kind
from hicache.core.pools import SlotPool
from hicache.core.words import NO_SLOT, PageArray, Tier

from .rig import Rig

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE
A40 = "".join(chr(0x4E00 + n) for n in range(40))
B40 = "".join(chr(0x5E00 + n) for n in range(40))


def pages(*numbers: int) -> PageArray:
    return np.array(numbers, dtype=np.int32)


def test_the_window_pool_keeps_all_its_slots(hybrid: Rig) -> None:
    """SWA-01: 500 rounds of insert, evict the window, insert again, evict a random part."""
    rng = random.Random(1)
    for _ in range(500):
        hybrid.insert("abcdefgh")
        hybrid.evict("swa", 8)
        hybrid.insert("abcdefgh")
        hybrid.evict("swa", rng.randrange(1, 9))
        if rng.random() < 0.2:
            hybrid.evict("full", rng.randrange(1, 9))
        hybrid.check()


def test_evicting_the_window_of_one_half_leaves_its_neighbour(hybrid: Rig) -> None:
    """SWA-02: cannot happen as told, for a slot belongs to one page; what is reported is what came free."""
    hybrid.insert("abcd")
    hybrid.insert("abXY")
    head = hybrid.index.match(hybrid.namespace(), hybrid.tokens("abcd"))
    receipt = hybrid.index.pin_pages(head.cursor, {"swa": pages(2, 3)}, tier=DEVICE)
    free = hybrid.pools["swa", DEVICE].n_free
    freed, short = hybrid.evict("swa", 100)
    assert (freed, short) == (4, 96)
    assert hybrid.pools["swa", DEVICE].n_free - free == freed
    assert hybrid.resident("abcd", "swa") == [2, 3]
    hybrid.index.unpin(receipt)


def test_freeing_entries_without_a_slot_frees_nothing_twice() -> None:
    """SWA-03."""
    pool = SlotPool(8)
    mine = pool.alloc(4)
    assert mine is not None
    pool.free(np.array([mine[0], NO_SLOT, mine[2], NO_SLOT, NO_SLOT], dtype=np.int32))
    assert pool.n_free == 6
    rest = pool.alloc(6)
    assert rest is not None
    assert len({*rest.tolist(), int(mine[1]), int(mine[3])}) == 8


def test_a_window_below_a_page_keeps_the_last_page(rigs: list[Rig]) -> None:
    """SWA-04: 16 tokens of window on pages of 64: the last page serves, released ones are tombstones."""
    coverage = ComponentSpec("swa", Kind.SWA, 16).coverage(64)
    rig = Rig({"full": WholePath(), "swa": coverage}, page_size=64)
    rigs.append(rig)
    for n in (1, 2, 3):
        rig.insert("abc"[:n], swa=[n - 1])
        rig.evict("swa", min(1, n - 1))
        assert rig.boundary("abc"[:n]) == n
        assert rig.resident("abc"[:n], "swa") == [n - 1]


def test_window_eviction_spares_the_last_window_of_idle_branches(hybrid: Rig) -> None:
    """SWA-05: payload outside the inserted end's window goes first; a hole costs exactly its reach."""
    hybrid.insert(A40)
    hybrid.insert(B40)
    busy = hybrid.index.match(hybrid.namespace(), hybrid.tokens(B40))
    for _ in range(5):
        hybrid.index.touch(busy.cursor, 40)
    assert hybrid.evict("swa", 20) == (20, 0)
    assert hybrid.boundary(A40 + "x") == 40
    assert hybrid.boundary(B40 + "x") == 40
    assert hybrid.evict("swa", 52) == (52, 0)
    assert hybrid.boundary(A40 + "x") == 40
    assert hybrid.boundary(B40 + "x") == 40


def test_a_hole_in_the_last_window_is_the_boundary(hybrid: Rig) -> None:
    """SWA-05, negative control: page 37 lacks its window payload; the answer is 37, not 40 and not 0."""
    cursor = hybrid.insert(A40).cursor
    keep = np.array([n for n in range(40) if n != 37], dtype=np.int32)
    receipt = hybrid.index.pin_pages(cursor, {"swa": keep}, tier=DEVICE)
    assert hybrid.evict("swa", 100) == (1, 99)
    assert hybrid.boundary(A40 + "x") == 37
    hybrid.index.unpin(receipt)


def test_a_window_released_early_may_go_while_full_is_pinned(rigs: list[Rig]) -> None:
    """SWA-06."""
    rig = Rig({"full": WholePath(), "swa": SlidingWindow(2)})
    rigs.append(rig)
    cursor = rig.insert("abcdef").cursor
    every = np.arange(6, dtype=np.int32)
    receipt = rig.index.pin_pages(cursor, {"full": every, "swa": every}, tier=DEVICE)
    assert rig.evict("swa", 4) == (0, 4)
    rig.index.unpin_before(receipt, "swa", 4)
    assert rig.evict("swa", 4) == (4, 0)
    assert rig.resident("abcdef", "swa") == [4, 5]
    assert rig.resident("abcdef", "full") == list(range(6))
    assert rig.boundary("abcdef") == 6
    rig.insert("abcdefg")
    rig.index.unpin(receipt)
    assert rig.boundary("abcdefg") == 7


def test_a_window_hit_is_a_use_and_no_empty_leaf_stays(hybrid: Rig) -> None:
    """SWA-07."""
    hybrid.insert("abcd")
    hybrid.insert("wxyz")
    hybrid.index.touch(hybrid.index.match(hybrid.namespace(), hybrid.tokens("abcd")).cursor, 4)
    hybrid.evict("swa", 1)
    assert hybrid.boundary("abcd") == 4
    assert hybrid.boundary("wxyz") < 4
    hybrid.evict("full", 4)
    assert hybrid.boundary("wxyz") == 0
    assert hybrid.used("swa") == 4, "the window went with the pages it stood on"
    assert len(list(hybrid.index._occupancy.nodes())) == 1


def test_the_boundary_is_the_best_of_all_components_not_of_full(rigs: list[Rig]) -> None:
    """SWA-10: FULL of ten pages on the host, windows only of pages 4 and 5: six, and nothing in L1."""
    rig = Rig({"full": WholePath(), "swa": SlidingWindow(2)}, tiers=(DEVICE, HOST))
    rigs.append(rig)
    load(rig, "abcdefghij", HOST, full=list(range(10)), swa=[4, 5])
    found = rig.index.match(rig.namespace(), rig.tokens("abcdefghijk"))
    assert dict(found.boundaries) == {DEVICE: 0, HOST: 6}
    assert found.branching_boundary == 10


def load(rig: Rig, prompt: str, tier: Tier, **which: list[int]) -> None:
    """Bring pages into a tier by reservation."""
    placements = {}
    for name, numbers in which.items():
        slots = rig.pools[name, tier].alloc(len(numbers))
        assert slots is not None
        placements[name] = (pages(*numbers), slots)
    rig.index.publish(rig.index.reserve(rig.namespace(), rig.tokens(prompt), placements, tier=tier))


def three_tiers(rigs: list[Rig]) -> Rig:
    rig = Rig({"full": WholePath(), "mamba": Checkpoint()}, tiers=(DEVICE, HOST, STORAGE))
    rigs.append(rig)
    return rig


def test_a_checkpoint_evicted_from_l1_serves_from_l2(rigs: list[Rig]) -> None:
    """MAMBA-01: and where L2 has none either, the boundary is honestly 0."""
    for backed_up in (True, False):
        rig = three_tiers(rigs)
        rig.insert("abcd", mamba=[3])
        if backed_up:
            load(rig, "abcd", HOST, full=[0, 1, 2, 3], mamba=[3])
        rig.insert("abcdefgh", mamba=[7])
        rig.insert("zyx", mamba=[2])
        rig.evict("mamba", 1)
        for prompt in ("abcdY", "abcdefZ"):
            assert rig.boundary(prompt) == (4 if backed_up else 0)


def test_what_is_backed_up_stays_known_when_l1_lets_go(rigs: list[Rig]) -> None:
    """MAMBA-02: pruning looks at every component in every tier."""
    rig = three_tiers(rigs)
    rig.insert("abcdefgh", mamba=[7])
    load(rig, "abcdefgh", HOST, full=list(range(8)), mamba=[7])
    rig.free(rig.index.drop(DEVICE).freed, DEVICE)
    assert rig.used("full") == rig.used("mamba") == 0
    assert dict(rig.index.match(rig.namespace(), rig.tokens("abcdefghi")).boundaries) == {
        DEVICE: 0,
        HOST: 8,
        STORAGE: 8,
    }


def test_the_boundary_is_where_the_checkpoint_is(recurrent: Rig) -> None:
    """MAMBA-03, MAMBA-09: never deeper than the newest checkpoint, however deep FULL matches."""
    recurrent.insert("abcdef", mamba=[3])
    assert recurrent.boundary("abcdef") == 4
    assert recurrent.boundary("abcdefg") == 4
    recurrent.insert("uvwxyz", mamba=[])
    assert recurrent.boundary("uvwxyz") == 0


def test_no_checkpoint_to_spare_is_reported_and_full_is_cached_all_the_same(recurrent: Rig) -> None:
    """MAMBA-05, MAMBA-06: pinned checkpoints are passed over; the reply says how much is short."""
    cursor = recurrent.insert("abcd", mamba=[3]).cursor
    receipt = recurrent.index.pin(cursor, 4, tier=DEVICE)
    assert recurrent.evict("mamba", 1) == (0, 1)
    recurrent.insert("abcdef", mamba=[])
    assert recurrent.resident("abcdef", "full") == list(range(6))
    assert recurrent.boundary("abcdef") == 4
    recurrent.index.unpin(receipt)
    assert recurrent.evict("mamba", 1) == (1, 0)
    assert recurrent.resident("abcdef", "full") == list(range(6))


def test_a_hit_refreshes_the_checkpoint_it_used_and_no_other(recurrent: Rig) -> None:
    """MAMBA-07: both sessions keep their deepest checkpoint."""
    for session in ("abcdef", "uvwxyz"):
        for depth in (2, 4, 6):
            recurrent.insert(session[:depth], mamba=[depth - 1])
    recurrent.index.touch(recurrent.index.match(recurrent.namespace(), recurrent.tokens("abcdef")).cursor, 6)
    assert recurrent.evict("mamba", 3) == (3, 0)
    assert recurrent.boundary("abcdef") == 6
    assert recurrent.boundary("uvwxyz") == 6


def test_the_fork_where_a_checkpoint_is_wanted_is_named(recurrent: Rig) -> None:
    """MAMBA-08, MAMBA-11: boundary 0, and FULL's overlap as the branching boundary; without any overlap
    the branching boundary is 0 too, so that the two kinds of miss can be told apart."""
    shared = "abcdefghij"
    recurrent.insert(shared + "UV", mamba=[11])
    found = recurrent.index.match(recurrent.namespace(), recurrent.tokens(shared + "WX"))
    assert (found.boundaries[DEVICE], found.branching_boundary) == (0, 10)
    assert recurrent.index.match(recurrent.namespace(), recurrent.tokens("zz")).branching_boundary == 0
    recurrent.insert(shared, mamba=[9])
    assert recurrent.boundary(shared + "YZ") == 10


@pytest.mark.parametrize(
    ("checkpoints", "n_tokens", "expected"), [([2, 3], 64, 3), ([3], 64, 0), ([3], 65, 4), ([2, 3], 65, 4)]
)
def test_a_token_left_to_compute_moves_every_component_alike(
    rigs: list[Rig], checkpoints: list[int], n_tokens: int, expected: int
) -> None:
    """MAMBA-10: page 16; the limit that leaves one token to compute is a page boundary for all."""
    rig = Rig({"full": WholePath(), "mamba": Checkpoint()}, page_size=16)
    rigs.append(rig)
    rig.insert("abcd", mamba=checkpoints)
    tokens = rig.tokens("abcd", tail=1)[:n_tokens]
    found = rig.index.match(rig.namespace(), tokens, limit_pages=(n_tokens - 1) // 16)
    assert found.boundaries[DEVICE] == expected


def test_a_prefetch_reaches_to_the_deepest_checkpoint_in_storage(rigs: list[Rig]) -> None:
    """MAMBA-12: FULL of twelve pages and one checkpoint at 8 in storage, four pages and their checkpoint
    on the host: 8 with storage, 4 without, and hashes go on from the page before."""
    rig = Rig({"full": WholePath(), "mamba": Checkpoint()}, tiers=(HOST, STORAGE))
    rigs.append(rig)
    prompt = "abcdefghijkl"
    load(rig, prompt, HOST, full=list(range(12)), mamba=[3])
    cursor = rig.index.match(rig.namespace(), rig.tokens(prompt)).cursor
    rig.index.mark_stored(cursor, "full", np.arange(12, dtype=np.int32))
    rig.index.mark_stored(cursor, "mamba", pages(7))
    rig.evict("full", 8, HOST)
    found = rig.index.match(rig.namespace(), rig.tokens(prompt))
    assert dict(found.boundaries) == {HOST: 4, STORAGE: 8}
    whole = rig.index.hashes(found.cursor, 0, 12)
    assert np.array_equal(rig.index.hashes(found.cursor, 4, 8), whole[4:8])
    rig.index.forget_stored(found.cursor, "mamba", pages(7))
    found = rig.index.match(rig.namespace(), rig.tokens(prompt))
    assert dict(found.boundaries) == {HOST: 4, STORAGE: 4}


def test_the_deepest_owner_in_a_tier_goes_first(rigs: list[Rig]) -> None:
    """TREE-09: copies on the host always form a prefix, whatever L1 holds beneath."""
    rig = Rig({"full": WholePath()}, tiers=(DEVICE, HOST))
    rigs.append(rig)
    for prompt in ("ab", "abcd", "abcdef"):
        rig.insert(prompt)
        load(rig, prompt, HOST, full=[len(prompt) - 2, len(prompt) - 1])
    rig.free(rig.index.drop(DEVICE).freed, DEVICE)
    assert rig.evict("full", 1, HOST) == (1, 0)
    rig.insert("abcdef")
    assert rig.evict("full", 1, HOST) == (1, 0)
    assert rig.resident("abcdef", "full", HOST) == [0, 1, 2, 3]
    load(rig, "abcdef", HOST, full=[4, 5])
    rig.free(rig.index.drop(DEVICE).freed, DEVICE)
    for left in range(5, -1, -1):
        assert rig.evict("full", 1, HOST) == (1, 0)
        assert rig.resident("abcdef", "full", HOST) == list(range(left))


def test_payload_that_lost_its_prefix_goes_first(rigs: list[Rig]) -> None:
    """Dead weight: a window whose FULL page storage forgot serves nothing and is the next victim."""
    rig = Rig({"full": WholePath(), "swa": SlidingWindow(2)}, tiers=(HOST, STORAGE))
    rigs.append(rig)
    load(rig, "abcd", HOST, full=[0, 1, 2, 3], swa=[2, 3])
    load(rig, "wxyz", HOST, full=[0, 1, 2, 3], swa=[2, 3])
    cursor = rig.index.match(rig.namespace(), rig.tokens("wxyz")).cursor
    rig.index.mark_stored(cursor, "full", np.arange(4, dtype=np.int32))
    rig.index.touch(cursor, 4)
    receipt = rig.index.pin_pages(cursor, {"swa": pages(2, 3)}, tier=HOST)
    rig.evict("full", 4, HOST)
    rig.evict("full", 4, HOST)
    rig.index.forget_stored(cursor, "full", pages(3))
    rig.index.unpin(receipt)
    rig.check()
    load(rig, "abcd", HOST, full=[0, 1, 2, 3], swa=[2, 3])
    assert rig.evict("swa", 1, HOST) == (1, 0)
    assert rig.resident("wxyz", "swa", HOST) == [2]


def test_what_depends_on_a_lost_page_goes_in_the_same_decision(hybrid: Rig) -> None:
    hybrid.insert("abcd")
    hybrid.insert("abXY")
    done = hybrid.index.evict("full", DEVICE, 3)
    hybrid.free(done.freed, DEVICE)
    assert {name: len(slots) for name, slots in done.freed.items()} == {"full": 3, "swa": 3}
    assert (done.n_freed, done.short) == (3, 0)


def test_a_plan_of_victims_gives_way_to_pins_and_uses(hybrid: Rig) -> None:
    """In a large node victims are planned ahead; a page of the plan that was pinned or used since stays."""
    prompt = "".join(chr(0x4E00 + n) for n in range(2000))
    cursor = hybrid.insert(prompt).cursor

    def planned() -> int:
        """The page that would go next."""
        assert hybrid.evict("swa", 1) == (1, 0)
        (node,) = hybrid.index._occupancy.nodes()
        assert node.plans is not None
        (plan,) = node.plans.values()
        return int(plan.pages[plan.used])

    page = planned()
    receipt = hybrid.index.pin_pages(cursor, {"swa": pages(page)}, tier=DEVICE)
    assert hybrid.evict("swa", 1) == (1, 0)
    assert page in hybrid.resident(prompt, "swa")
    hybrid.check()
    hybrid.index.unpin(receipt)
    page = planned()
    hybrid.index.touch(cursor, page + 1)
    assert hybrid.evict("swa", 1) == (1, 0)
    assert page in hybrid.resident(prompt, "swa")
    hybrid.check()
    assert hybrid.evict("swa", 1900) == (1900, 0)
    assert hybrid.boundary(prompt) == 2000
