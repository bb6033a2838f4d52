"""The scheduler: which copy moves next, on which thread.

Owns the copy threads. Loads overtake stores between chunks; stores age, so that loads cannot starve
them. A future resolves when no byte of its copy can move any more, whatever happened to it. Decides
nothing about slots, pages or what a failure costs, and never copies on the caller's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TypeVar, cast, overload

from controller.transfers.copies import CopyEngine, CopyTable

T = TypeVar("T")

STORE_PATIENCE_CHUNKS = 8
"""Chunks of loads that may overtake a waiting store before one of its chunks has its turn."""

CHUNK_BYTES = 4 << 20


class Direction(Enum):
    LOAD = "load"
    """Somebody waits for it: host to the engine, verifying what came from storage."""
    STORE = "store"
    """Nobody waits: the engine to host, sealing."""


class TransferCancelled(Exception):  # noqa: N818 - the name is what it is
    """The copy was cancelled, and its last byte in flight has landed. Targets are undefined."""


class SchedulerClosed(RuntimeError):  # noqa: N818
    """No copy thread is left to do the work: the scheduler was closed, or its threads have died."""


@dataclass(frozen=True)
class TransferCounts:
    """Since the start."""

    moved_bytes: int
    done: int
    failed: int
    cancelled: int


@dataclass(eq=False)
class _Work:
    """One submitted copy. The scheduler's mutex guards what changes."""

    direction: Direction
    chunks: deque[CopyTable]
    then: Callable[[], object]
    future: Future[object]
    in_flight: int = 0
    error: BaseException | None = None
    ending: bool = False
    """Nothing is left to copy: `then` runs, or the future is being resolved."""


class TransferScheduler:
    """Copies through `engine` on `threads` threads of its own."""

    def __init__(
        self,
        engine: CopyEngine,
        *,
        threads: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        store_patience_chunks: int = STORE_PATIENCE_CHUNKS,
    ) -> None:
        if threads < 1 or chunk_bytes < 1 or store_patience_chunks < 1:
            raise ValueError("threads, chunk_bytes and store_patience_chunks must be at least 1")
        self._engine = engine
        self._chunk_bytes = chunk_bytes
        self._patience = store_patience_chunks
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._queues: dict[Direction, deque[_Work]] = {d: deque() for d in Direction}
        self._works: dict[int, _Work] = {}
        """By the identity of their futures."""
        self._overtaken_chunks = 0
        self._moved_bytes = self._done = self._failed = self._cancelled = 0
        self._closed = False
        self._n_alive = threads
        self._deaths: list[str] = []
        self._threads = [
            threading.Thread(target=self._serve, name=f"hicache-copy-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @overload
    def submit(self, direction: Direction, table: CopyTable) -> Future[None]: ...
    @overload
    def submit(self, direction: Direction, table: CopyTable, *, then: Callable[[], T]) -> Future[T]: ...
    def submit(
        self, direction: Direction, table: CopyTable, *, then: Callable[[], T] | None = None
    ) -> Future[T] | Future[None]:
        """Queue a copy. `then` runs after the last byte, on the thread that moved it, and its value is
        the future's. The future ends in that value, in TransferCancelled, or in what the engine or
        `then` raised; its own `cancel` does nothing, because bytes may be moving. Table and memory
        belong to the copy until then. Raises SchedulerClosed."""
        chunks = deque(table.chunks(self._chunk_bytes))
        if then is None:
            return self._enqueue(direction, chunks, lambda: None)
        return self._enqueue(direction, chunks, then)

    def run(self, work: Callable[[], T], *, direction: Direction = Direction.LOAD) -> Future[T]:
        """Queue work without a copy, in turn with the copies of that direction. Raises SchedulerClosed."""
        return self._enqueue(direction, deque(), work)

    def cancel(self, future: Future[T]) -> bool:
        """Stop a copy: what has not begun is dropped, and the future ends in TransferCancelled when
        the last byte in flight has landed. False when it is ending already (`then` runs or has run)."""
        with self._mutex:
            work = self._works.get(id(future))
            if work is None or work.ending:
                return False
            self._abandon(work, TransferCancelled("the copy was cancelled"))
            ended = self._nothing_left(work)
        if ended:
            self._resolve(work)
        return True

    def counts(self) -> TransferCounts:
        with self._mutex:
            return TransferCounts(self._moved_bytes, self._done, self._failed, self._cancelled)

    def queued(self, direction: Direction) -> int:
        """Copies of which a part has not begun."""
        with self._mutex:
            return len(self._queues[direction])

    def problems(self) -> list[str]:
        """What is wrong with the copy threads; empty when all is well."""
        with self._mutex:
            if not self._deaths:
                return []
            n_dead = len(self._threads) - self._n_alive
            return [f"{n_dead} of {len(self._threads)} copy threads are dead", *self._deaths]

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel what has not begun, let chunks in flight land, end the threads. False when a thread has
        not ended in time: memory under its copy must then stay mapped. A second time is harmless."""
        with self._mutex:
            self._closed = True
            ended = self._drop_all(SchedulerClosed("the scheduler was closed"))
            self._changed.notify_all()
        for work in ended:
            self._resolve(work)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> TransferScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enqueue(self, direction: Direction, chunks: deque[CopyTable], then: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on Future.cancel is refused
        work = _Work(direction, chunks, then, cast("Future[object]", future))
        with self._mutex:
            if self._closed or not self._n_alive:
                raise SchedulerClosed("no copy thread is left: closed, or all have died (see problems)")
            self._works[id(future)] = work
            self._queues[direction].append(work)
            self._changed.notify(max(1, len(chunks)))
        return future

    def _serve(self) -> None:
        """A copy thread's life."""
        try:
            while (turn := self._next_turn()) is not None:
                self._take_turn(*turn)
        except BaseException as error:  # noqa: BLE001 - last line of defence: counted, shown by problems()
            self._died(error)

    def _next_turn(self) -> tuple[_Work, CopyTable | None] | None:
        """Wait for something to do; None when the scheduler is closed."""
        with self._mutex:
            while (direction := self._choose()) is None:
                if self._closed:
                    return None
                self._changed.wait()
            queue = self._queues[direction]
            work = queue[0]
            chunk = work.chunks.popleft() if work.chunks else None
            if not work.chunks:
                queue.popleft()
            work.in_flight += 1
            return work, chunk

    def _choose(self) -> Direction | None:
        loads, stores = self._queues[Direction.LOAD], self._queues[Direction.STORE]
        if loads and not (stores and self._overtaken_chunks >= self._patience):
            self._overtaken_chunks = self._overtaken_chunks + 1 if stores else 0
            return Direction.LOAD
        self._overtaken_chunks = 0
        return Direction.STORE if stores else None

    def _take_turn(self, work: _Work, chunk: CopyTable | None) -> None:
        error: BaseException | None = None
        if chunk is not None:
            try:
                self._engine.copy(chunk)
            except BaseException as raised:  # noqa: BLE001 - it becomes the future's, and counts as failed
                error = raised
        with self._mutex:
            work.in_flight -= 1
            if error is not None:
                self._abandon(work, error)
            elif chunk is not None:
                self._moved_bytes += chunk.total_bytes
            ended = self._nothing_left(work)
        if ended:
            error = self._finish(work) or error
        if error is not None and not isinstance(error, Exception):
            raise error

    def _abandon(self, work: _Work, error: BaseException) -> None:
        """Drop what has not begun. The first error is the one that is told."""
        work.error = work.error or error
        work.chunks.clear()
        if work in self._queues[work.direction]:
            self._queues[work.direction].remove(work)

    def _nothing_left(self, work: _Work) -> bool:
        """Whether the last byte has landed; says so once."""
        if work.ending or work.chunks or work.in_flight:
            return False
        work.ending = True
        return True

    def _finish(self, work: _Work) -> BaseException | None:
        """After the last byte: run `then`, unless the copy failed, and resolve the future. Returns what
        `then` raised."""
        if work.error is not None:
            self._resolve(work)
            return None
        try:
            value = work.then()
        except BaseException as error:  # noqa: BLE001 - it becomes the future's, and counts as failed
            work.error = error
            self._resolve(work)
            return error
        self._resolve(work, value)
        return None

    def _resolve(self, work: _Work, value: object = None) -> None:
        with self._mutex:
            del self._works[id(work.future)]
            if work.error is None:
                self._done += 1
            elif isinstance(work.error, TransferCancelled | SchedulerClosed):
                self._cancelled += 1
            else:
                self._failed += 1
        if work.error is None:
            work.future.set_result(value)
        else:
            work.future.set_exception(work.error)

    def _drop_all(self, error: Exception) -> list[_Work]:
        """Abandon everything queued; returns what has ended by that."""
        works = [work for queue in self._queues.values() for work in queue]
        for work in works:
            self._abandon(work, error)
        return [work for work in works if self._nothing_left(work)]

    def _died(self, error: BaseException) -> None:
        with self._mutex:
            self._n_alive -= 1
            self._deaths.append(f"a copy thread died: {type(error).__name__}: {error}")
            ended = [] if self._n_alive else self._drop_all(SchedulerClosed("the last copy thread died"))
        for work in ended:
            self._resolve(work)
