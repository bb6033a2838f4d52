"""Who says that he owns which slots, against the ledger's books. For the audit; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hicache.cache.backups import Backups
from hicache.cache.ledger import Copy, Owner, SlotLedger
from hicache.cache.loads import LoadBack
from hicache.cache.requests import Request
from hicache.client.messages import Placement


def audit_owners(
    ledger: SlotLedger, requests: Sequence[Request], loads: LoadBack | None, backups: Backups | None
) -> list[str]:
    """What is wrong; empty when nothing is."""
    found = []
    loading = [] if loads is None else [load.placements for load in loads.under_way]
    backing = [] if backups is None else [backup.placements for backup in backups.running]
    for name in ledger.pools:
        private = [request.private[name] for request in requests if name in request.private]
        for what, told, claimed in (
            ("private slots", ledger.owned(name, Owner.REQUEST), private),
            ("slots under a load", ledger.owned(name, Owner.TRANSFER), _slots_of(loading, name)),
            ("slots under a backup", ledger.marked(name, Copy.UNDERWAY), _slots_of(backing, name)),
        ):
            if sorted(claimed) != told.tolist():
                found.append(f"{name}: {what}: {sorted(claimed)} claimed, {told.tolist()} in the ledger")
        copied = ledger.marked(name, Copy.KNOWN)
        if not np.isin(copied, ledger.owned(name, Owner.INDEX)).all():
            found.append(f"{name}: slots without a page that are said to be in host memory")
    return found


def _slots_of(placements: Iterable[Mapping[str, Placement]], name: str) -> list[int]:
    return [slot for each in placements if name in each for slot in each[name].slots.tolist()]
