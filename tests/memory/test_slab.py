"""The slab: budget, seals, prefault, extents and what it gives back."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.memory import slab as slab_module
from controller.memory.slab import SLOT_ALIGN_BYTES, HostSlab, SlabError, slot_bytes_of

MIB = 1 << 20


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    with HostSlab(4 * MIB) as slab:
        yield slab


def open_files() -> int:
    gc.collect()  # what other tests left to it
    return len(os.listdir("/proc/self/fd"))


def slab_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("hicache-slab")


def test_nobody_can_shrink_or_grow_it(slab: HostSlab) -> None:
    for nbytes in (0, slab.nbytes - mmap.PAGESIZE, slab.nbytes + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, nbytes)


def test_buffer_address_and_descriptor_show_the_same_bytes(slab: HostSlab) -> None:
    slab.buffer[5] = 77
    assert ctypes.string_at(slab.address + 5, 1) == bytes([77])
    assert os.pread(slab.fd, 1, 5) == bytes([77])


def test_prefault_reports_rising_progress_up_to_the_whole_and_keeps_contents(
    slab: HostSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "_PREFAULT_CHUNK_BYTES", 3 * MIB // 2)
    slab.buffer[slab.nbytes - 1] = 9
    seen: list[int] = []
    slab.prefault(seen.append)
    assert seen == [3 * MIB // 2, 3 * MIB, 4 * MIB]
    assert slab.buffer[slab.nbytes - 1] == 9
    assert os.fstat(slab.fd).st_blocks * 512 == slab.nbytes


class FakeLibc:
    """A C library whose madvise fails with the codes given, one after the other."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        if not self.codes:
            return 0
        ctypes.set_errno(self.codes.pop(0))
        return -1


def test_an_old_kernel_is_prefaulted_by_touching(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_libc", FakeLibc(errno.EINVAL))
    slab.buffer[mmap.PAGESIZE] = 9
    seen: list[int] = []
    slab.prefault(seen.append, threads=1)
    assert seen == [slab.nbytes]
    assert slab.buffer[mmap.PAGESIZE] == 9
    assert os.fstat(slab.fd).st_blocks * 512 == slab.nbytes


def test_an_interrupted_prefault_goes_on(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibc(errno.EINTR, errno.EAGAIN)
    monkeypatch.setattr(slab_module, "_libc", fake)
    slab.prefault(threads=1)
    assert fake.codes == []


def test_memory_that_cannot_be_had_is_an_error(slab: HostSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_libc", FakeLibc(errno.ENOMEM))
    with pytest.raises(SlabError, match=r"host\.capacity"):
        slab.prefault(threads=1)


def test_a_closed_slab_leaves_no_descriptor_and_no_mapping() -> None:
    files, mappings = open_files(), slab_mappings()
    for _ in range(20):
        slab = HostSlab(MIB)
        slab.arena(1000).alloc(3)
        slab.close()
        slab.close()
    assert open_files() <= files
    assert slab_mappings() == mappings


def test_a_slab_that_could_not_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files()

    def fail(*args: object) -> None:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OSError, match="no room"):
        HostSlab(MIB)
    assert open_files() <= files


def test_a_frame_larger_than_the_slab_is_refused_with_the_sizes(slab: HostSlab) -> None:
    with pytest.raises(SlabError) as refused:
        slab.plan([1000, 5 * MIB])
    assert "host.capacity" in str(refused.value)
    assert str(slab.nbytes) in str(refused.value)
    assert str(5 * MIB) in str(refused.value)
    assert slab.n_extents == 0
    with pytest.raises(SlabError, match=r"host\.capacity"):
        slab.arena(5 * MIB)


def test_every_component_gets_at_least_one_frame_or_the_plan_fails(slab: HostSlab) -> None:
    """MEMORY-02: one budget for all components, and none of them is left without room."""
    slab.plan([MIB, 3 * MIB // 4, 1000, MIB])
    with HostSlab(4 * MIB) as other, pytest.raises(SlabError, match="at least"):
        other.plan([MIB, 3 * MIB // 4, 1000, 1000, MIB])


def test_one_budget_holds_all_components_and_sidecars() -> None:
    """MEMORY-02: the sum over all arenas, filled to the brim, stays within the one figure."""
    with HostSlab(8 * MIB) as slab:
        sizes = [7000, 60_000, 250_000]
        slab.plan(sizes)
        arenas = [slab.arena(size) for size in sizes]
        taken_bytes = 0
        for arena in [*arenas, *arenas]:
            n_slots = max(1, arena.obtainable() // 2)
            if arena.obtainable():
                slots = arena.alloc(n_slots)
                assert slots is not None
                taken_bytes += n_slots * arena.slot_bytes
        for arena in arenas:
            slots = arena.alloc(arena.obtainable())
            assert slots is not None
            taken_bytes += len(slots) * arena.slot_bytes
        assert taken_bytes <= slab.used_bytes <= slab.nbytes
        assert taken_bytes > slab.nbytes * 0.85
        assert [arena.obtainable() for arena in arenas] == [0, 0, 0]


def test_division_follows_need_without_ratios(slab: HostSlab) -> None:
    slab.plan([5000, 9000])
    small, large = slab.arena(5000), slab.arena(9000)
    slots = small.alloc(small.obtainable())
    assert slots is not None
    assert large.alloc(1) is None
    small.free(slots)
    assert slab.free_extents == slab.n_extents
    slots = large.alloc(large.obtainable())
    assert slots is not None
    assert len(slots) == slab.n_extents * large.slots_per_extent
    assert small.obtainable() == 0


def test_slots_are_aligned_disjoint_and_inside(slab: HostSlab) -> None:
    arena = slab.arena(1001)
    slots = arena.alloc(arena.obtainable())
    assert slots is not None
    offsets = arena.offsets(slots)
    assert offsets.dtype == np.int64
    assert not (offsets % SLOT_ALIGN_BYTES).any()
    assert int(np.diff(np.sort(offsets)).min()) >= slot_bytes_of(1001)
    assert int(offsets.max()) + 1001 <= slab.nbytes
    assert (arena.addresses(slots) == offsets.astype(np.uint64) + np.uint64(slab.address)).all()


def test_alloc_is_all_or_nothing(slab: HostSlab) -> None:
    arena = slab.arena(100_000)
    everything = arena.obtainable()
    assert arena.alloc(everything + 1) is None
    assert arena.obtainable() == everything
    assert len(arena.used_slots()) == 0
    slots = arena.alloc(0)
    assert slots is not None
    assert len(slots) == 0
    with pytest.raises(ValueError, match="negative"):
        arena.alloc(-1)


def _twice(slots: np.ndarray) -> np.ndarray:
    return np.append(slots, slots[:1])


def _foreign(slots: np.ndarray) -> np.ndarray:
    return np.append(slots, np.int32(10**6))


def _negative(slots: np.ndarray) -> np.ndarray:
    return np.append(slots, np.int32(-2))


def _unused(slots: np.ndarray) -> np.ndarray:
    return np.append(slots, slots.max() + np.int32(1))


@pytest.mark.parametrize("spoil", [_twice, _foreign, _negative, _unused])
def test_a_wrong_free_raises_before_any_change(
    slab: HostSlab, spoil: Callable[[np.ndarray], np.ndarray]
) -> None:
    arena = slab.arena(3000)
    slots = arena.alloc(5)
    assert slots is not None
    before = arena.obtainable()
    with pytest.raises(ValueError, match="slot"):
        arena.free(spoil(slots))
    assert arena.obtainable() == before
    assert arena.used_slots().tolist() == sorted(slots.tolist())


def test_absent_slots_are_ignored_when_freed(slab: HostSlab) -> None:
    """SWA-03: lists of slots carry -1 where there is none."""
    arena = slab.arena(3000)
    slots = arena.alloc(2)
    assert slots is not None
    arena.free(np.array([-1, slots[0], -1, slots[1], -1], dtype=np.int32))
    arena.free(np.array([-1, -1], dtype=np.int32))
    assert len(arena.used_slots()) == 0


def test_a_shared_slot_is_handed_out_once_and_freed_once(slab: HostSlab) -> None:
    """SIDECAR-05: a frame holds anchor and sidecars, so they share one slot: each is handed out once."""
    arena = slab.arena(3000)
    total = arena.obtainable()
    slots = arena.alloc(4)
    assert slots is not None
    arena.free(slots)
    with pytest.raises(ValueError, match="not in use"):
        arena.free(slots)
    every = arena.alloc(total)
    assert every is not None
    assert len(np.unique(every)) == total


def test_a_later_larger_frame_cuts_an_empty_slab_anew_and_refuses_a_full_one(slab: HostSlab) -> None:
    small = slab.arena(1000)
    first_cut = slab.extent_bytes
    assert first_cut < MIB
    slots = small.alloc(1)
    assert slots is not None
    with pytest.raises(SlabError, match="cut anew"):
        slab.plan([MIB])
    assert slab.extent_bytes == first_cut
    small.free(slots)
    slab.plan([MIB])
    assert slab.extent_bytes >= MIB
    assert small.obtainable() == slab.n_extents * small.slots_per_extent > 0
    assert slab.arena(MIB).obtainable() >= 1


def test_a_given_extent_size_is_kept() -> None:
    with HostSlab(4 * MIB, extent_bytes=300_000) as slab:
        slab.plan([1000])
        assert slab.extent_bytes == slot_bytes_of(300_000)
        with pytest.raises(SlabError, match=r"host\.capacity"):
            slab.plan([400_000])
    with pytest.raises(SlabError, match=r"host\.extent"):
        HostSlab(4 * MIB, extent_bytes=5 * MIB)


def test_extents_waste_little_for_unlike_frames() -> None:
    with HostSlab(64 * MIB) as slab:
        sizes = [70_128, 33_000, 590_000]
        slab.plan(sizes)
        for size in sizes:
            assert slab.extent_bytes % slot_bytes_of(size) <= slab.extent_bytes / 8


def test_a_slab_below_one_page_is_refused() -> None:
    with pytest.raises(SlabError, match=r"host\.capacity"):
        HostSlab(100)
