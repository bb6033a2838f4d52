"""Write-through from host memory to storage: which frames are due, in which order, how often tried.

Every storage tier has a queue of its own. Parents before children: a path's frames are written in page
order, and what comes after a failure waits with it. A queue is bounded in bytes and pins nothing while it
waits, so that storage in trouble costs misses in storage and nothing else; it waits out an outage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from controller.counters import Counters
from controller.events import Reason
from controller.models import HOST, STORAGE, Model
from controller.settings import ControllerSettings
from controller.staging import Hold
from controller.storage import Member
from controller.transfers.jobs import Job, JobKind, JobState, JobTable
from hicache.core.identity import Namespace
from hicache.core.structure import Cursor
from hicache.core.words import NO_SLOT, Residency, TokenArray
from storage_backends.base import Item, Outcome

FIRST_RETRY_S = 0.1
"""Pause after a path's first failed write; doubled with every further one."""


class Frame(NamedTuple):
    """One page of one component due for storage."""

    page: int
    component: str
    items: tuple[Item, ...]
    """One object per rank; offsets count from where the page's host slot begins."""

    @property
    def key(self) -> str:
        return self.items[0].key

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def at(self, offset: int) -> Iterator[Item]:
        """Its objects when the host slot begins at `offset` in the slab."""
        return (Item(item.key, offset + item.offset, item.nbytes) for item in self.items)


@dataclass(eq=False)
class Due:
    """A path whose frames are to be written."""

    model: Model
    namespace: Namespace
    tokens: TokenArray
    frames: Sequence[Frame]
    hold: Hold | None = None
    """What keeps the frames in host memory until this and every other writer is through with them."""
    attempts: int = 0

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)


class StorageWriter:
    """The queue of one storage tier; one path is being written at a time."""

    def __init__(
        self, member: Member, jobs: JobTable, settings: ControllerSettings, counters: Counters
    ) -> None:
        self._member = member
        self._jobs = jobs
        self._settings = settings
        self._counters = counters
        self._queue: deque[Due] = deque()
        self._queued_bytes = 0
        self._due_keys: set[str] = set()
        """First keys of the frames that are queued or being written: nothing is due twice."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def n_queued(self) -> int:
        return len(self._queue) + (not self._idle.is_set() and not self._queue)

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def n_queued_frames(self) -> int:
        return sum(len(due.frames) for due in self._queue)

    def offer(self, due: Due) -> None:
        """Write in due time what is not due already. When the queue is full the longest-waiting paths are
        dropped for it, counted: theirs are the pages most likely gone from host memory."""
        known = [frame for frame in due.frames if frame.key in self._due_keys]
        self._through(due, known)
        due.frames = [frame for frame in due.frames if frame.key not in self._due_keys]
        if not due.frames:
            return
        self._due_keys.update(frame.key for frame in due.frames)
        self._queue.append(due)
        self._queued_bytes += due.nbytes
        self._idle.clear()
        self._wake.set()
        if self._settings.staging:
            return  # the ring, which holds these very frames, is the bound
        while self._queued_bytes > self._settings.write_queue_bytes:
            dropped = self._queue.popleft()
            self._queued_bytes -= dropped.nbytes
            self._over(dropped, dropped.frames)
            self._counters.storage_write_dropped_queue_full_pages += len(dropped.frames)

    async def run(self) -> None:
        """Write what is due, for ever."""
        while True:
            while not self._queue:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            if wait_s := self._member.breaker.wait_s():
                await asyncio.sleep(wait_s)  # an outage uses up nobody's attempts
                continue
            due = self._queue.popleft()
            self._queued_bytes -= due.nbytes
            with self._jobs.job(JobKind.WRITE, self._member.name) as job:
                try:
                    await self._write(due, job)
                except asyncio.CancelledError:
                    self._through(due, due.frames)
                    raise

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is due; False when the time was too short."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abandon(self) -> None:
        """Nothing of what is queued will be written: this writer has ended."""
        for due in self._queue:
            self._through(due, due.frames)

    def _over(self, due: Due, frames: Sequence[Frame]) -> None:
        self._due_keys.difference_update(frame.key for frame in frames)
        self._through(due, frames)

    def _through(self, due: Due, frames: Sequence[Frame]) -> None:
        if due.hold is not None:
            due.hold.ended(self._member.name, (frame.key for frame in frames))

    async def _write(self, due: Due, job: Job) -> None:
        """Write the path's frames in order; what is left after a failure is due again."""
        done = 0
        job.move(JobState.RUNNING)
        for batch in batches(due.frames, self._settings.storage_batch_bytes):
            written = await self._write_batch(due, batch)
            done += written
            self._over(due, batch[:written])
            if written < len(batch):
                break
        left = due.frames[done:]
        if not left:
            return
        job.move(JobState.FAILED)
        due.frames, due.attempts = left, due.attempts + 1
        if due.attempts >= self._settings.write_attempts:
            self._counters.storage_write_dropped_failed_pages += len(left)
            self._over(due, left)
            return
        self._counters.storage_write_retries += 1
        self._queue.appendleft(due)  # before its children, which others may have offered meanwhile
        self._queued_bytes += due.nbytes
        await asyncio.sleep(FIRST_RETRY_S * 2 ** (due.attempts - 1))

    async def _write_batch(self, due: Due, batch: Sequence[Frame]) -> int:
        """How many of the batch, from its start, need no further try."""
        index = due.model.index
        cursor = index.match(due.namespace, due.tokens).cursor
        live, offsets = self._still_due(due.model, cursor, batch)
        self._counters.storage_write_skipped_pages += len(batch) - len(live)
        if not live:
            return len(batch)
        by_component: dict[str, list[int]] = {}
        for frame in live:
            by_component.setdefault(frame.component, []).append(frame.page)
        pages = {name: np.array(found, dtype=np.int32) for name, found in by_component.items()}
        receipt = index.pin_pages(cursor, pages, tier=HOST)
        items = [item for frame, offset in zip(live, offsets, strict=True) for item in frame.at(offset)]
        moving = asyncio.ensure_future(self._member.move("write", items, self._settings.storage_timeout_s))

        def landed(_: object) -> None:
            index.unpin(receipt)
            if due.hold is not None:
                due.hold.landed(pages)

        moving.add_done_callback(lambda moved: moved.result().settled.add_done_callback(landed))
        transfer = await asyncio.shield(moving)  # the pin ends with the bytes, also when this writer is ended
        answers = iter(transfer.outcomes)
        became = [[next(answers) for _ in frame.items] for frame in live]
        failed = [Outcome.FAILED in outcomes for outcomes in became]
        ended = live[: failed.index(True)] if True in failed else live  # behind a failure nothing counts
        stored = [f for f, outcomes in zip(ended, became, strict=False) if set(outcomes) == {Outcome.OK}]
        self._mark(due, stored)
        self._counters.storage_written_pages += len(stored)
        self._counters.storage_written_bytes += sum(frame.nbytes for frame in stored)
        self._counters.storage_write_dropped_full_pages += len(ended) - len(stored)
        return len(batch) if len(ended) == len(live) else batch.index(live[len(ended)])

    @staticmethod
    def _mark(due: Due, stored: Sequence[Frame]) -> None:
        cursor = due.model.index.match(due.namespace, due.tokens).cursor
        for name in due.model.shelves:
            pages = np.array([frame.page for frame in stored if frame.component == name], dtype=np.int32)
            with due.model.because(Reason.WRITTEN):
                due.model.index.mark_stored(cursor, name, pages[pages < cursor.boundary])

    @staticmethod
    def _still_due(model: Model, cursor: Cursor, batch: Sequence[Frame]) -> tuple[list[Frame], list[int]]:
        """The batch's frames that are in host memory still, and where their slots begin now: frames move
        while they wait."""
        slots = {
            name: model.index.slots(cursor, name, HOST, 0, cursor.boundary)
            for name in {frame.component for frame in batch}
        }
        live = [
            frame
            for frame in batch
            if frame.page < cursor.boundary and slots[frame.component][frame.page] != NO_SLOT
        ]
        arenas = {name: model.shelves[name].arena for name in slots}
        return live, [int(arenas[one.component].offsets(slots[one.component][[one.page]])[0]) for one in live]


def due_frames(model: Model, namespace: Namespace, tokens: TokenArray, prefix: str) -> list[Frame]:
    """What of this path is READY in host memory and not known to be stored, in page order."""
    index = model.index
    cursor = index.match(namespace, tokens).cursor
    hashes = index.hashes(cursor, 0, cursor.boundary)
    frames: list[Frame] = []
    for name, shelf in model.shelves.items():
        ready = index.residency(cursor, name, HOST, 0, cursor.boundary) == Residency.READY
        stored = index.residency(cursor, name, STORAGE, 0, cursor.boundary) == Residency.READY
        pages = np.flatnonzero(ready & ~stored)
        for page in pages.tolist():
            frames.append(Frame(page, name, shelf.items(prefix, model.ranks, hashes[page].tobytes(), 0)))
    frames.sort(key=lambda frame: frame.page)
    return frames


def batches(frames: Sequence[Frame], most_bytes: int) -> Iterator[Sequence[Frame]]:
    """Cut frames into runs of at most `most_bytes` (one frame at least), in order."""
    start, nbytes = 0, 0
    for at, frame in enumerate(frames):
        if at > start and nbytes + frame.nbytes > most_bytes:
            yield frames[start:at]
            start, nbytes = at, 0
        nbytes += frame.nbytes
    if frames:
        yield frames[start:]
