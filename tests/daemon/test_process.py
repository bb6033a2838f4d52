"""The daemon as a process: starts, refuses what it must, serves, stops in time and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controller.daemon.cli import EX_FAILED, main
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc
from tests.daemon.rig import layout_message, memory_file, offer, registration

HICACHE = str(Path(sys.executable).parent / "hicache")
WAIT_S = 20.0


class Process:
    """`hicache serve` with a configuration of its own."""

    def __init__(self, folder: str, **changes: object) -> None:
        self.folder = folder
        self.tcp = ""
        self.socket = f"{folder}/run/s"
        self.store = Path(folder) / "store"
        sections: dict[str, object] = {
            "server": {"socket": self.socket, "grace_s": 2.0},
            "host": {"capacity": "16MiB"},
            "storage": file_storage(self.store, capacity_bytes="16MiB"),
            "http": {"port": 0},
            "log": {"format": "json"},
        }
        self.config = Path(folder) / "hicache.yaml"
        self.config.write_text(yaml.safe_dump({**sections, **changes}))
        self.process = subprocess.Popen(
            [HICACHE, "serve", "-c", str(self.config)], stderr=subprocess.PIPE, text=True, env=environment()
        )
        self.lines: list[dict[str, object]] = []

    def event(self, name: str) -> dict[str, object]:
        """The next log line of this event."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            entry = json.loads(line) if line.startswith("{") else {"event": line.strip()}
            self.lines.append(entry)
            if entry["event"] == name:
                return entry
        raise AssertionError(f"the process ended without {name}: {self.lines}")

    def ended(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, text

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()[0]

    def hicache(self, *arguments: str) -> Result:
        """A command of this machine's user to this daemon."""
        return CliRunner().invoke(main, [*arguments, "-a", self.socket])


def file_storage(path: object, required: bool = True, **settings: object) -> dict[str, object]:
    backend = {"kind": "file", "path": str(path), **settings}
    return {"tiers": [{"backend": backend, "required": required}]}


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}


@pytest.fixture
def daemons(short_path: str) -> Iterator[list[Process]]:
    """Processes that a test starts; none outlives it."""
    started: list[Process] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


@pytest.fixture
def daemon(short_path: str, daemons: list[Process]) -> Process:
    one = Process(short_path)
    daemons.append(one)
    one.event("ready")
    return one


@pytest.fixture(scope="module")
def shared() -> Iterator[Process]:
    """A daemon for the tests that leave it as it was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        tcp = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        one = Process(folder, server={"socket": f"{folder}/run/s", "tcp": tcp})
        one.tcp = tcp
        one.event("ready")
        yield one
        assert one.stop() == 0


@pytest.fixture
def channel(shared: Process) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{shared.socket}") as one:
        yield one


def attached(daemon: Process, channel: grpc.Channel) -> tuple[object, pb.DaemonMessage]:
    """An engine's open stream and the daemon's welcome."""
    fd, ticket = memory_file(), os.urandom(16)
    assert offer(daemon.socket, ticket, [fd]) == b"1"
    os.close(fd)
    gone = threading.Event()

    def messages() -> Iterator[pb.EngineMessage]:
        yield pb.EngineMessage(id=1, registration=registration("engine", [ticket], layout=layout_message()))
        gone.wait(WAIT_S)

    stream = pb_grpc.HybridCacheStub(channel).Attach(messages(), timeout=WAIT_S)
    return stream, next(stream)


def test_it_serves_everything_it_says(shared: Process, channel: grpc.Channel) -> None:
    """Health, reflection, status, an engine's stream, a unary lookup, the HTTP port."""
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "hicache.v1.HybridCache", "hicache.v1.Admin"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"hicache.v1.HybridCache", "hicache.v1.Admin", "grpc.health.v1.Health"} <= set(services)
    _, welcome = attached(shared, channel)
    assert welcome.registered.daemon_pid == shared.process.pid
    lookup = pb.LookupPrefixRequest(prompt=pb.Prompt(engine_id="engine", tokens=bytes(64)))
    assert pb_grpc.HybridCacheStub(channel).LookupPrefix(lookup, timeout=WAIT_S).boundary == 0
    status = json.loads(shared.hicache("status", "--json").stdout)
    assert status["boot_id"] == welcome.registered.boot_id
    assert status["engines"][0]["engine_id"] == "engine"
    assert status["backends"][0]["healthy"] is True
    assert status["problems"] == []
    port = next(entry["port"] for entry in shared.lines if entry["event"] == "http")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as page:
        text = page.read().decode()
    assert "hicache_lookups_total 1.0" in text
    assert "hicache_backend_healthy" in text


def test_tcp_serves_the_same(shared: Process) -> None:
    shown = subprocess.run(
        [HICACHE, "status", "--json", "-a", shared.tcp],
        capture_output=True, text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert json.loads(shown.stdout)["ready"] is True


def test_the_commands_for_people(shared: Process, channel: grpc.Channel) -> None:
    _stream = attached(shared, channel)
    shown = shared.hicache("status").stdout
    for word in ("ready", "host", "storage (file)", "Engines", "engine"):
        assert word in shown
    assert "a second" in shared.hicache("top", "--looks", "2", "--every", "0.1").stdout.lower()
    found = shared.hicache("lookup", "--engine", "engine", "1,2,3", "4", "5")
    assert found.stdout.startswith("boundary: 0 pages")
    lost = shared.hicache("lookup", "--engine", "nobody", "1")
    assert lost.exit_code == EX_FAILED
    assert "engine_id: 'nobody' is not attached" in lost.stderr
    assert shared.hicache("flush").stdout.startswith("dropped 0 pages")


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_it_stops_cleanly_with_an_engine_attached(daemon: Process, signals: tuple[int, ...]) -> None:
    """LIFE-04, LIFE-05: exit 0, streams told UNAVAILABLE, sockets gone; more signals change nothing."""
    channel = grpc.insecure_channel(f"unix:{daemon.socket}")
    stream, _ = attached(daemon, channel)
    for number in signals:
        daemon.process.send_signal(number)
        if number is signals[0]:
            daemon.event("stopping")
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert daemon.ended()[0] == 0
    channel.close()
    assert os.listdir(os.path.dirname(daemon.socket)) == []


def test_after_kill_the_next_start_works(short_path: str, daemon: Process, daemons: list[Process]) -> None:
    """LIFE-04, LIFE-02: stale sockets of the dead are replaced, and the boot id is another."""
    daemon.process.kill()
    daemon.process.wait()
    assert os.path.exists(daemon.socket)
    following = Process(short_path)
    daemons.append(following)
    assert following.event("ready")["boot_id"] != daemon.lines[-1]["boot_id"]
    assert following.stop() == 0


def test_a_second_daemon_on_the_same_socket_is_refused(
    shared: Process, daemons: list[Process], channel: grpc.Channel
) -> None:
    """With the pid of the first, which goes on serving."""
    second = Process(shared.folder, http=None)
    daemons.append(second)
    code, text = second.ended()
    assert code == EX_FAILED
    assert f"is served by process {shared.process.pid}" in text
    assert pb_grpc.AdminStub(channel).Status(pb.StatusRequest(), timeout=WAIT_S).ready


def test_the_socket_is_private(shared: Process) -> None:
    """SECURITY-05"""
    assert os.stat(os.path.dirname(shared.socket)).st_mode & 0o777 == 0o700
    for suffix in ("", ".fds", ".lock"):
        assert os.stat(shared.socket + suffix).st_mode & 0o077 == 0
    assert shared.store.stat().st_mode & 0o077 == 0


def refused(daemons: list[Process], folder: str, **changes: object) -> tuple[int, str]:
    one = Process(folder, **changes)
    daemons.append(one)
    result = one.ended()
    assert os.path.isdir(f"{folder}/run") is False or os.listdir(f"{folder}/run") == []
    return result


def test_a_storage_directory_that_cannot_be_used_is_refused(short_path: str, daemons: list[Process]) -> None:
    """CONFIG-01: one line with the key and the remedy, exit code 1, nothing left."""
    blocker = Path(short_path) / "file"
    blocker.write_text("")
    storage = file_storage(f"{blocker}/store")
    code, text = refused(daemons, short_path, storage=storage)
    assert code == EX_FAILED
    line = text.strip().splitlines()[-1]
    assert line.startswith("hicache: storage.tiers[0].backend: ")
    assert str(blocker) in line
    assert "required: false" in line


def test_or_the_daemon_starts_degraded_when_told_to(short_path: str, daemons: list[Process]) -> None:
    """CONFIG-01: as configured; status and health tell."""
    blocker = Path(short_path) / "file"
    blocker.write_text("")
    storage = file_storage(f"{blocker}/store", required=False)
    one = Process(short_path, storage=storage)
    daemons.append(one)
    one.event("ready")
    status = json.loads(one.hicache("status", "--json").stdout)
    assert status["ready"] is True
    assert status["backends"][0]["healthy"] is False
    assert str(blocker) in status["problems"][0]
    assert one.stop() == 0


def test_more_memory_than_there_is_is_refused(short_path: str, daemons: list[Process]) -> None:
    code, text = refused(daemons, short_path, host={"capacity": "60TiB"})
    assert code == EX_FAILED
    assert "host.capacity" in text
    assert "available" in text


def test_a_taken_http_port_is_refused(short_path: str, daemons: list[Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, text = refused(daemons, short_path, http={"port": taken.getsockname()[1]})
    assert code == EX_FAILED
    assert "http.port: cannot listen" in text


def test_a_taken_tcp_port_is_refused(short_path: str, daemons: list[Process]) -> None:
    """FACTS: with SO_REUSEPORT, gRPC's default, a second daemon would get half of the connections."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = {"socket": f"{short_path}/run/s", "tcp": f"127.0.0.1:{taken.getsockname()[1]}"}
        code, text = refused(daemons, short_path, server=server)
    assert code == EX_FAILED
    assert "server: cannot listen on 127.0.0.1" in text


def test_it_can_be_stopped_while_it_starts(short_path: str, daemons: list[Process]) -> None:
    """MEMORY-07: live at once, readiness false with progress while host memory is being prepared."""
    one = Process(short_path, host={"capacity": "1GiB"}, storage=None)
    daemons.append(one)
    port = one.event("http")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=WAIT_S) as page:
        assert page.status == 200
    assert one.stop() == 0
    assert os.listdir(f"{short_path}/run") == []


def test_the_documented_engine_works(shared: Process) -> None:
    """The program in docs/api.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", program, shared.socket],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["backed up 4", "boundary 4 loaded [1, 2, 3, 4]"]


def test_every_metric_that_is_documented_is_exported(shared: Process) -> None:
    """CONFIG-02, OBS-03: in the Prometheus samples and in the operations page, under the same name."""
    root = Path(__file__).parents[2]
    port = next(entry["port"] for entry in shared.lines if entry["event"] == "http")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as page:
        exported = re.findall(r"^# TYPE (\w+)", page.read().decode(), re.M)
    for place in ("docs/operations.md", "deploy/prometheus.yml", "deploy/prometheus-rules.yml"):
        named = set(re.findall(r"\bhicache_[a-z_]+", (root / place).read_text()))
        assert named
        for name in named:
            family = name.removesuffix("_bucket")
            assert any(one in (family, f"{family}_total") or one.startswith(f"{name}") for one in exported), (
                name
            )
