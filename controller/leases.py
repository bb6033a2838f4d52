"""Leases: pins held for a remote client, until released, expired, or the client is gone.

Owns the receipts behind them. Decides nothing about what is pinned, and never waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.tree import Index
from hicache.core.words import PageArray


@dataclass
class Lease:
    """A pin with an owner and an end. While a transfer uses it, neither ends it."""

    lease_id: str
    owner: str
    """The group that holds it."""
    index: Index
    cursor: Cursor
    receipt: Receipt
    pages: Mapping[str, PageArray]
    expires_s: float
    holders: set[int]
    """Ranks that have not released it."""
    users: int = 0
    released: bool = False


class LeaseTable:
    """All leases of one controller. Times are seconds of the clock given."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self.ended: Callable[[Lease], None] = lambda _: None
        """Told of every lease whose pages are no longer pinned by it."""
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        owner: str,
        ranks: int,
        index: Index,
        cursor: Cursor,
        receipt: Receipt,
        pages: Mapping[str, PageArray],
    ) -> Lease:
        """Take ownership of a receipt."""
        lease_id = f"lease-{next(self._ids)}"
        expires_s = self._clock() + self._lease_s
        lease = Lease(lease_id, owner, index, cursor, receipt, pages, expires_s, set(range(ranks)))
        self._leases[lease_id] = lease
        return lease

    def find(self, owner: str, lease_id: str) -> Lease | None:
        """The lease, or None when it has ended or belongs to somebody else."""
        lease = self._leases.get(lease_id)
        return lease if lease and lease.owner == owner and not lease.released else None

    def begin_use(self, lease: Lease) -> None:
        lease.users += 1

    def end_use(self, lease: Lease) -> None:
        lease.users -= 1
        lease.expires_s = max(lease.expires_s, self._clock() + self._lease_s)
        if lease.released and not lease.users:
            self._end(lease)

    def release(self, lease: Lease, rank: int | None = None) -> None:
        """One rank, or (None) all of them, need it no longer. With the last the lease ends, or when its
        last user is through."""
        if rank is not None:
            lease.holders.discard(rank)
            if lease.holders:
                return
        lease.released = True
        if not lease.users:
            self._end(lease)

    def expire(self) -> int:
        """End what is past its time and unused; returns how many."""
        now = self._clock()
        late = [one for one in self._leases.values() if one.expires_s <= now and not one.users]
        for lease in late:
            self._end(lease)
        return len(late)

    def of_owner(self, owner: str) -> Iterator[Lease]:
        return (lease for lease in list(self._leases.values()) if lease.owner == owner)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        lease.index.unpin(lease.receipt)
        self.ended(lease)
