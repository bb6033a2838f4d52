"""Free slots of an arena brought together: what the slab promises about emptying an extent."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.memory.slab import HostArena, HostSlab

KIB = 1 << 10


def used_by_extent(arena: HostArena) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.bincount(arena.used_slots() // arena.slots_per_extent)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(1, 20), st.floats(0, 1)), max_size=12),
    seed=st.integers(0, 1000),
    at_most=st.integers(1, 20),
)
def test_any_extent_offered_can_be_emptied_and_is_free_then(
    steps: list[tuple[int, float]], seed: int, at_most: int
) -> None:
    """Fewest frames first; the moved frames get slots that were free, in other extents; no slot is lost."""
    rng = np.random.default_rng(seed)
    with HostSlab(64 * KIB, extent_bytes=4 * KIB, reserve_bytes=0) as slab:
        arena, other = slab.arena(512), slab.arena(256)
        for n_slots, part in steps:
            taken = arena.alloc(min(n_slots, arena.obtainable()))
            assert taken is not None
            used = arena.used_slots()
            arena.free(rng.permutation(used)[: int(part * len(used))])
        n_used = len(arena.used_slots())
        while offered := arena.emptiest(at_most):
            counts = used_by_extent(arena)
            fewest = np.sort(counts[counts > 0])[: len(offered)]
            assert [int(counts[extent]) for extent in offered] == fewest.tolist()
            extent = offered[int(rng.integers(len(offered)))]
            old, free_extents = arena.slots_in(extent), slab.free_extents
            before = set(arena.used_slots().tolist())
            fresh = arena.alloc_beside(extent, len(old))
            assert len(fresh) == len(old)
            assert not set(fresh.tolist()) & before
            assert extent not in fresh // arena.slots_per_extent
            arena.free(old)
            assert slab.free_extents == free_extents + 1
            assert len(arena.used_slots()) == n_used
        assert arena.free_slots < arena.slots_per_extent
        assert arena.obtainable() == arena.free_slots + 8 * slab.free_extents
        assert other.obtainable() == 16 * slab.free_extents
        everything = arena.alloc(arena.obtainable())
        assert everything is not None
        assert len(np.unique(arena.used_slots())) == n_used + len(everything) == 16 * 8
