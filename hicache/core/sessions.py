"""Sessions: conversations known by a stable id, and the pages that their next turn will want.

A finished turn registers what every component needs at its boundary; each such page counts one reference
per session, and eviction takes unreferenced pages first, then those with fewest references. A session pins
nothing, and closing it gives up nothing: it only takes the references away. Not for STORAGE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import Node
from hicache.core.queues import Queues
from hicache.core.structure import Cursor, Segment, Tree, kept_end, segments_up
from hicache.core.words import Tier

CLOSED_IDS_KEPT = 65_536

_NO_GENERATION = 0


@dataclass(frozen=True)
class SessionTurn:
    """A turn that has begun; finish it once, or forget it."""

    session_id: str
    generation: int


@dataclass
class _Region:
    """Pages [start, stop) of a path that a session counts on, for one component."""

    component: int
    node: Node
    start: int
    stop: int
    tick: int
    """When it was registered: pages given up since are not counted any more."""

    def kept(self, start: int, stop: int) -> Iterator[Segment]:
        """Where those pages of [start, stop) stand that were never given up since."""
        for node, low, high in segments_up(self.node, start, stop):
            high_kept = min(high, kept_end(node, self.tick) - node.start)
            if low < high_kept:
                yield node, low, high_kept


@dataclass
class _Session:
    generation: int
    regions: list[_Region]


class Sessions:
    """The open sessions of one index."""

    def __init__(self, tree: Tree, queues: Queues) -> None:
        self._tree = tree
        self._queues = queues
        self._open: dict[str, _Session] = {}
        self._closed: dict[str, None] = {}
        """Ids closed last, oldest first: their queued turns do not bring them back."""
        self._generation = _NO_GENERATION

    def __len__(self) -> int:
        """Sessions open now."""
        return len(self._open)

    def open(self, session_id: str) -> None:
        """Begin a session, also one that was closed before: as a fresh one, to which turns of the earlier
        one do not count. Does nothing when it is open."""
        self._closed.pop(session_id, None)
        if session_id not in self._open:
            self._generation += 1
            self._open[session_id] = _Session(self._generation, [])

    def begin(self, session_id: str) -> SessionTurn:
        """A turn begins. An unknown session is opened; one closed lately is not, and the turn counts for
        nothing."""
        if session_id in self._closed:
            return SessionTurn(session_id, _NO_GENERATION)
        self.open(session_id)
        return SessionTurn(session_id, self._open[session_id].generation)

    def finish(self, turn: SessionTurn, cursor: Cursor, boundary: int) -> bool:
        """The turn is done and its prompt is cached: the session now counts on what every component needs
        at `boundary`, instead of what it counted on before. False, without effect, when the session was
        closed since the turn began. Raises StaleCursor when the pages are gone."""
        session = self._open.get(turn.session_id)
        if session is None or session.generation != turn.generation:
            return False
        path = self._tree.segments(cursor, 0, boundary)
        before = {region.component: region for region in session.regions}
        session.regions = []
        for c, component in enumerate(self._tree.shape.components):
            region = None
            if path:
                start = component.coverage.start(boundary)
                region = _Region(c, path[0][0], start, boundary, self._tree.tick)
                session.regions.append(region)
            self._move(before.get(c), region, path)
        return True

    def close(self, session_id: str) -> bool:
        """Take the session's references away; its pages stay and match until they are evicted, now in
        their ordinary turn. False when it was not open. Turns that finish later count for nothing."""
        self._closed.pop(session_id, None)
        self._closed[session_id] = None
        if len(self._closed) > CLOSED_IDS_KEPT:
            del self._closed[next(iter(self._closed))]
        session = self._open.pop(session_id, None)
        for region in session.regions if session else ():
            self._release(region, region.start, region.stop)
        return session is not None

    def references(self, cursor: Cursor, component: str, start: int, stop: int) -> list[int]:
        """For each of the pages [start, stop), the number of open sessions that count on it."""
        c = [part.name for part in self._tree.shape.components].index(component)
        counts: list[int] = []
        for node, low, high in self._tree.segments(cursor, start, stop):
            here = [0] * (high - low) if node.refs is None else node.refs[c, low:high].tolist()
            counts = here + counts
        return counts

    def _move(self, old: _Region | None, fresh: _Region | None, path: list[Segment]) -> None:
        """From one region to the next; what is in both keeps its count."""
        if old is None or fresh is None or not _is_prefix(old, path):
            if fresh is not None:
                self._count(fresh, fresh.start, fresh.stop)
            if old is not None:
                self._release(old, old.start, old.stop)
            return
        low, high = max(old.start, fresh.start), min(old.stop, fresh.stop)
        if low >= high:
            self._count(fresh, fresh.start, fresh.stop)
            self._release(old, old.start, old.stop)
            return
        self._count(fresh, fresh.start, low)
        self._count(fresh, high, fresh.stop)
        self._release(old, old.start, low)
        self._release(old, high, old.stop)

    def _count(self, region: _Region, start: int, stop: int) -> None:
        for node, low, high in segments_up(region.node, start, stop):
            if node.refs is None:
                node.refs = np.zeros(node.use.shape, dtype=np.int32)
            node.refs[region.component, low:high] += 1
            for lane in self._tree.shape.of_component[region.component]:
                if node.queued[lane.row] is not None:
                    self._queues.recompute(node, lane)

    def _release(self, region: _Region, start: int, stop: int) -> None:
        for node, low, high in region.kept(start, stop):
            assert node.refs is not None
            node.refs[region.component, low:high] -= 1
            if not node.refs[region.component, low:high].any() and not node.refs.any():
                node.refs = None
            for lane in self._tree.shape.of_component[region.component]:
                if lane.tier is not Tier.STORAGE:
                    node.blocked |= 1 << lane.row
                    self._queues.requeue(node, lane)

    def recount(self) -> Mapping[tuple[int, Node], list[tuple[int, int]]]:
        """For the audit: ranges of offsets that sessions count on, by component and node."""
        ranges: dict[tuple[int, Node], list[tuple[int, int]]] = {}
        for session in self._open.values():
            for region in session.regions:
                for node, low, high in region.kept(region.start, region.stop):
                    ranges.setdefault((region.component, node), []).append((low, high))
        return ranges


def _is_prefix(region: _Region, path: list[Segment]) -> bool:
    """Whether all of the region's pages are still there and lie on the path (deepest segment first)."""
    last = next(iter(region.kept(region.start, region.stop)), None)
    if last is None:
        return False
    node, _, high = last
    return node.start + high == region.stop and any(other is node for other, _, _ in path)
