"""WriteThrough: offers what enters L1 to the lower tiers, and remembers what they have.

Pages under a backup stay pinned until it is settled: their bytes must not change while they may still be
read. What that keeps in L1 is bounded by a share of each component's slots, for whole-path components
counted with the prefix that a pinned page keeps in place; a single path may exceed it. What does not fit
is put off, never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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
from hicache.core.words import NO_SLOT, Tier

CHAIN_BROKEN = "chain_broken"
"""The daemon's reason for refusing pages whose prefix it does not have."""

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


class WriteThrough:
    """All backups of one cache."""

    def __init__(self, l1: L1, lower: LowerTiers, *, max_share: float) -> None:
        self._index = l1.index
        self._components = l1.components
        self._ledger = l1.ledger
        self._counters = l1.counters
        self._lower = lower
        self._share = {name: max(1, int(max_share * pool.n_slots)) for name, pool in l1.ledger.pools.items()}
        self._pinned = dict.fromkeys(self._share, 0)
        self._running: list[Backup] = []
        self._waiting: deque[Offer] = deque()
        self._epoch = lower.epoch

    @property
    def running(self) -> tuple[Backup, ...]:
        return tuple(self._running)

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
        reach = self._affordable(offer, wanted)
        placements = {
            name: Placement(p.pages[p.pages < reach], p.slots[p.pages < reach]) for name, p in wanted.items()
        }
        placements = {name: p for name, p in placements.items() if len(p.pages)}
        whole = all(not len(p.pages) or p.pages[-1] < reach for p in wanted.values())
        if not placements:
            return whole
        receipt = self._index.pin_pages(cursor, {n: p.pages for n, p in placements.items()}, tier=Tier.DEVICE)
        transfer = self._lower.start_backup(offer.prompt, placements)
        for name, placement in placements.items():
            self._pinned[name] += len(placement.pages)
            self._ledger.mark(name, placement.slots, Copy.UNDERWAY)
        self._counters.backups += 1
        self._running.append(Backup(offer, placements, transfer, receipt, self._lower.epoch))
        return whole

    def _missing(self, offer: Offer) -> tuple[Cursor, dict[str, Placement]]:
        """What of the path is READY in L1, and neither known in host memory nor on its way there."""
        match = self._index.match(offer.namespace, offer.prompt.tokens)
        wanted: dict[str, Placement] = {}
        for component in self._components:
            slots = self._index.slots(match.cursor, component.name, Tier.DEVICE, 0, match.n_pages)
            pages = np.flatnonzero(slots != NO_SLOT).astype(np.int32)
            new = self._ledger.copies(component.name, slots[pages]) == Copy.UNKNOWN
            wanted[component.name] = Placement(pages[new], slots[pages[new]])
        return match.cursor, wanted

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
        broken = False
        for name, placement in backup.placements.items():
            self._pinned[name] -= len(placement.pages)
            known = False
            if done and name in outcomes:
                outcome = outcomes[name]
                self._counters.backed_up_pages += outcome.stored_pages
                self._counters.present_pages += outcome.present_pages
                self._counters.refused_pages += outcome.refused_pages
                known = not outcome.refused_pages and backup.epoch == self._epoch
                broken = broken or CHAIN_BROKEN in outcome.reason
            self._ledger.mark(name, placement.slots, Copy.KNOWN if known else Copy.UNKNOWN)
        if broken:
            self._mend(backup.offer)

    def _mend(self, offer: Offer) -> None:
        """The host has lost pages that it was known to have: offer the whole path again, once."""
        match = self._index.match(offer.namespace, offer.prompt.tokens)
        for component in self._components:
            slots = self._index.slots(match.cursor, component.name, Tier.DEVICE, 0, match.n_pages)
            slots = slots[slots != NO_SLOT]
            known = slots[self._ledger.copies(component.name, slots) == Copy.KNOWN]
            self._ledger.mark(component.name, known, Copy.UNKNOWN)
        if not offer.again:
            self._put_off(replace(offer, again=True))


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
