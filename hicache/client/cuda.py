"""GPU memory and events of the engine, as other processes may use them: CUDA IPC, by plain ctypes.

Exports what PyTorch or CuPy (or anybody) allocated, detects what cannot be exported and says the remedy,
records ready events on the engine's streams, and lets a stream wait for a layer of a load-back. Waits for
nothing on the host. Allocates no GPU memory and synchronises no stream.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Protocol

import numpy as np

from hicache.client.messages import LayerCells, ReadyEvent
from hicache.client.regions import SharedRegion

_HANDLE_BYTES = 64
_UUID_BYTES = 16
_DEVICE_ORDINAL = 9
_IPC_CAPABLE = 10
_BLOCKING_NO_TIMING_INTERPROCESS = 1 | 2 | 4
_PORTABLE_AND_MAPPED = 1 | 2
_GREATER_OR_EQUAL = 0

CANNOT_EXPORT = (
    "this GPU memory cannot be given to another process by CUDA IPC: it comes from the virtual memory API or "
    "a memory pool. For PyTorch set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False (and no "
    "backend:cudaMallocAsync) before the first allocation; for vLLM turn sleep mode off; for CuPy use its "
    "default pool, not MemoryAsyncPool"
)


class CudaUnavailable(RuntimeError):  # noqa: N818 - the name is what it is
    """A driver call failed, or there is no driver; the message says which and why."""


class ExportDriver(Protocol):
    """What exporting needs of the driver. Any thread; raises CudaUnavailable. Leaves the calling thread's
    current device as it was."""

    def device_of(self, address: int) -> int:
        """The device's number in this process."""

    def uuid(self, device: int) -> bytes: ...

    def can_export(self, address: int) -> bool:
        """Whether the allocation is of the kind that CUDA IPC takes."""

    def extent(self, device: int, address: int) -> tuple[int, int]:
        """Start and size of the allocation."""

    def export_memory(self, device: int, start: int) -> bytes: ...
    def open_event(self, device: int) -> int:
        """An event that other processes may wait for."""

    def export_event(self, device: int, event: int) -> bytes: ...
    def close_event(self, device: int, event: int) -> None: ...
    def record(self, device: int, event: int, stream: int) -> None: ...
    def register_host(self, device: int, address: int, nbytes: int) -> int:
        """Make host memory accessible to the device; its address there."""

    def unregister_host(self, device: int, address: int) -> None: ...
    def wait_value(self, device: int, stream: int, address: int, value: int) -> None:
        """What is queued on the stream from now on waits until the uint64 there is at least `value`."""


class CudaRegion:
    """A part of one GPU allocation that the daemon may map. The memory stays the caller's, must outlive the
    client, and must not be freed while the daemon is attached."""

    def __init__(self, address: int, nbytes: int, *, driver: ExportDriver | None = None) -> None:
        """Raises ValueError for memory that cannot be exported, naming the remedy; CudaUnavailable."""
        if nbytes < 1:
            raise ValueError(f"nbytes: {nbytes}; a region has at least one byte")
        driver = driver or _driver()
        device = driver.device_of(address)
        if not driver.can_export(address):
            raise ValueError(CANNOT_EXPORT)
        start, extent = driver.extent(device, address)
        if address + nbytes > start + extent:
            raise ValueError(
                f"nbytes: {nbytes} bytes at offset {address - start} do not lie in one allocation of "
                f"{extent} bytes; export one region for each allocation"
            )
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.device_uuid = driver.uuid(device)
        self.handle = driver.export_memory(device, start)
        self.offset = address - start

    @classmethod
    def of(cls, array: object, *, driver: ExportDriver | None = None) -> CudaRegion:
        """All memory of a contiguous torch tensor, CuPy array, or other `__cuda_array_interface__`."""
        address, nbytes = _span(array)
        return cls(address, nbytes, driver=driver)


class ReadyRing:
    """Ready events for one device's streams. `record` before asking for a transfer, `settled` when its
    ticket is settled. Not safe for threads."""

    def __init__(self, device: int, *, driver: ExportDriver | None = None) -> None:
        """`device`: number in this process. Raises CudaUnavailable."""
        self._driver = driver or _driver()
        self._device = device
        self._uuid = self._driver.uuid(device)
        self._free: deque[tuple[int, ReadyEvent]] = deque()
        self._used: dict[ReadyEvent, int] = {}

    def record(self, stream: int) -> ReadyEvent:
        """An event that happens when everything queued on the stream so far has ended. `stream`: the
        driver's pointer (`torch.cuda.Stream.cuda_stream`, `cupy.cuda.Stream.ptr`)."""
        if not self._free:
            event = self._driver.open_event(self._device)
            handle = self._driver.export_event(self._device, event)
            self._free.append((event, ReadyEvent(handle, self._uuid)))
        event, ready = self._free.popleft()
        self._driver.record(self._device, event, stream)
        self._used[ready] = event
        return ready

    def settled(self, ready: ReadyEvent) -> None:
        """Nobody needs this event any more: it may be recorded anew."""
        self._free.append((self._used.pop(ready), ready))

    def close(self) -> None:
        """When every event is settled. Raises ValueError otherwise."""
        if self._used:
            raise ValueError(f"{len(self._used)} events belong to transfers that are not settled")
        while self._free:
            self._driver.close_event(self._device, self._free.pop()[0])


class StreamCells:
    """Lets streams wait for layers: the cells of a shared region, seen from a device."""

    def __init__(self, region: SharedRegion, device: int, *, driver: ExportDriver | None = None) -> None:
        """Pins the region. Raises CudaUnavailable."""
        self._driver = driver or _driver()
        self._device = device
        self._host = int(np.frombuffer(region.buffer, dtype=np.uint8).ctypes.data)
        nbytes = -(-region.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._address = self._driver.register_host(device, self._host, nbytes)

    def wait(self, stream: int, cells: LayerCells, layer: int) -> None:
        """What is queued on the stream from now on runs when the layer has landed; the host goes on at once.
        If the load fails, `LayerRow.release` lets the stream go."""
        self._driver.wait_value(self._device, stream, self._address + cells.offset + 8 * layer, cells.value)

    def close(self) -> None:
        """Unpin, when no stream waits any more. Raises CudaUnavailable."""
        self._driver.unregister_host(self._device, self._host)


def _span(array: object) -> tuple[int, int]:
    """Address and size in bytes of a contiguous array on a GPU."""
    name = type(array).__name__
    if hasattr(array, "untyped_storage") and hasattr(
        array, "data_ptr"
    ):  # torch: knows dtypes that the interface lacks
        if not array.is_contiguous():  # type: ignore[attr-defined]
            raise ValueError(f"{name}: not contiguous; export the tensor that it is a view of")
        return int(array.data_ptr()), int(array.numel() * array.element_size())  # type: ignore[attr-defined]
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"{name}: not GPU memory; give a torch CUDA tensor or a CuPy array")
    if interface.get("strides") is not None:
        raise ValueError(f"{name}: not contiguous; export the array that it is a view of")
    itemsize = np.dtype(interface["typestr"]).itemsize
    return int(interface["data"][0]), itemsize * int(np.prod(interface["shape"], dtype=np.int64))


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * _HANDLE_BYTES)]


def _driver() -> ExportDriver:
    global _loaded  # noqa: PLW0603 - one driver per process
    if _loaded is None:
        _loaded = CudaExports()
    return _loaded


_loaded: ExportDriver | None = None


class CudaExports:
    """See ExportDriver."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaUnavailable(f"no CUDA driver here ({error})") from error
        self._call("cuInit", c_uint(0))
        self._contexts: dict[int, c_void_p] = {}

    def device_of(self, address: int) -> int:
        return self._attribute(address, _DEVICE_ORDINAL)

    def uuid(self, device: int) -> bytes:
        found = (c_ubyte * _UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", byref(found), c_int(device))
        return bytes(found)

    def can_export(self, address: int) -> bool:
        return self._attribute(address, _IPC_CAPABLE) != 0

    def extent(self, device: int, address: int) -> tuple[int, int]:
        start, nbytes = c_uint64(), c_size_t()
        self._on(device, "cuMemGetAddressRange_v2", byref(start), byref(nbytes), c_uint64(address))
        return start.value, nbytes.value

    def export_memory(self, device: int, start: int) -> bytes:
        handle = _Handle()
        self._on(device, "cuIpcGetMemHandle", byref(handle), c_uint64(start))
        return bytes(handle)

    def open_event(self, device: int) -> int:
        event = c_void_p()
        self._on(device, "cuEventCreate", byref(event), c_uint(_BLOCKING_NO_TIMING_INTERPROCESS))
        return event.value or 0

    def export_event(self, device: int, event: int) -> bytes:
        handle = _Handle()
        self._on(device, "cuIpcGetEventHandle", byref(handle), c_void_p(event))
        return bytes(handle)

    def close_event(self, device: int, event: int) -> None:
        self._on(device, "cuEventDestroy_v2", c_void_p(event))

    def record(self, device: int, event: int, stream: int) -> None:
        self._on(device, "cuEventRecord", c_void_p(event), c_void_p(stream))

    def register_host(self, device: int, address: int, nbytes: int) -> int:
        seen = c_uint64()
        self._on(
            device, "cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(_PORTABLE_AND_MAPPED)
        )
        self._on(device, "cuMemHostGetDevicePointer_v2", byref(seen), c_void_p(address), c_uint(0))
        return seen.value

    def unregister_host(self, device: int, address: int) -> None:
        self._on(device, "cuMemHostUnregister", c_void_p(address))

    def wait_value(self, device: int, stream: int, address: int, value: int) -> None:
        self._on(
            device,
            "cuStreamWaitValue64_v2",
            c_void_p(stream),
            c_uint64(address),
            c_uint64(value),
            c_uint(_GREATER_OR_EQUAL),
        )

    def _attribute(self, address: int, number: int) -> int:
        value = c_int()
        self._call("cuPointerGetAttribute", byref(value), c_int(number), c_uint64(address))
        return value.value

    def _on(self, device: int, name: str, *arguments: object) -> None:
        """Call with the device's primary context, the one that PyTorch and CuPy use, and put back what was
        current."""
        context = self._contexts.get(device)
        if context is None:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        code = int(getattr(self._cuda, name)(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(c_int(code), byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            raise CudaUnavailable(f"{name}: {reason}")
