"""What is told about host memory adds up, and tells one tenant nothing of another."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path

import numpy as np

from controller.memory.frames import HEADER_BYTES
from controller.requests import PrefetchState
from controller.settings import ControllerSettings
from hicache.core.identity import storage_key
from hicache.core.layout import ComponentSpec, Kind
from storage_backends.base import Item, Outcome
from tests.controller.rig import Rig, TaggedEngine, emptied, until
from tests.tagged import hashes_of, make_layout, prompt

TOKENS = prompt(1, 40)


async def test_host_memory_adds_up_at_every_scrape(rig: Rig) -> None:
    """OBS-06, OBS-07: resident and inbound frames are just the slots in use, pinned ones are among them;
    sidecars have no series of their own and disturb none."""
    controller = await rig.controller(capacity_bytes=24 << 10)
    engine = TaggedEngine(controller)
    slot_bytes = {"full": 512, "swa": 256, "mamba": 512}  # frames of 370, 223 and 341 bytes in steps of 256
    random = np.random.default_rng(1)
    for step in range(120):
        tokens = prompt(int(random.integers(12)), 4 * int(random.integers(2, 11)))
        if random.random() < 0.7:
            await engine.backup(tokens, engine.all_pages(tokens))
        else:
            engine.lookup(tokens)  # leases that stay
        status = controller.status()
        assert [pool.component for pool in status.pools] == ["full", "swa", "mamba"], step
        in_slots = sum(
            (pool.resident_pages + pool.inbound_pages) * slot_bytes[pool.component] for pool in status.pools
        )
        assert status.host_used_bytes == in_slots <= status.host_capacity_bytes
        assert all(0 <= pool.pinned_pages <= pool.resident_pages for pool in status.pools)
        assert all(pool.inbound_pages == 0 for pool in status.pools)
    await controller.detach(engine.engine_id)
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)


async def test_three_that_want_more_than_there_is_all_end(rig: Rig) -> None:
    """MEMORY-05: no hold-and-wait: each gets what fits, tells what did not, and nobody waits for another."""
    controller = await rig.controller(storage=rig.file_spec, capacity_bytes=32 << 10)
    engine = TaggedEngine(controller)
    prompts = [prompt(seed, 60) for seed in (5, 6, 7)]
    for tokens in prompts:
        await engine.backup(tokens, engine.all_pages(tokens))
        await until(lambda: not controller.status().backends[0].queued_writes)
    await emptied(controller)
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(engine.prefetch(tokens) for tokens in prompts))
    assert all(one.state is PrefetchState.DONE for one in answers)
    assert all(one.reason == "host_capacity" for one in answers if one.boundary < one.storage_boundary)
    assert any(one.boundary for one in answers)


async def test_a_tenant_cannot_tell_what_another_has_cached(rig: Rig) -> None:
    """SECURITY-04: answer by answer the same, whether the other tenant knows the prompt or nobody does."""
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS), salt="a")
    await until(lambda: controller.counters.storage_written_pages == 21)
    unknown = prompt(99, 40)
    known_to_a, known_to_nobody = (engine.lookup(tokens, salt="b") for tokens in (TOKENS, unknown))
    assert known_to_a == known_to_nobody
    fetched = [await engine.prefetch(tokens, salt="b") for tokens in (TOKENS, unknown)]
    assert fetched[0] == fetched[1]
    outcomes = [
        await engine.backup(tokens, engine.all_pages(tokens), salt="b") for tokens in (TOKENS, unknown)
    ]
    assert outcomes[0] == outcomes[1]


async def test_engines_take_no_further_host_memory(rig: Rig) -> None:
    """MEMORY-08, MEMORY-02: one process owns the slab and samples the machine once; ranks that start at any
    time share it, so there is nothing for them to disagree about."""
    controller = await rig.controller()
    before = controller.status().host_capacity_bytes
    for rank in range(4):
        TaggedEngine(controller, f"rank {rank}", *make_layout({"full": 8, "swa": 8, "mamba": 4}))
        assert controller.status().host_capacity_bytes == before


async def test_memory_stays_flat_over_many_operations(rig: Rig) -> None:
    """MEMORY-01: nothing grows with the number of requests once host memory, and the log of events, have
    been full."""
    controller = await rig.controller(capacity_bytes=64 << 10, settings=ControllerSettings(events_pages=1000))
    engine = TaggedEngine(controller)

    async def work(first: int, n_rounds: int) -> int:
        for seed in range(first, first + n_rounds):
            tokens = prompt(seed, 40)
            await engine.backup(tokens, engine.all_pages(tokens))
            await engine.load_and_check(tokens)
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1])

    await work(0, 300)
    settled_pages = await work(300, 300)
    grown_pages = await work(600, 900) - settled_pages
    assert grown_pages < 0.02 * settled_pages, f"{grown_pages} pages of 4 KiB more"


async def test_coarse_followers_move_in_complete_groups(rig: Rig) -> None:
    """SIDECAR-06: followers with one row for 1, 4 and 128 tokens: a page of 128 tokens holds whole groups of
    each, so a boundary never cuts one; bytes are equal after the way through storage."""
    layout, nbytes = make_layout(
        {"full": 8},
        page_size=128,
        components=(ComponentSpec("full", Kind.FULL),),
        plane_bytes={"full": ((128 * 16,), (128 // 4 * 24,), (1 * 40,))},
    )
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller, "coarse", layout, nbytes)
    tokens = prompt(3, 3 * 128 + 100)
    outcome = await engine.backup(tokens, {"full": [0, 1, 2]})
    assert outcome["full"].stored_pages == 3
    await until(lambda: controller.counters.storage_written_pages == 3)
    await emptied(controller)
    assert (await engine.prefetch(tokens)).boundary == 3
    assert await engine.load_and_check(tokens) == 3


async def test_every_storage_verb_uses_the_same_key(rig: Rig) -> None:
    """L3-09: existence, reads and deletes find what writes have stored, under the configured prefix only."""
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == 21)
    assert rig.tier is not None
    page_hash = hashes_of(engine.namespace(), TOKENS)[0]
    key = storage_key("hicache", "full", 0, 1, page_hash)
    other = storage_key("other", "full", 0, 1, page_hash)
    assert await rig.tier.contains([key, other], timeout_s=5) == [Outcome.OK, Outcome.ABSENT]
    frame = Item(key, 0, HEADER_BYTES + 242)
    await emptied(controller)
    transfer = await rig.tier.read([frame, replace(frame, key=other)], timeout_s=5)
    await transfer.settled
    assert transfer.outcomes == [Outcome.OK, Outcome.ABSENT]
    assert await rig.tier.delete([other, key], timeout_s=5) == [Outcome.ABSENT, Outcome.OK]
    assert await rig.tier.contains([key], timeout_s=5) == [Outcome.ABSENT]
