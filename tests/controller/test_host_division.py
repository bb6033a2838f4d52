"""Host memory goes to whoever needs it: the coldest pages of all give way, and free room comes together.

Slots are 512 bytes for FULL and MAMBA and 256 for SWA; extents of 4 KiB hold 8 and 16 of them.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from controller.requests import Lookup
from controller.settings import ControllerSettings, HostShares
from hicache.core.words import Tier, TokenArray
from tests.controller.rig import Rig, TaggedEngine
from tests.tagged import make_layout

KIB = 1 << 10
EXTENT_BYTES = 4 * KIB


def prompt(seed: int, n_pages: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1000, 4 * n_pages + 1, dtype=np.int32)


def held(engine: TaggedEngine, component: str) -> int:
    (model,) = engine.controller._host.models
    return model.index.resident(component, Tier.HOST)


async def back_up(engine: TaggedEngine, tokens: TokenArray, checkpoints: list[int], salt: str = "") -> None:
    await engine.backup(tokens, engine.all_pages(tokens, checkpoints), salt)


def use(engine: TaggedEngine, tokens: TokenArray, boundaries: list[int]) -> list[int]:
    """Look up the prompt cut off at these boundaries: what can be reused each time."""
    found = []
    for boundary in boundaries:
        one = engine.controller.lookup(Lookup(engine.prompt(tokens[: 4 * boundary + 1])))
        if one.lease_id:
            engine.controller.release(engine.engine_id, one.lease_id)
        found.append(one.boundary)
    return found


async def test_a_shift_of_the_load_converges_to_what_each_component_needs(rig: Rig) -> None:
    """MEMORY-06: long prompts with one checkpoint, then short ones with a checkpoint at every page, then
    long ones again. Each load's working set fits 16 extents with three to spare, one for each component
    whose last extent is not full; after one round of it, all of it hits."""
    controller = await rig.controller(capacity_bytes=64 * KIB, extent_bytes=EXTENT_BYTES)
    engine = TaggedEngine(controller)
    loads = [(4, 12, [12]), (7, 4, [1, 2, 3, 4]), (4, 12, [12])]
    seeds = iter(range(100, 200))
    checkpoints = []
    for n_prompts, n_pages, boundaries in loads:
        prompts = [prompt(next(seeds), n_pages) for _ in range(n_prompts)]
        for tokens in prompts:
            await back_up(engine, tokens, boundaries)
            use(engine, tokens, boundaries)
        for tokens in prompts:
            assert use(engine, tokens, boundaries) == boundaries
            assert await engine.load_and_check(tokens) == n_pages
        checkpoints.append(held(engine, "mamba"))
    assert checkpoints[1] >= 28
    assert checkpoints[2] < checkpoints[1]
    assert 0 < controller.counters.host_moved_pages < controller.counters.backup_stored_pages
    assert controller.counters.backup_refused_host_full_pages == 0


async def test_dead_pages_go_first(rig: Rig) -> None:
    """MEMORY-06: pages behind one that is lost serve nothing, and leave before the coldest that serve."""
    controller = await rig.controller(capacity_bytes=64 * KIB, extent_bytes=EXTENT_BYTES)
    engine = TaggedEngine(controller)
    oldest, branching = prompt(1, 4), prompt(2, 8)
    await back_up(engine, oldest, [4])
    await back_up(engine, branching, [4, 8])
    (model,) = controller._host.models
    cursor = model.index.match(engine.namespace(), branching).cursor
    receipt = model.index.pin_pages(cursor, {"mamba": np.array([7], dtype=np.int32)}, tier=Tier.HOST)
    lost = {"full": np.array([5], dtype=np.int32)}
    model.give_back(model.index.reclaiming.give_up(cursor, lost, tier=Tier.HOST).freed)
    model.index.unpin(receipt)  # a dead checkpoint, and warmer than all of the oldest prompt
    dead = held(engine, "mamba")
    taken = controller._host.take(model, "mamba", 1 + model.shelves["mamba"].arena.obtainable(), "")
    model.shelves["mamba"].arena.free(taken.slots)
    assert not taken.short
    assert held(engine, "mamba") == dead - 1
    assert use(engine, oldest, [4]) == [4]


async def test_a_burst_loses_no_backup_that_fits(rig: Rig) -> None:
    """Thirty backups at once, each a sixteenth of host memory: all are taken, though what is on its way
    in cannot be evicted."""
    controller = await rig.controller(capacity_bytes=96 * KIB, extent_bytes=EXTENT_BYTES)
    slots = {"full": 512, "swa": 512, "mamba": 64}
    engine = TaggedEngine(controller, "burst", *make_layout(slots))
    prompts = [prompt(seed, 7) for seed in range(30)]
    outcomes = await asyncio.gather(
        *(engine.backup(one, {"full": list(range(7)), "swa": [5, 6], "mamba": [6]}) for one in prompts)
    )
    assert all(plan.refused_pages == 0 for outcome in outcomes for plan in outcome.values())
    assert controller.counters.backup_refused_host_full_pages == 0
    assert await engine.load_and_check(prompts[-1]) == 7
    resident = [tokens for tokens in prompts if use(engine, tokens, [7]) == [7]]
    assert len(resident) >= 96 * KIB // (5 * KIB) - 4  # but for what three half-full extents cost


async def test_what_is_pinned_never_moves(rig: Rig) -> None:
    """Leased frames stand in almost every extent: what can move is moved, they are not."""
    controller = await rig.controller(capacity_bytes=64 * KIB, extent_bytes=EXTENT_BYTES)
    engine = TaggedEngine(controller)
    prompts = [prompt(seed, 4) for seed in range(20, 30)]
    for tokens in prompts:
        await back_up(engine, tokens, [4])
    leases = [engine.lookup(tokens) for tokens in prompts[::3]]
    (model,) = controller._host.models
    before = [
        model.index.slots(model.index.match(engine.namespace(), tokens).cursor, "full", Tier.HOST, 0, 4)
        for tokens in prompts[::3]
    ]
    for seed in range(40, 60):
        await back_up(engine, prompt(seed, 4), [1, 2, 3, 4])
    after = [
        model.index.slots(model.index.match(engine.namespace(), tokens).cursor, "full", Tier.HOST, 0, 4)
        for tokens in prompts[::3]
    ]
    np.testing.assert_array_equal(before, after)
    for lease in leases:
        controller.release(engine.engine_id, lease.lease_id)
    for tokens in prompts[::3]:
        await engine.load_and_check(tokens)


async def test_models_share_by_age_too(rig: Rig) -> None:
    """The coldest pages go whichever model's they are."""
    controller = await rig.controller(capacity_bytes=64 * KIB, extent_bytes=EXTENT_BYTES)
    idle, busy = TaggedEngine(controller, "one", model="idle"), TaggedEngine(controller, "two", model="busy")
    forgotten, used = prompt(70, 8), prompt(71, 8)
    await back_up(idle, forgotten, [8])
    await back_up(idle, used, [8])
    for seed in range(80, 92):
        await back_up(busy, prompt(seed, 12), [12])
        use(idle, used, [8])
    assert use(idle, forgotten, [8]) != [8]
    assert use(idle, used, [8]) == [8]


@pytest.mark.parametrize("floors", [{}, {"mamba": 0.25}])
async def test_a_floor_is_not_undercut_by_others(rig: Rig, floors: dict[str, float]) -> None:
    """A flood of FULL pages leaves the checkpoints their part, which it does not without a floor."""
    controller = await rig.controller(
        capacity_bytes=64 * KIB,
        extent_bytes=EXTENT_BYTES,
        settings=ControllerSettings(host_shares=HostShares(floors=floors)),
    )
    engine = TaggedEngine(controller)
    (model,) = controller._host.models
    for seed in range(200, 205):
        tokens = prompt(seed, 8)
        await back_up(engine, tokens, list(range(1, 9)))
        cursor = model.index.match(engine.namespace(), tokens).cursor
        model.index.mark_stored(cursor, "full", np.arange(8, dtype=np.int32))  # else they die with FULL
    floor_pages = 64 * KIB // 4 // 512
    assert held(engine, "mamba") > floor_pages
    for seed in range(210, 222):
        await engine.backup(prompt(seed, 10), {"full": list(range(10))})
    assert (held(engine, "mamba") >= floor_pages) == bool(floors)


@pytest.mark.parametrize("component", ["swa", "mamba"])
async def test_every_component_can_have_a_page(rig: Rig, component: str) -> None:
    """MEMORY-06: also when others hold all there is."""
    controller = await rig.controller(capacity_bytes=64 * KIB, extent_bytes=EXTENT_BYTES)
    engine = TaggedEngine(controller)
    (model,) = controller._host.models
    for seed in range(300, 310):
        pages = engine.all_pages(prompt(seed, 12))
        del pages[component]
        await engine.backup(prompt(seed, 12), pages)
    assert not model.shelves[component].arena.obtainable()
    taken = controller._host.take(model, component, 1, "")
    assert len(taken.slots) == 1
    model.shelves[component].arena.free(taken.slots)
