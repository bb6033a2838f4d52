"""GPU copies of frames, against the link's and the device's own limits, in one run.

    python -m bench.copy_gpu [--json] [--mib 256] [--rounds 5]

Needs a CUDA device; says so and ends with status 2 where there is none. For each shape: `link` is one driver
copy of the same bytes between pinned memory and the device (what PCIe or NVLink gives), `hbm` one on the
device; then ours by the driver's copies (`cuda`), by the kernel (`cuda-kernel`, needs CuPy), and as `auto`
chooses after its measurement. GB/s are 1e9 bytes of payload per second, the best of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import numpy as np

from bench.copy import SHAPES, Shape
from controller.memory.cuda import CudaError
from controller.memory.frames import FrameLayout
from controller.memory.pinning import pin
from controller.memory.slab import HostSlab
from controller.requests import MappedRegion
from controller.transfers.copies import CopyEngine, CopyTable
from controller.transfers.cuda.calibration import calibrate
from controller.transfers.cuda.devices import CudaCalls, cuda_calls
from controller.transfers.cuda.engine import Always, Choice, CopyEngineMover, DeviceCopyEngine, KernelMover
from controller.transfers.cuda.kernel import KernelMissing
from controller.transfers.cuda.lanes import Lanes
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool

DEADLINE_S = 60.0
DEVICE = 0


class GpuBench:
    """A pool on the device and a pinned slab, twice as many slots as pages move."""

    def __init__(self, calls: CudaCalls, shape: Shape, total_bytes: int) -> None:
        self.calls = calls
        page_bytes = shape.n_planes * shape.plane_bytes
        self.n_pages = max(2, total_bytes // page_bytes)
        self.total_bytes = self.n_pages * page_bytes
        n_slots = 2 * self.n_pages
        planes = tuple(
            Plane(0, layer * n_slots * shape.plane_bytes, shape.plane_bytes, shape.plane_bytes, layer)
            for layer in range(shape.n_planes)
        )
        pools = (Pool("kv", "full", n_slots, planes),)
        frames = FrameLayout(Layout(64, (ComponentSpec("full", Kind.FULL),), pools), "full")
        self.slab = HostSlab((self.n_pages + 64) * frames.slot_bytes * 2)
        self.slab.prefault()
        self.pinning = pin(self.slab, calls.memory)
        if self.pinning.problem:
            raise SystemExit(self.pinning.problem)
        arena = self.slab.arena(frames.frame_bytes)
        host_slots = arena.alloc(min(arena.obtainable(), n_slots))
        assert host_slots is not None
        rng = np.random.default_rng(1)
        slots = rng.permutation(n_slots)[: self.n_pages].astype(np.int32)
        if shape.neighbours:
            slots.sort()
        else:
            host_slots = rng.permutation(host_slots)
        self.pool_bytes = n_slots * page_bytes
        self.pool = calls.memory.allocate(DEVICE, self.pool_bytes)
        regions = [MappedRegion(self.pool, self.pool_bytes, on_device=True)]
        self.planes = frames.table(regions, slots, arena.addresses(host_slots[: self.n_pages]))
        self.host = range(self.slab.address, self.slab.address + self.slab.nbytes)

    def engine(self, choice: Choice, kernel: KernelMover | None) -> DeviceCopyEngine:
        return DeviceCopyEngine(
            Lanes(self.calls.streams, DEVICE),
            CopyEngineMover(self.calls.streams, DEVICE, pinned=True),
            kernel,
            choice,
            host=self.host,
            seams=np.array(self.pinning.seams, dtype=np.uint64),
        )

    def one_copy(self, direction: Direction) -> CopyTable:
        """The limit: the same bytes in one piece."""
        host = np.array([self.slab.address], dtype=np.uint64)
        device = np.array([self.pool], dtype=np.uint64)
        nbytes = np.array([self.total_bytes], dtype=np.uint64)
        source, target = (host, device) if direction is Direction.LOAD else (device, host)
        return CopyTable(source, target, nbytes)

    def on_device(self) -> CopyTable:
        half = np.uint64(self.pool_bytes // 2)
        first = np.array([self.pool], dtype=np.uint64)
        return CopyTable(first, first + half, np.array([half], dtype=np.uint64))

    def frames(self, direction: Direction) -> CopyTable:
        return CopyTable.load(self.planes) if direction is Direction.LOAD else CopyTable.store(self.planes)

    def close(self) -> None:
        self.calls.memory.free(DEVICE, self.pool)
        self.pinning.unpin()
        self.slab.close()


def best_rate(copy: Callable[[], None], nbytes: int, rounds: int) -> float:
    """GB/s of the fastest round; the first, which warms up, does not count."""
    copy()
    times = []
    for _ in range(rounds):
        begun_s = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begun_s)
    return nbytes / min(times) / 1e9


def through(scheduler: TransferScheduler, direction: Direction, table: CopyTable) -> Callable[[], None]:
    def copy() -> None:
        moved: Future[None] = scheduler.submit(direction, table)
        moved.result(DEADLINE_S)

    return copy


def measured(calls: CudaCalls, shape: Shape, total_bytes: int, rounds: int) -> Mapping[str, float]:
    """One shape's figures, GB/s."""
    bench = GpuBench(calls, shape, total_bytes)
    plain = bench.engine(Always(kernel=False), None)
    ways: dict[str, CopyEngine] = {"cuda": plain}
    made = [plain]
    try:
        mover = KernelMover(calls.kernel(), calls.memory, DEVICE)
    except KernelMissing as error:
        print(f"cuda-kernel and auto left out: {error}", file=sys.stderr)
    else:
        ways["cuda-kernel"] = by_kernel = bench.engine(Always(kernel=True), mover)
        second = KernelMover(calls.kernel(), calls.memory, DEVICE)
        ways["auto"] = auto = bench.engine(Always(kernel=False), second)
        auto.choice = calibrate(auto, calls.memory, DEVICE)
        made += [by_kernel, auto]
    found = {"hbm": best_rate(lambda: plain.copy(bench.on_device()), bench.pool_bytes // 2, rounds)}
    for direction in Direction:
        limit = partial(plain.copy, bench.one_copy(direction))
        found[f"{direction.value} link"] = best_rate(limit, bench.total_bytes, rounds)
        for name, engine in ways.items():
            with TransferScheduler(engine, threads=3, chunk_bytes=32 << 20) as scheduler:
                copy = through(scheduler, direction, bench.frames(direction))
                found[f"{direction.value} {name}"] = best_rate(copy, bench.total_bytes, rounds)
    for engine in made:
        engine.close()
    bench.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="GPU copies of frames against the link's limit.")
    parser.add_argument("--mib", type=int, default=256, help="payload per copy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        calls = cuda_calls()
    except CudaError as error:
        print(f"no CUDA device here ({error.strerror}): nothing measured", file=sys.stderr)
        raise SystemExit(2) from None
    figures = {shape.name: measured(calls, shape, options.mib << 20, options.rounds) for shape in SHAPES}
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, rates in figures.items():
        print(name)
        for what, rate in rates.items():
            link = rates.get(f"{what.split()[0]} link", rate)
            print(f"  {what:20} {rate:8.1f} GB/s  {100 * rate / link:4.0f} %")


if __name__ == "__main__":
    main()
