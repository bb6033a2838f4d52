"""An engine's GPU memory in this process: one mapping for each allocation, bounded, and none left behind."""

from __future__ import annotations

import threading

import pytest

from controller.memory.device_regions import DeviceHandle, DeviceRegions
from controller.memory.regions import RegionError
from tests.cuda.fake_driver import FakeCuda

DEVICE = bytes(16)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(n_devices=2)


def test_regions_of_one_allocation_share_a_mapping(cuda: FakeCuda) -> None:
    """The driver has one mapping for each process and allocation: the last close unmaps it."""
    regions, memory = DeviceRegions(cuda), cuda.array(4096)
    handle = cuda.export(memory)
    first = regions.open(DeviceHandle(handle, 0, 1024, DEVICE))
    second = regions.open(DeviceHandle(handle, 1024, 3072, DEVICE))
    assert (first.address, second.address) == (memory.ctypes.data, memory.ctypes.data + 1024)
    assert (second.mapped.nbytes, second.mapped.on_device) == (3072, True)
    assert (regions.n_mappings, cuda.calls.count("open_memory")) == (1, 1)
    first.close()
    first.close()
    assert regions.n_mappings == 1
    second.close()
    assert (regions.n_mappings, cuda.leftovers(), cuda.violations) == (0, [], [])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"handle": b"short"}, "cuda.handle: 5 bytes"),
        ({"device": b"GPU-1"}, "cuda.device: 5 bytes"),
        ({"offset": -1}, "offset -1"),
        ({"nbytes": 0}, "0 bytes"),
        ({"device": b"\x09" * 16}, "not among the 2 devices"),
        ({"device": b"\x01" * 16}, "on device 1 do not lie"),
        ({"offset": 1, "nbytes": 4096}, "do not lie in an allocation of 4096 bytes"),
        ({"handle": bytes(64)}, "is the engine alive"),
    ],
)
def test_a_bad_handle_is_refused_with_the_remedy(
    cuda: FakeCuda, changes: dict[str, object], complaint: str
) -> None:
    """LIFE-03, SECURITY-01: wrong device, wrong bytes, dead process; nothing stays mapped."""
    regions, memory = DeviceRegions(cuda), cuda.array(4096)
    held = regions.open(DeviceHandle(cuda.export(memory), 0, 64, DEVICE)) if "device" in changes else None
    good = {"handle": cuda.export(memory), "offset": 0, "nbytes": 4096, "device": DEVICE}
    with pytest.raises(RegionError, match=complaint):
        regions.open(DeviceHandle(**{**good, **changes}))  # type: ignore[arg-type]
    if held is not None:
        held.close()
    assert cuda.leftovers() == []


def test_a_mapping_whose_size_cannot_be_had_is_closed(cuda: FakeCuda) -> None:
    regions, memory = DeviceRegions(cuda), cuda.array(4096)
    cuda.fail("extent")
    with pytest.raises(RegionError, match="its size"):
        regions.open(DeviceHandle(cuda.export(memory), 0, 4096, DEVICE))
    assert cuda.leftovers() == []


def test_mappings_are_bounded(cuda: FakeCuda) -> None:
    regions = DeviceRegions(cuda, max_mappings=2)
    memories = [cuda.array(64) for _ in range(3)]
    handles = [DeviceHandle(cuda.export(memory), 0, 64, DEVICE) for memory in memories]
    opened = [regions.open(handle) for handle in handles[:2]]
    with pytest.raises(RegionError, match="as many as are allowed"):
        regions.open(handles[2])
    opened.pop().close()
    opened.append(regions.open(handles[2]))
    for region in opened:
        region.close()
    assert cuda.leftovers() == []


def test_a_thousand_engines_come_and_go(cuda: FakeCuda) -> None:
    """LIFE-01: what dies without a word is unmapped with its attachment; nothing adds up."""
    regions, memory = DeviceRegions(cuda), cuda.array(4096)
    handle = DeviceHandle(cuda.export(memory), 0, 4096, DEVICE)

    def live() -> None:
        for _ in range(250):
            regions.open(handle).close()

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (regions.n_mappings, cuda.leftovers(), cuda.violations) == (0, [], [])
