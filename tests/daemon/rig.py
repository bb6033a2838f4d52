"""The daemon's engine side in this process: real gRPC over a real Unix socket, in front of a small controller
whose answers and delays a test decides."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from controller.counters import Counters
from controller.daemon.admin import AdminService
from controller.daemon.attachments import Attachments
from controller.daemon.config import Server
from controller.daemon.faults import Faults
from controller.daemon.grpc_server import server_options
from controller.daemon.handoff import Handoff
from controller.daemon.metrics import RequestMetrics, StatusCollector
from controller.daemon.readiness import Readiness
from controller.daemon.service import HybridCacheService
from controller.daemon.tiers import StorageTiers
from controller.daemon.verbs import Verbs
from controller.daemon.wire import DaemonStatus
from controller.requests import (
    Backup,
    BackupOutcome,
    CloseSession,
    EngineSpec,
    EngineStatus,
    Found,
    Gone,
    InvalidRequest,
    Load,
    Lookup,
    PoolStatus,
    Prefetch,
    PrefetchState,
    Progress,
    RequestError,
    Status,
    UnknownEngine,
)
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc

REGION_NAME = "hicache-test-region"
REGION_BYTES = 1 << 16
WAIT_S = 10.0
"""Deadline of every wait in these tests."""


class SmallController:
    """Attached engines, and loads that end when the test says so."""

    def __init__(self) -> None:
        self.boot_id = "boot-1"
        self.counters = Counters()
        self.specs: dict[str, EngineSpec] = {}
        self.detached: list[str] = []
        self.lookups: list[Lookup] = []
        self.loads: list[Load] = []
        self.backups: list[Backup] = []
        self.prefetches: list[Prefetch] = []
        self.released: list[str] = []
        self.closed: list[CloseSession] = []
        self.raises: BaseException | None = None
        self.may_land = asyncio.Event()
        self.may_land.set()
        self.waits_may_end = asyncio.Event()
        self.waits_may_end.set()
        self.in_flight = 0
        self.landed = 0
        self.wait_cancelled = asyncio.Event()
        self.problems: list[str] = []

    async def start(self) -> None: ...

    async def stop(self, drain_s: float) -> None: ...

    def attach(self, spec: EngineSpec) -> None:
        self._check()
        if spec.engine_id in self.specs:
            raise InvalidRequest(f"engine_id: {spec.engine_id!r} is attached")
        self.specs[spec.engine_id] = spec

    async def detach(self, engine_id: str) -> None:
        while self.in_flight:
            await asyncio.sleep(0)
            await self.may_land.wait()
        self.specs.pop(engine_id, None)
        self.detached.append(engine_id)

    def lookup(self, request: Lookup) -> Found:
        self._check(request.prompt.engine_id)
        self.lookups.append(request)
        n_pages = len(request.prompt.tokens) // 4
        load = {"full": np.arange(n_pages, dtype=np.int32)}
        return Found(f"lease-{len(self.lookups)}", n_pages, load, n_pages + 1, n_pages + 2, n_pages + 3, 30.0)

    def release(self, engine_id: str, lease_id: str) -> None:
        self._check(engine_id)
        if lease_id == "gone":
            raise Gone("lease_id: 'gone' has ended; look up again")
        self.released.append(lease_id)

    def close_session(self, request: CloseSession) -> bool:
        self._check(request.engine_id)
        self.closed.append(request)
        return True

    async def load(self, request: Load) -> int:
        self._check(request.engine_id)
        self.loads.append(request)
        self.in_flight += 1
        try:
            await self.may_land.wait()
        finally:
            self.in_flight -= 1
        self.landed += 1
        return sum(len(placement.pages) for placement in request.components.values())

    async def backup(self, request: Backup) -> Mapping[str, BackupOutcome]:
        self._check(request.prompt.engine_id)
        self.backups.append(request)
        return {
            name: BackupOutcome(len(one.pages), 1, 2, "host_full") for name, one in request.components.items()
        }

    def prefetch(self, request: Prefetch) -> str:
        self._check(request.lookup.prompt.engine_id)
        self.prefetches.append(request)
        return f"prefetch-{len(self.prefetches)}"

    async def wait_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        self._check(engine_id)
        try:
            await self.may_land.wait()
            await self.waits_may_end.wait()
        except asyncio.CancelledError:
            self.wait_cancelled.set()
            raise
        return Progress(PrefetchState.DONE, 3, 4, 5, 6, "deadline")

    async def cancel_prefetch(self, engine_id: str, prefetch_id: str) -> Progress:
        self._check(engine_id)
        return Progress(PrefetchState.CANCELLED, 0, 0, 0, 0)

    def status(self) -> Status:
        engines = tuple(EngineStatus(name, spec.model, 1.0, 0, 0) for name, spec in self.specs.items())
        pools = (PoolStatus("model", "full", 1000, 3, 2, 1, 4),)
        return Status(tuple(self.problems), engines, pools, (), self.counters.snapshot(), 10, 100)

    def flush(self) -> tuple[int, int]:
        self._check()
        return 7, 2

    def _check(self, engine_id: str | None = None) -> None:
        if self.raises is not None:
            raise self.raises
        if engine_id is not None and engine_id not in self.specs:
            raise UnknownEngine(f"engine_id: {engine_id!r} is not attached; attach first")


class Rig:
    """A daemon without its process."""

    def __init__(self, socket_path: str, settings: Server, *, ticket_life_s: float) -> None:
        self.socket_path = socket_path
        self.settings = settings
        self.controller = SmallController()
        self.handoff = Handoff(socket_path + ".fds", ticket_life_s=ticket_life_s)
        self.faults = Faults()
        self.readiness = Readiness()
        self.readiness.serve()
        self.registry = CollectorRegistry()
        self.metrics = RequestMetrics(self.registry)
        self.registry.register(StatusCollector(self.snapshot))
        self.attachments = Attachments(
            self.controller,
            self.handoff,
            self.faults,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            drain_timeout_s=settings.grace_s,
        )
        self.server = grpc.aio.server(options=server_options(settings))
        self.channel_options: list[tuple[str, int]] = [("grpc.max_send_message_length", 1 << 30)]

    async def start(self) -> None:
        verbs = Verbs(self.controller, self.attachments, self.readiness, self.faults, self.metrics)
        service = HybridCacheService(
            verbs,
            self.attachments,
            self.controller,
            self.readiness,
            self.faults,
            max_in_flight=self.settings.max_requests_in_flight,
            heartbeat_interval_s=self.settings.heartbeat_interval_s,
            registration_timeout_s=self.settings.heartbeat_timeout_s,
            grace_s=self.settings.grace_s,
            daemon_pid=os.getpid(),
        )
        no_tiers = StorageTiers(None, None)
        admin = AdminService(self.snapshot, self.controller, no_tiers, self.readiness, self.faults)
        pb_grpc.add_HybridCacheServicer_to_server(service, self.server)
        pb_grpc.add_AdminServicer_to_server(admin, self.server)
        self.handoff.start()
        self.server.add_insecure_port(f"unix:{self.socket_path}")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"unix:{self.socket_path}", options=self.channel_options)
        self.cache = pb_grpc.HybridCacheStub(self.channel)
        self.admin = pb_grpc.AdminStub(self.channel)

    async def stop(self) -> None:
        self.controller.may_land.set()
        await self.channel.close()
        assert await self.attachments.end_all(WAIT_S)
        await self.server.stop(0)
        self.handoff.close()

    def snapshot(self) -> DaemonStatus:
        status = self.controller.status()
        problems = (*status.problems, *self.attachments.problems(), *self.faults.problems())
        return DaemonStatus(
            "0", self.controller.boot_id, 1.0, self.readiness.ready, self.readiness.progress, problems,
            {**status.counters}, status,
        )  # fmt: skip

    @asynccontextmanager
    async def engine(self, engine_id: str = "engine", **changes: object) -> AsyncIterator[Engine]:
        """An attached engine; at the end its stream is closed if it is still open."""
        engine = Engine(self, engine_id)
        try:
            await engine.attach(**changes)
            yield engine
        finally:
            engine.leave()


class Engine:
    """A client by hand."""

    def __init__(self, rig: Rig, engine_id: str) -> None:
        self.rig = rig
        self.engine_id = engine_id
        self.stream = rig.cache.Attach()
        self._ids = iter(range(1, 1 << 30))

    async def attach(self, **changes: object) -> pb.Registered:
        """Hand a region over and register; raises grpc.aio.AioRpcError when that is refused."""
        first = registration(self.engine_id, await handed_over(self.rig.socket_path), **changes)
        return await self.register(first)

    async def register(self, first: pb.Registration) -> pb.Registered:
        await self.stream.write(pb.EngineMessage(id=99, registration=first))
        answer = await self.read()
        assert answer.id == 99
        return answer.registered

    async def send(self, **body: object) -> int:
        message_id = next(self._ids)
        await self.stream.write(pb.EngineMessage(id=message_id, **body))
        return message_id

    async def read(self) -> pb.DaemonMessage:
        async with asyncio.timeout(WAIT_S):
            message = await self.stream.read()
        if not isinstance(message, pb.DaemonMessage):
            raise AssertionError("the stream ended")
        return message

    async def ask(self, **body: object) -> pb.DaemonMessage:
        message_id = await self.send(**body)
        answer = await self.read()
        assert answer.id == message_id
        return answer

    async def ended(self) -> grpc.StatusCode:
        """How the stream ended; waits for that."""
        async with asyncio.timeout(WAIT_S):
            with suppress(grpc.aio.AioRpcError):
                while isinstance(await self.stream.read(), pb.DaemonMessage):
                    pass
            code: grpc.StatusCode = await self.stream.code()
        return code

    def leave(self) -> None:
        self.stream.cancel()


def registration(engine_id: str, tickets: list[bytes], /, **changes: object) -> pb.Registration:
    message = pb.Registration(
        engine_id=engine_id,
        model="model",
        revision="r1",
        regions=[pb.Region(ticket=ticket, nbytes=REGION_BYTES) for ticket in tickets],
        layout=layout_message(),
    )
    for name, value in changes.items():
        message.ClearField(name)
        message.MergeFrom(pb.Registration(**{name: value}))
    return message


def layout_message() -> pb.Layout:
    return pb.Layout(
        page_size=4,
        components=[pb.Component(name="full", kind=pb.Component.FULL)],
        pools=[
            pb.Pool(
                name="kv",
                component="full",
                n_slots=8,
                planes=[pb.Plane(region=0, offset=0, stride=64, nbytes=64, layer=0)],
            )
        ],
    )


def memory_file(nbytes: int = REGION_BYTES, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create(REGION_NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offer(socket_path: str, ticket: bytes, fds: list[int]) -> bytes:
    """Send a ticket and descriptors; what the daemon answers, nothing when it hangs up. Blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(socket_path + ".fds")
        try:
            socket.send_fds(connection, [ticket], fds)
            return connection.recv(1)
        except ConnectionError:
            return b""


async def handed_over(socket_path: str, n_regions: int = 1) -> list[bytes]:
    tickets = []
    for _ in range(n_regions):
        ticket, fd = os.urandom(16), memory_file()
        try:
            assert await asyncio.to_thread(offer, socket_path, ticket, [fd]) == b"1"
        finally:
            os.close(fd)
        tickets.append(ticket)
    return tickets


def regions_mapped() -> int:
    """Mappings of test regions in this process."""
    return Path("/proc/self/maps").read_text().count(REGION_NAME)


def regions_open() -> int:
    """Descriptors of test regions in this process."""
    n_open = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            n_open += REGION_NAME in os.readlink(f"/proc/self/fd/{fd}")
    return n_open


async def until(condition: object, what: str) -> None:
    """Wait until a condition (a callable) holds."""
    assert callable(condition)
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - what happens in the kernel sets no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


__all__ = ["RequestError"]
