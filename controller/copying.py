"""Copies between an engine's slots and host frames, with a deadline. Publishes and frees nothing.

What the engine has queued on its GPU comes first; layers that it wants to hear of one by one are copied one
by one, and each is told when all of it has landed.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from controller.groups import Engine
from controller.requests import InvalidRequest, LayerCells, ReadyEvent, TransferFailed
from controller.transfers.copies import CopyError, CopyTable
from controller.transfers.jobs import Job, JobState
from controller.transfers.scheduler import (
    Direction,
    SchedulerClosed,
    TransferCancelled,
    TransferScheduler,
)
from hicache.core.words import HashArray, PageArray, SlotArray

CELL_BYTES = 8


class ReadyWaits(Protocol):
    """Where engines' GPU events are waited for."""

    def ready(self, engine_id: str, event: ReadyEvent) -> Future[None]:
        """A future that ends when the event has happened, or with OSError. May be cancelled."""


class Copier:
    """Builds descriptor tables and waits for the scheduler."""

    def __init__(
        self, scheduler: TransferScheduler, timeout_s: float, ready: ReadyWaits | None = None
    ) -> None:
        """`ready`: None where there is no GPU."""
        self._scheduler = scheduler
        self._ready = ready
        self.timeout_s = timeout_s

    def check(self, engine: Engine, ready: ReadyEvent | None, cells: LayerCells | None = None) -> None:
        """Raises InvalidRequest for an event that cannot be waited for here, or cells that are not all in
        the engine's host memory."""
        if ready is not None and self._ready is None:
            raise InvalidRequest("ready: this daemon uses no GPU (see transfers.engine); leave it out")
        if cells is None:
            return
        regions, n_cells = engine.spec.regions, _n_layers(engine)
        if cells.region >= len(regions) or regions[cells.region].on_device:
            raise InvalidRequest(f"cells.region: {cells.region}; name a region in host memory")
        if cells.offset + CELL_BYTES * n_cells > regions[cells.region].nbytes:
            raise InvalidRequest(
                f"cells.offset: {n_cells} cells of {CELL_BYTES} bytes at {cells.offset} do not fit region "
                f"{cells.region} of {regions[cells.region].nbytes} bytes"
            )

    async def copy(
        self,
        direction: Direction,
        engine: Engine,
        slots: Mapping[str, tuple[SlotArray, SlotArray]],
        job: Job,
        *,
        seal: Mapping[str, tuple[HashArray, PageArray]] | None = None,
        ready: ReadyEvent | None = None,
        cells: LayerCells | None = None,
    ) -> int:
        """Copy frames between device slots and host slots (per component: device, host) and return the
        bytes moved, when the last one has landed. `seal` gives hashes and page numbers to write headers
        with after a store. The job runs from here on. Raises TransferFailed, and also then no byte is in
        flight any more."""
        deadline_s = asyncio.get_running_loop().time() + self.timeout_s
        if ready is not None:
            await self._happened(engine, ready, deadline_s)
        works: list[tuple[CopyTable, Callable[[], None]]]
        if cells is not None:
            works = _by_layer(direction, engine, slots, _writer(engine, cells))
        else:
            works = [(_described(direction, engine, slots), lambda: _seal(engine, slots, seal or {}))]
        copies: list[Future[None]] = []
        job.move(JobState.RUNNING)
        try:
            for part, then in works:
                copies.append(self._scheduler.submit(direction, part, then=then))
        except SchedulerClosed as error:
            await self._stop(copies, [asyncio.wrap_future(copy) for copy in copies])
            raise TransferFailed(f"copy: {error}") from error
        await self._landed(copies, deadline_s)
        return sum(table.total_bytes for table, _ in works)

    async def _happened(self, engine: Engine, ready: ReadyEvent, deadline_s: float) -> None:
        assert self._ready is not None
        waiting = asyncio.wrap_future(self._ready.ready(engine.spec.engine_id, ready))
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiting
        except TimeoutError:
            raise TransferFailed(
                f"ready: the engine's event has not happened after {self.timeout_s} s; its GPU is stuck or "
                "the copy timeout is too short"
            ) from None
        except OSError as error:
            raise TransferFailed(f"ready: {error}") from error

    async def _landed(self, copies: Sequence[Future[None]], deadline_s: float) -> None:
        """All of them. When one fails or time is up the others are stopped, and no byte moves any more."""
        if not copies:
            return
        landed = [asyncio.wrap_future(copy) for copy in copies]
        left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        try:
            _, late = await asyncio.wait(landed, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await self._stop(copies, landed)
            raise
        if late:
            await self._stop(copies, landed)
        errors = [error for copy in landed if (error := copy.exception())]
        errors.sort(key=lambda error: isinstance(error, TransferCancelled))
        if not errors:
            return
        if isinstance(errors[0], TransferCancelled):
            raise TransferFailed(
                f"copy: not done after {self.timeout_s} s; the machine is overloaded or "
                "the copy timeout is too short"
            )
        if isinstance(errors[0], OSError | SchedulerClosed | CopyError):
            raise TransferFailed(f"copy: {errors[0]}") from errors[0]
        raise errors[0]

    async def _stop(self, copies: Sequence[Future[None]], landed: Sequence[asyncio.Future[None]]) -> None:
        """Return when no byte of the copies is in flight any more."""
        for copy in copies:
            self._scheduler.cancel(copy)
        if landed:
            await asyncio.wait(landed)


def _described(
    direction: Direction,
    engine: Engine,
    slots: Mapping[str, tuple[SlotArray, SlotArray]],
    *,
    layer: int | None = None,
) -> CopyTable:
    """All components' pieces, or those of one layer."""
    tables = []
    for name, (device, host) in slots.items():
        addresses = engine.model.shelves[name].arena.addresses(host)
        for part in engine.parts(name, direction):
            where = addresses + part.offset_u64
            planes = part.frames.table(engine.spec.regions, device, where, layer=layer)
            tables.append(CopyTable.load(planes) if direction is Direction.LOAD else CopyTable.store(planes))
    return CopyTable.joined(tables)


def _by_layer(
    direction: Direction,
    engine: Engine,
    slots: Mapping[str, tuple[SlotArray, SlotArray]],
    tell: Callable[[int], None],
) -> list[tuple[CopyTable, Callable[[], None]]]:
    """A copy for every layer that has bytes, in order; the cells of the others are set now."""
    works: list[tuple[CopyTable, Callable[[], None]]] = []
    for layer in range(_n_layers(engine)):
        table = _described(direction, engine, slots, layer=layer)
        if len(table):
            works.append((table, partial(tell, layer)))
        else:
            tell(layer)
    return works


def _writer(engine: Engine, cells: LayerCells) -> Callable[[int], None]:
    """Sets a layer's cell: one store of eight aligned bytes, so that nobody sees a half of it."""
    first = engine.spec.regions[cells.region].address + cells.offset

    def write(layer: int) -> None:
        ctypes.c_uint64.from_address(first + CELL_BYTES * layer).value = cells.value

    return write


def _n_layers(engine: Engine) -> int:
    return 1 + max(plane.layer for pool in engine.spec.layout.pools for plane in pool.planes)


def _seal(
    engine: Engine,
    slots: Mapping[str, tuple[SlotArray, SlotArray]],
    seal: Mapping[str, tuple[HashArray, PageArray]],
) -> None:
    for name, (hashes, pages) in seal.items():
        addresses = engine.model.shelves[name].arena.addresses(slots[name][1])
        for part in engine.parts(name, Direction.STORE):
            part.frames.seal(addresses + part.offset_u64, hashes, pages)
