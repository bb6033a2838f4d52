"""The client against a scripted daemon: answers, misses, deadlines, reconnection, and when slots are free."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from fake_daemon import ANSWERS, FakeDaemon, FakeProcess

from hicache.client import Client, Lease, Outcome, Placement, PrefetchPolicy, PrefetchState, Prompt
from hicache.core.layout import LayoutError
from proto.v1 import hicache_pb2 as pb

PROMPT = Prompt("r1", np.arange(12, dtype=np.int32), adapter="a", salt="s")
PAGES = {"full": Placement(np.arange(2, dtype=np.int32), np.array([5, 3], np.int32))}
LEASE = Lease("l", 1)
SOON_S = 20.0

Connect = Callable[..., Client]
Spawn = Callable[[str], FakeProcess]


def lookup(client: Client, timeout_s: float = SOON_S) -> int | None:
    device = {"full": np.array([True, False, True])}
    found = client.lookup(PROMPT, device=device, limit_pages=2, timeout_s=timeout_s)
    return None if found is None else found.boundary


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for what another process or thread is about to do."""
    deadline = time.monotonic() + SOON_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.005)
    return True


# ---- answers


def test_an_engine_registers_what_it_is_and_hands_over_its_memory(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect(engine_id="e1", model="weights", revision="7")
    assert client.wait_attached(SOON_S)
    (registration,) = daemon.registrations
    assert (registration.engine_id, registration.model, registration.revision) == ("e1", "weights", "7")
    (region,) = registration.regions
    assert os.fstat(daemon.fds[region.ticket]).st_size == region.nbytes == 512
    assert registration.layout.pools[0].planes[0].stride == 64
    assert client.ready
    assert client.problem == ""


def test_a_lookup_says_what_it_asks_and_gives_what_was_answered(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.answers["lookup_prefix"] = lambda m: pb.DaemonMessage(
        lookup_prefix=pb.LookupPrefixReply(
            lease_id="l",
            boundary=3,
            load=[pb.ComponentPages(component="full", pages=np.array([1, 2], "<i4").tobytes())],
            storage_boundary=5,
            branching_boundary=4,
        )
    )
    client = connect()
    assert client.wait_attached(SOON_S)
    device = {"full": np.array([True, False, True]), "swa": np.zeros(0, bool)}
    found = client.lookup(PROMPT, device=device, limit_pages=2, timeout_s=SOON_S)
    assert found is not None
    assert found.lease == LEASE
    assert (found.boundary, found.storage_boundary, found.branching_boundary) == (3, 5, 4)
    assert found.load["full"].tolist() == [1, 2]
    asked = daemon.seen("lookup_prefix").lookup_prefix
    assert (asked.prompt.request_id, asked.prompt.adapter, asked.prompt.salt) == ("r1", "a", "s")
    assert np.frombuffer(asked.prompt.tokens, "<i4").tolist() == list(range(12))
    assert [(d.component, d.resident) for d in asked.device] == [("full", b"\x05")]
    assert asked.limit_pages == 2


def test_transfers_end_with_what_the_daemon_says(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    backup = client.start_backup(PROMPT, PAGES)
    assert backup.wait(SOON_S) is Outcome.OK
    assert backup.settled()
    assert backup.backup_outcomes["full"].stored_pages == 2
    (slots,) = daemon.seen("backup").backup.components
    assert np.frombuffer(slots.slots, "<i4").tolist() == [5, 3]
    daemon.answers["load"] = lambda m: pb.DaemonMessage(error=pb.Error(code=9, message="the lease is gone"))
    load = client.start_load(LEASE, PAGES)
    assert load.wait(SOON_S) is Outcome.FAILED
    assert load.settled()
    assert load.reason == "the lease is gone"
    assert daemon.seen("load").load.lease_id == "l"


def test_answers_may_come_in_any_order(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.hold("load")
    load = client.start_load(LEASE, PAGES)
    assert lookup(client) == 3
    assert load.outcome is Outcome.PENDING
    assert not load.settled()
    daemon.let_go("load")
    assert load.wait(SOON_S) is Outcome.OK


def test_a_prefetch_knows_the_boundary_before_it_and_reports_the_one_after(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    prefetching = client.prefetch(
        PROMPT, device={}, limit_pages=3, policy=PrefetchPolicy.TIMEOUT, timeout_s=2
    )
    assert prefetching is not None
    progress = prefetching.wait(SOON_S)
    assert progress is not None
    assert (progress.state, progress.boundary) == (PrefetchState.DONE, 7)
    assert prefetching.boundary_before == 3
    ahead = daemon.seen("lookup_prefix").lookup_prefix
    assert ahead.prompt.request_id != "r1", "an answer kept for the request must not be this one"
    asked = daemon.seen("prefetch").prefetch
    assert (asked.policy, asked.timeout_s, asked.limit_pages) == (pb.TIMEOUT, 2, 3)
    assert daemon.seen("release_lease").release_lease.lease_id.startswith("lease-")


def test_a_prefetch_that_is_not_waited_for_any_longer_is_cancelled(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.hold("wait_prefetch")
    prefetching = client.prefetch(PROMPT, device={}, limit_pages=3, policy=PrefetchPolicy.WAIT_COMPLETE)
    assert prefetching is not None
    assert prefetching.wait(0.05) is None
    assert daemon.seen("cancel_prefetch").cancel_prefetch.prefetch_id.startswith("prefetch-")


# ---- misses, never more


def test_without_a_daemon_everything_is_a_miss_at_once(connect: Connect) -> None:
    client = connect()
    assert not client.ready
    assert lookup(client, timeout_s=1000) is None
    assert client.prefetch(PROMPT, device={}, limit_pages=3, policy=PrefetchPolicy.TIMEOUT) is None
    for ticket in (client.start_load(LEASE, PAGES), client.start_backup(PROMPT, PAGES)):
        assert ticket.wait(1000) is Outcome.FAILED
        assert ticket.settled(), "nothing was sent: the slots are free"
        assert ticket.reason == "the daemon is away"
    client.release(LEASE)
    assert client.problem


def test_a_late_answer_is_a_miss_and_its_lease_is_released(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.hold("lookup_prefix")
    assert lookup(client, timeout_s=0.02) is None
    late = daemon.seen("lookup_prefix")
    daemon.let_go("lookup_prefix")
    assert daemon.seen("release_lease").release_lease.lease_id == f"lease-{late.id}"


def test_a_frozen_daemon_costs_one_deadline_not_one_per_lookup(spawn: Spawn, connect: Connect) -> None:
    process = spawn("boot-1")
    client = connect()
    assert client.wait_attached(SOON_S)
    assert lookup(client) == 3
    process.freeze()
    assert lookup(client, timeout_s=0.05) is None
    assert client.problem == "the daemon does not answer in time"
    assert lookup(client, timeout_s=1000) is None, "asked although the daemon had let a deadline pass"
    process.thaw()
    assert eventually(lambda: client.ready)
    assert lookup(client) == 3


def test_errors_of_the_daemon_read_as_misses(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    for kind in ("lookup_prefix", "prefetch", "wait_prefetch"):
        daemon.answers = dict(ANSWERS)
        daemon.answers[kind] = lambda m: pb.DaemonMessage(error=pb.Error(code=13, message="broken"))
        prefetching = client.prefetch(PROMPT, device={}, limit_pages=3, policy=PrefetchPolicy.TIMEOUT)
        assert prefetching is not None
        if kind == "lookup_prefix":
            assert lookup(client) is None
            assert prefetching.wait(SOON_S) is not None
            assert prefetching.boundary_before is None
        else:
            assert prefetching.wait(SOON_S) is None


def test_a_refused_engine_is_shown_and_logged_once(
    daemon: FakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.client.client._REFUSED_PAUSE_S", 0.01)
    daemon.refuse = (grpc.StatusCode.INVALID_ARGUMENT, "layout.pools: frames of 9 GiB; lower page_size")
    with caplog.at_level(logging.WARNING, "hicache"):
        client = connect()
        assert eventually(lambda: len(daemon.fds) > 5), "it does not try again"
        assert "lower page_size" in client.problem
        assert lookup(client) is None
        assert caplog.text.count("lower page_size") == 1
        daemon.refuse = None
        assert client.wait_attached(SOON_S)


def test_programming_errors_raise_at_once(connect: Connect) -> None:
    with pytest.raises(ValueError, match="unix socket"):
        Client("localhost:50051", engine_id="e", model="m", layout=None, regions=[])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="regions were given"):
        connect(regions=[])


def test_close_ends_calls_in_flight_and_the_thread(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.hold("load")
    ticket = client.start_load(LEASE, PAGES)
    daemon.seen("load")
    client.close()
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert not ticket.settled(), "the daemon may still be writing"
    assert not client._thread.is_alive()
    assert lookup(client) is None


# ---- when slots are free again


def test_a_lost_connection_fails_a_load_but_does_not_settle_it(daemon: FakeDaemon, connect: Connect) -> None:
    """The process lives and may be in the middle of a copy. Only the same process's next acceptance of
    this engine, before which it drains the old attachment, says that it is not."""
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.hold("load")
    ticket = client.start_load(LEASE, PAGES)
    daemon.seen("load")
    daemon.refuse = (grpc.StatusCode.UNAVAILABLE, "draining the old attachment")
    daemon.end_streams()
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert ticket.reason == "the connection was lost"
    attempts = len(daemon.fds)
    assert eventually(lambda: len(daemon.fds) > attempts)
    assert not ticket.settled()
    daemon.refuse = None
    assert client.wait_attached(SOON_S)
    assert ticket.settled()
    assert client.epoch == 1, "the same daemon: its host memory is as it was"


def test_a_frozen_daemon_settles_nothing_until_it_answers(spawn: Spawn, connect: Connect) -> None:
    process = spawn("boot-1")
    client = connect()
    assert client.wait_attached(SOON_S)
    process.tell("hold load")
    ticket = client.start_load(LEASE, PAGES)
    process.expect("got load")
    process.freeze()
    assert ticket.wait(0.05) is Outcome.PENDING
    assert not ticket.settled()
    process.thaw()
    process.tell("let_go load")
    assert ticket.wait(SOON_S) is Outcome.OK
    assert ticket.settled()


def test_a_frozen_daemon_that_lost_its_connection_settles_nothing_until_it_is_dead(
    spawn: Spawn, connect: Connect
) -> None:
    process = spawn("boot-1")
    client = connect(silence_s=0.3)
    assert client.wait_attached(SOON_S)
    process.tell("hold backup")
    ticket = client.start_backup(PROMPT, PAGES)
    process.expect("got backup")
    process.freeze()
    assert ticket.wait(SOON_S) is Outcome.FAILED, "its silence did not end the connection"
    assert not ticket.settled()
    process.kill()
    assert ticket.settled()


def test_a_frozen_daemon_that_lost_its_connection_settles_by_accepting_the_engine_again(
    spawn: Spawn, connect: Connect
) -> None:
    process = spawn("boot-1")
    client = connect(silence_s=0.3)
    assert client.wait_attached(SOON_S)
    process.tell("hold load")
    ticket = client.start_load(LEASE, PAGES)
    process.expect("got load")
    process.freeze()
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert not ticket.settled()
    process.thaw()
    assert eventually(ticket.settled)
    assert client.epoch == 1


def test_after_a_restart_the_engine_is_attached_again_without_doing_anything(
    spawn: Spawn, connect: Connect
) -> None:
    """LIFE-02: the epoch changes, what was in flight with the dead process is settled, misses until then."""
    process = spawn("boot-1")
    client = connect()
    assert client.wait_attached(SOON_S)
    process.tell("hold load")
    ticket = client.start_load(LEASE, PAGES)
    process.expect("got load")
    process.kill()
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert ticket.settled()
    assert eventually(lambda: not client.ready)
    assert lookup(client, timeout_s=1000) is None
    again = spawn("boot-2")
    again.expect("attached engine-0")
    assert client.wait_attached(SOON_S)
    assert client.epoch == 2
    assert lookup(client) == 3


def test_a_lease_of_an_earlier_attachment_is_never_named_to_a_later_one(
    daemon: FakeDaemon, connect: Connect
) -> None:
    """The number may mean somebody else's pages by then."""
    client = connect()
    assert client.wait_attached(SOON_S)
    daemon.end_streams()
    assert eventually(lambda: len(daemon.registrations) == 2 and client.ready)
    ticket = client.start_load(LEASE, PAGES)
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert ticket.settled()
    client.release(LEASE)
    assert lookup(client) == 3
    kinds = set()
    while not daemon.log.empty():
        kinds.add(daemon.log.get().WhichOneof("body"))
    assert kinds.isdisjoint({"load", "release_lease"})


def test_another_daemon_on_the_socket_does_not_settle_what_the_first_has_in_hand(
    spawn: Spawn, connect: Connect
) -> None:
    """The first is frozen, not dead: when it wakes it may write. Only its death frees the slots."""
    first = spawn("boot-1")
    client = connect(silence_s=1.0)
    assert client.wait_attached(SOON_S)
    first.tell("hold load")
    ticket = client.start_load(LEASE, PAGES)
    first.expect("got load")
    first.freeze()
    spawn("boot-2").expect("attached engine-0")
    assert eventually(lambda: client.epoch == 2 and lookup(client) == 3)
    assert ticket.outcome is Outcome.FAILED
    assert not ticket.settled()
    first.kill()
    assert ticket.settled()


def test_a_daemon_whose_process_cannot_be_seen_is_never_taken_for_dead(
    daemon: FakeDaemon, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another pid namespace: the kernel names no pid. The engine is told what that costs."""
    monkeypatch.setattr("hicache.client.handover.peer_pid", lambda connection: 0)
    with caplog.at_level(logging.WARNING, "hicache"):
        client = connect()
        assert client.wait_attached(SOON_S)
    assert "another pid namespace" in caplog.text
    daemon.hold("load")
    ticket = client.start_load(LEASE, PAGES)
    daemon.seen("load")
    client.close()
    assert ticket.wait(SOON_S) is Outcome.FAILED
    assert not ticket.settled()


def test_reconnecting_leaves_no_descriptors_behind(daemon: FakeDaemon, connect: Connect) -> None:
    gc.collect()
    before = n_pidfds()
    client = connect()
    for n in range(1, 12):
        assert eventually(lambda n=n: len(daemon.registrations) == n and client.ready)
        daemon.end_streams()
    assert eventually(lambda: client.ready)
    assert n_pidfds() == before + 1


def n_pidfds() -> int:
    return [link_of(fd) for fd in os.listdir("/proc/self/fd")].count("anon_inode:[pidfd]")


def link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_many_threads_may_ask_at_once(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.answers["lookup_prefix"] = lambda m: pb.DaemonMessage(
        lookup_prefix=pb.LookupPrefixReply(boundary=len(m.lookup_prefix.prompt.tokens) // 4)
    )
    client = connect()
    assert client.wait_attached(SOON_S)
    wrong: list[tuple[int, int | None]] = []

    def ask(first: int) -> None:
        for n in range(first, first + 40):
            prompt = Prompt(str(n), np.zeros(n, np.int32))
            found = client.lookup(prompt, device={}, limit_pages=0, timeout_s=SOON_S)
            if found is None or found.boundary != n:
                wrong.append((n, found and found.boundary))

    threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
