"""HybridCacheController: every verb of the service, in our own types.

Runs on one event loop, which owns the index: decisions are plain function calls between awaits, and
what an await may have changed is looked up again. Bytes move on copy threads and storage workers.
Speaks no protobuf and opens no socket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from typing import TypeVar

import numpy as np

from controller.backups import Backups
from controller.copying import Copier
from controller.counters import Counters
from controller.leases import LeaseTable
from controller.memory.slab import HostSlab, SlabError
from controller.models import HOST, STORAGE, Engine, HostMemory, Model
from controller.prefetches import Prefetches
from controller.reader import StorageReader
from controller.requests import (
    Backup,
    BackupOutcome,
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
from controller.settings import ControllerSettings
from controller.shelving import Shelving
from controller.storage import StorageStack
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache.core.layout import LayoutError
from hicache.core.words import BoolArray, PageArray

T = TypeVar("T")
TICK_S = 0.5
"""How often leases and prefetches are looked at for expiry."""
DRAIN_S = 10.0
"""How long a stop waits for writes that are due."""


class HybridCacheController:
    """Moves component payloads and their sidecars between tiers, and knows where everything is."""

    def __init__(
        self,
        settings: ControllerSettings,
        slab: HostSlab,
        scheduler: TransferScheduler,
    ) -> None:
        self.boot_id = uuid.uuid4().hex
        self.counters = Counters()
        self._settings = settings
        self._scheduler = scheduler
        self._host = HostMemory(slab, self.counters)
        self._engines: dict[str, Engine] = {}
        self._leases = LeaseTable(settings.lease_s, self._now)
        self._copier = Copier(scheduler, settings.copy_timeout_s)
        stack = StorageStack()
        self._shelving = Shelving(stack, self._host, settings, self.counters)
        self._backups = Backups(self._host, self._copier, self._shelving, self.counters)
        reader = StorageReader(stack, self._host, scheduler, settings, self.counters)
        self._prefetches = Prefetches(self._host, reader, settings, self.counters)
        self._background: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the background work."""
        self._background.append(asyncio.create_task(self._expire_for_ever(), name="expiry"))

    async def stop(self) -> None:
        """Detach every engine, write what is due within a bound, stop the background work."""
        for engine_id in list(self._engines):
            await self.detach(engine_id)
        await self._shelving.stop(DRAIN_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background.clear()

    def attach(self, spec: EngineSpec) -> None:
        """Let an engine in. Raises InvalidRequest, with nothing changed, when its layout cannot be
        served or its id is taken."""
        if spec.engine_id in self._engines:
            raise InvalidRequest(f"engine_id: {spec.engine_id!r} is attached; detach it or use another id")
        try:
            spec.layout.validate([region.nbytes for region in spec.regions])
            model = self._host.model(spec.model, spec.revision, spec.layout)
        except (LayoutError, SlabError) as error:
            raise InvalidRequest(str(error)) from error
        self._engines[spec.engine_id] = Engine(spec, model, self._now())

    async def detach(self, engine_id: str) -> None:
        """Let an engine go: no new requests, its jobs drained, its leases and prefetches ended. After
        this nothing reads or writes its regions."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        engine.leaving = True
        await self._prefetches.forget_engine(engine_id)
        if engine.jobs:
            await asyncio.wait(engine.jobs)
        for lease in self._leases.of_engine(engine_id):
            self._leases.release(lease)
        del self._engines[engine_id]

    # -- the verbs -----------------------------------------------------------------------------------

    def lookup(self, lookup: Lookup) -> Found:
        """The deepest boundary over L1 and L2, with a lease on what must be loaded. In memory only."""
        engine = self._engine(lookup.prompt.engine_id)
        self._check_components("device", lookup.device, engine.model)
        model, prompt = engine.model, lookup.prompt
        n_pages = len(prompt.tokens) // model.page_size
        limit = min(n_pages, lookup.limit_pages or n_pages)
        match = model.index.match(
            model.namespace(prompt), prompt.tokens, limit_pages=limit, device=lookup.device
        )
        boundary = match.boundaries[HOST]
        load = self._to_load(model, boundary, lookup.device)
        lease_id = ""
        if load:
            receipt = model.index.pin_pages(match.cursor, load, tier=HOST)
            lease = self._leases.grant(
                prompt.engine_id, prompt.request_id, model.index, match.cursor, receipt, load
            )
            lease_id = lease.lease_id
            self.counters.leases_granted += 1
        if boundary:
            model.index.touch(match.cursor, min(boundary, match.n_pages))
        self._prefetches.consumed(prompt.engine_id, prompt.request_id)
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

    def release(self, engine_id: str, lease_id: str) -> None:
        """End a lease. One that has ended already is fine: releasing twice is not an error here."""
        self._engine(engine_id)
        lease = self._leases.find(engine_id, lease_id)
        if lease:
            self._leases.release(lease)

    async def load(self, load: Load) -> int:
        """Copy leased host frames into the engine's slots; returns bytes when all have landed."""
        engine = self._engine(load.engine_id)
        lease = self._leases.find(load.engine_id, load.lease_id)
        if lease is None:
            raise Gone(f"lease_id: {load.lease_id!r} has ended or is not yours; look up again")
        self._check_components("components", load.components, engine.model)
        for name, placement in load.components.items():
            self._check_placement(engine, name, placement)
            if not np.isin(placement.pages, lease.pages.get(name, np.empty(0, np.int32))).all():
                raise InvalidRequest(f"components[{name!r}].pages: not all are under lease {load.lease_id!r}")

        async def run() -> int:
            model = engine.model
            slots = {}
            for name, (pages, device) in ((n, (p.pages, p.slots)) for n, p in load.components.items()):
                if len(pages):
                    host = model.index.slots(lease.cursor, name, HOST, 0, int(pages[-1]) + 1)[pages]
                    slots[name] = device, host
            return await self._copier.copy(Direction.LOAD, engine, slots) if slots else 0

        self._leases.begin_use(lease)
        try:
            nbytes = await self._job(engine, run())
        except TransferFailed:
            self.counters.load_failures += 1
            raise
        finally:
            self._leases.end_use(lease)
        self.counters.loads += 1
        self.counters.load_bytes += nbytes
        self.counters.load_pages += sum(len(placement.pages) for placement in load.components.values())
        return nbytes

    async def backup(self, backup: Backup) -> Mapping[str, BackupOutcome]:
        """Copy new pages from the engine's slots to host frames; returns when they can be read."""
        engine = self._engine(backup.prompt.engine_id)
        self._check_components("components", backup.components, engine.model)
        n_pages = len(backup.prompt.tokens) // engine.model.page_size
        for name, placement in backup.components.items():
            self._check_placement(engine, name, placement)
            if len(placement.pages) and placement.pages[-1] >= n_pages:
                raise InvalidRequest(
                    f"components[{name!r}].pages: page {placement.pages[-1]} is beyond the prompt's "
                    f"{n_pages} whole pages"
                )
        try:
            return await self._job(engine, self._backups.run(engine, backup))
        except RequestError:
            self.counters.backup_failures += 1
            raise

    def prefetch(self, prefetch: Prefetch) -> str:
        """Start bringing a prompt's frames from storage; returns the prefetch's id."""
        engine = self._engine(prefetch.lookup.prompt.engine_id)
        self._check_components("device", prefetch.lookup.device, engine.model)
        return self._prefetches.start(engine.model, prefetch)

    async def wait_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        """As long as the prefetch's policy says; then what a lookup can use."""
        return await self._known_prefetch(engine_id, prefetch_id).wait(prefetch_id)

    async def cancel_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        """Stop a prefetch; returns when its last byte has landed."""
        return await self._known_prefetch(engine_id, prefetch_id).cancel(prefetch_id)

    # -- for operators -------------------------------------------------------------------------------

    @property
    def storage(self) -> Shelving:
        """The storage tiers: to attach, update and detach them."""
        return self._shelving

    def flush(self) -> tuple[int, int]:
        """Drop every host page that nothing holds; returns pages dropped and pages kept."""
        return self._host.flush()

    def status(self) -> Status:
        """How everything stands now."""
        problems = list(self._scheduler.problems())
        problems += [f"{task.get_name()} has died" for task in self._background if task.done()]
        problems += self._shelving.problems()
        now = self._now()
        pools = tuple(pool for model in self._host.models for pool in model.pools())
        return Status(
            problems=tuple(problems),
            engines=tuple(
                EngineStatus(
                    engine_id=engine_id,
                    model=engine.model.name,
                    attached_s=now - engine.attached_s,
                    leases=sum(1 for _ in self._leases.of_engine(engine_id)),
                    jobs=len(engine.jobs),
                )
                for engine_id, engine in self._engines.items()
            ),
            pools=pools,
            backends=self._shelving.status(),
            counters=self.counters.snapshot(),
            host_used_bytes=self._host.used_bytes,
            host_capacity_bytes=self._host.capacity_bytes,
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

    def _known_prefetch(self, engine_id: str, prefetch_id: str) -> Prefetches:
        self._engine(engine_id)
        if not self._prefetches.knows(engine_id, prefetch_id):
            raise Gone(f"prefetch_id: {prefetch_id!r} has ended or is not yours; start another")
        return self._prefetches

    async def _job(self, engine: Engine, work: Coroutine[object, object, T]) -> T:
        """Run to the end whatever happens to the caller: bytes in flight belong to the job."""
        task = asyncio.ensure_future(work)
        engine.jobs.add(task)
        task.add_done_callback(engine.jobs.discard)
        return await asyncio.shield(task)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.counters.leases_expired += self._leases.expire()
            self._prefetches.expire()

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
