"""The real thing, where there is a device: `make test-gpu`. Skipped, loudly, where there is none."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from controller.memory.cuda import CudaError
from controller.memory.pinning import pin
from controller.memory.slab import HostSlab
from controller.transfers.copies import CopyTable
from controller.transfers.cuda.calibration import SIZES, calibrate
from controller.transfers.cuda.engine import Always, CopyEngineMover, DeviceCopyEngine, KernelMover
from controller.transfers.cuda.kernel import CupyKernel, KernelMissing
from controller.transfers.cuda.lanes import Lanes
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache import UnifiedRadixCache
from hicache.client import CudaRegion, OnStream, Outcome, ReadyRing
from hicache.core.words import Tier
from tests.cuda.gpu import Gpu, GpuEngine, layered, placement
from tests.live import LiveDaemon, wait_until
from tests.tagged import prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WAIT_S = 60.0
MIB = 1 << 20
ENGINES = ("cuda", "cuda piece by piece", "cuda-kernel")


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    try:
        return Gpu()
    except CudaError as error:
        pytest.skip(f"NO CUDA DEVICE, the real GPU path is not tested here: {error.strerror}")


@pytest.fixture
def slab(gpu: Gpu) -> Iterator[HostSlab]:
    """Pinned in chunks of a mebibyte: many seams."""
    with HostSlab(64 * MIB, reserve_bytes=0) as slab:
        slab.prefault()
        yield slab


@pytest.fixture
def engine(request: pytest.FixtureRequest, gpu: Gpu, slab: HostSlab) -> Iterator[DeviceCopyEngine]:
    kernel = None
    if request.param == "cuda-kernel":
        try:
            kernel = KernelMover(CupyKernel(), gpu.memory, 0)
        except KernelMissing as error:
            pytest.skip(str(error))
    pinning = pin(slab, gpu.memory, chunk_bytes=MIB)
    assert pinning.problem == ""
    made = DeviceCopyEngine(
        Lanes(gpu.streams, 0),
        CopyEngineMover(gpu.streams, 0, pinned=request.param != "cuda piece by piece"),
        kernel,
        Always(kernel=kernel is not None),
        host=range(slab.address, slab.address + slab.nbytes),
        seams=np.array(pinning.seams, dtype=np.uint64),
    )
    yield made
    made.close()
    assert pinning.unpin() == []


# ---- bytes ------------------------------------------------------------------------------------------


def shapes() -> Iterator[tuple[int, int]]:
    """Layers and bytes per plane: 1 to 128 layers, one byte to 4 MiB, odd sizes."""
    yield from ((1, 1), (128, 1), (128, 33), (61, 1152), (32, 4096), (32, 4097), (3, 1 << 20), (2, 4 << 20))


@pytest.mark.parametrize(("n_layers", "nbytes"), list(shapes()))
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_all_engines_move_the_same_bytes(
    engine: DeviceCopyEngine, gpu: Gpu, slab: HostSlab, n_layers: int, nbytes: int
) -> None:
    """Strided planes with gaps, unaligned on either side, there and back into other slots."""
    n_slots = min(9, max(2, (24 * MIB) // (n_layers * (nbytes + 5))))
    stride, rng = nbytes + 3, np.random.default_rng(nbytes)
    pool_bytes = n_layers * n_slots * stride + 64
    pool = gpu.memory.allocate(0, 2 * pool_bytes)
    try:
        image = rng.integers(0, 256, 2 * pool_bytes, dtype=np.uint8)
        gpu.upload(pool, image)
        order = [(layer, slot) for layer in range(n_layers) for slot in rng.permutation(n_slots).tolist()]
        device = np.array([7 + (layer * n_slots + slot) * stride for layer, slot in order], dtype=np.uint64)
        frame = n_layers * nbytes + 13
        host = np.array([5 + slot * frame + layer * nbytes for layer, slot in order], dtype=np.uint64)
        sizes = np.full(len(order), nbytes, dtype=np.uint64)
        on_device, on_host = device + np.uint64(pool), host + np.uint64(slab.address)
        with TransferScheduler(engine, threads=3) as scheduler:
            scheduler.submit(Direction.STORE, CopyTable(on_device, on_host, sizes)).result(WAIT_S)
            stored = np.frombuffer(slab.buffer, dtype=np.uint8).copy()
            back = on_device + np.uint64(pool_bytes)
            scheduler.submit(Direction.LOAD, CopyTable(on_host, back, sizes)).result(WAIT_S)
        expected = np.zeros(slab.nbytes, dtype=np.uint8)
        again = image.copy()
        for there, here in zip(device.tolist(), host.tolist(), strict=True):
            expected[here : here + nbytes] = image[there : there + nbytes]
            again[pool_bytes + there : pool_bytes + there + nbytes] = image[there : there + nbytes]
        assert np.array_equal(stored, expected)
        assert np.array_equal(gpu.download(pool, 2 * pool_bytes), again)
    finally:
        gpu.memory.free(0, pool)


@pytest.mark.parametrize("engine", ["cuda-kernel"], indirect=True)
def test_calibration_measures_both_ways(engine: DeviceCopyEngine, gpu: Gpu) -> None:
    measured = calibrate(engine, gpu.memory, 0)
    print(*measured.lines(), sep="\n")
    for by_size in measured.seconds.values():
        assert set(by_size) == set(SIZES)
        assert all(seconds > 0 for pair in by_size.values() for seconds in pair)


def test_host_memory_is_pinned_in_pages(gpu: Gpu) -> None:
    with HostSlab(8 * MIB, reserve_bytes=0) as slab:
        pinning = pin(slab, gpu.memory, chunk_bytes=3 * MIB)
        assert pinning.whole
        assert all(seam % mmap.PAGESIZE == 0 for seam in pinning.seams)
        assert pinning.unpin() == []


# ---- two processes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["auto", "cuda", "cuda-kernel"])
def daemon(
    request: pytest.FixtureRequest, gpu: Gpu, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveDaemon]:
    if request.param == "cuda-kernel":
        pytest.importorskip("cupy")
    transfers = {"engine": request.param, "threads": 3}
    made = LiveDaemon(tmp_path_factory.mktemp("daemon"), capacity="512MiB", storage=None, transfers=transfers)
    yield made
    made.close()


N_PAGES = 12
N_ROUNDS = 30


@pytest.fixture
def process(gpu: Gpu, daemon: LiveDaemon) -> Iterator[GpuEngine]:
    """An engine in this process; the daemon is the other one."""
    made = GpuEngine(gpu, daemon.address, layered(16, 64 << 10, 4 * N_PAGES))
    yield made
    made.close()
    wait_until(lambda: daemon.counter("device_mappings") == 0, "the daemon unmaps the pools")


def test_bytes_cross_processes(process: GpuEngine, daemon: LiveDaemon) -> None:
    tokens = prompt(1, 16 * N_PAGES)
    there = {page: page for page in range(N_PAGES)}
    process.write(tokens, there)
    ready = process.ready.record(process.stream)
    ticket = process.client.start_backup(process.prompt(tokens), placement(there), ready=ready)
    assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
    process.ready.settled(ready)
    found = process.client.lookup(process.prompt(tokens), device={}, limit_pages=0, timeout_s=WAIT_S)
    assert found is not None
    assert found.lease is not None
    back = {page: 2 * N_PAGES + page for page in range(N_PAGES)}
    ready = process.ready.record(process.stream)
    ticket = process.client.start_load(found.lease, placement(back), ready=ready)
    assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
    process.ready.settled(ready)
    process.client.release(found.lease)
    assert process.wrong_bytes(tokens, back) == 0
    assert list(daemon.status().problems) == []


def test_part_of_an_allocation_is_exported_by_its_offset(gpu: Gpu) -> None:
    address = gpu.memory.allocate(0, 4 * MIB)
    region = CudaRegion(address + MIB, MIB)
    assert (region.offset, region.nbytes, region.device_uuid) == (MIB, MIB, gpu.uuid)
    gpu.memory.free(0, address)


def test_order_under_stress(process: GpuEngine, gpu: Gpu) -> None:
    """WRITE-09: slow fills are still queued when their backup is asked for; the slots are filled anew as
    soon as it is settled. What comes back is each round's fill."""
    slots = {page: page for page in range(N_PAGES)}
    busy_bytes = min(256 * MIB, gpu.total_bytes() // 256)
    scratch = gpu.memory.allocate(0, busy_bytes)
    for round_ in range(N_ROUNDS):
        tokens = prompt(1000 + round_, 16 * N_PAGES)
        for _ in range(8):  # milliseconds of work before the fill
            gpu.fill(process.stream, scratch, round_, busy_bytes)
        gpu.fill(process.stream, process.pools, 1 + round_, process.nbytes)
        ready = process.ready.record(process.stream)
        ticket = process.client.start_backup(process.prompt(tokens), placement(slots), ready=ready)
        assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
        process.ready.settled(ready)
        gpu.fill(process.stream, process.pools, 255, process.nbytes)
        found = process.client.lookup(process.prompt(tokens), device={}, limit_pages=0, timeout_s=WAIT_S)
        assert found is not None
        assert found.lease is not None
        ready = process.ready.record(process.stream)
        ticket = process.client.start_load(found.lease, placement(slots), ready=ready)
        assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
        process.ready.settled(ready)
        process.client.release(found.lease)
        image = gpu.download(process.pools, process.nbytes)
        for slot in slots.values():
            for _, offset, nbytes in process.places(slot):
                assert (image[offset : offset + nbytes] == 1 + round_).all()
    gpu.memory.free(0, scratch)


def test_layers_overlap_with_a_busy_stream(process: GpuEngine, gpu: Gpu) -> None:
    """SIDECAR-03: every layer's work is queued before the load is asked for. Each waits for its own layer on
    the device, works for a while, and copies what it sees away; the host waits for nothing until the end."""
    tokens = prompt(2, 16 * N_PAGES)
    there = {page: page for page in range(N_PAGES)}
    process.write(tokens, there)
    ticket = process.client.start_backup(process.prompt(tokens), placement(there))
    assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
    back = {page: 2 * N_PAGES + page for page in range(N_PAGES)}
    found = process.client.lookup(process.prompt(tokens), device={}, limit_pages=0, timeout_s=WAIT_S)
    assert found is not None
    assert found.lease is not None
    seen = gpu.memory.allocate(0, process.nbytes)
    busy_bytes = min(64 * MIB, gpu.total_bytes() // 1024)
    scratch = gpu.memory.allocate(0, busy_bytes)
    ready = process.ready.record(process.stream)
    row = process.board.take()
    assert row is not None
    for layer in range(process.n_layers):
        process.waits.wait(process.stream, row.cells, layer)
        for _ in range(4):
            gpu.fill(process.stream, scratch, layer, busy_bytes)
        for slot in back.values():
            for of_layer, offset, nbytes in process.places(slot):
                if of_layer == layer:
                    gpu.streams.copy(0, process.stream, seen + offset, process.pools + offset, nbytes)
    ticket = process.client.start_load(found.lease, placement(back), ready=ready, cells=row.cells)
    assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
    gpu.synchronize(process.stream)
    pools, process.pools = process.pools, seen
    assert process.wrong_bytes(tokens, back) == 0
    process.pools = pools
    process.ready.settled(ready)
    process.board.give_back(row)
    process.client.release(found.lease)
    gpu.memory.free(0, seen)
    gpu.memory.free(0, scratch)


def test_the_cache_of_a_gpu_engine(process: GpuEngine, gpu: Gpu) -> None:
    """Write-through and load-back of the cache, in order with the engine's stream."""
    events = ReadyRing(0)
    lower = OnStream(process.client, events, lambda: process.stream)
    cache = UnifiedRadixCache(
        process.layout, model="m", client=lower, lookup_timeout_s=WAIT_S, load_timeout_s=WAIT_S
    )
    tokens = prompt(6, 16 * N_PAGES + 1)
    request = cache.begin("first", tokens)
    slots = cache.alloc("full", N_PAGES)
    assert slots is not None
    process.write(tokens, dict(enumerate(slots.tolist())))
    cache.finish(request, tokens, {"full": slots})
    wait_until(lambda: cache.poll() >= 0 and not cache._backups.running, "the backup is settled")  # type: ignore[union-attr]
    cache.evict("full", N_PAGES)
    gpu.fill(process.stream, process.pools, 0, process.nbytes)
    again = cache.begin("again", tokens)
    assert again.hit_pages[Tier.HOST] == N_PAGES
    assert process.wrong_bytes(tokens, dict(enumerate(again.slots["full"].tolist()))) == 0
    cache.abort(again)
    assert cache.audit() == []


def test_an_engine_killed_in_the_middle_of_a_copy(daemon: LiveDaemon, gpu: Gpu) -> None:
    """LIFE-01: nothing of it stays mapped, the daemon goes on, and the next engine is served."""
    for _ in range(2):
        command = [sys.executable, "-m", "tests.cuda.gpu_engine", daemon.address]
        doomed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "attached\n"
        assert doomed.stdout.readline()
        doomed.send_signal(signal.SIGKILL)
        doomed.wait(WAIT_S)
        doomed.stdout.close()
        wait_until(lambda: not daemon.status().engines, "the daemon sees that it has gone")
        wait_until(lambda: daemon.counter("device_mappings") == 0, "its memory is unmapped")
    engine = GpuEngine(gpu, daemon.address, layered(4, 4096, 8), engine_id="next")
    tokens = prompt(3, 32)
    engine.write(tokens, {0: 3, 1: 1})
    ticket = engine.client.start_backup(engine.prompt(tokens), placement({0: 3, 1: 1}))
    assert ticket.wait(WAIT_S) is Outcome.OK, ticket.reason
    engine.close()
    assert not [problem for problem in daemon.status().problems if "device" in problem]
