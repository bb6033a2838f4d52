"""Models: the index, frame layouts and host memory kept for each model identity, and who gets host room.

Engines of equal identity share one model; it outlives them. All calls run on the event loop, decide
at once and move no bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.counters import Counters
from controller.events import EventLog, Reason
from controller.memory.frames import FrameLayout
from controller.memory.slab import HostArena, HostSlab
from controller.requests import PoolStatus, Prompt
from hicache.core.audit import audit
from hicache.core.identity import Namespace, storage_key
from hicache.core.layout import Layout
from hicache.core.reservations import Reservation
from hicache.core.structure import Cursor
from hicache.core.tree import Index
from hicache.core.words import (
    NO_SLOT,
    BoolArray,
    HashArray,
    PageArray,
    Residency,
    SlotArray,
    Tier,
    TokenArray,
)
from storage_backends.base import Item

HOST, STORAGE = Tier.HOST, Tier.STORAGE


@dataclass(frozen=True)
class RankFrame:
    """One rank's part of a host slot."""

    rank: int
    frames: FrameLayout
    offset: int
    """Where it begins in the slot, in bytes."""


def rank_frames(layout: Layout, component: str, ranks: int) -> tuple[RankFrame, ...]:
    """One frame per rank, one after the other; a rank all of whose pools are replicated has none."""
    parts: list[RankFrame] = []
    offset = 0
    for rank in range(ranks):
        frames = FrameLayout(layout, component, rank=rank)
        if frames.payload_bytes:
            parts.append(RankFrame(rank, frames, offset))
            offset += frames.slot_bytes
    return tuple(parts)


@dataclass(frozen=True)
class Shelf:
    """One component of one model: how its frames look and where they stand in host memory."""

    name: str
    whole_path: bool
    parts: tuple[RankFrame, ...]
    arena: HostArena

    @property
    def frame_bytes(self) -> int:
        """Of one page, all ranks together."""
        return sum(part.frames.frame_bytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        return self.arena.slot_bytes

    def items(self, prefix: str, ranks: int, page_hash: bytes, offset: int) -> tuple[Item, ...]:
        """The storage objects of a page whose host slot begins at `offset`, one per part."""
        return tuple(
            Item(
                storage_key(prefix, self.name, part.rank, ranks, page_hash),
                offset + part.offset,
                part.frames.frame_bytes,
            )
            for part in self.parts
        )


@dataclass(frozen=True, eq=False)
class Fill:
    """Host pages on their way in: each is published or given back when the fill ends."""

    namespace: Namespace
    tokens: TokenArray
    placements: Mapping[str, tuple[PageArray, SlotArray]]
    reservation: Reservation
    hashes: Mapping[str, HashArray]
    """Per component, the hashes of its pages."""
    ended: asyncio.Future[None]


class Model:
    """Everything kept for one model identity."""

    def __init__(
        self, name: str, revision: str, layout: Layout, ranks: int, slab: HostSlab, events: EventLog | None
    ) -> None:
        self.name = name
        self.events = events
        self.ranks = ranks
        self.revision = revision
        self.layout = layout
        self.fingerprint = layout.fingerprint()
        self.page_size = layout.page_size
        components = layout.index_components()
        self.index = Index(layout.page_size, components, (HOST, STORAGE), journal=events)
        parts = {spec.name: rank_frames(layout, spec.name, ranks) for spec in layout.components}
        slot_bytes = {name: sum(part.frames.slot_bytes for part in one) for name, one in parts.items()}
        slab.plan(list(slot_bytes.values()))
        self.shelves = {
            component.name: Shelf(
                component.name,
                component.coverage.whole_path,
                parts[component.name],
                slab.arena(slot_bytes[component.name]),
            )
            for component in components
        }
        self.coverages = {component.name: component.coverage for component in components}
        self._fills: set[Fill] = set()
        self._filling: dict[tuple[str, bytes], asyncio.Future[None]] = {}

    def namespace(self, prompt: Prompt) -> Namespace:
        return Namespace(
            self.name, self.revision, self.fingerprint, self.page_size, prompt.adapter, prompt.salt
        )

    def whole_pages(self, prompt: Prompt) -> TokenArray:
        """The prompt without its tail."""
        return prompt.tokens[: len(prompt.tokens) // self.page_size * self.page_size]

    def because(self, reason: Reason, session_id: str = "") -> AbstractContextManager[None]:
        """Why pages move until the end of the block, which must not await."""
        return nullcontext() if self.events is None else self.events.because(reason, session_id)

    def held(self, cursor: Cursor, component: str, n_pages: int) -> NDArray[np.uint8]:
        """Host residency of the first `n_pages` pages, ABSENT beyond what the index knows."""
        known = min(n_pages, cursor.boundary)
        out = np.zeros(n_pages, dtype=np.uint8)
        out[:known] = self.index.residency(cursor, component, HOST, 0, known)
        return out

    # -- fills: who is bringing which pages in -------------------------------------------------------

    def begin_fill(
        self, namespace: Namespace, tokens: TokenArray, placements: Mapping[str, tuple[PageArray, SlotArray]]
    ) -> Fill:
        """Reserve pages (INBOUND). Others find the fill by the hash of its first page of each component."""
        reservation = self.index.reserve(namespace, tokens, placements, tier=HOST)
        cursor = self.index.match(namespace, tokens).cursor
        hashes = {
            name: self.index.hashes(cursor, 0, int(pages[-1]) + 1)[pages]
            for name, (pages, _) in placements.items()
            if len(pages)
        }
        ended = asyncio.get_running_loop().create_future()
        fill = Fill(namespace, tokens, placements, reservation, hashes, ended)
        self._fills.add(fill)
        self._filling.update({(name, row[0].tobytes()): ended for name, row in hashes.items()})
        return fill

    def end_fill(self, fill: Fill, good: Mapping[str, BoolArray] | None) -> None:
        """Make the pages READY whose bytes are good (None: all of them) and give the others back."""
        if good is None:
            self.index.publish(fill.reservation)
        else:
            self.index.withdraw(fill.reservation)
            kept = {}
            for name, (pages, slots) in fill.placements.items():
                row = np.full(int(pages[-1]) + 1 if len(pages) else 0, NO_SLOT, dtype=np.int32)
                row[pages[good[name]]] = slots[good[name]]
                kept[name] = row
                self.shelves[name].arena.free(slots[~good[name]])
            depth = max(map(len, kept.values()))
            kept = {
                name: np.pad(row, (0, depth - len(row)), constant_values=NO_SLOT)
                for name, row in kept.items()
            }
            if any((row != NO_SLOT).any() for row in kept.values()):
                self.index.insert(fill.namespace, fill.tokens[: depth * self.page_size], kept, tier=HOST)
        self._fills.remove(fill)
        for name, hashes in fill.hashes.items():
            del self._filling[name, hashes[0].tobytes()]
        fill.ended.set_result(None)

    async def fills_ended(self, namespace: Namespace, tokens: TokenArray) -> None:
        """Return when nobody is bringing in a page of this path."""
        while running := self._running_fill(namespace, tokens):
            await asyncio.shield(running)

    def _running_fill(self, namespace: Namespace, tokens: TokenArray) -> asyncio.Future[None] | None:
        """A fill that is bringing in a page of this path, or None.

        A fill's first page of a component is an ancestor of all its pages, so the first INBOUND page
        of a path is some fill's first page.
        """
        cursor = self.index.match(namespace, tokens).cursor
        for name in self.shelves:
            inbound = np.flatnonzero(self.held(cursor, name, cursor.boundary) == Residency.INBOUND)
            if inbound.size:
                page = int(inbound[0])
                return self._filling[name, self.index.hashes(cursor, page, page + 1).tobytes()]
        return None

    # -- reports -------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        arenas = {(name, HOST): shelf.arena for name, shelf in self.shelves.items()}
        return [f"{self.name}: {violation}" for violation in audit(self.index, arenas)]

    def pools(self) -> Iterator[PoolStatus]:
        for name, shelf in self.shelves.items():
            inbound = sum(len(fill.placements[name][0]) for fill in self._fills if name in fill.placements)
            yield PoolStatus(
                model=self.name,
                component=name,
                frame_bytes=shelf.frame_bytes,
                resident_pages=self.index.resident(name, HOST) - inbound,
                inbound_pages=inbound,
                pinned_pages=self.index.pinned(name, HOST),
                stored_pages=self.index.resident(name, STORAGE),
            )


class HostMemory:
    """Host room for every model and component out of one byte budget: division follows need."""

    def __init__(self, slab: HostSlab, counters: Counters, events: EventLog | None = None) -> None:
        """`events`: who is told what comes and goes; None for nobody."""
        self._slab = slab
        self._events = events
        self._counters = counters
        self._models: dict[tuple[str, str, bytes, int], Model] = {}
        self.yield_retained: Callable[[Model | None], bool] = lambda _: False
        """Ends one retention (of this model) so that its pages can go; False when there is none."""

    @property
    def capacity_bytes(self) -> int:
        return self._slab.nbytes

    @property
    def used_bytes(self) -> int:
        return sum(shelf.arena.used_bytes for model in self.models for shelf in model.shelves.values())

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(self._models.values())

    def model(self, name: str, revision: str, layout: Layout, ranks: int) -> Model:
        """The model of this identity, made at first sight. Raises SlabError when a frame cannot fit."""
        key = (name, revision, layout.fingerprint(), ranks)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = Model(name, revision, layout, ranks, self._slab, self._events)
        return found

    def take(self, model: Model, component: str, n_pages: int) -> SlotArray:
        """Up to `n_pages` host slots, evicting on demand: the component's own coldest pages first, then
        those retained, and other components' only when it would get nothing. Fewer if the rest is pinned."""
        shelf = model.shelves[component]
        while (short := n_pages - shelf.arena.obtainable()) > 0:
            self._evict(model, component, short)
            if n_pages <= shelf.arena.obtainable() or not self.yield_retained(model):
                break
        if n_pages and not shelf.arena.obtainable():
            self._evict_others(model, component)
            while not shelf.arena.obtainable() and self.yield_retained(None):
                self._evict_others(model, component)
        slots = shelf.arena.alloc(min(n_pages, shelf.arena.obtainable()))
        assert slots is not None, "an arena gives what it says is obtainable"
        return slots

    def give_back(self, model: Model, freed: Mapping[str, SlotArray]) -> None:
        for name, slots in freed.items():
            model.shelves[name].arena.free(slots)

    def named(self, name: str, revision: str) -> list[Model]:
        """The models of this name and revision: one for each layout and number of ranks seen."""
        return [model for model in self.models if (model.name, model.revision) == (name, revision)]

    def flush(self) -> tuple[int, int]:
        """Drop every host page that nothing holds; returns pages dropped and pages kept."""
        dropped = kept = 0
        for model in self.models:
            with model.because(Reason.CLEARED):
                eviction = model.index.drop(HOST)
            self.give_back(model, eviction.freed)
            dropped += sum(map(len, eviction.freed.values()))
            kept += sum(model.index.resident(name, HOST) for name in model.shelves)
        return dropped, kept

    def _evict(self, model: Model, component: str, n_pages: int) -> int:
        eviction = model.index.evict(component, HOST, n_pages)
        self.give_back(model, eviction.freed)
        self._counters.host_evicted_pages += sum(map(len, eviction.freed.values()))
        return eviction.n_freed

    def _evict_others(self, model: Model, component: str) -> None:
        """Free one extent's worth at a time, from whoever holds most, until the component can have a slot."""
        wanted = model.shelves[component].arena
        others = [
            (one, name) for one in self.models for name in one.shelves if (one, name) != (model, component)
        ]
        while others and not wanted.obtainable():
            others.sort(key=lambda other: other[0].shelves[other[1]].arena.used_bytes)
            owner, name = others[-1]
            if not self._evict(owner, name, owner.shelves[name].arena.slots_per_extent):
                others.pop()
