"""Trouble is a miss: corrupt, slow, dead storage; engines that vanish; never a wrong byte, never a leak."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from controller.controller import HybridCacheController
from controller.requests import (
    Backup,
    Load,
    Lookup,
    Placement,
    Prefetch,
    PrefetchPolicy,
    PrefetchState,
    TransferFailed,
    UnknownEngine,
)
from controller.settings import ControllerSettings
from controller.storage import StorageStack, TierPolicy
from controller.transfers.copies import CopyTable
from controller.transfers.cpu import CpuCopyEngine
from hicache.core.identity import storage_key
from storage_backends.base import Outcome
from tests.controller import rig as rig_module
from tests.controller.doubles import Mood, ScriptedTier
from tests.controller.rig import Rig, TaggedEngine, emptied, until
from tests.tagged import hashes_of, prompt

TOKENS = prompt(1, 40)
ALL = 21  # frames of ten pages: 10 FULL, 10 SWA, 1 MAMBA


async def stored(rig: Rig) -> tuple[HybridCacheController, TaggedEngine, list[Path]]:
    """A prompt that is in storage only, and its files."""
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    await emptied(controller)
    files = [
        path for path in Path(rig.file_spec.path).rglob("*") if path.is_file() and path.stat().st_size > 128
    ]
    assert len(files) == ALL
    return controller, engine, files


@pytest.mark.parametrize("damage", ["flipped", "truncated", "swapped", "lengthened"])
async def test_a_damaged_object_is_a_miss_and_is_deleted(rig: Rig, damage: str) -> None:
    """L3-01, L3-07, SECURITY-03: one bad frame costs its page and what needs it, never a wrong byte."""
    controller, engine, files = await stored(rig)
    for path in files:
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 2] ^= 1
        elif damage == "truncated":
            del content[-1]
        elif damage == "lengthened":
            content += b"x"
        else:  # a valid frame of another page
            twins = (p for p in files if p > path and p.stat().st_size == len(content))
            twin = next(twins, None)
            content = bytearray(twin.read_bytes() if twin else bytes(len(content)))
        path.write_bytes(content)
    progress = await engine.prefetch(TOKENS)
    assert progress.boundary == 0
    assert progress.reason == "storage"
    assert engine.lookup(TOKENS).boundary == 0
    assert controller.counters.prefetch_corrupt_pages == 13
    assert (await engine.prefetch(TOKENS)).storage_boundary == 0  # the bad ones are gone
    assert controller.status().host_used_bytes == 0
    await engine.backup(TOKENS, engine.all_pages(TOKENS))  # and can be stored again
    assert await engine.load_and_check(TOKENS) == 10


async def test_a_lost_object_lowers_the_boundary_to_what_is_whole(rig: Rig) -> None:
    """MAMBA-12, REDIS-01's kind: without the deep checkpoint the shallow one serves."""
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS, checkpoints=[4, 8]))
    await until(lambda: controller.counters.storage_written_pages == ALL + 1)
    await emptied(controller)
    progress = await engine.prefetch(TOKENS)
    assert (progress.boundary, progress.storage_boundary) == (8, 8)
    assert await engine.load_and_check(TOKENS) == 8
    for checkpoint, left in ((7, 4), (3, 0)):
        hashes = hashes_of(engine.namespace(), TOKENS)
        key = storage_key("hicache", "mamba", 0, 1, hashes[checkpoint])
        assert rig.tier is not None
        assert await rig.tier.delete([key], timeout_s=5) == [Outcome.OK]
        await emptied(controller)
        progress = await engine.prefetch(TOKENS)
        assert (progress.boundary, progress.storage_boundary) == (left, left)
        assert progress.wanted_pages == (4 + 2 + 1 if left else 0)
        assert await engine.load_and_check(TOKENS) == left


async def test_host_hits_do_not_depend_on_storage(rig: Rig) -> None:
    """The worker is killed: lookups and loads of L2 go on, prefetches are misses, and it heals."""
    controller, engine, _ = await stored(rig)
    tier, other = rig.tier, prompt(2, 40)
    assert tier is not None
    assert tier.worker_pid is not None
    await engine.backup(other, engine.all_pages(other))
    killed = tier.worker_pid
    os.kill(killed, signal.SIGKILL)
    assert await engine.load_and_check(other) == 10
    progress = await engine.prefetch(TOKENS, PrefetchPolicy.TIMEOUT, timeout_s=1.0)
    assert progress.boundary in (0, 10)  # a miss, or the worker is back already
    await until(lambda: tier.worker_pid not in (None, killed) and not controller.status().problems)
    assert (await engine.prefetch(TOKENS)).boundary == 10
    assert await engine.load_and_check(TOKENS) == 10
    fresh = prompt(3, 40)
    written = controller.counters.storage_written_pages
    await engine.backup(fresh, engine.all_pages(fresh))
    await until(lambda: controller.counters.storage_written_pages >= written + ALL)


async def test_what_is_evicted_while_storage_is_being_asked_is_prefetched_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage was not asked for the pages that host memory had; they are known to be stored."""
    controller, engine, _ = await stored(rig)
    assert (await engine.prefetch(TOKENS)).boundary == 10
    controller.release(engine.engine_id, engine.lookup(TOKENS).lease_id)
    ask = StorageStack.contains

    async def evicted_meanwhile(
        stack: StorageStack, keys: Sequence[str], *, timeout_s: float
    ) -> list[Outcome]:
        answers = await ask(stack, keys, timeout_s=timeout_s)
        await emptied(controller)
        return answers

    monkeypatch.setattr(StorageStack, "contains", evicted_meanwhile)
    longer = np.concatenate((TOKENS, prompt(2, 8)))
    progress = await engine.prefetch(longer)
    assert (progress.storage_boundary, progress.boundary) == (10, 10)
    assert await engine.load_and_check(longer) == 10


async def test_a_cancelled_prefetch_gives_everything_back(rig: Rig) -> None:
    """PREFETCH-07: two hundred prefetches stopped at any stage leave no reservation."""
    controller, engine, _ = await stored(rig)
    for round_number in range(40):
        request = Prefetch(Lookup(engine.prompt(TOKENS)), PrefetchPolicy.WAIT_COMPLETE)
        prefetch_id = controller.prefetch(request)
        for _ in range(round_number):
            await asyncio.sleep(0)
        progress = await controller.cancel_prefetch(engine.engine_id, prefetch_id)
        assert progress.state in (PrefetchState.CANCELLED, PrefetchState.DONE)
        engine.lookup(TOKENS)
        for pool in controller.status().pools:
            assert pool.inbound_pages == 0
        assert controller.audit() == []
    assert (await engine.prefetch(TOKENS)).boundary == 10


async def test_an_engine_that_leaves_takes_its_pins_along(rig: Rig) -> None:
    """LIFE-01: leases, prefetches and jobs of a detached engine are gone; others are not disturbed."""
    controller, engine, _ = await stored(rig)
    other = TaggedEngine(controller, "other")
    await engine.prefetch(TOKENS)
    engine.lookup(TOKENS)
    other_lease = other.lookup(TOKENS).lease_id
    await controller.detach(engine.engine_id)
    with pytest.raises(UnknownEngine):
        engine.lookup(TOKENS)
    assert {pool.component: pool.pinned_pages for pool in controller.status().pools} == {
        "full": 10,
        "swa": 2,
        "mamba": 1,
    }
    controller.release("other", other_lease)
    assert all(pool.pinned_pages == 0 for pool in controller.status().pools)
    assert await other.load_and_check(TOKENS) == 10


class BrokenCopies:
    """A copy engine that fails on demand."""

    def __init__(self) -> None:
        self.broken = False
        self._sound = CpuCopyEngine()

    def copy(self, table: CopyTable) -> None:
        if self.broken:
            raise OSError("copy: the bus is on fire")
        self._sound.copy(table)


async def test_a_failed_copy_publishes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SWA-10, WRITE-03: a failed backup is not shown; a failed load reaches the caller as a failure."""
    copies = BrokenCopies()
    monkeypatch.setattr(rig_module, "CpuCopyEngine", lambda: copies)
    controller = await rig.controller()
    engine = TaggedEngine(controller)
    copies.broken = True
    with pytest.raises(TransferFailed, match="on fire"):
        await engine.backup(TOKENS, engine.all_pages(TOKENS))
    assert engine.lookup(TOKENS).matched_pages == 0
    assert controller.status().host_used_bytes == 0
    copies.broken = False
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    found = engine.lookup(TOKENS)
    copies.broken = True
    placement = Placement(found.load["mamba"], np.array([3], dtype=np.int32))
    with pytest.raises(TransferFailed):
        await controller.load(Load(engine.engine_id, found.lease_id, {"mamba": placement}))
    assert (controller.counters.load_failures, controller.counters.backup_failures) == (1, 1)
    copies.broken = False
    assert await engine.load_and_check(TOKENS) == 10


async def test_writes_wait_for_storage_and_are_bounded(rig: Rig) -> None:
    """WRITE-02: with no further call everything reaches storage; beyond the bound drops are counted."""
    settings = ControllerSettings(write_queue_bytes=1 << 10)
    controller = await rig.controller(storage=rig.file_spec, settings=settings)
    engine = TaggedEngine(controller)
    placements = engine.compute(TOKENS, engine.all_pages(TOKENS))
    await controller.backup(Backup(engine.prompt(TOKENS), placements))
    engine.forget(placements)
    assert controller.counters.storage_write_dropped_queue_full_pages == ALL
    assert await engine.load_and_check(TOKENS) == 10


class TellingTier(ScriptedTier):
    """Says what is wrong, if told to."""

    told = ""

    @property
    def problem(self) -> str:
        return self.told


async def test_what_was_given_up_is_written_when_it_is_asked_for_again(rig: Rig) -> None:
    """A hole closes while the page is at hand, and not before the tier is well: it would only be refused."""
    controller = await rig.controller(settings=ControllerSettings(write_attempts=1))
    tier = TellingTier(rig._slabs[controller])
    controller.storage.attach(tier, TierPolicy())
    engine = TaggedEngine(controller)
    tier.be(Mood.FAILING)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_write_dropped_failed_pages == ALL)
    tier.be(Mood.SOUND)
    tier.told = "full"
    await engine.prefetch(TOKENS)
    assert await controller.storage.drained(5.0)
    assert not tier.objects
    tier.told = ""
    await engine.prefetch(TOKENS)
    await until(lambda: len(tier.objects) == ALL)
    await emptied(controller)
    assert (await engine.prefetch(TOKENS)).boundary == 10
    assert await engine.load_and_check(TOKENS) == 10


async def test_every_transfer_is_a_job_that_ends_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by kind and end: done, failed after bytes moved, cancelled before any did."""
    copies = BrokenCopies()
    monkeypatch.setattr(rig_module, "CpuCopyEngine", lambda: copies)
    controller = await rig.controller(storage=rig.file_spec)
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    await emptied(controller)
    await engine.prefetch(TOKENS)
    await engine.load_and_check(TOKENS)
    copies.broken = True
    with pytest.raises(TransferFailed):
        await engine.backup(prompt(2, 40), engine.all_pages(TOKENS))
    copies.broken = False
    ends = {name: count for name, count in controller.status().counters.items() if name.startswith("jobs_")}
    assert {name: count for name, count in ends.items() if count} == {
        "jobs_backup_done": 1,
        "jobs_backup_failed": 1,
        "jobs_write_done": 1,
        "jobs_prefetch_done": 1,
        "jobs_load_done": 1,
    }
    assert len(ends) == 12
    assert all(status.jobs == 0 for status in controller.status().engines)
