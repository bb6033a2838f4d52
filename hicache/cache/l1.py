"""L1: the engine's slots and the index of what is in them.

Owns both, and the one way by which slots leave the index. Knows nothing of requests and lower tiers.
"""

from __future__ import annotations

from hicache.cache.counters import Counters
from hicache.cache.ledger import Owner, SlotLedger
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

    def take(self, component: str, n: int, owner: Owner) -> SlotArray | None:
        """`n` slots for `owner`, by eviction where needed; None, and nothing taken, if that is not enough."""
        slots = self.ledger.take(component, n, owner)
        if slots is None:
            self.evict(component, n - self.ledger.pools[component].n_free)
            slots = self.ledger.take(component, n, owner)
        return slots

    def evict(self, component: str, pages: int) -> int:
        """Give up to `pages` pages back to the pool; how many went."""
        eviction = self.index.evict(component, Tier.DEVICE, pages)
        for name, slots in eviction.freed.items():
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
