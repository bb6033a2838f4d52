"""GPU regions over the wire: mapped on a thread, beside memfds, refused with the remedy, given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from controller.daemon.attachments import Attachments
from controller.daemon.config import Server
from controller.memory.device_regions import DeviceHandle, DeviceRegion, DeviceRegions
from proto.v1 import hicache_pb2 as pb
from tests.cuda.fake_driver import FakeCuda
from tests.daemon.rig import REGION_BYTES, WAIT_S, Engine, Rig, handed_over, registration, until


class FakeGpus:
    """Maps on a fake device; `gate` holds every mapping up."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.regions = DeviceRegions(self.cuda)
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()
        self.forgotten: list[str] = []
        self.expected_faults = 0

    def open(self, handle: DeviceHandle) -> DeviceRegion:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(WAIT_S)
        return self.regions.open(handle)

    def forget(self, engine_id: str) -> None:
        self.threads.add(threading.get_ident())
        self.forgotten.append(engine_id)

    def message(self, **changes: object) -> pb.Region:
        memory = self.cuda.array(REGION_BYTES)
        fields = {"handle": self.cuda.export(memory), "offset": 0, "device_uuid": bytes(16), **changes}
        return pb.Region(cuda=pb.CudaMemory(**fields), nbytes=REGION_BYTES)  # type: ignore[arg-type]


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus()


@pytest.fixture
async def rig(tmp_path: Path, gpus: FakeGpus) -> AsyncIterator[Rig]:
    path = str(tmp_path / "socket")
    rig = Rig(path, Server(socket=path, grace_s=0.5), ticket_life_s=WAIT_S)
    rig.attachments = Attachments(
        rig.controller,
        rig.handoff,
        rig.faults,
        heartbeat_timeout_s=rig.settings.heartbeat_timeout_s,
        drain_timeout_s=rig.settings.grace_s,
        gpus=gpus,
    )
    await rig.start()
    yield rig
    await rig.stop()
    gpus.gate.set()
    await until(lambda: gpus.regions.n_mappings == 0, "everything is unmapped")
    assert rig.faults.count == gpus.expected_faults


def with_regions(engine_id: str, regions: list[pb.Region]) -> pb.Registration:
    message = registration(engine_id, [])
    message.regions.extend(regions)
    return message


async def refusal(rig: Rig, message: pb.Registration) -> tuple[StatusCode, str]:
    engine = Engine(rig, message.engine_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.register(message)
    return caught.value.code(), str(caught.value.details())


async def test_a_gpu_region_and_a_memfd_keep_their_numbers(rig: Rig, gpus: FakeGpus) -> None:
    (ticket,) = await handed_over(rig.socket_path)
    engine = Engine(rig, "engine")
    regions = [gpus.message(), pb.Region(ticket=ticket, nbytes=REGION_BYTES), gpus.message()]
    await engine.register(with_regions("engine", regions))
    mapped = rig.controller.specs["engine"].regions
    assert [region.on_device for region in mapped] == [True, False, True]
    assert gpus.regions.n_mappings == 2
    assert threading.get_ident() not in gpus.threads
    engine.leave()
    await until(lambda: gpus.regions.n_mappings == 0, "the engine's memory is unmapped")
    assert gpus.forgotten == ["engine"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"handle": b"x" * 63}, "registration.regions[0].cuda.handle: 63 bytes"),
        ({"device_uuid": b"0"}, "registration.regions[0].cuda.device: 1 bytes"),
        ({"device_uuid": b"\x07" * 16}, "registration.regions[0].cuda.device: 0707"),
        ({"offset": 1}, "registration.regions[0].cuda: bytes [1, "),
        ({"handle": b"x" * 64}, "registration.regions[0].cuda.handle: device 0 refused it"),
    ],
)
async def test_a_bad_handle_is_refused_and_nothing_stays(
    rig: Rig, gpus: FakeGpus, changes: dict[str, object], complaint: str
) -> None:
    """LIFE-03: the daemon goes on, and the message names field and remedy."""
    code, details = await refusal(rig, with_regions("engine", [gpus.message(**changes), gpus.message()]))
    assert (code, details.startswith(complaint)) == (StatusCode.INVALID_ARGUMENT, True)
    assert gpus.regions.n_mappings == 0
    async with rig.engine("other"):
        assert set(rig.controller.specs) == {"other"}


async def test_a_second_region_that_fails_unmaps_the_first(rig: Rig, gpus: FakeGpus) -> None:
    code, _ = await refusal(rig, with_regions("engine", [gpus.message(), gpus.message(handle=b"x" * 64)]))
    assert code is StatusCode.INVALID_ARGUMENT
    assert "open_memory" in gpus.cuda.calls
    assert gpus.regions.n_mappings == 0


async def test_a_driver_that_hangs_holds_up_nobody_else(rig: Rig, gpus: FakeGpus) -> None:
    """The engine is told to come again, others attach meanwhile, and what was mapped late is unmapped."""
    gpus.gate.clear()
    refused = asyncio.create_task(refusal(rig, with_regions("engine", [gpus.message()])))
    async with rig.engine("other"):
        code, details = await refused
    assert (code, "busy or stuck" in details) == (StatusCode.RESOURCE_EXHAUSTED, True)
    gpus.gate.set()
    await until(lambda: "close_memory" in gpus.cuda.calls, "the late mapping is closed")


async def test_the_same_engine_again_shares_the_mapping_and_gets_a_new_one(rig: Rig, gpus: FakeGpus) -> None:
    """LIFE-02: registering again is fine while the old attachment is still there."""
    region = gpus.message()
    first, second = Engine(rig, "engine"), Engine(rig, "engine")
    await first.register(with_regions("engine", [region]))
    await second.register(with_regions("engine", [region]))
    assert gpus.cuda.violations == []
    await until(lambda: gpus.forgotten == ["engine"], "the first attachment has ended")
    assert gpus.regions.n_mappings == 1
    second.leave()


async def test_a_failed_unmapping_is_counted(rig: Rig, gpus: FakeGpus) -> None:
    engine = Engine(rig, "engine")
    await engine.register(with_regions("engine", [gpus.message()]))
    gpus.cuda.fail("close_memory")
    engine.leave()
    gpus.expected_faults = 1
    await until(lambda: rig.faults.count == 1, "the failure is counted")
    assert any("unmap: CudaError" in problem for problem in rig.faults.problems())


async def test_without_a_gpu_the_remedy_is_named(tmp_path: Path, gpus: FakeGpus) -> None:
    path = str(tmp_path / "socket")
    rig = Rig(path, Server(socket=path), ticket_life_s=WAIT_S)
    await rig.start()
    code, details = await refusal(rig, with_regions("engine", [gpus.message()]))
    assert code is StatusCode.INVALID_ARGUMENT
    assert "this daemon uses no GPU" in details
    await rig.stop()
