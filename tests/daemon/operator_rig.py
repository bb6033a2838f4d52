"""The operator's side in this process: real gRPC over a Unix socket and TCP, in front of a real controller
with real storage workers, and a tagged engine beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from controller.controller import HybridCacheController
from controller.daemon.admin import AdminService
from controller.daemon.events import EventsService
from controller.daemon.faults import Faults
from controller.daemon.readiness import Readiness
from controller.daemon.tiers import StorageTiers
from controller.daemon.wire import DaemonStatus
from controller.memory.slab import HostSlab
from controller.settings import ControllerSettings
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import TransferScheduler
from proto.v1 import hicache_pb2_grpc as pb_grpc
from tests.controller.rig import MIB, TaggedEngine


class OperatorRig:
    """A daemon's inside, and an operator's connection to it."""

    def __init__(self, controller: HybridCacheController, slab: HostSlab) -> None:
        self.controller = controller
        self.tiers = StorageTiers(controller.storage, slab)
        self.readiness = Readiness()
        self.readiness.serve()
        self.faults = Faults()
        self.server = grpc.aio.server()

    async def start(self, socket_path: str) -> None:
        admin = AdminService(self.snapshot, self.controller, self.tiers, self.readiness, self.faults)
        pb_grpc.add_AdminServicer_to_server(admin, self.server)
        events = EventsService(
            self.controller.events,
            self.controller.contents,
            self.controller.boot_id,
            self.readiness,
            self.faults,
        )
        pb_grpc.add_EventsServicer_to_server(events, self.server)
        self.server.add_insecure_port(f"unix:{socket_path}")
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"unix:{socket_path}")
        self.tcp_channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.admin = pb_grpc.AdminStub(self.channel)
        self.events = pb_grpc.EventsStub(self.channel)
        self.events_by_tcp = pb_grpc.EventsStub(self.tcp_channel)
        self.admin_by_tcp = pb_grpc.AdminStub(self.tcp_channel)

    def snapshot(self) -> DaemonStatus:
        status = self.controller.status()
        counters = {**status.counters, **{f"backend_{k}": v for k, v in self.tiers.counters().items()}}
        return DaemonStatus(
            "0", self.controller.boot_id, 1.0, self.readiness.ready, "", status.problems, counters, status
        )

    def engine(self, engine_id: str = "engine") -> TaggedEngine:
        return TaggedEngine(self.controller, engine_id)

    async def stop(self) -> None:
        await self.channel.close()
        await self.tcp_channel.close()
        await self.server.stop(0)
        violations = self.controller.audit()
        await self.controller.stop(5.0)
        await self.tiers.stop()
        assert violations == []
        assert self.faults.count == 0


@asynccontextmanager
async def operator_rig(
    socket_path: str, *, capacity_bytes: int = 4 * MIB, **settings: object
) -> AsyncIterator[OperatorRig]:
    slab = HostSlab(capacity_bytes)
    scheduler = TransferScheduler(CpuCopyEngine(), threads=2)
    controller = HybridCacheController(ControllerSettings(**settings), slab, scheduler)
    await controller.start()
    rig = OperatorRig(controller, slab)
    await rig.start(socket_path)
    try:
        yield rig
    finally:
        await rig.stop()
        scheduler.close()
        slab.close()
