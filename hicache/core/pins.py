"""Pins: counted protection of pages from eviction, with receipts.

Counts exactly the pages a receipt names, per component, in one tier. A receipt survives the division of
nodes, may give up the front of a component early, and is spent once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import Lane, Node, Shape
from hicache.core.queues import Queues
from hicache.core.structure import Segment, segments_up
from hicache.core.words import NO_SLOT, BoolArray, PageArray, Tier, lowest


@dataclass(frozen=True, eq=False)
class Receipt:
    """Proof of a pin; give it back once."""

    tier: Tier


@dataclass
class Hold:
    """What a receipt holds of one component: pages [start, stop) of the path that ends in `node`."""

    lane: Lane
    node: Node
    start: int
    stop: int
    held: BoolArray | None
    """Which of the pages [stop - len(held), stop); None for all."""

    def pages(self) -> PageArray:
        pages = np.arange(self.start, self.stop, dtype=np.int32)
        return pages if self.held is None else pages[self.held[len(self.held) - len(pages) :]]


class PinBook:
    """All open receipts."""

    def __init__(self, shape: Shape, queues: Queues) -> None:
        self._shape = shape
        self._queues = queues
        self.open: dict[Receipt, dict[str, Hold]] = {}

    def begin(self, tier: Tier) -> Receipt:
        if tier not in self._shape.of_tier or tier is Tier.STORAGE:
            raise ValueError(f"tier {tier.name} has nothing to pin in this index")
        receipt = Receipt(tier)
        self.open[receipt] = {}
        return receipt

    def hold_ready(self, receipt: Receipt, lane: Lane, segments: list[Segment]) -> None:
        """Pin what is READY in the segments (deepest first) of one path."""
        if not segments:
            return
        whole = True
        for node, start, stop in segments:
            places = node.block[lane.row, start:stop]
            pins = node.block[lane.pin_row, start:stop]
            if lowest(places) > NO_SLOT:
                pins += 1
            else:
                pins += places > NO_SLOT
                whole = False
        last, top = segments[0], segments[-1]
        start, stop = top[0].start + top[1], last[0].start + last[2]
        held = None
        if not whole:
            parts = [node.block[lane.row, low:high] > NO_SLOT for node, low, high in segments[::-1]]
            held = np.concatenate(parts)
            there = held.nonzero()[0]
            if not len(there):
                return
            held = held[there[0] : there[-1] + 1]
            start, stop = start + int(there[0]), start + int(there[-1]) + 1
        self.open[receipt][lane.name] = Hold(lane, last[0], start, stop, held)

    def hold_pages(self, receipt: Receipt, lane: Lane, segments: list[Segment], pages: PageArray) -> None:
        """Pin exactly these pages, all of them in the segments. Raises ValueError, before any change of
        this component, when one is not READY."""
        if not len(pages):
            return
        start, stop = int(pages[0]), int(pages[-1]) + 1
        held = np.zeros(stop - start, dtype=np.bool_)
        held[pages - start] = True
        chosen = []
        for node, low, high in segments:
            mask = held[node.start + low - start : node.start + high - start]
            if (node.block[lane.row, low:high][mask] <= NO_SLOT).any():
                raise ValueError(f"{lane.name}: a page to pin is not READY in {lane.tier.name}")
            chosen.append((node.block[lane.pin_row, low:high], mask))
        for pins, mask in chosen:
            np.add(pins, mask, out=pins)
        self.open[receipt][lane.name] = Hold(lane, segments[0][0], start, stop, held)

    def release(self, receipt: Receipt) -> None:
        """Raises ValueError for a receipt that is spent or from another index."""
        holds = self.open.pop(receipt, None)
        if holds is None:
            raise ValueError("receipt: spent already, or not of this index")
        for hold in holds.values():
            self._let_go(hold, hold.stop)

    def release_before(self, receipt: Receipt, component: str, page: int) -> None:
        holds = self.open.get(receipt)
        if holds is None:
            raise ValueError("receipt: spent already, or not of this index")
        self._shape.slotted(component, receipt.tier)
        hold = holds.get(component)
        if hold is not None and page > hold.start:
            self._let_go(hold, min(page, hold.stop))

    def _let_go(self, hold: Hold, upto: int) -> None:
        lane, held = hold.lane, hold.held
        base = 0 if held is None else hold.stop - len(held)
        for node, start, stop in segments_up(hold.node, hold.start, upto):
            pins = node.block[lane.pin_row, start:stop]
            if held is None:
                pins -= 1
            else:
                pins -= held[node.start + start - base : node.start + stop - base]
            if node.queued[lane.row] is None or node.blocked >> lane.row & 1:
                self._queues.requeue(node, lane)
        hold.start = upto

    def recount(self) -> Mapping[Lane, list[tuple[Node, PageArray]]]:
        """For the audit: what the open receipts hold."""
        held: dict[Lane, list[tuple[Node, PageArray]]] = {}
        for holds in self.open.values():
            for hold in holds.values():
                held.setdefault(hold.lane, []).append((hold.node, hold.pages()))
        return held
