"""Calibration: which way is cheaper on this device, by direction and size of piece, measured at start.

Published crossovers differ by a factor of ten between machines, so none is built in. Measures on memory of
its own, a fraction of a second once for each device, and gives it back; decides nothing later on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from controller.memory.cuda import CudaError, DeviceMemory
from controller.memory.pinning import PinnedBuffer
from controller.transfers.copies import AddressArray, CopyEngine, CopyTable
from controller.transfers.cuda.engine import Always, DeviceCopyEngine
from controller.transfers.scheduler import Direction
from hicache.core.words import BoolArray

SIZES = (512, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10)
"""Sizes of pieces that are measured; others go by the nearest."""
SAMPLE_BYTES = 4 << 20
ROUNDS = 3
LEAST_PIECES = 16
"""Fewer pieces of a size are never worth a launch."""
WORTH = 1.25
"""How much faster the kernel must be: it waits behind the forward pass's kernels, copy engines do not."""


@dataclass(frozen=True)
class Calibration:
    """Seconds for a sample, per direction: {size: (copy engine, kernel)}. See Choice."""

    seconds: Mapping[Direction, Mapping[int, tuple[float, float]]]
    sample_bytes: int = SAMPLE_BYTES

    def by_kernel(self, direction: Direction, nbytes: AddressArray) -> BoolArray:
        measured = self.seconds[direction]
        sizes = np.array(sorted(measured), dtype=np.float64)
        wins = np.array([measured[size][0] > WORTH * measured[size][1] for size in sorted(measured)])
        middles = np.sqrt(sizes[1:] * sizes[:-1])
        chosen: BoolArray = wins[np.searchsorted(middles, nbytes.astype(np.float64))]
        if int(chosen.sum()) < LEAST_PIECES:
            return np.zeros(len(nbytes), dtype=np.bool_)
        return chosen

    def lines(self) -> list[str]:
        """What was measured, in words, for the log."""
        gigabytes = self.sample_bytes / 1e9
        return [
            f"{direction.value} {size} B: {gigabytes / max(engine_s, 1e-9):.1f} GB/s by copy engine, "
            f"{gigabytes / max(kernel_s, 1e-9):.1f} by kernel"
            for direction, measured in self.seconds.items()
            for size, (engine_s, kernel_s) in sorted(measured.items())
        ]


def calibrate(
    engine: DeviceCopyEngine,
    memory: DeviceMemory,
    device: int,
    *,
    sample_bytes: int = SAMPLE_BYTES,
    now_s: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure. Nobody else may use `engine` meanwhile: its choice is replaced, and put back. Raises
    CudaError, CopyError."""
    before = engine.choice
    seconds: dict[Direction, dict[int, tuple[float, float]]] = {}
    on_device = memory.allocate(device, 2 * sample_bytes)
    try:
        host = PinnedBuffer(memory, 2 * sample_bytes)
    except CudaError:
        memory.free(device, on_device)
        raise
    try:
        for direction in Direction:
            seconds[direction] = {}
            for size in SIZES:
                sample = _sample(direction, size, sample_bytes, host.address, on_device)
                times = []
                for kernel in (False, True):
                    engine.choice = Always(kernel=kernel)
                    times.append(_best_s(engine, sample, now_s))
                seconds[direction][size] = times[0], times[1]
    finally:
        engine.choice = before
        host.close()
        memory.free(device, on_device)
    return Calibration(seconds, sample_bytes)


def _sample(direction: Direction, size: int, sample_bytes: int, host: int, device: int) -> CopyTable:
    """Every second piece on either side: nothing can be joined."""
    n_pieces = sample_bytes // size
    steps = np.arange(n_pieces, dtype=np.uint64) * np.uint64(2 * size)
    on_host, on_device = steps + np.uint64(host), steps + np.uint64(device)
    source, target = (on_host, on_device) if direction is Direction.LOAD else (on_device, on_host)
    return CopyTable(source, target, np.full(n_pieces, size, dtype=np.uint64))


def _best_s(engine: CopyEngine, sample: CopyTable, now_s: Callable[[], float]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun_s = now_s()
        engine.copy(sample)
        times.append(now_s() - begun_s)
    return min(times)
