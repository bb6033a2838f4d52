"""StorageTier over real worker processes: outcomes at the deadline, `settled` only when no byte can move."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import uvloop

from controller.storage import StorageLimits, StorageTier
from controller.storage.process import WorkerProcess
from storage_backends.base import Item, Outcome, StorageError, Usage
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.messages import Open
from storage_backends.specs import FileSpec, MemorySpec
from tests.storage.conftest import (
    DEADLINE_S,
    OBJECT_BYTES,
    QUICK,
    Gate,
    OpenTier,
    Slab,
    all_ok,
    children,
    eventually,
    is_running,
    open_descriptors,
)

OK, ABSENT, WRONG_SIZE, FAILED, FULL = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.WRONG_SIZE,
    Outcome.FAILED,
    Outcome.FULL,
)
SHORT_S = 0.05
HASTY = StorageLimits(probe_interval_s=0.02, hang_s=0.1, restart_min_s=0.01, restart_max_s=0.1)
"""Takes a worker that is a little late for a hung one."""


def freezing(gate: Gate, *operations: str, key_part: str = "") -> FaultySpec:
    """A memory backend whose operations wait while the gate is closed."""
    fault = Fault(kind=FaultKind.FREEZE, on=frozenset(operations), key_part=key_part)
    return FaultySpec(inner=MemorySpec(), faults=(fault,), gate=str(gate.path))


def failing(kind: FaultKind, *operations: str, key_part: str = "", times: int = 0) -> FaultySpec:
    fault = Fault(kind=kind, on=frozenset(operations), key_part=key_part, times=times)
    return FaultySpec(inner=MemorySpec(), faults=(fault,))


def pid_of(tier: StorageTier) -> int:
    assert tier.worker_pid is not None
    return tier.worker_pid


async def settles(settled: asyncio.Future[None]) -> None:
    await asyncio.wait_for(asyncio.shield(settled), DEADLINE_S)


# the plain way


async def test_bytes_move_between_slab_and_storage(open_tier: OpenTier, slab: Slab, tmp_path: Path) -> None:
    for spec in (MemorySpec(), FileSpec(path=str(tmp_path / "store"))):
        tier = await open_tier(spec)
        assert (tier.healthy, tier.problem) == (True, "")
        written = await tier.write(slab.fill("a", "b"), timeout_s=DEADLINE_S)
        assert written.outcomes == [OK, OK]
        assert written.settled.done()
        assert await tier.contains(["a", "x", "b"], timeout_s=DEADLINE_S) == [OK, ABSENT, OK]
        places = slab.places("b", "a")
        read = await tier.read(places, timeout_s=DEADLINE_S)
        assert read.outcomes == [OK, OK]
        assert read.settled.done()
        assert slab.holds(places)
        assert await tier.delete(["a", "x"], timeout_s=DEADLINE_S) == [OK, ABSENT]
        assert (await tier.read(places, timeout_s=DEADLINE_S)).outcomes == [OK, ABSENT]


async def test_the_worker_maps_the_slab_itself(open_tier: OpenTier, slab: Slab) -> None:
    """No byte passes through the daemon: the worker has the very memory mapped, and writable."""
    tier = await open_tier(MemorySpec())
    maps = Path(f"/proc/{pid_of(tier)}/maps").read_text().splitlines()
    ours = [line.split() for line in maps if "memfd:test-slab" in line]
    assert [(fields[1], int(fields[4])) for fields in ours] == [("rw-s", os.fstat(slab.fd).st_ino)]


async def test_many_batches_at_once_are_answered_each_with_its_own(open_tier: OpenTier, slab: Slab) -> None:
    tier = await open_tier(MemorySpec(), StorageLimits(threads=4))
    keys = [[f"{batch}.{number}" for number in range(8)] for batch in range(30)]
    size = 1024
    writes = [
        tier.write(slab.fill(*batch, nbytes=size, base=place * 8 * size), timeout_s=DEADLINE_S)
        for place, batch in enumerate(keys)
    ]
    assert all(transfer.outcomes == [OK] * 8 for transfer in await asyncio.gather(*writes))
    places = [
        slab.places(*batch, nbytes=size, base=(4 << 20) + place * 8 * size)
        for place, batch in enumerate(keys)
    ]
    reads = [tier.read(batch, timeout_s=DEADLINE_S) for batch in places]
    assert all(transfer.outcomes == [OK] * 8 for transfer in await asyncio.gather(*reads))
    assert all(slab.holds(batch) for batch in places)


async def test_empty_batches_are_answered_without_a_worker(slab: Slab) -> None:
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes)
    assert await tier.contains([], timeout_s=1) == []
    transfer = await tier.read([], timeout_s=1)
    assert (transfer.outcomes, transfer.settled.done()) == ([], True)


async def test_usage_and_health_become_known(open_tier: OpenTier, slab: Slab) -> None:
    tier = await open_tier(MemorySpec(capacity_bytes=1 << 20))
    await tier.write(slab.fill("a", "b"), timeout_s=DEADLINE_S)
    await eventually(lambda: tier.usage() == Usage(2, 2 * OBJECT_BYTES, 1 << 20))
    assert (tier.kind, tier.name) == ("memory", "test")


async def test_counters_say_what_happened_and_begin_at_zero(open_tier: OpenTier, slab: Slab) -> None:
    """OBS-03: every name is there before its first event."""
    tier = await open_tier(failing(FaultKind.FULL, "write", key_part="big"))
    before = tier.counters()
    assert {name for name, value in before.items() if value} == {"worker_starts"}
    await tier.write(slab.fill("a", "b", "big"), timeout_s=DEADLINE_S)
    await tier.read(slab.places("a", "x"), timeout_s=DEADLINE_S)
    after = tier.counters()
    assert {name: after[name] for name in after if after[name]} == {
        "worker_starts": 1,
        "write_ok": 2,
        "write_full": 1,
        "write_bytes": 2 * OBJECT_BYTES,
        "read_ok": 1,
        "read_absent": 1,
        "read_bytes": OBJECT_BYTES,
    }


# trouble with items


async def test_one_page_of_five_that_is_missing_short_or_failed_leaves_the_others(
    open_tier: OpenTier, slab: Slab
) -> None:
    """L3-01, L3-02, L3-11: none, short, and 'could not tell' are three answers, for that page alone."""
    keys = ["p0", "p1", "p2", "p3", "p4"]
    for kind, expected in (
        (FaultKind.ABSENT, ABSENT),
        (FaultKind.HALVE, WRONG_SIZE),
        (FaultKind.FAIL, FAILED),
    ):
        tier = await open_tier(failing(kind, "read", key_part="p2"))
        await tier.write(slab.fill(*keys), timeout_s=DEADLINE_S)
        places = slab.places(*keys)
        read = await tier.read(places, timeout_s=DEADLINE_S)
        assert read.outcomes == [OK, OK, expected, OK, OK]
        assert slab.holds(places[:2] + places[3:])


async def test_two_tiers_write_the_same_key_and_both_succeed(
    open_tier: OpenTier, slab: Slab, tmp_path: Path
) -> None:
    """L3-03, L3-10: two instances over one directory, at the same time, the same and different keys."""
    spec = FileSpec(path=str(tmp_path))
    first, second = await open_tier(spec), await open_tier(spec)
    items = slab.fill("shared", "one", "two")
    for _ in range(10):
        written = await asyncio.gather(
            first.write([items[0], items[1]], timeout_s=DEADLINE_S),
            second.write([items[0], items[2]], timeout_s=DEADLINE_S),
        )
        assert [transfer.outcomes for transfer in written] == [[OK, OK], [OK, OK]]
        assert await first.delete(["shared"], timeout_s=DEADLINE_S) == [OK]
    await first.write(items[:1], timeout_s=DEADLINE_S)
    assert await first.stop()
    places = slab.places("shared", "one", "two")
    assert (await second.read(places, timeout_s=DEADLINE_S)).outcomes == [OK, OK, OK]
    assert slab.holds(places)
    assert second.counters()["write_failed"] == 0


async def test_a_half_stored_object_is_never_accepted_and_the_next_write_mends_it(
    open_tier: OpenTier, slab: Slab, tmp_path: Path
) -> None:
    """L3-07: the writer fails half way; a second instance asks for the page."""
    half = Fault(kind=FaultKind.HALVE, on=frozenset({"write"}), key_part="p2", times=1)
    writer = await open_tier(FaultySpec(inner=FileSpec(path=str(tmp_path)), faults=(half,)))
    reader = await open_tier(FileSpec(path=str(tmp_path)))
    keys = ["p0", "p1", "p2", "p3"]
    items, places = slab.fill(*keys), slab.places(*keys)
    assert (await writer.write(items, timeout_s=DEADLINE_S)).outcomes == [OK, OK, FAILED, OK]
    assert (await reader.read(places, timeout_s=DEADLINE_S)).outcomes == [OK, OK, WRONG_SIZE, OK]
    assert (await writer.write(items, timeout_s=DEADLINE_S)).outcomes == [OK] * 4
    assert (await reader.read(places, timeout_s=DEADLINE_S)).outcomes == [OK] * 4
    assert slab.holds(places)


async def test_a_backends_mistake_fails_the_batch_shows_in_health_and_passes(
    open_tier: OpenTier, slab: Slab
) -> None:
    tier = await open_tier(failing(FaultKind.BREAK, "read", times=1), StorageLimits(probe_interval_s=60))
    await eventually(lambda: tier.usage().capacity_bytes)  # the first probe is answered
    pid = tier.worker_pid
    read = await tier.read(slab.places("a", "b"), timeout_s=DEADLINE_S)
    assert (read.outcomes, read.settled.done()) == ([FAILED, FAILED], True)
    assert "injected: read broken" in tier.problem
    assert tier.counters()["batch_errors"] == 1
    assert await all_ok(tier, slab, "a", "b")
    assert (tier.problem, tier.worker_pid) == ("", pid)


async def test_a_backend_that_is_not_well_shows_in_health_until_it_is(open_tier: OpenTier) -> None:
    """Health is honest also when nobody asks for anything."""
    refuse = Fault(kind=FaultKind.REFUSE, on=frozenset({"ping"}), times=3)
    tier = await open_tier(FaultySpec(inner=MemorySpec(), faults=(refuse,)))
    await eventually(lambda: tier.problem == "injected: ping refused")
    assert not tier.healthy
    await eventually(lambda: tier.healthy)


async def test_a_batch_too_long_for_a_message_is_a_mistake_of_the_caller(
    open_tier: OpenTier, slab: Slab
) -> None:
    tier = await open_tier(MemorySpec(), StorageLimits(in_flight_bytes=1))
    with pytest.raises(ValueError, match="split the batch"):
        await tier.read([Item("k" * (65 << 20), 0, 1)], timeout_s=DEADLINE_S)
    assert await all_ok(tier, slab, "a")


# deadlines


async def test_a_frozen_read_fails_at_its_deadline_and_settles_when_the_answer_comes(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    tier = await open_tier(freezing(gate, "read", key_part="a"))
    await tier.write(slab.fill("a", "b"), timeout_s=DEADLINE_S)
    gate.close()
    places = slab.places("a")
    late = await tier.read(places, timeout_s=SHORT_S)
    assert (late.outcomes, late.settled.done()) == ([FAILED], False)
    await eventually(lambda: "past their deadline" in tier.problem)
    assert (await tier.read(slab.places("b"), timeout_s=DEADLINE_S)).outcomes == [OK]
    assert not late.settled.done()
    assert not slab.holds(places)
    gate.open()
    await settles(late.settled)
    assert slab.holds(places)  # the byte did land: the range had to be kept until now
    assert (tier.healthy, tier.counters()["late"]) == (True, 1)


async def test_a_late_answer_touches_nothing_but_its_own_transfer(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    """L3-14: write 1 of a page times out, write 2 succeeds, then write 1 completes: write 2 counts."""
    once = Fault(kind=FaultKind.FREEZE, on=frozenset({"write"}), times=1)
    tier = await open_tier(FaultySpec(inner=MemorySpec(), faults=(once,), gate=str(gate.path)))
    gate.close()
    first = await tier.write(slab.fill("a"), timeout_s=SHORT_S)
    assert (first.outcomes, first.settled.done()) == ([FAILED], False)
    second = await tier.write(slab.fill("a", base=OBJECT_BYTES), timeout_s=DEADLINE_S)
    assert second.outcomes == [OK]
    gate.open()
    await settles(first.settled)
    places = slab.places("a")
    assert (await tier.read(places, timeout_s=DEADLINE_S)).outcomes == [OK]
    assert slab.holds(places)
    assert (first.outcomes, second.outcomes) == ([FAILED], [OK])


async def test_what_waited_past_its_deadline_in_the_worker_is_dropped_there(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    """A backlog does not grow out of requests that nobody waits for any more."""
    tier = await open_tier(freezing(gate, "write", key_part="a"), StorageLimits(threads=1))
    gate.close()
    first = asyncio.create_task(tier.write(slab.fill("a"), timeout_s=DEADLINE_S))
    await eventually(gate.n_held)
    second = await tier.write(slab.fill("b", base=OBJECT_BYTES), timeout_s=SHORT_S)
    assert (second.outcomes, second.settled.done()) == ([FAILED], False)
    gate.open()
    assert (await first).outcomes == [OK]
    await settles(second.settled)
    assert await tier.contains(["a", "b"], timeout_s=DEADLINE_S) == [OK, ABSENT]


async def test_every_call_returns_at_its_deadline_from_a_stopped_worker(
    open_tier: OpenTier, slab: Slab
) -> None:
    """Whatever the process does not do: SIGSTOP."""
    tier = await open_tier(MemorySpec())
    os.kill(pid_of(tier), signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):
        assert await tier.contains(["a"], timeout_s=SHORT_S) == [FAILED]
        assert await tier.delete(["a"], timeout_s=SHORT_S) == [FAILED]
        read = await tier.read(slab.places("a"), timeout_s=SHORT_S)
        write = await tier.write(slab.fill("a"), timeout_s=SHORT_S)
    assert (read.outcomes, read.settled.done()) == ([FAILED], False)
    assert (write.outcomes, write.settled.done()) == ([FAILED], False)
    await eventually(lambda: not tier.healthy)
    os.kill(pid_of(tier), signal.SIGCONT)
    await settles(read.settled)
    await settles(write.settled)
    assert tier.healthy
    assert await all_ok(tier, slab, "a")
    assert tier.counters()["worker_starts"] == 1


async def test_a_settled_future_that_a_caller_cancels_disturbs_nothing(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    tier = await open_tier(freezing(gate, "read"))
    gate.close()
    late = await tier.read(slab.places("a"), timeout_s=SHORT_S)
    late.settled.cancel()
    gate.open()
    await eventually(lambda: tier.healthy)
    assert await all_ok(tier, slab, "a")


# bytes in flight


async def test_bytes_in_flight_are_bounded_and_the_rest_waits(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    limits = StorageLimits(threads=8, in_flight_bytes=2 * OBJECT_BYTES)
    tier = await open_tier(freezing(gate, "read"), limits)
    await tier.write(slab.fill(*"abcdef"), timeout_s=DEADLINE_S)
    gate.close()
    places = slab.places(*"abcdef")
    reads = [asyncio.create_task(tier.read([item], timeout_s=DEADLINE_S)) for item in places]
    await eventually(lambda: gate.n_held() == 2)
    # Eight threads are idle but two, and asking goes by: no more has been sent.
    assert await tier.contains(["a"], timeout_s=DEADLINE_S) == [OK]
    assert gate.n_held() == 2
    gate.open()
    assert [(await read).outcomes for read in reads] == [[OK]] * 6
    assert slab.holds(places)


async def test_who_gets_no_room_by_its_deadline_is_refused_and_settled(
    open_tier: OpenTier, slab: Slab, gate: Gate
) -> None:
    tier = await open_tier(freezing(gate, "write"), StorageLimits(in_flight_bytes=OBJECT_BYTES))
    gate.close()
    first = await tier.write(slab.fill("a"), timeout_s=SHORT_S)
    second = await tier.write(slab.fill("b"), timeout_s=SHORT_S)
    assert (first.outcomes, first.settled.done()) == ([FAILED], False)
    assert (second.outcomes, second.settled.done()) == ([FAILED], True)
    assert (tier.counters()["late"], tier.counters()["refused"]) == (1, 1)
    gate.open()
    await settles(first.settled)
    assert await all_ok(tier, slab, "b")


async def test_writes_that_are_stuck_hold_up_no_reads(open_tier: OpenTier, slab: Slab, gate: Gate) -> None:
    tier = await open_tier(
        freezing(gate, "write"), StorageLimits(threads=1, in_flight_bytes=2 * OBJECT_BYTES)
    )
    await tier.write(slab.fill("a"), timeout_s=DEADLINE_S)
    gate.close()
    writes = [
        asyncio.create_task(tier.write(slab.fill(key, base=place << 14), timeout_s=DEADLINE_S))
        for place, key in enumerate("bcdef")
    ]
    await eventually(gate.n_held)
    places = slab.places("a")
    assert (await tier.read(places, timeout_s=DEADLINE_S)).outcomes == [OK]
    assert slab.holds(places)
    gate.open()
    assert [(await write).outcomes for write in writes] == [[OK]] * 5


# death and restart


async def test_a_worker_killed_in_mid_read_fails_it_settled_and_the_next_goes_on(
    open_tier: OpenTier, slab: Slab, gate: Gate, tmp_path: Path
) -> None:
    """L3-05: and what was stored before is found by the new worker."""
    frozen = Fault(kind=FaultKind.FREEZE, on=frozenset({"read"}))
    spec = FaultySpec(inner=FileSpec(path=str(tmp_path / "s")), faults=(frozen,), gate=str(gate.path))
    tier = await open_tier(spec)
    await tier.write(slab.fill("a", "b"), timeout_s=DEADLINE_S)
    gate.close()
    places = slab.places("a", "b")
    reading = asyncio.create_task(tier.read(places, timeout_s=DEADLINE_S))
    await eventually(gate.n_held)
    killed = pid_of(tier)
    os.kill(killed, signal.SIGKILL)
    read = await reading
    assert (read.outcomes, read.settled.done()) == ([FAILED, FAILED], True)
    assert not is_running(killed)
    await eventually(lambda: "killed by signal 9" in tier.problem or tier.counters()["worker_starts"] == 2)
    gate.open()
    await eventually(lambda: tier.healthy)
    assert tier.worker_pid != killed
    assert (await tier.read(places, timeout_s=DEADLINE_S)).outcomes == [OK, OK]
    assert slab.holds(places)
    assert (tier.counters()["worker_starts"], tier.counters()["worker_deaths"]) == (2, 1)


async def test_a_worker_killed_among_writes_loses_nothing_acknowledged_and_shows_nothing_half(
    open_tier: OpenTier, slab: Slab, tmp_path: Path
) -> None:
    """L3-07, L3-08: kill -9 at whatever moment, again and again."""
    tier = await open_tier(FileSpec(path=str(tmp_path)))
    size = 1 << 20
    acknowledged: list[str] = []
    for turn in range(4):
        keys = [f"{turn}.{number}" for number in range(4)]
        pid = pid_of(tier)
        first = await tier.write(slab.fill(*keys[:1], nbytes=size), timeout_s=DEADLINE_S)
        assert first.outcomes == [OK]
        writing = asyncio.create_task(tier.write(slab.fill(*keys[1:], nbytes=size), timeout_s=DEADLINE_S))
        await eventually(lambda: any((tmp_path / "writing").glob("*.[0-9]*")) or writing.done())  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        written = await writing
        acknowledged += keys[:1]
        acknowledged += [
            key for key, outcome in zip(keys[1:], written.outcomes, strict=True) if outcome is OK
        ]
        await eventually(lambda: tier.worker_pid not in (pid, None))  # noqa: B023
        for key in keys:
            places = slab.places(key, nbytes=size)
            (outcome,) = (await tier.read(places, timeout_s=DEADLINE_S)).outcomes
            assert outcome is OK if key in acknowledged else outcome in (OK, ABSENT)
            assert outcome is ABSENT or slab.holds(places)
    names = os.listdir(tmp_path / "writing")
    assert len({name.partition(".")[0] for name in names}) == 1, "only the living writer's"
    assert await tier.contains(acknowledged, timeout_s=DEADLINE_S) == [OK] * len(acknowledged)


async def test_a_hung_worker_is_killed_then_its_transfers_settle_and_a_new_one_serves(
    open_tier: OpenTier, slab: Slab
) -> None:
    tier = await open_tier(MemorySpec(), HASTY)
    hung = pid_of(tier)
    os.kill(hung, signal.SIGSTOP)
    late = await tier.read(slab.places("a"), timeout_s=SHORT_S)
    assert late.outcomes == [FAILED]
    await settles(late.settled)
    assert not is_running(hung)
    await eventually(lambda: tier.healthy)
    assert tier.counters()["hang_kills"] == 1
    assert await all_ok(tier, slab, "a")


async def test_an_idle_worker_that_hangs_is_found_by_its_probe(open_tier: OpenTier) -> None:
    limits = StorageLimits(probe_interval_s=0.02, probe_timeout_s=0.05, hang_s=0.05, restart_min_s=0.01)
    tier = await open_tier(MemorySpec(), limits)
    hung = pid_of(tier)
    os.kill(hung, signal.SIGSTOP)
    await eventually(lambda: tier.worker_pid not in (hung, None))
    assert tier.counters()["hang_kills"] == 1


async def test_a_backend_that_crashes_its_process_costs_only_its_own_batches(
    open_tier: OpenTier, slab: Slab
) -> None:
    tier = await open_tier(failing(FaultKind.DIE, "read", key_part="poison"))
    for n_deaths in range(1, 4):
        read = await tier.read(slab.places("poison"), timeout_s=DEADLINE_S)
        assert (read.outcomes, read.settled.done()) == ([FAILED], True)
        await eventually(lambda: tier.healthy)
        assert await all_ok(tier, slab, f"good{n_deaths}")
        assert tier.counters()["worker_deaths"] == n_deaths


async def test_without_a_worker_everything_fails_at_once_and_settled(slab: Slab) -> None:
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes)
    assert (tier.healthy, tier.problem) == (False, "not started")
    assert await tier.contains(["a", "b"], timeout_s=DEADLINE_S) == [FAILED, FAILED]
    read = await tier.read(slab.places("a"), timeout_s=DEADLINE_S)
    assert (read.outcomes, read.settled.done()) == ([FAILED], True)
    assert tier.counters()["refused"] == 3


# opening


async def test_strict_start_raises_what_is_wrong_and_leaves_nothing(slab: Slab, tmp_path: Path) -> None:
    """The daemon can refuse to start, with the remedy in the message."""
    (tmp_path / "file").write_text("")
    before = open_descriptors()
    tier = StorageTier("test", FileSpec(path=str(tmp_path / "file")), slab.fd, slab.nbytes)
    with pytest.raises(StorageError, match=f"{tmp_path}/file.*choose another `path`"):
        await tier.start(strict=True)
    assert children() == []
    assert open_descriptors() <= before


async def test_a_backend_that_cannot_be_opened_now_is_tried_again_until_it_can(
    open_tier: OpenTier, slab: Slab, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("")
    tier = await open_tier(FileSpec(path=str(tmp_path / "store")), strict=False)
    assert f"{tmp_path}/store" in tier.problem
    assert (await tier.write(slab.fill("a"), timeout_s=DEADLINE_S)).outcomes == [FAILED]
    await eventually(lambda: tier.counters()["worker_starts"] >= 3)
    (tmp_path / "store").unlink()
    await eventually(lambda: tier.healthy)
    assert await all_ok(tier, slab, "a")


@pytest.mark.parametrize("kind", [FaultKind.DIE, FaultKind.BREAK])
async def test_a_worker_that_dies_while_opening_is_a_problem(open_tier: OpenTier, kind: FaultKind) -> None:
    with pytest.raises(StorageError, match=r"exited with status \d+ before the backend was open"):
        await open_tier(failing(kind, "open"))


async def test_a_backend_that_does_not_open_in_time_is_a_problem(open_tier: OpenTier, gate: Gate) -> None:
    gate.close()
    limits = StorageLimits(open_timeout_s=1.5, restart_min_s=0.01, restart_max_s=0.1)
    tier = await open_tier(freezing(gate, "open"), limits, strict=False)
    assert tier.problem == "opening the backend takes too long"
    gate.open()
    await eventually(lambda: tier.healthy)


async def test_a_slab_that_is_too_small_is_a_problem(slab: Slab) -> None:
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes + 1)
    with pytest.raises(StorageError, match="host slab"):
        await tier.start(strict=True)


async def test_a_worker_that_cannot_be_spawned_is_a_problem(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr("sys.executable", "/no/such/python")
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes, limits=QUICK)
    await tier.start()
    assert "no storage worker can be started" in tier.problem
    assert tier.worker_pid is None
    monkeypatch.undo()
    await eventually(lambda: tier.healthy)
    assert await tier.stop()
    assert open_descriptors() <= before


async def test_a_mistake_of_the_supervision_itself_shows_in_health(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mistaken(first: Open, slab_fd: int) -> WorkerProcess:
        raise RuntimeError("mistake")

    monkeypatch.setattr(WorkerProcess, "spawn", mistaken)
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes)
    async with asyncio.timeout(DEADLINE_S):
        await tier.start()
    assert "supervision of storage failed" in tier.problem
    assert await tier.stop()


# stopping


async def test_stopping_lets_what_runs_finish(open_tier: OpenTier, slab: Slab, tmp_path: Path) -> None:
    """L3-06: in-flight work ends within the grace time, and is stored."""
    slow = Fault(kind=FaultKind.DELAY, on=frozenset({"write"}), delay_s=0.2)
    tier = await open_tier(FaultySpec(inner=FileSpec(path=str(tmp_path)), faults=(slow,)))
    writing = asyncio.create_task(tier.write(slab.fill("a"), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    assert await tier.stop()
    assert (await writing).outcomes == [OK]
    again = await open_tier(FileSpec(path=str(tmp_path)))
    assert await again.contains(["a"], timeout_s=DEADLINE_S) == [OK]


@pytest.mark.parametrize("how", ["frozen backend", "stopped process"])
async def test_stopping_is_bounded_and_settles_everything(
    open_tier: OpenTier, slab: Slab, gate: Gate, how: str
) -> None:
    """ATTACH-01: all calls hang, five reads and five writes are in flight; nothing of them is left."""
    limits = StorageLimits(stop_timeout_s=0.4)
    tier = await open_tier(freezing(gate, "read", "write"), limits)
    gate.close()
    calls = [asyncio.create_task(tier.read(slab.places(f"r{n}"), timeout_s=DEADLINE_S)) for n in range(5)]
    calls += [asyncio.create_task(tier.write(slab.fill(f"w{n}"), timeout_s=DEADLINE_S)) for n in range(5)]
    await eventually(gate.n_held)
    pid = pid_of(tier)
    if how == "stopped process":
        os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):
        assert await tier.stop()
    assert not is_running(pid)
    for call in calls:
        transfer = await call
        assert (transfer.outcomes, transfer.settled.done()) == ([FAILED], True)
    assert tier.problem == "stopped"


async def test_stopping_while_the_backend_opens_leaves_nothing(slab: Slab, gate: Gate) -> None:
    gate.close()
    limits = StorageLimits(stop_timeout_s=0.4)
    tier = StorageTier("test", freezing(gate, "open"), slab.fd, slab.nbytes, limits=limits)
    starting = asyncio.create_task(tier.start())
    await eventually(gate.n_held)
    assert await tier.stop()
    await asyncio.wait_for(starting, DEADLINE_S)
    assert children() == []


async def test_a_stopped_tier_refuses_and_can_be_stopped_and_started_again(
    open_tier: OpenTier, slab: Slab
) -> None:
    tier = await open_tier(MemorySpec())
    assert await tier.stop()
    assert await tier.stop()
    assert await tier.contains(["a"], timeout_s=DEADLINE_S) == [FAILED]
    await tier.start(strict=True)
    assert await all_ok(tier, slab, "a")


async def test_many_lives_leak_no_descriptor_and_no_process(slab: Slab) -> None:
    """ATTACH-05: attach and detach again and again, some with a violent end."""
    before = open_descriptors()
    tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes, limits=QUICK)
    for turn in range(6):
        await tier.start(strict=True)
        if turn % 2:
            pid = pid_of(tier)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: tier.worker_pid not in (pid, None))  # type: ignore[misc]  # default
        assert await all_ok(tier, slab, f"k{turn}")
        assert await tier.stop()
        assert children() == []
        assert open_descriptors() <= before


# other loops


def test_it_works_on_uvloop_and_in_a_thread_of_its_own(slab: Slab) -> None:
    """No signal handler and no child watcher is needed."""

    async def work() -> None:
        tier = StorageTier("test", MemorySpec(), slab.fd, slab.nbytes, limits=QUICK)
        await tier.start(strict=True)
        assert await all_ok(tier, slab, "a")
        pid = pid_of(tier)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: tier.worker_pid not in (pid, None))
        assert await all_ok(tier, slab, "b")
        assert await tier.stop()
        assert children() == []

    uvloop.run(work())
    time.sleep(0)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work()).result(DEADLINE_S)
