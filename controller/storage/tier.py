"""StorageTier: batches to one backend in its worker process, each answered at its deadline at the latest.

Owns deadlines, the bound on bytes in flight, the worker's supervision and what health says of it. Trouble
is an outcome, never an exception. Only the outcome of I/O is judged here: whether the bytes are the right
ones is for the caller to verify.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controller.storage.budget import ByteBudget
from controller.storage.process import Replied, WorkerProcess
from storage_backends.base import Item, Outcome, StorageError, Usage
from storage_backends.messages import (
    Answer,
    Contains,
    Delete,
    Open,
    Operation,
    Probe,
    Probed,
    Read,
    WorkerSpec,
    Write,
)


@dataclass(frozen=True, kw_only=True)
class StorageLimits:
    """How long and how much, for one storage tier."""

    threads: int = 2
    """Reads, and writes, that the worker carries out at once."""
    in_flight_bytes: int = 64 << 20
    """Most bytes of reads, and as many of writes, under way at once; more wait within their deadline."""
    open_timeout_s: float = 60.0
    """Longest time for the backend to open; then the worker is killed and started anew."""
    hang_s: float = 5.0
    """A worker that is this late with an answer is killed and started anew."""
    probe_interval_s: float = 1.0
    """How often the backend's health and usage are asked, and the worker's lateness is looked at; one that
    is not later than this is no problem yet."""
    probe_timeout_s: float = 2.0
    restart_min_s: float = 0.1
    restart_max_s: float = 3.0
    """The pause before a restart doubles from the one to the other."""
    stop_timeout_s: float = 5.0
    """Longest time for `StorageTier.stop`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Outcomes of a batch, in the order of its items, and when its slab ranges may be used again.

    `settled` is done when no byte of the batch can move any more: the worker has replied or is dead. An
    item that is FAILED because its deadline passed may still be read into or written from until then.
    Await it shielded: a cancelled future says that it is done.
    """

    outcomes: list[Outcome]
    settled: asyncio.Future[None]


class StorageTier:
    """One storage backend. All methods on one event loop.

    A call must not be cancelled while it runs: its Transfer, and with it `settled`, would be lost. To give
    up early, pass a short timeout, or shield the call and await it later.
    """

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        slab_fd: int,
        slab_bytes: int,
        *,
        limits: StorageLimits | None = None,
    ) -> None:
        """The slab stays the caller's; it must stay open until `stop` has returned."""
        self.name = name
        self._slab_fd = slab_fd
        self._limits = limits or StorageLimits()
        self._open = Open(spec, slab_bytes, self._limits.threads)
        self._reads = ByteBudget(self._limits.in_flight_bytes)
        self._writes = ByteBudget(self._limits.in_flight_bytes)
        self._worker: WorkerProcess | None = None
        """The one that has opened its backend and lives."""
        self._spawned: WorkerProcess | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._first_try = asyncio.Event()
        self._down = "not started"
        """Why there is no worker to ask; "" while there is one."""
        self._batch_problem = ""
        self._probe_problem = ""
        """What the backend last said is wrong, asked for a batch or how it is; "" when it said nothing."""
        self._usage = Usage(0, 0, 0)
        self._counters = dict.fromkeys(TIER_COUNTERS, 0)

    async def start(self, *, strict: bool = False) -> None:
        """Start the worker, and wait for its first try to open the backend. When that fails it is tried
        again in the background for ever, and `problem` says why; with `strict` the tier is stopped and
        StorageError is raised instead."""
        self._down = "starting"
        self._first_try.clear()
        self._supervision = asyncio.create_task(self._supervise(), name=f"storage-{self.name}")
        self._supervision.add_done_callback(self._note_end_of_supervision)
        await self._first_try.wait()
        if strict and self._down:
            problem = self._down
            await self.stop()
            raise StorageError(problem)

    async def stop(self) -> bool:
        """Let what runs finish, within `stop_timeout_s`; then nothing of this tier runs. New requests are
        FAILED from the first moment. False when the worker could not be killed (the kernel holds it in a
        system call): then its transfers stay unsettled. A second stop does nothing."""
        self._worker, self._down = None, "stopped"
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait({supervision})
        worker, self._spawned = self._spawned, None
        return worker is None or await worker.close(self._limits.stop_timeout_s)

    async def contains(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        """OK, ABSENT or FAILED for each key, in order, within `timeout_s`."""

        def request(id_: int, deadline_s: float) -> Operation:
            return Contains(id_, deadline_s, list(keys))

        return (await self._ask("contains", len(keys), 0, None, request, timeout_s)).outcomes

    async def read(self, items: Sequence[Item], *, timeout_s: float) -> Transfer:
        """Fill the items' slab ranges. A range whose item is not OK has undefined content. Keep all ranges
        until `settled`."""

        def request(id_: int, deadline_s: float) -> Operation:
            return Read(id_, deadline_s, list(items))

        return await self._move("read", items, self._reads, request, timeout_s)

    async def write(self, items: Sequence[Item], *, timeout_s: float) -> Transfer:
        """Store the items' slab ranges. They must not change until `settled`. An item that is FAILED may
        be stored all the same; storing it again is harmless."""

        def request(id_: int, deadline_s: float) -> Operation:
            return Write(id_, deadline_s, list(items))

        return await self._move("write", items, self._writes, request, timeout_s)

    async def delete(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        """OK where an object was and is gone now, ABSENT where there was none, FAILED else."""

        def request(id_: int, deadline_s: float) -> Operation:
            return Delete(id_, deadline_s, list(keys))

        return (await self._ask("delete", len(keys), 0, None, request, timeout_s)).outcomes

    def usage(self) -> Usage:
        """What the backend held when it was last asked; zeros before that."""
        return self._usage

    @property
    def kind(self) -> str:
        """The backend's kind, as the configuration names it."""
        return str(self._open.spec.__struct_config__.tag)

    @property
    def healthy(self) -> bool:
        return not self.problem

    @property
    def problem(self) -> str:
        """What is wrong now and, where known, what to do; "" when nothing is."""
        if self._down:
            return self._down
        n_late, late_s = self._worker.overdue() if self._worker else (0, 0.0)
        if late_s > self._limits.probe_interval_s:
            return f"{n_late} storage operations are past their deadline, the longest by {late_s:.1f} s"
        return self._batch_problem or self._probe_problem

    def counters(self) -> Mapping[str, int]:
        """Items by operation and outcome, bytes, and what befell the worker; every name from the start."""
        return dict(self._counters)

    @property
    def worker_pid(self) -> int | None:
        """Of the worker that serves now."""
        return self._worker.pid if self._worker else None

    # requests

    async def _move(
        self,
        operation: str,
        items: Sequence[Item],
        budget: ByteBudget,
        request: Callable[[int, float], Operation],
        timeout_s: float,
    ) -> Transfer:
        nbytes = sum(item.nbytes for item in items)
        transfer = await self._ask(operation, len(items), nbytes, budget, request, timeout_s)
        moved = zip(items, transfer.outcomes, strict=True)
        ok_bytes = sum(item.nbytes for item, outcome in moved if outcome is Outcome.OK)
        self._counters[f"{operation}_bytes"] += ok_bytes
        return transfer

    async def _ask(
        self,
        operation: str,
        n_items: int,
        nbytes: int,
        budget: ByteBudget | None,
        request: Callable[[int, float], Operation],
        timeout_s: float,
    ) -> Transfer:
        """Ask the worker, if there is one, and count the outcomes."""
        deadline_s = time.monotonic() + timeout_s
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outcomes = [Outcome.FAILED] * n_items
        replied = await self._send(nbytes, budget, request, deadline_s) if n_items else None
        if replied is None:
            settled.set_result(None)
            self._counters["refused"] += n_items
        else:
            replied.add_done_callback(lambda _: _settle(settled))
            await asyncio.wait({replied}, timeout=max(0.0, deadline_s - time.monotonic()))
            outcomes = self._outcomes(replied, outcomes)
        for outcome in outcomes:
            self._counters[f"{operation}_{outcome.value}"] += 1
        return Transfer(outcomes, settled)

    async def _send(
        self,
        nbytes: int,
        budget: ByteBudget | None,
        request: Callable[[int, float], Operation],
        deadline_s: float,
    ) -> Replied | None:
        """None when the worker cannot be asked in time."""
        if self._worker is None:
            return None
        if budget is not None and not await budget.take(nbytes, deadline_s):
            return None
        worker = self._worker
        try:
            if worker is None:
                return None
            replied = worker.ask(deadline_s, lambda id_: request(id_, deadline_s))
            if budget is not None:
                taken_from, budget = budget, None
                replied.add_done_callback(lambda _: taken_from.give_back(nbytes))
            return replied
        finally:
            if budget is not None:
                budget.give_back(nbytes)

    def _outcomes(self, replied: Replied, failed: list[Outcome]) -> list[Outcome]:
        if not replied.done():
            self._counters["late"] += len(failed)
            return failed
        answer = replied.result()
        if not isinstance(answer, Answer) or len(answer.outcomes) != len(failed):
            return failed  # the worker died, or speaks nonsense
        self._batch_problem = answer.problem
        self._counters["batch_errors"] += bool(answer.problem)
        return answer.outcomes

    # the worker

    async def _supervise(self) -> None:
        """Keep a worker alive for ever."""
        pause_s = self._limits.restart_min_s
        while True:
            began_s = time.monotonic()
            self._down = await self._live_once()
            self._counters["worker_deaths"] += 1
            self._first_try.set()
            if time.monotonic() - began_s > self._limits.restart_max_s:
                pause_s = self._limits.restart_min_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._limits.restart_max_s)

    def _note_end_of_supervision(self, supervision: asyncio.Task[None]) -> None:
        """It ends by `stop`, or by a mistake of ours, which health must show."""
        if not supervision.cancelled() and (error := supervision.exception()) is not None:
            self._worker, self._down = None, f"the supervision of storage failed: {error!r}"
        self._first_try.set()

    async def _live_once(self) -> str:
        """One worker from spawn to death. Returns what health shall say until the next is there."""
        try:
            worker = await WorkerProcess.spawn(self._open, self._slab_fd)
        except OSError as error:
            return f"no storage worker can be started: {error}"
        self._spawned = worker
        self._counters["worker_starts"] += 1
        await asyncio.wait({worker.opened}, timeout=self._limits.open_timeout_s)
        problem = worker.opened.result() if worker.opened.done() else "opening the backend takes too long"
        if not problem:
            self._worker, self._down = worker, ""
            self._batch_problem = self._probe_problem = ""
            worker.ended.add_done_callback(self._note_death)
            self._first_try.set()
            problem = await self._watch(worker)
            self._worker = None
        self._down = problem
        self._first_try.set()
        worker.kill()
        await asyncio.wait({worker.ended})
        self._spawned = None
        return problem

    async def _watch(self, worker: WorkerProcess) -> str:
        """Until the worker is dead or hangs. Returns why it is given up."""
        replied = self._probe(worker)
        while not worker.ended.done():
            if replied.done():
                replied = self._probe(worker)
            await asyncio.wait({worker.ended}, timeout=self._limits.probe_interval_s)
            _, late_s = worker.overdue()
            if late_s > self._limits.hang_s:
                self._counters["hang_kills"] += 1
                return f"the storage worker hung for {late_s:.1f} s and is started anew"
        return self._down

    def _note_death(self, ended: asyncio.Future[str]) -> None:
        """At once, so that nobody asks a dead worker, or takes it for healthy."""
        if self._worker is not None:  # else somebody gave it up before, and said why
            self._worker, self._down = None, f"the storage worker {ended.result()} and is started anew"

    def _probe(self, worker: WorkerProcess) -> Replied:
        deadline_s = time.monotonic() + self._limits.probe_timeout_s
        replied = worker.ask(deadline_s, lambda id_: Probe(id_, deadline_s))
        replied.add_done_callback(self._note_probe)
        return replied

    def _note_probe(self, replied: Replied) -> None:
        answer = replied.result()
        if isinstance(answer, Probed):
            self._batch_problem, self._probe_problem = "", answer.problem
            self._usage = answer.usage or self._usage


def _settle(settled: asyncio.Future[None]) -> None:
    if not settled.done():  # a caller may have cancelled it
        settled.set_result(None)


TIER_COUNTERS = (
    *(
        f"{operation}_{outcome.value}"
        for operation in ("contains", "read", "write", "delete")
        for outcome in Outcome
    ),
    "read_bytes",
    "write_bytes",
    "late",
    "refused",
    "batch_errors",
    "worker_starts",
    "worker_deaths",
    "hang_kills",
)
