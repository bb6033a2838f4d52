"""L1: the engine's slots and the index of what is in them.

Owns both, and the one way by which slots leave the index. Knows nothing of requests and lower tiers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hicache.cache.counters import Counters
from hicache.cache.ledger import Copy, Owner, SlotLedger
from hicache.core.eviction import Eviction
from hicache.core.foresight import Foresight, Victims
from hicache.core.layout import Layout, component_slots
from hicache.core.matching import Match
from hicache.core.tree import Index
from hicache.core.words import BoolArray, Residency, SlotArray, Tier


class L1:
    """What the parts of the cache share."""

    def __init__(self, layout: Layout, counters: Counters) -> None:
        self.components = layout.index_components()
        self.index = Index(layout.page_size, self.components, (Tier.DEVICE,))
        self.ledger = SlotLedger(component_slots(layout))
        self.counters = counters
        self.ahead = Foresight(self.index)
        self.make_room: Callable[[str, int], int] | None = None
        """Who evicts in our place, under a policy that must see to pages before they go."""

    def take(self, component: str, n: int, owner: Owner) -> SlotArray | None:
        """`n` slots for `owner`, by eviction where needed; None, and nothing taken, if that is not enough."""
        slots = self.ledger.take(component, n, owner)
        if slots is None:
            self.evict(component, n - self.ledger.pools[component].n_free)
            slots = self.ledger.take(component, n, owner)
        return slots

    def evict(self, component: str, pages: int) -> int:
        """Give up to `pages` pages back to the pool; how many went."""
        if self.make_room is not None:
            return self.make_room(component, pages)
        return self._freed(self.index.evict(component, Tier.DEVICE, pages))

    def drop(self, component: str, victims: Victims) -> int:
        """Give these pages back to the pool, and what depends on them; how many of the component went."""
        eviction = self.index.reclaiming.give_up(victims.cursor, {component: victims.pages}, tier=Tier.DEVICE)
        self._freed(eviction)
        return len(eviction.freed.get(component, ()))

    def _freed(self, eviction: Eviction) -> int:
        for name, slots in eviction.freed.items():
            copies = self.ledger.copies(name, slots)
            if self.make_room is not None:
                self.counters.dropped_refused_pages += int((copies == Copy.REFUSED).sum())
                self.counters.dropped_away_pages += int(np.isin(copies, (Copy.UNKNOWN, Copy.RETRY)).sum())
            self.ledger.give(name, slots, Owner.INDEX, Owner.NOBODY)
            self.counters.evicted_pages += len(slots)
        return eviction.n_freed

    def ready(self, match: Match) -> dict[str, BoolArray]:
        """Per component, which of the matched pages are READY."""
        return {
            c.name: self.index.residency(match.cursor, c.name, Tier.DEVICE, 0, match.n_pages)
            == Residency.READY
            for c in self.components
        }
