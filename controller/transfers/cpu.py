"""The CPU copy engine: plain copies between places of this process, without the GIL.

Adjacent pieces are merged. Large pieces are moved one by one by memmove, small ones by the thousand in
one system call (process_vm_readv on this process), which costs less than a Python call for each.
Starts no thread; holds no state of a copy.
"""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
from numpy.typing import NDArray

from controller.transfers.copies import AddressArray, CopyError, CopyTable

MEMMOVE_FROM_BYTES = 8192
"""Pieces of this size and more are moved one by one (FACTS, "Data plane 3.2": the two ways meet here)."""

_MAX_PIECES_PER_CALL = 1024
"""IOV_MAX of Linux."""

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class CpuCopyEngine:
    """See CopyEngine. `vectored=False` never uses process_vm_readv, as where it is not permitted."""

    def __init__(self, *, vectored: bool = True) -> None:
        self.vectored = vectored
        """Turns False by itself at the first refusal (a container's seccomp profile, say)."""

    def copy(self, table: CopyTable) -> None:
        source, target, nbytes = merged(table)
        small = nbytes < MEMMOVE_FROM_BYTES
        if not self.vectored or not small.any():
            _move_each(source, target, nbytes)
            return
        if not small.all():
            large = ~small
            _move_each(source[large], target[large], nbytes[large])
            source, target, nbytes = source[small], target[small], nbytes[small]
        for start in range(0, len(nbytes), _MAX_PIECES_PER_CALL):
            stop = start + _MAX_PIECES_PER_CALL
            self._move_batch(source[start:stop], target[start:stop], nbytes[start:stop])

    def _move_batch(self, source: AddressArray, target: AddressArray, nbytes: AddressArray) -> None:
        while len(nbytes):
            if not self.vectored:
                _move_each(source, target, nbytes)
                return
            moved_bytes = self._readv(source, target, nbytes)
            done = int(np.searchsorted(np.cumsum(nbytes), np.uint64(moved_bytes), side="right"))
            source, target, nbytes = source[done:], target[done:], nbytes[done:]  # it may end early

    def _readv(self, source: AddressArray, target: AddressArray, nbytes: AddressArray) -> int:
        """Bytes moved, from the first piece on; 0 when it is not permitted (and no more `vectored`)."""
        into, out_of = _vectors(target, nbytes), _vectors(source, nbytes)
        n = len(nbytes)
        moved_bytes = int(_readv(os.getpid(), into.ctypes.data, n, out_of.ctypes.data, n, 0))
        if moved_bytes > 0:
            return moved_bytes
        code = ctypes.get_errno() if moved_bytes else errno.EFAULT
        if code in (errno.EPERM, errno.ENOSYS):
            self.vectored = False
            return 0
        raise CopyError(f"process_vm_readv: {os.strerror(code)} ({n} pieces, {int(nbytes.sum())} bytes)")


def merged(table: CopyTable) -> tuple[AddressArray, AddressArray, AddressArray]:
    """Source, target and nbytes with pieces that follow each other on both sides made one, and
    empty pieces left out."""
    source, target, nbytes = table.source, table.target, table.nbytes
    if not nbytes.all():
        kept = nbytes != 0
        source, target, nbytes = source[kept], target[kept], nbytes[kept]
    if len(nbytes) < 2:
        return source, target, nbytes
    begins = np.ones(len(nbytes), dtype=np.bool_)
    begins[1:] = (source[:-1] + nbytes[:-1] != source[1:]) | (target[:-1] + nbytes[:-1] != target[1:])
    if begins.all():
        return source, target, nbytes
    starts = np.flatnonzero(begins)
    return source[starts], target[starts], np.add.reduceat(nbytes, starts)


def _move_each(source: AddressArray, target: AddressArray, nbytes: AddressArray) -> None:
    memmove = ctypes.memmove
    for to, of, n in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        memmove(to, of, n)


def _vectors(addresses: AddressArray, nbytes: AddressArray) -> NDArray[np.uint64]:
    """struct iovec[n]."""
    return np.stack([addresses, nbytes], axis=1)
