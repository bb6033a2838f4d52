"""Reclaiming: what the owner of a tier's memory asks of the index beside `Index.evict`.

How cold the coldest page of a lane is, so that lanes and indexes can be compared; giving up only what is
colder than that, or one tenant's pages, or pages by name; and giving a page another slot. Decides only: the
bytes of a page that changes its slot are the caller's to move.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping

import numpy as np

from hicache.core.columns import Lane, Node
from hicache.core.eviction import Eviction, Evictor
from hicache.core.occupancy import Freed, Occupancy
from hicache.core.queues import LAST_KEY, Queues, best_key, loose_pages, tail_run
from hicache.core.structure import Cursor, StaleCursor, Tree
from hicache.core.words import NO_SLOT, PageArray, Tier


class Reclaiming:
    """The reclaiming side of one index."""

    def __init__(self, tree: Tree, occupancy: Occupancy, queues: Queues, evictor: Evictor) -> None:
        self._tree = tree
        self._shape = tree.shape
        self._occupancy = occupancy
        self._queues = queues
        self._evictor = evictor

    def coldest(self, component: str, tier: Tier) -> int:
        """Nothing that the lane can give up comes before this key; LAST_KEY when it has nothing. Lower is
        colder, and keys compare among components of equal policy and indexes that share their ticks. A
        lower bound: it becomes exact when `evict_colder` asks for no more than it."""
        return self._queues.lowest(self._shape.lane(component, tier))

    def evict_colder(self, component: str, tier: Tier, pages: int, key: int) -> Eviction:
        """As `Index.evict`, but only pages whose keys are at most `key`."""
        freed = Freed()
        count = self._evictor.evict(self._shape.slotted(component, tier), pages, freed, upto=key)
        return Eviction(freed.slots(), count, max(0, pages - count))

    def evict_of(self, salt: str, tier: Tier, nbytes: int, page_bytes: Mapping[str, int]) -> Eviction:
        """Give up one tenant's coldest pages of the components named in `page_bytes` (the room that a page
        of each takes), as in `Index.evict`, until `nbytes` are free. Visits every node of that tenant."""
        freed, serial = Freed(), itertools.count()
        heap: list[tuple[int, int, Lane, Node]] = []

        def enter(node: Node, lane: Lane) -> None:
            key = best_key(self._queues, node, lane)
            if key is not None:
                heapq.heappush(heap, (key, next(serial), lane, node))

        for lane in (self._shape.slotted(name, tier) for name in page_bytes):
            for node in self._of(salt):
                enter(node, lane)
        left = nbytes
        while heap and left > 0:
            _, _, lane, node = heapq.heappop(heap)
            parent = node.parent
            self._some(node, lane, -(-left // page_bytes[lane.name]), heap[0][0] if heap else LAST_KEY, freed)
            enter(node, lane)
            while lane.whole and parent is not None and not node.present[lane.row]:
                node, parent = parent, parent.parent
                if node.present[lane.row]:
                    enter(node, lane)
            left = nbytes - sum(count * page_bytes.get(name, 0) for name, count in freed.pages.items())
        return Eviction(freed.slots(), sum(freed.pages.values()), 0)

    def give_up(self, cursor: Cursor, placements: Mapping[str, PageArray], *, tier: Tier) -> Eviction:
        """Give up these pages of a path (ascending), as far as they are still READY and unpinned; and what
        depends on them, where they are nowhere else."""
        freed = Freed()
        lanes = sorted((self._shape.slotted(name, tier) for name in placements), key=lambda lane: lane.whole)
        for lane in lanes:
            for page in placements[lane.name][::-1].tolist():
                try:
                    ((node, low, _),) = self._tree.segments(cursor, page, page + 1)
                except StaleCursor:
                    continue
                if node.block[lane.row, low] > NO_SLOT and not node.block[lane.pin_row, low]:
                    self._evictor.give_up(node, lane, np.array([low], dtype=np.intp), freed)
                    if node.present[lane.row]:
                        self._queues.requeue(node, lane)
        return Eviction(freed.slots(), sum(freed.pages.values()), 0)

    def movable(self, cursor: Cursor, component: str, tier: Tier, page: int, slot: int) -> bool:
        """Whether the page is READY in this slot, and unpinned."""
        return self._standing(cursor, self._shape.slotted(component, tier), page, slot) is not None

    def reslot(self, cursor: Cursor, component: str, tier: Tier, page: int, old: int, slot: int) -> None:
        """A page that is READY in slot `old`, and unpinned, is in `slot` from now on. Raises ValueError, and
        changes nothing, when it is not so."""
        lane = self._shape.slotted(component, tier)
        place = self._standing(cursor, lane, page, old)
        if place is None:
            raise ValueError(f"{component}: page {page} is not READY and unpinned in slot {old}")
        node, offset = place
        node.block[lane.row, offset] = slot

    def _standing(self, cursor: Cursor, lane: Lane, page: int, slot: int) -> tuple[Node, int] | None:
        try:
            ((node, low, _),) = self._tree.segments(cursor, page, page + 1)
        except StaleCursor:
            return None
        moves = node.block[lane.row, low] == slot and not node.block[lane.pin_row, low]
        return (node, low) if moves else None

    def _some(self, node: Node, lane: Lane, need: int, bound: int, freed: Freed) -> None:
        """Give up this node's coldest pages that come before `bound`, one at least."""
        if lane.whole:
            offsets, _ = tail_run(node, lane, need)
        else:
            offsets, _ = loose_pages(node, lane)
        if not len(offsets):
            return
        keys = self._queues.keys(node, lane, offsets)
        if not lane.whole:
            order = np.argsort(keys, kind="stable")[:need]
            offsets, keys = offsets[order], keys[order]
        n = max(1, int(np.argmax(keys > bound)) if (keys > bound).any() else len(keys))
        self._evictor.give_up(node, lane, offsets[:n] if lane.whole else np.sort(offsets[:n]), freed)
        if node.present[lane.row]:
            self._queues.requeue(node, lane)

    def _of(self, salt: str) -> list[Node]:
        todo = [root for namespace, root in self._tree.roots.items() if namespace.salt == salt]
        found = []
        while todo:
            node = todo.pop()
            found.append(node)
            if node.children is not None:
                todo.extend(node.children.values())
        return found
