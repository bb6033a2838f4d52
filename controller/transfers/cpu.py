"""The CPU copy engine: plain copies between places of this process, without the GIL.

Three ways, by what the table looks like: pieces at even distances on both sides (neighbouring slots)
are one strided numpy copy; other small pieces are gathered into a buffer that stays in the cache and
scattered from there, thousands in two numpy calls; large pieces are moved one by one. A Python call for
each small piece would cost more than its bytes. Starts no thread; keeps nothing between copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from controller.transfers.copies import CopyTable

ONE_BY_ONE_BYTES = 32 << 10
"""From here a call for each piece costs little beside its bytes, and moves them once instead of twice."""

_STAGED_BYTES = 256 << 10
"""Gathered at a time: stays in the second-level cache on its way."""

_MIN_RUN = 8
"""Pieces at even distances that are worth a numpy call of their own."""

_MIN_STAGED = 8
"""Pieces of one size that are worth the set-up of staging."""

_FIRST_ADDRESS = 1 << 16
_END_ADDRESS = 1 << 47
_memory = memoryview((ctypes.c_ubyte * (_END_ADDRESS - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS))
"""The addresses that a process can have, as one buffer for numpy to index. Touched only where tables say."""


class CpuCopyEngine:
    """See CopyEngine."""

    def copy(self, table: CopyTable) -> None:
        table = _merged(table)
        large = table.nbytes >= ONE_BY_ONE_BYTES
        if large.any():
            _move_each(_rows(table, large))
            table = _rows(table, ~large)
        if not len(table):
            return
        in_run = np.zeros(len(table), dtype=np.bool_)
        for start, stop in _even_runs(table):
            _move_run(table, start, stop)
            in_run[start:stop] = True
        if in_run.any():
            table = _rows(table, ~in_run)
        sizes, counts = np.unique(table.nbytes, return_counts=True)
        for nbytes, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            alike = _rows(table, table.nbytes == nbytes)
            if count < _MIN_STAGED:
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
    """Ranges [start, stop) of at least _MIN_RUN pieces of one size whose sources, and whose targets,
    are at even distances. Ranges do not overlap."""
    if len(table) < _MIN_RUN:
        return
    steps = np.stack([np.diff(table.source), np.diff(table.target), table.nbytes[1:]])
    changes = (steps[:, 1:] != steps[:, :-1]).any(axis=0)
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [steps.shape[1]]])
    taken = 0
    for first_step, end_step in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end_step - first_step < _MIN_RUN - 1:
            continue
        start = max(taken, first_step)
        if table.nbytes[start] != table.nbytes[start + 1]:
            start += 1
        if end_step + 1 - start >= _MIN_RUN:
            taken = end_step + 1
            yield start, taken


def _move_run(table: CopyTable, start: int, stop: int) -> None:
    nbytes = int(table.nbytes[start])
    ends = (table.source[start : start + 2].tolist(), table.target[start : start + 2].tolist())
    source, target = (
        np.ndarray(stop - start, f"V{nbytes}", _memory, first - _FIRST_ADDRESS, (second - first,))
        for first, second in ends
    )
    np.copyto(target, source)


def _move_staged(table: CopyTable, nbytes: int) -> None:
    memory = np.ndarray(_END_ADDRESS - _FIRST_ADDRESS - nbytes, f"V{nbytes}", _memory, 0, (1,))
    sources, targets = (column.astype(np.int64) - _FIRST_ADDRESS for column in (table.source, table.target))
    step = max(1, _STAGED_BYTES // nbytes)
    for start in range(0, len(table), step):
        memory[targets[start : start + step]] = memory[sources[start : start + step]]


def _move_each(table: CopyTable) -> None:
    memmove = ctypes.memmove
    columns = (table.target.tolist(), table.source.tolist(), table.nbytes.tolist())
    for target, source, nbytes in zip(*columns, strict=True):
        memmove(target, source, nbytes)
