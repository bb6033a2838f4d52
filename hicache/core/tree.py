"""The index: what prompts are known, where their state is, and what may be reused, kept or given up.

Decides only: it moves no bytes, waits for nothing and knows no clock. Names no component: all that
differs between kinds of state follows from their coverage. See docs/index.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.core.columns import UNBROKEN, Lane, Node, Shape
from hicache.core.coverage import Component
from hicache.core.eviction import Eviction, Evictor, everything
from hicache.core.identity import Namespace
from hicache.core.matching import Match, reaches
from hicache.core.occupancy import Freed, Occupancy
from hicache.core.pins import PinBook, Receipt
from hicache.core.queues import Queues
from hicache.core.reservations import Desk, Reservation, checked_placements
from hicache.core.structure import Cursor, Segment, Tree, packed_tokens, segments_up
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


@dataclass(frozen=True)
class Inserted:
    """What an insert did."""

    cursor: Cursor
    n_pages: int
    """Pages of the prompt that the tree now knows."""
    tail_tokens: int
    """Tokens after the last whole page: not cached, still the caller's."""
    redundant: Mapping[str, SlotArray]
    """Offered slots that are the caller's again: the page had payload in another slot."""
    canonical: Mapping[str, SlotArray]
    """Per offered page the slot to use from now on; -1 where there is none."""


class ReadableIndex:
    """The reading half of the index."""

    def __init__(self, page_size: int, components: Sequence[Component], tiers: Sequence[Tier]) -> None:
        self.shape = Shape(page_size, components, tiers)
        self._queues = Queues(self.shape)
        self._tree = Tree(self.shape, self._queues)
        self._occupancy = Occupancy(self.shape, self._tree, self._queues)

    def match(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        *,
        limit_pages: int | None = None,
        cursor: Cursor | None = None,
        device: Mapping[str, BoolArray] | None = None,
    ) -> Match:
        """How deep `tokens` may be reused, per reach. Changes nothing and pins nothing.

        A cursor of the same or a shorter prompt saves the walk; a wrong or stale one only costs time.
        `device` names pages that the caller holds itself (READY), per component: they are readable in
        every reach and may lie deeper than anything this index knows.
        """
        limit = len(tokens) // self.shape.page_size
        if limit_pages is not None:
            limit = min(limit, max(0, limit_pages))
        node, n_pages = self._tree.find(namespace, packed_tokens(tokens), limit, cursor)
        boundaries, branching = reaches(self.shape, segments_up(node, 0, n_pages), limit, device)
        return Match(self._tree.cursor(namespace, node, n_pages), n_pages, boundaries, branching)

    def touch(self, cursor: Cursor, boundary: int) -> None:
        """Refresh the recency of exactly the pages that each component needs at `boundary`."""
        segments = self._tree.segments(cursor, 0, boundary)
        self._tree.tick += 1
        self._touch(segments, boundary)

    def _touch(self, segments: list[Segment], boundary: int) -> None:
        tick = self._tree.tick
        for c, component in enumerate(self.shape.components):
            if boundary:
                for node, start, stop in _from_page(segments, component.coverage.start(boundary)):
                    lanes = self.shape.of_component[c]
                    if any(node.present[lane.row] == node.n for lane in lanes):
                        node.use[c, start:stop] = tick
                    else:
                        there = node.block[lanes[0].row, start:stop] != NO_SLOT
                        for lane in lanes[1:]:
                            there |= node.block[lane.row, start:stop] != NO_SLOT
                        node.use[c, start:stop][there] = tick

    def residency(
        self, cursor: Cursor, component: str, tier: Tier, start: int, stop: int
    ) -> NDArray[np.uint8]:
        """`Residency` of the pages [start, stop)."""
        places = self._places(cursor, component, tier, start, stop)
        return np.where(
            places > NO_SLOT, Residency.READY, np.where(places < NO_SLOT, Residency.INBOUND, 0)
        ).astype(np.uint8)

    def slots(self, cursor: Cursor, component: str, tier: Tier, start: int, stop: int) -> SlotArray:
        """Slots of the pages [start, stop); -1 where not READY. The tier must have slots."""
        self.shape.slotted(component, tier)
        places = self._places(cursor, component, tier, start, stop)
        return np.maximum(places, NO_SLOT, out=places)

    def hashes(self, cursor: Cursor, start: int, stop: int) -> HashArray:
        """Hashes of the pages [start, stop), shape (pages, 32); computed once per page and kept."""
        return self._tree.hashes(cursor.namespace, self._tree.segments(cursor, start, stop))

    def resident(self, component: str, tier: Tier) -> int:
        """Pages READY or INBOUND in the whole index."""
        return self._occupancy.resident[self.shape.lane(component, tier).row]

    def pinned(self, component: str, tier: Tier) -> int:
        """Pages with a pin in the whole index. Visits every node: for reports, not for decisions."""
        row = self.shape.slotted(component, tier).pin_row
        return sum(int(np.count_nonzero(node.block[row, : node.n])) for node in self._occupancy.nodes())

    def _places(self, cursor: Cursor, component: str, tier: Tier, start: int, stop: int) -> SlotArray:
        row = self.shape.lane(component, tier).row
        out: SlotArray = np.empty(stop - start, dtype=np.int32)
        for node, low, high in self._tree.segments(cursor, start, stop):
            out[node.start + low - start : node.start + high - start] = node.block[row, low:high]
        return out


class Index(ReadableIndex):
    """A columnar radix tree over the pages of prompts."""

    def __init__(self, page_size: int, components: Sequence[Component], tiers: Sequence[Tier]) -> None:
        super().__init__(page_size, components, tiers)
        self._evictor = Evictor(self._tree, self._occupancy, self._queues)
        self._pins = PinBook(self.shape, self._queues)
        self._desk = Desk(self._occupancy)

    def insert(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        slots: Mapping[str, SlotArray],
        *,
        tier: Tier,
        cursor: Cursor | None = None,
        first_page: int = 0,
    ) -> Inserted:
        """Enter payload that is READY in `tier`.

        `slots[c]` covers the whole pages from `first_page` on, -1 where nothing is offered; fills
        tombstones. Slots that are taken over belong to the index until evicted. The prompt's coverage
        becomes the most recent; payload outside it starts as the oldest. Raises ValueError, before any
        change, for slots of the wrong length or below -1.
        """
        n_pages = len(tokens) // self.shape.page_size
        offered = self._checked_slots(slots, tier, max(0, n_pages - first_page))
        packed = packed_tokens(tokens)
        node, matched = self._tree.find(namespace, packed, n_pages, cursor)
        depth = max([matched, *(_depth(array, first_page) for _, array in offered)])
        node = self._tree.extend(namespace, node, matched, packed, depth)
        segments = segments_up(node, 0, depth)
        redundant, canonical = {}, {}
        filled: list[tuple[Node, Lane, slice | NDArray[np.intp]]] = []
        for lane, array in offered:
            canonical[lane.name] = array.copy()
            redundant[lane.name] = self._place(
                lane,
                _from_page(segments, first_page),
                array,
                canonical[lane.name],
                first_page,
                matched,
                filled,
            )
        self._settle(segments, matched)
        self._tree.tick += 1
        self._touch(segments, depth)
        for where, lane, offsets in filled:
            self._occupancy.enqueue(where, lane, offsets)
        return Inserted(
            self._tree.cursor(namespace, node, depth),
            depth,
            len(tokens) - n_pages * self.shape.page_size,
            redundant,
            canonical,
        )

    def _checked_slots(
        self, slots: Mapping[str, SlotArray], tier: Tier, n_pages: int
    ) -> list[tuple[Lane, SlotArray]]:
        checked = []
        for name, given in slots.items():
            lane, array = self.shape.slotted(name, tier), np.asarray(given, dtype=np.int32)
            if array.shape != (n_pages,):
                raise ValueError(f"{name}: slots of shape {array.shape} for {n_pages} pages")
            if n_pages and int(array.min()) < NO_SLOT:
                raise ValueError(f"{name}: a slot is below -1")
            checked.append((lane, array))
        return checked

    def _place(
        self,
        lane: Lane,
        segments: list[Segment],
        offered: SlotArray,
        canonical: SlotArray,
        first_page: int,
        matched: int,
        filled: list[tuple[Node, Lane, slice | NDArray[np.intp]]],
    ) -> SlotArray:
        """Enter one component's offer; fills in `canonical` and `filled`, returns what is redundant."""
        redundant = [_NO_SLOTS]
        for node, start, stop in segments:
            base = node.start - first_page
            offer = offered[base + start : base + stop]
            known = min(max(matched - node.start, start), stop)
            if known > start:
                have = node.block[lane.row, start:known]
                if not np.array_equal(have, offer[: known - start]):
                    redundant.append(
                        self._merge(
                            lane, node, start, offer[: known - start], canonical[base + start :], filled
                        )
                    )
            if known < stop:
                self._occupancy.fill(node, lane, slice(known, stop), offer[known - start :])
                filled.append((node, lane, slice(known, stop)))
        return np.concatenate(redundant)

    def _merge(
        self,
        lane: Lane,
        node: Node,
        start: int,
        offer: SlotArray,
        canonical: SlotArray,
        filled: list[tuple[Node, Lane, slice | NDArray[np.intp]]],
    ) -> SlotArray:
        """Offer payload for pages that the tree knew. A page that is INBOUND is taken over: its
        reservation finds its slot surplus when it is published."""
        have = node.block[lane.row, start : start + len(offer)].copy()
        ready, given = have > NO_SLOT, offer > NO_SLOT
        taken = given & ~ready
        canonical[: len(offer)][ready] = have[ready]
        if taken.any():
            offsets = taken.nonzero()[0]
            inbound = have[offsets] < NO_SLOT
            node.block[lane.row, offsets[inbound] + start] = offer[offsets[inbound]]
            absent = offsets[~inbound]
            if len(absent):
                self._occupancy.fill(node, lane, absent + start, offer[absent])
            filled.append((node, lane, offsets + start))
        surplus: SlotArray = offer[ready & given & (offer != have)]
        return surplus

    def _settle(self, segments: list[Segment], matched: int) -> None:
        """See to the dead reach after payload came: of new pages, and where it was broken before."""
        for node, _, _ in reversed(segments):
            self._occupancy.settle_new(node, max(0, matched - node.start))

    def reserve(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        placements: Mapping[str, tuple[PageArray, SlotArray]],
        *,
        tier: Tier,
    ) -> Reservation:
        """Make pages INBOUND, each in the slot given for it; adds structure as deep as the deepest page.

        Raises ValueError, before any change, unless pages ascend, lie within the whole pages of `tokens`
        and are ABSENT in the tier. The slots belong to the reservation until it is published or withdrawn.
        """
        n_pages = len(tokens) // self.shape.page_size
        checked = checked_placements(placements, n_pages)
        lanes = {name: self.shape.slotted(name, tier) for name in checked}
        packed = packed_tokens(tokens)
        depth = max((int(pages[-1]) + 1 for pages, _ in checked.values() if len(pages)), default=0)
        node, matched = self._tree.find(namespace, packed, depth, None)
        cursor = self._tree.cursor(namespace, node, matched)
        for name, (pages, _) in checked.items():
            known = pages[pages < matched]
            if (self._places(cursor, name, tier, 0, matched)[known] != NO_SLOT).any():
                raise ValueError(f"{name}: a page to reserve is not ABSENT in {lanes[name].tier.name}")
        node = self._tree.extend(namespace, node, matched, packed, depth)
        reservation = Reservation(tier, node, depth, checked)
        self._desk.enter(reservation)
        self._settle(segments_up(node, 0, depth), matched)
        return reservation

    def publish(self, reservation: Reservation) -> Mapping[str, SlotArray]:
        """INBOUND -> READY. Returns the slots that are the caller's again because an insert filled their
        page meanwhile; empty as a rule. Raises ValueError for a spent reservation."""
        self._desk.spend(reservation)
        self._tree.tick += 1
        surplus: dict[str, list[SlotArray]] = {name: [_NO_SLOTS] for name in reservation.placements}
        for lane, node, offsets, slots in self._desk.entries(reservation):
            mine, kept, lost = self._desk.still_mine(lane, node, offsets, slots)
            node.block[lane.row, mine] = kept
            surplus[lane.name].append(lost)
            first = self.shape.components[lane.component].coverage.start(reservation.depth)
            node.use[lane.component, mine[mine + node.start >= first]] = self._tree.tick
            self._occupancy.enqueue(node, lane, mine)
        return {name: np.concatenate(parts) for name, parts in surplus.items()}

    def withdraw(self, reservation: Reservation) -> Mapping[str, SlotArray]:
        """INBOUND -> ABSENT. Returns the slots, which are the caller's again; prunes what is left empty.
        Raises ValueError for a spent reservation."""
        self._desk.spend(reservation)
        for lane, node, offsets, slots in self._desk.entries(reservation):
            mine, _, _ = self._desk.still_mine(lane, node, offsets, slots)
            self._occupancy.clear(node, lane, mine)
        self._after_loss(segments_up(reservation.node, 0, reservation.depth))
        return {name: slots for name, (_, slots) in reservation.placements.items()}

    def _after_loss(self, segments: list[Segment]) -> None:
        for node, _, _ in segments:
            self._tree.trim(node)
            for lane in self.shape.whole_lanes:
                self._queues.requeue(node, lane)
        for node, _, _ in reversed(segments):
            if node.n:
                self._occupancy.settle(node)

    def mark_stored(self, cursor: Cursor, component: str, pages: PageArray) -> None:
        """These pages are READY in STORAGE."""
        lane = self.shape.lane(component, Tier.STORAGE)
        segments = self._chosen(cursor, pages)
        for node, offsets in segments:
            absent = offsets[node.block[lane.row, offsets] == NO_SLOT]
            if len(absent):
                self._occupancy.fill(node, lane, absent, np.zeros(len(absent), dtype=np.int32))
                self._occupancy.enqueue(node, lane, absent)
            if node.dead_from < UNBROKEN:
                self._occupancy.settle(node)

    def forget_stored(self, cursor: Cursor, component: str, pages: PageArray) -> None:
        """These pages are not in STORAGE any more."""
        lane = self.shape.lane(component, Tier.STORAGE)
        chosen = self._chosen(cursor, pages)
        for node, offsets in chosen:
            self._occupancy.clear(node, lane, offsets[node.block[lane.row, offsets] != NO_SLOT])
        self._after_loss([(node, 0, node.n) for node, _ in chosen])

    def _chosen(self, cursor: Cursor, pages: PageArray) -> list[tuple[Node, NDArray[np.intp]]]:
        """The nodes that hold these pages (any order), deepest first, with the offsets in them."""
        ordered = np.unique(np.asarray(pages, dtype=np.int64))
        if not len(ordered):
            return []
        chosen = []
        for node, start, stop in self._tree.segments(cursor, int(ordered[0]), int(ordered[-1]) + 1):
            low, high = np.searchsorted(ordered, (node.start + start, node.start + stop))
            if high > low:
                chosen.append((node, ordered[low:high].astype(np.intp) - node.start))
        return chosen

    def pin(self, cursor: Cursor, boundary: int, *, tier: Tier) -> Receipt:
        """Protect what every component needs at `boundary`, where it is READY in the tier."""
        segments = self._tree.segments(cursor, 0, boundary)
        receipt = self._pins.begin(tier)
        for lane in self.shape.of_tier[tier] if boundary else ():
            first = self.shape.components[lane.component].coverage.start(boundary)
            self._pins.hold_ready(receipt, lane, _from_page(segments, first))
        return receipt

    def pin_pages(self, cursor: Cursor, placements: Mapping[str, PageArray], *, tier: Tier) -> Receipt:
        """Protect exactly these pages (strictly ascending). Raises ValueError, before any change, when one
        is not READY in the tier."""
        receipt = self._pins.begin(tier)
        try:
            for name, pages in placements.items():
                lane = self.shape.slotted(name, tier)
                if len(pages):
                    segments = self._tree.segments(cursor, int(pages[0]), int(pages[-1]) + 1)
                    self._pins.hold_pages(receipt, lane, segments, np.asarray(pages, dtype=np.int32))
        except (ValueError, LookupError):
            self._pins.release(receipt)
            raise
        return receipt

    def unpin(self, receipt: Receipt) -> None:
        """Give a pin back. Raises ValueError the second time."""
        self._pins.release(receipt)

    def unpin_before(self, receipt: Receipt, component: str, page: int) -> None:
        """Give back early what the receipt holds of one component before `page`."""
        self._pins.release_before(receipt, component, page)

    def evict(self, component: str, tier: Tier, pages: int) -> Eviction:
        """Give up exactly `pages` pages of a component in a tier, as far as anything can be given up, in
        the order of the eviction policy. Where a whole-path page goes from its last tier, what depends on
        it in this tier goes in the same decision. The slots are the caller's again."""
        freed = Freed()
        count = self._evictor.evict(self.shape.lane(component, tier), pages, freed)
        return Eviction(freed.slots(), count, max(0, pages - count))

    def drop(self, tier: Tier) -> Eviction:
        """Give up everything in the tier that is neither pinned nor inbound nor carries something that is."""
        freed = Freed()
        everything(self._evictor, self.shape.of_tier[tier], freed)
        return Eviction(freed.slots(), sum(freed.pages.values()), 0)


_NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)


def _from_page(segments: list[Segment], first: int) -> list[Segment]:
    """The part of a path's segments (deepest first) from page `first` on."""
    out = []
    for node, start, stop in segments:
        if node.start + stop <= first:
            break
        out.append((node, max(start, first - node.start), stop))
    return out


def _depth(slots: SlotArray, first_page: int) -> int:
    """The boundary after the last page that a slot is offered for; 0 when there is none."""
    if len(slots) and slots[-1] > NO_SLOT:
        return first_page + len(slots)
    given = (slots > NO_SLOT).nonzero()[0]
    return first_page + int(given[-1]) + 1 if len(given) else 0
