"""Copies: the one description of bytes to move that every copy engine takes.

Holds addresses and sizes, moves nothing. Whoever builds a table vouches that its addresses are
mapped for as long as it may run, and that no two targets overlap each other or a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.memory.frames import PlaneTable

AddressArray = NDArray[np.uint64]


class CopyError(RuntimeError):
    """Bytes could not be moved; what the targets hold is undefined."""


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Piece i: `nbytes[i]` bytes from address `source[i]` to address `target[i]`."""

    source: AddressArray
    target: AddressArray
    nbytes: AddressArray

    def __post_init__(self) -> None:
        columns = (self.source, self.target, self.nbytes)
        if any(column.dtype != np.uint64 or column.ndim != 1 for column in columns):
            raise ValueError("copy table: source, target and nbytes must be flat uint64 arrays")
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"copy table: lengths differ: {[len(column) for column in columns]}")

    @classmethod
    def load(cls, planes: PlaneTable) -> CopyTable:
        """Frames to the engine."""
        return cls(source=planes.host, target=planes.device, nbytes=planes.nbytes)

    @classmethod
    def store(cls, planes: PlaneTable) -> CopyTable:
        """The engine to frames."""
        return cls(source=planes.device, target=planes.host, nbytes=planes.nbytes)

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    @classmethod
    def joined(cls, tables: list[CopyTable]) -> CopyTable:
        """One table after the other."""
        empty = np.empty(0, dtype=np.uint64)
        return cls(
            np.concatenate([empty, *(table.source for table in tables)]),
            np.concatenate([empty, *(table.target for table in tables)]),
            np.concatenate([empty, *(table.nbytes for table in tables)]),
        )

    def chunks(self, chunk_bytes: int) -> Iterator[CopyTable]:
        """The same copy, in order, as tables of at most `chunk_bytes`; longer pieces are cut."""
        table = self._cut(chunk_bytes)
        ends = np.cumsum(table.nbytes)
        start, done_bytes = 0, 0
        while start < len(table):
            stop = int(np.searchsorted(ends, np.uint64(done_bytes + chunk_bytes), side="right"))
            yield CopyTable(table.source[start:stop], table.target[start:stop], table.nbytes[start:stop])
            start, done_bytes = stop, int(ends[stop - 1])

    def _cut(self, piece_bytes: int) -> CopyTable:
        """No piece longer than `piece_bytes`."""
        limit = np.uint64(piece_bytes)
        if not len(self) or int(self.nbytes.max()) <= piece_bytes:
            return self
        counts = np.maximum(-(-self.nbytes.astype(np.int64) // piece_bytes), 1)
        firsts = np.cumsum(counts) - counts
        offsets = (np.arange(int(counts.sum())) - np.repeat(firsts, counts)).astype(np.uint64) * limit
        return CopyTable(
            np.repeat(self.source, counts) + offsets,
            np.repeat(self.target, counts) + offsets,
            np.minimum(np.repeat(self.nbytes, counts) - offsets, limit),
        )


class CopyEngine(Protocol):
    """Moves bytes. Every engine leaves the same bytes in the same places."""

    def copy(self, table: CopyTable) -> None:
        """Move every piece and return when the last byte has landed. Pieces may move in any order.
        Reads and writes nothing outside the table. Releases the GIL while bytes move. May be called
        from several threads at once. Raises CopyError; targets are then undefined."""
