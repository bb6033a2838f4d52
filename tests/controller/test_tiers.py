"""Several storage tiers: order, trouble in one, queues that wait out an outage, coming and going."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.controller import HybridCacheController
from controller.requests import Busy, Gone, InvalidRequest, PrefetchPolicy
from controller.settings import ControllerSettings
from controller.storage import StorageTier, TierPolicy
from hicache.core.identity import storage_key
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.messages import WorkerSpec
from storage_backends.specs import FileSpec, MemorySpec
from tests.controller.rig import MIB, Rig, TaggedEngine, emptied, until
from tests.tagged import hashes_of, prompt

MEMORY = MemorySpec(capacity_bytes=64 * MIB)
TOKENS = prompt(1, 40)
ALL = 21
QUICK = ControllerSettings(storage_timeout_s=0.3)


async def attached(
    rig: Rig, controller: HybridCacheController, name: str, spec: WorkerSpec, policy: TierPolicy | None = None
) -> StorageTier:
    tier = await rig.tier_for(controller, name, spec)
    controller.storage.attach(tier, policy or TierPolicy())
    return tier


def gate(folder: Path, *, closed: bool) -> Path:
    path = folder / "gate"
    path.mkdir(exist_ok=True)
    (path / "closed").touch() if closed else (path / "closed").unlink(missing_ok=True)
    return path


def freezing(folder: Path, on: set[str]) -> FaultySpec:
    """A backend that hangs while the gate is closed."""
    fault = Fault(kind=FaultKind.FREEZE, on=frozenset(on))
    return FaultySpec(inner=MEMORY, faults=(fault,), gate=str(gate(folder, closed=False)))


async def test_every_writable_tier_gets_everything_and_the_first_is_read(rig: Rig) -> None:
    controller = await rig.controller()
    first = await attached(rig, controller, "first", MEMORY)
    second = await attached(rig, controller, "second", rig.file_spec)
    await attached(rig, controller, "archive", MEMORY, TierPolicy(write=False))
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == 2 * ALL)
    await emptied(controller)
    assert (await engine.prefetch(TOKENS)).boundary == 10
    assert (first.counters()["read_ok"], second.counters()["read_ok"]) == (13, 0)
    assert await engine.load_and_check(TOKENS) == 10


async def test_what_the_first_tier_lacks_comes_from_the_next(rig: Rig) -> None:
    controller = await rig.controller()
    forgetful = FaultySpec(
        inner=MEMORY, faults=(Fault(kind=FaultKind.ABSENT, on=frozenset({"read"}), rate=0.5),)
    )
    await attached(rig, controller, "forgetful", forgetful)
    second = await attached(rig, controller, "second", rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == 2 * ALL)
    await emptied(controller)
    assert (await engine.prefetch(TOKENS)).boundary == 10
    assert 0 < second.counters()["read_ok"] < 13
    assert await engine.load_and_check(TOKENS) == 10


async def test_a_frozen_tier_does_not_hold_up_the_other(rig: Rig, tmp_path: Path) -> None:
    """L3 in trouble costs misses in that tier; its breaker opens, shows in health, and closes by itself."""
    controller = await rig.controller(settings=QUICK)
    spec = freezing(tmp_path, {"contains", "read", "write"})
    frozen = await attached(rig, controller, "frozen", spec)
    await attached(rig, controller, "sound", rig.file_spec)
    engine = TaggedEngine(controller)
    gate(tmp_path, closed=True)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    assert await engine.load_and_check(TOKENS) == 10
    await until(lambda: any("frozen" in problem for problem in controller.status().problems))
    controller.flush()  # but for what the frozen write still reads
    assert (await engine.prefetch(TOKENS)).boundary == 10
    assert await engine.load_and_check(TOKENS) == 10
    gate(tmp_path, closed=False)
    await until(lambda: not controller.status().problems)
    await until(lambda: frozen.counters()["write_ok"] >= ALL)


async def test_a_queue_waits_out_an_outage(rig: Rig, tmp_path: Path) -> None:
    """REDIS-04's kind: what was due before and during the outage is written after it, none given up."""
    controller = await rig.controller(settings=QUICK)
    await attached(rig, controller, "l3", freezing(tmp_path, {"contains", "write"}))
    engine = TaggedEngine(controller)
    gate(tmp_path, closed=True)
    prompts = [prompt(seed, 40) for seed in range(10, 16)]
    for tokens in prompts:
        await engine.backup(tokens, engine.all_pages(tokens))
    await until(lambda: controller.counters.storage_write_retries >= 2)
    assert [await engine.load_and_check(tokens) for tokens in prompts] == [10] * 6
    gate(tmp_path, closed=False)
    await until(lambda: controller.counters.storage_written_pages >= 6 * ALL)
    assert controller.counters.storage_write_dropped_failed_pages == 0
    await emptied(controller)
    for tokens in prompts:
        assert (await engine.prefetch(tokens)).boundary == 10
        assert await engine.load_and_check(tokens) == 10


async def test_nothing_is_written_twice(rig: Rig, tmp_path: Path) -> None:
    """A page that waits to be written is not queued again by the next turn's backup."""
    controller = await rig.controller()
    tier = await attached(rig, controller, "l3", freezing(tmp_path, {"write"}))
    engine = TaggedEngine(controller)
    gate(tmp_path, closed=True)
    for n_tokens in (8, 16, 24, 32, 40):
        await engine.backup(TOKENS[:n_tokens], engine.all_pages(TOKENS[:n_tokens]))
    gate(tmp_path, closed=False)
    await until(lambda: controller.status().backends[0].queued_writes == 0)
    assert controller.counters.storage_written_pages == 10 + 10 + 5
    assert tier.counters()["write_ok"] == 25


async def test_a_failed_batch_is_retried_and_the_chain_has_no_hole(rig: Rig) -> None:
    """WRITE-01: one failure is retried; a page that always fails cuts the chain there, counted."""
    settings = ControllerSettings(storage_batch_bytes=2048, write_attempts=3)
    controller = await rig.controller(settings=settings)
    once = FaultySpec(inner=MEMORY, faults=(Fault(kind=FaultKind.FAIL, on=frozenset({"write"}), times=1),))
    await attached(rig, controller, "once", once)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    assert controller.counters.storage_write_retries == 1


async def test_a_page_that_cannot_be_written_is_given_up_with_what_follows(rig: Rig) -> None:
    """WRITE-01, second run: what is stored is a prefix, never one with a hole in the middle."""
    settings = ControllerSettings(storage_batch_bytes=2048, write_attempts=2)
    controller = await rig.controller(settings=settings)
    engine = TaggedEngine(controller)
    bad = storage_key("hicache", "full", 0, 1, hashes_of(engine.namespace(), TOKENS)[4])
    never = FaultySpec(
        inner=MEMORY, faults=(Fault(kind=FaultKind.FAIL, on=frozenset({"write"}), key_part=bad),)
    )
    await attached(rig, controller, "never", never)
    await engine.backup(TOKENS, engine.all_pages(TOKENS, checkpoints=[2, 4, 10]))
    counters = controller.counters
    await until(lambda: counters.storage_write_dropped_failed_pages > 0)
    assert counters.storage_written_pages + counters.storage_write_dropped_failed_pages == ALL + 2
    await emptied(controller)
    assert (await engine.prefetch(TOKENS)).storage_boundary == 4
    assert await engine.load_and_check(TOKENS) == 4


async def test_a_full_tier_takes_no_retries(rig: Rig) -> None:
    """REDIS-03, L3-12: writes are skipped and counted, no retry storm; reads go on."""
    controller = await rig.controller()
    fault = Fault(kind=FaultKind.FULL, on=frozenset({"write"}), key_part="/swa/")
    await attached(rig, controller, "full", FaultySpec(inner=MEMORY, faults=(fault,)))
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_write_dropped_full_pages == 10)
    assert controller.counters.storage_written_pages == ALL - 10
    assert controller.counters.storage_write_retries == 0


async def test_tiers_come_and_go_under_load_and_nothing_changes_its_name(rig: Rig, tmp_path: Path) -> None:
    """ATTACH-01, ATTACH-05: what one tier stored is found again when it comes back."""
    controller = await rig.controller()
    engine = TaggedEngine(controller)
    first = await attached(rig, controller, "l3", rig.file_spec)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    stop = asyncio.Event()

    async def load() -> int:
        rounds = 0
        while not stop.is_set():
            other = prompt(1000 + rounds, 40)
            await engine.backup(other, engine.all_pages(other))
            await engine.prefetch(other)
            await engine.load_and_check(other)  # right bytes; how many, flushes decide
            rounds += 1
        return rounds

    working = asyncio.create_task(load())
    for _ in range(3):
        tier = await controller.storage.detach("l3", force=True, timeout_s=5)
        await tier.stop()
        assert controller.status().backends == ()
        controller.flush()
        assert (await engine.prefetch(TOKENS)).storage_boundary == 0
        await attached(rig, controller, "l3", rig.file_spec)
        assert (await engine.prefetch(TOKENS)).boundary == 10
        assert await engine.load_and_check(TOKENS) == 10
    stop.set()
    assert await working > 0
    assert first.worker_pid is None
    assert controller.audit() == []


async def test_a_hanging_tier_is_detached_by_force_within_its_bound(rig: Rig, tmp_path: Path) -> None:
    """ATTACH-01, ATTACH-04: refused while operations hang; forced, they end as failed and pins are gone."""
    controller = await rig.controller(settings=QUICK)
    tier = await attached(rig, controller, "l3", freezing(tmp_path, {"read", "write"}))
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    await emptied(controller)
    gate(tmp_path, closed=True)
    reading = asyncio.create_task(engine.prefetch(TOKENS, PrefetchPolicy.TIMEOUT, timeout_s=2.0))
    other = prompt(2, 40)
    await engine.backup(other, engine.all_pages(other))
    await until(lambda: tier.counters()["late"] > 0)
    with pytest.raises(Busy, match="not idle"):
        await controller.storage.detach("l3", force=False, timeout_s=0.1)
    assert len(controller.status().backends) == 1
    detached = await controller.storage.detach("l3", force=True, timeout_s=0.1)
    assert await detached.stop()
    assert (await reading).boundary == 0
    assert await engine.load_and_check(other) == 10
    await until(
        lambda: all(pool.pinned_pages + pool.inbound_pages == 0 for pool in controller.status().pools)
    )
    gate(tmp_path, closed=False)
    await attached(rig, controller, "l3", MEMORY)
    assert not controller.status().problems


async def test_attach_and_detach_refuse_what_makes_no_sense(rig: Rig) -> None:
    controller = await rig.controller()
    await attached(rig, controller, "l3", MEMORY)
    with pytest.raises(InvalidRequest, match="'l3' is attached; detach it first"):
        await attached(rig, controller, "l3", FileSpec(path="/nowhere"))
    with pytest.raises(Gone, match="no storage tier 'x' is attached; attached: \\['l3'\\]"):
        await controller.storage.detach("x", force=False, timeout_s=1)
    controller.storage.update("l3", TierPolicy(write=False))
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    assert controller.status().backends[0].queued_writes == 0
