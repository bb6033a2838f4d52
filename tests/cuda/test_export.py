"""The engine's end: what can be exported, what is refused with which remedy, ready events, layer cells."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.client import (
    CudaRegion,
    LayerBoard,
    LayerCells,
    OnStream,
    ReadyRing,
    SharedRegion,
    StreamCells,
    wire,
)
from hicache.client.cuda import CudaUnavailable

BASE, NBYTES = 0x7F0000000000, 1 << 20


class Driver:
    """One allocation on device 1, and everything that was called."""

    def __init__(self, *, exportable: bool = True) -> None:
        self.exportable = exportable
        self.calls: list[tuple[object, ...]] = []
        self.events = 0

    def device_of(self, address: int) -> int:
        return 1

    def uuid(self, device: int) -> bytes:
        return bytes([device]) * 16

    def can_export(self, address: int) -> bool:
        return self.exportable

    def extent(self, device: int, address: int) -> tuple[int, int]:
        return BASE, NBYTES

    def export_memory(self, device: int, start: int) -> bytes:
        return start.to_bytes(64, "little")

    def open_event(self, device: int) -> int:
        self.events += 1
        return self.events

    def export_event(self, device: int, event: int) -> bytes:
        return event.to_bytes(64, "little")

    def close_event(self, device: int, event: int) -> None:
        self.events -= 1

    def record(self, device: int, event: int, stream: int) -> None:
        self.calls.append(("record", event, stream))

    def register_host(self, device: int, address: int, nbytes: int) -> int:
        self.calls.append(("register", nbytes))
        return 0x1000

    def unregister_host(self, device: int, address: int) -> None:
        self.calls.append(("unregister",))

    def wait_value(self, device: int, stream: int, address: int, value: int) -> None:
        self.calls.append(("wait", stream, address, value))


class Tensor:
    """As much of a torch tensor as is asked of one; bfloat16 has no numpy name."""

    def __init__(self, address: int, n_elements: int, *, contiguous: bool = True) -> None:
        self._address, self._n_elements, self._contiguous = address, n_elements, contiguous

    def untyped_storage(self) -> None: ...
    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._n_elements

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self._contiguous


class Array:
    """As much of a CuPy array."""

    def __init__(self, address: int, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (3, 5),
            "typestr": "<f4",
            "strides": strides,
        }


def test_a_region_is_its_allocations_handle_and_an_offset() -> None:
    """PyTorch hands out parts of larger allocations; the handle is of the whole."""
    region = CudaRegion(BASE + 512, 1000, driver=Driver())
    assert (region.handle, region.offset) == (BASE.to_bytes(64, "little"), 512)
    assert (region.nbytes, region.device_uuid) == (1000, b"\x01" * 16)


@pytest.mark.parametrize(
    ("array", "nbytes"), [(Tensor(BASE + 256, 30), 60), (Array(BASE + 256), 60)], ids=["torch", "cupy"]
)
def test_arrays_are_exported_whole(array: object, nbytes: int) -> None:
    region = CudaRegion.of(array, driver=Driver())
    assert (region.offset, region.nbytes) == (256, nbytes)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (Tensor(BASE, 30, contiguous=False), "not contiguous"),
        (Array(BASE, strides=(40, 8)), "not contiguous"),
        (np.zeros(3), "not GPU memory"),
    ],
)
def test_what_is_not_one_piece_of_gpu_memory_is_refused(array: object, complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        CudaRegion.of(array, driver=Driver())


def test_memory_of_the_virtual_memory_api_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="expandable_segments:False"):
        CudaRegion(BASE, 10, driver=Driver(exportable=False))


def test_a_region_that_spans_allocations_is_refused() -> None:
    with pytest.raises(ValueError, match="one region for each allocation"):
        CudaRegion(BASE + NBYTES - 5, 6, driver=Driver())


def test_without_a_driver_the_reason_is_said() -> None:
    """On a machine with a GPU the address is refused instead."""
    with pytest.raises(CudaUnavailable):
        CudaRegion(0, 10)


def test_a_gpu_region_travels_as_bytes() -> None:
    """SECURITY-01: a handle is 64 opaque bytes on the wire, never an object to be unpickled."""
    region = CudaRegion(BASE + 512, 1000, driver=Driver())
    message = wire.region_message(region, None)
    assert message.WhichOneof("memory") == "cuda"
    assert (message.cuda.handle, message.cuda.offset, message.nbytes) == (region.handle, 512, 1000)


def test_events_are_recorded_again_only_when_settled() -> None:
    driver = Driver()
    ring = ReadyRing(1, driver=driver)
    first, second = ring.record(77), ring.record(88)
    assert first != second
    assert driver.calls == [("record", 1, 77), ("record", 2, 88)]
    ring.settled(first)
    assert ring.record(99) == first
    with pytest.raises(ValueError, match="2 events"):
        ring.close()
    ring.settled(first)
    ring.settled(second)
    ring.close()
    assert driver.events == 0


class Asked:
    """A client that remembers, and a transfer that settles when the test says so."""

    def __init__(self) -> None:
        self.ready: list[object] = []
        self.is_settled = False

    def settled(self) -> bool:
        return self.is_settled

    def start_load(self, lease: object, placements: object, *, ready: object, cells: object) -> Asked:
        self.ready.append(ready)
        return self

    def start_backup(self, prompt: object, placements: object, *, ready: object) -> Asked:
        self.ready.append(ready)
        return self


def test_every_transfer_has_an_event_of_its_own_until_it_is_settled() -> None:
    driver, asked = Driver(), Asked()
    client = OnStream(asked, ReadyRing(1, driver=driver), lambda: 77)  # type: ignore[arg-type]
    client.start_backup(None, {})  # type: ignore[arg-type]
    client.start_load(None, {})  # type: ignore[arg-type]
    assert asked.ready[0] != asked.ready[1]
    asked.is_settled = True
    client.start_backup(None, {})  # type: ignore[arg-type]
    assert asked.ready[2] in asked.ready[:2]
    assert driver.events == 2
    assert [call[2] for call in driver.calls] == [77, 77, 77]


def test_a_row_is_used_again_with_a_greater_value() -> None:
    """GREATER OR EQUAL: what an earlier load has left in the cells never looks like this one's."""
    with SharedRegion(4096) as region:
        board = LayerBoard(region, number=2, n_layers=3, n_rows=2, offset=64)
        first, second = board.take(), board.take()
        assert first is not None
        assert second is not None
        assert board.take() is None
        assert (first.cells, second.cells) == (LayerCells(2, 64, 1), LayerCells(2, 88, 2))
        cells = region.array(np.uint64, (2, 3), 64)
        cells[0, 1] = 1
        assert [first.landed(layer) for layer in range(3)] == [False, True, False]
        assert not first.wait(2, 0.0)
        first.release()
        assert first.wait(2, 0.0)
        board.give_back(first)
        again = board.take()
        assert again is not None
        assert (again.cells, again.landed(1)) == (LayerCells(2, 64, 3), False)
        del cells


def test_a_stream_waits_at_the_devices_address_of_the_cell() -> None:
    driver = Driver()
    with SharedRegion(100) as region:
        waits = StreamCells(region, 1, driver=driver)
        waits.wait(7, LayerCells(0, 16, 5), 3)
        waits.close()
    assert driver.calls == [("register", 4096), ("wait", 7, 0x1000 + 16 + 24, 5), ("unregister",)]
