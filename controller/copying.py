"""Copies between an engine's slots and host frames, with a deadline. Publishes and frees nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from controller.memory.frames import PlaneTable
from controller.models import Engine
from controller.requests import TransferFailed
from controller.transfers.copies import CopyTable
from controller.transfers.scheduler import Direction, SchedulerClosed, TransferScheduler
from hicache.core.words import HashArray, PageArray, SlotArray


class Copier:
    """Builds descriptor tables and waits for the scheduler."""

    def __init__(self, scheduler: TransferScheduler, timeout_s: float) -> None:
        self._scheduler = scheduler
        self.timeout_s = timeout_s

    async def copy(
        self,
        direction: Direction,
        engine: Engine,
        slots: Mapping[str, tuple[SlotArray, SlotArray]],
        *,
        seal: Mapping[str, tuple[HashArray, PageArray]] | None = None,
    ) -> int:
        """Copy frames between device slots and host slots (per component: device, host) and return the
        bytes moved, when the last one has landed. `seal` gives hashes and page numbers to write headers
        with after a store. Raises TransferFailed, and also then no byte is in flight any more."""
        tables: list[PlaneTable] = []
        for name, (device, host) in slots.items():
            addresses = engine.model.shelves[name].arena.addresses(host)
            tables.append(engine.frames[name].table(engine.spec.regions, device, addresses))
        device_side = np.concatenate([table.device for table in tables])
        host_side = np.concatenate([table.host for table in tables])
        nbytes = np.concatenate([table.nbytes for table in tables])
        source, target = (
            (device_side, host_side) if direction is Direction.STORE else (host_side, device_side)
        )

        def then() -> None:
            for name, (hashes, pages) in (seal or {}).items():
                shelf = engine.model.shelves[name]
                shelf.frames.seal(shelf.arena.addresses(slots[name][1]), hashes, pages)

        copy = self._scheduler.submit(direction, CopyTable(source, target, nbytes), then=then)
        landed = asyncio.wrap_future(copy)
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.shield(landed)
        except TimeoutError:
            await self._stop(copy, landed)
            if landed.cancelled() or landed.exception():
                raise TransferFailed(
                    f"copy: not done after {self.timeout_s} s; the machine is overloaded or "
                    "the copy timeout is too short"
                ) from None
        except asyncio.CancelledError:
            await self._stop(copy, landed)
            raise
        except (OSError, SchedulerClosed) as error:
            raise TransferFailed(f"copy: {error}") from error
        return int(nbytes.sum())

    async def _stop(self, copy: Future[None], landed: asyncio.Future[None]) -> None:
        """Return when no byte of the copy is in flight any more."""
        self._scheduler.cancel(copy)
        await asyncio.wait([landed])
