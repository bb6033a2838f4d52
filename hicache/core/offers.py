"""Offers: what becomes of slots that somebody offers for pages of a prompt.

Takes payload over where a page has none, and tells the caller which of his slots are his again and which
to use instead. Enters nothing into the eviction queues before the offer is settled as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import UNBROKEN, Lane, Node, Shape
from hicache.core.occupancy import Occupancy, Offsets
from hicache.core.structure import Cursor, Segment
from hicache.core.words import NO_SLOT, SlotArray, Tier, lowest

NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)


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


class Offer:
    """The slots offered in one insert, from page `first_page` on, and what became of them."""

    def __init__(
        self, shape: Shape, slots: Mapping[str, SlotArray], tier: Tier, first_page: int, n_pages: int
    ) -> None:
        """Raises ValueError for slots of the wrong length or below -1."""
        self._parts: list[tuple[Lane, SlotArray]] = []
        self._first = first_page
        self._filled: list[tuple[Node, Lane, slice | Offsets]] = []
        self.redundant: dict[str, SlotArray] = {}
        self.canonical: dict[str, SlotArray] = {}
        if first_page < 0:
            raise ValueError(f"first_page: {first_page}; pages count from 0")
        for name, given in slots.items():
            lane, array = shape.slotted(name, tier), np.asarray(given, dtype=np.int32)
            if array.shape != (max(0, n_pages - first_page),):
                raise ValueError(f"{name}: slots of shape {array.shape} for pages [{first_page}, {n_pages})")
            if len(array) and lowest(array) < NO_SLOT:
                raise ValueError(f"{name}: a slot is below -1")
            self._parts.append((lane, array))

    def depth(self) -> int:
        """The boundary after the last page that a slot is offered for; 0 when there is none."""
        depth = 0
        for _, slots in self._parts:
            if len(slots) and slots[-1] > NO_SLOT:
                return self._first + len(slots)
            given = (slots > NO_SLOT).nonzero()[0]
            if len(given):
                depth = max(depth, self._first + int(given[-1]) + 1)
        return depth

    def place(self, occupancy: Occupancy, segments: list[Segment], matched: int) -> None:
        """Enter the slots. `segments` (deepest first) are the path's pages from the first one offered;
        the tree knew `matched` pages of the path before, the others are fresh."""
        for lane, slots in self._parts:
            canonical = self.canonical[lane.name] = slots.copy()
            redundant = []
            for node, start, stop in segments:
                base = node.start - self._first
                known = min(max(matched - node.start, start), stop)
                if known > start:
                    span = slice(base + start, base + known)
                    if not np.array_equal(node.block[lane.row, start:known], slots[span]):
                        redundant.append(
                            self._merge(occupancy, lane, node, start, slots[span], canonical[span])
                        )
                if known < stop:
                    occupancy.fill(node, lane, slice(known, stop), slots[base + known : base + stop])
                    self._filled.append((node, lane, slice(known, stop)))
            self.redundant[lane.name] = np.concatenate(redundant) if redundant else NO_SLOTS

    def _merge(
        self,
        occupancy: Occupancy,
        lane: Lane,
        node: Node,
        start: int,
        offer: SlotArray,
        canonical: SlotArray,
    ) -> SlotArray:
        """Offer payload for pages that the tree knew; corrects `canonical`, returns what is redundant. A
        page that is INBOUND is taken over: its reservation finds its slot surplus when it is published."""
        have = node.block[lane.row, start : start + len(offer)].copy()
        ready, given = have > NO_SLOT, offer > NO_SLOT
        canonical[ready] = have[ready]
        offsets = (given & ~ready).nonzero()[0]
        if len(offsets):
            inbound = have[offsets] < NO_SLOT
            node.block[lane.row, offsets[inbound] + start] = offer[offsets[inbound]]
            occupancy.note(node, lane, offsets[inbound] + start, ready=True)
            absent = offsets[~inbound]
            if len(absent):
                occupancy.fill(node, lane, absent + start, offer[absent])
            self._filled.append((node, lane, offsets + start))
        surplus: SlotArray = offer[ready & given & (offer != have)]
        return surplus

    def enqueue(self, occupancy: Occupancy, depth: int) -> None:
        """Let what was entered come up for eviction in its turn. Where a node is queued already and all of
        it was used just now, as part of the coverage of `depth`, its turn is not before the node's."""
        now = occupancy.tree.tick << 1
        for node, lane, offsets in self._filled:
            queued = node.queued[lane.row]
            if queued is not None and queued <= now and lane.up_row < 0 and node.dead_from == UNBROKEN:
                first = offsets.start if isinstance(offsets, slice) else int(offsets[0])
                coverage = occupancy.shape.components[lane.component].coverage
                if node.start + first >= coverage.start(depth):
                    continue
            occupancy.enqueue(node, lane, offsets)
