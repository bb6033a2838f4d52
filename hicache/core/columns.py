"""Columns: one node of the tree, and where each fact about its pages stands.

A node is a maximal run of pages without a branch. Everything known about a page is an entry in a numpy
column of its node. This module owns the shape and the growing, cutting and dividing of columns; it
never decides what is written into them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.core.coverage import Component
from hicache.core.policies import Policy
from hicache.core.words import NO_SLOT, Tier

UNBROKEN = 1 << 62
"""`Node.dead_from` of a node all of whose pages can be reached by every whole-path component."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One component in one tier: the unit of slots, of pins and of eviction order."""

    row: int
    """Position among the lanes; row of its place column."""
    component: int
    name: str
    tier: Tier
    whole: bool
    pin_row: int
    """Row of its pin counts; -1 where a tier has no slots and so nothing to pin."""
    other_rows: tuple[int, ...]
    """Place rows of the same component in the other tiers of this index."""
    down_row: int
    """Place row one tier down; -1 for the last tier."""
    up_row: int
    """Place row one tier up; -1 for the first tier."""
    policy: Policy


class Shape:
    """Which columns the nodes of one index have. Place columns hold a slot (>= 0: READY), -1 (ABSENT),
    or -2 - slot (INBOUND); in STORAGE, which has no slots, READY is 0."""

    def __init__(
        self,
        page_size: int,
        components: Sequence[Component],
        tiers: Sequence[Tier],
        policies: Mapping[str, Policy],
    ) -> None:
        _check(page_size, components, tiers, policies)
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.components = tuple(components)
        self.tiers = tuple(tiers)
        n_tiers = len(self.tiers)
        self.n_lanes = n_tiers * len(self.components)
        self.n_rows = self.n_lanes
        self.policies = tuple(policies.get(component.name, Policy.LRU) for component in components)
        self.ranked = any(policy.ranked for policy in self.policies)
        lanes = []
        for c, component in enumerate(self.components):
            rows = range(c * n_tiers, (c + 1) * n_tiers)
            for row, tier in zip(rows, self.tiers, strict=True):
                pin_row = -1 if tier is Tier.STORAGE else self.n_rows
                self.n_rows += pin_row >= 0
                others = tuple(other for other in rows if other != row)
                down = row + 1 if row + 1 in rows else -1
                up = row - 1 if row - 1 in rows else -1
                whole = component.coverage.whole_path
                policy = self.policies[c]
                lanes.append(Lane(row, c, component.name, tier, whole, pin_row, others, down, up, policy))
        self.lanes = tuple(lanes)
        self.of_tier: Mapping[Tier, tuple[Lane, ...]] = {
            tier: tuple(lane for lane in lanes if lane.tier is tier) for tier in self.tiers
        }
        self.of_component = tuple(
            tuple(lane for lane in lanes if lane.component == c) for c in range(len(self.components))
        )
        self.whole_lanes = tuple(lane for lane in lanes if lane.whole)
        self.whole_lane_groups = tuple(lanes for lanes in self.of_component if lanes[0].whole)
        self.whole_components = tuple(c for c, lanes in enumerate(self.of_component) if lanes[0].whole)
        self._by_name = {(lane.name, lane.tier): lane for lane in lanes}

    def lane(self, component: str, tier: Tier) -> Lane:
        """Raises ValueError for a component or tier that this index does not have."""
        lane = self._by_name.get((component, tier))
        if lane is None:
            names = [c.name for c in self.components]
            raise ValueError(f"no component {component!r} in tier {tier.name}: have {names}, {self.tiers}")
        return lane

    def slotted(self, component: str, tier: Tier) -> Lane:
        """The same, and it must be a tier with slots."""
        lane = self.lane(component, tier)
        if lane.pin_row < 0:
            raise ValueError(f"tier {tier.name} has no slots")
        return lane


@dataclass
class Plan:
    """The next victims of a lane in one large node, so that giving up a page at a time does not look at all
    of its pages each time. Good until a key falls (`Queues.push`); each entry is checked when it is used."""

    pages: NDArray[np.int64]
    """Counted from the start of the prompt, in order of giving up."""
    keys: NDArray[np.int64]
    after: int | None
    """Key of the page after the last one; None when there is none."""
    used: int = 0


class Node:
    """A run of pages [start, start + n) of a path. Its columns may be wider than n; what lies beyond n is
    always clear (no payload, no pins, no recency), so that a leaf grows by writing its new pages."""

    __slots__ = (
        "below",
        "block",
        "blocked",
        "children",
        "cuts",
        "dead_from",
        "hashes",
        "high",
        "n",
        "parent",
        "plans",
        "present",
        "queued",
        "rank",
        "refs",
        "start",
        "tokens",
        "use",
    )

    def __init__(self, shape: Shape, parent: Node | None, start: int, tokens: bytes | bytearray) -> None:
        lanes = shape.n_lanes
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        self.start = start
        self.n = n = len(tokens) // shape.page_bytes
        self.tokens = bytearray(tokens)
        self.hashes: bytearray | None = None
        """Page hashes of the first pages, as far as somebody asked for them."""
        self.block = _blank_block(shape, n)
        """int32 (rows, width): place and pin columns."""
        self.use = np.zeros((len(shape.components), n), dtype=np.int64)
        """(components, width): recency, 0 = oldest."""
        self.rank = np.zeros((len(shape.components), n), dtype=np.int32) if shape.ranked else None
        """(components, width): uses or priority, where a policy asks for them."""
        self.refs: NDArray[np.int32] | None = None
        """(components, width): sessions that count on the page; None until there is one."""
        self.present = [0] * lanes
        """Per lane: pages READY or INBOUND."""
        self.below = [0] * lanes
        """Per whole-path lane: children with payload of the lane in them or beneath them."""
        self.high = [0] * lanes
        """Per lane: no payload at or after this offset."""
        self.queued: list[int | None] = [None] * lanes
        """Per lane: key of the node's entry in the eviction queue, never above its best victim's."""
        self.plans: dict[int, Plan] | None = None
        """Per lane: victims worked out ahead; see `Plan`."""
        self.blocked = 0
        """Bit per lane: the queue's entry may be above the keys of pages that are pinned or inbound now."""
        self.dead_from = UNBROKEN
        """First page that a whole-path component cannot reach in any tier."""
        self.cuts: list[tuple[int, int]] | None = None
        """(tick, end): the node was cut back to `end` then; ends ascend. See `Tree.locate`."""

    @property
    def end(self) -> int:
        return self.start + self.n

    def grow(self, shape: Shape, tokens: bytes) -> None:
        """Append whole pages without payload. Amortised O(new pages)."""
        self.tokens += tokens
        n, self.n = self.n, len(self.tokens) // shape.page_bytes
        if self.n > self.block.shape[1]:
            self._resize(shape, n, self.n + self.n // 4 + 1)

    def cut(self, shape: Shape, n: int) -> None:
        """Drop the pages from offset n on; they must hold no payload and no pins."""
        old, self.n = self.n, n
        del self.tokens[n * shape.page_bytes :]
        if self.hashes is not None:
            del self.hashes[32 * n :]
        self.high = [min(high, n) for high in self.high]
        if 4 * n < self.block.shape[1] and self.block.shape[1] > 16:
            self._resize(shape, n, n + n // 4 + 1)
        elif self.refs is not None:
            self.refs[:, n:old] = 0

    def divide(self, shape: Shape, n: int) -> Node:
        """Move the first n pages into a fresh parent node, which is returned; this node keeps the tail.
        Counts are shared out; links to parent and child, queues and `below` are the tree's business."""
        head = Node(shape, self.parent, self.start, self.tokens[: n * shape.page_bytes])
        end = self.n
        head.block, self.block = self.block[:, :n].copy(), self.block[:, n:end].copy()
        head.use, self.use = self.use[:, :n].copy(), self.use[:, n:end].copy()
        if self.rank is not None:
            head.rank, self.rank = self.rank[:, :n].copy(), self.rank[:, n:end].copy()
        if self.refs is not None:
            head.refs, self.refs = self.refs[:, :n].copy(), self.refs[:, n:end].copy()
        head.high = [min(high, n) for high in self.high]
        head.present = (head.block[: shape.n_lanes] != NO_SLOT).sum(axis=1).tolist()
        if self.hashes is not None:
            head.hashes, self.hashes = self.hashes[: 32 * n], self.hashes[32 * n :]
        self.present = [all_ - part for all_, part in zip(self.present, head.present, strict=True)]
        self.high = [max(0, high - n) for high in self.high]
        self.tokens = self.tokens[n * shape.page_bytes :]
        self.start += n
        self.n -= n
        return head

    def clear(self, shape: Shape) -> None:
        """Forget everything but the place in the tree: for a node that was taken out."""
        self.tokens, self.n, self.hashes, self.children = bytearray(), 0, None, None
        self._resize(shape, 0, 0)
        self.high = [0] * shape.n_lanes
        self.dead_from = UNBROKEN
        self.plans = None

    def tail(self, lane: Lane) -> int:
        """Offset after the last page with payload in the lane; 0 when there is none."""
        high = self.high[lane.row]
        row = self.block[lane.row]
        step = 16
        while high and row[high - 1] == NO_SLOT:
            low = max(0, high - step)
            some = row[low:high] != NO_SLOT
            back = int(some[::-1].argmax())
            high = high - back if some[len(some) - 1 - back] else low
            step *= 4
        self.high[lane.row] = high
        return high

    def _resize(self, shape: Shape, keep: int, width: int) -> None:
        block = _blank_block(shape, width)
        block[:, :keep] = self.block[:, :keep]
        self.block = block
        use = np.zeros((len(shape.components), width), dtype=np.int64)
        use[:, :keep] = self.use[:, :keep]
        self.use = use
        self.rank = _wider(self.rank, keep, width)
        self.refs = _wider(self.refs, keep, width)


def _blank_block(shape: Shape, width: int) -> NDArray[np.int32]:
    block = np.zeros((shape.n_rows, width), dtype=np.int32)
    block[: shape.n_lanes] = NO_SLOT
    return block


def _wider(column: NDArray[np.int32] | None, keep: int, width: int) -> NDArray[np.int32] | None:
    if column is None:
        return None
    wider = np.zeros((len(column), width), dtype=np.int32)
    wider[:, :keep] = column[:, :keep]
    return wider


def _check(
    page_size: int, components: Sequence[Component], tiers: Sequence[Tier], policies: Mapping[str, Policy]
) -> None:
    if page_size < 1:
        raise ValueError(f"page_size: {page_size} tokens; it must be at least 1")
    names = [component.name for component in components]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"components: {names}; name at least one, each once")
    if not set(policies) <= set(names):
        raise ValueError(f"policies: {sorted(policies)} for components {names}")
    if not tiers or list(tiers) != sorted(set(tiers)):
        raise ValueError(f"tiers: {list(tiers)}; name at least one, nearest to the model first")
