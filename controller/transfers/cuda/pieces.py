"""Pieces: a copy table made ready for a GPU: neighbours joined, long pieces and registrations' seams cut.

Pure arithmetic on the table's columns; the bytes that it describes stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from controller.transfers.copies import AddressArray, CopyTable
from hicache.core.words import BoolArray


def rows(table: CopyTable, chosen: BoolArray) -> CopyTable:
    return CopyTable(table.source[chosen], table.target[chosen], table.nbytes[chosen])


def coalesced(table: CopyTable) -> CopyTable:
    """Pieces that follow each other on both sides made one; empty pieces left out."""
    if not table.nbytes.all():
        table = rows(table, table.nbytes != 0)
    if len(table) < 2:
        return table
    source_end, target_end = table.source + table.nbytes, table.target + table.nbytes
    begins = np.ones(len(table), dtype=np.bool_)
    begins[1:] = (source_end[:-1] != table.source[1:]) | (target_end[:-1] != table.target[1:])
    if begins.all():
        return table
    starts = np.flatnonzero(begins)
    return CopyTable(table.source[starts], table.target[starts], np.add.reduceat(table.nbytes, starts))


def cut_at(table: CopyTable, seams: AddressArray) -> CopyTable:
    """No piece's source or target spans one of these ascending addresses."""
    for side in ("source", "target"):
        table = _cut_one(table, seams, side)
    return table


def _cut_one(table: CopyTable, seams: AddressArray, side: str) -> CopyTable:
    starts: AddressArray = getattr(table, side)
    first = np.searchsorted(seams, starts, side="right")
    last = np.searchsorted(seams, starts + table.nbytes, side="left")
    counts = np.maximum(last - first, 0) + 1
    if not len(table) or int(counts.max()) == 1:
        return table
    owner = np.repeat(np.arange(len(table)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[owner].copy()
    inner = place > 0
    begins[inner] = seams[(first[owner] + place - 1)[inner]]
    ends = (starts + table.nbytes)[owner]
    cut = place < counts[owner] - 1
    ends[cut] = seams[(first[owner] + place)[cut]]
    offsets = begins - starts[owner]
    return CopyTable(table.source[owner] + offsets, table.target[owner] + offsets, ends - begins)


def no_longer_than(table: CopyTable, piece_bytes: int) -> CopyTable:
    """Long pieces cut, so that as many hands as there are can share them."""
    counts = np.maximum(-(-table.nbytes.astype(np.int64) // piece_bytes), 1)
    if not len(table) or int(counts.max()) == 1:
        return table
    owner = np.repeat(np.arange(len(table)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = place.astype(np.uint64) * np.uint64(piece_bytes)
    nbytes = np.minimum(table.nbytes[owner] - offsets, np.uint64(piece_bytes))
    return CopyTable(table.source[owner] + offsets, table.target[owner] + offsets, nbytes)


def portions(table: CopyTable, n_pieces: int) -> Iterator[CopyTable]:
    """The same pieces as tables of at most `n_pieces`."""
    for start in range(0, len(table), n_pieces):
        part = slice(start, start + n_pieces)
        yield CopyTable(table.source[part], table.target[part], table.nbytes[part])
