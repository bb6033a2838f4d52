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
        large = table.nbytes >= ONE_BY_ONE_BYTES
        if not large.all():
            small = _rows(table, ~large)
            if len(small) >= _WORTH_A_CALL:
                small = _move_runs(small)
            if len(small) >= _WORTH_A_CALL:
                small = _move_by_size(small)
            _move_each(small)
            table = _rows(table, large)
        _move_each(table)


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
    source, target, nbytes = (c.view(np.int64) for c in (table.source, table.target, table.nbytes))
    starts, counts = _even(source, target, nbytes)
    long = counts >= _WORTH_A_CALL
    left = ~_covered(long, counts)
    starts, counts = starts[long], counts[long]
    if not len(starts):
        return table
    of, to, size = source[starts], target[starts], nbytes[starts]
    of_step, to_step = source[starts + 1] - of, target[starts + 1] - to
    firsts, repeats = _even(of, to, counts, size, of_step, to_step)
    grid = repeats > 2
    alone = np.flatnonzero(~_covered(grid, repeats))
    for i, n in zip(firsts[grid].tolist(), repeats[grid].tolist(), strict=True):
        shape = (n, int(counts[i]), int(size[i]))
        source_steps = (int(of[i + 1] - of[i]), int(of_step[i]))
        target_steps = (int(to[i + 1] - to[i]), int(to_step[i]))
        _move_grid(shape, int(of[i]), source_steps, int(to[i]), target_steps)
    columns = (column[alone].tolist() for column in (counts, size, of, of_step, to, to_step))
    for n, row_bytes, of_first, of_distance, to_first, to_distance in zip(*columns, strict=True):
        _move_grid((n, row_bytes), of_first, (of_distance,), to_first, (to_distance,))
    return _rows(table, left)


def _move_grid(
    shape: tuple[int, ...],
    source: int,
    source_steps: tuple[int, ...],
    target: int,
    target_steps: tuple[int, ...],
) -> None:
    """Rows of `shape[-1]` bytes at these distances."""
    np.copyto(
        np.ndarray(shape, np.uint8, _memory, target - _FIRST_ADDRESS, (*target_steps, 1)),
        np.ndarray(shape, np.uint8, _memory, source - _FIRST_ADDRESS, (*source_steps, 1)),
    )


def _even(
    source: NDArray[np.int64], target: NDArray[np.int64], *shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where runs at even distances begin, and how many rows each has, two at least (if there are two).
    Rows of a run of more than two have equal `shape`. The last row of a run is the first of the next."""
    source_steps, target_steps = source[1:] - source[:-1], target[1:] - target[:-1]
    changes = (source_steps[1:] != source_steps[:-1]) | (target_steps[1:] != target_steps[:-1])
    for column in shape:
        unlike = column[1:] != column[:-1]
        changes |= unlike[1:] | unlike[:-1]
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(source) - 1]])
    return bounds[:-1], bounds[1:] - bounds[:-1] + 1


def _covered(chosen: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows are in one of the chosen runs of `_even`."""
    steps = np.repeat(chosen, counts - 1)
    covered = np.zeros(len(steps) + 1, dtype=np.bool_)
    covered[1:] = steps
    covered[:-1] |= steps
    return covered


def _move_by_size(table: CopyTable) -> CopyTable:
    """Move pieces of which there are many of one size. Returns the pieces that are left."""
    sizes, counts = np.unique(table.nbytes, return_counts=True)
    for nbytes in sizes[counts >= _WORTH_A_CALL].tolist():
        _move_staged(_rows(table, table.nbytes == nbytes), nbytes)
    return _rows(table, np.isin(table.nbytes, sizes[counts < _WORTH_A_CALL]))


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
