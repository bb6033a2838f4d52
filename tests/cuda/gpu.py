"""A real device for tests: memory, fills and an engine on it, by the driver alone."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_size_t, c_ubyte, c_uint64, c_void_p

import numpy as np

from controller.memory.cuda import CudaMemory, Library
from controller.transfers.cuda.streams import CudaStreams
from hicache.client import (
    Client,
    CudaRegion,
    LayerBoard,
    Placement,
    Prompt,
    ReadyRing,
    SharedRegion,
    StreamCells,
)
from hicache.core.identity import Namespace
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from hicache.core.words import TokenArray
from tests.tagged import hashes_of

PAGE_TOKENS = 16


class Gpu:
    """Device 0 of this process."""

    def __init__(self) -> None:
        """Raises CudaError where there is none."""
        self.library = Library()
        self.memory = CudaMemory(self.library)
        self.streams = CudaStreams(self.library)
        (self.uuid, *_) = [uuid for uuid, number in self.memory.devices().items() if number == 0]

    def upload(self, address: int, values: np.ndarray) -> None:
        self.library.bind(0)
        contiguous = np.ascontiguousarray(values)
        self.library.call(
            "cuMemcpyHtoD_v2",
            c_uint64(address),
            c_void_p(contiguous.ctypes.data),
            c_size_t(contiguous.nbytes),
        )

    def download(self, address: int, nbytes: int) -> np.ndarray:
        self.library.bind(0)
        found = np.empty(nbytes, dtype=np.uint8)
        self.library.call("cuMemcpyDtoH_v2", c_void_p(found.ctypes.data), c_uint64(address), c_size_t(nbytes))
        return found

    def fill(self, stream: int, address: int, value: int, nbytes: int) -> None:
        """Queue a fill."""
        self.library.bind(0)
        self.library.call(
            "cuMemsetD8Async", c_uint64(address), c_ubyte(value), c_size_t(nbytes), c_void_p(stream)
        )

    def synchronize(self, stream: int) -> None:
        self.library.bind(0)
        self.library.call("cuStreamSynchronize", c_void_p(stream))

    def total_bytes(self) -> int:
        self.library.bind(0)
        free, total = c_size_t(), c_size_t()
        self.library.call("cuMemGetInfo_v2", byref(free), byref(total))
        return total.value


def layered(n_layers: int, plane_bytes: int, n_slots: int) -> Layout:
    """K and V of each layer in one region, and a sidecar of an odd size in each layer."""
    kv, scales, offset = [], [], 0
    for layer in range(n_layers):
        for _ in range(2):
            kv.append(Plane(0, offset, plane_bytes, plane_bytes, layer))
            offset += plane_bytes * n_slots
        scales.append(Plane(0, offset, 37, 33, layer))
        offset += 37 * n_slots
    pools = (Pool("kv", "full", n_slots, tuple(kv)), Pool("scales", "full", n_slots, tuple(scales)))
    return Layout(PAGE_TOKENS, (ComponentSpec("full", Kind.FULL),), pools)


def region_bytes(layout: Layout) -> int:
    return max(
        plane.offset + (pool.n_slots - 1) * plane.stride + plane.nbytes
        for pool in layout.pools
        for plane in pool.planes
    )


class GpuEngine:
    """An engine whose pools are on the GPU and whose cells are in shared memory."""

    def __init__(self, gpu: Gpu, address: str, layout: Layout, engine_id: str = "gpu") -> None:
        self.gpu, self.layout = gpu, layout
        self.n_layers = 1 + max(plane.layer for pool in layout.pools for plane in pool.planes)
        self.nbytes = region_bytes(layout)
        self.pools = gpu.memory.allocate(0, self.nbytes)
        self.cells = SharedRegion(1 << 16)
        self.board = LayerBoard(self.cells, number=1, n_layers=self.n_layers, n_rows=4)
        self.stream = gpu.streams.open_stream(0, urgent=False)
        self.ready = ReadyRing(0)
        self.waits = StreamCells(self.cells, 0)
        self.client = Client(
            address,
            engine_id=engine_id,
            model="m",
            layout=layout,
            regions=[CudaRegion(self.pools, self.nbytes), self.cells],
        )
        assert self.client.wait_attached(60), self.client.problem

    def payload(self, tokens: TokenArray, page: int) -> np.ndarray:
        """The right bytes of a page, all planes in the frame's order."""
        page_hash = hashes_of(Namespace("m", "", self.layout.fingerprint(), PAGE_TOKENS), tokens)[page]
        nbytes = sum(pool.page_bytes for pool in self.layout.pools)
        seed = int.from_bytes(page_hash[:8], "little")
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def places(self, slot: int) -> list[tuple[int, int, int]]:
        """Layer, offset and size of each plane, in the frame's order."""
        return [
            (plane.layer, plane.offset + slot * plane.stride, plane.nbytes)
            for pool in self.layout.pools
            for plane in pool.planes
        ]

    def write(self, tokens: TokenArray, slots: Mapping[int, int]) -> None:
        """Pages into slots, at once."""
        image = self.gpu.download(self.pools, self.nbytes)
        for page, slot in slots.items():
            payload, at = self.payload(tokens, page), 0
            for _, offset, nbytes in self.places(slot):
                image[offset : offset + nbytes] = payload[at : at + nbytes]
                at += nbytes
        self.gpu.upload(self.pools, image)

    def wrong_bytes(self, tokens: TokenArray, slots: Mapping[int, int]) -> int:
        image = self.gpu.download(self.pools, self.nbytes)
        wrong = 0
        for page, slot in slots.items():
            payload, at = self.payload(tokens, page), 0
            for _, offset, nbytes in self.places(slot):
                wrong += int((image[offset : offset + nbytes] != payload[at : at + nbytes]).sum())
                at += nbytes
        return wrong

    def prompt(self, tokens: TokenArray) -> Prompt:
        return Prompt(f"r{int(tokens[0])}", tokens)

    def close(self) -> None:
        self.client.close()
        self.gpu.synchronize(self.stream)
        self.waits.close()
        self.ready.close()
        self.gpu.streams.close_stream(0, self.stream)
        self.gpu.memory.free(0, self.pools)
        del self.board
        self.cells.close()


def placement(slots: Mapping[int, int]) -> dict[str, Placement]:
    pages = np.array(sorted(slots), dtype=np.int32)
    return {"full": Placement(pages, np.array([slots[page] for page in pages.tolist()], dtype=np.int32))}
