"""The two GPU copy engines, and the engine of a device, which gives every piece to the cheaper one.

Both take the table that every engine takes and leave the same bytes. The copy engine (`cuda`) queues the
driver's own copies; the kernel (`cuda-kernel`) moves many small pieces in one launch, from and to pinned
host memory. Neither synchronises anything but its own stream. Which is cheaper is measured, not guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from controller.memory.cuda import CudaError, DeviceMemory
from controller.memory.pinning import PinnedBuffer
from controller.transfers.copies import AddressArray, CopyTable
from controller.transfers.cuda.kernel import LANES, THREADS, Kernel
from controller.transfers.cuda.lanes import Lanes
from controller.transfers.cuda.pieces import coalesced, cut_at, no_longer_than, portions, rows
from controller.transfers.cuda.streams import StreamDriver
from controller.transfers.scheduler import Direction
from hicache.core.words import BoolArray

MOST_BLOCKS = 16
"""Few enough to leave the forward pass its processors, enough to fill a PCIe link (docs/gpu.md)."""
KERNEL_PIECE_BYTES = 16 << 10
"""Longer pieces are shared between warps."""
TABLE_PIECES = 16 << 10
_NO_SEAMS: AddressArray = np.empty(0, dtype=np.uint64)


class Mover(Protocol):
    """One way to queue copies."""

    def submit(self, table: CopyTable, direction: Direction, stream: int) -> Callable[[], None]:
        """Queue the copies on a stream; nothing has moved yet. Call the result once, when they have landed
        or cannot move any more. Raises CudaError; some of the copies may then be queued."""


class Choice(Protocol):
    """Which pieces the kernel moves."""

    def by_kernel(self, direction: Direction, nbytes: AddressArray) -> BoolArray: ...


class Always:
    """The same answer for every piece: what YAML says instead of a measurement."""

    def __init__(self, *, kernel: bool) -> None:
        self._kernel = kernel

    def by_kernel(self, direction: Direction, nbytes: AddressArray) -> BoolArray:
        return np.full(len(nbytes), self._kernel)


class CopyEngineMover:
    """The driver's copies, in one call where it can. See Mover."""

    def __init__(self, driver: StreamDriver, device: int, *, pinned: bool) -> None:
        """`pinned`: all host memory of the tables is; batches are for such memory only."""
        self._driver = driver
        self._device = device
        self._batch = pinned and driver.can_batch(device)

    def submit(self, table: CopyTable, direction: Direction, stream: int) -> Callable[[], None]:
        if self._batch and len(table) > 1:
            columns = [np.ascontiguousarray(one) for one in (table.target, table.source, table.nbytes)]
            self._driver.copy_batch(self._device, stream, *columns, stable=direction is Direction.LOAD)
            return lambda: None
        columns_of_ints = (table.target.tolist(), table.source.tolist(), table.nbytes.tolist())
        for target, source, nbytes in zip(*columns_of_ints, strict=True):
            self._driver.copy(self._device, stream, target, source, nbytes)
        return lambda: None


class KernelMover:
    """One launch for a table; all host memory of it must be pinned. See Mover."""

    def __init__(self, kernel: Kernel, memory: DeviceMemory, device: int) -> None:
        self._kernel = kernel
        self._memory = memory
        self._device = device
        self._tables: deque[PinnedBuffer] = deque()
        """Not in use now; as many exist as there were ever calls at once."""

    def submit(self, table: CopyTable, direction: Direction, stream: int) -> Callable[[], None]:
        try:
            pinned = self._tables.pop()
        except IndexError:
            pinned = PinnedBuffer(self._memory, 3 * 8 * TABLE_PIECES)
        for i, column in enumerate((table.source, table.target, table.nbytes)):
            pinned.write(8 * i * len(table), column)
        n_blocks = min(MOST_BLOCKS, -(-len(table) * LANES // THREADS))
        try:
            self._kernel.launch(self._device, stream, pinned.address, len(table), n_blocks)
        except CudaError:
            self._tables.append(pinned)
            raise
        return lambda: self._tables.append(pinned)

    def close(self) -> None:
        while self._tables:
            self._tables.pop().close()


class DeviceCopyEngine:
    """One device's copy engine. See CopyEngine.

    `host`: the addresses of the host slab; a table whose targets lie there is a store. `seams`: no piece
    may span one of these (ends of registrations, ascending)."""

    def __init__(
        self,
        lanes: Lanes,
        copy_engine: CopyEngineMover,
        kernel: KernelMover | None,
        choice: Choice,
        *,
        host: range,
        seams: AddressArray = _NO_SEAMS,
    ) -> None:
        self._lanes = lanes
        self._copy_engine = copy_engine
        self._kernel = kernel
        self._host = host
        self._seams = seams
        self.choice = choice

    @property
    def problem(self) -> str:
        return self._lanes.problem

    def copy(self, table: CopyTable) -> None:
        table = cut_at(coalesced(table), self._seams)
        if not len(table):
            return
        direction = Direction.STORE if int(table.target[0]) in self._host else Direction.LOAD
        by_kernel = np.zeros(len(table), dtype=np.bool_)
        if self._kernel is not None:
            by_kernel = self.choice.by_kernel(direction, table.nbytes)
            small = no_longer_than(rows(table, by_kernel), KERNEL_PIECE_BYTES)
            for portion in portions(small, TABLE_PIECES):
                self._move(self._kernel, portion, direction)
        if not by_kernel.all():
            self._move(self._copy_engine, rows(table, ~by_kernel), direction)

    def close(self) -> None:
        """After the last copy. Raises CudaError."""
        if self._kernel is not None:
            self._kernel.close()
        self._lanes.close()

    def _move(self, mover: Mover, table: CopyTable, direction: Direction) -> None:
        landed: list[Callable[[], None]] = []
        try:
            self._lanes.run(direction, lambda stream: landed.append(mover.submit(table, direction, stream)))
        finally:
            for give_back in landed:
                give_back()
