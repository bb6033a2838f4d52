"""Streams: the driver calls that move bytes and tell when they have landed.

One thin method for each call we make; every error is a CudaError. Decides nothing and keeps nothing.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Protocol

from controller.memory.cuda import NOT_READY, CudaError, IpcHandle, Library
from controller.transfers.copies import AddressArray

_NON_BLOCKING = 1
_BLOCKING_SYNC_NO_TIMING = 1 | 2
_BATCH_SINCE = 12080
_ORDER_STREAM, _ORDER_ANY = 1, 3


class StreamDriver(Protocol):
    """What copy engines need of a driver. Every method may be called from any thread and raises CudaError.
    Streams and events are named by the driver's own numbers and belong to one device."""

    def open_stream(self, device: int, *, urgent: bool) -> int:
        """A stream that never waits for the default one. `urgent` orders kernels; copies it cannot."""

    def close_stream(self, device: int, stream: int) -> None: ...

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queue one copy."""

    def can_batch(self, device: int) -> bool:
        """Whether `copy_batch` works here."""

    def copy_batch(
        self,
        device: int,
        stream: int,
        target: AddressArray,
        source: AddressArray,
        nbytes: AddressArray,
        *,
        stable: bool,
    ) -> None:
        """Queue many copies at once, in any order among themselves. All host memory among them is pinned,
        and none spans two registrations. `stable`: nobody writes the sources from before the call on,
        so that they may be read ahead of the stream's order."""

    def open_event(self, device: int) -> int:
        """An event of this process, not recorded yet."""

    def import_event(self, device: int, handle: bytes) -> int:
        """Another process's event (64 bytes); it must keep the event alive."""

    def close_event(self, device: int, event: int) -> None: ...

    def record(self, device: int, event: int, stream: int) -> None:
        """The event happens when what is queued on the stream now has ended."""

    def happened(self, device: int, event: int) -> bool:
        """Whether an event has happened; True also when it was never recorded. Waits for nothing."""

    def wait(self, device: int, event: int) -> None:
        """Block this thread, without the GIL and without spinning, until the event has happened."""


class _Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("number", c_int)]


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [("order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint)]


class CudaStreams:
    """See StreamDriver."""

    def __init__(self, library: Library) -> None:
        self._library = library
        address = library.entry_point("cuMemcpyBatchAsync", _BATCH_SINCE)
        # As CUDA 12.8 defined it: with failIdx, which version 13 dropped.
        prototype = ctypes.CFUNCTYPE(
            c_int, *[c_void_p] * 3, c_size_t, *[c_void_p] * 2, c_size_t, *[c_void_p] * 2
        )
        self._batch = prototype(address) if address else None

    def open_stream(self, device: int, *, urgent: bool) -> int:
        self._library.bind(device)
        least, greatest = c_int(), c_int()
        self._library.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        stream = c_void_p()
        priority = greatest if urgent else least
        self._library.call("cuStreamCreateWithPriority", byref(stream), c_uint(_NON_BLOCKING), priority)
        return stream.value or 0

    def close_stream(self, device: int, stream: int) -> None:
        self._library.bind(device)
        self._library.call("cuStreamDestroy_v2", c_void_p(stream))

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        self._library.bind(device)
        self._library.call(
            "cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream)
        )

    def can_batch(self, device: int) -> bool:
        return self._batch is not None

    def copy_batch(
        self,
        device: int,
        stream: int,
        target: AddressArray,
        source: AddressArray,
        nbytes: AddressArray,
        *,
        stable: bool,
    ) -> None:
        if self._batch is None:
            raise CudaError("cuMemcpyBatchAsync", 1, "not in this driver")
        self._library.bind(device)
        attributes = _BatchAttributes(order=_ORDER_ANY if stable else _ORDER_STREAM)
        first, failed = c_size_t(0), c_size_t()
        code = self._batch(
            target.ctypes.data,
            source.ctypes.data,
            nbytes.ctypes.data,
            len(nbytes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code:
            raise self._library.error(f"cuMemcpyBatchAsync (piece {failed.value})", code)

    def open_event(self, device: int) -> int:
        self._library.bind(device)
        event = c_void_p()
        self._library.call("cuEventCreate", byref(event), c_uint(_BLOCKING_SYNC_NO_TIMING))
        return event.value or 0

    def import_event(self, device: int, handle: bytes) -> int:
        self._library.bind(device)
        event = c_void_p()
        self._library.call("cuIpcOpenEventHandle", byref(event), IpcHandle.of(handle))
        return event.value or 0

    def close_event(self, device: int, event: int) -> None:
        self._library.bind(device)
        self._library.call("cuEventDestroy_v2", c_void_p(event))

    def record(self, device: int, event: int, stream: int) -> None:
        self._library.bind(device)
        self._library.call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def happened(self, device: int, event: int) -> bool:
        self._library.bind(device)
        code = self._library.status("cuEventQuery", c_void_p(event))
        if code not in (0, NOT_READY):
            raise self._library.error("cuEventQuery", code)
        return code == 0

    def wait(self, device: int, event: int) -> None:
        self._library.bind(device)
        self._library.call("cuEventSynchronize", c_void_p(event))
