"""Routes: which copy engine moves which addresses.

One daemon serves engines on several GPUs and engines without one: a piece goes to the engine of the device
that one of its ends lies on, and to the CPU engine when both ends are host memory. Owns only the map.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from controller.transfers.copies import AddressArray, CopyEngine, CopyTable
from controller.transfers.cuda.pieces import rows

_HOST = -1


class Routes:
    """A CopyEngine over others. `add` and `remove` may be called while copies run: a copy sees the map as it
    was when the copy began, and whoever removes a route has drained its copies."""

    def __init__(self, host: CopyEngine) -> None:
        self._host = host
        self._mutex = threading.Lock()
        self._ends: dict[int, tuple[int, CopyEngine]] = {}
        """First address -> first address after, engine."""
        self._counts: dict[int, int] = {}
        self._map: tuple[AddressArray, AddressArray, list[CopyEngine]] = self._drawn()

    def add(self, address: int, nbytes: int, engine: CopyEngine) -> None:
        """Send what touches these addresses to `engine`. Equal ranges are counted; others that overlap are
        fine as long as they name the same engine."""
        with self._mutex:
            end, _ = self._ends.get(address, (0, engine))
            self._ends[address] = max(end, address + nbytes), engine
            self._counts[address] = self._counts.get(address, 0) + 1
            self._map = self._drawn()

    def remove(self, address: int) -> None:
        """Undo one `add` of a range that begins there."""
        with self._mutex:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address], self._ends[address]
                self._map = self._drawn()

    def copy(self, table: CopyTable) -> None:
        starts, ends, engines = self._map
        if not engines:
            self._host.copy(table)
            return
        owner = np.maximum(_owners(starts, ends, table.source), _owners(starts, ends, table.target))
        for number in np.unique(owner).tolist():
            engine = self._host if number == _HOST else engines[number]
            engine.copy(rows(table, owner == number))

    def _drawn(self) -> tuple[AddressArray, AddressArray, list[CopyEngine]]:
        starts = np.array(sorted(self._ends), dtype=np.uint64)
        ends = np.array([self._ends[start][0] for start in starts.tolist()], dtype=np.uint64)
        return starts, np.maximum.accumulate(ends), [self._ends[start][1] for start in starts.tolist()]


def _owners(starts: AddressArray, ends: AddressArray, addresses: AddressArray) -> NDArray[np.int64]:
    """Which range each address lies in; -1 for none."""
    found = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside = found >= 0
    inside[inside] = addresses[inside] < ends[found[inside]]
    return np.where(inside, found, _HOST)
