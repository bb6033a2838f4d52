"""Host memory: room for every model and component out of one byte budget. Division follows need.

When room is wanted, the coldest pages of all give way, whichever model or component they belong to, except
below a component's floor; a tenant at its quota makes room among its own pages first. Room that is free in
pieces is brought together into whole extents. Decides at once; keeps nothing that is pinned from its owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from controller.counters import Counters
from controller.events import EventLog, Reason
from controller.memory.slab import HostSlab
from controller.models import HOST, Model, Shelf
from controller.settings import HostShares
from hicache.core.eviction import Eviction
from hicache.core.layout import Layout
from hicache.core.queues import LAST_KEY
from hicache.core.structure import Ticks
from hicache.core.words import SlotArray

EXTENTS_TRIED = 8
"""How many extents of a component are looked at for one that can be emptied, unless nothing else helps."""
FREE_PART = 16
"""A component keeps an extent's worth of free slots, and this fraction of what it uses, for itself while
there is something to evict: what one request's pages left free, the next one's will take."""
QUOTA_SLACK = 16
"""A tenant at its quota gives up at least this fraction of it at once, so that looking for its coldest pages
costs little per page."""


class Taken(NamedTuple):
    """Host slots for a request, maybe fewer than it wanted."""

    slots: SlotArray
    short: str
    """Why there are fewer: `host_full` or `quota`; empty when there are not."""


class Holding(NamedTuple):
    """What one model has of one component."""

    model: Model
    shelf: Shelf

    @property
    def roomy(self) -> bool:
        """Its free slots can make up a whole extent."""
        return self.shelf.arena.free_slots >= max(1, self.shelf.arena.slots_per_extent)

    @property
    def plenty(self) -> bool:
        """They are more than it needs itself when pages come and go at the usual pace."""
        arena = self.shelf.arena
        return (arena.free_slots - arena.slots_per_extent) * arena.slot_bytes > arena.used_bytes // FREE_PART

    @property
    def coldest(self) -> int:
        return self.model.index.reclaiming.coldest(self.shelf.name, HOST)


class HostMemory:
    """All host memory of one controller."""

    def __init__(
        self, slab: HostSlab, counters: Counters, shares: HostShares, events: EventLog | None = None
    ) -> None:
        self._slab = slab
        self._counters = counters
        self._shares = shares
        self._events = events
        self._ticks = Ticks()
        self._models: dict[tuple[str, str, bytes, int], Model] = {}
        self.yield_retained: Callable[[Model | None, str | None], bool] = lambda _model, _salt: False
        """Ends one retention (of this model, of this tenant) so that its pages can go; False when there is
        none."""

    @property
    def capacity_bytes(self) -> int:
        return self._slab.nbytes

    @property
    def used_bytes(self) -> int:
        return sum(holding.shelf.arena.used_bytes for holding in self._holdings())

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(self._models.values())

    def model(self, name: str, revision: str, layout: Layout, ranks: int) -> Model:
        """The model of this identity, made at first sight. Raises SlabError when a frame cannot fit."""
        key = (name, revision, layout.fingerprint(), ranks)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = Model(
                name, revision, layout, ranks, self._slab, self._ticks, self._events
            )
        return found

    def named(self, name: str, revision: str) -> list[Model]:
        """The models of this name and revision: one for each layout and number of ranks seen."""
        return [model for model in self.models if (model.name, model.revision) == (name, revision)]

    def tenant_bytes(self, salt: str) -> int:
        """Host memory that a tenant holds."""
        return sum(model.tenant_bytes[salt] for model in self.models)

    def take(self, model: Model, component: str, n_pages: int, salt: str) -> Taken:
        """Up to `n_pages` host slots for a tenant, evicting on demand: the coldest pages of all first, then
        those retained. Fewer when the rest is pinned, below a floor, or beyond the tenant's quota."""
        wanted = Holding(model, model.shelves[component])
        arena = wanted.shelf.arena
        n_within = self._within_quota(wanted, n_pages, salt)
        while n_within < min(n_pages, self._quota_pages(wanted, salt)) and self.yield_retained(None, salt):
            n_within = self._within_quota(wanted, n_pages, salt)
        self._make_room(wanted, n_within, EXTENTS_TRIED)
        while n_within > arena.obtainable() and self.yield_retained(model, None):
            self._make_room(wanted, n_within, EXTENTS_TRIED)
        if n_within and not arena.obtainable():
            self._make_room(wanted, 1, self._slab.n_extents)
            while not arena.obtainable() and self.yield_retained(None, None):
                self._make_room(wanted, 1, self._slab.n_extents)
        slots = arena.alloc(min(n_within, arena.obtainable()))
        assert slots is not None, "an arena gives what it says is obtainable"
        if len(slots) == n_pages:
            return Taken(slots, "")
        return Taken(slots, "host_full" if len(slots) < n_within else "quota")

    def flush(self) -> tuple[int, int]:
        """Drop every host page that nothing holds; returns pages dropped and pages kept."""
        dropped = kept = 0
        for model in self.models:
            with model.because(Reason.CLEARED):
                eviction = model.index.drop(HOST)
            model.give_back(eviction.freed)
            dropped += sum(map(len, eviction.freed.values()))
            kept += sum(model.index.resident(name, HOST) for name in model.shelves)
        return dropped, kept

    # -- making room ---------------------------------------------------------------------------------

    def _make_room(self, wanted: Holding, n_pages: int, extents_tried: int) -> None:
        """Until the component can have `n_pages` slots, or nothing more can be had: first what others have
        free beyond what they are likely to need, then the coldest pages, then what others have free."""
        arena = wanted.shelf.arena
        stuck: set[Shelf] = set()
        """Components with free slots enough, but no extent without a page that must stay where it is."""

        def concentrate(holding: Holding) -> bool:
            moved = holding.model.empty_an_extent(holding.shelf.name, extents_tried)
            if moved is None:
                stuck.add(holding.shelf)
                return False
            self._counters.host_moved_pages += moved
            return True

        while arena.slots_per_extent and (short := n_pages - arena.obtainable()) > 0:
            roomy = [one for one in self._holdings() if one.roomy and one.shelf not in (*stuck, wanted.shelf)]
            victim, upto = self._coldest(wanted, stuck)
            plenty = next((one for one in roomy if one.plenty), None)
            if plenty is not None:
                concentrate(plenty)
            elif victim is not None and victim not in roomy:
                self._evict(wanted, victim, short, upto)
            elif roomy:
                concentrate(victim or roomy[0])
            else:
                return

    def _coldest(self, wanted: Holding, stuck: set[Shelf]) -> tuple[Holding | None, int]:
        """Who has the coldest page that can go, and up to which key it has the coldest."""
        offered = sorted(
            (one.coldest, one.shelf is not wanted.shelf, number, one)
            for number, one in enumerate(self._holdings())
            if one.shelf not in stuck and self._above_floor(wanted, one)
        )
        if not offered or offered[0][0] == LAST_KEY:
            return None, LAST_KEY
        return offered[0][3], offered[1][0] if len(offered) > 1 else LAST_KEY

    def _evict(self, wanted: Holding, victim: Holding, short: int, upto: int) -> None:
        """Give up a component's coldest pages. How many: of the wanted one what it is short of, of another
        as many as fill the extents that it takes."""
        model, shelf = victim
        pages = short
        if shelf is not wanted.shelf:
            n_extents = -(-short // wanted.shelf.arena.slots_per_extent)
            pages = n_extents * shelf.arena.slots_per_extent - shelf.arena.free_slots
            pages = min(pages, self._above_floor(wanted, victim))
        self._evicted(model, model.index.reclaiming.evict_colder(shelf.name, HOST, pages, upto))

    def _above_floor(self, wanted: Holding, holding: Holding) -> int:
        """Pages that the holding's component can give up to the wanted one."""
        nbytes = holding.shelf.arena.used_bytes
        floor = self._shares.floors.get(holding.shelf.name, 0.0)
        if floor and holding.shelf.name != wanted.shelf.name:
            held = Counter[str]()
            for one in self._holdings():
                held[one.shelf.name] += one.shelf.arena.used_bytes
            nbytes = min(nbytes, held[holding.shelf.name] - int(floor * self.capacity_bytes))
        return max(0, nbytes // holding.shelf.slot_bytes)

    def _quota_pages(self, wanted: Holding, salt: str) -> int:
        """The most that the tenant could have; without a quota, no bound."""
        quota = self._shares.quotas_bytes.get(salt, self.capacity_bytes)
        return quota // wanted.shelf.slot_bytes

    def _within_quota(self, wanted: Holding, n_pages: int, salt: str) -> int:
        """How many of the pages the tenant may have, after it has given up its own coldest."""
        quota = self._shares.quotas_bytes.get(salt)
        if quota is None or not n_pages:
            return n_pages
        slot_bytes, pageless_bytes = wanted.shelf.slot_bytes, self._pageless_bytes()
        n_pages_at_most = min(n_pages, quota // slot_bytes)
        over = self.tenant_bytes(salt) + pageless_bytes + n_pages_at_most * slot_bytes - quota
        for model in sorted(self.models, key=lambda one: one is not wanted.model):
            if over <= 0:
                break
            sizes = {name: shelf.slot_bytes for name, shelf in model.shelves.items()}
            had = model.tenant_bytes[salt]
            goal = max(over, quota // QUOTA_SLACK)
            self._evicted(model, model.index.reclaiming.evict_of(salt, HOST, goal, sizes))
            over -= had - model.tenant_bytes[salt]
        within = max(0, quota - self.tenant_bytes(salt) - pageless_bytes) // slot_bytes
        return min(n_pages, within)

    def _pageless_bytes(self) -> int:
        """Of slots that were taken and have no page yet: the asking tenant's, for its request's other
        components, because nothing awaits between taking slots and giving them pages."""
        return self.used_bytes - sum(sum(model.tenant_bytes.values()) for model in self.models)

    def _evicted(self, model: Model, eviction: Eviction) -> None:
        model.give_back(eviction.freed)
        self._counters.host_evicted_pages += sum(map(len, eviction.freed.values()))

    def _holdings(self) -> Iterator[Holding]:
        for model in self.models:
            for shelf in model.shelves.values():
                yield Holding(model, shelf)
