"""Groups: the ranks of one engine, each a process with memory of its own, that decide as one.

Equal slot numbers in all ranks, one frame per rank in a host slot. What is decided for a request is
decided once, by whichever rank asks first, and told to every rank; what moves bytes is over for all
ranks together, well or not. An engine of one rank is a group of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from controller.memory.frames import FrameLayout
from controller.models import Model
from controller.requests import EngineSpec, Incomplete, TransferFailed
from controller.transfers.scheduler import Direction

T = TypeVar("T")
MOST_UNTOLD = 4096
"""Decisions kept for ranks that have not asked yet; the oldest go first."""


@dataclass(frozen=True)
class RankPart:
    """How an engine sees one rank's part of a host slot: in its own layout, at `offset`."""

    frames: FrameLayout
    offset_u64: np.uint64


class Engine:
    """One attached process: its memory, in its own layout, and its running jobs."""

    def __init__(self, spec: EngineSpec, model: Model, attached_s: float) -> None:
        self.spec = spec
        self.model = model
        self.attached_s = attached_s
        self.jobs: set[asyncio.Task[object]] = set()
        self.leaving = False
        self._own: dict[str, tuple[RankPart, ...]] = {}
        self._shared: dict[str, tuple[RankPart, ...]] = {}
        for name, shelf in model.shelves.items():
            own = FrameLayout(spec.layout, name, rank=spec.rank)
            self._own[name] = tuple(
                RankPart(own, np.uint64(part.offset)) for part in shelf.parts if part.rank == spec.rank
            )
            shared = any(pool.replicated for pool in spec.layout.pools_of(name)) and spec.rank > 0
            view = (RankPart(FrameLayout(spec.layout, name, shared_only=True), np.uint64(0)),)
            self._shared[name] = view if shared else ()

    def parts(self, component: str, direction: Direction) -> tuple[RankPart, ...]:
        """What this rank stores of a component, or loads: also what rank 0 keeps for all."""
        own = self._own[component]
        return own if direction is Direction.STORE else own + self._shared[component]


class Meeting(Generic[T]):
    """A step that all ranks take together: over when the last part is, and failed for all when one fails,
    leaves, or has not come in time. Parts that have begun always run to their end first."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._parts: dict[int, asyncio.Task[T]] = {}
        self._come = asyncio.Event()
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._absent = ""
        self.over = asyncio.ensure_future(self._hold())

    def joins(self, rank: int) -> bool:
        """Whether the rank can still take its part here."""
        return not self._come.is_set() and rank not in self._parts

    def take_part(self, rank: int, part: Awaitable[T]) -> None:
        self._parts[rank] = asyncio.ensure_future(part)
        if len(self._parts) == self._ranks:
            self._come.set()

    def leave(self, why: str) -> None:
        """A rank will not come: those who have need not wait for it."""
        if not self._come.is_set():
            self._absent = why
            self._come.set()

    async def _hold(self) -> list[T]:
        """Every part's result. Raises the first failure, or TransferFailed when a rank did not come."""
        try:
            await asyncio.wait_for(self._come.wait(), self._timeout_s)
        except TimeoutError:
            self._come.set()
            self._absent = f"not all ranks asked for it within {self._timeout_s} s"
        if self._parts:
            await asyncio.wait(self._parts.values())
        failures = [error for part in self._parts.values() if (error := part.exception())]
        if failures:
            raise failures[0]
        if self._absent:
            raise TransferFailed(
                f"group: {len(self._parts)} of {self._ranks} ranks took part: {self._absent}"
            )
        return [part.result() for part in self._parts.values()]


class Group:
    """The ranks of one engine. Made when the first attaches, gone when the last has left."""

    def __init__(self, group_id: str, model: Model) -> None:
        self.group_id = group_id
        self.model = model
        self.members: dict[int, Engine] = {}
        self._meetings: dict[Hashable, Meeting[int]] = {}
        self._running: set[Meeting[int]] = set()
        self._decided: dict[Hashable, list[object]] = {}
        self._told: dict[Hashable, dict[int, int]] = {}

    @property
    def ranks(self) -> int:
        return self.model.ranks

    def require_whole(self) -> None:
        """Raises Incomplete while a rank is missing or leaving."""
        here = [rank for rank, engine in self.members.items() if not engine.leaving]
        if len(here) < self.ranks:
            raise Incomplete(
                f"group {self.group_id!r}: {len(here)} of {self.ranks} ranks are attached; attach the others"
            )

    def decide(self, rank: int, about: Hashable, make: Callable[[], T]) -> T:
        """The n-th decision about something, for the rank that asks for the n-th time: made when the first
        rank asks, and the same for all. Forgotten when all have been told."""
        if self.ranks == 1:
            return make()
        decided = self._decided.setdefault(about, [])
        if len(self._decided) > MOST_UNTOLD:
            oldest = next(iter(self._decided))
            del self._decided[oldest], self._told[oldest]
        told = self._told.setdefault(about, dict.fromkeys(range(self.ranks), 0))
        if told[rank] == len(decided):
            decided.append(make())
        answer = decided[told[rank]]
        told[rank] += 1
        if min(told.values()):
            decided.pop(0)
            for one in told:
                told[one] -= 1
        if not decided:
            del self._decided[about], self._told[about]
        return answer  # type: ignore[return-value]  # `make` is of one type for one `about`

    async def meet(self, rank: int, about: Hashable, timeout_s: float, part: Awaitable[int]) -> int:
        """Take one's part in a step of all ranks; returns the sum of all parts when it is over."""
        meeting = self._meetings.get(about)
        if meeting is None or not meeting.joins(rank):
            meeting = self._meetings[about] = Meeting(self.ranks, timeout_s)
            self.opened(meeting)
        meeting.take_part(rank, part)
        try:
            return sum(await asyncio.shield(meeting.over))
        finally:
            if self._meetings.get(about) is meeting:
                del self._meetings[about]

    def opened(self, meeting: Meeting[int]) -> None:
        """A step has begun that a rank's leaving must end."""
        self._running.add(meeting)
        meeting.over.add_done_callback(lambda _: self._running.discard(meeting))

    def forget(self, why: str) -> None:
        """A rank is leaving: what is decided or under way among the ranks is void."""
        self._decided.clear()
        self._told.clear()
        for meeting in list(self._running):
            meeting.leave(why)
