"""LoadBack: brings pages from host memory into free L1 slots, whole boundaries or nothing.

A load's slots belong to the transfer until it is settled, whatever the engine does meanwhile; only then
do they enter the index or go back to the pool. Never waits past the deadline it is given, and never
lets an answer from below decide a boundary: the index of L1 confirms it afterwards, or it is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hicache.cache.l1 import L1
from hicache.cache.ledger import Copy, Owner
from hicache.cache.lower import LowerTiers, Transfer
from hicache.client.messages import Found, Lease, Placement, Prompt
from hicache.client.tickets import Outcome
from hicache.core.coverage import joint_boundary
from hicache.core.identity import Namespace
from hicache.core.matching import Match
from hicache.core.words import NO_SLOT, BoolArray, PageArray, SlotArray, Tier, TokenArray


@dataclass(frozen=True, eq=False)
class Load:
    """One load-back and everything it needs to end well."""

    namespace: Namespace
    tokens: TokenArray
    """As many whole pages as the boundary it is for."""
    placements: Mapping[str, Placement]
    lease: Lease
    transfer: Transfer
    epoch: int


@dataclass(frozen=True, eq=False)
class Brought:
    """What came of asking the lower tiers."""

    loaded: Mapping[str, PageArray]
    """Per component, the pages that are in L1 now and were not before."""
    branching_boundary: int
    """Deepest boundary that the whole-path components reach in all tiers that answered; 0 when none did."""


NOTHING = Brought({}, 0)


@dataclass(frozen=True, eq=False)
class Reach:
    """How deep a prompt's state reaches in L1 after the lower tiers were asked."""

    namespace: Namespace
    match: Match
    brought: Brought
    from_host: PageArray
    """Whole-path pages that were loaded, and were in host memory before the request's prefetch."""
    from_storage: PageArray
    """Those that the prefetch brought there."""

    @property
    def boundary(self) -> int:
        return self.match.boundaries[Tier.DEVICE]

    def after(self, earlier: Reach) -> Reach:
        """The same with what an earlier try had loaded."""
        return replace(
            self,
            from_host=np.concatenate((earlier.from_host, self.from_host)),
            from_storage=np.concatenate((earlier.from_storage, self.from_storage)),
        )

    def hit_pages(self) -> dict[Tier, int]:
        """Where the pages up to the boundary came from; sums to it."""
        storage = np.unique(self.from_storage[self.from_storage < self.boundary])
        host = np.setdiff1d(self.from_host[self.from_host < self.boundary], storage)
        return {
            Tier.DEVICE: self.boundary - len(host) - len(storage),
            Tier.HOST: len(host),
            Tier.STORAGE: len(storage),
        }


class LoadBack:
    """All loads of one cache."""

    def __init__(
        self,
        l1: L1,
        lower: LowerTiers,
        *,
        lookup_timeout_s: float,
        load_timeout_s: float,
    ) -> None:
        self._l1 = l1
        self._index = l1.index
        self._components = l1.components
        self._ledger = l1.ledger
        self._counters = l1.counters
        self._lower = lower
        self._lookup_timeout_s = lookup_timeout_s
        self._load_timeout_s = load_timeout_s
        self._late: list[Load] = []

    @property
    def late(self) -> tuple[Load, ...]:
        """Loads that nobody waits for any more and that are not settled."""
        return tuple(self._late)

    def bring(self, prompt: Prompt, namespace: Namespace, match: Match, limit_pages: int) -> Brought:
        """Try to get beyond the boundary that L1 has. Waits at most for the lookup and for the load; not
        at all while an earlier load is late, so that a slow daemon costs one deadline and holds one
        load's slots."""
        if not self._lower.ready:
            self._counters.lookups_away += 1
            return NOTHING
        if any(load.transfer.outcome is Outcome.PENDING for load in self._late):
            self._counters.loads_under_way += 1
            return NOTHING
        device = self._l1.ready(match)
        self._counters.lookups += 1
        found = self._lower.lookup(
            prompt, device=device, limit_pages=limit_pages, timeout_s=self._lookup_timeout_s
        )
        if found is None:
            self._counters.lookups_unanswered += 1
            return NOTHING
        loaded: Mapping[str, PageArray] = {}
        if found.boundary > match.boundaries[Tier.DEVICE]:
            if found.lease is None or not self._consistent(found, device, limit_pages):
                self._counters.lookups_inconsistent += 1
            else:
                loaded = self._load(prompt, namespace, match, found, found.lease, device)
                return Brought(loaded, found.branching_boundary)
        if found.lease is not None:
            self._lower.release(found.lease)
        return Brought(loaded, found.branching_boundary)

    def reap(self) -> int:
        """End the late loads that have settled meanwhile; how many."""
        settled = [load for load in self._late if load.transfer.settled()]
        if settled:
            self._late = [load for load in self._late if load not in settled]
            for load in settled:
                if self._end(load):
                    self._counters.loads_adopted += 1
        return len(settled)

    def _consistent(self, found: Found, device: Mapping[str, BoolArray], limit_pages: int) -> bool:
        """Whether what is to be loaded, together with what L1 has, is what the boundary needs."""
        if not 0 < found.boundary <= limit_pages or not set(found.load) <= {c.name for c in self._components}:
            return False
        for component in self._components:
            have = _available(device[component.name], found.boundary)
            pages = found.load.get(component.name, np.empty(0, np.int32))
            if len(pages):
                rising = bool(np.all(np.diff(pages) > 0))
                if not rising or pages[0] < 0 or pages[-1] >= found.boundary or have[pages].any():
                    return False
                have[pages] = True
            if not have[component.coverage.start(found.boundary) :].all():
                return False
        return True

    def _load(
        self,
        prompt: Prompt,
        namespace: Namespace,
        match: Match,
        found: Found,
        lease: Lease,
        device: Mapping[str, BoolArray],
    ) -> Mapping[str, PageArray]:
        """Load what was found; the pages that came, none when it failed or is late."""
        needed: dict[str, PageArray] = {}
        for component in self._components:
            ready = np.flatnonzero(device[component.name][: found.boundary]).astype(np.int32)
            needed[component.name] = ready[ready >= component.coverage.start(found.boundary)]
        kept = self._index.pin_pages(match.cursor, needed, tier=Tier.DEVICE)
        try:
            placements = self._targets(found)
            if placements is None:
                self._counters.loads_no_room += 1
                self._lower.release(lease)
                return {}
            load = Load(
                namespace,
                prompt.tokens[: found.boundary * namespace.page_size],
                placements,
                lease,
                self._lower.start_load(lease, placements),
                self._lower.epoch,
            )
            self._counters.loads += 1
            outcome = load.transfer.wait(self._load_timeout_s)
        finally:
            self._index.unpin(kept)
        if not load.transfer.settled():
            self._counters.loads_late += outcome is Outcome.PENDING
            self._counters.loads_failed += outcome is Outcome.FAILED
            self._late.append(load)
            return {}
        self._counters.loads_failed += outcome is Outcome.FAILED
        return {name: p.pages for name, p in placements.items()} if self._end(load) else {}

    def _targets(self, found: Found) -> dict[str, Placement] | None:
        """Slots for all pages to load, or None and nothing taken."""
        placements: dict[str, Placement] = {}
        for name, pages in found.load.items():
            if not len(pages):
                continue
            slots = self._l1.take(name, len(pages), Owner.TRANSFER)
            if slots is None:
                for taken, placement in placements.items():
                    self._ledger.give(taken, placement.slots, Owner.TRANSFER, Owner.NOBODY)
                return None
            placements[name] = Placement(pages, slots)
        return placements

    def _end(self, load: Load) -> bool:
        """A settled load: into the index as a whole, or back to the pool as a whole. Whether it is in."""
        self._lower.release(load.lease)
        usable = load.transfer.outcome is Outcome.OK and self._completes(load)
        if not usable:
            for name, placement in load.placements.items():
                self._ledger.give(name, placement.slots, Owner.TRANSFER, Owner.NOBODY)
            return False
        n_pages = len(load.tokens) // load.namespace.page_size
        offered: dict[str, SlotArray] = {}
        for component in self._components:
            offered[component.name] = np.full(n_pages, NO_SLOT, np.int32)
            if component.name in load.placements:
                placement = load.placements[component.name]
                offered[component.name][placement.pages] = placement.slots
        inserted = self._index.insert(load.namespace, load.tokens, offered, tier=Tier.DEVICE)
        known = load.epoch == self._lower.epoch
        for name, placement in load.placements.items():
            redundant = inserted.redundant.get(name, np.empty(0, np.int32))
            entered = placement.slots[~np.isin(placement.slots, redundant)]
            self._ledger.give(name, redundant, Owner.TRANSFER, Owner.NOBODY)
            self._ledger.give(name, entered, Owner.TRANSFER, Owner.INDEX)
            self._counters.loaded_pages += len(entered)
            if known:
                self._ledger.mark(name, entered, Copy.KNOWN)
        return True

    def _completes(self, load: Load) -> bool:
        """Whether L1 and what was loaded still make up the boundary: a late load may find its prefix gone."""
        match = self._index.match(load.namespace, load.tokens)
        n_pages = len(load.tokens) // load.namespace.page_size
        device = self._l1.ready(match)
        available = []
        for component in self._components:
            have = _available(device[component.name], n_pages)
            if component.name in load.placements:
                have[load.placements[component.name].pages] = True
            available.append(have)
        return joint_boundary([c.coverage for c in self._components], available, n_pages) == n_pages


def _available(ready: BoolArray, n_pages: int) -> BoolArray:
    """`ready`, cut or filled up with False to `n_pages`."""
    have = np.zeros(n_pages, bool)
    have[: min(n_pages, len(ready))] = ready[:n_pages]
    return have
