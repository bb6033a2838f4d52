"""The daemon's process: `hicache serve` with a configuration of the demo's own.

Owns its directory (socket, YAML, log) and its life. Speaks to it only as any operator could.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
import msgspec
import yaml

from examples.demo.process import DemoError
from proto.v1 import hicache_pb2 as pb
from storage_backends.specs import BackendSpec

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 20.0
_QUIET_LOOKS, _LOOK_S = 4, 0.05
"""So many looks, so far apart, must find it quiet: between one transfer and the next it is, for moments."""


@dataclass(frozen=True)
class DaemonSettings:
    """What the demo asks of a daemon."""

    host_bytes: int
    storage: BackendSpec | None
    """What serves as L3; None for no third tier."""


class Daemon:
    """`hicache serve` in `directory`. Use it as a context; it is ended with it, whatever happens."""

    def __init__(self, settings: DaemonSettings, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.socket = directory / "hicache.sock"
        self._log = directory / "daemon.log"
        self._config = directory / "hicache.yaml"
        self._config.write_text(yaml.safe_dump(_configuration(settings, self.socket)))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            self._process = None
            process.terminate()
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self) -> None:
        """Start it and wait until it is ready. Raises DemoError with the end of its log when it is not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(_command()), "serve", "-c", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            status = self._status()
            if status is not None and status.ready:
                return
            time.sleep(0.02)
        raise DemoError(f"the daemon did not become ready; its log ends:\n{self._end_of_log()}")

    def stop(self) -> None:
        """Ask it to end, and wait. Raises DemoError when it ends badly or not in time."""
        process, self._process = self._process, None
        if process is None:
            raise DemoError("the daemon does not run")
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait()
            raise DemoError(f"the daemon did not stop; its log ends:\n{self._end_of_log()}") from error
        if code != 0:
            raise DemoError(f"the daemon stopped with exit code {code}; its log ends:\n{self._end_of_log()}")

    def settled(self) -> pb.StatusReply:
        """Its status once nothing has moved for a while, or at the deadline.

        Raises DemoError when it does not answer."""
        deadline, quiet_looks = time.monotonic() + _SETTLE_TIMEOUT_S, 0
        while True:
            status = self._status()
            if status is None:
                raise DemoError(f"the daemon does not answer; its log ends:\n{self._end_of_log()}")
            quiet_looks = 0 if _busy(status) else quiet_looks + 1
            if quiet_looks == _QUIET_LOOKS or time.monotonic() > deadline:
                return status
            time.sleep(_LOOK_S)

    def _status(self) -> pb.StatusReply | None:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            ask = channel.unary_unary(
                "/hicache.v1.Admin/Status",
                request_serializer=pb.StatusRequest.SerializeToString,
                response_deserializer=pb.StatusReply.FromString,
            )
            try:
                status: pb.StatusReply = ask(pb.StatusRequest(), timeout=2.0)
                return status
            except grpc.RpcError:
                return None

    def _end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


def _command() -> Path:
    """The command `hicache` of the environment that this Python belongs to."""
    command = Path(sys.executable).with_name("hicache")
    if not command.exists():
        raise DemoError(f"{command} is missing; install the project there: pip install -e '.[demo]'")
    return command


def problems_of(status: pb.StatusReply) -> list[str]:
    """What is wrong with a daemon that has settled: its own problems, and whatever is still held for an
    engine though none asks for anything."""
    problems = list(status.problems)
    problems += [f"storage {b.name!r}: {b.problem}" for b in status.backends if not b.healthy]
    problems += [f"engine {e.engine_id!r} still has {e.jobs} jobs" for e in status.engines if e.jobs]
    problems += [f"engine {e.engine_id!r} still has {e.leases} leases" for e in status.engines if e.leases]
    for pool in status.pools:
        if pool.pinned_pages or pool.inbound_pages:
            held = f"{pool.pinned_pages} pages pinned and {pool.inbound_pages} inbound"
            problems.append(f"{pool.component}: still {held}")
    return problems


def figures_of(status: pb.StatusReply) -> dict[str, int]:
    """What a daemon has counted and holds."""
    figures = {name: int(count) for name, count in sorted(status.counters.items())}
    figures["host_used_bytes"] = status.host_used_bytes
    figures["host_capacity_bytes"] = status.host_capacity_bytes
    for pool in status.pools:
        figures[f"{pool.component}_resident_pages"] = pool.resident_pages
        figures[f"{pool.component}_stored_pages"] = pool.stored_pages
    figures["storage_used_bytes"] = sum(backend.used_bytes for backend in status.backends)
    return figures


def _busy(status: pb.StatusReply) -> bool:
    """Whether bytes are moving, or about to."""
    return (
        any(engine.jobs for engine in status.engines)
        or any(backend.queued_writes for backend in status.backends)
        or any(pool.inbound_pages for pool in status.pools)
    )


def _configuration(settings: DaemonSettings, socket: Path) -> dict[str, object]:
    configuration: dict[str, object] = {
        "server": {"socket": str(socket)},
        "host": {"capacity": settings.host_bytes},
        "http": None,
    }
    if settings.storage is not None:
        configuration["storage"] = {"tiers": [{"backend": msgspec.to_builtins(settings.storage)}]}
    return configuration
