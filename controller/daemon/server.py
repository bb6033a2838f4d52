"""The daemon process: builds everything in order, says when it is ready, and takes it down in reverse.

Owns the process (signals, umask, sockets) and no decision about caching. It listens before it is ready,
so that probes see it live and requests get UNAVAILABLE instead of nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from importlib import metadata

import grpc
import structlog
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health
from grpc_reflection.v1alpha import reflection

from controller.controller import HybridCacheController
from controller.daemon import tuning
from controller.daemon.admin import AdminService
from controller.daemon.attachments import Attachments
from controller.daemon.claim import ClaimError, SocketClaim
from controller.daemon.config import FD_SUFFIX, Config, Http, Server, format_size, kind_of
from controller.daemon.events import EventsService
from controller.daemon.faults import Faults
from controller.daemon.gpus import GpuMissing, open_gpus
from controller.daemon.grpc_server import server_options, stop_serving
from controller.daemon.handoff import Handoff
from controller.daemon.http import HttpServer
from controller.daemon.metrics import RequestMetrics, StatusCollector, make_registry
from controller.daemon.readiness import Readiness
from controller.daemon.service import HybridCacheService
from controller.daemon.tiers import StorageTiers
from controller.daemon.verbs import Verbs
from controller.daemon.wire import DaemonStatus
from controller.memory.budget import BudgetError
from controller.memory.slab import HostSlab, SlabError
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import TransferScheduler
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc
from storage_backends.base import StorageError

HYBRID_CACHE = pb.DESCRIPTOR.services_by_name["HybridCache"].full_name
ADMIN = pb.DESCRIPTOR.services_by_name["Admin"].full_name
EVENTS = pb.DESCRIPTOR.services_by_name["Events"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = structlog.get_logger("hicache.daemon")


class StartError(Exception):
    """The daemon cannot start; the message names the key and the remedy."""


class _Interrupted(Exception):  # noqa: N818 - not an error
    """Asked to stop while starting."""


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError; leaves nothing behind either way."""
    os.umask(0o077)
    tuning.keep_freed_memory()
    tuning.switch_threads_sooner()
    uvloop.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        try:
            daemon = await Daemon.build(config, stack, stop)
            await daemon.start()
        except _Interrupted:
            return
        except (BudgetError, ClaimError, GpuMissing, SlabError, StorageError) as error:
            raise StartError(str(error)) from error
        await stop.wait()


class Daemon:
    """The parts of a running daemon. `build` pushes the undoing of each step on the caller's stack."""

    def __init__(self, config: Config, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop
        self._begun_s = time.monotonic()
        self._readiness = Readiness()
        self._faults = Faults()
        self._version = metadata.version("hicache")
        self._health = grpc_health.HealthServicer()
        self._copies_ended = True

    @classmethod
    async def build(cls, config: Config, stack: AsyncExitStack, stop: asyncio.Event) -> Daemon:
        """Take the socket and the memory, put the parts together, and listen."""
        daemon = cls(config, stop)
        log.info(
            "starting",
            version=daemon._version,
            host_capacity=format_size(config.host.capacity),
            storage=[kind_of(tier.backend) for tier in config.storage.tiers] if config.storage else None,
        )
        claim = SocketClaim(config.server.socket)
        stack.callback(claim.release)
        daemon._build_tiers(config, stack)
        daemon._build_engine_side(config.server, stack)
        await daemon._listen(config.server, stack)
        if config.http is not None:
            await daemon._listen_http(config.http, stack)
        return daemon

    async def start(self) -> None:
        """Make host memory and storage usable, then serve. Raises _Interrupted when asked to stop."""
        await asyncio.to_thread(self._ready_memory)
        opening = asyncio.create_task(self._open())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
            raise _Interrupted
        stopping.cancel()
        opening.result()
        self._readiness.serve()
        await self._set_health(SERVING)
        log.info(
            "ready",
            socket=self._config.server.socket,
            tcp=self._config.server.tcp,
            boot_id=self._controller.boot_id,
            took_s=round(time.monotonic() - self._begun_s, 3),
        )

    def snapshot(self) -> DaemonStatus:
        """How everything stands now."""
        controller = self._controller.status()
        return DaemonStatus(
            version=self._version,
            boot_id=self._controller.boot_id,
            uptime_s=time.monotonic() - self._begun_s,
            ready=self._readiness.ready,
            progress=self._readiness.progress,
            problems=(
                *controller.problems,
                *self._attachments.problems(),
                *self._faults.problems(),
                *(self._gpus.problems() if self._gpus else ()),
            ),
            counters={**controller.counters, **dict(self._counters())},
            controller=controller,
        )

    # ---- building

    def _build_tiers(self, config: Config, stack: AsyncExitStack) -> None:
        self._slab = HostSlab(config.host.capacity, extent_bytes=config.host.extent)
        stack.callback(self._close_slab)
        cpu = CpuCopyEngine()
        self._gpus = open_gpus(config.transfers.engine, self._slab, cpu)
        stack.callback(self._close_gpus)
        self._scheduler = TransferScheduler(
            self._gpus.routes if self._gpus else cpu,
            threads=config.transfers.threads,
            chunk_bytes=config.transfers.chunk_bytes,
        )
        stack.callback(self._close_scheduler)
        self._controller = HybridCacheController(
            config.controller_settings(), self._slab, self._scheduler, self._gpus
        )
        self._tiers = StorageTiers(self._controller.storage, self._slab)
        stack.push_async_callback(self._tiers.stop)
        stack.push_async_callback(self._stop_controller, config.server.grace_s)

    def _build_engine_side(self, server: Server, stack: AsyncExitStack) -> None:
        self._handoff = Handoff(server.socket + FD_SUFFIX)
        self._attachments = Attachments(
            self._controller,
            self._handoff,
            self._faults,
            heartbeat_timeout_s=server.heartbeat_timeout_s,
            drain_timeout_s=server.grace_s,
            gpus=self._gpus,
        )
        self._registry = make_registry()
        self._registry.register(StatusCollector(self.snapshot))
        self._handoff.start()
        stack.callback(self._handoff.close)

    async def _listen(self, server: Server, stack: AsyncExitStack) -> None:
        self._grpc = grpc.aio.server(options=server_options(server))
        metrics = RequestMetrics(self._registry)
        verbs = Verbs(self._controller, self._attachments, self._readiness, self._faults, metrics)
        service = HybridCacheService(
            verbs,
            self._attachments,
            self._controller,
            self._readiness,
            self._faults,
            max_in_flight=server.max_requests_in_flight,
            heartbeat_interval_s=server.heartbeat_interval_s,
            registration_timeout_s=server.heartbeat_timeout_s,
            grace_s=server.grace_s,
            daemon_pid=os.getpid(),
        )
        admin = AdminService(self.snapshot, self._controller, self._tiers, self._readiness, self._faults)
        # The generated functions carry no annotations.
        pb_grpc.add_HybridCacheServicer_to_server(service, self._grpc)  # type: ignore[no-untyped-call]
        pb_grpc.add_AdminServicer_to_server(admin, self._grpc)  # type: ignore[no-untyped-call]
        pb_grpc.add_EventsServicer_to_server(self._events_service(), self._grpc)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (HYBRID_CACHE, ADMIN, EVENTS, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        await self._set_health(NOT_SERVING)
        for address in filter(None, (f"unix:{server.socket}", server.tcp)):
            try:
                self._grpc.add_insecure_port(address)
            except RuntimeError as error:
                raise StartError(
                    f"server: cannot listen on {address} ({error}); is the address in use?"
                ) from error
        await self._grpc.start()
        stack.push_async_callback(self._stop_serving, server.grace_s)

    def _events_service(self) -> EventsService:
        controller = self._controller
        return EventsService(
            controller.events, controller.contents, controller.boot_id, self._readiness, self._faults
        )

    async def _listen_http(self, http: Http, stack: AsyncExitStack) -> None:
        server = HttpServer(self.snapshot, self._registry, self._faults)
        stack.push_async_callback(server.stop)
        try:
            port = await server.start(http.address, http.port)
        except OSError as error:
            raise StartError(
                f"http.port: cannot listen on {http.address}:{http.port} ({error.strerror}); "
                "choose another port, 0 for any free one, or `http: null` for none"
            ) from error
        log.info("http", address=http.address, port=port)

    # ---- starting

    async def _open(self) -> None:
        await self._controller.start()
        if self._config.storage is not None:
            await self._tiers.open(self._config.storage.tiers, self._readiness.starting)

    def _ready_memory(self) -> None:
        """Back host memory with pages, and pin it where there is a GPU."""
        if self._gpus is None:
            self._slab.prefault(self._prefaulted)
            return
        self._gpus.spread()
        self._slab.prefault(self._prefaulted)
        self._gpus.pin(self._pinned, extent_bytes=self._config.host.extent or 0)
        for problem in self._gpus.problems():
            log.warning("gpu_degraded", problem=problem)

    def _pinned(self, done_bytes: int) -> None:
        """On the pinning thread, now and then."""
        if self._stop.is_set():
            raise _Interrupted
        self._readiness.starting(f"host memory: {done_bytes >> 20} of {self._slab.nbytes >> 20} MiB pinned")

    def _prefaulted(self, done_bytes: int) -> None:
        """On the prefaulting thread, now and then."""
        if self._stop.is_set():
            raise _Interrupted
        self._readiness.starting(f"host memory: {done_bytes >> 20} of {self._slab.nbytes >> 20} MiB ready")

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", HYBRID_CACHE, ADMIN, EVENTS):
            await self._health.set(name, status)

    # ---- stopping, each step undoing one of building

    async def _stop_serving(self, grace_s: float) -> None:
        log.info("stopping", grace_s=grace_s)
        self._readiness.stop()
        if self._controller.events is not None:
            self._controller.events.close()
        await self._health.enter_graceful_shutdown()
        if not await stop_serving(self._grpc, self._attachments, grace_s):
            log.warning("engines_not_drained", after_s=grace_s)

    async def _stop_controller(self, grace_s: float) -> None:
        stopping = asyncio.create_task(self._controller.stop(grace_s))
        _, late = await asyncio.wait({stopping}, timeout=2 * grace_s)
        if late:
            log.warning("controller_not_stopped", after_s=2 * grace_s)
            stopping.cancel()

    def _close_scheduler(self) -> None:
        self._copies_ended = self._scheduler.close(self._config.server.grace_s)

    def _close_gpus(self) -> None:
        if self._gpus is not None and self._copies_ended:
            self._gpus.close()

    def _close_slab(self) -> None:
        """Unmap host memory, unless a copy still moves in it: then the process's end does it."""
        if self._copies_ended:
            self._slab.close()
        else:
            log.error("copies_not_ended", consequence="host memory stays mapped until the process is gone")

    def _counters(self) -> Iterator[tuple[str, int]]:
        """The daemon's own counters."""
        yield "internal_errors", self._faults.count + self._controller.counters.internal_errors
        yield "engines_attached", self._attachments.attached
        for ending, count in self._attachments.ended.items():
            yield f"engines_ended_{ending.name.lower()}", count
        yield "regions_handed_over", self._handoff.accepted
        yield "regions_refused", self._handoff.refused
        yield "regions_expired", self._handoff.expired
        moved = self._scheduler.counts()
        yield "copied_bytes", moved.moved_bytes
        yield "copies_failed", moved.failed
        if self._gpus is not None:
            yield from self._gpus.counters().items()
        for name, count in self._tiers.counters().items():
            yield f"backend_{name}", count
