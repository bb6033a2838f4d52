"""Occupancy: what is where. Sets and clears payload and keeps every count that follows from it.

Also knows the dead reach: from which page on a whole-path component is missing in every tier, so that
what lies deeper serves no boundary. Chooses nothing: what to set and what to clear is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hicache.core.columns import UNBROKEN, Lane, Node, Shape
from hicache.core.journal import Journal, Move
from hicache.core.policies import Policy
from hicache.core.queues import Queues
from hicache.core.structure import Tree
from hicache.core.words import NO_SLOT, BoolArray, SlotArray, lowest

Offsets = NDArray[np.intp]


class Occupancy:
    """The payload of one index."""

    def __init__(self, shape: Shape, tree: Tree, queues: Queues, journal: Journal | None = None) -> None:
        self.shape = shape
        self._journal = journal
        self.tree = tree
        self.queues = queues
        self.resident = [0] * shape.n_lanes
        """Per lane: pages READY or INBOUND in the whole index."""

    def fill(self, node: Node, lane: Lane, offsets: slice | Offsets, places: SlotArray) -> None:
        """Write places into pages that were ABSENT in the lane; entries of -1 leave the page so."""
        row = lane.row
        node.block[row, offsets] = places
        if self._journal is not None:
            chosen = np.arange(offsets.start, offsets.stop) if isinstance(offsets, slice) else offsets
            self.note(node, lane, chosen[places > NO_SLOT], ready=True)
        filled = len(places)
        if not filled:
            return
        low = lowest(places)
        if low <= NO_SLOT:
            filled = int((places != NO_SLOT).sum())
            if not filled:
                return
        if lane.policy is Policy.FIFO:
            use = node.use[lane.component, offsets]
            node.use[lane.component, offsets] = np.where(
                (use == 0) & (places != NO_SLOT), self.tree.tick, use
            )
        last = offsets.stop if isinstance(offsets, slice) else int(offsets[-1]) + 1
        node.high[row] = max(node.high[row], last)
        self.resident[row] += filled
        had = node.present[row]
        node.present[row] = had + filled
        if not had and lane.whole and not node.below[row]:
            self._raise_below(node, row)

    def clear(self, node: Node, lane: Lane, offsets: Offsets) -> None:
        """Make pages ABSENT in the lane. A page absent in every tier forgets its recency. The caller trims
        the node afterwards."""
        if not len(offsets):
            return
        row = lane.row
        if self._journal is not None:
            self.note(node, lane, offsets[node.block[row, offsets] > NO_SLOT], ready=False)
        node.block[row, offsets] = NO_SLOT
        node.present[row] -= len(offsets)
        self.resident[row] -= len(offsets)
        gone = offsets
        for other in lane.other_rows:
            gone = gone[node.block[other, gone] == NO_SLOT]
        node.use[lane.component, gone] = 0
        if node.rank is not None:
            node.rank[lane.component, gone] = 0
        if lane.whole and not node.present[row] and not node.below[row]:
            self._lower_below(node, lane)

    def note(self, node: Node, lane: Lane, offsets: Offsets, *, ready: bool) -> None:
        """Tell the journal, if there is one, that pages became READY, or are READY no longer."""
        if self._journal is None or not len(offsets):
            return
        offsets = np.sort(offsets)
        namespace, hashes, parents = self.tree.names(node, offsets)
        elsewhere = np.zeros(len(offsets), dtype=np.bool_)
        for other in lane.other_rows:
            elsewhere |= node.block[other, offsets] > NO_SLOT
        pages = (node.start + offsets).astype(np.int32)
        self._journal.moved(Move(namespace, lane.name, lane.tier, ready, pages, hashes, parents, elsewhere))

    def refresh(self, node: Node, component: int, start: int, stop: int) -> None:
        """These pages, as far as they are anywhere, were used just now."""
        policy = self.shape.policies[component]
        if policy is Policy.FIFO:
            return
        there = self._there(node, component, start, stop)
        if there is None:
            node.use[component, start:stop] = self.tree.tick
        else:
            node.use[component, start:stop][there] = self.tree.tick
        if policy.counts_uses and node.rank is not None:
            node.rank[component, start:stop] += 1 if there is None else there
        for lane in self.shape.of_component[component]:
            if self.queues.is_behind(node, lane, self.tree.tick):
                self._defer(node, lane, start, stop)

    def _defer(self, node: Node, lane: Lane, start: int, stop: int) -> None:
        """Keys of the pages [start, stop) rose: when nothing else can come up first, the node comes later."""
        row = lane.row
        if lane.whole:
            if node.tail(lane) > stop or node.high[row] <= start:
                return
            start, stop = node.high[row] - 1, node.high[row]
        there = node.block[row, start:stop] != NO_SLOT
        if not lane.whole and not 0 < node.present[row] == np.count_nonzero(there):
            return
        if node.dead_from == UNBROKEN and node.refs is None and node.rank is None:
            self.queues.defer(node, lane, self.tree.tick << 1)
        else:
            keys = self.queues.keys(node, lane, slice(start, stop))
            self.queues.defer(node, lane, lowest(keys[there]))

    def arrive(self, node: Node, lane: Lane, offsets: Offsets) -> None:
        """These pages were brought in for a prompt that needs them: used just now."""
        if lane.policy is not Policy.FIFO:
            node.use[lane.component, offsets] = self.tree.tick
            if lane.policy.counts_uses and node.rank is not None:
                node.rank[lane.component, offsets] += 1

    def prefer(self, node: Node, component: int, start: int, stop: int, priority: int) -> None:
        """These pages, as far as they are anywhere, have at least this priority."""
        if node.rank is not None and priority:
            there = self._there(node, component, start, stop)
            rank = node.rank[component, start:stop]
            np.maximum(rank, priority if there is None else there * priority, out=rank)

    def _there(self, node: Node, component: int, start: int, stop: int) -> BoolArray | None:
        """Which of these pages are READY or INBOUND in some tier; None for all."""
        lanes = self.shape.of_component[component]
        for lane in lanes:
            if node.present[lane.row] == node.n:
                return None
        there: BoolArray = node.block[lanes[0].row, start:stop] != NO_SLOT
        for lane in lanes[1:]:
            there |= node.block[lane.row, start:stop] != NO_SLOT
        return there

    def enqueue(self, node: Node, lane: Lane, offsets: slice | Offsets) -> None:
        """These pages just became READY: see to it that they come up for eviction in their turn."""
        bound = self.queues.bound(node, lane, offsets)
        if bound is not None:
            self.queues.push(node, lane, bound)
            if lane.up_row >= 0:  # what is READY below comes up sooner above, once it is unpinned
                above = self.shape.lanes[lane.up_row]
                if node.present[above.row]:
                    self.queues.push(node, above, int(self.queues.keys(node, above, offsets).min()))

    def _raise_below(self, node: Node, row: int) -> None:
        parent = node.parent
        while parent is not None:
            parent.below[row] += 1
            if parent.below[row] > 1 or parent.present[row]:
                return
            parent = parent.parent

    def _lower_below(self, node: Node, lane: Lane) -> None:
        parent, row = node.parent, lane.row
        while parent is not None:
            parent.below[row] -= 1
            if parent.below[row]:
                return
            if parent.present[row]:
                self.queues.requeue(parent, lane)
                return
            parent = parent.parent

    def missing(self, node: Node, offsets: slice | Offsets) -> BoolArray:
        """Pages that some whole-path component has in no tier."""
        gap = np.zeros(node.block[0, offsets].shape, dtype=np.bool_)
        for c in self.shape.whole_components:
            absent = np.ones_like(gap)
            for lane in self.shape.of_component[c]:
                absent &= node.block[lane.row, offsets] == NO_SLOT
            gap |= absent
        return gap

    def settle_new(self, node: Node, since: int) -> None:
        """`settle` after payload came, where pages from offset `since` on are new; quick when all is well."""
        parent = node.parent
        if node.dead_from == UNBROKEN and parent is not None and parent.dead_from == UNBROKEN:
            if since >= node.n:
                return
            for lanes in self.shape.whole_lane_groups:
                if all(node.present[lane.row] < node.n for lane in lanes):
                    break
            else:
                return
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Find the node's dead reach anew, and that of everything beneath when it changed."""
        if not self.shape.whole_components:
            return
        todo = [node]
        while todo:
            node = todo.pop()
            if node.parent is None:
                continue
            before = node.dead_from
            if node.parent.dead_from < UNBROKEN:
                node.dead_from = node.start
            else:
                gap = self.missing(node, slice(0, node.n))
                first = int(gap.argmax()) if len(gap) else 0
                node.dead_from = node.start + first if len(gap) and gap[first] else UNBROKEN
            if node.dead_from < before:
                self._came_to_be_dead(node)
            if (node.dead_from < UNBROKEN) != (before < UNBROKEN) and node.children is not None:
                todo.extend(node.children.values())

    def _came_to_be_dead(self, node: Node) -> None:
        """The keys of pages fell: of those that can go now, and of those that are stuck as yet."""
        node.blocked = (1 << self.shape.n_lanes) - 1
        for lane in self.shape.lanes:
            self.queues.requeue(node, lane)

    def drop_dependants(self, node: Node, since: int, lanes: tuple[Lane, ...], freed: Freed) -> None:
        """After a whole-path page at offset `since` was lost in every tier: give up everything unpinned in
        these lanes from there on, here and beneath. What is pinned or inbound stays, as dead weight."""
        todo, emptied = [(node, since)], []
        while todo:
            below, start = todo.pop()
            self._drop(below, slice(start, min(below.n, below.dead_from - below.start)), lanes, freed)
            emptied.append(below)
            if below.dead_from == UNBROKEN and below.children is not None:
                todo.extend((child, 0) for child in below.children.values())
        for below in reversed(emptied):
            self.tree.trim(below)
        if node.n > since:
            self.settle(node)

    def _drop(self, node: Node, span: slice, lanes: tuple[Lane, ...], freed: Freed) -> None:
        for lane in lanes:
            if node.present[lane.row]:
                free = node.block[lane.row, span] > NO_SLOT
                if lane.pin_row >= 0:
                    free &= node.block[lane.pin_row, span] == 0
                offsets = free.nonzero()[0] + span.start
                if len(offsets):
                    freed.take(node, lane, offsets)
                    self.clear(node, lane, offsets)

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        todo = list(self.tree.roots.values())
        while todo:
            node = todo.pop()
            if node.parent is not None:
                yield node
            if node.children is not None:
                todo.extend(node.children.values())


class Freed:
    """Slots given up, by component, as one decision goes on."""

    def __init__(self) -> None:
        self._parts: dict[str, list[SlotArray]] = {}
        self.pages: dict[str, int] = {}

    def take(self, node: Node, lane: Lane, offsets: Offsets) -> None:
        self.pages[lane.name] = self.pages.get(lane.name, 0) + len(offsets)
        if lane.pin_row >= 0:
            self._parts.setdefault(lane.name, []).append(node.block[lane.row, offsets])

    def slots(self) -> dict[str, SlotArray]:
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}
