"""Leases: pins held for a remote client, until released, expired, or the client is gone.

Owns the receipts behind them. Decides nothing about what is pinned, and never waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.tree import Index
from hicache.core.words import PageArray


@dataclass
class Lease:
    """A pin with an owner and an end. While a transfer uses it, neither ends it."""

    lease_id: str
    engine_id: str
    request_id: str
    index: Index
    cursor: Cursor
    receipt: Receipt
    pages: Mapping[str, PageArray]
    expires_s: float
    users: int = 0
    released: bool = field(default=False)


class LeaseTable:
    """All leases of one controller. Times are seconds of the clock given."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        engine_id: str,
        request_id: str,
        index: Index,
        cursor: Cursor,
        receipt: Receipt,
        pages: Mapping[str, PageArray],
    ) -> Lease:
        """Take ownership of a receipt."""
        lease_id = f"lease-{next(self._ids)}"
        lease = Lease(
            lease_id, engine_id, request_id, index, cursor, receipt, pages, self._clock() + self._lease_s
        )
        self._leases[lease_id] = lease
        return lease

    def find(self, engine_id: str, lease_id: str) -> Lease | None:
        """The lease, or None when it has ended or belongs to another engine."""
        lease = self._leases.get(lease_id)
        return lease if lease and lease.engine_id == engine_id and not lease.released else None

    def begin_use(self, lease: Lease) -> None:
        lease.users += 1

    def end_use(self, lease: Lease) -> None:
        lease.users -= 1
        lease.expires_s = max(lease.expires_s, self._clock() + self._lease_s)
        if lease.released and not lease.users:
            self._end(lease)

    def release(self, lease: Lease) -> None:
        """End the lease now, or when its last user is through."""
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

    def of_engine(self, engine_id: str) -> Iterator[Lease]:
        return (lease for lease in list(self._leases.values()) if lease.engine_id == engine_id)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        lease.index.unpin(lease.receipt)
