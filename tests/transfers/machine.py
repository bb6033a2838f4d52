"""An engine's memory and a host slab side by side, and a naive oracle for what moves between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controller.memory.frames import HEADER_BYTES, FrameLayout, PlaneTable
from controller.requests import MappedRegion
from controller.transfers.copies import CopyEngine, CopyTable
from hicache.core.layout import Layout


class EngineMemory:
    """Regions filled with random bytes; every byte outside the planes is a guard."""

    def __init__(self, layout: Layout, region_bytes: Sequence[int], seed: int) -> None:
        layout.validate(region_bytes)
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.regions = [rng.integers(0, 256, nbytes, dtype=np.uint8) for nbytes in region_bytes]
        self.mapped = [MappedRegion(region.ctypes.data, region.nbytes) for region in self.regions]

    def page(self, pool: str, slot: int) -> bytes:
        """The pool's payload in one slot, plane after plane, by the definition of a plane."""
        (found,) = [candidate for candidate in self.layout.pools if candidate.name == pool]
        parts = [
            self.regions[plane.region][plane.offset + slot * plane.stride :][: plane.nbytes].tobytes()
            for plane in found.planes
        ]
        return b"".join(parts)

    def payload(self, component: str, slot: int) -> bytes:
        """Anchor, then sidecars."""
        return b"".join(self.page(pool.name, slot) for pool in self.layout.pools_of(component))

    def write(self, component: str, slot: int, payload: bytes) -> None:
        left = np.frombuffer(payload, dtype=np.uint8)
        for pool in self.layout.pools_of(component):
            for plane in pool.planes:
                start = plane.offset + slot * plane.stride
                self.regions[plane.region][start : start + plane.nbytes] = left[: plane.nbytes]
                left = left[plane.nbytes :]
        assert not len(left)

    def copies(self) -> list[np.ndarray]:
        return [region.copy() for region in self.regions]


class HostMemory:
    """Room for `n_frames` frames at odd places, random bytes between them."""

    def __init__(self, frames: FrameLayout, n_frames: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.frames = frames
        step = frames.frame_bytes + 37
        self.bytes = rng.integers(0, 256, n_frames * step + 8, dtype=np.uint8)
        self.starts = 3 + rng.permutation(n_frames) * step
        self.addresses = self.starts.astype(np.uint64) + np.uint64(self.bytes.ctypes.data)

    def payload(self, i: int) -> bytes:
        start = int(self.starts[i])
        return self.bytes[start + HEADER_BYTES : start + self.frames.frame_bytes].tobytes()

    def guards(self) -> np.ndarray:
        """Every byte that belongs to no frame's payload."""
        outside = np.ones(len(self.bytes), dtype=np.bool_)
        for start in self.starts.tolist():
            outside[start + HEADER_BYTES : start + self.frames.frame_bytes] = False
        return self.bytes[outside]


def store(
    engine: CopyEngine,
    memory: EngineMemory,
    host: HostMemory,
    slots: Sequence[int],
    chunk_bytes: int = 4 << 20,
) -> None:
    _move(engine, CopyTable.store(_table(memory, host, slots)), chunk_bytes)


def load(
    engine: CopyEngine,
    memory: EngineMemory,
    host: HostMemory,
    slots: Sequence[int],
    chunk_bytes: int = 4 << 20,
) -> None:
    _move(engine, CopyTable.load(_table(memory, host, slots)), chunk_bytes)


def _table(memory: EngineMemory, host: HostMemory, slots: Sequence[int]) -> PlaneTable:
    device_slots = np.array(slots, dtype=np.int32)
    return host.frames.table(memory.mapped, device_slots, host.addresses[: len(slots)])


def _move(engine: CopyEngine, table: CopyTable, chunk_bytes: int) -> None:
    for chunk in table.chunks(chunk_bytes):
        engine.copy(chunk)
