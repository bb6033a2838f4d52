"""The model's paged memory: where every page of every layer lies, and torch views of it.

Decides the layout that is told to HiCache. Owns no slot: who may use which is decided by a cache.
FULL and SWA pages hold K and V of `page_size` tokens; a MAMBA slot holds one recurrent state, its
sidecar the last inputs of the convolution that belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from examples.demo.arithmetic import Shape
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool

FULL, SWA, MAMBA = "full", "swa", "mamba"
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Slots:
    """Device slots of each component."""

    full: int
    swa: int
    mamba: int


def _planes(
    region: int, offset: int, n_slots: int, layers: Sequence[int], sizes: Sequence[int]
) -> list[Plane]:
    """One plane for each layer and size, one after the other from `offset` on."""
    planes = []
    for layer in layers:
        for nbytes in sizes:
            planes.append(Plane(region=region, offset=offset, stride=nbytes, nbytes=nbytes, layer=layer))
            offset += n_slots * nbytes
    return planes


def _layers(shape: Shape, place: int) -> list[int]:
    return [3 * i + place for i in range(shape.repeats)]


def layout_of(shape: Shape, slots: Slots) -> tuple[Layout, int]:
    """The layout in one region, and the region's size in bytes."""
    kv = shape.page_size * shape.kv_heads * shape.head_width * _FLOAT_BYTES
    state = shape.state_heads * shape.key_width * shape.value_width * _FLOAT_BYTES
    tail = (shape.taps - 1) * shape.channels * _FLOAT_BYTES
    pools: list[Pool] = []
    offset = 0
    for name, component, n_slots, place, sizes, numbers in (
        ("full_kv", FULL, slots.full, 2, (kv, kv), "f32 integers; k, v"),
        ("swa_kv", SWA, slots.swa, 1, (kv, kv), "f32 integers; k, v"),
        ("mamba_state", MAMBA, slots.mamba, 0, (state,), "f32 integers; state"),
        ("mamba_tail", MAMBA, slots.mamba, 0, (tail,), "f32 integers; convolution inputs"),
    ):
        planes = _planes(0, offset, n_slots, _layers(shape, place), sizes)
        pools.append(Pool(name, component, n_slots, tuple(planes), numbers))
        offset += n_slots * sum(plane.nbytes for plane in planes)
    components = (
        ComponentSpec(FULL, Kind.FULL),
        ComponentSpec(SWA, Kind.SWA, shape.window_tokens),
        ComponentSpec(MAMBA, Kind.MAMBA),
    )
    return Layout(shape.page_size, components, tuple(pools)), offset


class PagedMemory:
    """Torch views of the pools in `buffer` (writable, as large as `layout_of` said); keeps it alive."""

    def __init__(self, shape: Shape, layout: Layout, buffer: memoryview | bytearray) -> None:
        self._layout = layout
        self._bytes = np.frombuffer(buffer, dtype=np.uint8)
        tokens = (shape.page_size, shape.kv_heads, shape.head_width)
        views = {pool.name: [self._view(pool, plane) for plane in pool.planes] for pool in layout.pools}
        self.keys: Mapping[str, list[torch.Tensor]] = {}
        self.values: Mapping[str, list[torch.Tensor]] = {}
        for component in (FULL, SWA):
            planes = [view.view(-1, *tokens) for view in views[f"{component}_kv"]]
            self.keys = {**self.keys, component: planes[0::2]}
            self.values = {**self.values, component: planes[1::2]}
        self.states = [
            view.view(-1, shape.state_heads, shape.key_width, shape.value_width)
            for view in views["mamba_state"]
        ]
        self.tails = [view.view(-1, shape.taps - 1, shape.channels) for view in views["mamba_tail"]]

    def _view(self, pool: Pool, plane: Plane) -> torch.Tensor:
        nbytes = pool.n_slots * plane.stride
        return torch.from_numpy(self._bytes[plane.offset : plane.offset + nbytes].view(np.float32))

    def copy_slot(self, component: str, source: int, target: int) -> None:
        """Copy every plane of one slot of a component onto another slot."""
        for pool in self._layout.pools_of(component):
            for plane in pool.planes:
                start, end = plane.offset + source * plane.stride, plane.offset + target * plane.stride
                self._bytes[end : end + plane.nbytes] = self._bytes[start : start + plane.nbytes]

    def clear_slot(self, component: str, slot: int) -> None:
        """Zero every plane of one slot: for MAMBA the state before the first token."""
        for pool in self._layout.pools_of(component):
            for plane in pool.planes:
                start = plane.offset + slot * plane.stride
                self._bytes[start : start + plane.nbytes] = 0

    def slot_bytes(self, component: str, slot: int) -> bytes:
        """All bytes of one slot of a component, anchor first, for comparison."""
        return b"".join(
            self._bytes[plane.offset + slot * plane.stride :][: plane.nbytes].tobytes()
            for pool in self._layout.pools_of(component)
            for plane in pool.planes
        )
