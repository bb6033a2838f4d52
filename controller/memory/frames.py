"""Frames: how one page's payload of one component stands in host memory and in storage.

Decides the order of planes in a frame, what its header binds and how a damaged or foreign frame is
recognised. Writes headers and reads frames; never moves payload, never decides what a bad frame costs.

A frame is a header of 128 bytes, then the planes without gaps: the anchor's, then each sidecar's, in the
order of the layout. The header, little endian:

    0  checksum      16   xxh3-128 (canonical, big endian) of every byte after it: header and payload
    16 magic          8   b"HICACHE\\0"
    24 version        4
    28 page           4   number of the page from the start of its prompt
    32 payload_bytes  8
    40 identity      16   of layout and component
    56 page_hash     32
    88 zero          40
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from controller.memory.slab import slot_bytes_of
from controller.requests import MappedRegion
from hicache.core.identity import HASH_BYTES, framed
from hicache.core.layout import Layout, Plane
from hicache.core.words import BoolArray, HashArray, PageArray, SlotArray

HEADER_BYTES = 128
CHECKSUM_BYTES = 16
MAGIC = b"HICACHE\0"
VERSION = 1

_MOST_ALTERNATING = 4

HEADER = np.dtype(
    [
        ("checksum", "V16"),
        ("magic", "V8"),
        ("version", "<u4"),
        ("page", "<u4"),
        ("payload_bytes", "<u8"),
        ("identity", "V16"),
        ("page_hash", "u1", (HASH_BYTES,)),
        ("zero", "u1", (40,)),
    ]
)


@dataclass(frozen=True, eq=False)
class PlaneTable:
    """Pieces of a set of frames: addresses in the engine's memory and in the slab, and sizes; equal
    lengths, in the order that lets a copy engine see the most pieces at even distances."""

    device: NDArray[np.uint64]
    host: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]


@dataclass(frozen=True)
class _Piece:
    """Planes that are neighbours in the engine's memory as in the frame: one copy."""

    region: int
    offset: int
    stride: int
    frame_offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Places:
    """Where pieces are, a column each."""

    regions: list[int]
    offsets: NDArray[np.uint64]
    strides: NDArray[np.uint64]
    frame_offsets: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    page_by_page: bool

    @classmethod
    def of(cls, pieces: Sequence[_Piece]) -> _Places:
        return cls(
            [piece.region for piece in pieces],
            np.array([piece.offset for piece in pieces], dtype=np.uint64),
            np.array([piece.stride for piece in pieces], dtype=np.uint64),
            np.array([piece.frame_offset for piece in pieces], dtype=np.uint64),
            np.array([piece.nbytes for piece in pieces], dtype=np.uint64),
            page_by_page=2 * _n_even(pieces) >= len(pieces),
        )


class FrameLayout:
    """The frame of one component of one layout, for one rank of a group: pools that are replicated stand
    in rank 0's frame only. `shared_only` is another rank's view of rank 0's frame: its `table` names just
    the replicated planes."""

    def __init__(self, layout: Layout, component: str, *, rank: int = 0, shared_only: bool = False) -> None:
        """Raises KeyError for a component that the layout does not have."""
        known = layout.pools_of(component)
        if not known:
            raise KeyError(component)
        pools = [pool for pool in known if rank == 0 or not pool.replicated]
        self.component = component
        self.n_slots = known[0].n_slots
        self.payload_bytes = sum(pool.page_bytes for pool in pools)
        self.frame_bytes = HEADER_BYTES + self.payload_bytes
        self.slot_bytes = slot_bytes_of(self.frame_bytes)
        self.identity = hashlib.sha256(
            framed(b"hicache frame 1", layout.fingerprint(), component.encode(), rank.to_bytes(8, "little"))
        ).digest()[:16]
        self._planes = [
            (plane, pool.replicated or not shared_only) for pool in pools for plane in pool.planes
        ]
        self._places = _Places.of(_pieces(self._planes))
        self._places_of_layer: dict[int, _Places] = {}
        self._checked = ctypes.c_ubyte * (self.frame_bytes - CHECKSUM_BYTES)

    def table(
        self,
        regions: Sequence[MappedRegion],
        device_slots: SlotArray,
        host_addresses: NDArray[np.uint64],
        *,
        layer: int | None = None,
    ) -> PlaneTable:
        """The pieces of the pages in these device slots and of their frames at these addresses (equal
        lengths): all of them, or those of one layer, sidecars included. Raises ValueError for a slot
        outside the component's slot space or named twice."""
        slots = np.asarray(device_slots, dtype=np.int64)
        if len(slots) != len(host_addresses):
            raise ValueError(f"{self.component}: {len(slots)} slots for {len(host_addresses)} frames")
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= self.n_slots):
            raise ValueError(f"{self.component}: a slot is outside [0, {self.n_slots})")
        if len(np.unique(slots)) != len(slots):
            raise ValueError(f"{self.component}: a slot is named twice")
        places = self._places if layer is None else self._layer(layer)
        bases = np.array([regions[region].address for region in places.regions], dtype=np.uint64)
        device = (bases + places.offsets) + places.strides * slots.astype(np.uint64)[:, None]
        host = places.frame_offsets + np.asarray(host_addresses, dtype=np.uint64)[:, None]
        nbytes = np.broadcast_to(places.nbytes, device.shape)
        if not places.page_by_page:  # then neighbouring slots are at even distances, if anything is
            device, host, nbytes = device.T, host.T, nbytes.T
        return PlaneTable(device.ravel(), host.ravel(), nbytes.ravel())

    def seal(self, addresses: NDArray[np.uint64], hashes: HashArray, pages: PageArray) -> None:
        """Write the headers of frames whose payload is complete: which page each is, and its checksum.
        Nobody may change a payload from here on. Releases the GIL while hashing."""
        headers = self._headers(hashes, pages)
        for address, header in zip(addresses.tolist(), headers, strict=True):
            ctypes.memmove(address, header, HEADER_BYTES)
            ctypes.memmove(address, self._checksum(address), CHECKSUM_BYTES)

    def verify(self, addresses: NDArray[np.uint64], hashes: HashArray, pages: PageArray) -> BoolArray:
        """Which of these frames are whole, unchanged since `seal`, and the frames of just these pages of
        this component and layout. Any flipped bit in header or payload makes a frame false. Reads
        `frame_bytes` at each address, changes nothing. Releases the GIL while hashing."""
        expected = self._headers(hashes, pages)
        good = np.zeros(len(expected), dtype=np.bool_)
        for i, (address, header) in enumerate(zip(addresses.tolist(), expected, strict=True)):
            found = ctypes.string_at(address, HEADER_BYTES)
            same = found[CHECKSUM_BYTES:] == header[CHECKSUM_BYTES:]
            good[i] = same and found[:CHECKSUM_BYTES] == self._checksum(address)
        return good

    def _layer(self, layer: int) -> _Places:
        places = self._places_of_layer.get(layer)
        if places is None:
            chosen = [(plane, wanted and plane.layer == layer) for plane, wanted in self._planes]
            places = self._places_of_layer[layer] = _Places.of(_pieces(chosen))
        return places

    def _checksum(self, address: int) -> bytes:
        return xxhash.xxh3_128_digest(self._checked.from_address(address + CHECKSUM_BYTES))

    def _headers(self, hashes: HashArray, pages: PageArray) -> list[bytes]:
        """Headers without checksums."""
        if hashes.shape != (len(pages), HASH_BYTES):
            raise ValueError(f"{self.component}: hashes of shape {hashes.shape} for {len(pages)} pages")
        headers = np.zeros(len(pages), dtype=HEADER)
        headers["magic"] = np.void(MAGIC)
        headers["version"] = VERSION
        headers["page"] = pages
        headers["payload_bytes"] = self.payload_bytes
        headers["identity"] = np.void(self.identity)
        headers["page_hash"] = hashes
        packed = headers.tobytes()
        return [packed[start : start + HEADER_BYTES] for start in range(0, len(packed), HEADER_BYTES)]


def _pieces(planes: Sequence[tuple[Plane, bool]]) -> list[_Piece]:
    """Those planes of a frame that are chosen, merged where both sides are contiguous, in an order with
    long runs at even distances."""
    pieces: list[_Piece] = []
    frame_offset = HEADER_BYTES
    for plane, chosen in planes:
        piece = _Piece(plane.region, plane.offset, plane.stride, frame_offset, plane.nbytes)
        if chosen and pieces and _continues(pieces[-1], piece):
            pieces[-1] = replace(pieces[-1], nbytes=pieces[-1].nbytes + piece.nbytes)
        elif chosen:
            pieces.append(piece)
        frame_offset += plane.nbytes
    alike: dict[tuple[int, int, int], list[_Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.region, piece.stride, piece.nbytes), []).append(piece)
    return [piece for group in alike.values() for piece in _in_runs(group)]


def _continues(piece: _Piece, other: _Piece) -> bool:
    return (
        piece.region == other.region
        and piece.stride == other.stride
        and piece.offset + piece.nbytes == other.offset
        and piece.frame_offset + piece.nbytes == other.frame_offset
    )


def _in_runs(pieces: list[_Piece]) -> list[_Piece]:
    """K and V of every layer alternate in most layouts; apart, each is a run."""
    orders = ([p for first in range(n) for p in pieces[first::n]] for n in range(1, _MOST_ALTERNATING + 1))
    return max(orders, key=_n_even)


def _n_even(pieces: Sequence[_Piece]) -> int:
    """How many steps from piece to piece are as long as the step before, on both sides."""
    steps = [
        (b.region - a.region, b.offset - a.offset, b.frame_offset - a.frame_offset, b.nbytes - a.nbytes)
        for a, b in pairwise(pieces)
    ]
    return sum(first == second for first, second in pairwise(steps))
