"""Pinned host memory: in chunks, with progress, and never silently less than all."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.memory.pinning import PinnedBuffer, pin, spread
from controller.memory.slab import HostSlab
from controller.transfers.scheduler import Direction, TransferScheduler
from tests.cuda.fake_driver import DEADLINE_S, FakeCuda
from tests.cuda.test_engines import engine_on
from tests.transfers.engine_laws import table_of

PAGE = mmap.PAGESIZE
NBYTES = 10 * PAGE


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    with HostSlab(NBYTES, reserve_bytes=0) as slab:
        yield slab


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_everything_is_pinned_once_and_given_back(slab: HostSlab, cuda: FakeCuda) -> None:
    pinning = pin(slab, cuda, chunk_bytes=3 * PAGE)
    assert sorted(cuda.registered.values()) == [PAGE, 3 * PAGE, 3 * PAGE, 3 * PAGE]
    assert (pinning.pinned_bytes, pinning.whole, pinning.problem) == (NBYTES, True, "")
    assert pinning.unpin() == []
    assert pinning.unpin() == []
    assert cuda.registered == {}


def test_progress_rises_to_all(slab: HostSlab, cuda: FakeCuda) -> None:
    """MEMORY-07: a start that pins shows how far it is."""
    told: list[int] = []
    pin(slab, cuda, chunk_bytes=4 * PAGE, threads=1, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == NBYTES


def test_a_start_that_is_stopped_leaves_nothing_pinned(slab: HostSlab, cuda: FakeCuda) -> None:
    """LIFE-04: SIGTERM while pinning."""

    def stop(done_bytes: int) -> None:
        if done_bytes >= 4 * PAGE:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pin(slab, cuda, chunk_bytes=2 * PAGE, progress=stop)
    assert cuda.registered == {}


def test_chunks_are_pinned_side_by_side(slab: HostSlab, cuda: FakeCuda) -> None:
    """MEMORY-07: not one after the other. Each waits until all three are there."""
    together = threading.Barrier(3)

    class Meeting:
        def register_host(self, address: int, nbytes: int) -> None:
            together.wait(DEADLINE_S)
            cuda.register_host(address, nbytes)

    pinning = pin(slab, Meeting(), chunk_bytes=4 * PAGE, threads=3)  # type: ignore[arg-type]
    assert pinning.whole


@pytest.mark.parametrize(("extent", "chunks"), [(2 * PAGE, [4, 4, 2]), (7 * PAGE, [7, 3]), (100, [5, 5])])
def test_chunks_end_on_extents_where_pages_allow_it(
    slab: HostSlab, cuda: FakeCuda, extent: int, chunks: list[int]
) -> None:
    pin(slab, cuda, chunk_bytes=5 * PAGE, extent_bytes=extent)
    assert [cuda.registered[start] // PAGE for start in sorted(cuda.registered)] == chunks


def test_a_refused_chunk_is_said_and_not_hidden(slab: HostSlab, cuda: FakeCuda) -> None:
    """MEMORY-04: the register call fails beyond some bytes; what is pinned stays in use."""
    cuda.fail("register_host", after=2)
    pinning = pin(slab, cuda, chunk_bytes=2 * PAGE, threads=1)
    assert (pinning.pinned_bytes, pinning.whole, pinning.n_failed) == (4 * PAGE, False, 1)
    assert f"{4 * PAGE} of {NBYTES} bytes are pinned" in pinning.problem
    assert "memlock" in pinning.problem
    pinning.unpin()
    assert cuda.registered == {}


def test_bytes_are_right_whatever_was_pinned(slab: HostSlab, cuda: FakeCuda) -> None:
    """MEMORY-04: never stale bytes. The driver refuses batches that span registrations, so none may."""
    cuda.fail("register_host", after=3)
    pinning = pin(slab, cuda, chunk_bytes=2 * PAGE, threads=1)
    frame = np.frombuffer(slab.buffer, dtype=np.uint8)
    page = cuda.array(NBYTES)
    cuda.open_memory(0, cuda.export(page))
    page[:] = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    engine = engine_on(
        cuda, host=range(slab.address, slab.address + NBYTES), seams=pinning.seams, pinned=pinning.whole
    )
    with TransferScheduler(engine, threads=2) as scheduler:
        table = table_of(page, frame, [(1, 1, NBYTES - 2)])
        scheduler.submit(Direction.STORE, table).result(20)
    assert np.array_equal(frame[1:-1], page[1:-1])
    assert cuda.violations == []
    del frame


def test_a_batch_never_spans_two_registrations(slab: HostSlab, cuda: FakeCuda) -> None:
    pinning = pin(slab, cuda, chunk_bytes=2 * PAGE)
    frame = np.frombuffer(slab.buffer, dtype=np.uint8)
    page = cuda.array(NBYTES, fill=8)
    cuda.open_memory(0, cuda.export(page))
    pieces = [(0, 0, 3 * PAGE), (4 * PAGE, 4 * PAGE, 5 * PAGE)]
    host = range(slab.address, slab.address + NBYTES)
    engine_on(cuda, host=host, seams=pinning.seams).copy(table_of(page, frame, pieces))
    assert "copy_batch" in cuda.calls
    assert (frame[: 3 * PAGE] == 8).all()
    assert (frame[4 * PAGE : 9 * PAGE] == 8).all()
    del frame


def test_a_pinned_buffer_holds_numbers(cuda: FakeCuda) -> None:
    buffer = PinnedBuffer(cuda, 2 * PAGE)
    assert cuda.registered == {buffer.address: 2 * PAGE}
    buffer.write(16, np.array([3, 4], dtype=np.uint64))
    buffer.close()
    assert cuda.registered == {}


@pytest.mark.parametrize(
    ("nodes", "said"), [("0", "one node"), ("0-1", "2 nodes"), ("0,2-3", "3 nodes"), (None, "names no nodes")]
)
def test_numa_is_decided_by_the_machine(slab: HostSlab, tmp_path: Path, nodes: str | None, said: str) -> None:
    """Whatever the kernel says to it, a machine without these nodes goes on."""
    if nodes is not None:
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/online").write_text(nodes + "\n")
    assert said in spread(slab, root=tmp_path)[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [("always within_size advise [never] deny force", "never"), ("[advise] never", "advise"), (None, "none")],
)
def test_huge_pages_are_asked_for_where_allowed(
    slab: HostSlab, tmp_path: Path, setting: str | None, said: str
) -> None:
    if setting is not None:
        (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
        (tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text(setting)
    assert said in spread(slab, root=tmp_path)[1]
