"""Shared regions: seen by both processes, never resized, clear refusals."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import pytest

from hicache.client import SharedRegion


def test_what_one_mapping_writes_the_other_reads() -> None:
    with SharedRegion(4096) as region, mmap.mmap(region.fd, 4096) as other:
        region.array(np.float32, (8, 2), offset=64)[3, 1] = 2.5
        assert np.frombuffer(other, np.float32, 16, 64)[7] == 2.5


def test_a_region_can_neither_shrink_nor_grow_nor_lose_its_seals() -> None:
    with SharedRegion(4096) as region:
        for size in (100, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_views_that_do_not_fit_are_refused() -> None:
    with SharedRegion(100) as region:
        assert region.array(np.uint8, (100,)).size == 100
        for shape, offset in [((101,), 0), ((1,), 100), ((1,), -1)]:
            with pytest.raises(ValueError, match="do not fit"):
                region.array(np.uint8, shape, offset)


def test_sizes_that_make_no_sense_are_refused() -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one byte"):
            SharedRegion(size)


def test_a_machine_that_is_too_small_says_so_at_once() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((MemoryError, OSError)):
        SharedRegion(1 << 60)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_views_outlive_close_and_the_region_does_not() -> None:
    region = SharedRegion(64)
    view = region.array(np.uint8, (64,))
    region.close()
    region.close()
    view[:] = 7
    assert view.sum() == 7 * 64
    for use in (lambda: region.fd, lambda: region.buffer):
        with pytest.raises(ValueError, match="closed"):
            use()
