"""The CUDA driver as this process calls it: plain ctypes on libcuda, no toolkit and no framework.

Owns the library, the error translation and the contexts. Every call that needs a context binds the
device's primary one to the calling thread first: threads that never saw the device fail otherwise. Maps
and registers memory for whoever asks; decides nothing about it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Protocol

HANDLE_BYTES = 64
"""Size of an IPC handle, of memory or of an event."""
UUID_BYTES = 16

INVALID_VALUE = 1
NO_DEVICE = 100
NOT_READY = 600
_ALREADY_REGISTERED = 712
_PORTABLE_AND_MAPPED = 0x01 | 0x02
_IPC_LAZY_PEER_ACCESS = 1
_HOST_POINTER_IS_DEVICE_POINTER = 91
_STICKY = frozenset({214, 220, 700, 702, 709, 710, 713, 714, 715, 716, 717, 718, 719, 721})
"""Errors after which a context is lost: every later call fails, and no byte moves any more."""


class CudaError(OSError):
    """A driver call failed. `code` is the driver's number."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(code, f"{call}: {name}")
        self.call = call
        self.code = code
        self.name = name

    @property
    def context_lost(self) -> bool:
        return self.code in _STICKY


class DeviceMemory(Protocol):
    """What mapping and pinning need of a driver. Every method may be called from any thread and raises
    CudaError. Devices are named by their number in this process."""

    def devices(self) -> Mapping[bytes, int]:
        """Number by UUID (16 bytes). Numbers differ between processes; UUIDs do not."""

    def sees_host_addresses(self, device: int) -> bool:
        """Whether pinned host memory has the same addresses on the device as on the host. Where it has not
        (WSL2, for one), only plain copies may name host memory: batches and kernels fault."""

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map another process's whole allocation; its address here. Once per handle at a time."""

    def close_memory(self, device: int, address: int) -> None:
        """Unmap what `open_memory` mapped."""

    def extent(self, device: int, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address lies in."""

    def allocate(self, device: int, nbytes: int) -> int:
        """Memory of this process on the device; its address."""

    def free(self, device: int, address: int) -> None:
        """Give back what `allocate` gave."""

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory, for every device."""

    def unregister_host(self, address: int) -> None:
        """Undo the registration that began at `address`."""


class IpcHandle(ctypes.Structure):
    """An opaque handle; the driver takes it by value."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]

    @classmethod
    def of(cls, handle: bytes) -> IpcHandle:
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"handle: {len(handle)} bytes; a CUDA IPC handle has {HANDLE_BYTES}")
        return cls.from_buffer_copy(handle)


class Library:
    """libcuda, its functions by name, and the devices' primary contexts."""

    def __init__(self) -> None:
        """Raises CudaError when there is no driver or no device."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("dlopen libcuda.so.1", NO_DEVICE, str(error)) from error
        self._contexts: dict[int, c_void_p] = {}
        self._mutex = threading.Lock()
        self.call("cuInit", c_uint(0))
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if not count.value:
            raise CudaError("cuDeviceGetCount", NO_DEVICE, "no CUDA device")
        self.n_devices = count.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a function and raise CudaError for anything but success. Releases the GIL."""
        code = self.status(name, *arguments)
        if code:
            raise self.error(name, code)

    def status(self, name: str, *arguments: object) -> int:
        """Call a function and return the driver's number, for calls whose failure is an answer."""
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise CudaError(name, INVALID_VALUE, "this driver does not have it; update the driver") from None
        return int(function(*arguments))

    def error(self, call: str, code: int) -> CudaError:
        text = c_char_p()
        self._cuda.cuGetErrorName(c_int(code), byref(text))
        return CudaError(call, code, text.value.decode() if text.value else f"error {code}")

    def bind(self, device: int) -> None:
        """Make the device's primary context this thread's current one."""
        with self._mutex:
            context = self._contexts.get(device)
            if context is None:
                context = c_void_p()
                handle = c_int()
                self.call("cuDeviceGet", byref(handle), c_int(device))
                self.call("cuDevicePrimaryCtxRetain", byref(context), handle)
                self._contexts[device] = context
        self.call("cuCtxSetCurrent", context)

    def attribute(self, device: int, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), c_int(number), c_int(device))
        return value.value

    def entry_point(self, name: str, version: int) -> int | None:
        """Address of a function as CUDA `version` (say 12080) defines it; None where the driver is older."""
        address, found = c_void_p(), c_int()
        try:
            code = self.status(
                "cuGetProcAddress_v2",
                c_char_p(name.encode()),
                byref(address),
                c_int(version),
                c_uint64(0),
                byref(found),
            )
        except CudaError:
            return None
        return address.value if code == 0 else None


class CudaMemory:
    """See DeviceMemory."""

    def __init__(self, library: Library) -> None:
        """Raises CudaError."""
        self._library = library
        self._devices: dict[bytes, int] = {}
        for device in range(library.n_devices):
            uuid = (c_ubyte * UUID_BYTES)()
            library.call("cuDeviceGetUuid_v2", byref(uuid), c_int(device))
            self._devices[bytes(uuid)] = device

    def devices(self) -> Mapping[bytes, int]:
        return self._devices

    def sees_host_addresses(self, device: int) -> bool:
        return bool(self._library.attribute(device, _HOST_POINTER_IS_DEVICE_POINTER))

    def open_memory(self, device: int, handle: bytes) -> int:
        self._library.bind(device)
        address = c_uint64()
        self._library.call(
            "cuIpcOpenMemHandle_v2", byref(address), IpcHandle.of(handle), c_uint(_IPC_LAZY_PEER_ACCESS)
        )
        return address.value

    def close_memory(self, device: int, address: int) -> None:
        self._library.bind(device)
        self._library.call("cuIpcCloseMemHandle", c_uint64(address))

    def extent(self, device: int, address: int) -> tuple[int, int]:
        self._library.bind(device)
        base, nbytes = c_uint64(), c_size_t()
        self._library.call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), c_uint64(address))
        return base.value, nbytes.value

    def allocate(self, device: int, nbytes: int) -> int:
        self._library.bind(device)
        address = c_uint64()
        self._library.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, device: int, address: int) -> None:
        self._library.bind(device)
        self._library.call("cuMemFree_v2", c_uint64(address))

    def register_host(self, address: int, nbytes: int) -> None:
        self._library.bind(0)
        self._library.call(
            "cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(_PORTABLE_AND_MAPPED)
        )

    def unregister_host(self, address: int) -> None:
        self._library.bind(0)
        self._library.call("cuMemHostUnregister", c_void_p(address))
