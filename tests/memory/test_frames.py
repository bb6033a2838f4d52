"""Frames: what a header binds, and that no doubtful byte passes."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import numpy as np
import pytest
import xxhash

from controller.memory.frames import HEADER, HEADER_BYTES, FrameLayout
from controller.requests import MappedRegion
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool

RNG = np.random.default_rng(7)
N_SLOTS = 6


def two_components(page_size: int = 16, **changes: int) -> Layout:
    """Two components with frames of equal size: only identity tells them apart."""
    sizes = {"kv": 11, "scale": 5, "window": 16} | changes
    return Layout(
        page_size,
        (ComponentSpec("full", Kind.FULL), ComponentSpec("swa", Kind.SWA, 64)),
        (
            Pool("kv", "full", N_SLOTS, (Plane(0, 0, 50, sizes["kv"]),), "bf16"),
            Pool("scale", "full", N_SLOTS, (Plane(0, 20, 50, sizes["scale"]),), "f32"),
            Pool("window", "swa", N_SLOTS, (Plane(0, 400, 50, sizes["window"]),), "bf16"),
        ),
    )


class Frames:
    """Sealed frames of random bytes in ordinary memory."""

    def __init__(self, layout: FrameLayout, n_frames: int) -> None:
        self.layout = layout
        self.memory = RNG.integers(0, 256, n_frames * layout.slot_bytes, dtype=np.uint8)
        places = np.arange(n_frames, dtype=np.uint64) * np.uint64(layout.slot_bytes)
        self.addresses = np.uint64(self.memory.ctypes.data) + places
        self.hashes = RNG.integers(0, 256, (n_frames, 32), dtype=np.uint8)
        self.pages = np.arange(n_frames, dtype=np.int32) + 3
        layout.seal(self.addresses, self.hashes, self.pages)

    def good(self) -> list[bool]:
        return list(map(bool, self.layout.verify(self.addresses, self.hashes, self.pages)))

    def frame(self, i: int) -> np.ndarray:
        start = i * self.layout.slot_bytes
        return self.memory[start : start + self.layout.frame_bytes]


def test_a_sealed_frame_verifies() -> None:
    assert Frames(FrameLayout(two_components(), "full"), 4).good() == [True] * 4


def test_no_frames_are_fine() -> None:
    assert Frames(FrameLayout(two_components(), "full"), 0).good() == []


def test_the_header_is_as_documented() -> None:
    assert HEADER.itemsize == HEADER_BYTES == 128
    frames = Frames(FrameLayout(two_components(), "full"), 1)
    frame = frames.frame(0).tobytes()
    magic, version, page, payload_bytes = struct.unpack_from("<8sIIQ", frame, 16)
    assert (magic, version, page, payload_bytes) == (b"HICACHE\0", 1, 3, 16)
    assert frame[40:56] == frames.layout.identity
    assert frame[56:88] == frames.hashes[0].tobytes()
    assert frame[88:128] == bytes(40)
    assert frame[:16] == xxhash.xxh3_128_digest(frame[16:])


def test_sealing_touches_only_the_header() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 2)
    before = frames.memory.copy()
    frames.layout.seal(frames.addresses[:1], frames.hashes[:1] + np.uint8(1), frames.pages[:1])
    changed = np.flatnonzero(before != frames.memory)
    assert len(changed) > 0
    assert int(changed.max()) < HEADER_BYTES


def test_any_single_flipped_bit_is_detected() -> None:
    """Every bit of header and payload, one after the other."""
    frames = Frames(FrameLayout(two_components(), "full"), 1)
    frame = frames.frame(0)
    for byte in range(frames.layout.frame_bytes):
        for bit in range(8):
            frame[byte] ^= np.uint8(1 << bit)
            assert frames.good() == [False], (byte, bit)
            frame[byte] ^= np.uint8(1 << bit)
    assert frames.good() == [True]


def test_bytes_behind_the_frame_do_not_matter() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 1)
    assert frames.layout.slot_bytes > frames.layout.frame_bytes
    frames.memory[frames.layout.frame_bytes :] ^= np.uint8(0xFF)
    assert frames.good() == [True]


def test_one_bad_frame_does_not_hide_its_neighbours() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 3)
    frames.frame(1)[-1] ^= np.uint8(1)
    assert frames.good() == [True, False, True]


def test_a_frame_of_another_page_is_refused() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 2)
    layout, at = frames.layout, frames.addresses
    assert not layout.verify(at, frames.hashes[::-1].copy(), frames.pages).any()
    assert not layout.verify(at, frames.hashes, frames.pages + 1).any()
    assert not layout.verify(at[::-1].copy(), frames.hashes, frames.pages).any()


def test_a_frame_of_another_component_of_the_same_size_is_refused() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 1)
    other = FrameLayout(two_components(), "swa")
    assert other.frame_bytes == frames.layout.frame_bytes
    assert not other.verify(frames.addresses, frames.hashes, frames.pages).any()


def test_a_frame_of_another_layout_is_refused() -> None:
    """KEY-10: a layout that means something else never reads the frame, even when the sizes agree."""
    base = two_components()
    frames = Frames(FrameLayout(base, "full"), 1)
    reordered = (base.pools[1], base.pools[0], base.pools[2])
    reformatted = (dataclasses.replace(base.pools[0], format="f16"), *base.pools[1:])
    others = [
        two_components(page_size=32),
        two_components(kv=10, scale=6),
        dataclasses.replace(base, pools=reordered),
        dataclasses.replace(base, pools=reformatted),
    ]
    for other in others:
        layout = FrameLayout(other, "full")
        assert layout.payload_bytes == frames.layout.payload_bytes
        assert not layout.verify(frames.addresses, frames.hashes, frames.pages).any()


def test_the_same_layout_elsewhere_in_memory_reads_the_frame() -> None:
    base = two_components()
    frames = Frames(FrameLayout(base, "full"), 1)
    moved = tuple(
        dataclasses.replace(
            pool,
            n_slots=3,
            planes=tuple(
                dataclasses.replace(plane, stride=90, offset=plane.offset + 7) for plane in pool.planes
            ),
        )
        for pool in base.pools
    )
    other = FrameLayout(dataclasses.replace(base, pools=moved), "full")
    assert other.verify(frames.addresses, frames.hashes, frames.pages).all()


@pytest.mark.parametrize("kept_bytes", [0, 15, 16, 100, 127, 128, 129, 143])
def test_a_truncated_frame_is_refused(kept_bytes: int) -> None:
    """What a shorter read leaves in the slot is an older frame, or nothing."""
    frames = Frames(FrameLayout(two_components(), "full"), 2)
    assert kept_bytes < frames.layout.frame_bytes
    for rest in (frames.frame(1)[kept_bytes:].copy(), np.uint8(0)):
        whole = frames.frame(0).copy()
        frames.frame(0)[kept_bytes:] = rest
        assert frames.good() == [False, True]
        frames.frame(0)[:] = whole


def test_an_empty_slot_is_refused() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 1)
    frames.memory[:] = 0
    assert frames.good() == [False]


def test_lengths_must_agree() -> None:
    frames = Frames(FrameLayout(two_components(), "full"), 2)
    with pytest.raises(ValueError, match="hashes"):
        frames.layout.verify(frames.addresses, frames.hashes[:1], frames.pages)
    with pytest.raises(ValueError, match="argument"):
        frames.layout.verify(frames.addresses[:1], frames.hashes, frames.pages)
    with pytest.raises(ValueError, match="frames"):
        table_of(frames.layout, [0, 1, 2], frames.addresses)


def table_of(layout: FrameLayout, slots: list[int], addresses: np.ndarray) -> list[tuple[int, int, int]]:
    table = layout.table([MappedRegion(10_000, 5000)], np.array(slots, dtype=np.int32), addresses)
    assert {column.dtype.name for column in (table.device, table.host, table.nbytes)} == {"uint64"}
    rows = zip(table.device.tolist(), table.host.tolist(), table.nbytes.tolist(), strict=True)
    return sorted(rows)


def test_the_table_places_anchor_then_sidecars_behind_the_header() -> None:
    layout = FrameLayout(two_components(), "full")
    addresses = np.array([70_000, 90_000], dtype=np.uint64)
    assert table_of(layout, [4, 1], addresses) == [
        (10_000 + 50, 90_128, 11),
        (10_000 + 20 + 50, 90_128 + 11, 5),
        (10_000 + 200, 70_128, 11),
        (10_000 + 20 + 200, 70_128 + 11, 5),
    ]


@pytest.mark.parametrize("slots", [[0, N_SLOTS], [-1, 0], [2, 2]])
def test_a_slot_that_is_not_there_or_named_twice_is_refused(slots: list[int]) -> None:
    layout = FrameLayout(two_components(), "full")
    with pytest.raises(ValueError, match="slot"):
        table_of(layout, slots, np.array([70_000, 90_000], dtype=np.uint64))


def test_an_unknown_component_is_refused() -> None:
    with pytest.raises(KeyError):
        FrameLayout(two_components(), "mamba")


def rows_of(layout: Layout, slots: list[int]) -> list[tuple[int, int, int]]:
    """The table in its own order, the region at 0 and frame i at i * 100,000."""
    addresses = np.arange(len(slots), dtype=np.uint64) * np.uint64(100_000)
    frames = FrameLayout(layout, "full")
    table = frames.table([MappedRegion(0, 10**6)], np.array(slots, dtype=np.int32), addresses)
    return list(zip(table.device.tolist(), table.host.tolist(), table.nbytes.tolist(), strict=True))


def full_only(*planes: Plane) -> Layout:
    return Layout(16, (ComponentSpec("full", Kind.FULL),), (Pool("kv", "full", 4, planes),))


def test_planes_side_by_side_are_one_piece() -> None:
    layout = full_only(*(Plane(0, 10 * i, 100, 10, layer=i) for i in range(8)), Plane(0, 700, 100, 10))
    assert rows_of(layout, [2]) == [(200, 128, 80), (900, 208, 10)]


def test_planes_that_only_seem_to_continue_stay_apart() -> None:
    layout = full_only(Plane(0, 0, 100, 10), Plane(0, 10, 90, 10), Plane(1, 20, 90, 10))
    frames = FrameLayout(layout, "full")
    regions = [MappedRegion(0, 1000), MappedRegion(5000, 1000)]
    table = frames.table(regions, np.array([1], dtype=np.int32), np.zeros(1, dtype=np.uint64))
    assert table.device.tolist() == [100, 100, 5110]


def test_evenly_spaced_planes_come_page_by_page_k_before_v() -> None:
    """However K and V alternate in the frame, each is a run of one step."""
    k_and_v = [
        plane for i in range(5) for plane in (Plane(0, 50 * i, 10, 10), Plane(0, 1000 + 50 * i, 10, 10))
    ]
    rows = rows_of(full_only(*k_and_v), [3, 1])
    k = [(50 * i, 128 + 20 * i, 10) for i in range(5)]
    v = [(1000 + 50 * i, 138 + 20 * i, 10) for i in range(5)]
    first = [(device + 30, host, nbytes) for device, host, nbytes in k + v]
    second = [(device + 10, host + 100_000, nbytes) for device, host, nbytes in k + v]
    assert rows == first + second


def test_unevenly_spaced_planes_come_plane_by_plane() -> None:
    """So that neighbouring slots are runs."""
    rows = rows_of(full_only(Plane(0, 0, 20, 10), Plane(0, 500, 30, 7), Plane(0, 800, 40, 9)), [0, 1, 2])
    assert [row[0] for row in rows] == [0, 20, 40, 500, 530, 560, 800, 840, 880]
    assert [row[1] for row in rows][:3] == [128, 100_128, 200_128]


def test_addresses_of_the_upper_half_do_not_wrap() -> None:
    layout = FrameLayout(two_components(), "full")
    table = layout.table(
        [MappedRegion((1 << 47) - 5000, 5000)],
        np.array([5], dtype=np.int32),
        np.array([(1 << 47) - 4096], dtype=np.uint64),
    )
    assert int(table.device.max()) == (1 << 47) - 5000 + 20 + 250
    assert ctypes.c_uint64(int(table.host.min())).value == (1 << 47) - 4096 + 128
