"""Queues: for every lane a lazy heap of nodes, ordered by the node's best victim.

An entry's key is a lower bound: recency only rises, so an entry may be too low, never too high, and is
put right when it comes to the top. Whatever can lower a node's best key (new payload, an unpin, a child
that lost its last payload, a lost prefix) pushes the node again. Chooses no victims and changes no payload.
"""

from __future__ import annotations

import heapq
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hicache.core.columns import UNBROKEN, Lane, Node, Shape
from hicache.core.words import NO_SLOT, Tier, lowest

Keys: TypeAlias = NDArray[np.int64]

DEAD = 1 << 61
"""Taken off the key of payload that serves no boundary: it goes before everything else."""
LAST_KEY = 1 << 62
RANK_BIT = 41
REFS_BIT = 53
MOST_REFS = 127
_RECENCY = (1 << 40) - 1
"""A key is, from its lowest bit: 1 bit lost, 40 bits recency, 12 bits rank, 7 bits references."""


class Queues:
    """One lazy heap per lane."""

    def __init__(self, shape: Shape) -> None:
        self._heaps: list[list[tuple[int, int, Node]]] = [[] for _ in shape.lanes]
        self._live = [0] * shape.n_lanes
        self._serial = 0

    def keys(self, node: Node, lane: Lane, offsets: slice | NDArray[np.intp]) -> Keys:
        """Order of giving up, smallest first: dead weight; then by number of sessions that count on the
        page (not in STORAGE); then by policy; among equals, what is READY one tier down (demoted) before
        what would be lost."""
        keys: Keys = node.use[lane.component, offsets] << 1
        if node.rank is not None and lane.policy.ranked:
            keys += lane.policy.order(node.rank[lane.component, offsets]) << RANK_BIT
        if node.refs is not None and lane.tier is not Tier.STORAGE:
            keys += np.minimum(node.refs[lane.component, offsets], MOST_REFS).astype(np.int64) << REFS_BIT
        if lane.down_row >= 0:
            keys += node.block[lane.down_row, offsets] < 0
        if node.dead_from < UNBROKEN:
            pages = np.arange(node.start, node.end)[offsets]
            keys[pages >= node.dead_from] -= DEAD
        return keys

    def bound(self, node: Node, lane: Lane, offsets: slice | NDArray[np.intp]) -> int | None:
        """A lower bound of the keys of these pages, cheaper than the keys; None when there are none."""
        if node.dead_from < UNBROKEN:
            keys = self.keys(node, lane, offsets)
            return lowest(keys) if len(keys) else None
        use = node.use[lane.component, offsets]
        return lowest(use) << 1 if len(use) else None

    def push(self, node: Node, lane: Lane, key: int) -> None:
        """See to it that the node comes up at `key` at the latest: some page's key may have fallen."""
        if node.plans is not None:
            node.plans.pop(lane.row, None)
        queued = node.queued[lane.row]
        if queued is None:
            self._live[lane.row] += 1
        elif queued <= key:
            return
        self._enter(node, lane.row, key)

    def put_back(self, node: Node, lane: Lane, key: int) -> None:
        """Enter a node that was popped and has its next victim at `key`."""
        self._live[lane.row] += 1
        self._enter(node, lane.row, key)

    def defer(self, node: Node, lane: Lane, key: int) -> None:
        """All that the lane has in this node comes at `key` or later, if it is queued at all: let it not
        come up before, so that an eviction does not have to find that out for many nodes at once."""
        queued = node.queued[lane.row]
        if queued is not None and queued < key:
            self._enter(node, lane.row, key)

    def is_behind(self, node: Node, lane: Lane, tick: int) -> bool:
        """Whether the node is queued so far before its uses that it is worth entering it anew. What is
        behind by less costs an eviction at most that many looks at a node that was used since."""
        queued = node.queued[lane.row]
        return queued is not None and tick - (queued >> 1 & _RECENCY) > 64 + (self._live[lane.row] >> 6)

    def _enter(self, node: Node, row: int, key: int) -> None:
        """Enter the node anew; an entry it had before counts no more. Outdated entries are taken out when
        they come to the top, and all at once when a fifth of the heap is outdated."""
        node.queued[row] = key
        self._serial += 1
        heap = self._heaps[row]
        heapq.heappush(heap, (key, self._serial, node))
        if heap[0][2].queued[row] != heap[0][0]:
            heapq.heappop(heap)
        if 4 * len(heap) > 5 * self._live[row] + 256:
            heap[:] = [entry for entry in heap if entry[2].queued[row] == entry[0]]
            heapq.heapify(heap)

    def pop(self, lane: Lane) -> Node | None:
        """Take the node with the lowest entry off the queue; None when the queue is empty."""
        heap = self._heaps[lane.row]
        while heap:
            key, _, node = heapq.heappop(heap)
            if node.queued[lane.row] == key:
                self.discard(node, lane)
                return node
        return None

    def lowest(self, lane: Lane) -> int:
        """Key of the lowest entry; LAST_KEY when the queue is empty."""
        heap = self._heaps[lane.row]
        while heap:
            if heap[0][2].queued[lane.row] == heap[0][0]:
                return heap[0][0]
            heapq.heappop(heap)
        return LAST_KEY

    def discard(self, node: Node, lane: Lane) -> None:
        """Take a node off the queue, if it is on it."""
        if node.queued[lane.row] is not None:
            node.queued[lane.row] = None
            self._live[lane.row] -= 1

    def recompute(self, node: Node, lane: Lane) -> None:
        """Keys in the node rose: let it come up no sooner than at its best key."""
        key = best_key(self, node, lane)
        if key is not None:
            node.blocked |= 1 << lane.row
            self.defer(node, lane, key)

    def requeue(self, node: Node, lane: Lane) -> None:
        """Push the node at its best key, if anything in it can be given up now."""
        key = best_key(self, node, lane)
        if key is not None:
            self.push(node, lane, key)


def tail_run(node: Node, lane: Lane, at_most: int) -> tuple[NDArray[np.intp], bool]:
    """Offsets of the pages that a whole-path lane can give up from its tail, deepest first, at most so
    many, and whether a pinned or inbound page stands next."""
    if node.below[lane.row]:
        return np.empty(0, dtype=np.intp), False
    tail = node.tail(lane)
    low = max(0, tail - at_most)
    places = node.block[lane.row, low:tail][::-1]
    blocked = False
    if lane.pin_row >= 0:
        stuck = (places < NO_SLOT) | (node.block[lane.pin_row, low:tail][::-1] != 0)
        blocked = bool(stuck.any())
        if blocked:
            places = places[: int(stuck.argmax())]
    return tail - 1 - (places != NO_SLOT).nonzero()[0], blocked


def loose_pages(node: Node, lane: Lane) -> tuple[NDArray[np.intp], bool]:
    """Offsets of the pages that any other lane can give up, and whether some were passed over."""
    free = node.block[lane.row, : node.n] > NO_SLOT
    if lane.pin_row >= 0:
        free &= node.block[lane.pin_row, : node.n] == 0
    offsets = free.nonzero()[0]
    return offsets, len(offsets) < node.present[lane.row]


def best_key(queues: Queues, node: Node, lane: Lane) -> int | None:
    """Key of the page that the lane would give up first in this node; None when there is none."""
    if not node.present[lane.row]:
        return None
    if lane.whole:
        offsets, _ = tail_run(node, lane, 1)
    else:
        offsets, _ = loose_pages(node, lane)
    return int(queues.keys(node, lane, offsets).min()) if len(offsets) else None
