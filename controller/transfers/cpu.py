"""The CPU copy engine: plain copies between places of this process, without the GIL.

Three ways, by what the table looks like: pieces at even distances on both sides (neighbouring slots)
are one strided numpy copy; other small pieces are gathered into a buffer that stays in the cache and
scattered from there, many in two numpy calls; large pieces are moved one by one. A Python call for
each small piece would cost more than its bytes. Starts no thread; keeps nothing between copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from controller.transfers.copies import CopyTable

ONE_BY_ONE_BYTES = 16 << 10
"""From here a call for each piece costs less than moving its bytes twice (docs/data-path.md)."""

_STAGED_BYTES = 256 << 10
"""Gathered at a time: stays in the second-level cache on its way."""

_WORTH_A_CALL = 8
"""Pieces that are worth a numpy call of their own."""

_GIL_KEPT_UP_TO = 500
"""For as few elements, numpy keeps the GIL (NPY_BEGIN_THREADS_THRESHOLDED)."""

_FIRST_ADDRESS = 1 << 16
_END_ADDRESS = 1 << 47
_memory = memoryview((ctypes.c_ubyte * (_END_ADDRESS - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS))
"""The addresses that a process can have, as one buffer for numpy to index. Touched only where tables say."""


class CpuCopyEngine:
    """See CopyEngine."""

    def copy(self, table: CopyTable) -> None:
        table = _merged(table)
        in_run = np.zeros(len(table), dtype=np.bool_)
        for start, stop in _even_runs(table):
            _move_run(table, start, stop)
            in_run[start:stop] = True
        if in_run.any():
            table = _rows(table, ~in_run)
        large = table.nbytes >= ONE_BY_ONE_BYTES
        if large.any():
            _move_each(_rows(table, large))
            table = _rows(table, ~large)
        sizes, counts = np.unique(table.nbytes, return_counts=True)
        for nbytes, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            alike = _rows(table, table.nbytes == nbytes)
            if count < _WORTH_A_CALL:
                _move_each(alike)
            else:
                _move_staged(alike, nbytes)


def _rows(table: CopyTable, chosen: NDArray[np.bool_]) -> CopyTable:
    return CopyTable(table.source[chosen], table.target[chosen], table.nbytes[chosen])


def _merged(table: CopyTable) -> CopyTable:
    """Pieces that follow each other on both sides made one, and empty pieces left out."""
    if not table.nbytes.all():
        table = _rows(table, table.nbytes != 0)
    source, target, nbytes = table.source, table.target, table.nbytes
    if len(nbytes) < 2:
        return table
    begins = np.ones(len(nbytes), dtype=np.bool_)
    begins[1:] = (source[:-1] + nbytes[:-1] != source[1:]) | (target[:-1] + nbytes[:-1] != target[1:])
    if begins.all():
        return table
    starts = np.flatnonzero(begins)
    return CopyTable(source[starts], target[starts], np.add.reduceat(nbytes, starts))


def _even_runs(table: CopyTable) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of pieces of one size whose sources, and whose targets, are at even
    distances. Ranges do not overlap; short ones are left out."""
    if len(table) < _WORTH_A_CALL:
        return
    steps = np.stack([np.diff(table.source), np.diff(table.target), table.nbytes[1:]])
    changes = (steps[:, 1:] != steps[:, :-1]).any(axis=0)
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [steps.shape[1]]])
    long = np.diff(bounds) >= _WORTH_A_CALL - 1
    taken = 0
    for first_step, end_step in zip(bounds[:-1][long].tolist(), bounds[1:][long].tolist(), strict=True):
        start, stop = max(taken, first_step), end_step + 1
        if table.nbytes[start] != table.nbytes[start + 1]:
            start += 1
        if stop - start >= _WORTH_A_CALL:
            taken = stop
            yield start, stop


def _move_run(table: CopyTable, start: int, stop: int) -> None:
    shape = (stop - start, int(table.nbytes[start]))
    source, target = (
        np.ndarray(shape, np.uint8, _memory, first - _FIRST_ADDRESS, (second - first, 1))
        for first, second in (column[start : start + 2].tolist() for column in (table.source, table.target))
    )
    np.copyto(target, source)


def _move_staged(table: CopyTable, nbytes: int) -> None:
    """Rows of bytes; elements of `nbytes` are faster for the small, but only many of them free the GIL."""
    n_places = _END_ADDRESS - _FIRST_ADDRESS - nbytes
    elements = np.ndarray(n_places, f"V{nbytes}", _memory, 0, (1,))
    rows = np.ndarray((n_places, nbytes), np.uint8, _memory, 0, (1, 1))
    sources, targets = (column.astype(np.int64) - _FIRST_ADDRESS for column in (table.source, table.target))
    step = _STAGED_BYTES // nbytes
    if nbytes < 2048:
        step = max(step, _GIL_KEPT_UP_TO + 1)
    for start in range(0, len(table), step):
        to, of = targets[start : start + step], sources[start : start + step]
        if len(to) > _GIL_KEPT_UP_TO:
            elements[to] = elements[of]
        else:
            rows[to] = rows[of]


def _move_each(table: CopyTable) -> None:
    memmove = ctypes.memmove
    columns = (table.target.tolist(), table.source.tolist(), table.nbytes.tolist())
    for target, source, nbytes in zip(*columns, strict=True):
        memmove(target, source, nbytes)
