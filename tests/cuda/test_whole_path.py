"""Engine, controller and a (fake) GPU together: every byte, every wait, every layer, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack

import numpy as np
import pytest

from controller.controller import HybridCacheController
from controller.memory.device_regions import DeviceHandle
from controller.memory.regions import RegionError
from controller.memory.slab import HostSlab
from controller.requests import (
    Backup,
    BackupOutcome,
    EngineSpec,
    InvalidRequest,
    LayerCells,
    Load,
    MappedRegion,
    Placement,
    ReadyEvent,
    TransferFailed,
)
from controller.settings import ControllerSettings
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.cuda import calibration
from controller.transfers.cuda.devices import CudaCalls, Devices, EngineChoice
from controller.transfers.cuda.kernel import KernelMissing
from controller.transfers.scheduler import TransferScheduler
from hicache.core.pools import SlotPool
from hicache.core.words import TokenArray
from tests.controller.rig import SLOTS, TaggedEngine
from tests.cuda.cpu_kernel import CpuKernel
from tests.cuda.fake_driver import DEADLINE_S, FakeCuda
from tests.tagged import TaggedMemory, hashes_of, make_layout, prompt
from tests.transfers.engine_laws import table_of

MIB = 1 << 20
DEVICE = bytes(16)
N_LAYERS = 3


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device checks every access against every other."""
    monkeypatch.setattr(calibration, "SIZES", (4096, 65536))
    monkeypatch.setattr(calibration.calibrate, "__kwdefaults__", {"sample_bytes": 1 << 17, "now_s": tick()})


def tick() -> object:
    """A clock on which everything takes equally long."""
    numbers = iter(range(1 << 30))
    return lambda: float(next(numbers))


class GpuEngine(TaggedEngine):
    """Its pools are on the device, its cells in host memory."""

    def __init__(
        self, controller: HybridCacheController, devices: Devices, cuda: FakeCuda, engine_id: str = "gpu"
    ) -> None:
        layout, nbytes = make_layout(SLOTS)
        self.controller, self.cuda, self.devices = controller, cuda, devices
        self.engine_id, self.model = engine_id, "model"
        self.memory = cuda.array(nbytes)
        self.tagged = TaggedMemory(layout, self.memory)
        self.cells = np.zeros(N_LAYERS, dtype=np.uint64)
        self.region = devices.open(DeviceHandle(cuda.export(self.memory), 0, nbytes, DEVICE))
        regions = (self.region.mapped, MappedRegion(self.cells.ctypes.data, self.cells.nbytes))
        self.spec = EngineSpec(engine_id, self.model, "r1", layout, regions)
        self.pools = {spec.name: SlotPool(layout.slots_of(spec.name)) for spec in layout.components}
        self.compute_stream = cuda.open_stream(0, urgent=False)
        self._event = cuda.open_event(0)
        controller.attach(self.spec)

    def ready(self) -> ReadyEvent:
        self.cuda.record(0, self._event, self.compute_stream)
        return ReadyEvent(DEVICE, self.cuda.export_event(self._event))

    def forward(self, tokens: TokenArray, pages: Mapping[str, list[int]]) -> dict[str, Placement]:
        """Slots that a kernel will fill when the stream gets there."""
        hashes = hashes_of(self.namespace(), tokens)
        placements = {}
        for name, wanted in pages.items():
            slots = self.pools[name].alloc(len(wanted))
            assert slots is not None
            placements[name] = Placement(np.array(wanted, dtype=np.int32), slots)

        def act() -> None:
            for name, placement in placements.items():
                for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
                    self.tagged.write(name, slot, hashes[page])

        self.cuda.engine_kernel(self.compute_stream, "forward pass", writes=(self.memory,), act=act)
        return placements

    async def run_and_backup(self, tokens: TokenArray) -> Mapping[str, BackupOutcome]:
        placements = self.forward(tokens, self.all_pages(tokens))
        ready = self.ready()
        outcomes = await self.controller.backup(Backup(self.prompt(tokens), placements, ready))
        self.forget(placements)
        return outcomes

    async def leave(self) -> None:
        await self.controller.detach(self.engine_id)
        await asyncio.to_thread(self.devices.forget, self.engine_id)
        await asyncio.to_thread(self.region.close)
        self.cuda.close_stream(0, self.compute_stream)
        self.cuda.close_event(0, self._event)


class World:
    """One daemon's parts on a fake device."""

    def __init__(self, stack: AsyncExitStack, choice: EngineChoice, timeout_s: float = DEADLINE_S) -> None:
        self.cuda = FakeCuda()
        self.told: list[str] = []
        self.slab = HostSlab(4 * MIB)
        stack.callback(self.slab.close)
        calls = CudaCalls(self.cuda, self.cuda, lambda: CpuKernel(self.cuda))
        self.devices = Devices(calls, self.slab, CpuCopyEngine(), choice=choice, told=self.told.append)
        stack.callback(self.devices.close)
        self.devices.pin()
        self.scheduler = TransferScheduler(self.devices.routes, threads=2)
        stack.callback(self.scheduler.close)
        settings = ControllerSettings(copy_timeout_s=timeout_s)
        self.controller = HybridCacheController(settings, self.slab, self.scheduler, self.devices)
        stack.push_async_callback(self.controller.stop, 1.0)
        self.engine = GpuEngine(self.controller, self.devices, self.cuda)


@pytest.fixture(
    params=[EngineChoice.CUDA, EngineChoice.CUDA_KERNEL, EngineChoice.AUTO], ids=lambda one: one.value
)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(stack, request.param)
        yield world
        assert world.controller.audit() == []
        await world.engine.leave()
    assert world.cuda.violations == []
    assert world.cuda.leftovers() == []


async def test_what_was_computed_comes_back(world: World) -> None:
    """WRITE-09, SIDECAR-01: all engines, all planes, through the ready event."""
    tokens = prompt(1, 40)
    outcomes = await world.engine.run_and_backup(tokens)
    assert {name: outcome.stored_pages for name, outcome in outcomes.items()} == {
        "full": 10,
        "swa": 10,
        "mamba": 1,
    }
    assert await world.engine.load_and_check(tokens) == 10


async def test_a_backup_waits_for_the_forward_pass(world: World) -> None:
    """WRITE-09: asked for while the kernel that fills the page is held; the copy begins after it."""
    cuda, engine, tokens = world.cuda, world.engine, prompt(2, 40)
    cuda.hold(engine.compute_stream)
    queued = n_copies(cuda)
    backing_up = asyncio.create_task(engine.run_and_backup(tokens))
    async with asyncio.timeout(DEADLINE_S / 4):
        while cuda.calls.count("happened") < 3:  # noqa: ASYNC110 - the fake has no other sign
            await asyncio.sleep(0.001)
    assert (backing_up.done(), n_copies(cuda)) == (False, queued)
    cuda.let_go(engine.compute_stream)
    async with asyncio.timeout(DEADLINE_S):
        await backing_up
    assert n_copies(cuda) > queued
    assert await engine.load_and_check(tokens) == 10


def n_copies(cuda: FakeCuda) -> int:
    return sum(cuda.calls.count(call) for call in ("copy", "copy_batch", "launch"))


async def test_a_layer_is_told_when_all_of_it_has_landed(world: World) -> None:
    """SIDECAR-03: the layers' kernels stand in the engine's stream before the load is even asked for."""
    engine, cuda, tokens = world.engine, world.cuda, prompt(3, 40)
    await engine.run_and_backup(tokens)
    found = engine.lookup(tokens)
    placements = {
        name: Placement(pages, engine.pools[name].alloc(len(pages)))  # type: ignore[arg-type]
        for name, pages in found.load.items()
    }
    ready = engine.ready()
    right: list[bool] = []
    for layer in range(N_LAYERS):
        cuda.wait_value(engine.compute_stream, engine.cells, layer, 5)
        cuda.engine_kernel(
            engine.compute_stream,
            f"layer {layer}",
            reads=tuple(planes_of(engine, placements, layer)),
            act=lambda layer=layer: right.append(layer_is_right(engine, tokens, placements, layer)),
        )
    load = Load("gpu", found.lease_id, placements, ready, LayerCells(1, 0, 5))
    await engine.controller.load(load)
    assert engine.cells.tolist() == [5, 5, 5]
    cuda.run()
    assert right == [True] * N_LAYERS
    engine.controller.release("gpu", found.lease_id)
    # The stream has read the layers: what comes next into these slots must come after that.
    await asyncio.wrap_future(engine.devices.ready("gpu", engine.ready()))


def planes_of(engine: GpuEngine, placements: Mapping[str, Placement], layer: int) -> Iterator[np.ndarray]:
    for name, placement in placements.items():
        for pool in engine.spec.layout.pools_of(name):
            for plane in pool.planes:
                for slot in placement.slots.tolist():
                    if plane.layer == layer:
                        yield engine.memory[plane.offset + slot * plane.stride :][: plane.nbytes]


def layer_is_right(
    engine: GpuEngine, tokens: TokenArray, placements: Mapping[str, Placement], layer: int
) -> bool:
    hashes = hashes_of(engine.namespace(), tokens)
    for name, placement in placements.items():
        for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
            expected = engine.tagged.expected(name, hashes[page])
            at = 0
            for pool in engine.spec.layout.pools_of(name):
                for plane in pool.planes:
                    here = engine.memory[plane.offset + slot * plane.stride :][: plane.nbytes]
                    if plane.layer == layer and here.tobytes() != expected[at : at + plane.nbytes]:
                        return False
                    at += plane.nbytes
    return True


async def test_two_kinds_of_engines_share_what_they_store(world: World) -> None:
    """One without a GPU loads what one with it has stored, and the other way round."""
    cpu = TaggedEngine(world.controller, "cpu")
    there, back = prompt(4, 40), prompt(5, 40)
    await world.engine.run_and_backup(there)
    await cpu.backup(back, cpu.all_pages(back))
    assert await cpu.load_and_check(there) == 10
    assert await world.engine.load_and_check(back) == 10
    await world.controller.detach("cpu")


async def test_a_copy_that_fails_publishes_nothing_and_the_next_one_works(world: World) -> None:
    tokens = prompt(6, 40)
    world.cuda.fail("record", after=1)  # the engine's own record comes first
    with pytest.raises(TransferFailed):
        await world.engine.run_and_backup(tokens)
    assert world.engine.lookup(tokens).boundary == 0
    await world.engine.run_and_backup(tokens)
    assert await world.engine.load_and_check(tokens) == 10


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (ReadyEvent(b"\x09" * 16, bytes(64)), "device 0909"),
        (ReadyEvent(DEVICE, b"dead" + bytes(60)), "cuIpcOpenEventHandle"),
    ],
)
async def test_an_event_that_cannot_be_waited_for_fails_the_backup(
    world: World, event: ReadyEvent, complaint: str
) -> None:
    engine, tokens = world.engine, prompt(9, 40)
    placements = engine.forward(tokens, engine.all_pages(tokens))
    with pytest.raises(TransferFailed, match=complaint):
        await world.controller.backup(Backup(engine.prompt(tokens), placements, event))
    assert engine.lookup(tokens).boundary == 0
    world.cuda.run()


async def test_an_event_that_never_happens_costs_a_deadline() -> None:
    async with AsyncExitStack() as stack:
        world = World(stack, EngineChoice.CUDA, timeout_s=0.2)
        world.cuda.hold(world.engine.compute_stream)
        tokens = prompt(7, 40)
        with pytest.raises(TransferFailed, match="has not happened after"):
            await world.engine.run_and_backup(tokens)
        assert "copy_batch" not in world.cuda.calls
        world.cuda.let_go(world.engine.compute_stream)
        world.cuda.run()
        assert world.engine.lookup(tokens).boundary == 0
        await world.engine.leave()
    assert world.cuda.leftovers() == []


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        (LayerCells(0, 0, 1), "host memory"),
        (LayerCells(2, 0, 1), "host memory"),
        (LayerCells(1, 8, 1), "3 cells of 8 bytes at 8 do not fit"),
    ],
)
async def test_cells_must_be_in_the_engines_host_memory(
    world: World, cells: LayerCells, complaint: str
) -> None:
    tokens = prompt(8, 40)
    await world.engine.run_and_backup(tokens)
    found = world.engine.lookup(tokens)
    with pytest.raises(InvalidRequest, match=complaint):
        await world.controller.load(Load("gpu", found.lease_id, {}, None, cells))


async def test_an_engine_that_dies_leaves_no_mapping(world: World) -> None:
    """LIFE-01: it comes without a word and goes without one, again and again."""
    for number in range(5):
        other = GpuEngine(world.controller, world.devices, world.cuda, f"other {number}")
        await other.run_and_backup(prompt(20 + number, 16))
        await other.leave()
    assert world.devices.counters()["device_mappings"] == 1


# ---- the daemon's GPUs by themselves ----------------------------------------------------------------


def devices_on(cuda: FakeCuda, slab: HostSlab, choice: EngineChoice, **calls: object) -> Devices:
    given = {"kernel": lambda: CpuKernel(cuda), **calls}
    return Devices(CudaCalls(cuda, cuda, **given), slab, CpuCopyEngine(), choice=choice)  # type: ignore[arg-type]


def no_kernel() -> CpuKernel:
    raise KernelMissing("CuPy is not installed")


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    with HostSlab(MIB) as slab:
        yield slab


def open_on(devices: Devices, cuda: FakeCuda) -> None:
    devices.open(DeviceHandle(cuda.export(cuda.array(64)), 0, 64, DEVICE)).close()


def test_unpinned_memory_is_a_problem_that_health_shows(slab: HostSlab) -> None:
    """MEMORY-04."""
    cuda = FakeCuda()
    devices = devices_on(cuda, slab, EngineChoice.AUTO)
    cuda.fail("register_host")
    devices.pin()
    assert "0 of 1048576 bytes are pinned" in devices.problems()[0]
    assert devices.counters() == {"pinned_bytes": 0, "pin_failures": 1, "device_mappings": 0}
    open_on(devices, cuda)
    assert "launch" not in cuda.calls
    devices.close()


def test_where_host_addresses_differ_there_are_plain_copies_only(slab: HostSlab) -> None:
    """WSL2: batches and kernels that name host memory fault there."""
    cuda = FakeCuda()
    cuda.same_addresses = False
    devices = devices_on(cuda, slab, EngineChoice.AUTO)
    devices.pin()
    memory = cuda.array(4096, fill=5)
    region = devices.open(DeviceHandle(cuda.export(memory), 0, 4096, DEVICE))
    host = np.frombuffer(slab.buffer, dtype=np.uint8)
    devices.routes.copy(table_of(memory, host, [(0, 0, 100), (200, 300, 50)]))
    assert (host[:100] == 5).all()
    assert (cuda.calls.count("copy"), "copy_batch" in cuda.calls, "launch" in cuda.calls) == (2, False, False)
    del host
    region.close()
    devices.close()


def test_without_cupy_auto_goes_on_and_says_so(slab: HostSlab) -> None:
    cuda, told = FakeCuda(), []
    devices = Devices(
        CudaCalls(cuda, cuda, no_kernel), slab, CpuCopyEngine(), choice=EngineChoice.AUTO, told=told.append
    )
    devices.pin()
    open_on(devices, cuda)
    assert told == ["device 0: copy engine only: CuPy is not installed"]
    assert devices.problems() == []
    devices.close()
    assert cuda.leftovers() == []


def test_a_kernel_that_was_asked_for_by_name_must_be_there(slab: HostSlab) -> None:
    cuda = FakeCuda()
    devices = devices_on(cuda, slab, EngineChoice.CUDA_KERNEL, kernel=no_kernel)
    devices.pin()
    with pytest.raises(RegionError, match="CuPy is not installed"):
        open_on(devices, cuda)
    assert devices.problems() == ["CuPy is not installed"]
    devices.close()
    assert cuda.leftovers() == []
