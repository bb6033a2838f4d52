"""Redis behind the storage tier and the controller: worker process, slab, deadlines, integrity."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controller.requests import Backup, PrefetchState
from controller.storage import StorageLimits, StorageTier
from storage_backends.base import Outcome
from storage_backends.specs import RedisSpec
from tests.controller.rig import Rig, TaggedEngine, until
from tests.redis.servers import Server, running
from tests.storage.conftest import DEADLINE_S, Slab, all_ok, children, is_running
from tests.storage.conftest import eventually as eventually_async
from tests.tagged import prompt

OK, ABSENT, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.FAILED
QUICK = StorageLimits(probe_interval_s=0.05, restart_min_s=0.01, restart_max_s=0.1)


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab()
    yield slab
    slab.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    await made.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with running(Server(tmp_path / "own")) as server:
        yield server


# ---- the tier -------------------------------------------------------------------------------------------


async def test_frames_go_between_slab_and_server(slab: Slab, server: Server) -> None:
    tier = StorageTier("redis", RedisSpec(addresses=(server.address,)), slab.fd, slab.nbytes, limits=QUICK)
    await tier.start(strict=True)
    try:
        assert await all_ok(tier, slab, "a", "b", "c")
        assert await tier.contains(["a", "x", "c"], timeout_s=DEADLINE_S) == [OK, ABSENT, OK]
        assert await tier.delete(["a"], timeout_s=DEADLINE_S) == [OK]
        await eventually_async(lambda: tier.usage().n_objects == 2)
    finally:
        assert await tier.stop()


async def test_a_frozen_server_is_told_and_heals_without_a_new_worker(slab: Slab, own_server: Server) -> None:
    """REDIS-04 through the tier: outcomes at the deadline, ranges settled soon after, health says why, and
    within five seconds of the server's return all works again, in the same worker."""
    spec = RedisSpec(addresses=(own_server.address,), op_timeout_s=0.4, connect_timeout_s=0.2)
    tier = StorageTier("redis", spec, slab.fd, slab.nbytes, limits=QUICK)
    await tier.start(strict=True)
    try:
        assert await all_ok(tier, slab, "a")
        workers = children()
        with own_server.frozen():
            transfer = await tier.read(slab.places("a"), timeout_s=1.0)
            assert transfer.outcomes == [FAILED]
            await asyncio.wait_for(asyncio.shield(transfer.settled), DEADLINE_S)
            await eventually_async(lambda: "frozen" in tier.problem)
        thawed_s = time.monotonic()
        while not await all_ok(tier, slab, "b"):
            assert time.monotonic() - thawed_s < 5
        await eventually_async(lambda: not tier.problem)
        assert await tier.contains(["a"], timeout_s=DEADLINE_S) == [OK]
        assert children() == workers
    finally:
        assert await tier.stop()


async def test_an_embedded_server_ends_with_its_worker(slab: Slab) -> None:
    """A killed worker takes its server with it; the next one starts its own. None is left at the end."""
    tier = StorageTier("redis", RedisSpec(embedded=True), slab.fd, slab.nbytes, limits=QUICK)
    await tier.start(strict=True)
    try:
        assert await all_ok(tier, slab, "a")
        worker = tier.worker_pid
        assert worker is not None
        servers = grandchildren(worker)
        assert len(servers) == 1
        os.kill(worker, signal.SIGKILL)
        await eventually_async(lambda: not is_running(servers[0]))
        await eventually_async(lambda: tier.worker_pid not in (None, worker))
        assert await all_ok(tier, slab, "b")
        worker = tier.worker_pid
        assert worker is not None
        servers = grandchildren(worker)
        assert len(servers) == 1
    finally:
        assert await tier.stop()
    assert not is_running(servers[0])


def grandchildren(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


async def test_a_server_that_is_away_at_the_start_is_found_later(slab: Slab, tmp_path: Path) -> None:
    server = Server(tmp_path / "later")
    spec = RedisSpec(addresses=(server.address,), connect_timeout_s=0.2)
    tier = StorageTier("redis", spec, slab.fd, slab.nbytes, limits=QUICK)
    await tier.start()
    try:
        assert "cannot be reached" in tier.problem
        with running(server):
            await eventually_async(lambda: not tier.problem)
            assert await all_ok(tier, slab, "a")
    finally:
        assert await tier.stop()


# ---- the controller -------------------------------------------------------------------------------------


async def stored(rig: Rig, server: Server, number: int, n_tokens: int = 40) -> TaggedEngine:
    """An engine whose prompt `number` is in the server and no more in host memory."""
    controller = await rig.controller(storage=RedisSpec(addresses=(server.address,)))
    engine = TaggedEngine(controller)
    tokens = prompt(number, n_tokens)
    await engine.backup(tokens, engine.all_pages(tokens))
    n_pages = n_tokens // 4
    await until(lambda: controller.counters.storage_written_pages == 2 * n_pages + 1)
    controller.flush()
    return engine


async def test_storage_gives_back_what_host_memory_has_lost(rig: Rig, server: Server) -> None:
    engine = await stored(rig, server, 1)
    progress = await engine.prefetch(prompt(1, 40))
    assert (progress.state, progress.boundary) == (PrefetchState.DONE, 10)
    assert await engine.load_and_check(prompt(1, 40)) == 10


async def test_half_of_the_keys_gone_is_a_shorter_hit(rig: Rig, server: Server) -> None:
    """REDIS-01: whatever is left, what is served is whole, and the holes are no error."""
    engine = await stored(rig, server, 2)
    draw = random.Random(2)
    with server.client() as client:
        keys = sorted(client.keys())
        client.delete(*draw.sample(keys, len(keys) // 2))
    progress = await engine.prefetch(prompt(2, 40))
    assert progress.state is PrefetchState.DONE
    assert progress.boundary < 10
    assert await engine.load_and_check(prompt(2, 40)) == progress.boundary


@pytest.mark.parametrize("how", ["flipped", "truncated", "another page's", "another tenant's", "a pickle"])
async def test_a_poisoned_value_is_a_miss_and_is_deleted(rig: Rig, server: Server, how: str) -> None:
    """SECURITY-03, REDIS-02, SECURITY-01: whoever may write to the server can cost us hits, never bytes."""
    engine = await stored(rig, server, 3)
    tokens = prompt(3, 40)
    with server.client() as client:
        ours = sorted(client.keys("*/full/*"))
        victim = ours[0]
        value = client.get(victim)
        assert value is not None
        if how == "another tenant's":
            await engine.backup(tokens, engine.all_pages(tokens), salt="theirs")
            await until(lambda: engine.controller.counters.storage_written_pages == 42)
            engine.controller.flush()
            theirs = [key for key in client.keys("*/full/*") if key not in ours]
            poison = client.get(theirs[0])
        else:
            poison = {
                "flipped": value[:150] + bytes([value[150] ^ 4]) + value[151:],
                "truncated": value[:-1],
                "another page's": client.get(ours[1]),
                "a pickle": b"\x80\x04cposix\nsystem\n(S'false'\ntR.".ljust(len(value), b"."),
            }[how]
        client.set(victim, poison)
        progress = await engine.prefetch(tokens)
        assert progress.boundary < 10
        assert await engine.load_and_check(tokens) == progress.boundary
        await until(lambda: not client.exists(victim))


async def test_what_is_promised_with_full_host_memory_is_delivered(rig: Rig, server: Server) -> None:
    """REDIS-07: host memory is full of leased pages; many ask for what only Redis has. Nobody is told of
    more than arrives."""
    engine = await stored(rig, server, 4)
    controller = engine.controller
    leases, number = [], 100
    while True:  # fill host memory with prompts, each leased
        tokens = prompt(number, 40)
        placements = engine.compute(tokens, engine.all_pages(tokens))
        outcomes = await controller.backup(Backup(engine.prompt(tokens), placements))
        engine.forget(placements)
        found = engine.lookup(tokens)
        leases.append(found.lease_id)
        number += 1
        if found.boundary < 10 or number > 3000:
            break
    assert number < 3000, outcomes
    asked = await asyncio.gather(*[engine.prefetch(prompt(4, 40)) for _ in range(20)])
    for progress in asked:
        assert progress.boundary <= 10
    boundary = engine.lookup(prompt(4, 40)).boundary
    assert boundary == max(progress.boundary for progress in asked)
    for lease in leases:
        controller.release(engine.engine_id, lease)
    assert (await engine.prefetch(prompt(4, 40))).boundary == 10
    assert await engine.load_and_check(prompt(4, 40)) == 10
