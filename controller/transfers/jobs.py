"""Jobs: what is being transferred for whom, and the states a transfer may pass through.

The table below is the whole rule; a move that is not in it raises. Holds no bytes, slots or pins and
waits on nothing: whoever runs a job moves it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto


class JobKind(Enum):
    LOAD = "load"
    """Host to the engine."""
    BACKUP = "backup"
    """The engine to host."""
    PREFETCH = "prefetch"
    """Storage to host."""
    WRITE = "write"
    """Host to storage."""


class JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()
    """From RUNNING only when the last byte in flight has landed."""


_NEXT: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class IllegalMove(RuntimeError):  # noqa: N818 - the name is what it is
    """A job was moved to a state that cannot follow its own: an error in the program."""


class Job:
    """One transfer. Made by JobTable.open."""

    def __init__(self, job_id: int, kind: JobKind, engine_id: str, ended: Callable[[Job], None]) -> None:
        self.job_id = job_id
        self.kind = kind
        self.engine_id = engine_id
        self._state = JobState.QUEUED
        self._ended = ended

    @property
    def state(self) -> JobState:
        return self._state

    @property
    def finished(self) -> bool:
        """Whether no move is possible any more."""
        return not _NEXT[self._state]

    def move(self, state: JobState) -> None:
        """Go to `state`. Raises IllegalMove, and changes nothing, where the table does not allow it."""
        if state not in _NEXT[self._state]:
            raise IllegalMove(f"job {self.job_id} ({self.kind.value}): {self._state.name} -> {state.name}")
        self._state = state
        if self.finished:
            self._ended(self)


class JobTable:
    """The jobs that are not finished, by engine, and how many finished in which way.

    Belongs to the event loop, like the index. An engine's jobs are drained when `of` is empty.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[str, dict[int, Job]] = {}
        self._ended: Counter[tuple[JobKind, JobState]] = Counter()

    def open(self, kind: JobKind, engine_id: str) -> Job:
        """A new job, QUEUED."""
        job = Job(next(self._ids), kind, engine_id, self._close)
        self._open.setdefault(engine_id, {})[job.job_id] = job
        return job

    @contextmanager
    def job(self, kind: JobKind, engine_id: str) -> Iterator[Job]:
        """A job for as long as the block runs. Left well it is DONE, unless the block has moved it to another
        end; left by an error FAILED, or CANCELLED when no byte had begun to move."""
        job = self.open(kind, engine_id)
        try:
            yield job
        except BaseException:
            job.move(JobState.CANCELLED if job.state is JobState.QUEUED else JobState.FAILED)
            raise
        if job.state is JobState.QUEUED:  # there was nothing to move
            job.move(JobState.RUNNING)
        if not job.finished:
            job.move(JobState.DONE)

    def of(self, engine_id: str) -> tuple[Job, ...]:
        """The engine's unfinished jobs, oldest first."""
        return tuple(self._open.get(engine_id, {}).values())

    def n_open(self, engine_id: str | None = None) -> int:
        """Unfinished jobs, of one engine or of all."""
        if engine_id is not None:
            return len(self._open.get(engine_id, {}))
        return sum(len(jobs) for jobs in self._open.values())

    def n_ended(self, kind: JobKind, state: JobState) -> int:
        """Jobs that ended so since the start."""
        return self._ended[kind, state]

    def counters(self) -> Mapping[str, int]:
        """How many jobs of each kind ended in which way; every series from the start."""
        ends = [state for state, further in _NEXT.items() if not further]
        return {
            f"jobs_{kind.value}_{state.name.lower()}": self._ended[kind, state]
            for kind in JobKind
            for state in ends
        }

    def _close(self, job: Job) -> None:
        jobs = self._open[job.engine_id]
        del jobs[job.job_id]
        if not jobs:
            del self._open[job.engine_id]
        self._ended[job.kind, job.state] += 1
