"""Regions: an engine's memory, mapped into this process.

Accepts only a sealed memfd, because a file that its owner can shrink kills whoever touches the lost
pages. Knows no layout and moves no bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from types import TracebackType

import numpy as np

from controller.requests import MappedRegion

_F_SEAL_FUTURE_WRITE = 0x0010


class RegionError(ValueError):
    """A region that cannot be mapped; the message says what to do."""


class Region:
    """One mapping, owned: `close` unmaps it. Whoever copies by `address` must have ended before."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.nbytes = len(mapping)
        self.address = address_of(mapping)

    @property
    def mapped(self) -> MappedRegion:
        """What the controller gets to know of it."""
        return MappedRegion(self.address, self.nbytes)

    def close(self) -> None:
        """Unmap; a second time does nothing."""
        self._mapping.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def map_region(fd: int, nbytes: int) -> Region:
    """Map the first `nbytes` of a memfd for reading and writing. The caller keeps the descriptor and may
    close it at once. Raises RegionError when the file is not sealed against shrinking, is shorter
    than `nbytes`, or cannot be mapped."""
    if nbytes < 1:
        raise RegionError(f"region.nbytes: {nbytes}; a region has at least one byte")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise RegionError(
            f"region: the descriptor is not a memfd ({error.strerror}); "
            "create it with memfd_create(..., MFD_ALLOW_SEALING)"
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RegionError("region: not sealed against shrinking; add F_SEAL_SHRINK before attaching")
    if seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        raise RegionError("region: sealed against writing; load-back must write, so leave F_SEAL_WRITE off")
    if size < nbytes:
        raise RegionError(
            f"region.nbytes: {nbytes} bytes were announced, the file has {size}; announce its true size"
        )
    try:
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise RegionError(
            f"region: {nbytes} bytes could not be mapped ({error.strerror}); "
            "pass a descriptor opened for reading and writing"
        ) from error
    return Region(mapping)


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins in this process. Keeps no reference to it."""
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
