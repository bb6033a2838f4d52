"""The operators' gRPC service: status, and what changes a running daemon.

What changes something is accepted on the Unix socket only, whose directory is private; TCP may look. Every
failure leaves as a gRPC status whose text names the field and the remedy. Decides nothing else.
"""

# The generated base class names the methods.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

import structlog
from grpc import StatusCode

from controller.daemon import admin_wire, wire
from controller.daemon.faults import Faults
from controller.daemon.port import Operated
from controller.daemon.readiness import Readiness
from controller.daemon.tiers import StorageTiers
from controller.daemon.verbs import INTERNAL_TEXT, Refusal, refused
from controller.daemon.wire import DaemonStatus
from controller.requests import RequestError
from controller.storage import TierPolicy
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc

T = TypeVar("T")
LOOK_AGAIN_S = 0.05
"""How often a drain looks whether what runs is over."""
log = structlog.get_logger("hicache.admin")


class Call(Protocol):
    """What we use of a call's context."""

    async def abort(self, code: StatusCode, details: str) -> NoReturn: ...
    def peer(self) -> str: ...


class AdminService(pb_grpc.AdminServicer):
    """What operators call."""

    def __init__(
        self,
        snapshot: Callable[[], DaemonStatus],
        controller: Operated,
        tiers: StorageTiers,
        readiness: Readiness,
        faults: Faults,
    ) -> None:
        self._snapshot = snapshot
        self._controller = controller
        self._tiers = tiers
        self._readiness = readiness
        self._faults = faults

    async def Status(self, request: pb.StatusRequest, context: Call) -> pb.StatusReply:
        async def look() -> pb.StatusReply:
            return wire.status_reply(self._snapshot())

        return await self._answer("status", look(), context)

    async def Flush(self, request: pb.FlushRequest, context: Call) -> pb.FlushReply:
        return await self._change("flush", lambda: self._flush(request), context)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Call) -> pb.PinPrefixReply:
        return await self._change("pin_prefix", lambda: self._pin(request), context)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Call) -> pb.UnpinPrefixReply:
        return await self._change("unpin_prefix", lambda: self._unpin(request), context)

    async def Drain(self, request: pb.DrainRequest, context: Call) -> pb.DrainReply:
        return await self._change("drain", lambda: self._drain(request), context)

    async def AttachStorage(self, request: pb.AttachStorageRequest, context: Call) -> pb.AttachStorageReply:
        return await self._change("attach_storage", lambda: self._attach_storage(request), context)

    async def UpdateStorage(self, request: pb.UpdateStorageRequest, context: Call) -> pb.UpdateStorageReply:
        return await self._change("update_storage", lambda: self._update_storage(request), context)

    async def DetachStorage(self, request: pb.DetachStorageRequest, context: Call) -> pb.DetachStorageReply:
        return await self._change("detach_storage", lambda: self._detach_storage(request), context)

    # ---- inside

    async def _flush(self, request: pb.FlushRequest) -> pb.FlushReply:
        if request.preserve:
            timeout_s = admin_wire.seconds(request.timeout_s, "timeout_s", default_s=60.0)
            dropped_pages, kept_pages = await self._controller.preserving.flush(timeout_s)
        else:
            dropped_pages, kept_pages = self._controller.flush()
        log.info("flushed", dropped_pages=dropped_pages, kept_pages=kept_pages)
        return pb.FlushReply(dropped_pages=dropped_pages, kept_pages=kept_pages)

    async def _pin(self, request: pb.PinPrefixRequest) -> pb.PinPrefixReply:
        kept = self._controller.retention.pin(admin_wire.retain(request))
        log.info("pinned", pin=kept.pin_id, kept_pages=kept.kept_pages, asked_pages=kept.asked_pages)
        return pb.PinPrefixReply(retained=pb.Retained(**vars(kept)))

    async def _unpin(self, request: pb.UnpinPrefixRequest) -> pb.UnpinPrefixReply:
        self._controller.retention.unpin(wire.required(request.pin_id, "pin_id"))
        return pb.UnpinPrefixReply()

    async def _drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        timeout_s = admin_wire.seconds(request.timeout_s, "timeout_s", default_s=30.0)
        if request.resume:
            self._readiness.resume()
        else:
            self._readiness.drain()
        log.info("resumed" if request.resume else "draining")
        ends_s = asyncio.get_running_loop().time() + (0.0 if request.resume else timeout_s)
        while running := admin_wire.running(self._controller.status()):
            if asyncio.get_running_loop().time() >= ends_s:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        return pb.DrainReply(idle=not running, running=running)

    async def _attach_storage(self, request: pb.AttachStorageRequest) -> pb.AttachStorageReply:
        entry = admin_wire.tier_entry(request)
        problem = await self._tiers.attach(entry)
        return pb.AttachStorageReply(opened=problem is not None, name=entry.name, problem=problem or "")

    async def _update_storage(self, request: pb.UpdateStorageRequest) -> pb.UpdateStorageReply:
        policy = TierPolicy(read=request.read, write=request.write)
        self._tiers.update(wire.required(request.name, "name"), policy)
        return pb.UpdateStorageReply()

    async def _detach_storage(self, request: pb.DetachStorageRequest) -> pb.DetachStorageReply:
        name = wire.required(request.name, "name")
        timeout_s = admin_wire.seconds(request.timeout_s, "timeout_s", default_s=10.0)
        stopped = await self._tiers.detach(name, force=request.force, timeout_s=timeout_s)
        return pb.DetachStorageReply(stopped=stopped)

    async def _change(self, where: str, work: Callable[[], Awaitable[T]], context: Call) -> T:
        """Answer a call that changes something."""
        if not context.peer().startswith("unix:"):
            text = f"{where}: accepted on the Unix socket only; ask there, as the daemon's own user"
            await context.abort(StatusCode.PERMISSION_DENIED, text)

        async def checked() -> T:
            self._readiness.check()
            return await work()

        return await self._answer(where, checked(), context)

    async def _answer(self, where: str, work: Awaitable[T], context: Call) -> T:
        try:
            return await work
        except RequestError as error:
            refusal = refused(error)
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught(where, error)
            refusal = Refusal(StatusCode.INTERNAL, INTERNAL_TEXT)
        return await context.abort(refusal.code, refusal.message)
