"""Copies between an engine's pools and host frames, against the limit and a naive peer, in one run.

    python -m bench.copy [--json] [--mib 64] [--rounds 5]

For each shape, per round and in turn: `memcpy` (the same number of bytes, contiguous, by as many threads),
`ours` (frame tables through the scheduler and the CPU engine), `torch` (index_select per plane into a
pool of pages, torch's own threads). GB/s are 1e9 bytes of payload per second, the best of the rounds
(other work on the machine only ever makes a round slower).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from controller.memory.frames import FrameLayout
from controller.memory.slab import HostSlab
from controller.requests import MappedRegion
from controller.transfers.copies import CopyTable
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool

DEADLINE_S = 60.0
MEMCPY_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Shape:
    name: str
    n_planes: int
    plane_bytes: int
    neighbours: bool = False
    """Pages in neighbouring slots on both sides; otherwise scattered."""


SHAPES = (
    Shape("K and V of 32 layers, 64 tokens", 64, 128 << 10),
    Shape("MLA latents of 61 layers, 64 tokens", 61, 64 * 1152),
    Shape("states of 24 layers", 24, 1 << 20),
    Shape("8 KiB, scattered", 32, 8 << 10),
    Shape("4 KiB, scattered", 32, 4 << 10),
    Shape("2 KiB, scattered", 32, 2 << 10),
    Shape("512 B, scattered", 32, 512),
    Shape("8 KiB, neighbours", 32, 8 << 10, neighbours=True),
    Shape("4 KiB, neighbours", 32, 4 << 10, neighbours=True),
    Shape("2 KiB, neighbours", 32, 2 << 10, neighbours=True),
)


@dataclass(frozen=True)
class Figure:
    shape: str
    threads: int
    plane_bytes: int
    memcpy: float
    backup: float
    load: float
    torch: float
    seal: float
    verify: float


class Bench:
    """Pools, slab and peer of one shape; the engine's pool has twice as many slots as pages move."""

    def __init__(self, shape: Shape, total_bytes: int) -> None:
        self.shape = shape
        page_bytes = shape.n_planes * shape.plane_bytes
        self.n_pages = max(2, total_bytes // page_bytes)
        self.total_bytes = self.n_pages * page_bytes
        n_slots = 2 * self.n_pages
        rng = np.random.default_rng(1)
        self.pool = rng.integers(0, 256, (shape.n_planes, n_slots, shape.plane_bytes), dtype=np.uint8)
        planes = tuple(
            Plane(0, layer * n_slots * shape.plane_bytes, shape.plane_bytes, shape.plane_bytes, layer)
            for layer in range(shape.n_planes)
        )
        pools = (Pool("kv", "full", n_slots, planes),)
        self.frames = FrameLayout(Layout(64, (ComponentSpec("full", Kind.FULL),), pools), "full")
        self.slab = HostSlab((self.n_pages + 64) * self.frames.slot_bytes * 2)
        self.slab.prefault()
        arena = self.slab.arena(self.frames.frame_bytes)
        host_slots = arena.alloc(min(arena.obtainable(), n_slots))
        assert host_slots is not None
        if shape.neighbours:
            self.slots = np.arange(self.n_pages, dtype=np.int32)
            host_slots = host_slots[: self.n_pages]
        else:
            self.slots = rng.permutation(n_slots)[: self.n_pages].astype(np.int32)
            host_slots = rng.permutation(host_slots)[: self.n_pages]
        self.addresses = arena.addresses(host_slots)
        self.regions = [MappedRegion(self.pool.ctypes.data, self.pool.nbytes)]
        self.hashes = rng.integers(0, 256, (self.n_pages, 32), dtype=np.uint8)
        self.pages = np.arange(self.n_pages, dtype=np.int32)
        self.flat = np.zeros(self.total_bytes, dtype=np.uint8)
        self.peer_pool = torch.from_numpy(self.pool)
        self.peer_host = torch.zeros((self.n_pages, shape.n_planes, shape.plane_bytes), dtype=torch.uint8)
        self.peer_slots = torch.from_numpy(self.slots.astype(np.int64))

    def memcpy(self, threads: ThreadPoolExecutor) -> None:
        source, target = self.pool.ctypes.data, self.flat.ctypes.data
        starts = range(0, self.total_bytes, MEMCPY_PIECE_BYTES)

        def piece(start: int) -> None:
            nbytes = min(MEMCPY_PIECE_BYTES, self.total_bytes - start)
            ctypes.memmove(target + start, source + start, nbytes)

        list(threads.map(piece, starts))

    def move(self, scheduler: TransferScheduler, direction: Direction) -> None:
        make = CopyTable.load if direction is Direction.LOAD else CopyTable.store
        table = make(self.frames.table(self.regions, self.slots, self.addresses))
        scheduler.submit(direction, table).result(DEADLINE_S)

    def in_batches(self, scheduler: TransferScheduler, work: Callable[[slice], object]) -> None:
        """As the controller does: frames of some MiB at a time, so that all threads have work."""
        step = max(1, (4 << 20) // self.frames.frame_bytes)
        futures: list[Future[object]] = []
        for start in range(0, self.n_pages, step):
            chosen = slice(start, start + step)
            futures.append(scheduler.run(lambda chosen=chosen: work(chosen)))  # type: ignore[misc]
        for future in futures:
            future.result(DEADLINE_S)

    def seal(self, chosen: slice) -> None:
        self.frames.seal(self.addresses[chosen], self.hashes[chosen], self.pages[chosen])

    def verify(self, chosen: slice) -> None:
        assert self.frames.verify(self.addresses[chosen], self.hashes[chosen], self.pages[chosen]).all()

    def gather(self) -> None:
        for layer in range(self.shape.n_planes):
            self.peer_host[:, layer] = self.peer_pool[layer].index_select(0, self.peer_slots)

    def check(self) -> None:
        """What came to the slab is what the peer gathered."""
        for i in (0, self.n_pages // 2, self.n_pages - 1):
            frame = ctypes.string_at(int(self.addresses[i]) + 128, self.frames.payload_bytes)
            assert frame == self.peer_host[i].numpy().tobytes(), "the copies differ"


def measure(bench: Bench, n_threads: int, rounds: int) -> Figure:
    torch.set_num_threads(n_threads)
    took: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        work()
        took.setdefault(name, []).append(time.perf_counter() - start_s)

    with (
        ThreadPoolExecutor(n_threads) as threads,
        TransferScheduler(CpuCopyEngine(), threads=n_threads) as scheduler,
    ):
        for _ in range(rounds + 1):
            timed("memcpy", lambda: bench.memcpy(threads))
            timed("backup", lambda: bench.move(scheduler, Direction.STORE))
            timed("torch", bench.gather)
            timed("seal", lambda: bench.in_batches(scheduler, bench.seal))
            timed("verify", lambda: bench.in_batches(scheduler, bench.verify))
            timed("load", lambda: bench.move(scheduler, Direction.LOAD))
    bench.check()
    rates = {name: bench.total_bytes / min(s[1:]) / 1e9 for name, s in took.items()}
    return Figure(bench.shape.name, n_threads, bench.shape.plane_bytes, **rates)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="GB/s of copies between pools and frames")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--mib", type=int, default=64, help="payload per copy")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"{'GB/s':<36} threads  memcpy  backup    load   torch    seal  verify  ours/memcpy")
    for shape in SHAPES:
        bench = Bench(shape, options.mib << 20)
        for n_threads in (1, 2):
            figure = measure(bench, n_threads, options.rounds)
            if options.json:
                print(json.dumps(vars(figure)))
                continue
            rates = (figure.memcpy, figure.backup, figure.load, figure.torch, figure.seal, figure.verify)
            ratio = min(figure.backup, figure.load) / figure.memcpy
            print(f"{shape.name:<36} {n_threads:>7}" + "".join(f"{r:8.2f}" for r in rates) + f"{ratio:12.0%}")
        bench.slab.close()


if __name__ == "__main__":
    main()
