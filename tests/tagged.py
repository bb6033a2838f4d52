"""An engine's memory with tagged bytes: what every page of every component must hold follows from its hash.

Used wherever bytes travel, so that a wrong, stale or half-copied page cannot pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hicache.core.identity import Namespace, page_hashes
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from hicache.core.words import TokenArray

COMPONENTS = (
    ComponentSpec("full", Kind.FULL),
    ComponentSpec("swa", Kind.SWA, tokens=8),
    ComponentSpec("mamba", Kind.MAMBA),
)
PLANE_BYTES: Mapping[str, Sequence[Sequence[int]]] = {
    # pools of a component, anchor first: bytes per slot of each plane
    "full": ((96, 96, 33), (17,)),
    "swa": ((64, 31),),
    "mamba": ((200,), (5, 8)),
}


def make_layout(
    n_slots: Mapping[str, int],
    page_size: int = 4,
    components: Sequence[ComponentSpec] = COMPONENTS,
    plane_bytes: Mapping[str, Sequence[Sequence[int]]] = PLANE_BYTES,
    replicated: Collection[str] = (),
) -> tuple[Layout, int]:
    """A layout in one region, planes one after the other with a gap between slots; and the region's size."""
    pools, offset = [], 0
    for spec in components:
        for number, sizes in enumerate(plane_bytes[spec.name]):
            planes = []
            for layer, nbytes in enumerate(sizes):
                stride = nbytes + 3
                planes.append(Plane(0, offset, stride, nbytes, layer))
                offset += stride * n_slots[spec.name]
            name = f"{spec.name}{number}"
            pools.append(
                Pool(name, spec.name, n_slots[spec.name], tuple(planes), "u8", replicated=name in replicated)
            )
    return Layout(page_size, tuple(components), tuple(pools)), offset


class TaggedMemory:
    """One engine's region, its layout, and the right bytes for any page."""

    def __init__(self, layout: Layout, memory: NDArray[np.uint8], rank: int = 0) -> None:
        self.layout = layout
        self.rank = rank
        self.memory = memory
        memory[:] = 0xEE

    def expected(self, component: str, page_hash: bytes) -> bytes:
        """All planes of one page, anchor first; the same on all ranks where the pool is replicated."""
        return b"".join(
            hashlib.shake_128(
                f"{pool.name} {0 if pool.replicated else self.rank}".encode() + page_hash
            ).digest(pool.page_bytes)
            for pool in self.layout.pools_of(component)
        )

    def _places(self, component: str, slot: int) -> list[slice]:
        places = []
        for pool in self.layout.pools_of(component):
            for plane in pool.planes:
                start = plane.offset + slot * plane.stride
                places.append(slice(start, start + plane.nbytes))
        return places

    def write(self, component: str, slot: int, page_hash: bytes) -> None:
        """What a forward pass would have stored."""
        payload, at = np.frombuffer(self.expected(component, page_hash), dtype=np.uint8), 0
        for place in self._places(component, slot):
            width = place.stop - place.start
            self.memory[place] = payload[at : at + width]
            at += width

    def read(self, component: str, slot: int) -> bytes:
        return b"".join(self.memory[place].tobytes() for place in self._places(component, slot))

    def smudge(self, component: str, slot: int) -> None:
        """Somebody else uses the slot now."""
        for place in self._places(component, slot):
            self.memory[place] = 0xDD

    def check(self, component: str, slot: int, page_hash: bytes) -> None:
        assert self.read(component, slot) == self.expected(component, page_hash), (component, slot)


def hashes_of(namespace: Namespace, tokens: TokenArray) -> list[bytes]:
    """Page hashes of a prompt, by the definition in docs/identity.md."""
    return [row.tobytes() for row in page_hashes(namespace.seed(), tokens, namespace.page_size)]


def prompt(seed: int, n_tokens: int, prefix: TokenArray | None = None) -> TokenArray:
    """A reproducible prompt, after a shared prefix if one is given."""
    fresh = np.random.default_rng(seed).integers(0, 1 << 30, n_tokens, dtype=np.int32)
    return fresh if prefix is None else np.concatenate([prefix, fresh])
