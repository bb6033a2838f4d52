"""No cache: the surface of a prefix cache that remembers nothing. The run that all others are compared with.

Owns free lists of slots and gives every request's slots back when it ends. Shares no code with the
product, so that a bug there cannot hide in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hicache.core.words import NO_SLOT, SlotArray, Tier, TokenArray


@dataclass
class ColdRequest:
    """A request that starts from nothing."""

    slots: dict[str, SlotArray]
    private: Mapping[str, int]
    boundary: int = 0
    branching_boundary: int = 0
    hit_pages: Mapping[Tier, int] = field(default_factory=dict)


class NoCache:
    """Hands out slots; every prompt is computed from its first token."""

    def __init__(self, n_slots: Mapping[str, int]) -> None:
        self._n_slots = dict(n_slots)
        self._unused = {name: list(range(n)) for name, n in n_slots.items()}

    def alloc(self, component: str, n: int) -> SlotArray | None:
        unused = self._unused[component]
        if n > len(unused):
            return None
        taken, self._unused[component] = unused[:n], unused[n:]
        return np.array(taken, dtype=np.int32)

    def free(self, component: str, slots: SlotArray) -> None:
        self._unused[component].extend(int(slot) for slot in slots if slot >= 0)

    def prefetch(self, request_id: str, tokens: TokenArray) -> None:
        """There is nowhere to fetch from."""

    def begin(self, request_id: str, tokens: TokenArray, *, private: Mapping[str, int]) -> ColdRequest:
        return ColdRequest({name: np.empty(0, dtype=np.int32) for name in self._unused}, dict(private))

    def advance(self, request: ColdRequest, boundary: int) -> None:
        """What is out of the window goes with the next insertion."""

    def checkpoint(self, request: ColdRequest, component: str) -> int:
        """Nobody would use it."""
        return NO_SLOT

    def insert(self, request: ColdRequest, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> None:
        """Keep what is offered for the request alone: until it ends it may read these slots."""
        for name, offered in slots.items():
            before = request.slots[name]
            self.free(name, np.setdiff1d(before, offered))
            request.slots[name] = offered.copy()

    def finish(self, request: ColdRequest, tokens: TokenArray, slots: Mapping[str, SlotArray]) -> None:
        self.insert(request, tokens, slots)
        self.abort(request)

    def abort(self, request: ColdRequest) -> None:
        for name, held in request.slots.items():
            self.free(name, held)
        for name, slot in request.private.items():
            self.free(name, np.array([slot], dtype=np.int32))

    def poll(self) -> int:
        return 0

    def audit(self) -> list[str]:
        """Every slot is unused between requests."""
        return [
            f"{name}: of {self._n_slots[name]} slots {len(unused)} came back, {len(set(unused))} different"
            for name, unused in self._unused.items()
            if sorted(unused) != list(range(self._n_slots[name]))
        ]

    def close(self) -> None:
        """Holds nothing."""
