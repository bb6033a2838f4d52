"""What befalls a Mooncake pool, done to a real one: masters and nodes that die, freeze or fill up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.storage import StorageLimits, StorageTier
from storage_backends.base import Item, Outcome, StorageBackend, StorageError, Usage
from storage_backends.mooncake.backend import MooncakeBackend
from storage_backends.specs import MooncakeSpec
from storage_backends.testing import Bench, content_of
from tests.mooncake.conftest import Open, OpenTier, until
from tests.mooncake.servers import Pool, require_mooncake, running_pool
from tests.storage.conftest import DEADLINE_S, Slab, all_ok, eventually, is_running

OK, ABSENT, FULL, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.FULL, Outcome.FAILED
MIB = 1 << 20
SOON_S = 5.0
"""After recovery new writes and reads work within this."""
STRAGGLER_S = 5.0
"""A call that met the dead master holds its thread for 4.3 s."""


def problem_of(backend: StorageBackend) -> str:
    """What the backend says is wrong; "" when nothing is."""
    try:
        backend.ping()
    except StorageError as error:
        return str(error)
    return ""


def stores(bench: Bench, key: str) -> bool:
    """Whether the key can be written and read back now."""
    with contextlib.suppress(StorageError):
        return bench.write(key) == [OK] and bench.read(key) == bench.contents(key)
    return False


# opening


def test_a_master_that_refuses_is_named(open_mooncake: Open) -> None:
    """CONFIG-01: an unreachable master is a clear refusal, not a hang of a minute and a half."""
    require_mooncake()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(StorageError, match=f"no Mooncake master takes connections at {address}"):
            open_mooncake(MooncakeSpec(master=address))


def test_another_server_in_the_masters_place_is_told(pool: Pool, open_mooncake: Open) -> None:
    with pytest.raises(StorageError, match="is that a Mooncake master"):
        open_mooncake(MooncakeSpec(master=pool.master.metrics, master_timeout_s=0.5))


def test_a_listener_that_never_answers_is_told(open_mooncake: Open) -> None:
    require_mooncake()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StorageError, match="is that a Mooncake master"):
            open_mooncake(MooncakeSpec(master=address, master_timeout_s=0.5))


# the master


def test_a_killed_and_restarted_master_is_found_again_and_its_objects_are_misses(
    pool: Pool, open_mooncake: Open
) -> None:
    """L3-04: nobody restarts anything; what it knew is gone, and nothing believes otherwise."""
    backend = open_mooncake(pool.spec())
    bench = Bench(backend)
    assert bench.write("a") == [OK]
    os.kill(pool.master.pid, signal.SIGKILL)
    until(lambda: "see whether it runs" in problem_of(backend))
    for call in (lambda: backend.contains(["a"]), lambda: bench.read("a"), lambda: bench.write("b")):
        with pytest.raises(StorageError, match="see whether it runs"):
            call()
    assert pool.master.tend()
    restarted_s = time.monotonic()
    until(lambda: stores(bench, "c"))
    assert time.monotonic() - restarted_s < SOON_S
    assert bench.read("a") == [ABSENT]
    assert backend.contains(["a"]) == [ABSENT]
    assert bench.write("a") == [OK]
    assert bench.read("a") == bench.contents("a")
    backend.ping()


async def test_under_steady_load_a_lost_master_costs_misses_and_health_says_why(
    pool: Pool, open_tier: OpenTier, slab: Slab
) -> None:
    """No call outlives its deadline by more than the machine's own delays, whatever the library does; after
    the restart everything works again."""
    tier = await open_tier(pool.spec())
    assert await all_ok(tier, slab, "a", "b")
    longest_s = 0.0

    async def load_until(holds: Callable[[], object]) -> None:
        nonlocal longest_s
        ends_s = time.monotonic() + DEADLINE_S
        places = slab.places("a", "b", base=16 * MIB)
        while not holds():
            began_s = time.monotonic()
            assert began_s < ends_s, "it never came true"
            calls = (
                tier.read(places, timeout_s=0.2),
                tier.write(slab.fill("a", "b"), timeout_s=0.2),
                tier.contains(["a", "b"], timeout_s=0.2),
            )
            await asyncio.gather(*calls)
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.02)

    os.kill(pool.master.pid, signal.SIGKILL)
    await load_until(lambda: "Mooncake master" in tier.problem)
    assert pool.master.tend()
    restarted_s = time.monotonic()
    await load_until(lambda: tier.healthy)
    await until_it_stores(tier, slab)
    assert time.monotonic() - restarted_s < SOON_S + STRAGGLER_S
    assert longest_s < 0.2 + 1.0
    assert await all_ok(tier, slab, "a", "b")


def test_a_frozen_master_costs_the_timeout_and_no_more(pool: Pool, open_mooncake: Open) -> None:
    """CONFIG-07: the caller's time is kept although the library waits longer."""
    backend = open_mooncake(MooncakeSpec(master=pool.master.address, op_timeout_s=0.3, master_timeout_s=3.0))
    bench = Bench(backend)
    assert bench.write("a") == [OK]
    os.kill(pool.master.pid, signal.SIGSTOP)
    try:
        asked_s = time.monotonic()
        with pytest.raises(StorageError, match="did not answer within"):
            backend.contains(["a"])
        assert time.monotonic() - asked_s < 3.0
    finally:
        os.kill(pool.master.pid, signal.SIGCONT)
    until(lambda: stores(bench, "b"))
    assert bench.read("a") in ([ABSENT], bench.contents("a"))


# the nodes


async def test_a_frozen_node_costs_its_deadline_and_no_byte_lands_after_settled(
    pool: Pool, open_tier: OpenTier, slab: Slab
) -> None:
    """The read is answered at its deadline; its ranges are settled when the library has returned, and what
    the node sends when it wakes up goes nowhere."""
    tier = await open_tier(pool.spec(), StorageLimits(probe_interval_s=0.05, hang_s=60.0))
    keys = ["a", "b", "c"]
    written = await tier.write(slab.fill(*keys, nbytes=MIB), timeout_s=DEADLINE_S)
    assert set(written.outcomes) == {OK}
    places = slab.places(*keys, nbytes=MIB, base=16 * MIB)
    os.kill(pool.owners[0].process.pid, signal.SIGSTOP)
    try:
        transfer = await tier.read(places, timeout_s=0.3)
        assert transfer.outcomes == [FAILED] * 3
        assert not transfer.settled.done()
        await asyncio.wait_for(asyncio.shield(transfer.settled), DEADLINE_S)
        mark = b"\xee" * (3 * MIB)
        slab.bytes[16 * MIB : 19 * MIB] = mark
    finally:
        os.kill(pool.owners[0].process.pid, signal.SIGCONT)
    await until_it_stores(tier, slab)
    assert slab.bytes[16 * MIB : 19 * MIB] == mark


async def until_it_stores(tier: StorageTier, slab: Slab) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not await all_ok(tier, slab, f"again{time.monotonic()}"):
        assert time.monotonic() < ends_s, "it never stored again"
        await asyncio.sleep(0.05)


async def test_a_worker_that_waits_for_a_frozen_node_is_killed_and_that_settles(
    pool: Pool, open_tier: OpenTier, slab: Slab
) -> None:
    """Sixty objects on a frozen node hold the library for most of a minute."""
    tier = await open_tier(pool.spec(), StorageLimits(probe_interval_s=0.05, hang_s=0.5, restart_min_s=0.01))
    keys = [f"k{number}" for number in range(60)]
    assert set((await tier.write(slab.fill(*keys), timeout_s=DEADLINE_S)).outcomes) == {OK}
    os.kill(pool.owners[0].process.pid, signal.SIGSTOP)
    try:
        transfer = await tier.read(slab.places(*keys, base=16 * MIB), timeout_s=0.2)
        assert set(transfer.outcomes) == {FAILED}
        await asyncio.wait_for(asyncio.shield(transfer.settled), DEADLINE_S)
        assert tier.counters()["hang_kills"] == 1
    finally:
        os.kill(pool.owners[0].process.pid, signal.SIGCONT)
    await until_it_stores(tier, slab)


def test_objects_of_a_lost_node_fail_until_the_master_forgets_them_and_then_are_absent(
    pool: Pool, open_mooncake: Open
) -> None:
    """L3-01: presence is a hint; what cannot be read is no hit. The pool works on with another node."""
    backend = open_mooncake(pool.spec())
    bench = Bench(backend)
    assert bench.write("a", "b") == [OK, OK]
    pool.owners[0].kill()
    assert bench.read("a", "b") == [FAILED, FAILED]
    assert "lost or frozen" in problem_of(backend)
    until(lambda: bench.read("a", "b") == [ABSENT, ABSENT])
    assert backend.contains(["a", "b"]) == [ABSENT, ABSENT]
    pool.add_owner()
    joined_s = time.monotonic()
    until(lambda: stores(bench, "c"))
    assert time.monotonic() - joined_s < SOON_S
    backend.ping()


def test_a_node_that_leaves_takes_only_its_own_objects(pool: Pool, open_mooncake: Open) -> None:
    """L3-06: closing one instance wipes nobody else's objects."""
    staying = open_mooncake(pool.spec())
    bench = Bench(staying)
    assert bench.write("a", "b") == [OK, OK]
    giving = MooncakeSpec(master=pool.master.address, segment_bytes=16 * MIB)
    with MooncakeBackend(giving) as leaving:
        assert Bench(leaving).write("c") == [OK]
        assert staying.usage().capacity_bytes == (64 + 16) * MIB
    assert staying.usage().capacity_bytes == 64 * MIB
    assert bench.read("a", "b") == bench.contents("a", "b")


def test_objects_outlive_the_client_that_wrote_them(shared_pool: Pool, open_mooncake: Open) -> None:
    """L3-05: after a restart of the daemon what it stored is found by the same keys."""
    with MooncakeBackend(shared_pool.spec()) as first:
        assert Bench(first).write("outlives") == [OK]
    bench = Bench(open_mooncake(shared_pool.spec()))
    assert bench.read("outlives") == bench.contents("outlives")


# room


def test_a_full_pool_is_full_not_failed_and_makes_room() -> None:
    """A burst of four times the pool: each write is OK or FULL, what was OK just now can be read, and later
    writes find room. What is leased, as objects just read are, cannot go."""
    with running_pool(segment_bytes=16 * MIB) as pool, MooncakeBackend(pool.spec()) as backend:
        bench = Bench(backend)
        outcomes = [bench.write(f"k{number}", nbytes=MIB)[0] for number in range(64)]
        assert set(outcomes) <= {OK, FULL}
        assert outcomes.count(OK) >= 32
        assert backend.usage().used_bytes <= backend.usage().capacity_bytes == 16 * MIB
        until(lambda: bench.write("last", nbytes=MIB) == [OK])
        assert bench.read("last", nbytes=MIB) == bench.contents("last", nbytes=MIB)
        backend.ping()


def test_an_object_larger_than_the_pool_is_full_alone() -> None:
    """The master evicts for it all the same, in vain, perhaps what was written just now."""
    with running_pool(segment_bytes=16 * MIB) as pool, MooncakeBackend(pool.spec()) as backend:
        backend.register(memoryview(bytearray(24 * MIB)))
        assert backend.write([Item("large", 0, 20 * MIB), Item("small", 0, 100)]) == [FULL, OK]
        assert backend.contains(["large"]) == [ABSENT]


def test_a_batch_of_4096_objects(backend: StorageBackend) -> None:
    """In one call of the library it hangs for a minute and poisons the client for good."""
    bench = Bench(backend)
    keys = [f"k{number}" for number in range(4096)]
    assert set(bench.write(*keys, nbytes=256)) == {OK}
    assert set(backend.contains(keys)) == {OK}
    assert bench.read(*keys, nbytes=256) == bench.contents(*keys, nbytes=256)


# the embedded pool


EMBEDDED = MooncakeSpec(embedded=True, capacity_bytes=32 * MIB)


def test_an_embedded_pool_needs_nothing_else_and_ends_with_its_backend() -> None:
    """SECURITY-05: its master listens on loopback only."""
    require_mooncake()
    with MooncakeBackend(EMBEDDED) as backend:
        bench = Bench(backend)
        assert bench.write("a", "b", nbytes=MIB) == [OK, OK]
        assert bench.read("b", "a", nbytes=MIB) == bench.contents("b", "a", nbytes=MIB)
        assert backend.usage() == Usage(2, 2 * MIB, 32 * MIB)
        assert backend._master is not None
        pid = backend._master.pid
        assert listening_addresses(pid) == {"0100007F"}
    assert not is_running(pid)


def listening_addresses(pid: int) -> set[str]:
    """In hexadecimal, as the kernel writes them; another family's would not be missed."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}


def test_an_embedded_master_that_dies_is_started_anew(open_mooncake: Open) -> None:
    require_mooncake()
    backend = open_mooncake(EMBEDDED)
    bench = Bench(backend)
    assert backend._master is not None
    assert bench.write("a") == [OK]
    killed = backend._master.pid
    os.kill(killed, signal.SIGKILL)
    until(lambda: stores(bench, "b"))
    assert backend._master.pid not in (0, killed)
    assert bench.read("a") in ([ABSENT], [content_of("a")])


async def test_a_killed_worker_takes_its_embedded_master_along(open_tier: OpenTier, slab: Slab) -> None:
    require_mooncake()
    tier = await open_tier(EMBEDDED)
    first = tier.worker_pid
    assert first is not None
    masters = children_of(first)
    assert len(masters) == 1
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: not is_running(masters[0]))
    await eventually(lambda: tier.worker_pid not in (None, first))
    assert await all_ok(tier, slab, "a", "b")


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split()]
