"""SharedRegion: engine memory that the daemon maps too.

Owns one sealed memfd and its mapping. Never resizes it: the seals promise every process that maps the
region that it stays as long as it is, so that touching it cannot fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import ExitStack
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike, NDArray

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by the mmap module of Python 3.11
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRegion:
    """`nbytes` of zeroed, prefaulted memory that can be handed to another process by its fd.

    Raises ValueError for a size below 1 byte, MemoryError when the machine cannot give that much.
    """

    def __init__(self, nbytes: int, *, name: str = "hicache-l1") -> None:
        if nbytes < 1:
            raise ValueError(f"nbytes: {nbytes}; a region has at least one byte")
        self.nbytes = nbytes
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as undo:
            undo.callback(os.close, self._fd)
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map: mmap.mmap | None = mmap.mmap(self._fd, nbytes)
            _prefault(self._map, nbytes)
            undo.pop_all()

    @property
    def fd(self) -> int:
        """Stays the region's own: duplicate it to keep it beyond `close`."""
        if self._map is None:
            raise ValueError("the region is closed")
        return self._fd

    @property
    def buffer(self) -> memoryview:
        """All of it, writable. Torch engines: `torch.frombuffer(region.buffer, dtype=..., offset=...)`."""
        if self._map is None:
            raise ValueError("the region is closed")
        return memoryview(self._map)

    def array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[np.generic]:
        """A writable numpy view of the bytes from `offset` on; ValueError when they do not fit."""
        wanted = np.dtype(dtype)
        nbytes = wanted.itemsize * int(np.prod(shape, dtype=np.int64))
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"offset {offset} + {nbytes} bytes of {wanted}{shape} do not fit {self.nbytes} bytes"
            )
        return np.ndarray(shape, dtype=wanted, buffer=self.buffer, offset=offset)

    def close(self) -> None:
        """Give up the fd; the mapping goes with the last view of it. A second time does nothing."""
        if self._map is not None:
            os.close(self._fd)
            self._map = None

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prefault(mapping: mmap.mmap, nbytes: int) -> None:
    """Back every page now: a machine that is too small says so here, not by a signal in the middle of a
    forward pass. Kernels without the advice fault pages in as they are touched."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: an old kernel
            raise MemoryError(f"cannot back a shared region of {nbytes} bytes: {error.strerror}") from error
