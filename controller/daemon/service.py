"""The engines' gRPC service: how requests reach the verbs, and how an engine's stream lives.

Owns no decision: parsing is in `wire`, answers are in `verbs`, lives are in `attachments`. Every failure
leaves as a gRPC status whose text names the field and the remedy.
"""

# The generated base class names the methods.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NoReturn, Protocol

import grpc
from grpc import StatusCode

from controller.daemon import wire
from controller.daemon.attachments import Attachment, Attachments, Ending
from controller.daemon.faults import Faults
from controller.daemon.port import Controller
from controller.daemon.readiness import Readiness
from controller.daemon.verbs import INTERNAL_TEXT, Refusal, Reply, Request, Verbs, refused
from controller.requests import InvalidRequest, RequestError
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc


class Unary(Protocol):
    """What we use of a unary call's context."""

    async def abort(self, code: StatusCode, details: str) -> NoReturn: ...


class Stream(Unary, Protocol):
    """What we use of the Attach stream's context. `read` gives something else than a message at the end."""

    async def read(self) -> object: ...
    async def write(self, message: pb.DaemonMessage) -> None: ...


_ENDED: Mapping[Ending, StatusCode] = {
    Ending.SILENT: StatusCode.DEADLINE_EXCEEDED,
    Ending.REPLACED: StatusCode.ABORTED,
    Ending.STOPPING: StatusCode.UNAVAILABLE,
}


class HybridCacheService(pb_grpc.HybridCacheServicer):
    """What engines call."""

    def __init__(
        self,
        verbs: Verbs,
        attachments: Attachments,
        controller: Controller,
        readiness: Readiness,
        faults: Faults,
        *,
        max_in_flight: int,
        heartbeat_interval_s: float,
        registration_timeout_s: float,
        grace_s: float,
        daemon_pid: int,
    ) -> None:
        self._verbs = verbs
        self._attachments = attachments
        self._controller = controller
        self._readiness = readiness
        self._faults = faults
        self._max_in_flight = max_in_flight
        self._heartbeat_interval_s = heartbeat_interval_s
        self._registration_timeout_s = registration_timeout_s
        self._grace_s = grace_s
        self._daemon_pid = daemon_pid

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Unary) -> Reply:
        return await self._unary("lookup_prefix", request, context)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Unary) -> Reply:
        return await self._unary("prefetch", request, context)

    async def WaitPrefetch(self, request: pb.WaitPrefetchRequest, context: Unary) -> Reply:
        return await self._unary("wait_prefetch", request, context)

    async def CancelPrefetch(self, request: pb.CancelPrefetchRequest, context: Unary) -> Reply:
        return await self._unary("cancel_prefetch", request, context)

    async def Load(self, request: pb.LoadRequest, context: Unary) -> Reply:
        return await self._unary("load", request, context)

    async def Backup(self, request: pb.BackupRequest, context: Unary) -> Reply:
        return await self._unary("backup", request, context)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Unary) -> Reply:
        return await self._unary("release_lease", request, context)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Unary) -> Reply:
        return await self._unary("close_session", request, context)

    async def Attach(self, request_iterator: object, context: Stream) -> None:
        """One engine's life."""
        refusal = await self._attach(context)
        if refusal is not None:
            await context.abort(refusal.code, refusal.message)

    async def _unary(self, verb: str, request: Request, context: Unary) -> Reply:
        answer = await self._verbs.answer(verb, request)
        if isinstance(answer, Refusal):
            await context.abort(answer.code, answer.message)
        return answer

    async def _attach(self, context: Stream) -> Refusal | None:
        try:
            self._readiness.check_takes_on()
            async with asyncio.timeout(self._registration_timeout_s):
                first = await context.read()
            if not isinstance(first, pb.EngineMessage):
                return Refusal(StatusCode.INVALID_ARGUMENT, "the stream ended before a registration")
            if first.WhichOneof("body") != "registration":
                raise InvalidRequest("registration: missing; an Attach stream's first message carries it")
            wanted = wire.registration(first.registration)
            attachment = await self._attachments.attach(wanted)
        except RequestError as error:
            return refused(error)
        except TimeoutError:
            text = f"registration: none within {self._registration_timeout_s} s; send it first"
            return Refusal(StatusCode.DEADLINE_EXCEEDED, text)
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught("attach", error)
            return Refusal(StatusCode.INTERNAL, INTERNAL_TEXT)
        session = Session(
            context,
            attachment,
            self._attachments,
            self._verbs,
            max_in_flight=self._max_in_flight,
            grace_s=self._grace_s,
        )
        registered = pb.Registered(
            boot_id=self._controller.boot_id,
            daemon_pid=self._daemon_pid,
            heartbeat_interval_s=self._heartbeat_interval_s,
            layout_fingerprint=wanted.layout.fingerprint(),
        )
        try:
            return await session.run(pb.DaemonMessage(id=first.id, registered=registered))
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught("stream", error)
            return Refusal(StatusCode.INTERNAL, INTERNAL_TEXT)
        finally:
            self._attachments.end(attachment, Ending.LEFT)


class Session:
    """An attached engine's stream: reads messages, answers each as its own task, in whatever order they
    come to an end, and ends when the attachment does."""

    def __init__(
        self,
        context: Stream,
        attachment: Attachment,
        attachments: Attachments,
        verbs: Verbs,
        *,
        max_in_flight: int,
        grace_s: float,
    ) -> None:
        self._context = context
        self._attachment = attachment
        self._attachments = attachments
        self._verbs = verbs
        self._max_in_flight = max_in_flight
        self._grace_s = grace_s
        self._writing = asyncio.Lock()
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self, registered: pb.DaemonMessage) -> Refusal | None:
        """Serve until the engine leaves (None) or its attachment ends for another reason."""
        ended = asyncio.create_task(self._attachment.ended.wait())
        reading = asyncio.create_task(self._read(registered))
        try:
            await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                return None
            if self._attachment.ending is Ending.STOPPING and self._answers:
                await asyncio.wait(self._answers, timeout=self._grace_s)
        finally:
            leftover = [ended, reading, *self._answers]
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)
        why = self._attachment.ending or Ending.LEFT
        return Refusal(_ENDED.get(why, StatusCode.UNAVAILABLE), f"{why.value}; attach again")

    async def _read(self, registered: pb.DaemonMessage) -> None:
        await self._write(registered)
        while isinstance(message := await self._context.read(), pb.EngineMessage):
            self._attachments.heard(self._attachment)
            body = message.WhichOneof("body")
            if body == "heartbeat":
                await self._write(pb.DaemonMessage(id=message.id, heartbeat=pb.Heartbeat()))
            elif body is None or body == "registration":
                what = "no known body" if body is None else "a second registration"
                await self._refuse(message.id, Refusal(StatusCode.INVALID_ARGUMENT, f"body: {what}"))
            elif len(self._answers) >= self._max_in_flight:
                text = f"{self._max_in_flight} requests are unanswered; wait for some of them"
                await self._refuse(message.id, Refusal(StatusCode.RESOURCE_EXHAUSTED, text))
            else:
                answering = asyncio.create_task(self._answer(message, body))
                self._answers.add(answering)
                answering.add_done_callback(self._answers.discard)

    async def _answer(self, message: pb.EngineMessage, body: str) -> None:
        if self._attachment.ending is not None:
            return  # the id may be another attachment's by now
        request: Request = getattr(message, body)
        answer = await self._verbs.answer(body, request, self._attachment.engine_id)
        if isinstance(answer, Refusal):
            await self._refuse(message.id, answer)
            return
        reply = pb.DaemonMessage(id=message.id)
        part: Reply = getattr(reply, body)
        part.SetInParent()
        part.MergeFrom(answer)  # type: ignore[arg-type]  # both are the reply type of `body`
        await self._write(reply)

    async def _refuse(self, message_id: int, refusal: Refusal) -> None:
        code: int = refusal.code.value[0]
        error = pb.Error(code=code, message=refusal.message)
        await self._write(pb.DaemonMessage(id=message_id, error=error))

    async def _write(self, message: pb.DaemonMessage) -> None:
        """One write at a time; a client that does not read holds up only itself."""
        async with self._writing:
            try:
                await self._context.write(message)
            except grpc.aio.BaseError:  # the engine has gone
                self._attachments.end(self._attachment, Ending.LEFT)
