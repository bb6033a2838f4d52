"""Direct mode: host memory is a ring between engines and storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from controller.controller import HybridCacheController
from controller.memory.slab import HostSlab
from controller.settings import ControllerSettings
from controller.storage import TierPolicy
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import TransferScheduler
from hicache.core.words import TokenArray
from tests.controller.doubles import Mood, ScriptedTier
from tests.controller.rig import TaggedEngine, until

STAGING = ControllerSettings(
    staging=True,
    storage_timeout_s=0.1,
    write_attempts=3,
    prefetch_max_s=1.0,
    storage_batch_bytes=4096,
    write_queue_bytes=2048,
)
RING_BYTES = 32 << 10


def prompt(seed: int, n_pages: int) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 1000, 4 * n_pages + 1, dtype=np.int32)


class Ring:
    """A controller in direct mode over scripted tiers."""

    def __init__(self, slab: HostSlab, scheduler: TransferScheduler) -> None:
        self.slab = slab
        self.controller = HybridCacheController(STAGING, slab, scheduler)

    def attach(self, name: str) -> ScriptedTier:
        tier = ScriptedTier(self.slab)
        tier.name = name
        self.controller.storage.attach(tier, TierPolicy())
        return tier

    async def written(self) -> None:
        await until(lambda: not any(one.queued_writes for one in self.controller.status().backends))
        await asyncio.sleep(0)

    @property
    def resident(self) -> int:
        return sum(pool.resident_pages for pool in self.controller.status().pools)


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    with HostSlab(RING_BYTES, extent_bytes=2048) as slab:
        scheduler = TransferScheduler(CpuCopyEngine(), threads=2)
        made = Ring(slab, scheduler)
        await made.controller.start()
        yield made
        violations = made.controller.audit()
        for backend in made.controller.status().backends:
            tier = made.controller.storage.stack.find(backend.name)
            assert tier is not None
            assert isinstance(tier.tier, ScriptedTier)
            tier.tier.be(Mood.FAILING)
        await made.controller.stop(0.1)
        scheduler.close()
        assert violations == []
        assert not made.controller.counters.internal_errors


async def test_pages_go_when_they_are_written_and_not_before(ring: Ring) -> None:
    """Until then they are found in host memory; afterwards in storage, from where they come back right."""
    tier = ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tier.be(Mood.FAILING)
    tokens = prompt(1, 6)
    await engine.backup(tokens, engine.all_pages(tokens))
    assert await engine.load_and_check(tokens) == 6
    ring.controller.flush()
    assert ring.resident == 13  # 6 FULL, 6 SWA, 1 MAMBA: nothing unwritten is given up
    tier.be(Mood.SOUND)
    await ring.written()
    await until(lambda: ring.resident == 0)
    assert engine.lookup(tokens).boundary == 0
    assert engine.lookup(tokens).storage_boundary == 6
    assert (await engine.prefetch(tokens)).boundary == 6
    assert await engine.load_and_check(tokens) == 6
    assert ring.resident == 0


async def test_every_tier_that_writes_must_be_through(ring: Ring) -> None:
    fast, slow = ring.attach("fast"), ring.attach("slow")
    engine = TaggedEngine(ring.controller)
    slow.be(Mood.FAILING)
    tokens = prompt(2, 4)
    await engine.backup(tokens, engine.all_pages(tokens))
    await until(lambda: len(fast.objects) == 9)
    assert ring.resident == 9
    slow.be(Mood.SOUND)
    await until(lambda: len(slow.objects) == 9)
    await until(lambda: ring.resident == 0)


async def test_a_full_ring_refuses_with_a_counted_reason(ring: Ring) -> None:
    """Nothing that is not written yet is evicted; when storage is well again there is room again."""
    tier = ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tier.be(Mood.FAILING)
    prompts = [prompt(seed, 10) for seed in range(10, 18)]
    outcomes = [await engine.backup(one, engine.all_pages(one)) for one in prompts]
    refused = [one["full"].refused_pages for one in outcomes]
    assert refused[0] == 0
    assert refused[-1] == 10
    assert outcomes[-1]["full"].reason == "staging_full"
    assert ring.controller.counters.backup_refused_staging_full_pages >= 10
    assert not ring.controller.counters.host_evicted_pages
    assert await engine.load_and_check(prompts[0]) == 10
    tier.be(Mood.SOUND)
    await until(lambda: ring.resident == 0)
    outcome = await engine.backup(prompts[-1], engine.all_pages(prompts[-1]))
    assert outcome["full"].refused_pages == 0


async def test_what_storage_will_not_take_makes_room_in_the_end(ring: Ring) -> None:
    """Given up after its attempts, counted, and gone from the ring."""
    tier = ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tier.be(Mood.FAILING)
    tokens = prompt(3, 4)
    await engine.backup(tokens, engine.all_pages(tokens))
    await until(lambda: ring.resident == 0)
    assert ring.controller.counters.storage_write_dropped_failed_pages == 9
    assert engine.lookup(tokens).storage_boundary == 0


async def test_a_child_is_taken_though_its_parents_are_in_storage_only(ring: Ring) -> None:
    ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tokens = prompt(4, 8)
    await engine.backup(tokens[:17], engine.all_pages(tokens[:17]))
    await until(lambda: ring.resident == 0)
    outcome = await engine.backup(tokens, engine.all_pages(tokens))
    assert (outcome["full"].stored_pages, outcome["full"].present_pages) == (4, 4)
    await until(lambda: ring.resident == 0)
    assert (await engine.prefetch(tokens)).boundary == 8
    assert await engine.load_and_check(tokens) == 8


async def test_late_bytes_keep_their_slots(ring: Ring) -> None:
    """A write that hangs still reads the frames: they go when it has settled, not when it was given up."""
    tier = ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tier.be(Mood.HANGING)
    tokens = prompt(5, 2)
    await engine.backup(tokens, engine.all_pages(tokens))
    counters = ring.controller.counters
    await until(lambda: counters.storage_write_dropped_failed_pages == 5)
    assert ring.resident == 5
    tier.be(Mood.SOUND)
    await until(lambda: ring.resident == 0)


async def test_detaching_the_last_tier_empties_the_ring_and_closes_it(ring: Ring) -> None:
    tier = ring.attach("l3")
    engine = TaggedEngine(ring.controller)
    tier.be(Mood.FAILING)
    tokens, other = prompt(6, 4), prompt(7, 4)
    await engine.backup(tokens, engine.all_pages(tokens))
    await ring.controller.storage.detach("l3", force=True, timeout_s=0.0)
    assert ring.resident == 0
    outcome = await engine.backup(other, engine.all_pages(other))
    assert outcome["full"].reason == "no_storage"
    assert ring.controller.counters.backup_refused_no_storage_pages == 9


async def test_a_cache_keeps_what_is_written(ring: Ring) -> None:
    """The other mode, for comparison."""
    with HostSlab(RING_BYTES) as slab:
        scheduler = TransferScheduler(CpuCopyEngine(), threads=2)
        cache = Ring(slab, scheduler)
        cache.controller = HybridCacheController(replace(STAGING, staging=False), slab, scheduler)
        await cache.controller.start()
        cache.attach("l3")
        engine = TaggedEngine(cache.controller)
        tokens = prompt(8, 4)
        await engine.backup(tokens, engine.all_pages(tokens))
        await cache.written()
        assert cache.resident == 9
        await cache.controller.stop(1.0)
        scheduler.close()
