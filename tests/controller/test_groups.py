"""Tensor-parallel groups: one decision for all ranks, a frame per rank, one end for what they do together."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from controller.controller import HybridCacheController
from controller.requests import (
    Backup,
    Incomplete,
    InvalidRequest,
    Load,
    Lookup,
    Placement,
    TransferFailed,
)
from controller.settings import ControllerSettings
from hicache.core.identity import storage_key
from hicache.core.layout import Layout
from storage_backends.base import Outcome
from tests.controller.rig import SLOTS, Rig, TaggedEngine, emptied, until
from tests.tagged import hashes_of, make_layout, prompt

TOKENS = prompt(1, 40)
REPLICATED = ("full1", "mamba0", "mamba1")
"""A sidecar of FULL, and all of MAMBA."""
QUICK = ControllerSettings(copy_timeout_s=0.3)


def make_group(
    controller: HybridCacheController, ranks: int, layout: tuple[Layout, int] | None = None, name: str = "g"
) -> list[TaggedEngine]:
    layout = layout or make_layout(SLOTS, replicated=REPLICATED)
    return [
        TaggedEngine(controller, f"{name}-{r}", *layout, group_id=name, rank=r, ranks=ranks)
        for r in range(ranks)
    ]


async def backup_all(group: list[TaggedEngine], tokens: np.ndarray, seed: int = 0) -> None:
    """Every rank asks for the same backup, each in its own time."""
    times = random.Random(seed)

    async def one(engine: TaggedEngine) -> None:
        for _ in range(times.randrange(20)):
            await asyncio.sleep(0)
        outcome = await engine.backup(tokens, engine.all_pages(tokens))
        assert outcome["full"].stored_pages + outcome["full"].present_pages == len(tokens) // 4

    await asyncio.gather(*map(one, group))


async def check_all(group: list[TaggedEngine], tokens: np.ndarray, seed: int = 0) -> set[int]:
    times = random.Random(seed)

    async def one(engine: TaggedEngine) -> int:
        for _ in range(times.randrange(20)):
            await asyncio.sleep(0)
        return await engine.load_and_check(tokens)

    return set(await asyncio.gather(*map(one, group)))


async def test_four_ranks_go_all_the_way_and_back(rig: Rig) -> None:
    """Bytes differ between ranks, but for replicated pools, which are kept once."""
    controller = await rig.controller(storage=rig.file_spec)
    group = make_group(controller, 4)
    prompts = [prompt(seed, 40) for seed in range(5)]
    for seed, tokens in enumerate(prompts):
        await backup_all(group, tokens, seed)
        assert await check_all(group, tokens, seed) == {10}
    await until(lambda: controller.counters.storage_written_pages == 5 * 21)
    objects = [path for path in Path(rig.file_spec.path).rglob("*") if path.is_file()]
    n_frames = 5 * (4 * 10 + 4 * 10 + 1)  # FULL and SWA of every rank; MAMBA, all replicated, once
    assert len([path for path in objects if path.stat().st_size > 128]) == n_frames
    await emptied(controller)
    for seed, tokens in enumerate(prompts):
        progress = await asyncio.gather(*(engine.prefetch(tokens) for engine in group))
        assert {one.boundary for one in progress} == {10}
        assert len(set(progress)) == 1
        assert await check_all(group, tokens, seed) == {10}
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)


async def test_all_ranks_hear_the_same_whenever_they_ask(rig: Rig) -> None:
    """RANKS-02, RANKS-03: the first rank's answer is everybody's, although the cache has changed since."""
    controller = await rig.controller()
    first, second = make_group(controller, 2)
    early = first.lookup(TOKENS)
    assert early.boundary == 0
    await backup_all([first, second], TOKENS)
    assert second.lookup(TOKENS) == early
    later = [engine.lookup(TOKENS) for engine in (second, first)]
    assert later[0] == later[1]
    assert later[0].boundary == 10
    second.controller.release(second.engine_id, later[0].lease_id)
    assert controller.status().pools[0].pinned_pages == 10  # the other rank still holds it
    first.controller.release(first.engine_id, later[0].lease_id)
    assert controller.status().pools[0].pinned_pages == 0


async def test_a_frame_that_one_rank_lost_is_lost_for_all(rig: Rig) -> None:
    """RANKS-04, RANKS-05: the boundary is what every rank can have; nothing beyond it stays pinned."""
    controller = await rig.controller(storage=rig.file_spec)
    group = make_group(controller, 2)
    for engine in group:
        engine.all_pages(TOKENS)
    await asyncio.gather(
        *(engine.backup(TOKENS, engine.all_pages(TOKENS, checkpoints=[5, 10])) for engine in group)
    )
    await until(lambda: controller.counters.storage_written_pages == 22)
    await emptied(controller)
    assert rig.tier is not None
    hashes = hashes_of(group[0].namespace(), TOKENS)
    lost = [storage_key("hicache", "full", 1, 2, hashes[page]) for page in (5, 6, 7)]
    assert await rig.tier.delete(lost, timeout_s=5) == [Outcome.OK] * 3
    progress = await asyncio.gather(*(engine.prefetch(TOKENS) for engine in group))
    assert [(one.boundary, one.storage_boundary) for one in progress] == [(5, 5)] * 2
    assert await check_all(group, TOKENS) == {5}
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)


async def test_what_one_rank_does_alone_is_not_published(rig: Rig) -> None:
    """A page is READY when all ranks' frames are; a rank that never comes fails it for the others."""
    controller = await rig.controller(settings=QUICK)
    group = make_group(controller, 3)
    placements = [engine.compute(TOKENS, engine.all_pages(TOKENS)) for engine in group]
    asked = [
        asyncio.create_task(controller.backup(Backup(engine.prompt(TOKENS), mine)))
        for engine, mine in list(zip(group, placements, strict=True))[:2]
    ]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(result, TransferFailed) and "2 of 3 ranks" in str(result) for result in results)
    assert controller.status().host_used_bytes == 0
    for engine, mine in zip(group, placements, strict=True):
        engine.forget(mine)
    await backup_all(group, TOKENS)
    assert await check_all(group, TOKENS) == {10}


async def test_a_rank_that_dies_ends_the_groups_jobs(rig: Rig) -> None:
    """RANKS-01: the others' transfers fail at once, their leases end, and the group is served again when
    the rank is back."""
    controller = await rig.controller()
    group = make_group(controller, 2)
    await backup_all(group, TOKENS)
    found, _ = (engine.lookup(TOKENS) for engine in group)
    slots = group[0].pools["mamba"].alloc(1)
    assert slots is not None
    load = Load(group[0].engine_id, found.lease_id, {"mamba": Placement(found.load["mamba"], slots)})
    alone = asyncio.create_task(controller.load(load))
    await until(lambda: controller.status().engines[0].jobs == 1)
    await controller.detach(group[1].engine_id)
    with pytest.raises(TransferFailed, match="rank 1 has left"):
        await alone
    with pytest.raises(Incomplete, match="1 of 2 ranks are attached"):
        group[0].lookup(TOKENS)
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)
    layout = make_layout(SLOTS, replicated=REPLICATED)
    back = TaggedEngine(controller, "g-1 again", *layout, group_id="g", rank=1, ranks=2)
    assert await check_all([group[0], back], TOKENS) == {10}


async def test_groups_do_not_wait_for_each_other(rig: Rig) -> None:
    """RANKS-06: a group without traffic, or not whole, holds up nobody."""
    controller = await rig.controller()
    busy = make_group(controller, 2, name="busy")
    make_group(controller, 2, name="idle")
    layout = make_layout(SLOTS, replicated=REPLICATED)
    TaggedEngine(controller, "half", *layout, group_id="half", rank=1, ranks=2)
    await backup_all(busy, TOKENS)
    assert await check_all(busy, TOKENS) == {10}


async def test_sizes_of_groups_do_not_mix(rig: Rig) -> None:
    """KEY-09: tp 1, 2 and 4 have keys and pages of their own, also where the layouts are equal."""
    controller = await rig.controller(storage=rig.file_spec)
    groups = [make_group(controller, ranks, name=f"tp{ranks}") for ranks in (1, 2, 4)]
    await backup_all(groups[1], TOKENS)
    await until(lambda: controller.counters.storage_written_pages == 21)
    for group in (groups[0], groups[2]):
        progress = await asyncio.gather(*(engine.prefetch(TOKENS) for engine in group))
        assert {(one.boundary, one.storage_boundary) for one in progress} == {(0, 0)}
    assert await check_all(groups[1], TOKENS) == {10}


async def test_ranks_must_agree_about_what_they_are(rig: Rig) -> None:
    controller = await rig.controller()
    layout = make_layout(SLOTS, replicated=REPLICATED)
    TaggedEngine(controller, "a", *layout, group_id="g", rank=0, ranks=2)
    with pytest.raises(InvalidRequest, match="rank: 0 of group 'g' is attached already"):
        TaggedEngine(controller, "b", *layout, group_id="g", rank=0, ranks=2)
    with pytest.raises(InvalidRequest, match="'g' has another model, layout or number of ranks"):
        TaggedEngine(controller, "c", *layout, group_id="g", rank=1, ranks=3)
    with pytest.raises(InvalidRequest, match="'g' has another model, layout or number of ranks"):
        TaggedEngine(controller, "d", *make_layout(SLOTS), group_id="g", rank=1, ranks=2)
    with pytest.raises(InvalidRequest, match="rank: 2 of 2"):
        TaggedEngine(controller, "e", *layout, group_id="g", rank=2, ranks=2)
    engine = TaggedEngine(controller, "f", *layout, group_id="g", rank=1, ranks=2)
    assert controller.lookup(Lookup(engine.prompt(TOKENS))).boundary == 0
