"""A rig for the index: an index with its pools, prompts made of letters, and an audit after every test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hicache.core.audit import audit
from hicache.core.coverage import Component, Coverage
from hicache.core.identity import Namespace
from hicache.core.policies import Policy
from hicache.core.pools import SlotPool
from hicache.core.tree import Index, Inserted
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray


class Rig:
    """An index beside the pools its slots come from; plays a caller that frees what it must."""

    def __init__(
        self,
        coverages: Mapping[str, Coverage],
        *,
        page_size: int = 1,
        tiers: tuple[Tier, ...] = (Tier.DEVICE,),
        n_slots: int = 4096,
        policies: Mapping[str, Policy] | None = None,
        branch_interval_pages: int = 1,
    ) -> None:
        self.page_size = page_size
        components = [Component(name, coverage) for name, coverage in coverages.items()]
        self.index = Index(
            page_size,
            components,
            tiers,
            policies=policies,
            branch_interval_pages=branch_interval_pages,
        )
        self.pools = {
            (name, tier): SlotPool(n_slots)
            for name in coverages
            for tier in tiers
            if tier is not Tier.STORAGE
        }
        self.tier = tiers[0]
        self.names = list(coverages)

    def namespace(self, salt: str = "") -> Namespace:
        return Namespace("m", "r", b"layout", self.page_size, salt=salt)

    def tokens(self, pages: str, tail: int = 0) -> TokenArray:
        """One page per letter; `tail` tokens more."""
        values = [1000 * ord(letter) + i for letter in pages for i in range(self.page_size)]
        return np.array(values + [7] * tail, dtype=np.int32)

    def insert(self, pages: str, *, tail: int = 0, salt: str = "", **only: list[int] | None) -> Inserted:
        """Insert with fresh slots. `only[c]` lists the pages of component c to offer (default: all)."""
        offered = {}
        for name in self.names:
            chosen = only.get(name)
            wanted = list(range(len(pages))) if chosen is None else chosen
            slots = self.pools[name, self.tier].alloc(len(wanted))
            assert slots is not None
            offered[name] = np.full(len(pages), NO_SLOT, dtype=np.int32)
            offered[name][wanted] = slots
        done = self.index.insert(self.namespace(salt), self.tokens(pages, tail), offered, tier=self.tier)
        for name, slots in done.redundant.items():
            self.pools[name, self.tier].free(slots)
        return done

    def boundary(self, pages: str, *, tail: int = 0, salt: str = "", limit: int | None = None) -> int:
        found = self.index.match(self.namespace(salt), self.tokens(pages, tail), limit_pages=limit)
        return found.boundaries[self.index.shape.tiers[-1]]

    def evict(self, name: str, pages: int, tier: Tier | None = None) -> tuple[int, int]:
        """Returns freed and short."""
        done = self.index.evict(name, tier or self.tier, pages)
        self.free(done.freed, tier or self.tier)
        return done.n_freed, done.short

    def free(self, freed: Mapping[str, SlotArray], tier: Tier) -> None:
        for name, slots in freed.items():
            self.pools[name, tier].free(slots)

    def resident(self, pages: str, name: str, tier: Tier | None = None) -> list[int]:
        """Pages of the prompt whose payload is READY."""
        cursor = self.index.match(self.namespace(), self.tokens(pages)).cursor
        state = self.index.residency(cursor, name, tier or self.tier, 0, cursor.boundary)
        return [int(page) for page in np.flatnonzero(state == 2)]

    def used(self, name: str) -> int:
        return len(self.pools[name, self.tier].used_slots())

    def check(self) -> None:
        found = audit(self.index, self.pools)
        assert not found, found
