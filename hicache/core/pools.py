"""Pools: which slots of one component's memory in one tier are free.

Numbers only: owns no memory and knows no pages.
"""

from __future__ import annotations

import numpy as np

from hicache.core.words import NO_SLOT, SlotArray


class SlotPool:
    """Slots 0 .. n_slots - 1."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 0:
            raise ValueError(f"n_slots: {n_slots}; it cannot be negative")
        self.n_slots = n_slots
        self._free = np.arange(n_slots - 1, -1, -1, dtype=np.int32)
        """A stack; the first `n_free` entries count."""
        self._used = np.zeros(n_slots, dtype=np.bool_)
        self.n_free = n_slots

    def alloc(self, n: int) -> SlotArray | None:
        """n slots, all or nothing: None when fewer are free. They are the caller's until freed."""
        if n < 0:
            raise ValueError(f"alloc: {n} slots")
        if n > self.n_free:
            return None
        self.n_free -= n
        slots = self._free[self.n_free : self.n_free + n][::-1].copy()
        self._used[slots] = True
        return slots

    def free(self, slots: SlotArray) -> None:
        """Give slots back; entries of -1 are ignored. Raises ValueError for an unknown slot, a slot that is
        free already or named twice, before any change."""
        given = np.asarray(slots, dtype=np.int32)
        given = given[given != NO_SLOT]
        if not len(given):
            return
        if given.min() < 0 or given.max() >= self.n_slots:
            raise ValueError(f"free: a slot lies outside [0, {self.n_slots})")
        if not self._used[given].all():
            raise ValueError("free: a slot is free already")
        if len(np.unique(given)) < len(given):
            raise ValueError("free: a slot is named twice")
        self._used[given] = False
        self._free[self.n_free : self.n_free + len(given)] = given
        self.n_free += len(given)

    def used_slots(self) -> SlotArray:
        """All slots that are allocated, ascending."""
        return np.flatnonzero(self._used).astype(np.int32)
