"""Audit: recounts an index from its columns and compares with every count, pin, queue and pool.

For tests and for the status call; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from hicache.core.columns import UNBROKEN, Lane, Node
from hicache.core.queues import best_key
from hicache.core.structure import segments_up
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, SlotArray, Tier


class Countable(Protocol):
    """A pool as the audit sees it."""

    def used_slots(self) -> SlotArray: ...


Held = Mapping[tuple[str, Tier], SlotArray]


def audit(index: Index, pools: Mapping[tuple[str, Tier], Countable], held: Held | None = None) -> list[str]:
    """Everything that does not add up; empty when all is well. `held` are slots that are allocated but
    belong to somebody else, say to running requests."""
    found = list(_structure(index))
    found += _counts(index)
    found += _pins(index)
    found += _inbound(index)
    found += _queues(index)
    found += _references(index)
    for (name, tier), pool in pools.items():
        found += _pool(index, index.shape.slotted(name, tier), pool, (held or {}).get((name, tier)))
    return found


def _where(node: Node) -> str:
    return f"node at pages [{node.start}, {node.end})"


def _structure(index: Index) -> Iterator[str]:
    tree, width = index._tree, index.shape.page_bytes
    n_pages = 0
    for node in index._occupancy.nodes():
        n_pages += node.n
        parent = node.parent
        if parent is None or not parent.children:
            yield f"{_where(node)}: not linked to its parent"
            continue
        if parent.children.get(bytes(node.tokens[:width])) is not node:
            yield f"{_where(node)}: not found under its first page"
        if node.n < 1 or len(node.tokens) != node.n * width or node.block.shape[1] < node.n:
            yield f"{_where(node)}: columns and tokens differ in length"
        if node.start != parent.end:
            yield f"{_where(node)}: does not begin where its parent ends ({parent.end})"
        if node.children is not None and not node.children:
            yield f"{_where(node)}: empty children"
        lanes = index.shape.n_lanes
        if node.children is None and (node.block[:lanes, node.n - 1] == NO_SLOT).all():
            yield f"{_where(node)}: a leaf ends in a page without payload"
        beyond = node.block[:, node.n :]
        if (beyond[:lanes] != NO_SLOT).any() or beyond[lanes:].any() or node.use[:, node.n :].any():
            yield f"{_where(node)}: something stands beyond its end"
        if node.hashes is not None and len(node.hashes) > 32 * node.n:
            yield f"{_where(node)}: hashes beyond its end"
    if n_pages != tree.n_pages:
        yield f"{n_pages} pages in the tree, {tree.n_pages} counted"
    for namespace, root in tree.roots.items():
        if root.parent is not None or root.n or not root.children:
            yield f"root of {namespace}: empty or not a root"


def _counts(index: Index) -> Iterator[str]:
    resident = [0] * index.shape.n_lanes
    for node in index._occupancy.nodes():
        for lane in index.shape.lanes:
            there = node.block[lane.row, : node.n] != NO_SLOT
            n = int(there.sum())
            resident[lane.row] += n
            if n != node.present[lane.row]:
                yield f"{_where(node)} {_lane(lane)}: {n} pages, {node.present[lane.row]} counted"
            if n and int(there.nonzero()[0][-1]) >= node.high[lane.row]:
                yield f"{_where(node)} {_lane(lane)}: payload above the high mark"
            below = sum(
                bool(child.present[lane.row] or child.below[lane.row])
                for child in (node.children or {}).values()
            )
            if lane.whole and below != node.below[lane.row]:
                yield f"{_where(node)} {_lane(lane)}: in {below} children, {node.below[lane.row]} counted"
        for c, lanes in enumerate(index.shape.of_component):
            nowhere = (node.block[[lane.row for lane in lanes], : node.n] == NO_SLOT).all(axis=0)
            rank = node.use if node.rank is None else node.rank
            if node.use[c, : node.n][nowhere].any() or rank[c, : node.n][nowhere].any():
                yield f"{_where(node)}: recency of a page without payload"
        yield from _dead(index, node)
    if resident != index._occupancy.resident:
        yield f"{resident} pages resident, {index._occupancy.resident} counted"


def _dead(index: Index, node: Node) -> Iterator[str]:
    gap = index._occupancy.missing(node, slice(0, node.n))
    parent = node.parent
    if not index.shape.whole_components:
        expected = UNBROKEN
    elif parent is not None and parent.dead_from < UNBROKEN:
        expected = node.start
    else:
        expected = node.start + int(gap.argmax()) if gap.any() else UNBROKEN
    if node.dead_from != expected:
        yield f"{_where(node)}: dead from {expected}, {node.dead_from} noted"


def _pins(index: Index) -> Iterator[str]:
    expected: dict[tuple[int, Node], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for lane, holds in index._pins.recount().items():
        for anchor, pages in holds:
            if not len(pages):
                continue
            for node, start, stop in segments_up(anchor, int(pages[0]), int(pages[-1]) + 1):
                counts = expected.setdefault((lane.row, node), np.zeros(node.n, dtype=np.int64))
                here = pages[(pages >= node.start + start) & (pages < node.start + stop)] - node.start
                counts[here] += 1
    for node in index._occupancy.nodes():
        for lane in index.shape.lanes:
            if lane.pin_row < 0:
                continue
            pins = node.block[lane.pin_row, : node.n]
            counted = expected.pop((lane.row, node), None)
            if not np.array_equal(pins, np.zeros(node.n) if counted is None else counted):
                yield f"{_where(node)} {_lane(lane)}: pins differ from the open receipts"
            if (node.block[lane.row, : node.n][pins > 0] <= NO_SLOT).any():
                yield f"{_where(node)} {_lane(lane)}: a pinned page is not READY"
    if expected:
        yield f"{len(expected)} pins on nodes that are not in the tree"


def _inbound(index: Index) -> Iterator[str]:
    waiting = 0
    for reservation in index._desk.open:
        for lane, node, offsets, slots in index._desk.entries(reservation):
            waiting += len(index._desk.still_mine(lane, node, offsets, slots)[0])
    lanes = index.shape.n_lanes
    inbound = sum(int((node.block[:lanes, : node.n] < NO_SLOT).sum()) for node in index._occupancy.nodes())
    if waiting != inbound:
        yield f"{inbound} pages INBOUND, {waiting} in open reservations"


def _references(index: Index) -> Iterator[str]:
    ranges = dict(index.sessions.recount())
    for node in index._occupancy.nodes():
        for c in range(len(index.shape.components)):
            expected = np.zeros(node.n, dtype=np.int64)
            for low, high in ranges.pop((c, node), ()):
                expected[low:high] += 1
            if not np.array_equal(
                expected, np.zeros(node.n) if node.refs is None else node.refs[c, : node.n]
            ):
                yield f"{_where(node)}: references differ from the open sessions"
        if node.refs is not None and node.refs[:, node.n :].any():
            yield f"{_where(node)}: references beyond its end"
    if ranges:
        yield f"{len(ranges)} referenced ranges on nodes that are not in the tree"


def _queues(index: Index) -> Iterator[str]:
    for node in index._occupancy.nodes():
        for lane in index.shape.lanes:
            best, queued = best_key(index._queues, node, lane), node.queued[lane.row]
            if best is not None and (queued is None or queued > best):
                yield f"{_where(node)} {_lane(lane)}: best victim {best}, queued at {queued}"


def _pool(index: Index, lane: Lane, pool: Countable, held: SlotArray | None) -> Iterator[str]:
    parts = [np.empty(0, dtype=np.int32) if held is None else np.asarray(held, dtype=np.int32)]
    for node in index._occupancy.nodes():
        places = node.block[lane.row, : node.n]
        parts.append(places[places > NO_SLOT])
    for reservation in index._desk.open:
        if reservation.tier is lane.tier and lane.name in reservation.placements:
            parts.append(reservation.placements[lane.name][1])
    owned = np.concatenate(parts)
    owned = owned[owned != NO_SLOT]
    slots, times = np.unique(owned, return_counts=True)
    if (times > 1).any():
        yield f"{_lane(lane)}: slots with two owners: {slots[times > 1][:8].tolist()}"
    used = np.asarray(pool.used_slots())
    lost, foreign = np.setdiff1d(used, slots), np.setdiff1d(slots, used)
    if len(lost):
        yield f"{_lane(lane)}: {len(lost)} slots allocated but owned by nobody: {lost[:8].tolist()}"
    if len(foreign):
        yield f"{_lane(lane)}: {len(foreign)} slots owned but not allocated: {foreign[:8].tolist()}"


def _lane(lane: Lane) -> str:
    return f"{lane.name}/{lane.tier.name}"
