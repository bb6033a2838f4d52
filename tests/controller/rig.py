"""A controller in this process: a tagged engine, a small slab, real copy threads, storage of choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from controller.controller import HybridCacheController
from controller.memory.slab import HostSlab
from controller.requests import (
    Backup,
    BackupOutcome,
    EngineSpec,
    Found,
    Load,
    Lookup,
    MappedRegion,
    Placement,
    Prefetch,
    PrefetchPolicy,
    Progress,
    Prompt,
)
from controller.settings import ControllerSettings
from controller.storage import StorageTier, TierPolicy
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import TransferScheduler
from hicache.core.identity import Namespace
from hicache.core.layout import Layout
from hicache.core.pools import SlotPool
from hicache.core.words import BoolArray, SlotArray, TokenArray
from storage_backends.messages import WorkerSpec
from storage_backends.specs import FileSpec
from tests.tagged import TaggedMemory, hashes_of, make_layout

SLOTS = {"full": 64, "swa": 64, "mamba": 16}
MIB = 1 << 20


class TaggedEngine:
    """An engine by hand: fills slots with what a forward pass would store, checks what comes back."""

    def __init__(
        self,
        controller: HybridCacheController,
        engine_id: str = "engine",
        layout: Layout | None = None,
        nbytes: int = 0,
        model: str = "model",
        group_id: str = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if layout is None:
            layout, nbytes = make_layout(SLOTS)
        self.controller = controller
        self.engine_id = engine_id
        self.model = model
        self.tagged = TaggedMemory(layout, np.zeros(nbytes, dtype=np.uint8), rank)
        region = MappedRegion(self.tagged.memory.ctypes.data, nbytes)
        self.spec = EngineSpec(engine_id, model, "r1", layout, (region,), group_id, rank, ranks)
        self.pools = {spec.name: SlotPool(layout.slots_of(spec.name)) for spec in layout.components}
        controller.attach(self.spec)

    @property
    def page_size(self) -> int:
        return self.spec.layout.page_size

    def namespace(self, salt: str = "") -> Namespace:
        return Namespace(self.model, "r1", self.spec.layout.fingerprint(), self.page_size, salt=salt)

    def prompt(self, tokens: TokenArray, salt: str = "") -> Prompt:
        return Prompt(self.engine_id, f"request {tokens[:1]}", tokens, salt=salt)

    def compute(
        self, tokens: TokenArray, pages: Mapping[str, list[int]], salt: str = ""
    ) -> dict[str, Placement]:
        """Fill fresh slots for these pages."""
        hashes = hashes_of(self.namespace(salt), tokens)
        placements = {}
        for name, wanted in pages.items():
            slots = self.pools[name].alloc(len(wanted))
            assert slots is not None
            for page, slot in zip(wanted, slots.tolist(), strict=True):
                self.tagged.write(name, slot, hashes[page])
            placements[name] = Placement(np.array(wanted, dtype=np.int32), slots)
        return placements

    def forget(self, placements: Mapping[str, Placement]) -> None:
        """Give the slots to somebody else, who overwrites them."""
        for name, placement in placements.items():
            for slot in placement.slots.tolist():
                self.tagged.smudge(name, slot)
            self.pools[name].free(placement.slots)

    async def backup(
        self, tokens: TokenArray, pages: Mapping[str, list[int]], salt: str = ""
    ) -> Mapping[str, BackupOutcome]:
        """Compute, back up, and forget in L1."""
        placements = self.compute(tokens, pages, salt)
        try:
            return await self.controller.backup(Backup(self.prompt(tokens, salt), placements))
        finally:
            self.forget(placements)

    def all_pages(self, tokens: TokenArray, checkpoints: list[int] | None = None) -> dict[str, list[int]]:
        """Every page of FULL and SWA and the checkpoint at the end (or at these boundaries)."""
        n_pages = len(tokens) // self.page_size
        marks = [n_pages] if checkpoints is None else checkpoints
        return {
            "full": list(range(n_pages)),
            "swa": list(range(n_pages)),
            "mamba": [boundary - 1 for boundary in marks],
        }

    def lookup(
        self, tokens: TokenArray, salt: str = "", device: Mapping[str, BoolArray] | None = None
    ) -> Found:
        return self.controller.lookup(Lookup(self.prompt(tokens, salt), device or {}))

    async def load_and_check(self, tokens: TokenArray, salt: str = "") -> int:
        """Look up, load everything into fresh slots, compare every byte; returns the boundary in pages."""
        found = self.lookup(tokens, salt)
        if not found.boundary:
            return 0
        hashes = hashes_of(self.namespace(salt), tokens)
        placements = {}
        for name, pages in found.load.items():
            slots: SlotArray | None = self.pools[name].alloc(len(pages))
            assert slots is not None
            placements[name] = Placement(pages, slots)
        await self.controller.load(Load(self.engine_id, found.lease_id, placements))
        self.controller.release(self.engine_id, found.lease_id)
        for name, placement in placements.items():
            for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
                self.tagged.check(name, slot, hashes[page])
        self.forget(placements)
        return found.boundary

    async def prefetch(
        self,
        tokens: TokenArray,
        policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        timeout_s: float = 0.0,
        salt: str = "",
    ) -> Progress:
        lookup = Lookup(self.prompt(tokens, salt))
        prefetch_id = self.controller.prefetch(Prefetch(lookup, policy, timeout_s))
        return await self.controller.wait_prefetch(self.engine_id, prefetch_id)


class Rig:
    """Controllers that come and go over the same storage."""

    def __init__(self, tmp_path: Path) -> None:
        self.file_spec = FileSpec(path=str(tmp_path / "objects"))
        self._stack = AsyncExitStack()
        self._slabs: dict[HybridCacheController, HostSlab] = {}
        self._tiers: list[StorageTier] = []
        self.controllers: list[HybridCacheController] = []
        self.tier: StorageTier | None = None

    async def controller(
        self,
        *,
        storage: WorkerSpec | None = None,
        capacity_bytes: int = 4 * MIB,
        extent_bytes: int | None = None,
        settings: ControllerSettings | None = None,
    ) -> HybridCacheController:
        slab = HostSlab(capacity_bytes, extent_bytes=extent_bytes)
        self._stack.callback(slab.close)
        scheduler = TransferScheduler(CpuCopyEngine(), threads=2)
        self._stack.callback(scheduler.close)
        self.tier = None
        controller = HybridCacheController(settings or ControllerSettings(), slab, scheduler)
        await controller.start()
        self._slabs[controller] = slab
        if storage is not None:
            self.tier = await self.tier_for(controller, "l3", storage)
            controller.storage.attach(self.tier, TierPolicy())
        self.controllers.append(controller)
        return controller

    async def tier_for(self, controller: HybridCacheController, name: str, spec: WorkerSpec) -> StorageTier:
        """A started tier over a controller's slab; stopped, if nobody has, after the controller."""
        slab = self._slabs[controller]
        tier = StorageTier(name, spec, slab.fd, slab.nbytes)
        await tier.start()
        self._tiers.append(tier)
        return tier

    async def close(self) -> None:
        violations = [line for controller in self.controllers for line in controller.audit()]
        errors = [controller.counters.internal_errors for controller in self.controllers]
        for controller in self.controllers:
            await controller.stop(10.0)
        for tier in self._tiers:
            await tier.stop()
        await self._stack.aclose()
        assert violations == []
        assert not any(errors)


async def until(met: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for something the controller does on its own; fails when it does not come."""
    async with asyncio.timeout(within_s):
        while not met():  # noqa: ASYNC110 - nothing tells when a counter changes
            await asyncio.sleep(0.005)


async def emptied(controller: HybridCacheController) -> None:
    """Flush until host memory is empty: what was just written may be pinned for a moment more."""
    await until(lambda: controller.flush()[1] == 0)
