"""Writing: when pages of L1 are backed up, and what is seen to before they go.

A policy decides what to offer and when; `Backups` does it. Under write-back it also evicts: nothing goes
from L1 before it has been copied down, or that was tried in vain and is counted. Moves no bytes, and waits
no longer than its time limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from hicache.cache.backups import Backups, Offer
from hicache.cache.l1 import L1
from hicache.cache.ledger import Copy
from hicache.cache.requests import Request
from hicache.client.messages import Placement, Prompt
from hicache.core.foresight import Victims
from hicache.core.words import NO_SLOT, BoolArray, PageArray, SlotArray, Tier


class WritePolicy(Enum):
    """When pages are backed up."""

    NONE = "none"
    WRITE_THROUGH = "write_through"
    """As soon as they are inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """As soon as several requests have used them."""
    WRITE_BACK = "write_back"
    """When they must go from L1."""


@dataclass(frozen=True)
class WriteRules:
    """How the policies go about it. Raises ValueError for what makes no sense."""

    min_uses: int = 2
    """Selective: by how many requests a page must have been used. 1 .. 255."""
    output: bool = True
    """Whether pages beyond a request's prompt are backed up too. If not, they are when they are part of
    a later prompt."""
    wait_s: float = 0.25
    """Write-back: longest time that a call which needs slots waits for backups."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_uses <= 255:
            raise ValueError(f"min_uses: {self.min_uses}; it must be 1 .. 255")
        if not 0 <= self.wait_s < float("inf"):
            raise ValueError(f"wait_s: {self.wait_s}; it must be a time")


class SwitchRefused(Exception):  # noqa: N818 - the name is what it is
    """Another policy now would break what the present one has promised."""


class Writing:
    """The write policy of one cache."""

    def __init__(self, l1: L1, backups: Backups, policy: WritePolicy, rules: WriteRules) -> None:
        self._l1 = l1
        self._index = l1.index
        self._ledger = l1.ledger
        self._components = l1.components
        self._backups = backups
        self._policy = WritePolicy.NONE
        self.rules = rules
        self._enter(policy)

    @property
    def policy(self) -> WritePolicy:
        return self._policy

    def switch(self, policy: WritePolicy) -> None:
        """Go on under another policy. Raises SwitchRefused, and nothing changes, while backups run or wait
        that would be forgotten, or (out of write-back) while L1 has pages that were to be copied down
        before they go: `evict` them first."""
        if policy is self._policy:
            return
        if not self._backups.idle:
            raise SwitchRefused("backups run or wait; poll the cache until they have ended")
        if self._policy is WritePolicy.WRITE_BACK:
            dirty = sum(len(self._ledger.dirty(component.name)) for component in self._components)
            if dirty:
                raise SwitchRefused(f"{dirty} pages in L1 have no copy below; evict them first")
        self._enter(policy)

    def _enter(self, policy: WritePolicy) -> None:
        self._policy = policy
        back = policy is WritePolicy.WRITE_BACK
        self._l1.make_room = self._make_room if back else None
        self._backups.sticky_refusals = back
        selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._backups.eligible = self._ripe if selective else _all

    def _ripe(self, component: str, slots: SlotArray) -> BoolArray:
        return self._ledger.uses(component, slots) >= self.rules.min_uses

    # ---- what requests do

    def inserted(
        self,
        request: Request,
        reused: Mapping[str, SlotArray],
        first_page: int,
        fresh: Mapping[str, SlotArray],
    ) -> None:
        """A request has inserted: `reused` are the slots that it began from (empty for a later chunk),
        `fresh` those of its pages from `first_page` on."""
        n_prompt = len(request.prompt.tokens) // request.namespace.page_size
        for name, slots in reused.items():
            self._ledger.used(name, slots, request.prompt.request_id)
            self._wanted(name, slots)
        for name, slots in fresh.items():
            self._ledger.used(name, slots, request.prompt.request_id)
            ends = max(0, n_prompt - first_page)
            self._wanted(name, slots[:ends])
            if not self.rules.output:
                self._ledger.remark(name, slots[ends:], Copy.UNKNOWN, Copy.EXEMPT)
        if self._policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE):
            prompt = request.prompt
            self._backups.offer(
                request.namespace, Prompt(prompt.request_id, request.tokens, prompt.adapter, prompt.salt)
            )

    def _wanted(self, component: str, slots: SlotArray) -> None:
        """Part of a prompt, and used: worth a backup, and another try."""
        self._ledger.remark(component, slots, Copy.EXEMPT, Copy.UNKNOWN)
        self._ledger.remark(component, slots, Copy.REFUSED, Copy.UNKNOWN)

    # ---- write-back

    def _make_room(self, component: str, pages: int) -> int:
        """Evict up to `pages` pages, in the order of eviction, none before its copy is below; how many
        went. What the host refuses, and all while it cannot be asked, goes without."""
        deadline = time.monotonic() + self.rules.wait_s
        freed = self._sweep(component, pages)
        while freed < pages and time.monotonic() < deadline and self._backups.wait_for_one(deadline):
            freed += self._sweep(component, pages - freed)
        if freed < pages and not self._backups.ready:
            freed += self._sweep(component, pages - freed)
        return freed

    def _sweep(self, component: str, pages: int) -> int:
        """One pass: let go what is clean, start a backup of what is not; how many went."""
        freed = leaving = 0
        while freed + leaving < pages:
            victims = self._l1.ahead.next_victims(component, Tier.DEVICE, pages - freed - leaving)
            if victims is None:
                break
            going = self._going(component, victims)
            if not going or not self._backups.ready:
                freed += self._l1.drop(component, victims)
                continue
            namespace, tokens = victims.cursor.namespace, self._index.tokens(victims.cursor)
            offer = Offer(namespace, Prompt("", tokens, namespace.adapter, namespace.salt))
            if not self._backups.start(offer, victims.cursor, self._with_parents(victims, going)):
                break
            leaving += len(victims.pages)
        return freed

    def _going(self, component: str, victims: Victims) -> dict[str, Placement]:
        """What has no copy below and would go with these pages, they included."""
        whole = {c.name: c.coverage.whole_path for c in self._components}
        first = int(victims.pages[0])
        going: dict[str, Placement] = {}
        for other in self._components:
            if other.name == component:
                pages = victims.pages
            elif whole[component]:
                pages = np.arange(first, victims.cursor.boundary, dtype=np.int32)
            else:
                continue
            placement = self._marked(victims, other.name, pages, Copy.UNKNOWN, Copy.RETRY)
            if len(placement.pages):
                going[other.name] = placement
        return going

    def _with_parents(self, victims: Victims, going: Mapping[str, Placement]) -> dict[str, Placement]:
        """And what must be below before: parents before children."""
        wanted: dict[str, Placement] = {}
        for component in self._components:
            name = component.name
            if component.coverage.whole_path:
                before = np.arange(victims.cursor.boundary, dtype=np.int32)
                wanted[name] = self._marked(victims, name, before, Copy.UNKNOWN, Copy.RETRY, Copy.REFUSED)
            else:
                wanted[name] = going.get(name, Placement(before[:0], before[:0]))
        return wanted

    def _marked(self, victims: Victims, component: str, pages: PageArray, *marks: Copy) -> Placement:
        """Those of a path's pages that are READY and marked so."""
        boundary = victims.cursor.boundary
        slots = self._index.slots(victims.cursor, component, Tier.DEVICE, 0, boundary)[pages]
        there = np.flatnonzero(slots != NO_SLOT)
        there = there[np.isin(self._ledger.copies(component, slots[there]), marks)]
        return Placement(pages[there], slots[there])


def _all(component: str, slots: SlotArray) -> BoolArray:
    return np.ones(len(slots), bool)
