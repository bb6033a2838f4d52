"""Policies: in which order pages of one component are given up.

A policy turns what is known of a page into one integer; the smallest goes first. What every policy
shares (dead weight before anything, unreferenced before referenced, demotion before loss) is in queues.py.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

MOST_RANK = 4095


class Policy(Enum):
    """Eviction order of a component."""

    LRU = "lru"
    """Least recently used."""
    LFU = "lfu"
    """Fewest uses, then least recently used."""
    SLRU = "slru"
    """Used once before used again (probation, then protected); least recently used within each."""
    FIFO = "fifo"
    """In the order in which pages came; uses do not matter."""
    PRIORITY = "priority"
    """Lowest priority given at insert, then least recently used."""

    @property
    def ranked(self) -> bool:
        """Whether pages need a rank: uses counted, or a priority."""
        return self in (Policy.LFU, Policy.SLRU, Policy.PRIORITY)

    @property
    def counts_uses(self) -> bool:
        return self in (Policy.LFU, Policy.SLRU)

    def order(self, rank: NDArray[np.int32]) -> NDArray[np.int64]:
        """What comes before recency: 0 .. MOST_RANK."""
        if self is Policy.SLRU:
            return (rank > 1).astype(np.int64)
        return np.minimum(rank, MOST_RANK).astype(np.int64)
