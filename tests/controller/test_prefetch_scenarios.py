"""Prefetches that others met trouble with: what is told, what is kept, and what is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from controller.controller import HybridCacheController
from controller.requests import Lookup, Prefetch, PrefetchPolicy, PrefetchState, Progress
from controller.settings import ControllerSettings
from controller.storage import TierPolicy
from hicache.core.words import BoolArray
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.specs import MemorySpec
from tests.controller.rig import MIB, Rig, TaggedEngine, emptied, until
from tests.tagged import prompt

MEMORY = MemorySpec(capacity_bytes=64 * MIB)
TOKENS = prompt(1, 40)
ALL = 21


class Gate:
    """Storage whose reads (of some keys) wait while it is closed."""

    def __init__(self, folder: Path, key_part: str = "", on: str = "read") -> None:
        folder.mkdir()
        self._closed = folder / "closed"
        fault = Fault(kind=FaultKind.FREEZE, on=frozenset({on}), key_part=key_part)
        self.spec = FaultySpec(inner=MEMORY, faults=(fault,), gate=str(folder))

    def close(self) -> None:
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink(missing_ok=True)


async def stored_behind(
    rig: Rig, gate: Gate, settings: ControllerSettings | None = None, capacity_bytes: int = 4 * MIB
) -> tuple[HybridCacheController, TaggedEngine]:
    """TOKENS in storage only, and the gate closed."""
    settings = settings or ControllerSettings(storage_timeout_s=20)
    controller = await rig.controller(settings=settings, capacity_bytes=capacity_bytes)
    tier = await rig.tier_for(controller, "l3", gate.spec)
    controller.storage.attach(tier, TierPolicy())
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    await emptied(controller)
    gate.close()
    return controller, engine


def start(engine: TaggedEngine, policy: PrefetchPolicy, device: dict[str, BoolArray] | None = None) -> str:
    return engine.controller.prefetch(Prefetch(Lookup(engine.prompt(TOKENS), device or {}), policy, 0.3))


async def nothing_held(controller: HybridCacheController) -> None:
    await until(lambda: all(p.pinned_pages + p.inbound_pages == 0 for p in controller.status().pools))
    await emptied(controller)
    assert controller.status().host_used_bytes == 0
    assert controller.audit() == []


async def test_the_tree_changes_under_a_running_prefetch(rig: Rig, tmp_path: Path) -> None:
    """PREFETCH-01, PREFETCH-11: what the engine held at the start is gone, other pages have come; the
    prefetch lands where it is right, and nothing is left that no lookup can reach."""
    gate = Gate(tmp_path / "gate")
    controller, engine = await stored_behind(rig, gate)
    head = {name: np.arange(10) < 4 for name in ("full", "swa")}
    prefetch_id = start(engine, PrefetchPolicy.WAIT_COMPLETE, head)  # asks for pages 4..9 only
    await until(lambda: any(pool.inbound_pages for pool in controller.status().pools))
    branch = prompt(2, 12, TOKENS[:28])
    await engine.backup(branch[:12], {"full": [0, 1, 2], "swa": [0, 1, 2]})
    controller.flush()
    gate.open()
    progress = await controller.wait_prefetch(engine.engine_id, prefetch_id)
    assert (progress.boundary, progress.storage_boundary) == (10, 10)
    assert engine.lookup(TOKENS, device=head).boundary == 10  # with the head that is still in L1
    assert engine.lookup(TOKENS).boundary == 0  # and not without it
    await controller.detach(engine.engine_id)
    await nothing_held(controller)


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
async def test_a_component_that_hangs_does_not_outlast_the_policy(
    rig: Rig, tmp_path: Path, policy: PrefetchPolicy
) -> None:
    """PREFETCH-04: FULL and SWA are there, the checkpoint hangs: each policy ends as it says, and only
    pages with all of their components count."""
    gate = Gate(tmp_path / "gate", key_part="/mamba/")
    settings = ControllerSettings(storage_timeout_s=20, prefetch_max_s=0.6)
    controller, engine = await stored_behind(rig, gate, settings)
    prefetch_id = start(engine, policy)
    if policy is not PrefetchPolicy.BEST_EFFORT:
        await until(lambda: controller.counters.prefetch_read_pages >= 12)
    async with asyncio.timeout(10):
        progress = await controller.wait_prefetch(engine.engine_id, prefetch_id)
    assert (progress.boundary, progress.reason) == (0, "deadline")
    assert progress.state in (PrefetchState.PLANNING, PrefetchState.READING)
    gate.open()
    assert engine.lookup(TOKENS).boundary in (0, 10)
    await controller.detach(engine.engine_id)
    await nothing_held(controller)


async def test_before_there_is_a_plan_it_says_so(rig: Rig, tmp_path: Path) -> None:
    """PREFETCH-05: nothing of nothing is not `done`."""
    gate = Gate(tmp_path / "gate", on="contains")
    controller, engine = await stored_behind(rig, gate)
    waiting = start(engine, PrefetchPolicy.WAIT_COMPLETE)
    early = await controller.wait_prefetch(engine.engine_id, start(engine, PrefetchPolicy.BEST_EFFORT))
    assert (early.state, early.wanted_pages, early.reason) == (PrefetchState.PLANNING, 0, "deadline")
    gate.open()
    assert (await controller.wait_prefetch(engine.engine_id, waiting)).boundary == 10


@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
async def test_too_little_to_be_worth_it_ends_and_says_so(rig: Rig, policy: PrefetchPolicy) -> None:
    """PREFETCH-06, PREFETCH-14: a final state, not a request that waits for ever."""
    controller = await rig.controller(
        storage=rig.file_spec, settings=ControllerSettings(prefetch_threshold_pages=11)
    )
    engine = TaggedEngine(controller)
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: controller.counters.storage_written_pages == ALL)
    await emptied(controller)
    progress = await engine.prefetch(TOKENS, policy, timeout_s=5)
    assert (progress.state, progress.reason) == (PrefetchState.DONE, "below_threshold")
    assert (progress.boundary, progress.storage_boundary) == (0, 10)
    assert controller.counters.prefetch_below_threshold == 1


async def test_each_reason_to_read_nothing_is_told(rig: Rig, tmp_path: Path) -> None:
    """PREFETCH-14: it was in L1 or L2 already; storage has nothing; the policy cut it."""
    gate = Gate(tmp_path / "gate")
    controller, engine = await stored_behind(rig, gate)
    cut = await controller.wait_prefetch(engine.engine_id, start(engine, PrefetchPolicy.BEST_EFFORT))
    assert cut.reason == "deadline"
    gate.open()
    everything = {name: np.ones(10, dtype=bool) for name in ("full", "swa", "mamba")}
    progress = await controller.wait_prefetch(
        engine.engine_id, start(engine, PrefetchPolicy.WAIT_COMPLETE, everything)
    )
    assert (progress.boundary, progress.wanted_pages, progress.reason) == (10, 0, "")
    nothing = await engine.prefetch(prompt(3, 40))
    assert (nothing.boundary, nothing.storage_boundary, nothing.wanted_pages, nothing.reason) == (0, 0, 0, "")


async def test_prefetches_share_a_bounded_part_of_host_memory(rig: Rig, tmp_path: Path) -> None:
    """PREFETCH-03, PREFETCH-08: those beyond the share are cut with the reason, and what storage had is
    told apart from what could be staged; when the others have ended it goes."""
    gate = Gate(tmp_path / "gate")
    settings = ControllerSettings(storage_timeout_s=20, prefetch_host_share=0.06)
    controller, engine = await stored_behind(rig, gate, settings, capacity_bytes=128 << 10)
    first = start(engine, PrefetchPolicy.WAIT_COMPLETE)  # 7 KiB of the 7.8 KiB
    await until(lambda: any(pool.inbound_pages for pool in controller.status().pools))
    other = TaggedEngine(controller, "other")
    asked = Prefetch(Lookup(other.prompt(prompt(4, 40))), PrefetchPolicy.WAIT_COMPLETE)
    gate.open()
    await engine.backup(prompt(4, 40), engine.all_pages(prompt(4, 40)))
    await until(lambda: controller.counters.storage_written_pages == 2 * ALL)
    controller.flush()
    gate.close()
    refused = await controller.wait_prefetch("other", controller.prefetch(asked))
    assert (refused.boundary, refused.storage_boundary) == (0, 10)
    assert refused.reason == "host_capacity"
    assert controller.counters.prefetch_cut_host_capacity == 1
    gate.open()
    assert (await controller.wait_prefetch(engine.engine_id, first)).boundary == 10
    await controller.detach(engine.engine_id)
    accepted = await controller.wait_prefetch("other", controller.prefetch(asked))
    assert (accepted.boundary, accepted.reason) == (10, "")


async def test_a_host_tier_that_is_small_can_still_prefetch(rig: Rig) -> None:
    """PREFETCH-09, PREFETCH-10: the room for prefetches does not depend on L1's size, and full host memory
    is evicted for them, just as much as they need."""
    controller = await rig.controller(storage=rig.file_spec, capacity_bytes=32 << 10)
    engine = TaggedEngine(controller)
    prompts = [prompt(seed, 40) for seed in range(10, 16)]
    for tokens in prompts:
        await engine.backup(tokens, engine.all_pages(tokens))
        await until(lambda: not controller.status().backends[0].queued_writes)
    for tokens in prompts:
        progress: Progress = await engine.prefetch(tokens)
        assert progress.boundary == 10
        assert await engine.load_and_check(tokens) == 10


async def test_many_random_round_trips_deliver_only_right_bytes(rig: Rig) -> None:
    """L3-15: prefixes of shared and own prompts, evicted and fetched in any order; every byte compared."""
    controller = await rig.controller(storage=rig.file_spec, capacity_bytes=48 << 10)
    engine = TaggedEngine(controller)
    random = np.random.default_rng(0)
    trunk = prompt(100, 24)
    prompts = [prompt(seed, 24, trunk if seed % 2 else None) for seed in range(12)]
    for _ in range(150):
        tokens = prompts[int(random.integers(len(prompts)))]
        tokens = tokens[: 4 * int(random.integers(1, len(tokens) // 4 + 1))]
        if random.random() < 0.5:
            await engine.backup(tokens, engine.all_pages(tokens))
        elif random.random() < 0.5:
            await engine.prefetch(tokens)
        await engine.load_and_check(tokens)
        if random.random() < 0.1:
            controller.flush()
    assert controller.counters.prefetch_corrupt_pages == 0
    assert controller.counters.prefetch_read_pages > 0
