"""Models: the index, frame layouts and host slots kept for each model identity.

Engines of equal identity share one model; it outlives them. All calls run on the event loop and decide at
once. Evicts nothing of its own accord (see host.py); moves no bytes but those of frames that make way.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.events import EventLog, Reason
from controller.memory.frames import FrameLayout
from controller.memory.slab import HostArena, HostSlab
from controller.requests import PoolStatus, Prompt
from hicache.core.audit import audit
from hicache.core.identity import Namespace, storage_key
from hicache.core.layout import Layout
from hicache.core.reservations import Reservation
from hicache.core.structure import Cursor, Ticks
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
        self,
        name: str,
        revision: str,
        layout: Layout,
        ranks: int,
        slab: HostSlab,
        ticks: Ticks,
        events: EventLog | None,
    ) -> None:
        self.name = name
        self.events = events
        self.ranks = ranks
        self.revision = revision
        self.layout = layout
        self.fingerprint = layout.fingerprint()
        self.page_size = layout.page_size
        components = layout.index_components()
        self.index = Index(layout.page_size, components, (HOST, STORAGE), journal=events, ticks=ticks)
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
        self.tenant_bytes: Counter[str] = Counter()
        """Host bytes by salt."""
        self._owners: dict[str, dict[int, tuple[Cursor, int]]] = {name: {} for name in self.shelves}
        """Which page each host slot in use belongs to: a cursor to its path, and its number."""
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
        for name, (pages, slots) in placements.items():
            self._own(name, cursor, pages, slots)
        ended = asyncio.get_running_loop().create_future()
        fill = Fill(namespace, tokens, placements, reservation, hashes, ended)
        self._fills.add(fill)
        self._filling.update({(name, row[0].tobytes()): ended for name, row in hashes.items()})
        return fill

    def end_fill(self, fill: Fill, good: Mapping[str, BoolArray] | None) -> None:
        """Make the pages READY whose bytes are good (None: all of them) and give the others back."""
        if good is None:
            for name, surplus in self.index.publish(fill.reservation).items():
                self.shelves[name].arena.free(surplus)
        else:
            self.index.withdraw(fill.reservation)
            kept = {}
            for name, (pages, slots) in fill.placements.items():
                row = np.full(int(pages[-1]) + 1 if len(pages) else 0, NO_SLOT, dtype=np.int32)
                row[pages[good[name]]] = slots[good[name]]
                kept[name] = row
                self.give_back({name: slots[~good[name]]})
            depth = max(map(len, kept.values()))
            kept = {
                name: np.pad(row, (0, depth - len(row)), constant_values=NO_SLOT)
                for name, row in kept.items()
            }
            if any((row != NO_SLOT).any() for row in kept.values()):
                tokens = fill.tokens[: depth * self.page_size]
                cursor = self.index.insert(fill.namespace, tokens, kept, tier=HOST).cursor
                for name, row in kept.items():
                    pages = np.flatnonzero(row != NO_SLOT).astype(np.int32)
                    self._own(name, cursor, pages, row[pages])
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

    # -- slots: whose they are, and frames that make way ---------------------------------------------

    def _own(self, component: str, cursor: Cursor, pages: PageArray, slots: SlotArray) -> None:
        """These slots hold (or will) these pages of the cursor's path."""
        owners, before = self._owners[component], len(self._owners[component])
        owners.update(
            (slot, (cursor, page)) for slot, page in zip(slots.tolist(), pages.tolist(), strict=True)
        )
        added_bytes = (len(owners) - before) * self.shelves[component].slot_bytes
        self.tenant_bytes[cursor.namespace.salt] += added_bytes

    def give_back(self, freed: Mapping[str, SlotArray]) -> None:
        """Slots whose pages are gone from host memory."""
        for name, slots in freed.items():
            shelf, owners = self.shelves[name], self._owners[name]
            shelf.arena.free(slots)
            for slot in slots.tolist():
                salt = owners.pop(slot)[0].namespace.salt
                self.tenant_bytes[salt] -= shelf.slot_bytes
                if not self.tenant_bytes[salt]:
                    del self.tenant_bytes[salt]

    def empty_an_extent(self, component: str, most_tried: int) -> int | None:
        """Move the frames out of the component's emptiest extent, into free slots of its others, so that
        the extent is free: at most one extent's bytes. Only frames that nobody pins and that are not on
        their way in: the emptiest extents are tried until one has no other. Returns frames moved; None
        when there is no room for them, or none of those tried can be emptied."""
        arena, owners = self.shelves[component].arena, self._owners[component]
        reclaiming = self.index.reclaiming
        for extent in arena.emptiest(most_tried):
            old = arena.slots_in(extent)
            found = [(slot, owners.get(slot)) for slot in old.tolist()]
            if all(own and reclaiming.movable(own[0], component, HOST, own[1], slot) for slot, own in found):
                fresh = arena.alloc_beside(extent, len(old))
                moves = zip(arena.addresses(old).tolist(), arena.addresses(fresh).tolist(), strict=True)
                for source, target in moves:
                    ctypes.memmove(target, source, arena.slot_bytes)
                for slot, target in zip(old.tolist(), fresh.tolist(), strict=True):
                    cursor, page = owners[target] = owners.pop(slot)
                    reclaiming.reslot(cursor, component, HOST, page, slot, target)
                arena.free(old)
                return len(old)
        return None

    # -- reports -------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        arenas = {(name, HOST): shelf.arena for name, shelf in self.shelves.items()}
        found = [f"{self.name}: {violation}" for violation in audit(self.index, arenas)]
        found += self._misowned()
        return found

    def _misowned(self) -> Iterator[str]:
        """Slots whose owner is not the page that stands in them, and tenants whose bytes do not add up."""
        tenant_bytes: Counter[str] = Counter()
        for name, owners in self._owners.items():
            if sorted(owners) != self.shelves[name].arena.used_slots().tolist():
                yield f"{self.name}: {name}: slots in use and slots with an owner differ"
            for slot, (cursor, page) in owners.items():
                tenant_bytes[cursor.namespace.salt] += self.shelves[name].slot_bytes
                state = self.index.residency(cursor, name, HOST, page, page + 1)[0]
                held = self.index.slots(cursor, name, HOST, page, page + 1)[0]
                if state == Residency.ABSENT or (state == Residency.READY and held != slot):
                    yield f"{self.name}: {name}: slot {slot} is not where page {page} is"
        if +tenant_bytes != +self.tenant_bytes:
            yield f"{self.name}: tenants' bytes {self.tenant_bytes}, counted {tenant_bytes}"

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
