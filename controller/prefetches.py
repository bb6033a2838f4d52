"""Prefetches: frames from storage to host memory, before they are needed, with a deadline.

One existence query over all components, then coverage decides which frames to read, and only those
are read. What arrived is kept for the engine until its next lookup for the request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from controller.counters import Counters
from controller.host import HostMemory
from controller.models import HOST, STORAGE, Model
from controller.reader import StorageReader
from controller.requests import Prefetch, PrefetchPolicy, PrefetchState, Progress
from controller.settings import ControllerSettings
from controller.staging import let_go
from controller.transfers.jobs import Job, JobKind, JobState, JobTable
from hicache.core.coverage import Coverage, joint_boundary
from hicache.core.identity import Namespace, page_hashes
from hicache.core.pins import Receipt
from hicache.core.words import BoolArray, PageArray, Residency, TokenArray

READS_AT_ONCE = 4
"""Batches of one prefetch that are read at the same time."""
ENDED = frozenset({PrefetchState.DONE, PrefetchState.CANCELLED, PrefetchState.FAILED})


def deadline_s(request: Prefetch, settings: ControllerSettings) -> float:
    """How long a prefetch may take from its start, in seconds, by its policy."""
    if request.policy is not PrefetchPolicy.TIMEOUT:
        return settings.prefetch_max_s
    if request.timeout_s > 0:
        return min(request.timeout_s, settings.prefetch_max_s)
    steps = len(request.lookup.prompt.tokens) / 1024
    return min(settings.prefetch_base_s + settings.prefetch_per_1k_tokens_s * steps, settings.prefetch_max_s)


@dataclass(frozen=True)
class Choice:
    """Which frames a prefetch should read."""

    wanted: Mapping[str, PageArray]
    boundary: int
    """What can be used when all of it has arrived."""
    storage_boundary: int
    """What storage could have served."""
    reason: str = ""


def choose(
    coverages: Mapping[str, Coverage],
    have: Mapping[str, BoolArray],
    stored: Mapping[str, BoolArray],
    threshold_pages: int,
    frame_bytes: Mapping[str, int],
    room_bytes: int,
) -> Choice:
    """The frames that coverage needs at the deepest boundary storage can serve and room allows.

    `have` and `stored` hold one entry per page: what the engine or host memory has, what storage has.
    """
    n_pages = len(next(iter(have.values())))
    rules = list(coverages.values())
    now = joint_boundary(rules, [have[name] for name in coverages], n_pages)
    reachable = [have[name] | stored[name] for name in coverages]
    deepest = boundary = joint_boundary(rules, reachable, n_pages)
    if deepest - now < max(1, threshold_pages):
        return Choice({}, now, deepest, "below_threshold" if deepest > now else "")
    while boundary - now >= max(1, threshold_pages):
        wanted = {}
        for name, coverage in coverages.items():
            start = coverage.start(boundary)
            wanted[name] = (start + np.flatnonzero(~have[name][start:boundary])).astype(np.int32)
        if sum(len(pages) * frame_bytes[name] for name, pages in wanted.items()) <= room_bytes:
            return Choice(wanted, boundary, deepest, "" if boundary == deepest else "host_capacity")
        boundary = joint_boundary(rules, reachable, boundary - 1)
    return Choice({}, now, deepest, "host_capacity")


@dataclass(eq=False)
class Run:
    """One prefetch from its start until its result is forgotten."""

    owner: str
    """The group that asked."""
    request: Prefetch
    model: Model
    namespace: Namespace
    tokens: TokenArray
    """Whole pages only, up to the caller's limit."""
    ends_s: float
    state: PrefetchState = PrefetchState.PLANNING
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    storage_boundary: int = 0
    arrived_pages: int = 0
    wanted_pages: int = 0
    reason: str = ""
    receipts: list[Receipt] = field(default_factory=list)
    """Pins on what arrived and on what it needs."""
    pinned_bytes: int = 0
    coming_bytes: int = 0
    """Of what is being read and not pinned yet."""

    @property
    def n_pages(self) -> int:
        return len(self.tokens) // self.model.page_size

    def available(self) -> dict[str, BoolArray]:
        """Per component, which pages the engine or host memory has now."""
        cursor = self.model.index.match(self.namespace, self.tokens).cursor
        out = {}
        for name in self.model.shelves:
            out[name] = self.model.held(cursor, name, self.n_pages) == Residency.READY
            device = self.request.lookup.device.get(name)
            if device is not None:
                n_pages = min(self.n_pages, len(device))
                out[name][:n_pages] |= device[:n_pages]
        return out

    def boundary(self) -> int:
        return joint_boundary(
            list(self.model.coverages.values()), list(self.available().values()), self.n_pages
        )

    def pin(self, pages: Mapping[str, PageArray]) -> None:
        cursor = self.model.index.match(self.namespace, self.tokens).cursor
        self.receipts.append(self.model.index.pin_pages(cursor, pages, tier=HOST))
        self.pinned_bytes += self.nbytes(pages)

    def nbytes(self, pages: Mapping[str, PageArray]) -> int:
        """Host memory that these pages take."""
        return sum(len(row) * self.model.shelves[name].slot_bytes for name, row in pages.items())

    def unpin(self) -> None:
        while self.receipts:
            self.model.index.unpin(self.receipts.pop())
        self.pinned_bytes = 0


class Prefetches:
    """All prefetches of one controller."""

    def __init__(
        self,
        host: HostMemory,
        reader: StorageReader,
        jobs: JobTable,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        self._host = host
        self._reader = reader
        self._jobs = jobs
        self._settings = settings
        self._counters = counters
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._ending: set[Run] = set()
        """Forgotten, but their last bytes have not landed."""
        self._ids = itertools.count(1)

    def start(self, owner: str, model: Model, request: Prefetch) -> str:
        lookup = request.lookup
        n_pages = len(lookup.prompt.tokens) // model.page_size
        n_pages = min(n_pages, lookup.limit_pages or n_pages)
        run = Run(
            owner,
            request,
            model,
            model.namespace(lookup.prompt),
            lookup.prompt.tokens[: n_pages * model.page_size],
            asyncio.get_running_loop().time() + deadline_s(request, self._settings),
        )
        prefetch_id = f"prefetch-{next(self._ids)}"
        self._runs[prefetch_id] = run, asyncio.create_task(self._execute(run), name=prefetch_id)
        self._counters.prefetches += 1
        return prefetch_id

    @property
    def n_running(self) -> int:
        """Prefetches that have not ended."""
        return sum(not task.done() for _, task in self._runs.values())

    def knows(self, owner: str, prefetch_id: str) -> bool:
        return prefetch_id in self._runs and self._runs[prefetch_id][0].owner == owner

    async def wait(self, prefetch_id: str) -> Progress:
        """As long as the policy says; what has not arrived then is no longer read for this request."""
        run, task = self._runs[prefetch_id]
        if run.request.policy is not PrefetchPolicy.BEST_EFFORT:
            left = run.ends_s - asyncio.get_running_loop().time()
            await asyncio.wait([task], timeout=max(0.0, left))
        if not task.done():
            run.stopping.set()
            run.reason = run.reason or "deadline"
            self._counters.prefetch_cut_deadline += 1
        return self._progress(run)

    async def cancel(self, prefetch_id: str) -> Progress:
        """Stop, and return when the last byte has landed."""
        run, task = self._runs[prefetch_id]
        run.stopping.set()
        await asyncio.wait([task])
        return self._progress(run)

    def consumed(self, owner: str, request_id: str) -> None:
        """The engine has looked up: what was kept for the request is ordinary from now on."""
        for prefetch_id, (run, _) in list(self._runs.items()):
            if run.owner == owner and run.request.lookup.prompt.request_id == request_id:
                self._forget(prefetch_id)

    async def forget_owner(self, owner: str) -> None:
        """Stop a group's prefetches and return when their last bytes have landed."""
        for prefetch_id, (run, _) in list(self._runs.items()):
            if run.owner == owner:
                await self.cancel(prefetch_id)
                self._forget(prefetch_id)

    def expire(self) -> None:
        """Forget prefetches that no lookup has followed for a lease's time after their deadline."""
        now = asyncio.get_running_loop().time()
        for prefetch_id, (run, _) in list(self._runs.items()):
            if run.ends_s + self._settings.lease_s < now:
                self._forget(prefetch_id)

    def _progress(self, run: Run) -> Progress:
        return Progress(
            run.state, run.boundary(), run.storage_boundary, run.arrived_pages, run.wanted_pages, run.reason
        )

    def _forget(self, prefetch_id: str) -> None:
        run, task = self._runs.pop(prefetch_id)
        run.stopping.set()
        if task.done():
            self._unpin(run)
        else:
            self._ending.add(run)
            task.add_done_callback(lambda _: self._unpin(run))

    def _unpin(self, run: Run) -> None:
        self._ending.discard(run)
        run.unpin()
        if self._settings.staging:
            let_go(run.model, run.namespace, run.tokens)

    @property
    def _held_bytes(self) -> int:
        """Host memory that prefetches hold, or are about to: also those that have ended and are kept for
        their engines."""
        runs = itertools.chain((run for run, _ in self._runs.values()), self._ending)
        return sum(run.pinned_bytes + run.coming_bytes for run in runs)

    # -- the run -------------------------------------------------------------------------------------

    async def _execute(self, run: Run) -> None:
        with self._jobs.job(JobKind.PREFETCH, run.owner) as job:
            await self._carry_out(run, job)
            if run.state is PrefetchState.CANCELLED:
                job.move(JobState.CANCELLED)

    async def _carry_out(self, run: Run, job: Job) -> None:
        try:
            try:
                async with asyncio.timeout_at(run.ends_s):
                    wanted = await self._plan(run)
            except TimeoutError:
                wanted = {}
                run.reason = "deadline"
                self._counters.prefetch_cut_deadline += 1
            if any(map(len, wanted.values())) and not run.stopping.is_set():
                run.state = PrefetchState.READING
                job.move(JobState.RUNNING)
                await self._read(run, wanted)
            run.state = PrefetchState.CANCELLED if run.stopping.is_set() else PrefetchState.DONE
            self._counters.prefetch_cancelled += run.stopping.is_set()
        finally:
            if run.state not in ENDED:
                run.state = PrefetchState.FAILED

    async def _plan(self, run: Run) -> Mapping[str, PageArray]:
        """Ask storage once for every frame that nobody here has; choose what to read, and pin what the
        chosen boundary needs and host memory has."""
        hashes = page_hashes(run.namespace.seed(), run.tokens, run.model.page_size)
        asked = {name: np.flatnonzero(~held).astype(np.int32) for name, held in run.available().items()}
        stored, complete = await self._reader.stored(run.model, hashes, asked)
        if complete:
            self._reader.remember(run.model, run.namespace, run.tokens, asked, stored)
        else:
            run.reason = "storage"
        await run.model.fills_ended(run.namespace, run.tokens)  # join others rather than read twice
        self._add_known(run, stored)
        model = run.model
        choice = choose(
            model.coverages,
            run.available(),
            stored,
            self._settings.prefetch_threshold_pages,
            {name: shelf.slot_bytes for name, shelf in model.shelves.items()},
            int(self._host.capacity_bytes * self._settings.prefetch_host_share) - self._held_bytes,
        )
        run.storage_boundary = choice.storage_boundary
        run.wanted_pages = sum(map(len, choice.wanted.values()))
        run.reason = choice.reason or run.reason
        self._counters.prefetch_below_threshold += choice.reason == "below_threshold"
        self._counters.prefetch_cut_host_capacity += choice.reason == "host_capacity"
        if run.wanted_pages:
            run.pin(self._needed(run, choice.boundary))
        return choice.wanted

    @staticmethod
    def _add_known(run: Run, stored: Mapping[str, BoolArray]) -> None:
        """Storage was not asked for what host memory had. Some of that may have been evicted meanwhile:
        add what is known to be stored."""
        index = run.model.index
        cursor = index.match(run.namespace, run.tokens).cursor
        known = min(run.n_pages, cursor.boundary)
        for name, there in stored.items():
            there[:known] |= index.residency(cursor, name, STORAGE, 0, known) == Residency.READY

    @staticmethod
    def _needed(run: Run, boundary: int) -> dict[str, PageArray]:
        """What host memory has of what the boundary needs."""
        model, needed = run.model, {}
        cursor = model.index.match(run.namespace, run.tokens).cursor
        for name, coverage in model.coverages.items():
            start = coverage.start(boundary)
            ready = model.held(cursor, name, boundary)[start:] == Residency.READY
            needed[name] = (start + np.flatnonzero(ready)).astype(np.int32)
        return needed

    async def _read(self, run: Run, wanted: Mapping[str, PageArray]) -> None:
        """Several batches at a time: windows and checkpoints first, without which the rest serves nothing,
        then whole-path pages from the start."""
        model = run.model
        batches = self._batches(model, wanted)
        run.coming_bytes = run.nbytes(wanted)
        try:
            ended = await asyncio.gather(
                *(self._read_from(run, batches) for _ in range(READS_AT_ONCE)), return_exceptions=True
            )
        finally:
            run.coming_bytes = 0
        for error in ended:
            if error is not None:
                raise error

    async def _read_from(self, run: Run, batches: Iterator[tuple[str, PageArray]]) -> None:
        """Batch after batch from the iterator that all readers of this run share."""
        for name, pages in batches:
            left = run.ends_s - asyncio.get_running_loop().time()
            if run.stopping.is_set() or left <= 0:
                run.reason = run.reason or "deadline"
                return
            timeout_s = min(left, self._settings.storage_timeout_s)
            fetched = await self._reader.fetch(run.model, run.namespace, run.tokens, name, pages, timeout_s)
            run.coming_bytes -= run.nbytes({name: pages})
            run.pin({name: fetched.arrived})
            run.arrived_pages += len(fetched.arrived)
            if len(fetched.arrived) < len(pages):
                run.reason = run.reason or ("host_capacity" if fetched.no_room else "storage")
                if fetched.no_room:
                    return

    def _batches(self, model: Model, wanted: Mapping[str, PageArray]) -> Iterator[tuple[str, PageArray]]:
        for name in sorted(wanted, key=lambda name: model.shelves[name].whole_path):
            frame_bytes = model.shelves[name].slot_bytes
            per_batch = max(1, self._settings.storage_batch_bytes // frame_bytes)
            for start in range(0, len(wanted[name]), per_batch):
                yield name, wanted[name][start : start + per_batch]
