"""Layers of a load-back, one by one: cells in shared memory that the daemon sets as each layer lands.

A forward pass can start on layer 0 while layer 1 is still on its way: on the CPU by asking a row, on a GPU
by letting its stream wait (`hicache.client.cuda.StreamCells`). Owns the rows; moves no bytes.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hicache.client.messages import LayerCells
from hicache.client.regions import SharedRegion

CELL_BYTES = 8
_PAUSE_S = 0.00005


class LayerRow:
    """The cells of one load. Made by LayerBoard.take."""

    def __init__(self, cells: LayerCells, words: NDArray[np.uint64]) -> None:
        self.cells = cells
        """For `Client.start_load`."""
        self._words = words

    def landed(self, layer: int) -> bool:
        """Whether every byte of the layer, sidecars included, is in the engine's slots."""
        return int(self._words[layer]) >= self.cells.value

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Whether the layer landed within `timeout_s`. A load that fails never sets the cells that are left:
        ask its ticket."""
        deadline_s = time.monotonic() + timeout_s
        while not self.landed(layer):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def release(self) -> None:
        """After a load has failed: let every stream go that waits for one of these cells. What it computes
        from then on is not to be used."""
        self._words[:] = self.cells.value


class LayerBoard:
    """Rows of cells in a shared region of the client. Not safe for threads."""

    def __init__(
        self, region: SharedRegion, *, number: int, n_layers: int, n_rows: int, offset: int = 0
    ) -> None:
        """`number`: the region's place among the client's regions. `n_layers`: one more than the greatest
        layer of the layout. `n_rows`: loads at once. ValueError when they do not fit."""
        if offset % CELL_BYTES:
            raise ValueError(f"offset: {offset}; give a multiple of {CELL_BYTES}")
        self._cells = region.array(np.uint64, (n_rows, n_layers), offset)
        self._number = number
        self._offset = offset
        self._free = deque(range(n_rows))
        self._used: dict[LayerCells, int] = {}
        self._value = int(self._cells.max(initial=0))

    def take(self) -> LayerRow | None:
        """A row for one load; None when all are in use."""
        if not self._free:
            return None
        place = self._free.popleft()
        self._value += 1
        words = self._cells[place].view(np.uint64)
        cells = LayerCells(self._number, self._offset + place * words.nbytes, self._value)
        self._used[cells] = place
        return LayerRow(cells, words)

    def give_back(self, row: LayerRow) -> None:
        """When the load's ticket is settled, and no stream waits for the row."""
        self._free.append(self._used.pop(row.cells))
