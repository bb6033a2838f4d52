"""Real Redis servers for tests: started on loopback or in a temporary directory, ended by who started them.

Each dies with the test process, however that ends. Where no server is installed the tests skip, and with
CI=true they fail instead.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

DEADLINE_S = 30.0
"""Nothing that a test waits for takes as long; whatever does has failed."""


def binary(name: str) -> str:
    """Path of an installed program, or the end of the test."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"{name} is not installed, so nothing of it is tested: `make services` installs it"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def eventually(holds: Callable[[], object], what: str = "it") -> None:
    """Until it holds; the test fails when it does not in time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} never came true"
        time.sleep(0.005)


_HANDED_OUT: set[int] = set()


def free_port() -> int:
    """One that nobody listens on and that was not handed out before. Below 55536, because a cluster node
    also takes the port 10000 above."""
    for port in range(20000 + os.getpid() % 12000, 55536):
        if port in _HANDED_OUT:
            continue
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        _HANDED_OUT.add(port)
        return port
    pytest.fail("no free port")


class Server:
    """One redis-server process."""

    def __init__(
        self, directory: Path, *options: str, port: int | None = None, program: str = "redis-server"
    ):
        self.directory = directory
        self.port = free_port() if port is None else port
        self.path = str(directory / "socket")
        self.program = program
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.login: dict[str, str] = {}
        """For `client`: what the options made necessary."""
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it takes connections."""
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        settings += ["--unixsocket", self.path, "--unixsocketperm", "700", "--save", "", "--appendonly", "no"]
        settings += ["--enable-debug-command", "local"]
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", binary(self.program), *settings, *self.options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        log.close()
        eventually(self.answers, f"{self.program} on {self.address}")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()[-2000:]
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    def client(self) -> redis.Redis:
        """redis-py, as an independent second client, over the Unix socket."""
        return redis.Redis(unix_socket_path=self.path, socket_timeout=10, **self.login)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()
            client.config_resetstat()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP: the kernel still takes connections for it, and nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            self.process = None

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Cluster:
    """Three primaries without replicas."""

    def __init__(self, directory: Path) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        options += ("--cluster-require-full-coverage", "no")
        self.nodes = [Server(directory / str(number), *options) for number in range(3)]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(node.address for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            first, last = 5461 * number, (5461 * (number + 1) - 1 if number < 2 else 16383)
            with node.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        eventually(self.is_whole, "the cluster")

    def is_whole(self) -> bool:
        """Whether every node knows all owners of slots."""
        for node in self.nodes:
            with node.client() as client:
                slots = client.execute_command("CLUSTER", "SLOTS")
                state = client.execute_command("CLUSTER", "INFO")
            if len(slots) != 3 or b"cluster_state:ok" not in _raw(state):
                return False
        return True

    def flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def _raw(reply: object) -> bytes:
    """redis-py parses CLUSTER INFO into a dict."""
    if isinstance(reply, dict):
        return b"\n".join(f"{name}:{value}".encode() for name, value in reply.items())
    return reply if isinstance(reply, bytes) else str(reply).encode()


class Watched:
    """A primary, a replica, and one Sentinel that is enough to fail over."""

    SERVICE = "frames"

    def __init__(self, directory: Path) -> None:
        self.servers = [Server(directory / "one"), Server(directory / "two")]
        self.sentinel = Server(directory / "sentinel")

    def start(self) -> None:
        one, two = self.servers
        one.start()
        two.options = ("--replicaof", "127.0.0.1", str(one.port), "--repl-diskless-sync-delay", "0")
        one.options = ()
        with one.client() as client:
            client.config_set("repl-diskless-sync-delay", 0)
        two.start()
        eventually(self.is_replicated, "replication")
        configuration = self.sentinel.directory / "sentinel.conf"
        configuration.write_text(
            f"port {self.sentinel.port}\nbind 127.0.0.1\ndir {self.sentinel.directory}\n"
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {one.port} 1\n"
            f"sentinel down-after-milliseconds {self.SERVICE} 300\n"
            f"sentinel failover-timeout {self.SERVICE} 2000\n"
        )
        log = (self.sentinel.directory / "log").open("ab")
        self.sentinel.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", binary("redis-server"), str(configuration), "--sentinel"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        log.close()
        eventually(self.knows_replica, "the Sentinel")

    def is_replicated(self) -> bool:
        with self.servers[1].client() as client:
            return client.info("replication").get("master_link_status") == "up"

    def sentinel_client(self) -> redis.Redis:
        return redis.Redis(port=self.sentinel.port, socket_timeout=10)

    def knows_replica(self) -> bool:
        try:
            with self.sentinel_client() as client:
                # ask the replica how it is more often than each ten seconds, so that it can be promoted soon
                client.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", 100)
                masters = client.execute_command("SENTINEL", "masters")
        except redis.ConnectionError:
            return False
        return int(masters[0][b"num-slaves"]) == 1

    def primary(self) -> Server:
        with self.sentinel_client() as client:
            _, port = client.execute_command("SENTINEL", "get-master-addr-by-name", self.SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def fail_over(self) -> None:
        """Ask for it, and wait until the Sentinel names the other one."""
        before = self.primary()
        eventually(self.take_over, "the failover's begin")
        eventually(lambda: self.primary() is not before, "the failover")

    def take_over(self) -> bool:
        try:
            with self.sentinel_client() as client:
                client.execute_command("SENTINEL", "failover", self.SERVICE)
        except redis.ResponseError:
            return False
        return True

    def flush(self) -> None:
        self.primary().flush()

    def kill(self) -> None:
        self.sentinel.kill()
        for server in self.servers:
            server.kill()
