"""The CPU copy engine: plain copies between places of this process, without the GIL.

Three ways, by what the table looks like: pieces at even distances on both sides (neighbouring slots)
are one strided numpy copy; other small pieces are gathered into a buffer that stays in the cache and
scattered from there, many in two numpy calls; large pieces are moved one by one. A Python call for
each small piece would cost more than its bytes. Starts no thread; keeps nothing between copies.
"""

from __future__ import annotations

import ctypes

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
        if len(table) >= _WORTH_A_CALL:
            table = _move_runs(table)
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


def _move_runs(table: CopyTable) -> CopyTable:
    """Move what stands at even distances on both sides: runs of pieces, and where runs of one shape
    stand at even distances themselves, all of them in one call. Returns the pieces that are left."""
    source, target = table.source.view(np.int64), table.target.view(np.int64)
    nbytes = table.nbytes.view(np.int64)
    starts, counts = _even(source, target, nbytes)
    starts, counts = starts[counts >= _WORTH_A_CALL], counts[counts >= _WORTH_A_CALL]
    if not len(starts):
        return table
    froms, tos, sizes = source[starts], target[starts], nbytes[starts]
    from_steps, to_steps = source[starts + 1] - froms, target[starts + 1] - tos
    firsts, repeats = _even(froms, tos, counts, sizes, from_steps, to_steps)
    firsts, repeats = firsts[repeats > 2], repeats[repeats > 2]
    alone = np.flatnonzero(~_covered(len(starts), firsts, repeats))
    firsts, repeats = np.append(firsts, alone), np.append(repeats, np.ones_like(alone))
    seconds = np.minimum(firsts + 1, len(starts) - 1)
    calls = np.stack(
        [
            *(repeats, counts[firsts], sizes[firsts]),
            *(froms[firsts], froms[seconds] - froms[firsts], from_steps[firsts]),
            *(tos[firsts], tos[seconds] - tos[firsts], to_steps[firsts]),
        ],
        axis=1,
    )
    for runs, pieces, size, of, of_outer, of_inner, to, to_outer, to_inner in calls.tolist():
        shape = (runs, pieces, size)
        np.copyto(
            np.ndarray(shape, np.uint8, _memory, to - _FIRST_ADDRESS, (to_outer, to_inner, 1)),
            np.ndarray(shape, np.uint8, _memory, of - _FIRST_ADDRESS, (of_outer, of_inner, 1)),
        )
    return _rows(table, ~_covered(len(table), starts, counts))


def _even(
    source: NDArray[np.int64], target: NDArray[np.int64], *shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs at even distances begin, and how many rows each has. Rows of a run of more than two
    have equal `shape`; a row may end one run and begin the next."""
    unlike = np.zeros(len(source) - 1, dtype=np.bool_)
    for column in shape:
        unlike |= column[1:] != column[:-1]
    never_even = np.where(unlike, np.arange(1, len(source)), 0)
    steps = np.stack([np.diff(source), np.diff(target), never_even])
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    bounds = np.concatenate([[0], changes, [len(source) - 1]])
    return bounds[:-1], np.diff(bounds) + 1


def _covered(n_rows: int, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows are in one of the ranges."""
    edges = np.zeros(n_rows + 1, dtype=np.int64)
    np.add.at(edges, starts, 1)
    np.subtract.at(edges, starts + counts, 1)
    covered: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return covered


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
