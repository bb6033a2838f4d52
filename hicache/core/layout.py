"""Layout: how an engine describes its memory, once, when it attaches.

Planes place every byte of a page; pools group planes; components group pools. Everything that decides
what a frame's bytes mean goes into the fingerprint, and so into identity. Maps and copies nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hicache.core.coverage import Checkpoint, Chunked, Component, Coverage, SlidingWindow, WholePath
from hicache.core.identity import framed


class LayoutError(ValueError):
    """A layout that cannot be served; the message names the field and the remedy."""


class Kind(Enum):
    """The reuse rules an engine can name."""

    FULL = "full"
    SWA = "swa"
    MAMBA = "mamba"
    CHUNKED = "chunked"


@dataclass(frozen=True)
class ComponentSpec:
    """One kind of state: its rule, and the rule's length in tokens (window or chunk; 0 for the others)."""

    name: str
    kind: Kind
    tokens: int = 0

    def coverage(self, page_size: int) -> Coverage:
        """The rule in pages; a window or chunk is rounded up to whole pages."""
        pages = -(-self.tokens // page_size)
        match self.kind:
            case Kind.FULL:
                return WholePath()
            case Kind.SWA:
                return SlidingWindow(pages)
            case Kind.MAMBA:
                return Checkpoint()
            case Kind.CHUNKED:
                return Chunked(pages)


@dataclass(frozen=True)
class Plane:
    """One strided piece of a page's payload: slot s is at `region[offset + s * stride :][:nbytes]`."""

    region: int
    """Which of the engine's regions, by position."""
    offset: int
    stride: int
    nbytes: int
    layer: int = 0


@dataclass(frozen=True)
class Pool:
    """The engine's memory for one kind of payload. A component's first pool is its anchor: it defines
    the slots; further pools are sidecars, follow the anchor's slots and never vote on the boundary."""

    name: str
    component: str
    n_slots: int
    planes: tuple[Plane, ...]
    format: str = ""
    """Number format and meaning of the bytes as the engine names it (say `bf16 k,v`): part of identity."""
    replicated: bool = False
    """Whether every rank of a group holds the same bytes (MLA latents): kept once, by rank 0."""

    @property
    def page_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


@dataclass(frozen=True)
class Layout:
    """All of an engine's pools, in the order in which their planes stand in a frame."""

    page_size: int
    components: tuple[ComponentSpec, ...]
    pools: tuple[Pool, ...]

    def pools_of(self, component: str) -> tuple[Pool, ...]:
        """Anchor first, then its sidecars."""
        return tuple(pool for pool in self.pools if pool.component == component)

    def slots_of(self, component: str) -> int:
        """Size of the component's device slot space."""
        return self.pools_of(component)[0].n_slots

    def index_components(self) -> tuple[Component, ...]:
        return tuple(Component(spec.name, spec.coverage(self.page_size)) for spec in self.components)

    def fingerprint(self) -> bytes:
        """16 bytes over everything that decides what a frame's bytes mean: page size, components and
        their rules, pools, formats, and each plane's layer and size. Where a plane lies in the engine's
        memory, and how many slots there are, is left out: engines of different sizes share frames."""
        fields = [struct.pack("<Q", self.page_size)]
        for spec in self.components:
            pools = [
                framed(
                    pool.name.encode(),
                    pool.format.encode(),
                    b"replicated" if pool.replicated else b"",
                    *(struct.pack("<qQ", plane.layer, plane.nbytes) for plane in pool.planes),
                )
                for pool in self.pools_of(spec.name)
            ]
            fields.append(
                framed(spec.name.encode(), spec.kind.value.encode(), struct.pack("<Q", spec.tokens), *pools)
            )
        return hashlib.sha256(framed(b"hicache layout 1", *fields)).digest()[:16]

    def validate(self, region_bytes: Sequence[int]) -> None:
        """Raise LayoutError unless every byte of every plane lies inside its region (sizes in bytes),
        no two planes overlap, and components, pools and planes agree with each other."""
        if self.page_size < 1:
            raise LayoutError(f"layout.page_size: {self.page_size} tokens; it must be at least 1")
        if not self.components:
            raise LayoutError("layout.components: empty; name at least one component")
        self._validate_components()
        names: set[str] = set()
        for pool in self.pools:
            if pool.name in names:
                raise LayoutError(f"layout.pools: two pools are called {pool.name!r}; names must differ")
            names.add(pool.name)
            self._validate_pool(pool, region_bytes)
        self._validate_overlap()

    def _validate_components(self) -> None:
        seen: set[str] = set()
        for spec in self.components:
            where = f"layout.components[{spec.name!r}]"
            if not spec.name or not spec.name.isidentifier() or not spec.name.isascii():
                raise LayoutError(f"{where}: a name is letters, digits and '_', and is part of storage keys")
            if spec.name in seen:
                raise LayoutError(f"{where}: named twice")
            seen.add(spec.name)
            needs_tokens = spec.kind in (Kind.SWA, Kind.CHUNKED)
            if needs_tokens != (spec.tokens > 0):
                rule = "needs its length in tokens (> 0)" if needs_tokens else "takes no length"
                raise LayoutError(f"{where}.tokens: {spec.tokens}; a {spec.kind.value} component {rule}")
            if not self.pools_of(spec.name):
                raise LayoutError(f"{where}: no pool belongs to it; add its anchor pool")
            sizes = {pool.name: pool.n_slots for pool in self.pools_of(spec.name)}
            if len(set(sizes.values())) > 1:
                raise LayoutError(f"{where}: anchor and sidecars must have equal n_slots, got {sizes}")
        for pool in self.pools:
            if pool.component not in seen:
                raise LayoutError(
                    f"layout.pools[{pool.name!r}].component: {pool.component!r} is not one of {sorted(seen)}"
                )

    def _validate_pool(self, pool: Pool, region_bytes: Sequence[int]) -> None:
        where = f"layout.pools[{pool.name!r}]"
        if pool.n_slots < 1:
            raise LayoutError(f"{where}.n_slots: {pool.n_slots}; a pool has at least one slot")
        if not pool.planes:
            raise LayoutError(f"{where}.planes: empty; a pool has at least one plane")
        for i, plane in enumerate(pool.planes):
            at = f"{where}.planes[{i}]"
            if not 0 <= plane.region < len(region_bytes):
                raise LayoutError(f"{at}.region: {plane.region}; {len(region_bytes)} regions were given")
            if plane.nbytes < 1:
                raise LayoutError(f"{at}.nbytes: {plane.nbytes}; a plane has at least one byte per slot")
            if pool.n_slots > 1 and plane.stride < plane.nbytes:
                raise LayoutError(
                    f"{at}.stride: {plane.stride} is below nbytes {plane.nbytes}; neighbouring slots overlap"
                )
            end = plane.offset + (pool.n_slots - 1) * plane.stride + plane.nbytes
            if plane.offset < 0 or end > region_bytes[plane.region]:
                raise LayoutError(
                    f"{at}: bytes [{plane.offset}, {end}) do not lie in region {plane.region} of "
                    f"{region_bytes[plane.region]} bytes; check offset, stride and n_slots"
                )

    def _validate_overlap(self) -> None:
        """Interleaved planes (equal stride, disjoint phases) may share a span; other overlaps are errors."""
        spans: dict[int, list[tuple[int, int, str, Plane]]] = {}
        for pool in self.pools:
            for plane in pool.planes:
                end = plane.offset + (pool.n_slots - 1) * plane.stride + plane.nbytes
                spans.setdefault(plane.region, []).append((plane.offset, end, pool.name, plane))
        for found in spans.values():
            found.sort(key=lambda span: span[0])
            open_spans: list[tuple[int, int, str, Plane]] = []
            for span in found:
                open_spans = [other for other in open_spans if other[1] > span[0]]
                for other in open_spans:
                    if not _interleaved(other[3], span[3]):
                        raise LayoutError(
                            f"layout.pools[{span[2]!r}]: a plane at offset {span[3].offset} overlaps one of "
                            f"pool {other[2]!r} at offset {other[3].offset}; planes must not share bytes"
                        )
                open_spans.append(span)


def _interleaved(first: Plane, second: Plane) -> bool:
    if first.stride != second.stride or first.stride == 0:
        return False
    phase = (second.offset - first.offset) % first.stride
    return phase >= first.nbytes and phase + second.nbytes <= first.stride


def component_slots(layout: Layout) -> Mapping[str, int]:
    """Device slot count of every component."""
    return {spec.name: layout.slots_of(spec.name) for spec in layout.components}
