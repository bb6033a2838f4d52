"""L1 -> L2 -> L3 -> L2 -> L1 in one process, every byte compared."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from controller.requests import Load, Lookup, Placement, PrefetchState
from controller.settings import ControllerSettings
from storage_backends.specs import BackendSpec, MemorySpec
from tests.controller.rig import MIB, Rig, TaggedEngine, emptied, until
from tests.tagged import prompt

MEMORY = MemorySpec(capacity_bytes=64 * MIB)


async def test_what_was_backed_up_comes_back(engine: TaggedEngine) -> None:
    """SIDECAR-01, SIDECAR-02: anchors and sidecars, into other slots than they came from."""
    tokens = prompt(1, 43)  # ten whole pages and three tokens
    outcome = await engine.backup(tokens, engine.all_pages(tokens))
    assert {name: one.stored_pages for name, one in outcome.items()} == {"full": 10, "swa": 10, "mamba": 1}
    assert await engine.load_and_check(tokens) == 10
    assert engine.controller.counters.uncached_tail_tokens == 3


async def test_the_boundary_is_the_deepest_that_every_component_serves(engine: TaggedEngine) -> None:
    """MAMBA-03, SWA-10: FULL goes to 6, the checkpoint only to 4."""
    tokens = prompt(2, 24)
    await engine.backup(tokens, engine.all_pages(tokens, checkpoints=[4]))
    found = engine.lookup(tokens)
    assert (found.boundary, found.matched_pages, found.branching_boundary) == (4, 6, 6)
    assert {name: pages.tolist() for name, pages in found.load.items()} == {
        "full": [0, 1, 2, 3],
        "swa": [2, 3],
        "mamba": [3],
    }
    assert await engine.load_and_check(tokens) == 4


async def test_what_the_engine_holds_is_not_loaded_again(engine: TaggedEngine) -> None:
    tokens = prompt(3, 24)
    await engine.backup(tokens, engine.all_pages(tokens))
    device = {"full": np.array([True] * 4), "swa": np.array([False] * 5 + [True])}
    found = engine.lookup(tokens, device=device)
    assert found.boundary == 6
    assert {name: pages.tolist() for name, pages in found.load.items()} == {
        "full": [4, 5],
        "swa": [4],
        "mamba": [5],
    }


async def test_the_engines_pages_and_host_pages_make_one_boundary(engine: TaggedEngine) -> None:
    """What only L1 holds counts for the boundary, though the daemon has never seen those tokens."""
    tokens = prompt(4, 40)
    await engine.backup(tokens[:24], engine.all_pages(tokens[:24]))
    everything = {name: np.ones(10, dtype=bool) for name in ("full", "swa", "mamba")}
    assert engine.lookup(tokens, device=everything).boundary == 10
    tail = {name: np.arange(10) >= 6 for name in ("full", "swa", "mamba")}
    found = engine.lookup(tokens, device=tail)
    assert found.boundary == 10
    assert {name: pages.tolist() for name, pages in found.load.items()} == {"full": [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_storage_gives_back_what_host_memory_has_lost(rig: Rig, kind: str) -> None:
    spec: BackendSpec = rig.file_spec if kind == "file" else MEMORY
    controller = await rig.controller(storage=spec)
    engine = TaggedEngine(controller)
    tokens = prompt(5, 40)
    await engine.backup(tokens, engine.all_pages(tokens))
    await until(lambda: controller.counters.storage_written_pages == 21)
    await emptied(controller)
    found = engine.lookup(tokens)
    assert (found.boundary, found.storage_boundary) == (0, 10)
    progress = await engine.prefetch(tokens)
    assert (progress.state, progress.boundary, progress.storage_boundary) == (PrefetchState.DONE, 10, 10)
    assert (progress.arrived_pages, progress.wanted_pages) == (13, 13)  # 10 FULL, 2 SWA, 1 MAMBA
    assert await engine.load_and_check(tokens) == 10


async def test_a_new_daemon_finds_what_the_old_one_stored(rig: Rig) -> None:
    """L3-05: keys depend only on the namespace and the tokens."""
    first = await rig.controller(storage=rig.file_spec)
    tokens = prompt(6, 40)
    engine = TaggedEngine(first)
    await engine.backup(tokens, engine.all_pages(tokens))
    await until(lambda: first.counters.storage_written_pages == 21)
    second = await rig.controller(storage=rig.file_spec)
    other = TaggedEngine(second, "another engine")
    assert (await other.prefetch(tokens)).boundary == 10
    assert await other.load_and_check(tokens) == 10


async def test_tenants_and_models_do_not_see_each_other(rig: Rig) -> None:
    """KEY-01, KEY-02, KEY-04: neither in host memory nor in storage."""
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    tokens = prompt(7, 24)
    await engine.backup(tokens, engine.all_pages(tokens), salt="a")
    await until(lambda: controller.counters.storage_written_pages == 13)
    other_model = TaggedEngine(controller, "other", model="model two")
    for asker, salt in ((engine, "b"), (engine, ""), (other_model, "a")):
        found = asker.lookup(tokens, salt=salt)
        assert (found.boundary, found.storage_boundary, found.matched_pages) == (0, 0, 0)
        progress = await asker.prefetch(tokens, salt=salt)
        assert (progress.boundary, progress.storage_boundary, progress.wanted_pages) == (0, 0, 0)
    assert await engine.load_and_check(tokens, salt="a") == 6


async def test_branches_share_their_trunk(engine: TaggedEngine) -> None:
    """MAMBA-08: a checkpoint at the fork makes the trunk reusable for every branch."""
    trunk = prompt(8, 16)
    left, right, third = (prompt(seed, 16, trunk) for seed in (9, 10, 11))
    await engine.backup(left, engine.all_pages(left))
    found = engine.lookup(right)
    assert (found.boundary, found.branching_boundary) == (0, 4)
    outcome = await engine.backup(right, engine.all_pages(right, checkpoints=[4, 8]))
    assert (outcome["full"].stored_pages, outcome["full"].present_pages) == (4, 4)
    assert await engine.load_and_check(third) == 4
    assert await engine.load_and_check(left) == 8
    assert await engine.load_and_check(right) == 8


async def test_a_hole_in_the_chain_is_refused_and_later_repaired(engine: TaggedEngine) -> None:
    """TREE-10: nothing is kept behind a missing parent."""
    tokens = prompt(12, 32)
    pages = engine.all_pages(tokens)
    holed = pages | {"full": [0, 1, 2, 4, 5, 6, 7]}
    outcome = await engine.backup(tokens, holed)
    assert (outcome["full"].stored_pages, outcome["full"].refused_pages) == (3, 4)
    assert outcome["full"].reason == "chain_broken"
    assert (outcome["swa"].stored_pages, outcome["mamba"].stored_pages) == (3, 0)
    assert engine.lookup(tokens).boundary == 0
    outcome = await engine.backup(tokens, pages)
    assert (outcome["full"].stored_pages, outcome["full"].present_pages) == (5, 3)
    assert await engine.load_and_check(tokens) == 8


async def test_an_acknowledged_backup_is_seen_by_the_next_lookup(engine: TaggedEngine) -> None:
    """Read your writes, also when two engines' backups of one prompt run at the same time (L3-03)."""
    tokens = prompt(13, 40)
    both = await asyncio.gather(
        engine.backup(tokens, engine.all_pages(tokens)), engine.backup(tokens, engine.all_pages(tokens))
    )
    assert sorted(outcome["full"].stored_pages for outcome in both) == [0, 10]
    assert sorted(outcome["full"].present_pages for outcome in both) == [0, 10]
    for round_number in range(20):
        grown = prompt(14 + round_number, 4 * (round_number + 1), tokens)
        await engine.backup(grown, engine.all_pages(grown))
        assert engine.lookup(grown).boundary == len(grown) // 4


async def test_eviction_makes_room_and_keeps_what_is_used(rig: Rig) -> None:
    """WRITE-04, MEMORY: a burst of many times the slab loses no backup that fits."""
    controller = await rig.controller(capacity_bytes=64 << 10)
    engine = TaggedEngine(controller)
    prompts = [prompt(100 + seed, 40) for seed in range(40)]
    hot = prompts[0]
    await engine.backup(hot, engine.all_pages(hot))
    for tokens in prompts[1:]:
        outcome = await engine.backup(tokens, engine.all_pages(tokens))
        assert outcome["full"].refused_pages == 0
        assert await engine.load_and_check(tokens) == 10
        assert await engine.load_and_check(hot) == 10
        assert controller.audit() == []
    assert controller.counters.host_evicted_pages > 0


async def test_frames_that_do_not_fit_leave_a_usable_prefix(rig: Rig) -> None:
    """PREFETCH-02's sibling: room for a part gives exactly a prefix under the right tokens."""
    controller = await rig.controller(capacity_bytes=16 << 10)
    engine = TaggedEngine(controller)
    tokens = prompt(15, 240)
    outcome = await engine.backup(tokens, {"full": list(range(60)), "swa": [], "mamba": []})
    stored = outcome["full"].stored_pages
    assert 0 < stored < 60
    assert outcome["full"].reason == "host_full"
    assert engine.lookup(tokens).matched_pages == stored


async def test_leased_pages_cannot_be_evicted_and_expire_by_themselves(rig: Rig) -> None:
    """SESSION-09: a lookup that is never followed by a load does not pin for ever."""
    settings = ControllerSettings(lease_s=0.2)
    controller = await rig.controller(capacity_bytes=24 << 10, settings=settings)
    engine = TaggedEngine(controller)
    tokens, other = prompt(16, 40), prompt(17, 200)
    await engine.backup(tokens, engine.all_pages(tokens))
    assert engine.lookup(tokens).lease_id
    outcome = await engine.backup(other, engine.all_pages(other))
    assert outcome["full"].refused_pages > 0
    assert controller.lookup(Lookup(engine.prompt(tokens))).boundary == 10
    await until(lambda: controller.counters.leases_expired == 2)
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)


async def test_a_flush_keeps_what_is_leased(engine: TaggedEngine) -> None:
    tokens = prompt(18, 24)
    await engine.backup(tokens, engine.all_pages(tokens))
    found = engine.lookup(tokens)
    dropped, kept = engine.controller.flush()
    assert (dropped, kept) == (4, 9)  # SWA pages outside the window go; 6 FULL, 2 SWA, 1 MAMBA stay
    hashes_ok = {
        name: Placement(pages, engine.pools[name].alloc(len(pages)))  # type: ignore[arg-type]
        for name, pages in found.load.items()
    }
    await engine.controller.load(Load(engine.engine_id, found.lease_id, hashes_ok))
    engine.controller.release(engine.engine_id, found.lease_id)
    assert engine.controller.flush() == (9, 0)
    engine.forget(hashes_ok)
