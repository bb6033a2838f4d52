"""Write-through from host memory to storage: which frames are due, in which order, how often tried.

Parents before children: a path's frames are written in page order, and what comes after a failure
waits with it. The queue is bounded in bytes and pins nothing while it waits, so that storage in
trouble costs misses in storage and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from controller.counters import Counters
from controller.models import HOST, STORAGE, Model
from controller.settings import ControllerSettings
from controller.storage import StorageTier
from hicache.core.identity import Namespace, storage_key
from hicache.core.structure import Cursor
from hicache.core.words import Residency, TokenArray
from storage_backends.base import Item, Outcome

FIRST_RETRY_S = 0.2
"""Pause after a path's first failed write; doubled with every further one."""


class Frame(NamedTuple):
    """One frame due for storage."""

    page: int
    component: str
    slot: int
    item: Item


@dataclass
class Due:
    """A path whose frames are to be written."""

    model: Model
    namespace: Namespace
    tokens: TokenArray
    nbytes: int
    attempts: int = 0


class StorageWriter:
    """One queue, one path being written at a time."""

    def __init__(self, tier: StorageTier, settings: ControllerSettings, counters: Counters) -> None:
        self._tier = tier
        self._settings = settings
        self._counters = counters
        self._queue: deque[Due] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def n_queued(self) -> int:
        return len(self._queue)

    def offer(self, model: Model, namespace: Namespace, tokens: TokenArray) -> None:
        """Write in due time whatever of this path is in host memory and not known to be stored.

        Drops the offer, counted, when the queue is full.
        """
        frames = self._frames(model, namespace, tokens)
        nbytes = sum(frame.item.nbytes for frame in frames)
        if not frames:
            return
        if self._queued_bytes + nbytes > self._settings.write_queue_bytes:
            self._counters.storage_write_dropped_queue_full_pages += len(frames)
            return
        self._put(Due(model, namespace, tokens, nbytes))

    async def run(self) -> None:
        """Write what is due, for ever."""
        while True:
            while not self._queue:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            due = self._queue.popleft()
            self._queued_bytes -= due.nbytes
            if await self._write(due):
                continue
            due.attempts += 1
            if due.attempts < self._settings.write_attempts:
                self._counters.storage_write_retries += 1
                await asyncio.sleep(FIRST_RETRY_S * 2 ** (due.attempts - 1))
                self._put(due)
            else:
                left = self._frames(due.model, due.namespace, due.tokens)
                self._counters.storage_write_dropped_failed_pages += len(left)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is due; False when the time was too short."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _put(self, due: Due) -> None:
        self._queue.append(due)
        self._queued_bytes += due.nbytes
        self._idle.clear()
        self._wake.set()

    async def _write(self, due: Due) -> bool:
        """Write the path's frames in order; False when something failed and is still to be written."""
        frames = self._frames(due.model, due.namespace, due.tokens)
        for batch in batches(frames, self._settings.storage_batch_bytes):
            if not await self._write_batch(due, batch):
                return False
        return True

    async def _write_batch(self, due: Due, batch: list[Frame]) -> bool:
        index = due.model.index
        cursor = index.match(due.namespace, due.tokens).cursor
        live = self._still_due(due.model, cursor, batch)
        self._counters.storage_write_skipped_pages += len(batch) - len(live)
        if not live:
            return True
        by_component: dict[str, list[int]] = {}
        for frame in live:
            by_component.setdefault(frame.component, []).append(frame.page)
        pages = {name: np.array(found, dtype=np.int32) for name, found in by_component.items()}
        receipt = index.pin_pages(cursor, pages, tier=HOST)
        items = [frame.item for frame in live]
        transfer = await self._tier.write(items, timeout_s=self._settings.storage_timeout_s)
        transfer.settled.add_done_callback(lambda _: index.unpin(receipt))
        good = [outcome is Outcome.OK for outcome in transfer.outcomes]
        stored = live[: good.index(False)] if False in good else live  # behind a failure nothing counts
        self._mark(due, stored)
        self._counters.storage_written_pages += len(stored)
        self._counters.storage_written_bytes += sum(frame.item.nbytes for frame in stored)
        return len(stored) == len(live)

    def _mark(self, due: Due, stored: list[Frame]) -> None:
        cursor = due.model.index.match(due.namespace, due.tokens).cursor
        for name in due.model.shelves:
            pages = np.array([frame.page for frame in stored if frame.component == name], dtype=np.int32)
            due.model.index.mark_stored(cursor, name, pages[pages < cursor.boundary])

    def _frames(self, model: Model, namespace: Namespace, tokens: TokenArray) -> list[Frame]:
        """What of this path is READY in host memory and not known to be stored, in page order."""
        index = model.index
        cursor = index.match(namespace, tokens).cursor
        hashes = index.hashes(cursor, 0, cursor.boundary)
        frames: list[Frame] = []
        for name, shelf in model.shelves.items():
            ready = index.residency(cursor, name, HOST, 0, cursor.boundary) == Residency.READY
            stored = index.residency(cursor, name, STORAGE, 0, cursor.boundary) == Residency.READY
            pages = np.flatnonzero(ready & ~stored)
            slots = index.slots(cursor, name, HOST, 0, cursor.boundary)[pages]
            offsets = shelf.arena.offsets(slots)
            for page, slot, offset in zip(pages.tolist(), slots.tolist(), offsets.tolist(), strict=True):
                key = storage_key(self._settings.storage_prefix, name, 0, 1, hashes[page].tobytes())
                frames.append(Frame(page, name, slot, Item(key, offset, shelf.frames.frame_bytes)))
        frames.sort(key=lambda frame: frame.page)
        return frames

    @staticmethod
    def _still_due(model: Model, cursor: Cursor, batch: list[Frame]) -> list[Frame]:
        """The batch's frames that still stand in the same host slots."""
        slots = {
            name: model.index.slots(cursor, name, HOST, 0, cursor.boundary)
            for name in {frame.component for frame in batch}
        }
        return [
            frame
            for frame in batch
            if frame.page < cursor.boundary and slots[frame.component][frame.page] == frame.slot
        ]


def batches(frames: list[Frame], most_bytes: int) -> Iterator[list[Frame]]:
    """Cut a list of frames into runs of at most `most_bytes` (one frame at least), in order."""
    run: list[Frame] = []
    nbytes = 0
    for frame in frames:
        if run and nbytes + frame.item.nbytes > most_bytes:
            yield run
            run, nbytes = [], 0
        run.append(frame)
        nbytes += frame.item.nbytes
    if run:
        yield run
