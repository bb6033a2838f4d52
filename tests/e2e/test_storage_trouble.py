"""What befalls a storage server, done to a real one behind a real daemon under a steady load.

In each: what host memory has is served at once, every byte is right, nothing leaks, status says what is
wrong, and soon after recovery writes and reads work and holes close.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proto.v1 import hicache_pb2 as pb
from tests.e2e.load import Load, Trial
from tests.e2e.throttle import throttled
from tests.live import wait_until
from tests.mooncake.servers import running_pool
from tests.redis.servers import Server, running

QUICK = {"op_timeout_s": 0.4, "connect_timeout_s": 0.3}
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@contextmanager
def trial(folder: Path, **backend: object) -> Iterator[tuple[Trial, Load]]:
    """A daemon on this backend with everything in place and the load under way; checked at the end."""
    (folder / "daemon").mkdir()
    trial = Trial(folder / "daemon", backend)
    try:
        trial.prepare()
        with trial.load() as load:
            yield trial, load
        trial.check_after(load)
    finally:
        trial.close()


class Says:
    """Whether the daemon says that its storage is in trouble, and why."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __call__(self, status: pb.StatusReply) -> bool:
        (backend,) = status.backends
        told = [problem for problem in status.problems if backend.problem and backend.problem in problem]
        return not backend.healthy and bool(told) and any(part in backend.problem for part in self._parts)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(Server(tmp_path / "redis")) as server:
        yield server


@pytest.mark.parametrize(
    "seconds",
    [
        3.0,
        pytest.param(
            30.0,
            marks=pytest.mark.skipif(
                os.environ.get("HICACHE_SLOW") != "1", reason="slow: set HICACHE_SLOW=1"
            ),
        ),
    ],
)
def test_a_frozen_server(server: Server, tmp_path: Path, seconds: float) -> None:
    """REDIS-04: SIGSTOP. Connections are taken, nothing is answered."""
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        with server.frozen():
            daemon.endure(load, Says("frozen", "breaker"), at_least_s=seconds)
        daemon.await_recovery()


def test_a_server_killed_and_restarted_empty(server: Server, tmp_path: Path) -> None:
    """REDIS-04, L3-04: all that was stored is gone, which nothing says but the next question."""
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        server.kill()
        daemon.endure(load, Says("cannot be reached", "breaker"))
        server.start()
        daemon.await_recovery()


def test_a_server_killed_and_restarted_with_what_it_held(server: Server, tmp_path: Path) -> None:
    server.options = DURABLE
    server.restart()
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        server.kill()
        daemon.endure(load, Says("cannot be reached", "breaker"))
        server.start()
        daemon.await_recovery()


def test_a_full_server(server: Server, tmp_path: Path) -> None:
    """REDIS-03: `noeviction`. Writes are refused, reads go on."""
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        daemon.endure(load, Says("full"))
        assert daemon.daemon.counter("storage_write_dropped_full_pages") > 0
        with server.client() as client:
            client.config_set("maxmemory", 0)
        daemon.await_recovery()


def test_a_slow_link(server: Server, tmp_path: Path) -> None:
    """A thousand bytes a second, where a prompt has several thousand."""
    with (
        throttled(server.port) as link,
        trial(tmp_path, kind="redis", addresses=[link.address], **QUICK) as (daemon, load),
    ):
        link.bytes_per_s = 1000
        daemon.endure(load, Says("did not answer", "breaker"))
        link.bytes_per_s = 0
        daemon.await_recovery()


@pytest.mark.parametrize("harm", ["changed", "truncated", "replaced"])
def test_damaged_values(server: Server, tmp_path: Path, harm: str) -> None:
    """L3-01, L3-15: found by length and checksum, deleted, counted, computed anew, written again."""
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        with server.client() as client:
            for key in client.scan_iter():
                match harm:
                    case "changed":
                        client.setrange(key, 150, b"\xff\x00\xff\x00")
                    case "truncated":
                        client.set(key, client.getrange(key, 0, 99))
                    case _:
                        client.set(key, b"\0" * client.strlen(key))
        daemon.endure(load, lambda status: status.counters["prefetch_corrupt_pages"] > 0)
        daemon.await_recovery()


def test_a_flush_from_outside(server: Server, tmp_path: Path) -> None:
    """What was known to be stored is not; nothing that is asked later is spoilt by that."""
    with trial(tmp_path, kind="redis", addresses=[server.address], **QUICK) as (daemon, load):
        server.flush()
        daemon.endure(load, lambda status: status.counters["backend_contains_absent"] > 0)
        daemon.await_recovery()


def test_another_password_after_a_restart(server: Server, tmp_path: Path) -> None:
    """The daemon takes the new one from its file as soon as it stands there."""
    password = tmp_path / "password"
    password.write_text("old")
    server.options, server.login = (*DURABLE, "--requirepass", "old"), {"password": "old"}
    server.restart()
    spec = {"kind": "redis", "addresses": [server.address], "password_file": str(password), **QUICK}
    with trial(tmp_path, **spec) as (daemon, load):
        server.options, server.login = (*DURABLE, "--requirepass", "new"), {"password": "new"}
        server.restart()
        daemon.endure(load, Says("WRONGPASS", "password"))
        password.write_text("new")
        daemon.await_recovery()


def test_a_mooncake_master_killed_and_started_anew(tmp_path: Path) -> None:
    """It forgets everything; the pool's memory joins again."""
    with (
        running_pool() as pool,
        trial(tmp_path, kind="mooncake", master=pool.master.address, op_timeout_s=0.4) as (daemon, load),
    ):
        pool.master.stop()
        daemon.endure(load, Says("master", "breaker"))
        assert pool.master.tend()
        daemon.await_recovery()


def test_a_mooncake_node_killed(tmp_path: Path) -> None:
    """What it held is gone; another node takes what is new."""
    with (
        running_pool() as pool,
        trial(tmp_path, kind="mooncake", master=pool.master.address, op_timeout_s=0.4) as (daemon, load),
    ):
        pool.owners[0].kill()
        daemon.endure(load, Says("lost or frozen", "breaker", "full"))
        pool.add_owner()
        wait_until(lambda: not daemon.daemon.status().problems, "health", tell=daemon.daemon.status)
        daemon.await_recovery()
