"""When pages go down: selective, write-back, prompts only, and changing one's mind."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine, tokens_of
from fake_lower import PAGE_TOKENS, FakeTransfer, key

from hicache.cache import SwitchRefused, WritePolicy, WriteRules
from hicache.client import Prompt
from hicache.core.words import Tier

BACK, SELECTIVE = WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE


def hang(transfer: FakeTransfer) -> None:
    """The deadline passes."""


def boundary_of(engine: Engine, *pages: int) -> int:
    running = engine.begin(tokens_of(*pages))
    assert running is not None
    boundary = running.request.boundary
    engine.abort(running)
    return boundary


def in_host(engine: Engine, component: str, *pages: int) -> list[int]:
    prompt = Prompt("", tokens_of(*pages))
    return [n for n in range(len(pages)) if key(prompt, component, n) in engine.lower.host]


# ---- selective


def test_chunks_of_one_request_are_one_use() -> None:
    """WRITE-06: after the first request nothing, after the second what it matched; a split keeps the counts
    of both halves."""
    engine = Engine(policy=SELECTIVE, full=16, swa=16, mamba=8)
    first = engine.begin(tokens_of(1, 2, 3, 4))
    assert first is not None
    for to in (1, 2, 3, 4):
        assert engine.compute(first, to)
    engine.finish(first)
    assert engine.lower.backups == []
    engine.serve(tokens_of(1, 2, 7))  # the checkpoint at page 2 serves it
    assert in_host(engine, "full", 1, 2, 3, 4) == [0, 1]
    assert in_host(engine, "mamba", 1, 2, 3, 4) == [1]
    engine.serve(tokens_of(1, 2, 3, 4, 5))
    assert in_host(engine, "full", 1, 2, 3, 4, 5) == [0, 1, 2, 3]
    assert in_host(engine, "full", 1, 2, 7) == [0, 1]
    engine.drop_l1()
    assert boundary_of(engine, 1, 2, 3, 4, 5) == 4


def test_a_request_that_comes_back_is_not_another_one() -> None:
    """WRITE-06: retracted and begun anew under its id; one that never inserts has used nothing."""
    engine = Engine(policy=SELECTIVE, full=16)
    for _ in range(3):
        running = engine.begin(tokens_of(1, 2, 3), name="same")
        assert running is not None
        assert engine.compute(running, 3)
        engine.abort(running)
    for _ in range(3):
        assert boundary_of(engine, 1, 2, 3) == 3
    assert engine.lower.backups == []


def test_whom_the_page_of_another_served_has_used_it() -> None:
    """Two requests compute the same page side by side: two uses of the one that stays."""
    engine = Engine(policy=SELECTIVE, full=16)
    first, second = engine.begin(tokens_of(1)), engine.begin(tokens_of(1))
    assert first is not None
    assert second is not None
    assert engine.compute(first, 1)
    assert engine.compute(second, 1)
    assert in_host(engine, "full", 1) == [0]


def test_prompts_that_come_once_are_not_written_and_counting_costs_no_more_memory() -> None:
    """WRITE-10: the counts are two fixed arrays, one entry a slot of L1; a page that left starts anew."""
    engine = Engine(policy=SELECTIVE, full=8)
    ledger = engine.cache._ledger
    before = sum(a.nbytes for a in (*ledger._uses.values(), *ledger._user.values()))
    for n in range(1000):
        engine.serve(tokens_of(n, n))
    assert engine.lower.backups == []
    assert sum(a.nbytes for a in (*ledger._uses.values(), *ledger._user.values())) == before == 8 * 9
    engine.serve(tokens_of(0, 0))
    assert engine.lower.backups == []


@pytest.mark.parametrize("n", [1, 3])
def test_the_number_of_uses_is_a_rule(n: int) -> None:
    engine = Engine(policy=SELECTIVE, rules=WriteRules(min_uses=n), full=8)
    for use in range(1, 4):
        engine.serve(tokens_of(1, 2))
        assert len(in_host(engine, "full", 1, 2)) == (2 if use >= n else 0)
    for wrong in ({"min_uses": 0}, {"min_uses": 256}, {"wait_s": -1.0}, {"wait_s": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            WriteRules(**wrong)  # type: ignore[arg-type]


# ---- write-back


def test_nothing_is_written_before_it_must_go_and_nothing_goes_before_it_is_written() -> None:
    engine = Engine(policy=BACK, full=4)
    engine.serve(tokens_of(1, 2, 3, 4))
    engine.cache.poll()
    assert engine.lower.backups == []
    assert engine.cache.evict("full", 1) == 1
    assert in_host(engine, "full", 1, 2, 3, 4) == [0, 1, 2, 3]
    n = len(engine.lower.backups)
    assert engine.cache.evict("full", 3) == 3, "clean pages"
    assert len(engine.lower.backups) == n, "what is below already was written again"
    assert boundary_of(engine, 1, 2, 3, 4) == 4


def test_the_head_is_written_with_the_first_descendant() -> None:
    """WRITE-07: P stays in L1 because it is hot; below there is a chain from the root all the same."""
    engine = Engine(policy=BACK, full=8)
    engine.serve(tokens_of(1, 2, 3, 4))
    engine.serve(tokens_of(1, 2, 5, 6))
    assert engine.cache.evict("full", 2) == 2
    assert in_host(engine, "full", 1, 2, 3, 4) == [0, 1, 2, 3]
    assert in_host(engine, "full", 1, 2, 5, 6) == [0, 1]


def test_an_inner_window_is_copied_down_before_it_goes() -> None:
    """SWA-08: A's window is that of an inner run of pages when it goes."""
    engine = Engine(policy=BACK, full=16, swa=16)
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6))
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16))
    assert engine.cache.evict("swa", 2) == 2
    assert in_host(engine, "swa", 1, 2, 3, 4, 5, 6) == [4, 5]
    engine.drop_l1()
    running = engine.begin(tokens_of(1, 2, 3, 4, 5, 6, 99))
    assert running is not None
    assert running.request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 6, Tier.STORAGE: 0}
    assert engine.cache.counters.dropped_refused_pages == 0


def test_an_inner_window_that_the_host_refuses_is_counted_and_the_boundary_is_lower() -> None:
    """SWA-08, the other half."""
    engine = Engine(policy=BACK, full=16, swa=16)
    engine.lower.room = {"swa": 0}
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6))
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 11, 12))
    assert engine.cache.evict("swa", 2) == 2
    assert engine.cache.counters.dropped_refused_pages == 2
    engine.lower.room = {}
    engine.drop_l1()
    assert boundary_of(engine, 1, 2, 3, 4, 5, 6, 99) == 0
    assert boundary_of(engine, 1, 2, 3, 4, 5, 6, 11, 12) == 8


@pytest.mark.parametrize(("room", "boundary", "dropped"), [(4, 4, 0), (0, 0, 1)])
def test_an_inner_checkpoint_is_copied_down_before_it_goes(room: int, boundary: int, dropped: int) -> None:
    """MAMBA-01: two slots, and a third checkpoint comes; with room below and without."""
    engine = Engine(policy=BACK, full=32, mamba=2)
    engine.lower.room = {"mamba": room}
    engine.serve(tokens_of(1, 2, 3, 4))
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 7, 8))
    engine.serve(tokens_of(21, 22))
    assert boundary_of(engine, 1, 2, 3, 4, 99) == boundary
    assert boundary_of(engine, 1, 2, 3, 4, 98) == boundary
    assert engine.cache.counters.dropped_refused_pages == dropped


def test_what_the_host_has_no_room_for_is_dropped_and_never_shown_as_a_hit() -> None:
    """WRITE-03: counted once a page, tried once, and the slots are free."""
    engine = Engine(policy=BACK, full=4)
    engine.lower.room = {"full": 0}
    engine.serve(tokens_of(1, 2, 3))
    assert engine.cache.evict("full", 3) == 3
    assert engine.cache.counters.dropped_refused_pages == 3
    assert len(engine.lower.backups) == 1
    assert boundary_of(engine, 1, 2, 3) == 0
    assert engine.lower.loads == []


def test_what_was_refused_is_tried_again_when_it_has_been_used_again() -> None:
    engine = Engine(policy=BACK, full=4, mamba=4)
    engine.lower.room = {"full": 0, "mamba": 0}
    holder = engine.begin(tokens_of(9))
    assert holder is not None
    engine.serve(tokens_of(1, 2, 3))
    assert engine.cache.evict("mamba", 0) == 0
    assert engine.cache.evict("full", 1) == 1
    engine.lower.room = {}
    engine.serve(tokens_of(1, 2, 3))
    engine.abort(holder)
    engine.drop_l1()
    assert boundary_of(engine, 1, 2, 3) == 3


def test_slots_are_free_only_when_their_copy_has_ended() -> None:
    """WRITE-05: four paths must go, the copies are slow; what is handed out meanwhile is nobody's source."""
    engine = Engine(policy=BACK, full=8)
    engine.lower.on_backup = hang
    for n in range(4):
        engine.serve(tokens_of(n, n))
    assert engine.cache.alloc("full", 8) is None
    assert engine.cache.alloc("full", 1) is None
    engine.check()
    for backup in engine.lower.backups:
        backup.succeed()
    engine.lower.on_backup = FakeTransfer.succeed
    slots = engine.cache.alloc("full", 8)
    assert slots is not None
    engine.memory["full"][slots] = 0xEE
    engine.cache.free("full", slots)
    for n in range(4):
        running = engine.begin(tokens_of(n, n))  # checks every byte
        assert running is not None
        assert running.request.boundary == 2
        engine.abort(running)


def test_a_call_that_needs_slots_waits_for_a_copy_that_is_quick_enough() -> None:
    engine = Engine(policy=BACK, full=2)
    engine.serve(tokens_of(1, 2))

    def soon(transfer: FakeTransfer) -> None:
        transfer.at_wait = FakeTransfer.succeed

    engine.lower.on_backup = soon
    assert engine.cache.alloc("full", 2) is not None
    assert engine.cache.counters.backup_waits == 1


def test_while_the_daemon_is_away_pages_go_without_and_are_counted() -> None:
    """The engine never waits for trouble."""
    engine = Engine(policy=BACK, full=4)
    engine.lower.ready = False
    engine.serve(tokens_of(1, 2, 3))
    assert engine.cache.alloc("full", 4) is not None
    assert engine.cache.counters.dropped_away_pages == 3
    assert engine.lower.backups == []


def test_a_copy_that_fails_is_tried_once_and_its_pages_go() -> None:
    engine = Engine(policy=BACK, full=4)
    engine.lower.on_backup = FakeTransfer.fail
    engine.serve(tokens_of(1, 2, 3))
    assert engine.cache.evict("full", 4) == 3
    assert engine.cache.counters.dropped_refused_pages == 3
    assert engine.cache.counters.backups_failed == 1


def test_a_host_that_has_lost_the_parents_gets_them_again() -> None:
    engine = Engine(policy=BACK, full=8)
    engine.serve(tokens_of(1, 2, 3, 4))
    assert engine.cache.evict("full", 1) == 1
    engine.lower.host.clear()
    engine.serve(tokens_of(1, 2, 3, 4))
    assert engine.cache.evict("full", 1) == 1
    engine.drop_l1()
    assert engine.cache.counters.dropped_refused_pages == 0
    assert in_host(engine, "full", 1, 2, 3, 4) == [0, 1, 2, 3]


def test_a_load_with_both_tiers_full_is_whole_or_refused() -> None:
    """LOADBACK-01: room in L1 means copies to a host that is full; A comes back whole, or not at all, and
    the pages that it needs are not what goes for it."""
    for room in range(3, 9):
        engine = Engine(policy=BACK, full=4, mamba=2)
        engine.serve(tokens_of(1, 2, 3))
        engine.drop_l1()
        engine.lower.room = {"full": room, "mamba": room}
        engine.serve(tokens_of(5, 6, 7))
        running = engine.begin(tokens_of(1, 2, 3))
        assert running is not None
        assert running.request.boundary == 3
        assert running.request.hit_pages[Tier.HOST] == 3
        engine.abort(running)
        expected = 3 if room >= 6 else 0
        engine.drop_l1()
        assert boundary_of(engine, 5, 6, 7) == expected
        assert engine.cache.counters.dropped_refused_pages >= (0 if room >= 6 else 1)


def test_the_engine_lets_copies_hold_no_more_than_their_share() -> None:
    engine = Engine(policy=BACK, share=0.25, full=16, swa=16)
    engine.lower.on_backup = hang
    for n in range(4):
        engine.serve(tokens_of(n, n, n, n))
    assert engine.cache.alloc("swa", 16) is None
    assert sum(len(b.placements["swa"].pages) for b in engine.lower.backups) <= 4


# ---- prompts only


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, BACK])
def test_output_is_written_when_it_is_part_of_a_prompt(policy: WritePolicy) -> None:
    engine = Engine(policy=policy, rules=WriteRules(output=False), full=16)

    def turn(*pages: int, n_prompt: int) -> None:
        cache, tokens = engine.cache, tokens_of(*pages)
        request = cache.begin(f"r{len(pages)}", tokens[: n_prompt * PAGE_TOKENS + 1])
        slots = cache.alloc("full", len(pages) - request.boundary)
        assert slots is not None
        table = np.concatenate((request.slots["full"], slots))
        cache.finish(request, tokens[: len(pages) * PAGE_TOKENS], {"full": table})

    turn(1, 2, 3, 4, n_prompt=2)
    engine.drop_l1()
    assert in_host(engine, "full", 1, 2, 3, 4) == [0, 1]
    turn(1, 2, 3, 4, n_prompt=2)
    turn(1, 2, 3, 4, 5, 6, n_prompt=5)
    engine.drop_l1()
    assert in_host(engine, "full", 1, 2, 3, 4, 5, 6) == [0, 1, 2, 3, 4]
    assert engine.cache.counters.dropped_refused_pages == 0
    assert engine.cache.counters.dropped_away_pages == 0


# ---- switching


def test_a_switch_that_would_break_a_promise_is_refused_and_changes_nothing() -> None:
    engine = Engine(full=16)
    writing = engine.cache.writing
    assert writing is not None
    engine.lower.on_backup = hang
    engine.serve(tokens_of(1, 2))
    with pytest.raises(SwitchRefused, match="run or wait"):
        writing.switch(WritePolicy.NONE)
    assert writing.policy is WritePolicy.WRITE_THROUGH
    engine.lower.backups[0].succeed()
    engine.cache.poll()
    writing.switch(BACK)
    engine.lower.on_backup = FakeTransfer.succeed
    engine.serve(tokens_of(1, 2, 3, 4))
    for policy in (WritePolicy.NONE, WritePolicy.WRITE_THROUGH, SELECTIVE):
        with pytest.raises(SwitchRefused, match="2 pages"):
            writing.switch(policy)
    writing.switch(BACK)
    assert engine.cache.evict("full", 1) == 1
    writing.switch(WritePolicy.NONE)
    n = len(engine.lower.backups)
    engine.serve(tokens_of(7, 8))
    engine.drop_l1()
    assert len(engine.lower.backups) == n
    assert engine.cache.counters.dropped_away_pages == 0
