"""The Events service: the event log, as messages, to whoever watches, each at his own pace.

A watcher that does not read is held up by gRPC and finds a gap later; it holds up nobody else. Who a tenant
is, beyond a hash, is told on the Unix socket only.
"""

# The generated base class names the methods.
# ruff: noqa: N802

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NoReturn, Protocol

from grpc import StatusCode

from controller.contents import Contents
from controller.daemon.faults import Faults
from controller.daemon.readiness import Readiness
from controller.daemon.verbs import INTERNAL_TEXT, Refusal, refused
from controller.events import EventLog, Kind, Reason, Record
from controller.requests import InvalidRequest, Refused, RequestError
from hicache.core.words import Tier
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc

PAGES_PER_MESSAGE = 512
_KINDS = {
    Kind.STORED: pb.PlacementEvent.STORED,
    Kind.REMOVED: pb.PlacementEvent.REMOVED,
    Kind.CLEARED: pb.PlacementEvent.CLEARED,
}
_TIERS = {Tier.HOST: pb.PlacementEvent.HOST, Tier.STORAGE: pb.PlacementEvent.STORAGE}


class Watcher(Protocol):
    """What we use of a watching call's context."""

    async def abort(self, code: StatusCode, details: str) -> NoReturn: ...
    async def write(self, message: pb.WatchReply) -> None: ...
    def peer(self) -> str: ...


class EventsService(pb_grpc.EventsServicer):
    """What routers call."""

    def __init__(
        self, log: EventLog | None, contents: Contents, boot_id: str, readiness: Readiness, faults: Faults
    ) -> None:
        self._log = log
        self._contents = contents
        self._boot_id = boot_id
        self._readiness = readiness
        self._faults = faults

    async def Watch(self, request: pb.WatchRequest, context: Watcher) -> None:
        """Until the watcher leaves or the daemon stops."""
        try:
            self._readiness.check()
            if self._log is None:
                raise Refused("events.keep_pages: 0 in the daemon's file; events are off")
            await self._watch(self._log, request, context)
            refusal = Refusal(StatusCode.UNAVAILABLE, "the daemon is stopping; watch again when it is back")
        except RequestError as error:
            refusal = refused(error)
        except Exception as error:  # noqa: BLE001 - last line of defence: counted, logged, in health
            self._faults.caught("watch", error)
            refusal = Refusal(StatusCode.INTERNAL, INTERNAL_TEXT)
        await context.abort(refusal.code, refusal.message)

    async def _watch(self, log: EventLog, request: pb.WatchRequest, context: Watcher) -> None:
        restarted = bool(request.boot_id) and request.boot_id != self._boot_id
        number = self._begin(log, request, restarted)
        trusted = context.peer().startswith("unix:")
        started = pb.WatchStarted(
            boot_id=self._boot_id,
            oldest_sequence=log.oldest,
            next_sequence=log.following,
            restarted=restarted,
        )
        if request.snapshot:  # with the number before anything can happen
            there = [Record(0, move, Reason.SNAPSHOT, "") for move in self._contents.moves()]
        await context.write(pb.WatchReply(started=started))
        if request.snapshot:
            for events in _bundled(event for one in there for event in _events(one, trusted)):
                await context.write(pb.WatchReply(events=events))
            end = pb.WatchSnapshotEnd(next_sequence=number)
            await context.write(pb.WatchReply(snapshot_end=end))
        while await log.grown(number):
            reading = log.read(number, PAGES_PER_MESSAGE)
            if reading.missing:
                lost = reading.missing
                gap = pb.WatchGap(first_sequence=lost.start, next_sequence=lost.stop)
                await context.write(pb.WatchReply(gap=gap))
            events = pb.PlacementEvents(
                events=[
                    event
                    for record, start, stop in reading.parts
                    for event in _events(record, trusted, start, stop)
                ]
            )
            await context.write(pb.WatchReply(events=events))
            number = reading.following

    @staticmethod
    def _begin(log: EventLog, request: pb.WatchRequest, restarted: bool) -> int:
        """The first number that the watcher gets."""
        if request.snapshot or (not request.from_sequence and not restarted):
            return log.following
        if restarted:
            return 1
        if request.from_sequence > log.following:
            raise InvalidRequest(
                f"from_sequence: {request.from_sequence} is not reached, the next is {log.following}; name "
                "the boot_id with it, and ask for a snapshot after a restart"
            )
        return request.from_sequence


def _events(
    record: Record, trusted: bool, start: int = 0, stop: int | None = None
) -> Iterator[pb.PlacementEvent]:
    """A record's pages, one message each."""
    move, about = record.move, record.move.namespace
    tenant = hashlib.sha256(about.salt.encode()).digest() if about.salt else b""
    for i in range(start, len(move.pages) if stop is None else stop):
        yield pb.PlacementEvent(
            sequence=record.first + i if record.first else 0,
            kind=_KINDS[record.kind],
            tier=_TIERS[move.tier],
            component=move.component,
            page=int(move.pages[i]),
            page_hash=move.hashes[i].tobytes(),
            parent_hash=move.parents[i].tobytes(),
            reason=record.reason_of(i).value,
            model=about.model,
            revision=about.revision,
            adapter=about.adapter,
            tenant=tenant,
            salt=about.salt if trusted else "",
            session_id=record.session_id if trusted else "",
        )


def _bundled(events: Iterable[pb.PlacementEvent]) -> Iterator[pb.PlacementEvents]:
    """A message's worth at a time."""
    bundle: list[pb.PlacementEvent] = []
    for event in events:
        bundle.append(event)
        if len(bundle) == PAGES_PER_MESSAGE:
            yield pb.PlacementEvents(events=bundle)
            bundle = []
    if bundle:
        yield pb.PlacementEvents(events=bundle)
