"""Holding: what a live request holds of L1, from its boundary when it begins to the end of what it inserts.

Pins exactly what the request may read, and says in which slots that is. Brings nothing and evicts nothing.
"""

from __future__ import annotations

import numpy as np

from hicache.cache.l1 import L1
from hicache.cache.loads import Load, Reach
from hicache.cache.requests import Request
from hicache.client.messages import Prompt
from hicache.core.tree import Inserted
from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray


def limit_pages_of(tokens: TokenArray, page_size: int) -> int:
    """Deepest boundary that leaves a token to compute."""
    return max(0, len(tokens) - 1) // page_size


class Holding:
    """What all requests of one cache hold."""

    def __init__(self, l1: L1, page_size: int) -> None:
        self._index = l1.index
        self._components = l1.components
        self._counters = l1.counters
        self._page_size = page_size

    def expected(self, load: Load) -> tuple[int, dict[str, SlotArray]]:
        """Boundary and slots that a request will have when the load has ended well."""
        boundary = len(load.tokens) // self._page_size
        cursor = self._index.match(load.namespace, load.tokens).cursor
        expected = {}
        for component in self._components:
            slots = np.full(boundary, NO_SLOT, np.int32)
            have = self._index.slots(cursor, component.name, Tier.DEVICE, 0, cursor.boundary)
            slots[: len(have)] = have
            if component.name in load.placements:
                slots[load.placements[component.name].pages] = load.placements[component.name].slots
            slots[: component.coverage.start(boundary)] = NO_SLOT
            expected[component.name] = slots
        return boundary, expected

    def admit(self, prompt: Prompt, reach: Reach) -> Request:
        cursor = reach.match.cursor
        request = Request(
            prompt=prompt,
            namespace=reach.namespace,
            boundary=0,
            cached_tokens=0,
            slots={},
            hit_pages={},
            branching_boundary=0,
            n_pages=0,
            private={},
            tokens=prompt.tokens[:0],
            cursor=cursor,
            receipt=self._index.pin(cursor, 0, tier=Tier.DEVICE),
        )
        self.hold(request, reach)
        return request

    def hold(self, request: Request, reach: Reach) -> None:
        """The request is at this boundary now, and holds what it needs there."""
        boundary = request.boundary = request.n_pages = reach.boundary
        request.cached_tokens = boundary * self._page_size
        request.tokens = request.prompt.tokens[: request.cached_tokens]
        request.cursor = self._index.match(reach.namespace, request.tokens).cursor
        receipt = self._index.pin(request.cursor, boundary, tier=Tier.DEVICE)
        self._index.unpin(request.receipt)
        request.receipt = receipt
        self._index.touch(request.cursor, boundary)
        request.hit_pages = reach.hit_pages()
        request.branching_boundary = max(
            reach.match.branching_boundary, reach.brought.branching_boundary, boundary
        )
        self._read_slots(request)

    def move_pin(self, request: Request, tokens: TokenArray, inserted: Inserted) -> None:
        """From now on the request holds what it needs at the end of what has been inserted."""
        receipt = self._index.pin(inserted.cursor, inserted.n_pages, tier=Tier.DEVICE)
        self._index.unpin(request.receipt)
        request.receipt, request.cursor = receipt, inserted.cursor
        request.n_pages = inserted.n_pages
        request.tokens = tokens[: inserted.n_pages * self._page_size].copy()
        self._read_slots(request)

    def _read_slots(self, request: Request) -> None:
        for component in self._components:
            n_pages = request.n_pages
            slots = np.full(n_pages, NO_SLOT, np.int32)
            if n_pages:
                start = component.coverage.start(n_pages)
                slots[start:] = self._index.slots(request.cursor, component.name, Tier.DEVICE, start, n_pages)
            request.slots[component.name] = slots

    def count_hit(self, request: Request) -> None:
        counters, limit_pages = self._counters, limit_pages_of(request.prompt.tokens, self._page_size)
        counters.begun += 1
        counters.asked_pages += limit_pages
        counters.hit_device_pages += request.hit_pages[Tier.DEVICE]
        counters.hit_host_pages += request.hit_pages[Tier.HOST]
        counters.hit_storage_pages += request.hit_pages[Tier.STORAGE]
        counters.no_overlap += limit_pages > 0 and not request.branching_boundary
        counters.no_boundary += request.branching_boundary > request.boundary
