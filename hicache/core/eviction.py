"""Eviction: which pages go. Exact to the page, in the queue's order, in one lane at a time.

A whole-path lane gives up tails first: a page goes only when nothing deeper in its lane stands on it.
Any other lane gives up any unpinned page. Moves no bytes: the caller owns the slots that come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import Lane, Node, Plan
from hicache.core.occupancy import Freed, Occupancy, Offsets
from hicache.core.queues import LAST_KEY, Keys, Queues, loose_pages, tail_run
from hicache.core.structure import Segment, Tree
from hicache.core.words import NO_SLOT, SlotArray, lowest

_TAIL_PAGES = 4096
_LARGE_PAGES = 512
"""From so many candidates on, victims in a node are planned ahead ..."""
_PLAN_AHEAD = 16
"""... for this fraction of them."""


@dataclass(frozen=True)
class Eviction:
    """A decision carried out in the index: these slots are the caller's again."""

    freed: Mapping[str, SlotArray]
    """By component: the asked one, and what lost its prefix in the same decision."""
    n_freed: int
    """Pages of the asked component."""
    short: int
    """Pages asked for that nothing could be given up for."""


class Evictor:
    """Chooses victims."""

    def __init__(self, tree: Tree, occupancy: Occupancy, queues: Queues) -> None:
        self._tree = tree
        self._occupancy = occupancy
        self._queues = queues

    def evict(self, lane: Lane, pages: int, freed: Freed, *, upto: int = LAST_KEY) -> int:
        """Give up to `pages` pages of the lane whose keys are at most `upto`; returns how many went."""
        queues, count = self._queues, 0
        while count < pages and queues.lowest(lane) <= upto:
            node = queues.pop(lane)
            if node is None:
                break
            bound = min(upto, queues.lowest(lane))
            offsets, rest, blocked = self._choose(node, lane, pages - count, bound)
            bit = 1 << lane.row
            node.blocked = node.blocked | bit if blocked else node.blocked & ~bit
            if rest is not None:
                queues.put_back(node, lane, rest)
            if len(offsets):
                count += len(offsets)
                self.give_up(node, lane, offsets, freed)
                if rest is None and not blocked and node.present[lane.row]:
                    queues.requeue(node, lane)
        return count

    def thin(self, lane: Lane, segments: list[Segment], pages: int, freed: Freed) -> int:
        """Give up to `pages` pages of one path (deepest segment first), in order, but neither the deepest
        nor the last before a fork; returns how many went."""
        found: list[tuple[int, Node, int]] = []
        deepest = True
        for node, low, high in segments:
            offsets, _ = loose_pages(node, lane)
            offsets = offsets[(offsets >= low) & (offsets < high)]
            if node.children is not None and len(node.children) > 1:
                offsets = offsets[offsets != node.n - 1]
            ready = (node.block[lane.row, low:high] > NO_SLOT).nonzero()[0]
            if deepest and len(ready):
                offsets = offsets[offsets != low + int(ready[-1])]
                deepest = False
            keys = self._queues.keys(node, lane, offsets)
            found += [
                (key, node, offset) for key, offset in zip(keys.tolist(), offsets.tolist(), strict=True)
            ]
        found.sort(key=lambda entry: (entry[0], entry[1].start + entry[2]))
        gone: dict[Node, list[int]] = {}
        for _, node, offset in found[:pages]:
            gone.setdefault(node, []).append(offset)
        for node, chosen in gone.items():
            self.give_up(node, lane, np.sort(np.array(chosen, dtype=np.intp)), freed)
        return min(pages, len(found))

    def _choose(self, node: Node, lane: Lane, need: int, bound: int) -> tuple[Offsets, int | None, bool]:
        """Victims in this node that come before `bound`; the key of the next; whether some are stuck."""
        if lane.whole:
            return self._choose_tail(node, lane, need, bound)
        plan = node.plans.get(lane.row) if node.plans is not None else None
        if plan is not None:
            victims = self._follow(plan, node, lane, need, bound)
            if victims is not None:
                return victims
        offsets, blocked = loose_pages(node, lane)
        if not len(offsets):
            return offsets, None, blocked
        keys = self._queues.keys(node, lane, offsets)
        if _PLAN_AHEAD * need < len(keys) and len(keys) > _LARGE_PAGES:
            plan = self._plan(node, lane, offsets, keys)
            node.blocked = node.blocked | 1 << lane.row if blocked else node.blocked & ~(1 << lane.row)
            victims = self._follow(plan, node, lane, need, bound)
            assert victims is not None
            return victims
        after = None
        if need < len(keys):
            first = keys.argpartition(need)
            after = int(keys[first[need]])
            offsets, keys = offsets[first[:need]], keys[first[:need]]
        soon = keys <= bound
        if soon.all():
            return np.sort(offsets), after, blocked
        return np.sort(offsets[soon]), lowest(keys[~soon]), blocked

    def _plan(self, node: Node, lane: Lane, offsets: Offsets, keys: Keys) -> Plan:
        """Put the first part of these pages in order, and keep the order with the node."""
        n = len(keys) // _PLAN_AHEAD
        first = keys.argpartition(n)
        order = first[:n][keys[first[:n]].argsort()]
        plan = Plan(offsets[order] + node.start, keys[order], int(keys[first[n]]))
        if node.plans is None:
            node.plans = {}
        node.plans[lane.row] = plan
        return plan

    def _follow(
        self, plan: Plan, node: Node, lane: Lane, need: int, bound: int
    ) -> tuple[Offsets, int | None, bool] | None:
        """As `_choose`, by the plan; None, and no plan any more, where it does not hold."""
        span = slice(plan.used, plan.used + need)
        offsets, keys = plan.pages[span] - node.start, plan.keys[span]
        n = int(keys.searchsorted(bound, side="right"))
        offsets = offsets[:n].astype(np.intp)
        if n and (
            offsets.min() < 0 or offsets.max() >= node.n or not self._hold(node, lane, offsets, keys[:n])
        ):
            del plan_of(node)[lane.row]
            return None
        plan.used += n
        rest = int(plan.keys[plan.used]) if plan.used < len(plan.keys) else plan.after
        if plan.used >= len(plan.keys):
            del plan_of(node)[lane.row]
        return np.sort(offsets), rest, bool(node.blocked >> lane.row & 1)

    def _hold(self, node: Node, lane: Lane, offsets: Offsets, keys: Keys) -> bool:
        """Whether the pages can still be given up, at these keys."""
        if lowest(node.block[lane.row, offsets]) <= NO_SLOT:
            return False
        if lane.pin_row >= 0 and node.block[lane.pin_row, offsets].any():
            return False
        return np.array_equal(self._queues.keys(node, lane, offsets), keys)

    def _choose_tail(self, node: Node, lane: Lane, need: int, bound: int) -> tuple[Offsets, int | None, bool]:
        window = min(need, _TAIL_PAGES) + 1
        offsets, blocked = tail_run(node, lane, window)
        keys = self._queues.keys(node, lane, offsets)
        late = keys > bound
        n = min(int(late.argmax()) if late.any() else len(keys), need, window - 1)
        return offsets[:n], int(keys[n]) if n < len(keys) else None, blocked

    def give_up(self, node: Node, lane: Lane, offsets: Offsets, freed: Freed) -> None:
        """Give up exactly these pages, which must be READY and unpinned, and what depends on them."""
        freed.take(node, lane, offsets)
        occupancy = self._occupancy
        occupancy.clear(node, lane, offsets)
        if lane.whole:
            lost = occupancy.missing(node, offsets)
            if lost.any():
                first = int(offsets[lost].min())
                siblings = tuple(other for other in occupancy.shape.of_tier[lane.tier] if other is not lane)
                occupancy.drop_dependants(node, first, siblings, freed)
                return
        self._tree.trim(node)


def plan_of(node: Node) -> dict[int, Plan]:
    assert node.plans is not None
    return node.plans


def everything(evictor: Evictor, lanes: tuple[Lane, ...], freed: Freed) -> None:
    """Give up all that can be given up in these lanes, whole paths first."""
    for lane in sorted(lanes, key=lambda lane: not lane.whole):
        evictor.evict(lane, LAST_KEY, freed)
