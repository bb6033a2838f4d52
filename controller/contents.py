"""What host memory and storage hold now, as the index knows it, for a reader of events who begins late.

Looks at everything at once: the answer fits the event log's next number exactly. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from controller.host import HostMemory
from controller.models import HOST, STORAGE, Model
from hicache.core.journal import Move
from hicache.core.structure import Cursor
from hicache.core.words import Residency, Tier


class Contents:
    """The contents of one controller's tiers."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host

    def moves(self) -> list[Move]:
        """Every page that is READY, each once for its component and tier."""
        found: list[Move] = []
        for model in self._host.models:
            seen: set[tuple[Tier, str, bytes]] = set()
            for cursor in model.index.leaves():
                found.extend(_along(model, cursor, seen))
        return found


def _along(model: Model, cursor: Cursor, seen: set[tuple[Tier, str, bytes]]) -> Iterator[Move]:
    """The pages of a path that were not seen on another."""
    index, n_pages = model.index, cursor.boundary
    hashes = index.hashes(cursor, 0, n_pages)
    seed = np.frombuffer(cursor.namespace.seed(), dtype=np.uint8)[None]
    parents = np.concatenate([seed, hashes[:-1]])
    for name in model.shelves:
        ready = {
            tier: index.residency(cursor, name, tier, 0, n_pages) == Residency.READY
            for tier in (HOST, STORAGE)
        }
        for tier, other in ((HOST, STORAGE), (STORAGE, HOST)):
            pages = [
                page
                for page in np.flatnonzero(ready[tier]).tolist()
                if (tier, name, hashes[page].tobytes()) not in seen
            ]
            seen.update((tier, name, hashes[page].tobytes()) for page in pages)
            if pages:
                yield Move(
                    cursor.namespace,
                    name,
                    tier,
                    True,
                    np.array(pages, dtype=np.int32),
                    hashes[pages],
                    parents[pages],
                    ready[other][pages],
                )
