"""Events: what became READY where, and what is gone from where, and why, in order, for routers.

A bounded log that can be read again from a number; what has been pushed out of it is announced as missing,
never passed over. Changes nothing and waits for nobody: a slow reader loses events, not the daemon time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from hicache.core.journal import Move


class Reason(Enum):
    """Why a page came or went."""

    BACKUP = "backup"
    PREFETCH = "prefetch"
    WRITTEN = "written"
    FOUND = "found"
    """Storage said that it has it."""
    SNAPSHOT = "snapshot"
    """It was there when the watch began."""
    DEMOTED = "demoted"
    """Evicted from host memory; storage has it."""
    DROPPED = "dropped"
    """Evicted from host memory; it was the last copy."""
    CLEARED = "cleared"
    """A flush."""
    DETACHED = "detached"
    """The last storage tier was let go."""
    ABSENT = "absent"
    """Storage has it no longer."""
    CORRUPT = "corrupt"
    """What storage returned was damaged; it has been deleted there."""
    UNREADABLE = "unreadable"
    """Storage did not return it, though it may have it."""


class Kind(Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Removed, with all the tier holds that nobody uses, because an operator emptied or detached it."""


@dataclass(frozen=True)
class Record:
    """Pages that moved together, numbered one after the other from `first`."""

    first: int
    move: Move
    reason: Reason | None
    """None: each page's own, by whether it is READY elsewhere."""
    session_id: str

    @property
    def stop(self) -> int:
        return self.first + len(self.move.pages)

    @property
    def kind(self) -> Kind:
        if self.move.ready:
            return Kind.STORED
        return Kind.CLEARED if self.reason in (Reason.CLEARED, Reason.DETACHED) else Kind.REMOVED

    def reason_of(self, i: int) -> Reason:
        """Of the i-th page."""
        if self.reason is not None:
            return self.reason
        return Reason.DEMOTED if self.move.elsewhere[i] else Reason.DROPPED


@dataclass(frozen=True)
class Reading:
    """What a reader gets who asks from a number on."""

    missing: range
    """Numbers that are in the log no longer."""
    parts: tuple[tuple[Record, int, int], ...]
    """Records, and which of their pages: [start, stop)."""
    following: int
    """What to ask for next."""


class EventLog:
    """All events of one boot, as far as `capacity_pages` reach. Numbers begin with 1."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._records: list[Record] = []
        self._gone = 0
        """Records at the front of the list that do not count any more."""
        self._reason: Reason | None = None
        self._session_id = ""
        self._waiting: list[asyncio.Future[None]] = []
        self.following = 1
        """The number that the next event will have."""
        self.closed = False

    @property
    def oldest(self) -> int:
        """The lowest number that can still be read."""
        return self._records[self._gone].first if self._gone < len(self._records) else self.following

    @contextmanager
    def because(self, reason: Reason, session_id: str = "") -> Iterator[None]:
        """Why pages move until the end of the block, which must not await."""
        before = self._reason, self._session_id
        self._reason, self._session_id = reason, session_id
        try:
            yield
        finally:
            self._reason, self._session_id = before

    def moved(self, move: Move) -> None:
        """The index's journal."""
        record = Record(self.following, move, self._reason, self._session_id)
        self._records.append(record)
        self.following = record.stop
        while self.following - self.oldest > self._capacity and self._gone < len(self._records) - 1:
            self._gone += 1
        if self._gone > 64 and 2 * self._gone > len(self._records):
            del self._records[: self._gone]
            self._gone = 0
        self._wake()

    def read(self, number: int, most_pages: int) -> Reading:
        """From this number on, at most so many pages. What is missing comes before what is there."""
        start = max(number, self.oldest)
        parts: list[tuple[Record, int, int]] = []
        at = bisect_right(self._records, start, lo=self._gone, key=lambda record: record.first) - 1
        following = start
        while 0 <= at < len(self._records) and most_pages > 0:
            record = self._records[at]
            low = following - record.first
            high = min(record.stop - record.first, low + most_pages)
            if low < high:
                parts.append((record, low, high))
                following, most_pages = record.first + high, most_pages - (high - low)
            at += 1
        return Reading(range(number, start), tuple(parts), following)

    async def grown(self, number: int) -> bool:
        """Wait until there is an event of this number; False when the log is closed."""
        while self.following <= number and not self.closed:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        return not self.closed

    def close(self) -> None:
        """The daemon is stopping: readers that wait are told."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)
