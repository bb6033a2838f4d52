"""HybridCacheController: every verb of the service, in our own types.

Runs on one event loop, which owns the index: decisions are plain function calls between awaits, and
what an await may have changed is looked up again. Bytes move on copy threads and storage workers.
Speaks no protobuf and opens no socket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

import numpy as np

from controller.backups import Backups
from controller.contents import Contents
from controller.copying import Copier, ReadyWaits
from controller.counters import Counters
from controller.events import EventLog
from controller.groups import Engine, Group
from controller.host import HostMemory
from controller.leases import Lease, LeaseTable
from controller.memory.slab import HostSlab, SlabError
from controller.models import HOST, STORAGE, Model
from controller.prefetches import Prefetches
from controller.preserving import Preserving
from controller.reader import StorageReader
from controller.requests import (
    Backup,
    BackupOutcome,
    CloseSession,
    EngineSpec,
    EngineStatus,
    Found,
    Gone,
    InvalidRequest,
    Load,
    Lookup,
    Placement,
    Prefetch,
    Progress,
    RequestError,
    Status,
    TransferFailed,
    UnknownEngine,
)
from controller.retention import Retention
from controller.sessions import SessionBook, SessionName
from controller.settings import ControllerSettings
from controller.shelving import Shelving
from controller.staging import drop
from controller.storage import StorageStack
from controller.transfers.jobs import Job, JobKind, JobTable
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache.core.layout import LayoutError
from hicache.core.words import BoolArray, PageArray

T = TypeVar("T")
TICK_S = 0.5
"""How often leases and prefetches are looked at for expiry."""


class HybridCacheController:
    """Moves component payloads and their sidecars between tiers, and knows where everything is."""

    def __init__(
        self,
        settings: ControllerSettings,
        slab: HostSlab,
        scheduler: TransferScheduler,
        ready: ReadyWaits | None = None,
    ) -> None:
        """`ready`: waits for engines' GPU events; None where no GPU is used."""
        self.boot_id = uuid.uuid4().hex
        self.counters = Counters()
        self._settings = settings
        self._scheduler = scheduler
        self.events = EventLog(settings.events_pages) if settings.events_pages else None
        """What came and went, where and why; None when it is not kept."""
        self._host = HostMemory(slab, self.counters, settings.host_shares, self.events)
        self.contents = Contents(self._host)
        """What the tiers hold now."""
        self._jobs = JobTable()
        self._engines: dict[str, Engine] = {}
        self._groups: dict[str, Group] = {}
        self._leases = LeaseTable(settings.lease_s, self._now)
        if settings.staging:
            self._leases.ended = self._let_go
        self._copier = Copier(scheduler, settings.copy_timeout_s, ready)
        stack = StorageStack()
        self._sessions = SessionBook()
        self.storage = Shelving(stack, self._host, self._jobs, settings, self.counters)
        """The storage tiers: to attach, update and detach them."""
        self._backups = Backups(
            self._host, self._copier, self.storage, self._sessions, settings, self.counters
        )
        reader = StorageReader(stack, self._host, scheduler, settings, self.counters)
        self._prefetches = Prefetches(self._host, reader, self._jobs, settings, self.counters)
        self.retention = Retention(self._host, settings, self.counters, self._model, self._now)
        """Prefixes that operators want kept: to end and to list them."""
        self.preserving = Preserving(self._host, reader, self.storage)
        """Flushes that store everything first."""
        self._background: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the background work."""
        self._background.append(asyncio.create_task(self._expire_for_ever(), name="expiry"))

    async def stop(self, drain_s: float) -> None:
        """Detach every engine, write what is due within `drain_s`, stop the background work."""
        for engine_id in list(self._engines):
            await self.detach(engine_id)
        await self.storage.stop(drain_s)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background.clear()

    def attach(self, spec: EngineSpec) -> None:
        """Let an engine in. Raises InvalidRequest, with nothing changed, when its layout cannot be
        served or its id is taken."""
        if spec.engine_id in self._engines:
            raise InvalidRequest(f"engine_id: {spec.engine_id!r} is attached; detach it or use another id")
        group_id = spec.group_id or spec.engine_id
        if not 0 <= spec.rank < spec.ranks:
            raise InvalidRequest(f"rank: {spec.rank} of {spec.ranks}; a rank is below the number of ranks")
        try:
            spec.layout.validate([region.nbytes for region in spec.regions])
            model = self._host.model(spec.model, spec.revision, spec.layout, spec.ranks)
        except (LayoutError, SlabError) as error:
            raise InvalidRequest(str(error)) from error
        group = self._groups.get(group_id) or Group(group_id, model)
        if group.model is not model:
            raise InvalidRequest(
                f"group_id: {group_id!r} has another model, layout or number of ranks; all ranks must agree"
            )
        if spec.rank in group.members:
            raise InvalidRequest(f"rank: {spec.rank} of group {group_id!r} is attached already")
        self._groups[group_id] = group
        engine = self._engines[spec.engine_id] = Engine(spec, model, self._now())
        group.members[spec.rank] = engine

    async def detach(self, engine_id: str) -> None:
        """Let an engine go: no new requests, its jobs drained, its leases and prefetches (its group's, where
        it is one rank of several) ended. After this nothing reads or writes its regions."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        engine.leaving = True
        group = self._group(engine)
        group.forget(f"rank {engine.spec.rank} has left")
        await self._prefetches.forget_owner(group.group_id)
        if engine.jobs:
            await asyncio.wait(engine.jobs)
        for lease in self._leases.of_owner(group.group_id):
            self._leases.release(lease)
        del self._engines[engine_id]
        del group.members[engine.spec.rank]
        if not group.members:
            del self._groups[group.group_id]

    # -- the verbs -----------------------------------------------------------------------------------

    def lookup(self, lookup: Lookup) -> Found:
        """The deepest boundary over L1 and L2, with a lease on what must be loaded. In memory only."""
        engine, group = self._whole(lookup.prompt.engine_id)
        self._check_components("device", lookup.device, engine.model)
        about = ("lookup", lookup.prompt.request_id)
        return group.decide(engine.spec.rank, about, lambda: self._lookup(group, lookup))

    def _lookup(self, group: Group, lookup: Lookup) -> Found:
        model, prompt = group.model, lookup.prompt
        n_pages = len(prompt.tokens) // model.page_size
        limit = min(n_pages, lookup.limit_pages or n_pages)
        namespace = model.namespace(prompt)
        match = model.index.match(namespace, prompt.tokens, limit_pages=limit, device=lookup.device)
        boundary = match.boundaries[HOST]
        load = self._to_load(model, boundary, lookup.device)
        lease_id = ""
        if load:
            receipt = model.index.pin_pages(match.cursor, load, tier=HOST)
            lease_id = self._leases.grant(
                group.group_id, group.ranks, model.index, match.cursor, receipt, load
            ).lease_id
            self.counters.leases_granted += 1
        if boundary:
            model.index.touch(match.cursor, min(boundary, match.n_pages))
            self.retention.hit(namespace, prompt.tokens)
        self._prefetches.consumed(group.group_id, prompt.request_id)
        self._sessions.begin(model, group.group_id, prompt)
        self._count_lookup(model, limit, boundary, match.n_pages, load)
        return Found(
            lease_id=lease_id,
            boundary=boundary,
            load=load,
            storage_boundary=match.boundaries[STORAGE],
            matched_pages=match.n_pages,
            branching_boundary=match.branching_boundary,
            lease_s=self._settings.lease_s,
        )

    def _let_go(self, lease: Lease) -> None:
        """Direct mode: what was read for an engine goes with its lease."""
        model = next(model for model in self._host.models if model.index is lease.index)
        drop(model, lease.cursor, lease.pages)

    def release(self, engine_id: str, lease_id: str) -> None:
        """End a lease. One that has ended already is fine: releasing twice is not an error here."""
        engine = self._engine(engine_id)
        lease = self._leases.find(self._group(engine).group_id, lease_id)
        if lease:
            self._leases.release(lease, engine.spec.rank)

    def close_session(self, close: CloseSession) -> bool:
        """End a session: its pages are ordinary from now on. False when it was not open."""
        model = self._engine(close.engine_id).model
        name = SessionName(close.salt, close.session_id)
        return self._sessions.close(model, name, close.session_generation)

    async def load(self, load: Load) -> int:
        """Copy leased host frames into the engine's slots; returns bytes when all have landed."""
        engine, group = self._whole(load.engine_id)
        lease = self._leases.find(group.group_id, load.lease_id)
        if lease is None:
            raise Gone(f"lease_id: {load.lease_id!r} has ended or is not yours; look up again")
        self._check_components("components", load.components, engine.model)
        for name, placement in load.components.items():
            self._check_placement(engine, name, placement)
            if not np.isin(placement.pages, lease.pages.get(name, np.empty(0, np.int32))).all():
                raise InvalidRequest(f"components[{name!r}].pages: not all are under lease {load.lease_id!r}")
        self._copier.check(engine, load.ready, load.cells)

        async def copy(job: Job) -> int:
            model = engine.model
            slots = {}
            for name, (pages, device) in ((n, (p.pages, p.slots)) for n, p in load.components.items()):
                if len(pages):
                    host = model.index.slots(lease.cursor, name, HOST, 0, int(pages[-1]) + 1)[pages]
                    slots[name] = device, host
            return await self._copier.copy(
                Direction.LOAD, engine, slots, job, ready=load.ready, cells=load.cells
            )

        async def step(job: Job) -> int:
            """The job itself uses the lease: a caller that gives up does not end the use."""
            try:
                about = ("load", load.lease_id)
                return await group.meet(engine.spec.rank, about, 2 * self._settings.copy_timeout_s, copy(job))
            finally:
                self._leases.end_use(lease)

        self._leases.begin_use(lease)
        try:
            nbytes = await self._job(JobKind.LOAD, engine, step)
        except TransferFailed:
            self.counters.load_failures += 1
            raise
        self.counters.loads += 1
        self.counters.load_bytes += nbytes
        self.counters.load_pages += sum(len(placement.pages) for placement in load.components.values())
        return nbytes

    async def backup(self, backup: Backup) -> Mapping[str, BackupOutcome]:
        """Copy new pages from the engine's slots to host frames; returns when they can be read."""
        engine, group = self._whole(backup.prompt.engine_id)
        self._check_components("components", backup.components, engine.model)
        n_pages = len(backup.prompt.tokens) // engine.model.page_size
        for name, placement in backup.components.items():
            self._check_placement(engine, name, placement)
            if len(placement.pages) and placement.pages[-1] >= n_pages:
                raise InvalidRequest(
                    f"components[{name!r}].pages: page {placement.pages[-1]} is beyond the prompt's "
                    f"{n_pages} whole pages"
                )
        self._copier.check(engine, backup.ready)
        try:
            return await self._job(
                JobKind.BACKUP, engine, lambda job: self._backups.run(group, engine, backup, job)
            )
        except RequestError:
            self.counters.backup_failures += 1
            raise

    def prefetch(self, prefetch: Prefetch) -> str:
        """Start bringing a prompt's frames from storage; returns the prefetch's id. What host memory has of
        it and storage is not known to have is offered to storage again."""
        engine, group = self._whole(prefetch.lookup.prompt.engine_id)
        self._check_components("device", prefetch.lookup.device, engine.model)
        return group.decide(
            engine.spec.rank,
            ("prefetch", prefetch.lookup.prompt.request_id),
            lambda: self._prefetch(group, prefetch),
        )

    def _prefetch(self, group: Group, prefetch: Prefetch) -> str:
        model, prompt = group.model, prefetch.lookup.prompt
        self.storage.repair(model, model.namespace(prompt), model.whole_pages(prompt))
        return self._prefetches.start(group.group_id, model, prefetch)

    async def wait_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        """As long as the prefetch's policy says; then what a lookup can use."""
        return await self._shared_progress(engine_id, prefetch_id, "wait", self._prefetches.wait)

    async def cancel_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        """Stop a prefetch; returns when its last byte has landed."""
        return await self._shared_progress(engine_id, prefetch_id, "cancel", self._prefetches.cancel)

    async def _shared_progress(
        self,
        engine_id: str,
        prefetch_id: str,
        verb: str,
        ask: Callable[[str], Coroutine[None, None, Progress]],
    ) -> Progress:
        """One answer for all ranks."""
        engine, group = self._whole(engine_id)

        def begin() -> asyncio.Task[Progress]:
            if not self._prefetches.knows(group.group_id, prefetch_id):
                raise Gone(f"prefetch_id: {prefetch_id!r} has ended or is not yours; start another")
            return asyncio.ensure_future(ask(prefetch_id))

        return await asyncio.shield(group.decide(engine.spec.rank, (verb, prefetch_id), begin))

    # -- for operators -------------------------------------------------------------------------------

    def flush(self) -> tuple[int, int]:
        """Drop every host page that nothing holds; returns pages dropped and pages kept."""
        return self._host.flush()

    def status(self) -> Status:
        """How everything stands now."""
        problems = list(self._scheduler.problems())
        problems += [f"{task.get_name()} has died" for task in self._background if task.done()]
        problems += self.storage.problems()
        now = self._now()
        pools = tuple(pool for model in self._host.models for pool in model.pools())
        return Status(
            problems=tuple(problems),
            engines=tuple(
                EngineStatus(
                    engine_id=engine_id,
                    model=engine.model.name,
                    attached_s=now - engine.attached_s,
                    leases=sum(1 for _ in self._leases.of_owner(self._group(engine).group_id)),
                    jobs=self._jobs.n_open(engine_id),
                )
                for engine_id, engine in self._engines.items()
            ),
            pools=pools,
            backends=self.storage.status(),
            counters={**self.counters.snapshot(), **self._jobs.counters()},
            host_used_bytes=self._host.used_bytes,
            host_capacity_bytes=self._host.capacity_bytes,
            retained=self.retention.status(),
            running_prefetches=self._prefetches.n_running,
            open_sessions=self._sessions.n_open,
        )

    def audit(self) -> list[str]:
        """Recount everything; a violation per line, none when all is well."""
        return [violation for model in self._host.models for violation in model.audit()]

    # -- inside --------------------------------------------------------------------------------------

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _engine(self, engine_id: str) -> Engine:
        engine = self._engines.get(engine_id)
        if engine is None or engine.leaving:
            raise UnknownEngine(f"engine_id: {engine_id!r} is not attached to this daemon; attach first")
        return engine

    def _model(self, engine_id: str) -> Model:
        return self._engine(engine_id).model

    def _group(self, engine: Engine) -> Group:
        return self._groups[engine.spec.group_id or engine.spec.engine_id]

    def _whole(self, engine_id: str) -> tuple[Engine, Group]:
        """An engine and its group, all ranks of which are here."""
        engine = self._engine(engine_id)
        group = self._group(engine)
        group.require_whole()
        return engine, group

    async def _job(
        self, kind: JobKind, engine: Engine, work: Callable[[Job], Coroutine[object, object, T]]
    ) -> T:
        """Run to the end whatever happens to the caller: bytes in flight belong to the job."""

        async def run() -> T:
            with self._jobs.job(kind, engine.spec.engine_id) as job:
                return await work(job)

        task = asyncio.ensure_future(run())
        engine.jobs.add(task)
        task.add_done_callback(engine.jobs.discard)
        return await asyncio.shield(task)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.counters.leases_expired += self._leases.expire()
            self._prefetches.expire()
            self.retention.expire()

    @staticmethod
    def _to_load(model: Model, boundary: int, device: Mapping[str, BoolArray]) -> dict[str, PageArray]:
        """Per component, the pages of its coverage that the engine has not: none when boundary is 0."""
        load = {}
        for name, coverage in model.coverages.items():
            start = coverage.start(boundary) if boundary else 0
            missing = np.ones(boundary - start, dtype=bool)
            if name in device:
                held = device[name][start:boundary]
                missing[: len(held)] = ~held
            if missing.any():
                load[name] = (start + np.flatnonzero(missing)).astype(np.int32)
        return load

    def _count_lookup(
        self, model: Model, limit: int, boundary: int, matched: int, load: Mapping[str, PageArray]
    ) -> None:
        whole = next((name for name, one in model.coverages.items() if one.whole_path), None)
        from_host = len(load.get(whole, ())) if whole else boundary * bool(load)
        self.counters.lookups += 1
        self.counters.lookup_requested_pages += limit
        self.counters.lookup_hit_host_pages += from_host
        self.counters.lookup_hit_device_pages += boundary - from_host
        if boundary < limit:
            self.counters.lookup_miss_no_tokens += not matched
            self.counters.lookup_miss_coverage += boundary < matched

    @staticmethod
    def _check_components(field_name: str, named: Mapping[str, object], model: Model) -> None:
        for name in named:
            if name not in model.shelves:
                raise InvalidRequest(
                    f"{field_name}: component {name!r} is not one of {sorted(model.shelves)}"
                )

    @staticmethod
    def _check_placement(engine: Engine, name: str, placement: Placement) -> None:
        where, n_slots = f"components[{name!r}]", engine.spec.layout.slots_of(name)
        if len(placement.pages) != len(placement.slots):
            raise InvalidRequest(
                f"{where}.slots: {len(placement.slots)} slots for {len(placement.pages)} pages; send one each"
            )
        if len(placement.pages) and (placement.pages[0] < 0 or (np.diff(placement.pages) <= 0).any()):
            raise InvalidRequest(f"{where}.pages: must be ascending page numbers from 0")
        if ((placement.slots < 0) | (placement.slots >= n_slots)).any():
            raise InvalidRequest(f"{where}.slots: a slot is outside [0, {n_slots})")
        if len(np.unique(placement.slots)) != len(placement.slots):
            raise InvalidRequest(f"{where}.slots: a slot is named twice")
