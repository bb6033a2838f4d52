"""What one process knows to lie in a storage directory: sizes, in order of use. Pure counting.

Decides nothing and touches no file. Not thread-safe: FileBackend holds its mutex around every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class Ledger:
    """Bytes by object name. Every byte is an entry's, a stuck object's or reserved for one being written."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        """Of objects being written, not yet visible."""
        self._entries: OrderedDict[str, int] = OrderedDict()
        """Evictable objects, the least recently used first."""
        self._stuck: OrderedDict[str, int] = OrderedDict()
        """Objects that could not be deleted, the longest untried first."""
        self._entry_bytes = 0
        self._stuck_bytes = 0

    @property
    def n_objects(self) -> int:
        return len(self._entries) + len(self._stuck)

    @property
    def used_bytes(self) -> int:
        return self._entry_bytes + self._stuck_bytes

    @property
    def evictable_bytes(self) -> int:
        return self._entry_bytes

    def excess_bytes(self, nbytes: int) -> int:
        """How much must go before `nbytes` more fit; 0 or less when they do."""
        return self.used_bytes + self.reserved_bytes + nbytes - self.capacity_bytes

    def oldest(self) -> tuple[str, int] | None:
        """The least recently used object and its bytes; None when nothing is evictable."""
        return next(iter(self._entries.items()), None)

    def longest_stuck(self) -> str | None:
        """The stuck object that was not tried for the longest time; None when none is stuck."""
        return next(iter(self._stuck), None)

    def touch(self, name: str, nbytes: int) -> bool:
        """Count a known object as used just now and of that size. False when it is not known."""
        if name in self._stuck:
            self._stuck_bytes += nbytes - self._stuck[name]
            self._stuck[name] = nbytes
            return True
        if name not in self._entries:
            return False
        self._entry_bytes += nbytes - self._entries[name]
        self._entries[name] = nbytes
        self._entries.move_to_end(name)
        return True

    def add(self, name: str, nbytes: int) -> None:
        """Count an object, known or not, as used just now and of that size."""
        if not self.touch(name, nbytes):
            self._entries[name] = nbytes
            self._entry_bytes += nbytes

    def forget(self, name: str) -> None:
        """The object is gone, if it was known."""
        self._entry_bytes -= self._entries.pop(name, 0)
        self._stuck_bytes -= self._stuck.pop(name, 0)

    def set_aside(self, name: str) -> None:
        """The object cannot be deleted: it still counts, but stands in nobody's way."""
        nbytes = self._entries.pop(name, None)
        if nbytes is not None:
            self._entry_bytes -= nbytes
            self._stuck[name] = nbytes
            self._stuck_bytes += nbytes
        self._stuck.move_to_end(name)

    def start_again(self, objects: Iterable[tuple[str, int]]) -> None:
        """Replace all that is known by these names and sizes, the least recently used first."""
        self._entries = OrderedDict(objects)
        self._entry_bytes = sum(self._entries.values())
        self._stuck.clear()
        self._stuck_bytes = 0
