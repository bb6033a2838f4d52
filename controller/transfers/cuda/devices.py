"""The daemon's GPUs: everything of CUDA that it owns, behind one door.

Pins the slab, maps engines' regions, builds a device's copy engine when the first engine on it attaches
(measuring which way is cheaper), and takes all of it down. Without a driver nothing of this exists and the
daemon works as before. Runs on no event loop: whoever calls from one uses a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np

from controller.memory.cuda import CudaError, CudaMemory, DeviceMemory, Library
from controller.memory.device_regions import DeviceHandle, DeviceRegion, DeviceRegions
from controller.memory.pinning import HostMemory, Pinning, pin, spread
from controller.memory.regions import RegionError
from controller.requests import ReadyEvent
from controller.transfers.copies import CopyEngine, CopyError
from controller.transfers.cuda.calibration import calibrate
from controller.transfers.cuda.engine import Always, CopyEngineMover, DeviceCopyEngine, KernelMover
from controller.transfers.cuda.kernel import CupyKernel, Kernel, KernelMissing
from controller.transfers.cuda.lanes import Lanes
from controller.transfers.cuda.ready import ReadyError, ReadyEvents
from controller.transfers.cuda.routes import Routes
from controller.transfers.cuda.streams import CudaStreams, StreamDriver


class EngineChoice(Enum):
    """What YAML's `transfers.engine` may say."""

    AUTO = "auto"
    """By measurement on each device; the CPU engine for memory without one."""
    CPU = "cpu"
    """No GPU is touched; engines that export one are refused."""
    CUDA = "cuda"
    CUDA_KERNEL = "cuda-kernel"


class RoutedRegion:
    """A device region whose addresses have a route while it is open; owned, `close` ends both."""

    def __init__(self, region: DeviceRegion, routes: Routes, engine: CopyEngine) -> None:
        self._region: DeviceRegion | None = region
        self._routes = routes
        self.mapped = region.mapped
        routes.add(region.address, region.nbytes, engine)

    def close(self) -> None:
        """Unroute and unmap; a second time does nothing. Raises CudaError when unmapping failed."""
        region, self._region = self._region, None
        if region is not None:
            self._routes.remove(region.address)
            region.close()


@dataclass(frozen=True)
class CudaCalls:
    """The driver as this process calls it; tests bring their own."""

    memory: DeviceMemory
    streams: StreamDriver
    kernel: Callable[[], Kernel]
    """Raises KernelMissing."""


def cuda_calls() -> CudaCalls:
    """The real ones. Raises CudaError where there is no driver or no device."""
    library = Library()
    return CudaCalls(CudaMemory(library), CudaStreams(library), CupyKernel)


class Devices:
    """See the module. `routes` is the copy engine to give to the scheduler. Any thread."""

    def __init__(
        self,
        calls: CudaCalls,
        host: HostMemory,
        cpu: CopyEngine,
        *,
        choice: EngineChoice = EngineChoice.AUTO,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`told` hears what was measured and why something is not as fast as it could be."""
        self._calls = calls
        self._host = host
        self._choice = choice
        self._told = told
        self._regions = DeviceRegions(calls.memory)
        self._ready = ReadyEvents(calls.streams)
        self._pinning = Pinning(calls.memory, [], host.nbytes, [])
        self._mutex = threading.Lock()
        self._engines: dict[int, DeviceCopyEngine] = {}
        self._kernel_missing = ""
        self.routes = Routes(cpu)

    # ---- host memory

    def spread(self) -> None:
        """Before the slab is touched first."""
        for line in spread(self._host):
            self._told(line)

    def pin(
        self, progress: Callable[[int], None] = lambda done_bytes: None, *, extent_bytes: int = 0
    ) -> None:
        """Pin the prefaulted slab; what could not be pinned is in `problems`."""
        self._pinning = pin(self._host, self._calls.memory, extent_bytes=extent_bytes, progress=progress)

    # ---- engines

    def open(self, handle: DeviceHandle) -> RoutedRegion:
        """Map a region and make its device ready for copies. Takes milliseconds, and a fraction of a second
        for the first region of a device. Raises RegionError, with nothing left behind."""
        region = self._regions.open(handle)
        try:
            engine = self._engine(region.device)
        except (CudaError, CopyError, KernelMissing) as error:
            region.close()
            raise RegionError(f"cuda: device {region.device} cannot be used: {error}") from error
        return RoutedRegion(region, self.routes, engine)

    def ready(self, engine_id: str, event: ReadyEvent) -> Future[None]:
        """A future that ends when an engine's event has happened; see ReadyEvents.when."""
        device = self._calls.memory.devices().get(event.device)
        if device is None:
            future: Future[None] = Future()
            future.set_exception(ReadyError(f"device {event.device.hex()} is not visible here"))
            return future
        return self._ready.when(engine_id, device, event.handle)

    def forget(self, engine_id: str) -> None:
        """Close an engine's events, when nobody waits for one any more."""
        try:
            self._ready.forget(engine_id)
        except CudaError as error:
            self._told(f"an event of engine {engine_id} could not be closed: {error.strerror}")

    # ---- how it stands

    def problems(self) -> list[str]:
        """What is wrong; empty when all is well."""
        found = [self._pinning.problem, self._ready.problem, self._kernel_missing]
        found += [engine.problem for engine in self._engines.values()]
        return [one for one in found if one]

    def counters(self) -> Mapping[str, int]:
        return {
            "pinned_bytes": self._pinning.pinned_bytes,
            "pin_failures": self._pinning.n_failed,
            "device_mappings": self._regions.n_mappings,
        }

    def close(self) -> None:
        """After the last copy, and before the slab is unmapped."""
        self._ready.close()
        with self._mutex:
            engines, self._engines = self._engines, {}
        for device, engine in engines.items():
            try:
                engine.close()
            except CudaError as error:
                self._told(f"device {device} could not be given back: {error.strerror}")
        for line in self._pinning.unpin():
            self._told(line)

    # ---- inside

    def _engine(self, device: int) -> DeviceCopyEngine:
        with self._mutex:
            engine = self._engines.get(device)
            if engine is None:
                engine = self._engines[device] = self._build(device)
            return engine

    def _build(self, device: int) -> DeviceCopyEngine:
        calls, pinned = self._calls, self._pinning.whole
        if pinned and not calls.memory.sees_host_addresses(device):
            self._told(f"device {device}: sees host memory under other addresses; plain copies only")
            pinned = False
        kernel = self._kernel_mover(device) if pinned else None
        if self._choice is EngineChoice.CUDA_KERNEL and kernel is None:
            raise KernelMissing(
                self._kernel_missing or "transfers.engine: cuda-kernel needs pinned host memory"
            )
        engine = DeviceCopyEngine(
            Lanes(calls.streams, device),
            CopyEngineMover(calls.streams, device, pinned=pinned),
            kernel,
            Always(kernel=self._choice is EngineChoice.CUDA_KERNEL),
            host=range(self._host.address, self._host.address + self._host.nbytes),
            seams=np.array(self._pinning.seams, dtype=np.uint64),
        )
        if self._choice is EngineChoice.AUTO and kernel is not None:
            try:
                measured = calibrate(engine, calls.memory, device)
            except (CudaError, CopyError):
                engine.close()
                raise
            engine.choice = measured
            for line in measured.lines():
                self._told(f"device {device}: {line}")
        return engine

    def _kernel_mover(self, device: int) -> KernelMover | None:
        if self._choice is EngineChoice.CUDA:
            return None
        try:
            return KernelMover(self._calls.kernel(), self._calls.memory, device)
        except KernelMissing as error:
            if self._choice is EngineChoice.CUDA_KERNEL:
                self._kernel_missing = str(error)
            self._told(f"device {device}: copy engine only: {error}")
            return None
