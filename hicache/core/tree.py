"""The index: what prompts are known, where their state is, and what may be reused, kept or given up.

Decides only: it moves no bytes, waits for nothing and knows no clock. Names no component: all that
differs between kinds of state follows from their coverage. See docs/index.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hicache.core.columns import UNBROKEN, Node, Shape
from hicache.core.coverage import Component
from hicache.core.eviction import Eviction, Evictor, everything
from hicache.core.identity import Namespace
from hicache.core.journal import Journal
from hicache.core.matching import Match, reaches
from hicache.core.occupancy import Freed, Occupancy
from hicache.core.offers import NO_SLOTS, Inserted, Offer
from hicache.core.pins import PinBook, Receipt
from hicache.core.policies import MOST_RANK, Policy
from hicache.core.queues import Queues
from hicache.core.reclaiming import Reclaiming
from hicache.core.reservations import Desk, Reservation, checked_placements
from hicache.core.sessions import Sessions
from hicache.core.structure import Cursor, PackedPrompt, Segment, StaleCursor, Ticks, Tree, segments_up
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

__all__ = [
    "Cursor",
    "Eviction",
    "Index",
    "Inserted",
    "Match",
    "ReadableIndex",
    "Receipt",
    "Reservation",
    "StaleCursor",
]


class ReadableIndex:
    """The reading half of the index."""

    def __init__(
        self,
        page_size: int,
        components: Sequence[Component],
        tiers: Sequence[Tier],
        *,
        policies: Mapping[str, Policy] | None = None,
        branch_interval_pages: int = 1,
        journal: Journal | None = None,
        ticks: Ticks | None = None,
    ) -> None:
        """`policies` names components whose eviction order is not LRU. Branching boundaries are reported
        on multiples of `branch_interval_pages`, where the engine can take a checkpoint. `journal` is told
        what becomes READY and what is no longer so. Ages compare among the indexes that share `ticks`."""
        self.shape = Shape(page_size, components, tiers, policies or {})
        if branch_interval_pages < 1:
            raise ValueError(f"branch_interval_pages: {branch_interval_pages}; it must be at least 1")
        self._branch_interval_pages = branch_interval_pages
        self._queues = Queues(self.shape)
        self._tree = Tree(self.shape, self._queues, ticks)
        self._occupancy = Occupancy(self.shape, self._tree, self._queues, journal)

    def match(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        *,
        limit_pages: int | None = None,
        cursor: Cursor | None = None,
        after: Cursor | None = None,
        device: Mapping[str, BoolArray] | None = None,
    ) -> Match:
        """How deep a prompt may be reused, per reach. Changes nothing and pins nothing.

        `after` makes `tokens` the continuation of another prompt: the prompt is what lies before that
        cursor's boundary, then `tokens`; costs O(new pages), and raises StaleCursor when it is gone. With
        `cursor`, `tokens` are the whole prompt, and a cursor of the same or a shorter one saves the walk;
        a wrong or stale one only costs time. `device` names pages that the caller holds itself (READY),
        per component: they are readable in every reach and may lie deeper than anything this index knows.
        """
        prompt = PackedPrompt(tokens, self.shape.page_size, after.boundary if after else 0)
        limit = prompt.n_pages
        if limit_pages is not None:
            limit = min(limit, max(0, limit_pages))
        node, n_pages = self._tree.find(namespace, prompt, limit, cursor, after)
        boundaries, branching = reaches(self.shape, segments_up(node, 0, n_pages), limit, device)
        branching -= branching % self._branch_interval_pages
        return Match(self._tree.cursor(namespace, node, n_pages), n_pages, boundaries, branching)

    def touch(self, cursor: Cursor, boundary: int) -> None:
        """Refresh the recency of exactly the pages that each component needs at `boundary`."""
        segments = self._tree.segments(cursor, 0, boundary)
        self._tree.tick += 1
        self._touch(segments, boundary)

    def _touch(self, segments: list[Segment], boundary: int) -> None:
        if boundary:
            for c, component in enumerate(self.shape.components):
                for node, start, stop in _from_page(segments, component.coverage.start(boundary)):
                    self._occupancy.refresh(node, c, start, stop)

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

    def leaves(self) -> list[Cursor]:
        """A cursor to the end of every path. Visits every node: for reports, not for decisions."""
        return self._tree.leaves()

    def tokens(self, cursor: Cursor) -> TokenArray:
        """The tokens of the cursor's path. Raises StaleCursor when the pages are gone."""
        segments = self._tree.segments(cursor, 0, cursor.boundary)
        width = self.shape.page_bytes
        parts = [bytes(node.tokens[low * width : high * width]) for node, low, high in reversed(segments)]
        return np.frombuffer(b"".join(parts), dtype=np.int32)

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

    def __init__(
        self,
        page_size: int,
        components: Sequence[Component],
        tiers: Sequence[Tier],
        *,
        policies: Mapping[str, Policy] | None = None,
        branch_interval_pages: int = 1,
        journal: Journal | None = None,
        ticks: Ticks | None = None,
    ) -> None:
        super().__init__(
            page_size,
            components,
            tiers,
            policies=policies,
            branch_interval_pages=branch_interval_pages,
            journal=journal,
            ticks=ticks,
        )
        self._evictor = Evictor(self._tree, self._occupancy, self._queues)
        self._pins = PinBook(self.shape, self._queues)
        self._desk = Desk(self._occupancy)
        self.reclaiming = Reclaiming(self._tree, self._occupancy, self._queues, self._evictor)
        self.sessions = Sessions(self._tree, self._queues)

    def insert(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        slots: Mapping[str, SlotArray],
        *,
        tier: Tier,
        cursor: Cursor | None = None,
        after: Cursor | None = None,
        first_page: int | None = None,
        priority: int = 0,
    ) -> Inserted:
        """Enter payload that is READY in `tier`.

        `after` and `cursor` are as for `match`. `slots[c]` covers the whole pages from `first_page` on
        (default: all of `tokens`), -1 where nothing is offered; fills tombstones. Slots that are taken over
        belong to the index until evicted. The prompt's coverage becomes the most recent; payload outside it
        starts as the oldest. Under the priority policy the pages of the prompt have at least this priority
        (0 .. 4095). Raises ValueError, before any change, for slots of the wrong length or below -1.
        """
        if not 0 <= priority <= MOST_RANK:
            raise ValueError(f"priority: {priority}; it must be 0 .. {MOST_RANK}")
        prompt = PackedPrompt(tokens, self.shape.page_size, after.boundary if after else 0)
        first = prompt.base if first_page is None else first_page
        offer = Offer(self.shape, slots, tier, first, prompt.n_pages)
        node, matched = self._tree.find(namespace, prompt, prompt.n_pages, cursor, after)
        depth = max(matched, offer.depth())
        node = self._tree.extend(namespace, node, matched, prompt, depth)
        segments = segments_up(node, 0, depth)
        self._tree.tick += 1
        offer.place(self._occupancy, _from_page(segments, first), matched)
        self._settle(segments, matched)
        self._touch(segments, depth)
        if priority:
            self._prefer(segments, priority)
        offer.enqueue(self._occupancy, depth)
        return Inserted(
            self._tree.cursor(namespace, node, depth),
            depth,
            prompt.tail_tokens,
            offer.redundant,
            offer.canonical,
        )

    def _prefer(self, segments: list[Segment], priority: int) -> None:
        for c, policy in enumerate(self.shape.policies):
            if policy is Policy.PRIORITY:
                for node, start, stop in segments:
                    self._occupancy.prefer(node, c, start, stop, priority)

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
        prompt = PackedPrompt(tokens, self.shape.page_size)
        depth = max((int(pages[-1]) + 1 for pages, _ in checked.values() if len(pages)), default=0)
        node, matched = self._tree.find(namespace, prompt, depth)
        cursor = self._tree.cursor(namespace, node, matched)
        for name, (pages, _) in checked.items():
            known = pages[pages < matched]
            if (self._places(cursor, name, tier, 0, matched)[known] != NO_SLOT).any():
                raise ValueError(f"{name}: a page to reserve is not ABSENT in {lanes[name].tier.name}")
        node = self._tree.extend(namespace, node, matched, prompt, depth)
        self._tree.tick += 1
        reservation = Reservation(tier, node, depth, checked)
        self._desk.enter(reservation)
        self._settle(segments_up(node, 0, depth), matched)
        return reservation

    def publish(self, reservation: Reservation) -> Mapping[str, SlotArray]:
        """INBOUND -> READY. Returns the slots that are the caller's again because an insert filled their
        page meanwhile; empty as a rule. Raises ValueError for a spent reservation."""
        self._desk.spend(reservation)
        self._tree.tick += 1
        surplus: dict[str, list[SlotArray]] = {name: [NO_SLOTS] for name in reservation.placements}
        for lane, node, offsets, slots in self._desk.entries(reservation):
            mine, kept, lost = self._desk.still_mine(lane, node, offsets, slots)
            node.block[lane.row, mine] = kept
            self._occupancy.note(node, lane, mine, ready=True)
            surplus[lane.name].append(lost)
            first = self.shape.components[lane.component].coverage.start(reservation.depth)
            self._occupancy.arrive(node, lane, mine[mine + node.start >= first])
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
        self._tree.tick += 1
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

    def thin(self, cursor: Cursor, component: str, tier: Tier, at_most_pages: int) -> Eviction:
        """Leave at most so many pages of a component READY along the cursor's path, giving up the first in
        eviction order; the frontier (the deepest), forks and pinned pages stay. For checkpoints."""
        lane, freed = self.shape.lane(component, tier), Freed()
        if lane.whole:
            raise ValueError(f"{component}: every boundary needs every page before it")
        segments = self._tree.segments(cursor, 0, cursor.boundary)
        ready = sum(int((node.block[lane.row, low:high] > NO_SLOT).sum()) for node, low, high in segments)
        count = self._evictor.thin(lane, segments, max(0, ready - at_most_pages), freed)
        return Eviction(freed.slots(), count, max(0, ready - at_most_pages - count))

    def drop(self, tier: Tier) -> Eviction:
        """Give up everything in the tier that is neither pinned nor inbound nor carries something that is."""
        freed = Freed()
        everything(self._evictor, self.shape.of_tier[tier], freed)
        return Eviction(freed.slots(), sum(freed.pages.values()), 0)


def _from_page(segments: list[Segment], first: int) -> list[Segment]:
    """The part of a path's segments (deepest first) from page `first` on."""
    if not first:
        return segments
    out = []
    for node, start, stop in segments:
        low = first - node.start
        if low >= stop:
            break
        out.append((node, max(start, low), stop))
    return out
