"""The engine's cache, one scenario at a time."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine, tokens_of
from fake_lower import GARBAGE, PAGE_TOKENS, FakeTransfer, fill, key, make_layout, tag

from hicache.cache import UnifiedRadixCache, WritePolicy
from hicache.client import Found, Outcome, Prompt
from hicache.core.words import NO_SLOT, Tier


def l1_only(**slots: int) -> Engine:
    return Engine(lower=False, **slots)


def boundary_of(engine: Engine, *pages: int) -> int:
    """What a request for these pages (and a token more) would reuse."""
    running = engine.begin(tokens_of(*pages))
    assert running is not None
    engine.abort(running)
    return running.request.boundary


# ---- L1 by itself


def test_what_one_request_computed_the_next_reads() -> None:
    engine = l1_only(full=8, swa=8, mamba=4)
    engine.serve(tokens_of(1, 2, 3))
    running = engine.begin(tokens_of(1, 2, 3))
    assert running is not None
    assert running.request.boundary == 3
    assert running.request.cached_tokens == 12
    assert running.request.hit_pages == {Tier.DEVICE: 3, Tier.HOST: 0, Tier.STORAGE: 0}
    assert (running.request.slots["full"] != NO_SLOT).all()
    assert (running.request.slots["swa"] != NO_SLOT).tolist() == [False, True, True]
    assert (running.request.slots["mamba"] != NO_SLOT).tolist() == [False, False, True]


def test_the_loser_of_a_race_reads_the_winners_slots_and_its_own_are_free() -> None:
    """TREE-04: two requests compute the same prefix."""
    engine = l1_only(full=12)
    first, second = engine.begin(tokens_of(1, 2, 3, 4)), engine.begin(tokens_of(1, 2, 3, 4))
    assert first is not None
    assert second is not None
    assert engine.compute(first, 4)
    assert engine.compute(second, 4)
    assert engine.cache.counters.redundant_pages == 4
    assert second.request.slots["full"].tolist() == first.request.slots["full"].tolist()
    assert engine.free_slots() == {"full": 8}
    third = engine.cache.alloc("full", 8)
    assert third is not None
    engine.memory["full"][third] = GARBAGE
    engine.check()
    engine.cache.free("full", third)
    engine.finish(first)
    engine.finish(second)


def test_tail_tokens_are_told_counted_and_stay_the_callers() -> None:
    """TREE-11: page 4, a turn of 11 tokens: two pages cached, three tokens not."""
    engine = l1_only(full=4)
    tokens = tokens_of(1, 2, tail=3)
    running = engine.begin(tokens)
    assert running is not None
    slots = engine.cache.alloc("full", 3)
    assert slots is not None
    fill(engine.memory, running.prompt, "full", range(2), slots[:2])
    inserted = engine.cache.finish(running.request, tokens, {"full": slots[:2]})
    assert (inserted.n_pages, inserted.tail_tokens) == (2, 3)
    assert engine.cache.counters.uncached_tail_tokens == 3
    engine.cache.free("full", slots[2:])
    engine.running.clear()
    assert engine.cache.audit() == []
    for more in ((1, 2), (1, 2, 3)):
        assert boundary_of(engine, *more) == 2


def test_at_least_one_token_is_left_to_compute_and_state_and_depth_agree() -> None:
    """MAMBA-10: checkpoints at 3 and 4 pages; exactly 4 pages are asked for, then one token more."""
    engine = l1_only(full=8, mamba=4)
    engine.serve(tokens_of(1, 2, 3))
    engine.serve(tokens_of(1, 2, 3, 4))
    exactly = engine.begin(tokens_of(1, 2, 3, 4, tail=0), private=True)
    assert exactly is not None
    assert exactly.request.boundary == 3
    engine.abort(exactly)
    more = engine.begin(tokens_of(1, 2, 3, 4, tail=1), private=True)
    assert more is not None
    assert more.request.boundary == 4
    engine.abort(more)


def test_with_a_checkpoint_at_the_very_end_only_nothing_can_be_reused() -> None:
    """MAMBA-10, second part, and MAMBA-09: never a boundary that a component rejects."""
    engine = l1_only(full=8, mamba=4)
    engine.serve(tokens_of(1, 2, 3, 4))
    running = engine.begin(tokens_of(1, 2, 3, 4, tail=0))
    assert running is not None
    assert running.request.boundary == 0
    assert running.request.branching_boundary == 3
    assert engine.cache.counters.no_boundary == 1


def test_a_request_that_is_not_admitted_keeps_nothing() -> None:
    """MAMBA-04: matched, checkpoint copied to its own slot, then no room: a hundred times."""
    engine = l1_only(full=8, mamba=4)
    engine.serve(tokens_of(1, 2))
    before = engine.free_slots()
    for _ in range(100):
        running = engine.begin(tokens_of(1, 2, 3), private=True)
        assert running is not None
        assert running.request.boundary == 2
        engine.abort(running)
        assert engine.free_slots() == before


def test_the_checkpoint_is_copied_before_the_request_changes_it() -> None:
    engine = l1_only(full=8, mamba=4)
    engine.serve(tokens_of(1, 2))
    running = engine.begin(tokens_of(1, 2, 3), private=True)
    assert running is not None
    engine.memory["mamba"][running.private] = GARBAGE
    engine.check()
    assert boundary_of(engine, 1, 2) == 2


def test_without_a_slot_for_a_checkpoint_it_is_skipped_counted_and_the_rest_is_cached() -> None:
    """MAMBA-05: both slots are in use when a request wants to store a checkpoint."""
    engine = l1_only(full=16, mamba=2)
    engine.serve(tokens_of(1, 2))
    holder = engine.begin(tokens_of(1, 2, 3))
    assert holder is not None
    running = engine.begin(tokens_of(1, 2, 3, 4), private=True)
    assert running is not None
    assert running.request.boundary == 2
    assert engine.cache.checkpoint(running.request, "mamba") == NO_SLOT
    assert engine.cache.counters.checkpoints_skipped == 1
    assert engine.compute(running, 4, checkpoint=False)
    engine.abort(running)
    assert (boundary_of(engine, 1, 2, 3, 4), engine.cache.audit()) == (2, [])
    engine.abort(holder)
    engine.serve(tokens_of(1, 2, 3, 4, 5))
    assert boundary_of(engine, 1, 2, 3, 4, 5) == 5


def test_a_checkpoint_is_a_copy_of_the_private_slot() -> None:
    engine = l1_only(full=8, mamba=4)
    running = engine.begin(tokens_of(1, 2, 3), private=True)
    assert running is not None
    prompt = running.prompt
    engine.memory["mamba"][running.private] = tag(prompt, "mamba", 1)
    taken = engine.cache.checkpoint(running.request, "mamba")
    engine.memory["mamba"][running.private] = GARBAGE
    slots = engine.cache.alloc("full", 2)
    assert slots is not None
    fill(engine.memory, prompt, "full", range(2), slots)
    engine.cache.insert(
        running.request, prompt.tokens[:8], {"full": slots, "mamba": np.array([NO_SLOT, taken], np.int32)}
    )
    engine.check()
    assert boundary_of(engine, 1, 2) == 2


def test_a_private_slot_may_be_given_to_the_cache_at_the_end() -> None:
    engine = l1_only(full=8, mamba=4)
    running = engine.begin(tokens_of(1, 2), private=True)
    assert running is not None
    prompt, own = running.prompt, np.array([NO_SLOT, running.private], np.int32)
    slots = engine.cache.alloc("full", 2)
    assert slots is not None
    fill(engine.memory, prompt, "full", range(2), slots)
    fill(engine.memory, prompt, "mamba", range(1, 2), own[1:])
    offer = {"full": slots, "mamba": own}
    with pytest.raises(ValueError, match="belongs to REQUEST"):
        engine.cache.insert(running.request, prompt.tokens[:8], offer)
    engine.cache.finish(running.request, prompt.tokens[:8], offer)
    engine.running.clear()
    again = engine.begin(tokens_of(1, 2))
    assert again is not None
    assert again.request.slots["mamba"].tolist() == own.tolist()


def test_the_fork_of_a_shared_prefix_is_told_so_that_a_checkpoint_can_be_taken_there() -> None:
    """MAMBA-08: shared prefix of 3 pages, the only checkpoint at 5."""
    engine = l1_only(full=16, mamba=4)
    engine.serve(tokens_of(1, 2, 3, 4, 5))
    running = engine.begin(tokens_of(1, 2, 3, 7, 8))
    assert running is not None
    assert (running.request.boundary, running.request.branching_boundary) == (0, 3)
    assert engine.compute(running, 3)
    assert engine.compute(running, 5)
    engine.finish(running)
    assert boundary_of(engine, 1, 2, 3, 9, 9) == 3


def test_no_overlap_and_no_checkpoint_are_counted_apart() -> None:
    """MAMBA-11: whoever sends no checkpoints can see why nothing is reused."""
    engine = l1_only(full=16, mamba=4)
    running = engine.begin(tokens_of(1, 2))
    assert running is not None
    assert engine.compute(running, 2, checkpoint=False)
    engine.finish(running)
    counters = engine.cache.counters
    assert (counters.no_overlap, counters.no_boundary) == (1, 0)
    assert boundary_of(engine, 1, 2) == 0
    assert (counters.no_overlap, counters.no_boundary) == (1, 1)
    assert boundary_of(engine, 8, 9) == 0
    assert (counters.no_overlap, counters.no_boundary) == (2, 1)


def test_window_slots_behind_a_running_request_can_go_and_nothing_else() -> None:
    """SWA-06: the request's FULL is in use, its window has moved on."""
    engine = l1_only(full=8, swa=8)
    running = engine.begin(tokens_of(1, 2, 3, 4, 5, 6))
    assert running is not None
    for page in range(1, 7):
        assert engine.compute(running, page)
    assert engine.free_slots() == {"full": 2, "swa": 2}
    assert engine.cache.evict("swa", 6) == 4
    engine.check()
    assert engine.cache.evict("full", 6) == 0
    assert (running.request.slots["swa"] != NO_SLOT).sum() == 2
    engine.cache.advance(running.request, 7)
    assert (running.request.slots["swa"] != NO_SLOT).tolist() == [False] * 5 + [True]
    assert engine.cache.evict("swa", 6) == 1
    engine.finish(running)


def test_prompts_of_other_tenants_and_adapters_share_nothing() -> None:
    engine = Engine(full=16)
    engine.serve(tokens_of(1, 2, 3), salt="a")
    engine.serve(tokens_of(1, 2, 3), adapter="a")
    assert boundary_of(engine, 1, 2, 3) == 0
    mine = engine.begin(tokens_of(1, 2, 3), salt="a")
    assert mine is not None
    assert mine.request.boundary == 3


# ---- load-back


def in_host_only(*pages: int, **slots: int) -> Engine:
    """An engine whose prompt of these pages is in host memory and not in L1."""
    engine = Engine(**slots)
    engine.serve(tokens_of(*pages))
    engine.drop_l1()
    return engine


def test_what_left_l1_comes_back_from_the_host_byte_for_byte() -> None:
    """MAMBA-02: backed up, evicted, returned: each step is counted."""
    engine = in_host_only(1, 2, 3, full=4, swa=4, mamba=2)
    assert engine.cache.counters.backed_up_pages == 3 + 2 + 1
    running = engine.begin(tokens_of(1, 2, 3), private=True)
    assert running is not None
    assert running.request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 3, Tier.STORAGE: 0}
    assert engine.cache.counters.loaded_pages == 3 + 2 + 1
    assert engine.lower.leases == {}


def test_a_hit_may_be_joint_over_l1_and_the_host() -> None:
    engine = in_host_only(1, 2, 3, 4, full=6, swa=4, mamba=2)
    assert boundary_of(engine, 1, 2, 3, 4) == 4
    engine.cache.evict("full", 2)
    running = engine.begin(tokens_of(1, 2, 3, 4))
    assert running is not None
    assert running.request.hit_pages == {Tier.DEVICE: 2, Tier.HOST: 2, Tier.STORAGE: 0}
    load = engine.lower.loads[-1].placements
    assert {name: p.pages.tolist() for name, p in load.items()} == {
        "full": [2, 3],
        "swa": [2, 3],
        "mamba": [3],
    }


def test_the_boundary_is_the_joint_one_and_a_failed_load_leaves_what_l1_has() -> None:
    """SWA-10: FULL of 6 pages in the host, the window only around page 4; then the load fails."""
    engine = in_host_only(1, 2, 3, 4, 5, 6, full=6, swa=6)
    prompt = Prompt("", tokens_of(1, 2, 3, 4, 5, 6))
    for page in (4, 5):
        del engine.lower.host[key(prompt, "swa", page)]
    for page in (2, 3):
        engine.lower.host[key(prompt, "swa", page)] = tag(prompt, "swa", page)
    engine.lower.on_load = FakeTransfer.fail
    free = engine.free_slots()
    assert boundary_of(engine, 1, 2, 3, 4, 5, 6) == 0
    assert engine.free_slots() == free
    assert engine.cache.counters.loads_failed == 1
    engine.lower.on_load = FakeTransfer.succeed
    running = engine.begin(tokens_of(1, 2, 3, 4, 5, 6))
    assert running is not None
    assert running.request.boundary == 4
    load = engine.lower.loads[-1].placements
    assert {name: p.pages.tolist() for name, p in load.items()} == {"full": [0, 1, 2, 3], "swa": [2, 3]}


def test_a_load_without_room_is_refused_as_a_whole() -> None:
    """LOADBACK-01 and SWA-10: no L1 room, not even by eviction."""
    engine = in_host_only(1, 2, 3, full=4, swa=4)
    holder = engine.begin(tokens_of(7, 8))
    assert holder is not None
    assert engine.compute(holder, 2)
    free = engine.free_slots()
    assert boundary_of(engine, 1, 2, 3) == 0
    assert engine.cache.counters.loads_no_room == 1
    assert engine.free_slots() == free
    assert engine.lower.leases == {}
    engine.finish(holder)
    assert boundary_of(engine, 1, 2, 3) == 3


def test_loading_evicts_nothing_that_the_boundary_needs() -> None:
    """LOADBACK-01: L1 is full of the prompt's own head and of others' pages; the others' go."""
    engine = in_host_only(1, 2, 3, 4, full=4)
    assert boundary_of(engine, 1, 2, 3, 4) == 4
    engine.cache.evict("full", 2)
    engine.serve(tokens_of(8, 9))
    running = engine.begin(tokens_of(1, 2, 3, 4))
    assert running is not None
    assert running.request.boundary == 4
    assert running.request.hit_pages[Tier.DEVICE] == 2


def test_a_load_that_was_in_l1_before_leaves_nothing_behind_in_the_host() -> None:
    """LOADBACK-03: nothing of a load-back outlives it: no lease, no mark."""
    engine = in_host_only(1, 2, 3, full=4)
    assert boundary_of(engine, 1, 2, 3) == 3
    engine.drop_l1()
    assert engine.lower.leases == {}
    assert engine.lower.unsettled() == []


def hang(transfer: FakeTransfer) -> None:
    """The deadline passes."""


def test_a_late_load_is_not_waited_for_twice_and_its_slots_are_nobodys() -> None:
    """LOADBACK-02: who comes while a load is late goes on with what L1 has; one transfer only."""
    engine = in_host_only(1, 2, 3, full=8)
    engine.lower.on_load = hang
    for _ in range(5):
        assert boundary_of(engine, 1, 2, 3) == 0
    assert len(engine.lower.loads) == 1
    assert engine.cache.counters.loads_late == 1
    assert engine.cache.counters.loads_under_way == 4
    engine.lower.on_load = FakeTransfer.succeed
    engine.serve(tokens_of(9))
    assert boundary_of(engine, 9) == 1
    assert engine.cache.alloc("full", 8 - 3 + 1) is None, "slots under a load were given away"


def test_a_late_load_that_comes_to_a_good_end_serves_the_next_request() -> None:
    engine = in_host_only(1, 2, 3, full=8, mamba=2)
    engine.lower.on_load = hang
    assert boundary_of(engine, 1, 2, 3) == 0
    engine.lower.loads[0].succeed()
    running = engine.begin(tokens_of(1, 2, 3))
    assert running is not None
    assert running.request.hit_pages == {Tier.DEVICE: 3, Tier.HOST: 0, Tier.STORAGE: 0}
    assert engine.cache.counters.loads_adopted == 1
    assert engine.lower.leases == {}


def test_a_late_load_whose_prefix_has_left_l1_is_thrown_away_as_a_whole() -> None:
    engine = in_host_only(1, 2, 3, 4, full=8)
    assert boundary_of(engine, 1, 2, 3, 4) == 4
    engine.cache.evict("full", 2)
    engine.lower.on_load = hang
    assert boundary_of(engine, 1, 2, 3, 4) == 2
    assert engine.cache.evict("full", 2) == 2
    engine.lower.loads[-1].succeed()
    assert engine.cache.poll() == 1
    assert engine.cache.counters.loads_adopted == 0
    assert engine.free_slots() == {"full": 8}
    engine.check()


def test_a_late_load_of_what_was_computed_meanwhile_is_redundant() -> None:
    engine = in_host_only(1, 2, 3, full=8)
    engine.lower.on_load = hang
    engine.serve(tokens_of(1, 2, 3))
    engine.lower.loads[0].succeed()
    engine.cache.poll()
    assert engine.free_slots() == {"full": 5}
    engine.check()


def test_bytes_that_land_after_the_connection_was_lost_land_in_nobodys_slots() -> None:
    """The heart of it: a frozen daemon wakes up and writes; nobody was given these slots."""
    engine = in_host_only(1, 2, 3, full=6)
    engine.lower.on_load = FakeTransfer.lose
    assert boundary_of(engine, 1, 2, 3) == 0
    engine.lower.ready = False
    running = engine.begin(tokens_of(1, 2, 3))
    assert running is not None
    assert engine.compute(running, 3)
    assert engine.cache.alloc("full", 1) is None
    engine.lower.loads[0].settle()
    engine.check()
    assert engine.free_slots() == {"full": 0}
    assert engine.cache.poll() >= 1
    assert engine.free_slots() == {"full": 3}


@pytest.mark.parametrize(
    "twist",
    [
        lambda f: Found(f.lease, f.boundary + 9, f.load, 0, 0),
        lambda f: Found(None, f.boundary, f.load, 0, 0),
        lambda f: Found(f.lease, f.boundary, {"full": f.load["full"][1:]}, 0, 0),
        lambda f: Found(f.lease, f.boundary, {"full": f.load["full"][::-1]}, 0, 0),
        lambda f: Found(f.lease, f.boundary, {**f.load, "other": f.load["full"]}, 0, 0),
        lambda f: Found(f.lease, f.boundary, {"full": np.array([0, 1, 7], np.int32)}, 0, 0),
        lambda f: Found(f.lease, f.boundary, {"full": np.array([-1, 0, 1, 2], np.int32)}, 0, 0),
    ],
)
def test_an_answer_that_does_not_fit_together_is_a_miss(twist) -> None:
    engine = in_host_only(1, 2, 3, full=6)
    engine.lower.answer = twist
    assert boundary_of(engine, 1, 2, 3) == 0
    assert engine.cache.counters.lookups_inconsistent == 1
    assert engine.lower.loads == []


def test_an_answer_that_does_not_come_is_a_miss() -> None:
    engine = in_host_only(1, 2, 3, full=6)
    engine.lower.answer = lambda found: None
    assert boundary_of(engine, 1, 2, 3) == 0
    assert engine.cache.counters.lookups_unanswered == 1
    engine.lower.ready = False
    assert boundary_of(engine, 1, 2, 3) == 0
    assert engine.cache.counters.lookups_away == 1


def test_what_l1_has_whole_is_not_asked_for_below() -> None:
    engine = Engine(full=6)
    engine.serve(tokens_of(1, 2, 3))
    asked = engine.cache.counters.lookups
    assert boundary_of(engine, 1, 2, 3) == 3
    assert engine.cache.counters.lookups == asked


# ---- prefetch


def test_pages_that_a_prefetch_brought_count_as_storage() -> None:
    """OBS-04: by tier, and never twice. Two pages were in the host, two came from storage."""
    engine = in_host_only(1, 2, 3, 4, full=6)
    prompt = Prompt("", tokens_of(1, 2, 3, 4))
    for page in (2, 3):
        place = key(prompt, "full", page)
        engine.lower.stored[place] = engine.lower.host.pop(place)
    engine.cache.prefetch("q", tokens_of(1, 2, 3, 4))
    running = engine.begin(tokens_of(1, 2, 3, 4), name="q")
    assert running is not None
    assert running.request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 2, Tier.STORAGE: 2}
    assert sum(running.request.hit_pages.values()) == running.request.boundary


def queued_while_l1_still_had_it(*pages: int) -> Engine:
    """Request q was queued when L1 had four pages of it. Meanwhile they went from L1 and from host memory;
    storage has them."""
    engine = Engine(full=6)
    engine.serve(tokens_of(1, 2, 3, 4))
    engine.lower.stored.update(engine.lower.host)
    engine.lower.host.clear()
    engine.cache.prefetch("q", tokens_of(*pages))
    for prefetch in engine.lower.prefetches:
        prefetch.at_wait = lambda: None  # L1 had it: there was nothing to bring
    assert engine.cache.evict("full", 4) == 4
    return engine


@pytest.mark.parametrize("pages", [(1, 2, 3, 4, 5), (1, 2, 3, 4)])
def test_what_l1_lost_since_the_prefetch_was_asked_for_is_fetched_once_more(pages: tuple[int, ...]) -> None:
    engine = queued_while_l1_still_had_it(*pages)
    running = engine.begin(tokens_of(*pages), name="q")
    assert running is not None
    assert running.request.boundary == 4
    assert running.request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 4}
    assert engine.cache.counters.prefetches_again == 1


def test_nothing_is_fetched_once_more_that_is_there_or_was_never_promised() -> None:
    engine = Engine(full=6)
    engine.serve(tokens_of(1, 2, 3, 4))
    for pages in ((1, 2, 3, 4), (1, 2, 3, 4, 5), (7, 8)):
        engine.cache.prefetch("q", tokens_of(*pages))
        running = engine.begin(tokens_of(*pages), name="q")
        assert running is not None
        engine.abort(running)
    assert engine.cache.counters.prefetches_again == 0


def test_fetching_once_more_takes_no_more_time_than_the_prefetch_had(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = queued_while_l1_still_had_it(1, 2, 3, 4, 5), [100.0]
    monkeypatch.setattr("hicache.cache.cache.time.monotonic", lambda: now[0])

    def all_the_time() -> None:
        now[0] += 2.0

    engine.lower.prefetches[0].at_wait = all_the_time
    running = engine.begin(tokens_of(1, 2, 3, 4, 5), name="q")
    assert running is not None
    assert running.request.boundary == 0
    assert len(engine.lower.prefetches) == 1


def test_a_request_that_is_cancelled_while_queued_ends_its_prefetch() -> None:
    """PREFETCH-07, engine's side: nothing stays behind."""
    engine = Engine(full=6)
    engine.cache.prefetch("q", tokens_of(1, 2))
    engine.cache.prefetch("q", tokens_of(1, 2))
    first, second = engine.lower.prefetches
    assert first.cancelled
    assert not second.cancelled
    engine.cache.cancel("q")
    engine.cache.cancel("q")
    assert second.cancelled
    engine.cache.prefetch("p", tokens_of(1, 2))
    engine.cache.close()
    assert engine.lower.prefetches[-1].cancelled
    assert engine.lower.closed


def test_a_prefetch_that_is_not_answered_costs_a_miss() -> None:
    engine = Engine(full=6)
    engine.cache.prefetch("q", tokens_of(1, 2))
    engine.lower.prefetches[0].progress = None
    running = engine.begin(tokens_of(1, 2), name="q")
    assert running is not None
    assert engine.cache.counters.prefetches_unanswered == 1


def test_nothing_is_prefetched_for_what_l1_has_or_while_the_daemon_is_away() -> None:
    engine = Engine(full=6)
    engine.serve(tokens_of(1, 2))
    engine.cache.prefetch("q", tokens_of(1, 2))
    engine.lower.ready = False
    engine.cache.prefetch("p", tokens_of(7, 8))
    assert engine.lower.prefetches == []


# ---- write-through


def test_what_the_host_has_is_not_offered_again() -> None:
    engine = Engine(full=8, swa=8, mamba=4)
    engine.serve(tokens_of(1, 2, 3))
    engine.serve(tokens_of(1, 2, 3))
    engine.serve(tokens_of(1, 2, 3, 4))
    offered = [{n: p.pages.tolist() for n, p in b.placements.items()} for b in engine.lower.backups]
    assert offered[0] == {"full": [0, 1, 2], "swa": [1, 2], "mamba": [2]}
    assert offered[-1] == {"full": [3], "swa": [3], "mamba": [3]}
    assert len(offered) == 2


def test_what_came_from_the_host_is_not_offered_to_it() -> None:
    engine = in_host_only(1, 2, 3, full=8)
    n = len(engine.lower.backups)
    engine.serve(tokens_of(1, 2, 3))
    assert len(engine.lower.backups) == n


def test_another_daemon_is_offered_everything_again() -> None:
    """LIFE-02, engine's side: after a restart what L1 has goes down again as it is used."""
    engine = Engine(full=8)
    engine.serve(tokens_of(1, 2, 3))
    engine.lower.restart()
    engine.serve(tokens_of(1, 2, 3))
    engine.drop_l1()
    assert boundary_of(engine, 1, 2, 3) == 3


def test_pages_under_a_backup_cannot_go_until_it_is_settled() -> None:
    """WRITE-09 by a double that reads its source late: it must read what was computed."""
    engine = Engine(full=16)
    engine.lower.on_backup = hang
    engine.serve(tokens_of(1, 2, 3, 4))
    assert engine.cache.evict("full", 16) == 0
    (backup,) = engine.lower.backups
    taken = engine.cache.alloc("full", 12)
    assert taken is not None
    engine.memory["full"][taken] = GARBAGE
    backup.succeed()
    engine.cache.free("full", taken)
    engine.drop_l1()
    assert engine.free_slots() == {"full": 16}
    running = engine.begin(tokens_of(1, 2, 3, 4))
    assert running is not None
    assert running.request.boundary == 4


def test_a_backup_that_was_lost_keeps_its_pages_until_nothing_can_read_them() -> None:
    engine = Engine(full=16)
    engine.lower.on_backup = FakeTransfer.lose
    engine.serve(tokens_of(1, 2))
    assert engine.cache.evict("full", 16) == 0
    engine.lower.backups[0].settle()
    assert engine.cache.evict("full", 16) == 2
    assert engine.cache.counters.backups_failed == 1


def test_backups_hold_no_more_than_their_share_and_go_on_prefix_first() -> None:
    """A burst waits in a bounded list, not in pinned pages; parents go before children."""
    engine = Engine(share=0.25, full=16, swa=16)
    engine.lower.on_backup = hang
    running = engine.begin(tokens_of(1, 2, 3, 4, 5, 6, 7))
    assert running is not None
    for page in range(1, 8):
        assert engine.compute(running, page)
    engine.finish(running)
    assert sum(len(b.placements["swa"].pages) for b in engine.lower.backups) == 4
    assert max(int(b.placements["full"].pages[-1]) for b in engine.lower.backups) == 3
    first = len(engine.lower.backups)
    engine.serve(tokens_of(8, 9))
    assert len(engine.lower.backups) == first
    assert engine.cache.counters.backups_put_off == 2
    engine.lower.on_backup = FakeTransfer.succeed
    for backup in engine.lower.backups[:first]:
        backup.succeed()
    while engine.cache.poll():
        pass
    engine.drop_l1()
    assert boundary_of(engine, 1, 2, 3, 4, 5, 6, 7) == 7
    assert boundary_of(engine, 8, 9) == 2


def test_a_pinned_page_counts_with_the_prefix_that_it_keeps_and_one_path_may_always_go() -> None:
    engine = Engine(share=0.25, full=24)
    engine.lower.on_backup = hang
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 7, 8))
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert [b.placements["full"].pages.tolist() for b in engine.lower.backups] == [list(range(8)), [8]]
    engine.serve(tokens_of(11))
    assert len(engine.lower.backups) == 2, "another path went although one holds more than the share"
    assert engine.cache.alloc("full", 24 - 9 - 1) is not None
    for backup in list(engine.lower.backups):
        backup.succeed()
    engine.cache.poll()
    assert len(engine.lower.backups) == 3
    engine.serve(tokens_of(12))
    assert len(engine.lower.backups) == 4, "two short paths fit the share together"


def test_backups_wait_for_the_daemon_and_the_list_is_bounded() -> None:
    engine = Engine(full=16)
    engine.lower.ready = False
    for n in range(70):
        engine.serve(tokens_of(100 + n))
    assert engine.lower.backups == []
    assert engine.cache.counters.backups_forgotten == 6
    engine.lower.ready = True
    engine.cache.poll()
    engine.drop_l1()
    assert boundary_of(engine, 169) == 1, "the latest was not offered when the daemon came"


def test_refused_pages_are_offered_again_and_a_broken_chain_from_its_root() -> None:
    """TREE-10, engine's side: the host has lost the parents; both go again, parents first."""
    engine = Engine(full=16)
    engine.serve(tokens_of(1, 2))
    engine.lower.host.clear()
    engine.serve(tokens_of(1, 2, 3))
    engine.cache.poll()
    engine.cache.poll()
    assert engine.lower.backups[-1].placements["full"].pages.tolist() == [0, 1, 2]
    assert engine.cache.counters.refused_pages == 1


def test_no_write_policy_no_backup() -> None:
    engine = Engine(full=4)
    cache = UnifiedRadixCache(
        make_layout(full=4), model="m", client=engine.lower, write_policy=WritePolicy.NONE
    )
    request = cache.begin("r", tokens_of(1))
    slots = cache.alloc("full", 1)
    assert slots is not None
    cache.finish(request, tokens_of(1, tail=0), {"full": slots})
    assert engine.lower.backups == []


# ---- misuse raises before anything changes


def test_slots_that_are_not_the_callers_are_refused() -> None:
    engine = Engine(full=8, mamba=2)
    running = engine.begin(tokens_of(1, 2))
    assert running is not None
    slots = engine.cache.alloc("full", 2)
    assert slots is not None
    fill(engine.memory, running.prompt, "full", range(2), slots)
    other = int(np.setdiff1d(np.arange(8), slots)[0])
    tokens = running.prompt.tokens[: 2 * PAGE_TOKENS]
    for wrong, message in [
        ([slots[0], other], "belongs to NOBODY"),
        ([slots[0], slots[0]], "named twice"),
        ([slots[0], 8], "within"),
        ([slots[0]], "shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.cache.insert(running.request, tokens, {"full": np.array(wrong, np.int32)})
    with pytest.raises(ValueError, match="no component"):
        engine.cache.insert(running.request, tokens, {"swa": slots})
    engine.check()
    engine.cache.insert(running.request, tokens, {"full": slots})
    with pytest.raises(ValueError, match="belongs to INDEX"):
        engine.cache.free("full", slots)
    with pytest.raises(ValueError, match="must begin with"):
        engine.cache.insert(running.request, tokens[::-1].copy(), {"full": slots})
    engine.check()


def test_private_slots_are_checked_before_anything_happens() -> None:
    engine = Engine(full=8, mamba=2)
    for wrong, message in [({"full": 0}, "keeps no checkpoints"), ({"mamba": 1}, "belongs to NOBODY")]:
        with pytest.raises(ValueError, match=message):
            engine.cache.begin("r", tokens_of(1), private=wrong)
    own = engine.cache.alloc("mamba", 1)
    assert own is not None
    request = engine.cache.begin("r", tokens_of(1), private={"mamba": int(own[0])})
    with pytest.raises(ValueError, match="belongs to REQUEST"):
        engine.cache.free("mamba", own)
    engine.cache.abort(request)
    with pytest.raises(ValueError, match="has ended"):
        engine.cache.abort(request)
    assert engine.free_slots() == {"full": 8, "mamba": 2}
    without = UnifiedRadixCache(make_layout(full=4, mamba=2), model="m")
    own = without.alloc("mamba", 1)
    assert own is not None
    with pytest.raises(ValueError, match="copy_slot"):
        without.begin("r", tokens_of(1), private={"mamba": int(own[0])})


def test_a_copy_that_raises_leaves_nothing_behind() -> None:
    engine = Engine(full=8, mamba=2)
    engine.serve(tokens_of(1))
    free = engine.free_slots()

    def broken(component: str, source: int, target: int) -> None:
        raise RuntimeError("kernel launch failed")

    engine.cache._copy_slot = broken
    with pytest.raises(RuntimeError, match="kernel"):
        engine.begin(tokens_of(1), private=True)
    assert engine.free_slots() == free
    engine.check()


def test_a_transfer_that_is_over_is_never_waited_for() -> None:
    """A ticket that reports failure and settlement at once (nothing was sent) costs nothing."""
    engine = in_host_only(1, 2, full=4)
    engine.lower.on_load = FakeTransfer.fail
    assert boundary_of(engine, 1, 2) == 0
    assert engine.lower.loads[0].outcome is Outcome.FAILED
    assert engine.lower.leases == {}
    assert engine.free_slots() == {"full": 4}
