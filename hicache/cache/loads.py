"""LoadBack: brings pages from host memory into free L1 slots, whole boundaries or nothing.

A load's slots belong to the transfer until it is settled, whatever the engine does meanwhile; only then
do they enter the index or go back to the pool. Never waits past the deadline it is given, and never
lets an answer from below decide a boundary: the index of L1 confirms it afterwards, or it is not used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hicache.cache.costs import LoadRule, Skip
from hicache.cache.l1 import L1
from hicache.cache.ledger import Copy, Owner
from hicache.cache.lower import LowerTiers, Transfer
from hicache.client.layers import LayerBoard, LayerRow
from hicache.client.messages import Found, Lease, Placement, Prompt
from hicache.client.tickets import Outcome
from hicache.core.coverage import joint_boundary
from hicache.core.identity import Namespace
from hicache.core.matching import Match
from hicache.core.pins import Receipt
from hicache.core.words import NO_SLOT, BoolArray, PageArray, SlotArray, Tier, TokenArray


@dataclass(eq=False)
class Load:
    """One load-back and everything it needs to end well."""

    namespace: Namespace
    tokens: TokenArray
    """As many whole pages as the boundary it is for."""
    placements: Mapping[str, Placement]
    lease: Lease
    transfer: Transfer
    epoch: int
    kept: Receipt | None
    """What it builds on in L1; when it has ended well, all of its boundary, until nobody waits for it."""
    n_tokens: int
    """By how much it raises the boundary."""
    row: LayerRow | None = None
    begun_s: float = field(default_factory=time.monotonic)
    waiting: int = 0
    """Requests that will take what it brings, and have not yet."""
    late: bool = False
    ended: bool = False
    landed: bool = False
    """Whether what it brought is in L1."""

    @property
    def pages(self) -> Mapping[str, PageArray]:
        """Per component, what it is to bring."""
        return {name: placement.pages for name, placement in self.placements.items()}


@dataclass(frozen=True, eq=False)
class Started:
    """What came of asking the lower tiers, without waiting for a load."""

    load: Load | None
    joined: bool = False
    """Whether the load is another request's, of pages that both have."""
    branching_boundary: int = 0


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
        rule: LoadRule,
        layers: LayerBoard | None,
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
        self._rule = rule
        self._layers = layers
        self._lookup_timeout_s = lookup_timeout_s
        self._load_timeout_s = load_timeout_s
        self._running: list[Load] = []
        self._late: list[Load] = []

    @property
    def late(self) -> tuple[Load, ...]:
        """Loads past their time that are not settled: nobody waits for them."""
        return tuple(self._late)

    @property
    def under_way(self) -> tuple[Load, ...]:
        """Those, and the ones that are in time."""
        return (*self._running, *self._late)

    def bring(self, prompt: Prompt, namespace: Namespace, match: Match, limit_pages: int) -> Brought:
        """Try to get beyond the boundary that L1 has. Waits at most for the lookup and for the load; not
        at all while an earlier load is late, so that a slow daemon costs one deadline and holds one
        load's slots. Where a load of the same pages is under way it waits for that one first."""
        shared = self._shared(prompt, namespace, match)
        if shared is None:
            return self._brought(self.start(prompt, namespace, match, limit_pages))
        self._counters.loads_joined += 1
        first = self._brought(Started(shared, joined=True))
        match = self._index.match(namespace, prompt.tokens, limit_pages=limit_pages)
        if match.boundaries[Tier.DEVICE] >= limit_pages:
            return first
        rest = self._brought(self.start(prompt, namespace, match, limit_pages))
        none = np.empty(0, np.int32)
        loaded = {
            name: np.concatenate((first.loaded.get(name, none), rest.loaded.get(name, none)))
            for name in {*first.loaded, *rest.loaded}
        }
        return Brought(loaded, rest.branching_boundary)

    def begin(
        self, prompt: Prompt, namespace: Namespace, match: Match, limit_pages: int, *, by_layer: bool
    ) -> Started:
        """The same without waiting for a load; somebody waits for what is returned until `let_go`."""
        shared = self._shared(prompt, namespace, match)
        if shared is not None:
            self._counters.loads_joined += 1
            started = Started(shared, joined=True)
        else:
            started = self.start(prompt, namespace, match, limit_pages, by_layer=by_layer)
        if started.load is not None:
            started.load.waiting += 1
        return started

    def start(
        self,
        prompt: Prompt,
        namespace: Namespace,
        match: Match,
        limit_pages: int,
        *,
        by_layer: bool = False,
    ) -> Started:
        """Ask, and start the load that the answer calls for, if it is worth it."""
        if not self._lower.ready:
            self._counters.lookups_away += 1
            return Started(None)
        if any(load.transfer.outcome is Outcome.PENDING for load in self._late):
            self._counters.loads_under_way += 1
            return Started(None)
        device = self._l1.ready(match)
        self._counters.lookups += 1
        found = self._lower.lookup(
            prompt, device=device, limit_pages=limit_pages, timeout_s=self._lookup_timeout_s
        )
        if found is None:
            self._counters.lookups_unanswered += 1
            return Started(None)
        load = None
        n_pages = found.boundary - match.boundaries[Tier.DEVICE]
        if n_pages > 0 and (found.lease is None or not self._consistent(found, device, limit_pages)):
            self._counters.lookups_inconsistent += 1
        elif n_pages > 0 and found.lease is not None and self._worth(n_pages * namespace.page_size):
            load = self._load(prompt, namespace, match, found, found.lease, device, by_layer=by_layer)
        if load is None and found.lease is not None:
            self._lower.release(found.lease)
        return Started(load, branching_boundary=found.branching_boundary)

    def wait(self, load: Load, timeout_s: float) -> None:
        """Until the load has ended, at most so long."""
        if not load.ended and not load.late:
            load.transfer.wait(timeout_s)
            if load.transfer.settled():
                self._rule.loaded(load.n_tokens, time.monotonic() - load.begun_s)
                self._running.remove(load)
                self._end(load)

    def let_go(self, load: Load) -> None:
        """One request less waits for it."""
        load.waiting -= 1
        self._tidy(load)

    def reap(self) -> int:
        """End the loads that have settled meanwhile, and give up waiting for those past their time; how
        many have ended."""
        settled = [load for load in self.under_way if load.transfer.settled()]
        for load in settled:
            (self._late if load.late else self._running).remove(load)
            self._end(load)
            self._counters.loads_adopted += load.late and load.landed
        now = time.monotonic()
        for load in [load for load in self._running if now - load.begun_s > self._load_timeout_s]:
            load.transfer.wait(0.0)
            self._give_up(load)
        return len(settled)

    def _brought(self, started: Started) -> Brought:
        load = started.load
        if load is None:
            return Brought({}, started.branching_boundary)
        self.wait(load, self._load_timeout_s)
        if not load.ended:
            self._rule.loaded(load.n_tokens, time.monotonic() - load.begun_s)
            if load in self._running:
                self._give_up(load)
        return Brought(load.pages if load.landed else {}, started.branching_boundary)

    def _give_up(self, load: Load) -> None:
        """It is late: what it builds on may go."""
        outcome = load.transfer.outcome
        self._counters.loads_late += outcome is Outcome.PENDING
        self._counters.loads_failed += outcome is Outcome.FAILED
        load.late = True
        self._running.remove(load)
        self._late.append(load)
        self._tidy(load)

    def _shared(self, prompt: Prompt, namespace: Namespace, match: Match) -> Load | None:
        """A load in time that brings pages of this prompt beyond what L1 has."""
        first = match.boundaries[Tier.DEVICE] * namespace.page_size
        for load in self._running:
            end = first + namespace.page_size
            if load.namespace == namespace and np.array_equal(load.tokens[:end], prompt.tokens[:end]):
                return load
        return None

    def _worth(self, n_tokens: int) -> bool:
        skip = self._rule.skip(n_tokens)
        self._counters.loads_skipped_short += skip is Skip.TOO_SHORT
        self._counters.loads_skipped_slow += skip is Skip.TOO_SLOW
        return skip is None

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
        *,
        by_layer: bool,
    ) -> Load | None:
        """Start loading what was found; None, and nothing taken, when L1 has no room for it."""
        needed: dict[str, PageArray] = {}
        for component in self._components:
            ready = np.flatnonzero(device[component.name][: found.boundary]).astype(np.int32)
            needed[component.name] = ready[ready >= component.coverage.start(found.boundary)]
        kept = self._index.pin_pages(match.cursor, needed, tier=Tier.DEVICE)
        placements = self._targets(found)
        if placements is None:
            self._index.unpin(kept)
            self._counters.loads_no_room += 1
            return None
        row = self._layers.take() if by_layer and self._layers is not None else None
        cells = None if row is None else row.cells
        load = Load(
            namespace,
            prompt.tokens[: found.boundary * namespace.page_size],
            placements,
            lease,
            self._lower.start_load(lease, placements, cells=cells),
            self._lower.epoch,
            kept,
            (found.boundary - match.boundaries[Tier.DEVICE]) * namespace.page_size,
            row,
        )
        self._counters.loads += 1
        self._running.append(load)
        return load

    def _tidy(self, load: Load) -> None:
        """Give back what nobody needs any more."""
        if load.kept is not None and (load.late or (load.ended and not load.waiting)):
            self._index.unpin(load.kept)
            load.kept = None
        if load.row is not None and load.ended and not load.waiting and self._layers is not None:
            self._layers.give_back(load.row)
            load.row = None

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

    def _end(self, load: Load) -> None:
        """A settled load: into the index as a whole, or back to the pool as a whole."""
        self._lower.release(load.lease)
        load.ended = True
        load.landed = load.transfer.outcome is Outcome.OK and self._completes(load)
        if load.landed:
            self._enter(load)
        else:
            self._counters.loads_failed += load.transfer.outcome is Outcome.FAILED and not load.late
            for name, placement in load.placements.items():
                self._ledger.give(name, placement.slots, Owner.TRANSFER, Owner.NOBODY)
            if load.row is not None:
                load.row.release()
        self._tidy(load)

    def _enter(self, load: Load) -> None:
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
        if load.waiting:
            whole = self._index.pin(inserted.cursor, n_pages, tier=Tier.DEVICE)
            if load.kept is not None:
                self._index.unpin(load.kept)
            load.kept = whole

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
