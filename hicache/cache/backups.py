"""Backups: offers pages of L1 to the lower tiers, and remembers what they have. When, and which, is a
policy's to say (`hicache.cache.writing`).

Pages under a backup stay pinned until it is settled: their bytes must not change while they may still be
read. What that keeps in L1 is bounded by a share of each component's slots, for whole-path components
counted with the prefix that a pinned page keeps in place; a single path may exceed it. What does not fit
is put off, never waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hicache.cache.l1 import L1
from hicache.cache.ledger import Copy
from hicache.cache.lower import LowerTiers, Transfer
from hicache.client.messages import Placement, Prompt
from hicache.client.tickets import Outcome
from hicache.core.identity import Namespace
from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.words import NO_SLOT, BoolArray, SlotArray, Tier

CHAIN_BROKEN = "chain_broken"
"""The daemon's reason for refusing pages whose prefix it does not have,"""
HOST_FULL = "host_full"
"""and for refusing pages that it has no room for, which may break the chain of others."""

_MAX_WAITING = 64


@dataclass(frozen=True, eq=False)
class Offer:
    """A path whose pages are to be backed up."""

    namespace: Namespace
    prompt: Prompt
    """Its tokens end with the last page of the path."""
    again: bool = False
    """Whether this follows a refusal for a broken chain: not to be repeated for ever."""


@dataclass(frozen=True, eq=False)
class Backup:
    """One backup that is not settled."""

    offer: Offer
    placements: Mapping[str, Placement]
    transfer: Transfer
    receipt: Receipt
    epoch: int
    tried: Mapping[str, BoolArray]
    """Per component, which of the pages have been refused before."""


class Backups:
    """All backups of one cache."""

    def __init__(self, l1: L1, lower: LowerTiers, *, max_share: float) -> None:
        self._index = l1.index
        self._components = l1.components
        self._ledger = l1.ledger
        self._counters = l1.counters
        self._lower = lower
        self._whole = {component.name: component.coverage.whole_path for component in l1.components}
        self._share = {name: max(1, int(max_share * pool.n_slots)) for name, pool in l1.ledger.pools.items()}
        self._pinned = dict.fromkeys(self._share, 0)
        self._running: list[Backup] = []
        self._waiting: deque[Offer] = deque()
        self._epoch = lower.epoch
        self.eligible: Callable[[str, SlotArray], BoolArray] = lambda name, slots: np.ones(len(slots), bool)
        """Which of a component's READY pages are to be backed up, if the host has not got them."""
        self.sticky_refusals = False
        """Whether what was refused is not to be tried again before it is used again."""

    @property
    def ready(self) -> bool:
        return self._lower.ready

    @property
    def running(self) -> tuple[Backup, ...]:
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def offer(self, namespace: Namespace, prompt: Prompt) -> None:
        """Back up what this path has in L1 and the host is not known to have. Waits for nothing."""
        offer = Offer(namespace, prompt)
        if self._waiting or not self._start(offer):
            self._put_off(offer)

    def reap(self) -> int:
        """End the backups that have settled, then start what was put off; how many ended."""
        if self._epoch != self._lower.epoch:
            self._epoch = self._lower.epoch
            self._ledger.host_memory_lost()
        settled = [backup for backup in self._running if backup.transfer.settled()]
        if settled:
            self._running = [backup for backup in self._running if backup not in settled]
            for backup in settled:
                self._end(backup)
        while self._waiting and self._lower.ready:
            if not self._start(self._waiting[0]):
                break
            self._waiting.popleft()
        return len(settled)

    def _put_off(self, offer: Offer) -> None:
        """Longer offers take the place of those that they contain."""
        n_waiting = len(self._waiting)
        self._waiting = deque(other for other in self._waiting if not _contains(offer, other))
        self._waiting.append(offer)
        self._counters.backups_put_off += len(self._waiting) > n_waiting
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self._counters.backups_forgotten += 1

    def _start(self, offer: Offer) -> bool:
        """Back up as much as the share allows, prefixes first. Whether nothing of it is left to do."""
        if not self._lower.ready:
            return False
        cursor, wanted = self._missing(offer)
        placements = self._cut(offer, wanted)
        if placements:
            self._launch(offer, cursor, placements)
        kept = sum(len(p.pages) for p in placements.values())
        return kept == sum(len(p.pages) for p in wanted.values())

    def _cut(self, offer: Offer, wanted: Mapping[str, Placement]) -> dict[str, Placement]:
        """As much as the share allows, prefixes first."""
        reach = self._affordable(offer, wanted)
        kept = {name: p.pages < reach for name, p in wanted.items()}
        return {
            name: Placement(p.pages[kept[name]], p.slots[kept[name]])
            for name, p in wanted.items()
            if kept[name].any()
        }

    def start(self, offer: Offer, cursor: Cursor, wanted: Mapping[str, Placement]) -> bool:
        """Back up exactly these pages of a path, as many as the share allows, prefixes first; whether it is
        any."""
        placements = self._cut(offer, wanted)
        if placements:
            self._launch(offer, cursor, placements)
        return bool(placements)

    def wait_for_one(self, deadline: float) -> bool:
        """Wait for a backup that runs; whether one has settled, or may do so without being waited for."""
        for backup in self._running:
            if backup.transfer.outcome is Outcome.PENDING:
                self._counters.backup_waits += 1
                backup.transfer.wait(max(0.0, deadline - time.monotonic()))
                break
        return self.reap() > 0

    def _launch(self, offer: Offer, cursor: Cursor, placements: Mapping[str, Placement]) -> None:
        receipt = self._index.pin_pages(cursor, {n: p.pages for n, p in placements.items()}, tier=Tier.DEVICE)
        transfer = self._lower.start_backup(offer.prompt, placements)
        tried = {
            name: np.isin(self._ledger.copies(name, p.slots), (Copy.RETRY, Copy.REFUSED))
            for name, p in placements.items()
        }
        for name, placement in placements.items():
            self._pinned[name] += len(placement.pages)
            self._ledger.mark(name, placement.slots, Copy.UNDERWAY)
        self._counters.backups += 1
        self._running.append(Backup(offer, placements, transfer, receipt, self._lower.epoch, tried))

    def _missing(self, offer: Offer) -> tuple[Cursor, dict[str, Placement]]:
        """What of the path is READY in L1, and neither known in host memory nor on its way there."""
        match = self._index.match(offer.namespace, offer.prompt.tokens)
        wanted: dict[str, Placement] = {}
        reach = match.n_pages
        for component in self._components:
            name = component.name
            slots = self._index.slots(match.cursor, name, Tier.DEVICE, 0, match.n_pages)
            pages = np.flatnonzero(slots != NO_SLOT).astype(np.int32)
            copies = self._ledger.copies(name, slots[pages])
            new = np.isin(copies, (Copy.UNKNOWN, Copy.RETRY, Copy.REFUSED))
            ripe = self.eligible(name, slots[pages])
            wanted[name] = Placement(pages[new & ripe], slots[pages][new & ripe])
            held_back = pages[(new & ~ripe) | (copies == Copy.EXEMPT)]
            if component.coverage.whole_path and len(held_back):
                reach = min(reach, int(held_back[0]))
        return match.cursor, {
            name: Placement(p.pages[p.pages < reach], p.slots[p.pages < reach]) for name, p in wanted.items()
        }

    def _affordable(self, offer: Offer, wanted: Mapping[str, Placement]) -> int:
        """The page from which on some component's share is spent: all are cut there, so that no child is
        offered before its parents."""
        reach = 1 << 31
        others = self._held_elsewhere(offer)
        for component in self._components:
            pages, share = wanted[component.name].pages, self._share[component.name]
            room = share - self._pinned[component.name]
            if component.coverage.whole_path:
                reach = min(reach, max(0, share - others)) if others else reach
            elif len(pages) > room:
                reach = min(reach, int(pages[max(0, room)]))
        return reach

    def _held_elsewhere(self, offer: Offer) -> int:
        """Pages that running backups of other paths keep in L1: each its deepest page and all before it."""
        held: list[tuple[Offer, int]] = []
        for backup in sorted(self._running, key=lambda backup: -len(backup.offer.prompt.tokens)):
            other = backup.offer
            if not _contains(offer, other) and not _contains(other, offer):
                depth = max(int(p.pages[-1]) + 1 for p in backup.placements.values())
                held.append((other, depth))
        paths = [n for n, (path, _) in enumerate(held) if not any(_contains(o, path) for o, _ in held[:n])]
        return sum(max(depth for path, depth in held if _contains(held[n][0], path)) for n in paths)

    def _end(self, backup: Backup) -> None:
        """A settled backup: its pages may change again."""
        self._index.unpin(backup.receipt)
        outcomes = backup.transfer.backup_outcomes
        done = backup.transfer.outcome is Outcome.OK
        self._counters.backups_failed += not done
        reasons = " ".join(outcome.reason for outcome in outcomes.values())
        mended = CHAIN_BROKEN in reasons and HOST_FULL not in reasons and self._mend(backup.offer)
        same_host = backup.epoch == self._epoch
        sticky = same_host and self.sticky_refusals
        for name, placement in backup.placements.items():
            self._pinned[name] -= len(placement.pages)
            refused = np.ones(len(placement.pages), bool)
            if done and name in outcomes:
                outcome = outcomes[name]
                self._counters.backed_up_pages += outcome.stored_pages
                self._counters.present_pages += outcome.present_pages
                self._counters.refused_pages += outcome.refused_pages
                refused[: len(refused) - outcome.refused_pages] = False
                if refused.any() and not self._whole[name]:
                    refused[:] = True  # which of them is not told
            self._ledger.mark(name, placement.slots, Copy.KNOWN if same_host else Copy.UNKNOWN)
            final = refused & (backup.tried[name] | (not mended))
            self._ledger.mark(name, placement.slots[refused], Copy.RETRY if sticky else Copy.UNKNOWN)
            self._ledger.mark(name, placement.slots[final], Copy.REFUSED if sticky else Copy.UNKNOWN)

    def _mend(self, offer: Offer) -> bool:
        """The host may have lost pages that it was known to have: none of this path is known to be there
        now; whether any was. Offer the whole path again, once."""
        match = self._index.match(offer.namespace, offer.prompt.tokens)
        forgotten = False
        for component in self._components:
            slots = self._index.slots(match.cursor, component.name, Tier.DEVICE, 0, match.n_pages)
            forgotten |= self._ledger.remark(component.name, slots, Copy.KNOWN, Copy.UNKNOWN)
        if not offer.again and not self.sticky_refusals:
            self._put_off(replace(offer, again=True))
        return forgotten


def _contains(offer: Offer, other: Offer) -> bool:
    """Whether the other's path is the beginning of this one."""
    tokens, others = offer.prompt.tokens, other.prompt.tokens
    n = len(others)
    return (
        n <= len(tokens)
        and (n == 0 or bool(others[-1] == tokens[n - 1]))  # settles nearly all, without reading them whole
        and offer.namespace == other.namespace
        and np.array_equal(tokens[:n], others)
    )
