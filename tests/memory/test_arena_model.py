"""Arenas against a naive model: sets of slots, recounted after every step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controller.memory.slab import HostSlab

SIZES = (256, 700, 5000)


class Arenas(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slab = HostSlab(256 << 10, reserve_bytes=0)
        self.slab.plan(SIZES)
        self.arenas = [self.slab.arena(size) for size in SIZES]
        self.held: list[set[int]] = [set() for _ in SIZES]

    @rule(which=st.sampled_from(range(len(SIZES))), n_slots=st.integers(0, 300))
    def alloc(self, which: int, n_slots: int) -> None:
        arena, obtainable = self.arenas[which], self.arenas[which].obtainable()
        slots = arena.alloc(n_slots)
        assert (slots is not None) == (n_slots <= obtainable)
        if slots is not None:
            assert len(slots) == n_slots
            assert len(set(slots.tolist())) == n_slots
            assert not set(slots.tolist()) & self.held[which]
            self.held[which] |= set(slots.tolist())
            assert arena.obtainable() == obtainable - n_slots

    @precondition(lambda self: any(self.held))
    @rule(choice=st.data())
    def free(self, choice: st.DataObject) -> None:
        which = choice.draw(st.sampled_from([i for i, slots in enumerate(self.held) if slots]))
        slots = sorted(self.held[which])
        if choice.draw(st.booleans()):
            first = choice.draw(st.integers(0, len(slots) - 1))
            slots = slots[first : first + choice.draw(st.integers(1, len(slots)))]
        else:
            slots = choice.draw(st.lists(st.sampled_from(slots), unique=True, min_size=1))
        self.arenas[which].free(np.array(slots, dtype=np.int32))
        self.held[which] -= set(slots)

    @invariant()
    def arenas_know_what_they_hold(self) -> None:
        for arena, held in zip(self.arenas, self.held, strict=True):
            assert arena.used_slots().tolist() == sorted(held)

    @invariant()
    def no_two_frames_share_a_byte_and_all_lie_inside(self) -> None:
        spans = sorted(
            (int(offset), int(offset) + arena.slot_bytes)
            for arena, held in zip(self.arenas, self.held, strict=True)
            for offset in arena.offsets(np.array(sorted(held), dtype=np.int32))
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert not spans or spans[-1][1] <= self.slab.nbytes

    @invariant()
    def an_extent_is_held_exactly_while_it_holds_a_frame(self) -> None:
        extents: list[int] = []
        for arena, held in zip(self.arenas, self.held, strict=True):
            extents += {slot // arena.slots_per_extent for slot in held}
        assert len(extents) == len(set(extents))
        assert self.slab.free_extents == self.slab.n_extents - len(extents)
        assert self.slab.used_bytes == len(extents) * self.slab.extent_bytes <= self.slab.nbytes

    @invariant()
    def obtainable_counts_own_gaps_and_free_extents(self) -> None:
        for arena, held in zip(self.arenas, self.held, strict=True):
            own = {slot // arena.slots_per_extent for slot in held}
            gaps = len(own) * arena.slots_per_extent - len(held)
            assert arena.obtainable() == gaps + self.slab.free_extents * arena.slots_per_extent

    def teardown(self) -> None:
        for arena, held in zip(self.arenas, self.held, strict=True):
            arena.free(np.array(sorted(held), dtype=np.int32))
        assert self.slab.free_extents == self.slab.n_extents
        self.slab.close()


TestArenas = Arenas.TestCase
TestArenas.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
