"""Device regions: an engine's GPU memory, mapped into this process by CUDA IPC.

The driver maps whole allocations, one mapping per process and allocation, and one close unmaps it for
all: regions of one allocation share a mapping here, counted by the handle's bytes. An unclosed mapping
keeps a dead engine's memory allocated, so each region is closed by whoever opened it. A handle is 64
opaque bytes for the driver: checked for its length, never interpreted. Knows no layout, moves no bytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from controller.memory.cuda import HANDLE_BYTES, UUID_BYTES, CudaError, DeviceMemory
from controller.memory.regions import RegionError
from controller.requests import MappedRegion

MAX_MAPPINGS = 1024


@dataclass(frozen=True)
class DeviceHandle:
    """What an engine says of a region: its allocation's handle, where in it the region begins, how long it
    is, and on which device (by UUID: numbers differ between processes)."""

    handle: bytes
    offset: int
    nbytes: int
    device: bytes

    def __post_init__(self) -> None:
        """Raises RegionError for what no driver needs to be asked about."""
        if len(self.handle) != HANDLE_BYTES:
            raise RegionError(f"cuda.handle: {len(self.handle)} bytes; a CUDA IPC handle has {HANDLE_BYTES}")
        if len(self.device) != UUID_BYTES:
            raise RegionError(f"cuda.device: {len(self.device)} bytes; a device UUID has {UUID_BYTES}")
        if self.offset < 0 or self.nbytes < 1:
            raise RegionError(f"cuda: offset {self.offset}, {self.nbytes} bytes; a region has at least one")


@dataclass
class _Mapping:
    device: int
    address: int
    nbytes: int
    n_regions: int = 0


class DeviceRegion:
    """A part of a mapping, owned: `close` gives it up, and the last one of an allocation unmaps it. Whoever
    copies by `address` must have ended before."""

    def __init__(self, regions: DeviceRegions, handle: DeviceHandle, device: int, address: int) -> None:
        self._regions = regions
        self._handle = handle
        self._open = True
        self.device = device
        self.address = address
        self.nbytes = handle.nbytes

    @property
    def mapped(self) -> MappedRegion:
        """What the controller gets to know of it."""
        return MappedRegion(self.address, self.nbytes, on_device=True)

    def close(self) -> None:
        """Give the region up; a second time does nothing. Raises CudaError when unmapping failed."""
        if self._open:
            self._open = False
            self._regions.release(self._handle.handle)


class DeviceRegions:
    """All mappings of one process. Any thread; mapping takes milliseconds, so not the event loop's."""

    def __init__(self, memory: DeviceMemory, *, max_mappings: int = MAX_MAPPINGS) -> None:
        self._memory = memory
        self._max_mappings = max_mappings
        self._mutex = threading.Lock()
        self._mappings: dict[bytes, _Mapping] = {}

    @property
    def n_mappings(self) -> int:
        return len(self._mappings)

    def open(self, handle: DeviceHandle) -> DeviceRegion:
        """Map a region. Raises RegionError, with nothing left mapped, for a device that this process does
        not see, a handle that the driver refuses, a region outside its allocation, or too many mappings."""
        device = self._memory.devices().get(handle.device)
        if device is None:
            raise RegionError(
                f"cuda.device: {handle.device.hex()} is not among the {len(self._memory.devices())} devices "
                "that the daemon sees; give its container the same GPUs as the engine's"
            )
        with self._mutex:
            mapping = self._mappings.get(handle.handle)
            if mapping is None:
                mapping = self._map(device, handle.handle)
            if mapping.device != device or handle.offset + handle.nbytes > mapping.nbytes:
                self._unmap_unused(handle.handle)
                raise RegionError(
                    f"cuda: bytes [{handle.offset}, {handle.offset + handle.nbytes}) on device {device} do "
                    f"not lie in an allocation of {mapping.nbytes} bytes on device {mapping.device}"
                )
            mapping.n_regions += 1
            return DeviceRegion(self, handle, device, mapping.address + handle.offset)

    def release(self, handle: bytes) -> None:
        """One region of this allocation is given up; only DeviceRegion calls it, once."""
        with self._mutex:
            self._mappings[handle].n_regions -= 1
            self._unmap_unused(handle)

    def _map(self, device: int, handle: bytes) -> _Mapping:
        if len(self._mappings) >= self._max_mappings:
            raise RegionError(
                f"cuda: {len(self._mappings)} allocations are mapped, as many as are allowed; "
                "export fewer, larger allocations"
            )
        try:
            address = self._memory.open_memory(device, handle)
        except CudaError as error:
            raise RegionError(
                f"cuda.handle: device {device} refused it ({error.name}); is the engine alive, does its "
                "container share the host's IPC and PID name spaces, and is the memory from cudaMalloc "
                "(for PyTorch: expandable_segments:False)? See docs/gpu.md"
            ) from error
        try:
            base, nbytes = self._memory.extent(device, address)
        except CudaError as error:
            self._memory.close_memory(device, address)
            raise RegionError(f"cuda.handle: its size cannot be had ({error.name})") from error
        mapping = _Mapping(device, address, base + nbytes - address)
        self._mappings[handle] = mapping
        return mapping

    def _unmap_unused(self, handle: bytes) -> None:
        mapping = self._mappings[handle]
        if not mapping.n_regions:
            del self._mappings[handle]
            self._memory.close_memory(mapping.device, mapping.address)
