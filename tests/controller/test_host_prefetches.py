"""Prefetches and backups share host memory: neither starves the other."""

from __future__ import annotations

import asyncio

import numpy as np

from controller.requests import Lookup, Prefetch, PrefetchPolicy
from controller.settings import ControllerSettings
from controller.storage import TierPolicy
from hicache.core.words import TokenArray
from tests.controller.doubles import ScriptedTier
from tests.controller.rig import Rig, TaggedEngine, emptied, until

SLOT_BYTES = 512


def prompt(seed: int, n_pages: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1000, 4 * n_pages + 1, dtype=np.int32)


async def stored(rig: Rig, prompts: list[TokenArray], n_slots: int, share: float) -> TaggedEngine:
    """An engine whose prompts are in storage only; host memory of so many slots of FULL."""
    settings = ControllerSettings(prefetch_host_share=share)
    controller = await rig.controller(capacity_bytes=n_slots * SLOT_BYTES, settings=settings)
    tier = ScriptedTier(rig._slabs[controller])
    controller.storage.attach(tier, TierPolicy())
    engine = TaggedEngine(controller)
    for tokens in prompts:
        await engine.backup(tokens, engine.all_pages(tokens))
        await until(lambda: not controller.status().backends[0].queued_writes)
        await emptied(controller)
    return engine


async def test_queued_prefetches_leave_room_for_a_running_requests_backup(rig: Rig) -> None:
    """PREFETCH-12: ten queued requests want half of host memory each. One is brought in and kept; the
    others are cut short rather than evict it; a backup has its room; reads stay near what is used."""
    prompts = [prompt(seed, 8) for seed in range(10)]
    engine = await stored(rig, prompts, 32, 0.5)
    controller = engine.controller
    ids = []
    for number, tokens in enumerate(prompts):
        lookup = Lookup(engine.prompt(tokens))
        ids.append(controller.prefetch(Prefetch(lookup, PrefetchPolicy.WAIT_COMPLETE, 0.0)))
        if number % 3 == 0:  # some one after the other, some at once
            await controller.wait_prefetch(engine.engine_id, ids[-1])
    boundaries = [(await controller.wait_prefetch(engine.engine_id, one)).boundary for one in ids]
    assert boundaries[0] == 8
    running = prompt(50, 4)
    outcome = await engine.backup(running, engine.all_pages(running))
    assert [one.refused_pages for one in outcome.values()] == [0, 0, 0]
    assert engine.lookup(prompts[0]).boundary == 8
    assert controller.counters.prefetch_read_pages <= 16
    assert controller.counters.prefetch_cut_host_capacity > 0


async def test_a_consumed_prefetch_makes_room_for_the_next(rig: Rig) -> None:
    """PREFETCH-12: one after the other all are served."""
    prompts = [prompt(seed, 8) for seed in range(6)]
    engine = await stored(rig, prompts, 32, 0.5)
    for tokens in prompts:
        assert (await engine.prefetch(tokens)).boundary == 8
        assert await engine.load_and_check(tokens) == 8


async def test_only_what_storage_has_takes_host_room(rig: Rig) -> None:
    """PREFETCH-10: host memory is full of pages that can go, and storage has a little of a long prompt."""
    long = prompt(1, 30)
    engine = await stored(rig, [long[:17]], 32, 1.0)
    controller = engine.controller
    for seed in range(10, 14):
        await engine.backup(prompt(seed, 8), engine.all_pages(prompt(seed, 8)))
    await until(lambda: not controller.status().backends[0].queued_writes)
    await asyncio.sleep(0)
    used_bytes = controller._host.used_bytes
    assert (await engine.prefetch(long)).boundary == 4
    assert controller.counters.prefetch_read_pages == 4 + 2 + 1
    read_bytes = (4 + 1) * SLOT_BYTES + 2 * SLOT_BYTES // 2
    evicted_bytes = used_bytes + read_bytes - controller._host.used_bytes
    assert evicted_bytes <= read_bytes + 3 * SLOT_BYTES  # and at most an extent for each component


async def test_prefetches_that_all_want_more_than_half_end_with_what_fits(rig: Rig) -> None:
    """MEMORY-05: nobody holds a part and waits for the rest; each gets what its progress says."""
    prompts = [prompt(seed, 6) for seed in range(3)]
    engine = await stored(rig, prompts, 16, 1.0)
    progress = await asyncio.gather(*(engine.prefetch(tokens) for tokens in prompts))
    assert max(one.boundary for one in progress) == 6
    for tokens, one in zip(prompts, progress, strict=True):
        assert await engine.load_and_check(tokens) == one.boundary
        assert one.boundary == 6 or one.reason == "host_capacity"
    engine.controller.flush()
    for tokens in prompts:
        await engine.prefetch(tokens)
        assert await engine.load_and_check(tokens) == 6
