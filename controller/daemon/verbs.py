"""The verbs, once: unary calls and the Attach stream both end here.

Turns one wire request into one wire reply, or into a Refusal with its gRPC code; texts of unexpected
errors stay in the log. Knows neither streams nor contexts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from grpc import StatusCode

from controller.daemon import wire
from controller.daemon.attachments import Attachments
from controller.daemon.faults import Faults
from controller.daemon.metrics import RequestMetrics
from controller.daemon.port import Controller, NotReady
from controller.daemon.readiness import Readiness
from controller.requests import (
    Busy,
    Gone,
    Incomplete,
    InvalidRequest,
    Refused,
    RequestError,
    TransferFailed,
    UnknownEngine,
)
from proto.v1 import hicache_pb2 as pb

Request: TypeAlias = (
    pb.LookupPrefixRequest
    | pb.PrefetchRequest
    | pb.WaitPrefetchRequest
    | pb.CancelPrefetchRequest
    | pb.LoadRequest
    | pb.BackupRequest
    | pb.ReleaseLeaseRequest
    | pb.CloseSessionRequest
)
Reply: TypeAlias = (
    pb.LookupPrefixReply
    | pb.PrefetchReply
    | pb.PrefetchProgress
    | pb.LoadReply
    | pb.BackupReply
    | pb.ReleaseLeaseReply
    | pb.CloseSessionReply
)

CODES: Mapping[type[RequestError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    UnknownEngine: StatusCode.FAILED_PRECONDITION,
    Gone: StatusCode.NOT_FOUND,
    Incomplete: StatusCode.UNAVAILABLE,
    Busy: StatusCode.RESOURCE_EXHAUSTED,
    Refused: StatusCode.FAILED_PRECONDITION,
    TransferFailed: StatusCode.ABORTED,
    NotReady: StatusCode.UNAVAILABLE,
}
INTERNAL_TEXT = "internal error; the daemon's log has the trace"


@dataclass(frozen=True)
class Refusal:
    """Why there is no reply."""

    code: StatusCode
    message: str


class Verbs:
    """What an engine can ask."""

    def __init__(
        self,
        controller: Controller,
        attachments: Attachments,
        readiness: Readiness,
        faults: Faults,
        metrics: RequestMetrics,
    ) -> None:
        self._controller = controller
        self._attachments = attachments
        self._readiness = readiness
        self._faults = faults
        self._metrics = metrics

    async def answer(self, verb: str, request: Request, stream_engine: str = "") -> Reply | Refusal:
        """Answer a request. On a stream the engine is the stream's; a unary call names its own.

        Cancelling stops the waiting; a load or backup under way goes on to its end."""
        begun_s = time.perf_counter()
        code = StatusCode.CANCELLED
        try:
            reply = await self._reply(request, stream_engine)
            code = StatusCode.OK
            return reply
        except RequestError as error:
            refusal = refused(error)
            code = refusal.code
            return refusal
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught(verb, error)
            code = StatusCode.INTERNAL
            return Refusal(code, INTERNAL_TEXT)
        finally:
            self._metrics.observe(verb, code, time.perf_counter() - begun_s)

    async def _reply(self, request: Request, stream_engine: str) -> Reply:  # noqa: PLR0911 - one a verb
        self._readiness.check()
        controller = self._controller
        engine_id = self._engine(request, stream_engine)
        match request:
            case pb.LookupPrefixRequest():
                return wire.found_reply(controller.lookup(wire.lookup(request, engine_id)))
            case pb.LoadRequest():
                load = controller.load(wire.load(request, engine_id))
                return pb.LoadReply(nbytes=await self._attachments.to_the_end(engine_id, load))
            case pb.BackupRequest():
                backup = controller.backup(wire.backup(request, engine_id))
                return wire.backup_reply(await self._attachments.to_the_end(engine_id, backup))
            case pb.PrefetchRequest():
                self._readiness.check_takes_on()
                return pb.PrefetchReply(prefetch_id=controller.prefetch(wire.prefetch(request, engine_id)))
            case pb.WaitPrefetchRequest():
                prefetch_id = wire.required(request.prefetch_id, "prefetch_id")
                return wire.progress_reply(await controller.wait_prefetch(engine_id, prefetch_id))
            case pb.CancelPrefetchRequest():
                prefetch_id = wire.required(request.prefetch_id, "prefetch_id")
                stopping = controller.cancel_prefetch(engine_id, prefetch_id)
                return wire.progress_reply(await self._attachments.to_the_end(engine_id, stopping))
            case pb.ReleaseLeaseRequest():
                controller.release(engine_id, wire.required(request.lease_id, "lease_id"))
                return pb.ReleaseLeaseReply()
            case pb.CloseSessionRequest():
                closed = controller.close_session(wire.close_session(request, engine_id))
                return pb.CloseSessionReply(closed=closed)

    def _engine(self, request: Request, stream_engine: str) -> str:
        """Who asks, in this boot of the daemon."""
        match request:
            case pb.LookupPrefixRequest() | pb.PrefetchRequest() | pb.BackupRequest():
                engine_id, boot_id = request.prompt.engine_id, request.prompt.boot_id
            case _:
                engine_id, boot_id = request.engine_id, request.boot_id
        if boot_id and boot_id != self._controller.boot_id:
            raise UnknownEngine(
                f"boot_id: {boot_id!r} is not this boot of the daemon ({self._controller.boot_id!r}); "
                "attach again"
            )
        if not stream_engine:
            return wire.required(engine_id, "engine_id")
        if engine_id and engine_id != stream_engine:
            raise InvalidRequest(
                f"engine_id: {engine_id!r} on the stream of {stream_engine!r}; leave it empty there"
            )
        return stream_engine


def refused(error: RequestError) -> Refusal:
    """A request error with its gRPC code."""
    return Refusal(CODES.get(type(error), StatusCode.UNKNOWN), str(error))
