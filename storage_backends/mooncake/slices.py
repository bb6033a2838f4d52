"""Batches in parts that one call carries, and a bound on objects under way in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from storage_backends.base import Item

MOST_SLICES = 512
"""Objects in one call. Beyond some 2000 to one peer the library fails for good."""
MOST_BYTES = 64 << 20
"""Bytes in one call: what is late on a slow link."""


def parts(items: Sequence[tuple[int, Item]]) -> Iterator[Sequence[tuple[int, Item]]]:
    """In order, each at most MOST_SLICES long and, unless it is a single item, at most MOST_BYTES. No key is
    twice in a part: the library then says that it filled both ranges, and has filled one."""
    begin, nbytes = 0, 0
    keys: set[str] = set()
    for place, (_, item) in enumerate(items):
        nbytes += item.nbytes
        if nbytes > MOST_BYTES or place - begin == MOST_SLICES or item.key in keys:
            if place > begin:
                yield items[begin:place]
            begin, nbytes = place, item.nbytes
            keys.clear()
        keys.add(item.key)
    if begin < len(items):
        yield items[begin:]


class SliceBudget:
    """Objects that may be under way at once. Taken all or nothing: parts of it held while waiting for the
    rest would have callers wait for each other."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._freed = threading.Condition()

    def take(self, n: int, timeout_s: float) -> bool:
        """True obliges to `give_back`. `n` must not exceed the total."""
        with self._freed:
            if not self._freed.wait_for(lambda: self._free >= n, max(0.0, timeout_s)):
                return False
            self._free -= n
            return True

    def give_back(self, n: int) -> None:
        with self._freed:
            self._free += n
            self._freed.notify_all()
