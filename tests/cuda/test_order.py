"""Order between the engine's streams and ours: what must wait does, and what does not is caught.

The fake device finds an access that nothing orders whether or not it came out right, so each law here has a
counterpart that leaves the wait out and is caught.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from controller.memory.cuda import CudaError
from controller.transfers.copies import CopyError
from controller.transfers.cuda.engine import Always, DeviceCopyEngine
from controller.transfers.cuda.lanes import Lanes
from controller.transfers.cuda.ready import ReadyError, ReadyEvents
from controller.transfers.scheduler import Direction, TransferScheduler
from tests.cuda.fake_driver import DEADLINE_S, POISON, FakeCuda
from tests.cuda.test_engines import engine_on
from tests.transfers.engine_laws import table_of

PAGE = 4096


class Bench:
    """An engine's page on the device, a frame in host memory, and a copy engine between them."""

    def __init__(self, *, kernel: bool = False, seed: int = 0) -> None:
        self.cuda = FakeCuda(seed=seed)
        self.page = self.cuda.array(PAGE)
        self.frame = np.zeros(PAGE, dtype=np.uint8)
        self.cuda.open_memory(0, self.cuda.export(self.page))
        self.cuda.register_host(self.frame.ctypes.data, PAGE)
        host = range(self.frame.ctypes.data, self.frame.ctypes.data + PAGE)
        self.engine: DeviceCopyEngine = engine_on(
            self.cuda, Always(kernel=True) if kernel else None, host=host
        )
        self.compute = self.cuda.open_stream(0, urgent=False)

    def fill(self, value: int) -> None:
        """The engine's forward pass writes the page."""
        self.cuda.engine_kernel(
            self.compute, f"fill with {value}", writes=(self.page,), act=lambda: self.page.fill(value)
        )

    def store(self) -> None:
        self.engine.copy(table_of(self.page, self.frame, [(0, 0, PAGE)]))

    def load(self) -> None:
        self.engine.copy(table_of(self.frame, self.page, [(0, 0, PAGE)]))

    def recorded(self) -> bytes:
        event = self.cuda.open_event(0)
        self.cuda.record(0, event, self.compute)
        return self.cuda.export_event(event)


@pytest.fixture(params=[False, True], ids=["cuda", "cuda-kernel"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(kernel=request.param)


@pytest.fixture
def ready(bench: Bench) -> Iterator[ReadyEvents]:
    events = ReadyEvents(bench.cuda)
    yield events
    assert events.close(DEADLINE_S)


def test_a_backup_reads_what_was_written_before_the_ready_event(bench: Bench, ready: ReadyEvents) -> None:
    """WRITE-09: the fill is still queued when the backup is asked for."""
    bench.cuda.hold(bench.compute)
    bench.fill(7)
    waiting = ready.when("engine", 0, bench.recorded())
    assert not waiting.done()
    bench.cuda.let_go(bench.compute)
    waiting.result(DEADLINE_S)
    bench.store()
    assert (bench.frame == 7).all()
    assert bench.cuda.violations == []


def test_a_backup_that_does_not_wait_is_caught_while_the_fill_is_queued(bench: Bench) -> None:
    bench.cuda.hold(bench.compute)
    bench.fill(7)
    bench.store()
    assert "has not run" in bench.cuda.violations[0]
    assert (bench.frame == POISON).all()


def test_a_backup_that_does_not_wait_is_caught_also_when_it_comes_out_right(bench: Bench) -> None:
    bench.fill(7)
    bench.cuda.run()
    bench.store()
    assert "nothing orders them" in bench.cuda.violations[0]


def test_a_thousand_rounds_of_fill_backup_and_reuse(bench: Bench, ready: ReadyEvents) -> None:
    """WRITE-09: the page is filled anew as soon as its backup has ended."""
    event = bench.cuda.open_event(0)
    handle = bench.cuda.export_event(event)
    for round_ in range(1000):
        value = round_ % 251
        bench.fill(value)
        bench.cuda.record(0, event, bench.compute)
        ready.when("engine", 0, handle).result(DEADLINE_S)
        bench.store()
        assert (bench.frame == value).all()
    assert bench.cuda.violations == []
    assert bench.cuda.calls.count("import_event") == 1


def test_a_load_waits_for_kernels_that_still_read_the_slots(bench: Bench, ready: ReadyEvents) -> None:
    bench.cuda.hold(bench.compute)
    bench.cuda.engine_kernel(bench.compute, "the last user of the slot", reads=(bench.page,))
    waiting = ready.when("engine", 0, bench.recorded())
    bench.cuda.let_go(bench.compute)
    waiting.result(DEADLINE_S)
    bench.load()
    assert bench.cuda.violations == []


def test_a_load_that_does_not_wait_for_them_is_caught(bench: Bench) -> None:
    bench.cuda.hold(bench.compute)
    bench.cuda.engine_kernel(bench.compute, "the last user of the slot", reads=(bench.page,))
    bench.load()
    assert len(bench.cuda.violations) == 1


def test_a_layer_is_told_after_its_bytes(bench: Bench) -> None:
    """The engine's stream waits for the cell, which the host writes when the copy has ended."""
    cells = np.zeros(1, dtype=np.uint64)
    bench.frame[:] = 9
    seen: list[int] = []
    bench.cuda.wait_value(bench.compute, cells, 0, 1)
    bench.cuda.engine_kernel(
        bench.compute, "attention", reads=(bench.page,), act=lambda: seen.append(int(bench.page[0]))
    )
    bench.cuda.run()
    assert seen == []
    bench.load()
    cells[0] = 1
    bench.cuda.run()
    assert seen == [9]
    assert bench.cuda.violations == []


def test_a_layer_that_is_told_before_its_bytes_is_caught(bench: Bench) -> None:
    """The copy is queued, and even runs, but nobody saw its end before the cell was written."""
    cells = np.zeros(1, dtype=np.uint64)
    lane = bench.cuda.open_stream(0, urgent=True)
    bench.cuda.copy(0, lane, bench.page.ctypes.data, bench.frame.ctypes.data, PAGE)
    bench.cuda.hold(bench.compute)
    bench.cuda.run()
    cells[0] = 1
    bench.cuda.wait_value(bench.compute, cells, 0, 1)
    bench.cuda.engine_kernel(bench.compute, "attention", reads=(bench.page,))
    bench.cuda.let_go(bench.compute)
    bench.cuda.run()
    assert "nothing orders them" in bench.cuda.violations[0]


def test_an_event_on_the_stream_orders_as_well(bench: Bench) -> None:
    """The detector knows device-side waits too: no host sees anything here."""
    lane = bench.cuda.open_stream(0, urgent=False)
    event = bench.cuda.open_event(0)
    bench.fill(5)
    bench.cuda.record(0, event, bench.compute)
    bench.cuda.wait_event(lane, event)
    bench.cuda.copy(0, lane, bench.frame.ctypes.data, bench.page.ctypes.data, PAGE)
    bench.cuda.run()
    assert bench.cuda.violations == []
    assert (bench.frame == 5).all()


def test_a_store_of_freed_memory_is_caught(bench: Bench) -> None:
    lane = bench.cuda.streams()[1]
    bench.cuda.hold(lane)
    bench.cuda.copy(0, lane, bench.frame.ctypes.data, bench.page.ctypes.data, PAGE)
    bench.cuda.drop(bench.page)
    assert "freed before it ran" in bench.cuda.violations[0]


def test_loads_and_stores_of_the_same_bytes_at_once_are_caught(bench: Bench) -> None:
    """Nobody orders the two lanes: the controller never copies a slot both ways at once."""
    load, store = bench.cuda.streams()[:2]
    bench.cuda.copy(0, load, bench.page.ctypes.data, bench.frame.ctypes.data, PAGE)
    bench.cuda.copy(0, store, bench.frame.ctypes.data, bench.page.ctypes.data, PAGE)
    bench.cuda.run()
    assert bench.cuda.violations


# ---- lanes ------------------------------------------------------------------------------------------


def test_loads_and_stores_have_streams_of_their_own(bench: Bench) -> None:
    load, store = bench.cuda.streams()[:2]
    bench.cuda.hold(store)
    bench.load()
    storing = threading.Thread(target=bench.store)
    storing.start()
    bench.cuda.let_go(store)
    storing.join(DEADLINE_S)
    assert not storing.is_alive()
    assert load != store


@pytest.mark.parametrize("call", ["copy", "record", "wait"])
def test_a_failed_call_is_an_error_and_what_was_queued_has_landed(call: str) -> None:
    """The first piece is queued when the call for the second one fails."""
    bench = Bench()
    bench.engine = engine_on(bench.cuda, pinned=False)
    bench.cuda.fail(call, after=1 if call == "copy" else 0)
    bench.page[:] = 3
    with pytest.raises(CopyError, match="fake 2"):
        bench.engine.copy(table_of(bench.page, bench.frame, [(0, 1, 100), (200, 305, 100)]))
    assert all(bench.cuda.idle(stream) for stream in bench.cuda.streams())
    assert (bench.frame[1:101] == 3).all()
    bench.store()
    assert bench.engine.problem == ""


def test_a_lost_context_is_said_and_nothing_is_tried_again(bench: Bench) -> None:
    bench.cuda.fail("record", code=700)
    with pytest.raises(CopyError):
        bench.store()
    assert "restart the daemon" in bench.engine.problem
    calls = len(bench.cuda.calls)
    with pytest.raises(CopyError, match="context is lost"):
        bench.load()
    assert len(bench.cuda.calls) == calls


def test_events_are_used_again(bench: Bench) -> None:
    for _ in range(20):
        bench.store()
        bench.load()
    assert bench.cuda.calls.count("open_event") == 1


def test_everything_is_given_back() -> None:
    cuda = FakeCuda()
    lanes = Lanes(cuda, 0)
    lanes.run(Direction.LOAD, lambda stream: None)
    lanes.close()
    lanes.close()
    assert cuda.leftovers() == []


# ---- under the scheduler ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", [False, True], ids=["cuda", "cuda-kernel"])
def test_copies_of_many_threads_land_in_any_order_of_streams(seed: int, kernel: bool) -> None:
    cuda = FakeCuda(seed=seed)
    device, host = cuda.array(64 * PAGE), np.zeros(64 * PAGE, dtype=np.uint8)
    cuda.open_memory(0, cuda.export(device))
    cuda.register_host(host.ctypes.data, host.nbytes)
    engine = engine_on(
        cuda,
        Always(kernel=True) if kernel else None,
        host=range(host.ctypes.data, host.ctypes.data + host.nbytes),
    )
    rng = np.random.default_rng(seed)
    host[: 32 * PAGE] = rng.integers(0, 256, 32 * PAGE, dtype=np.uint8)
    device[32 * PAGE :] = rng.integers(0, 256, 32 * PAGE, dtype=np.uint8)
    with TransferScheduler(engine, threads=3, chunk_bytes=2 * PAGE) as scheduler:
        futures = []
        for i in range(0, 32, 4):
            here = [(PAGE * (i + k) + k, PAGE * (i + k) + k, PAGE - 2 * k) for k in range(4)]
            there = [(PAGE * (32 + i + k) + k, PAGE * (32 + i + k) + k, PAGE - 2 * k) for k in range(4)]
            futures.append(scheduler.submit(Direction.LOAD, table_of(host, device, here)))
            futures.append(scheduler.submit(Direction.STORE, table_of(device, host, there)))
        for future in futures:
            future.result(DEADLINE_S)
    for page in range(64):
        k = page % 4
        inside = slice(PAGE * page + k, PAGE * (page + 1) - k)
        assert np.array_equal(host[inside], device[inside])
    assert cuda.violations == []


# ---- ready events -----------------------------------------------------------------------------------


def test_an_event_of_a_dead_engine_is_an_error_and_the_thread_goes_on(
    bench: Bench, ready: ReadyEvents
) -> None:
    with pytest.raises(CudaError):
        ready.when("engine", 0, b"gone" + bytes(60)).result(DEADLINE_S)
    ready.when("engine", 0, bench.recorded()).result(DEADLINE_S)
    assert ready.problem == ""


def test_one_busy_engine_holds_up_no_other(bench: Bench, ready: ReadyEvents) -> None:
    other = bench.cuda.open_stream(0, urgent=False)
    bench.cuda.hold(bench.compute)
    bench.fill(1)
    busy = ready.when("busy", 0, bench.recorded())
    event = bench.cuda.open_event(0)
    bench.cuda.record(0, event, other)
    ready.when("idle", 0, bench.cuda.export_event(event)).result(DEADLINE_S)
    assert not busy.done()
    assert busy.cancel()


def test_events_are_bounded_and_forgotten_with_their_engine(bench: Bench) -> None:
    events = ReadyEvents(bench.cuda, max_events=2)
    handles = [bench.recorded() for _ in range(3)]
    for handle in handles[:2] * 2:
        events.when("engine", 0, handle).result(DEADLINE_S)
    with pytest.raises(ReadyError, match="2 events are open"):
        events.when("engine", 0, handles[2]).result(DEADLINE_S)
    events.forget("engine")
    assert bench.cuda.calls.count("close_event") == 2
    events.when("engine", 0, handles[2]).result(DEADLINE_S)
    assert events.close(DEADLINE_S)
    with pytest.raises(ReadyError, match="stopping"):
        events.when("engine", 0, handles[0]).result(DEADLINE_S)
