"""Slot pools: all or nothing, and nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.pools import SlotPool


@given(n_slots=st.integers(0, 20), steps=st.lists(st.integers(-20, 20), max_size=30))
def test_a_pool_hands_out_each_slot_once(n_slots: int, steps: list[int]) -> None:
    """Against a set of owned slots; positive steps allocate so many, negative ones free."""
    pool, owned = SlotPool(n_slots), list[int]()
    for step in steps:
        if step >= 0:
            slots = pool.alloc(step)
            assert (slots is None) == (step > n_slots - len(owned))
            owned += [] if slots is None else slots.tolist()
        else:
            back, owned = owned[step:], owned[:step]
            pool.free(np.array(back, dtype=np.int32))
        assert sorted(owned) == pool.used_slots().tolist()
        assert len(set(owned)) == len(owned) == n_slots - pool.n_free


@pytest.mark.parametrize("bad", [[0, 0], [0, 5], [0, 8], [0, -2], [7, 0, 7]])
def test_a_wrong_free_changes_nothing(bad: list[int]) -> None:
    """Free twice, never allocated, out of range, below -1."""
    pool = SlotPool(8)
    mine = pool.alloc(8)
    assert mine is not None
    pool.free(np.array([5], dtype=np.int32))
    before = pool.used_slots().tolist()
    with pytest.raises(ValueError, match="free"):
        pool.free(np.array(bad, dtype=np.int32))
    assert pool.used_slots().tolist() == before
    assert pool.n_free == 1


def test_sizes_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        SlotPool(-1)
    with pytest.raises(ValueError, match="alloc"):
        SlotPool(1).alloc(-1)
