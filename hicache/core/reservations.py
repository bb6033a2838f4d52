"""Reservations: places for bytes that are on their way.

A reserved page is INBOUND: no reader sees it, nobody evicts it. It becomes READY when the reservation is
published, or ABSENT when it is withdrawn; a reservation is spent once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import Lane, Node
from hicache.core.occupancy import Occupancy, Offsets
from hicache.core.structure import segments_up
from hicache.core.words import NO_SLOT, PageArray, SlotArray, Tier

INBOUND_BASE = -2
"""An INBOUND page's place is INBOUND_BASE - slot."""


@dataclass(frozen=True, eq=False)
class Reservation:
    """Proof of reserved pages; publish or withdraw it, once. Survives the division of nodes."""

    tier: Tier
    node: Node
    """Holds the deepest page, or did when the reservation was made."""
    depth: int
    """Pages from the start of the prompt to the deepest one reserved."""
    placements: Mapping[str, tuple[PageArray, SlotArray]]


class Desk:
    """All open reservations."""

    def __init__(self, occupancy: Occupancy) -> None:
        self._occupancy = occupancy
        self.open: set[Reservation] = set()

    def enter(self, reservation: Reservation) -> None:
        """Mark the pages, which are ABSENT, as INBOUND."""
        for lane, node, offsets, slots in self.entries(reservation):
            self._occupancy.fill(node, lane, offsets, INBOUND_BASE - slots)
        self.open.add(reservation)

    def spend(self, reservation: Reservation) -> None:
        """Raises ValueError for a reservation that is spent or from another index."""
        if reservation not in self.open:
            raise ValueError("reservation: spent already, or not of this index")
        self.open.remove(reservation)

    def entries(self, reservation: Reservation) -> Iterator[tuple[Lane, Node, Offsets, SlotArray]]:
        """What is reserved, node by node."""
        shape = self._occupancy.shape
        for name, (pages, slots) in reservation.placements.items():
            if not len(pages):
                continue
            lane = shape.slotted(name, reservation.tier)
            for node, start, stop in segments_up(reservation.node, int(pages[0]), int(pages[-1]) + 1):
                low, high = np.searchsorted(pages, (node.start + start, node.start + stop))
                if high > low:
                    yield lane, node, pages[low:high].astype(np.intp) - node.start, slots[low:high]

    def still_mine(
        self, lane: Lane, node: Node, offsets: Offsets, slots: SlotArray
    ) -> tuple[Offsets, SlotArray, SlotArray]:
        """Offsets and slots that still wait for this reservation, and the slots of pages that an insert
        filled meanwhile (and that may be gone by now)."""
        mine = offsets < node.n
        mine[mine] = node.block[lane.row, offsets[mine]] == INBOUND_BASE - slots[mine]
        return offsets[mine], slots[mine], slots[~mine]


def checked_placements(
    placements: Mapping[str, tuple[PageArray, SlotArray]], n_pages: int
) -> dict[str, tuple[PageArray, SlotArray]]:
    """Copies with equal lengths, pages strictly ascending within [0, n_pages), slots not negative."""
    checked = {}
    for name, (pages, slots) in placements.items():
        page_array, slot_array = np.array(pages, dtype=np.int32), np.array(slots, dtype=np.int32)
        if page_array.ndim != 1 or page_array.shape != slot_array.shape:
            raise ValueError(f"{name}: {page_array.shape} pages but {slot_array.shape} slots")
        if len(page_array):
            if page_array[0] < 0 or page_array[-1] >= n_pages or (np.diff(page_array) <= 0).any():
                raise ValueError(f"{name}: pages must ascend within [0, {n_pages})")
            if slot_array.min() <= NO_SLOT:
                raise ValueError(f"{name}: a slot is negative")
        checked[name] = (page_array, slot_array)
    return checked
