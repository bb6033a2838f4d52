"""SlotLedger: who owns each L1 slot, and whether host memory is known to have its page.

Every slot has exactly one owner at any time; every change of owner is checked and made here. Chooses
no victims and knows nothing of pages or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hicache.core.pools import SlotPool
from hicache.core.words import NO_SLOT, SlotArray


class Owner(IntEnum):
    """Whose a slot is."""

    NOBODY = 0
    ENGINE = 1
    """Handed out by `alloc`, not inserted yet."""
    REQUEST = 2
    """A live request's private slot."""
    INDEX = 3
    """A page's payload."""
    TRANSFER = 4
    """The target of a load that is not settled: nobody may touch it."""


class Copy(IntEnum):
    """What is known of a resident page's copy in host memory."""

    UNKNOWN = 0
    UNDERWAY = 1
    KNOWN = 2
    REFUSED = 3
    """None: it had to go, and its backup was tried in vain. It goes without."""
    EXEMPT = 4
    """None, and none is wanted: output, where only prompts are backed up."""
    RETRY = 5
    """None: it had to go, and the host did not have what comes before it. Worth one more try."""


class SlotLedger:
    """The books of all components' L1 slots."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: slots per component."""
        self.pools: Mapping[str, SlotPool] = {name: SlotPool(size) for name, size in sizes.items()}
        self._owner = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        self._copy = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        self._uses = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
        self._user = {name: np.zeros(size, np.int64) for name, size in sizes.items()}

    def take(self, component: str, n: int, owner: Owner) -> SlotArray | None:
        """`n` free slots for `owner`, or None and nothing changed."""
        slots = self.pools[component].alloc(n)
        if slots is not None:
            self._owner[component][slots] = owner
        return slots

    def give(self, component: str, slots: SlotArray, owner: Owner, to: Owner) -> None:
        """Pass slots from one owner to another (NOBODY: back to the pool); -1 entries are left out.

        Raises ValueError before any change unless each is named once and is `owner`'s now.
        """
        slots = slots[slots != NO_SLOT]
        if not len(slots):
            return
        self.check(component, slots, owner)
        if to is Owner.NOBODY:
            self.pools[component].free(slots)
        self._owner[component][slots] = to
        self._copy[component][slots] = Copy.UNKNOWN
        self._uses[component][slots] = 0
        self._user[component][slots] = 0

    def check(self, component: str, slots: SlotArray, owner: Owner) -> None:
        """Raise ValueError unless all of `slots` (no -1 among them) are there once and `owner`'s."""
        owners = self._owner[component]
        if int(slots.min()) < 0 or int(slots.max()) >= len(owners):
            raise ValueError(f"slots of {component!r}: must be within [0, {len(owners)})")
        if len(np.unique(slots)) < len(slots):
            raise ValueError(f"slots of {component!r}: a slot is named twice")
        wrong = slots[owners[slots] != owner]
        if len(wrong):
            held_by = Owner(int(owners[wrong[0]])).name
            raise ValueError(
                f"slots of {component!r}: {int(wrong[0])} belongs to {held_by}, not {owner.name}"
            )

    def owned(self, component: str, *owners: Owner) -> SlotArray:
        """All slots of these owners."""
        return np.flatnonzero(np.isin(self._owner[component], owners)).astype(np.int32)

    def copies(self, component: str, slots: SlotArray) -> NDArray[np.uint8]:
        """What is known of each slot's host copy, as `Copy` values."""
        return self._copy[component][slots]

    def mark(self, component: str, slots: SlotArray, copy: Copy) -> None:
        self._copy[component][slots] = copy

    def marked(self, component: str, copy: Copy) -> SlotArray:
        """All slots with that mark."""
        return np.flatnonzero(self._copy[component] == copy).astype(np.int32)

    def dirty(self, component: str) -> SlotArray:
        """All slots with a page that host memory is not known to have, and should."""
        missing = np.isin(self._copy[component], (Copy.UNKNOWN, Copy.UNDERWAY, Copy.RETRY))
        return np.flatnonzero(missing & (self._owner[component] == Owner.INDEX)).astype(np.int32)

    def remark(self, component: str, slots: SlotArray, before: Copy, after: Copy) -> bool:
        """Turn one mark into another, where it is; -1 entries are left out. Whether there was one."""
        slots = slots[slots != NO_SLOT]
        slots = slots[self._copy[component][slots] == before]
        self._copy[component][slots] = after
        return bool(len(slots))

    def used(self, component: str, slots: SlotArray, request_id: str) -> None:
        """A request uses these pages: counted once, however often it is said before another one does. -1
        entries are left out. One byte and one word a slot, and forgotten with the page."""
        user = hash(request_id) or 1
        slots = slots[slots != NO_SLOT]
        slots = slots[self._user[component][slots] != user]
        self._user[component][slots] = user
        uses = self._uses[component]
        uses[slots] = np.minimum(uses[slots], 254) + 1

    def uses(self, component: str, slots: SlotArray) -> NDArray[np.uint8]:
        """How many requests have used each page since it came to L1; 255 for that or more."""
        return self._uses[component][slots]

    def host_memory_lost(self) -> None:
        """Another daemon answers now: nothing is known to have a copy."""
        for copies in self._copy.values():
            copies[np.isin(copies, (Copy.KNOWN, Copy.REFUSED, Copy.RETRY))] = Copy.UNKNOWN
