"""Foresight: which pages an index would give up next, so that somebody can see to them before they go.

Changes no payload and no order; gives nothing up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.core.queues import loose_pages, tail_run
from hicache.core.structure import Cursor
from hicache.core.tree import ReadableIndex
from hicache.core.words import PageArray, Tier


@dataclass(frozen=True, eq=False)
class Victims:
    """Pages of one path that come up next."""

    cursor: Cursor
    """Ends behind the last of them."""
    pages: PageArray
    """Ascending, at least one."""


class Foresight:
    """Looks ahead in the eviction order of one index."""

    def __init__(self, index: ReadableIndex) -> None:
        self._tree = index._tree
        self._queues = index._queues

    def next_victims(self, component: str, tier: Tier, pages: int) -> Victims | None:
        """The first of what `Index.evict` would give up now: at least one page and at most `pages`, all of
        one node; None when nothing can be given up. Among pages of equal age any may be named."""
        lane = self._tree.shape.slotted(component, tier)
        queues, bit = self._queues, 1 << lane.row
        while True:
            node = queues.pop(lane)
            if node is None:
                return None
            offsets, blocked = tail_run(node, lane, pages) if lane.whole else loose_pages(node, lane)
            node.blocked = node.blocked | bit if blocked else node.blocked & ~bit
            if not len(offsets):
                continue
            keys = queues.keys(node, lane, offsets)
            if not lane.whole:
                order = keys.argsort(kind="stable")[:pages]
                offsets, keys = offsets[order], keys[order]
            bound = queues.lowest(lane)
            queues.put_back(node, lane, int(keys[0]))
            if keys[0] > bound:
                continue  # the entry that brought it up was too low: another node comes first
            late = keys > bound
            n = int(late.argmax()) if late.any() else len(keys)
            chosen = np.sort(offsets[:n]) + node.start
            root = node
            while root.parent is not None:
                root = root.parent
            cursor = self._tree.cursor(self._tree._names[root], node, int(chosen[-1]) + 1)
            return Victims(cursor, chosen.astype(np.int32))
