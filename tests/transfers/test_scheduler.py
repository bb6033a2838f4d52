"""The scheduler's order, its promises about bytes in flight, and its honesty about dead threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from controller.transfers.copies import CopyError, CopyTable
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import (
    Direction,
    SchedulerClosed,
    TransferCancelled,
    TransferScheduler,
)
from tests.transfers.gated import DEADLINE_S, GatedEngine, labelled

LOAD, STORE = Direction.LOAD, Direction.STORE


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    with GatedEngine().opened_at_the_end() as engine:
        yield engine


@pytest.fixture
def one(engine: GatedEngine) -> Iterator[TransferScheduler]:
    """One thread, chunks of one byte."""
    scheduler = TransferScheduler(engine, threads=1, chunk_bytes=1, store_patience_chunks=2)
    with engine.opened_at_the_end():
        yield scheduler
    assert scheduler.close(DEADLINE_S)


@pytest.fixture
def two(engine: GatedEngine) -> Iterator[TransferScheduler]:
    """Two threads, chunks of one byte."""
    scheduler = TransferScheduler(engine, threads=2, chunk_bytes=1)
    with engine.opened_at_the_end():
        yield scheduler
    assert scheduler.close(DEADLINE_S)


def error_of(future: Future[object] | Future[None]) -> BaseException | None:
    return future.exception(DEADLINE_S)


def test_loads_overtake_stores_between_chunks(one: TransferScheduler, engine: GatedEngine) -> None:
    one.submit(STORE, labelled(1, 3))
    first = engine.next()
    one.submit(LOAD, labelled(2, 2))
    first.land()
    assert [first.label, *engine.labels(4)] == [1, 2, 2, 1, 1]


def test_stores_age_and_do_not_starve(one: TransferScheduler, engine: GatedEngine) -> None:
    blocker = one.submit(LOAD, labelled(9))
    first = engine.next()
    one.submit(LOAD, labelled(2, 6))
    one.submit(STORE, labelled(1, 2))
    first.land()
    assert blocker.result(DEADLINE_S) is None
    assert engine.labels(8) == [2, 2, 1, 2, 2, 1, 2, 2]


def test_a_direction_is_served_in_order(one: TransferScheduler, engine: GatedEngine) -> None:
    one.submit(STORE, labelled(1))
    first = engine.next()
    for label in (2, 3, 4):
        one.submit(STORE, labelled(label, 2))
    first.land()
    assert engine.labels(6) == [2, 2, 3, 3, 4, 4]


def test_two_threads_share_the_chunks_of_one_table(two: TransferScheduler, engine: GatedEngine) -> None:
    future = two.submit(LOAD, labelled(1, 3))
    first, second = engine.next(), engine.next()
    assert first.thread != second.thread
    first.land()
    third = engine.next()
    third.land()
    assert not future.done()
    second.land()
    assert future.result(DEADLINE_S) is None


def test_then_runs_once_after_the_last_chunk_on_its_thread(
    two: TransferScheduler, engine: GatedEngine
) -> None:
    ran: list[int] = []

    def then() -> str:
        ran.append(threading.get_ident())
        return "sealed"

    future = two.submit(STORE, labelled(1, 2), then=then)
    first, last = engine.next(), engine.next()
    first.land()
    marker = two.submit(LOAD, labelled(7))
    engine.next().land()  # the thread of the first chunk has gone on
    assert marker.result(DEADLINE_S) is None
    assert not ran
    last.land()
    assert future.result(DEADLINE_S) == "sealed"
    assert ran == [last.thread]


def test_an_empty_table_still_runs_then(two: TransferScheduler) -> None:
    assert two.submit(LOAD, labelled(1, 0), then=lambda: 5).result(DEADLINE_S) == 5
    assert two.submit(STORE, labelled(1, 0)).result(DEADLINE_S) is None


def test_work_without_a_copy_waits_its_turn(one: TransferScheduler, engine: GatedEngine) -> None:
    order: list[str] = []
    one.submit(STORE, labelled(1))
    first = engine.next()
    seal = one.run(lambda: order.append("store"), direction=STORE)
    verify = one.run(lambda: order.append("load"))
    first.land()
    seal.result(DEADLINE_S)
    verify.result(DEADLINE_S)
    assert order == ["load", "store"]


def test_cancelling_what_has_not_begun_ends_at_once(one: TransferScheduler, engine: GatedEngine) -> None:
    one.submit(STORE, labelled(1))
    first = engine.next()
    future = one.submit(STORE, labelled(2, 5), then=lambda: pytest.fail("then ran"))
    assert one.cancel(future)
    assert isinstance(error_of(future), TransferCancelled)
    one.submit(STORE, labelled(3))
    first.land()
    assert engine.labels(1) == [3]
    assert one.counts().cancelled == 1


def test_cancelling_resolves_only_when_the_last_byte_has_landed(
    two: TransferScheduler, engine: GatedEngine
) -> None:
    future = two.submit(LOAD, labelled(1, 5), then=lambda: pytest.fail("then ran"))
    first, second = engine.next(), engine.next()
    assert two.cancel(future)
    assert two.cancel(future)
    assert not future.done()
    two.submit(LOAD, labelled(2))
    first.land()
    marker = engine.next()  # the first chunk's thread has left it behind
    assert marker.label == 2
    assert not future.done()
    second.land()
    assert isinstance(error_of(future), TransferCancelled)
    marker.land()
    assert not two.cancel(future)


def test_what_is_ending_can_no_longer_be_cancelled(one: TransferScheduler) -> None:
    begun, go = threading.Event(), threading.Event()

    def then() -> int:
        begun.set()
        assert go.wait(DEADLINE_S)
        return 3

    future = one.submit(STORE, labelled(1, 0), then=then)
    assert begun.wait(DEADLINE_S)
    assert not one.cancel(future)
    go.set()
    assert future.result(DEADLINE_S) == 3


def test_a_futures_own_cancel_does_nothing(one: TransferScheduler, engine: GatedEngine) -> None:
    """Else a caller that gives up waiting would make slots look free while bytes still move."""
    running = one.submit(LOAD, labelled(1))
    chunk = engine.next()
    queued = one.submit(LOAD, labelled(2))
    assert not running.cancel()
    assert not queued.cancel()
    chunk.land()
    assert engine.labels(1) == [2]
    assert running.result(DEADLINE_S) is None
    assert queued.result(DEADLINE_S) is None


async def test_an_event_loop_that_gives_up_waiting_stops_no_copy(
    one: TransferScheduler, engine: GatedEngine
) -> None:
    future = one.submit(LOAD, labelled(1), then=lambda: "landed")
    chunk = await asyncio.to_thread(engine.next)
    waiting = asyncio.wrap_future(future)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not future.done()
    chunk.land()
    assert await asyncio.wrap_future(future) == "landed"


def test_a_failed_chunk_fails_the_copy_when_the_others_have_landed(
    two: TransferScheduler, engine: GatedEngine
) -> None:
    future = two.submit(LOAD, labelled(1, 9), then=lambda: pytest.fail("then ran"))
    first, second = engine.next(), engine.next()
    first.land(CopyError("no such memory"))
    two.submit(LOAD, labelled(2))
    marker = engine.next()
    assert marker.label == 2  # the seven chunks that had not begun were dropped
    assert not future.done()
    second.land()
    assert str(error_of(future)) == "no such memory"
    marker.land()
    assert two.problems() == []
    assert two.counts().failed == 1


def test_the_first_error_is_the_one_that_is_told(two: TransferScheduler, engine: GatedEngine) -> None:
    future = two.submit(LOAD, labelled(1, 2))
    first, second = engine.next(), engine.next()
    first.land(CopyError("first"))
    two.submit(LOAD, labelled(2))
    marker = engine.next()
    second.land(CopyError("second"))
    assert str(error_of(future)) == "first"
    marker.land()


def test_what_then_raises_is_the_futures_error(one: TransferScheduler, engine: GatedEngine) -> None:
    def then() -> None:
        raise ValueError("cannot seal")

    future = one.submit(STORE, labelled(1), then=then)
    engine.next().land()
    assert str(error_of(future)) == "cannot seal"
    assert one.run(lambda: 1).result(DEADLINE_S) == 1
    assert (one.counts().failed, one.counts().done, one.problems()) == (1, 1, [])


def test_a_dead_thread_is_visible_and_the_other_goes_on(two: TransferScheduler, engine: GatedEngine) -> None:
    future = two.submit(LOAD, labelled(1))
    engine.next().land(SystemExit("out of the blue"))
    assert isinstance(error_of(future), SystemExit)
    two.submit(LOAD, labelled(2, 2))
    first = engine.next()
    first.land()
    second = engine.next()
    second.land()
    assert first.thread == second.thread
    problems = two.problems()
    assert "1 of 2 copy threads are dead" in problems[0]
    assert "out of the blue" in problems[1]


def test_when_the_last_thread_dies_nobody_waits_for_ever(engine: GatedEngine) -> None:
    scheduler = TransferScheduler(engine, threads=1, chunk_bytes=1)
    killed = scheduler.submit(LOAD, labelled(1))
    queued = scheduler.submit(STORE, labelled(2))
    engine.next().land(SystemExit("gone"))
    assert isinstance(error_of(killed), SystemExit)
    assert isinstance(error_of(queued), SchedulerClosed)
    with pytest.raises(SchedulerClosed):
        scheduler.submit(LOAD, labelled(3))
    assert "1 of 1" in scheduler.problems()[0]
    assert scheduler.close(DEADLINE_S)


def test_close_drops_what_has_not_begun_and_lets_the_rest_end(engine: GatedEngine) -> None:
    scheduler = TransferScheduler(engine, threads=1, chunk_bytes=1)
    whole = scheduler.submit(LOAD, labelled(1), then=lambda: "sealed")
    chunk = engine.next()
    queued = scheduler.submit(STORE, labelled(2))
    assert not scheduler.close(timeout_s=0)  # its copy is under way: the memory must stay
    assert isinstance(error_of(queued), SchedulerClosed)
    assert not whole.done()
    chunk.land()
    assert whole.result(DEADLINE_S) == "sealed"
    assert scheduler.close(DEADLINE_S)
    with pytest.raises(SchedulerClosed):
        scheduler.run(lambda: None)
    assert scheduler.problems() == []


def test_close_fails_a_copy_of_which_a_part_has_not_begun(engine: GatedEngine) -> None:
    scheduler = TransferScheduler(engine, threads=1, chunk_bytes=1)
    half = scheduler.submit(LOAD, labelled(1, 2), then=lambda: pytest.fail("then ran"))
    chunk = engine.next()
    assert not scheduler.close(timeout_s=0)
    assert not half.done()
    chunk.land()
    assert isinstance(error_of(half), SchedulerClosed)
    assert scheduler.close(DEADLINE_S)
    assert engine.nothing_waits()


def test_no_thread_is_left_behind() -> None:
    def n_threads() -> int:
        return sum(thread.name.startswith("hicache-copy") for thread in threading.enumerate())

    before = n_threads()
    with TransferScheduler(CpuCopyEngine(), threads=3) as scheduler:
        assert n_threads() == before + 3
        assert scheduler.run(lambda: 1).result(DEADLINE_S) == 1
    assert n_threads() == before


def test_queues_and_bytes_are_counted(one: TransferScheduler, engine: GatedEngine) -> None:
    one.submit(LOAD, labelled(1))
    first = engine.next()
    waiting = [one.submit(STORE, labelled(2, 3)), one.submit(STORE, labelled(3, 1))]
    assert (one.queued(LOAD), one.queued(STORE)) == (0, 2)
    first.land()
    assert engine.labels(4) == [2, 2, 2, 3]
    for future in waiting:
        future.result(DEADLINE_S)
    assert (one.counts().moved_bytes, one.counts().done, one.queued(STORE)) == (5, 3, 0)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"chunk_bytes": 0}, {"store_patience_chunks": 0}])
def test_settings_have_bounds(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TransferScheduler(CpuCopyEngine(), **wrong)


def test_many_copies_and_cancellations_each_end_once_and_move_right_bytes() -> None:
    rng = np.random.default_rng(11)
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    n_copies, each = 200, (1 << 20) // 200
    with TransferScheduler(CpuCopyEngine(), threads=2, chunk_bytes=700) as scheduler:
        futures = []
        for i in range(n_copies):
            at = np.arange(i * each, (i + 1) * each - 99, 100, dtype=np.uint64)
            table = CopyTable(
                at + np.uint64(source.ctypes.data),
                at + np.uint64(target.ctypes.data),
                np.full(len(at), 100, dtype=np.uint64),
            )
            futures.append(scheduler.submit(LOAD if i % 3 else STORE, table, then=lambda i=i: i))
            if i % 5 == 0:
                scheduler.cancel(futures[-1])
        done = [i for i, future in enumerate(futures) if error_of(future) is None]
        assert all(futures[i].result() == i for i in done)
        counts = scheduler.counts()
    assert counts.done == len(done) >= n_copies - n_copies // 5
    assert counts.done + counts.cancelled == n_copies
    for i in done:
        n_bytes = each // 100 * 100
        assert np.array_equal(target[i * each : i * each + n_bytes], source[i * each : i * each + n_bytes])
