"""One Attach stream: messages out in order, answers matched to the calls that wait for them.

Owns the calls in flight and ends every one of them, answered or not. Never blocks a caller: sending
queues, and only `Call.wait` waits, to its deadline.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator

from hicache.client.daemon_process import DaemonProcess
from proto.v1 import hicache_pb2 as pb

_DEFAULT_HEARTBEAT_S = 1.0


class Call:
    """One message that awaits its answer. It ends once: with the daemon's answer, or with None when the
    stream ended first."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._ended = False
        self._reply: pb.DaemonMessage | None = None
        self._then: list[Callable[[pb.DaemonMessage | None], None]] = []

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def reply(self) -> pb.DaemonMessage | None:
        """The answer; None before it is there and when it will never come."""
        return self._reply

    def wait(self, timeout_s: float) -> bool:
        """Whether the call ended within `timeout_s`."""
        if self._ended:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, max(0.0, timeout_s))

    def then(self, act: Callable[[pb.DaemonMessage | None], None]) -> None:
        """Run `act` with the answer when the call ends (now, if it has): on the thread that ends it."""
        with self._changed:
            if not self._ended:
                self._then.append(act)
                return
        act(self._reply)

    def end(self, reply: pb.DaemonMessage | None) -> None:
        with self._changed:
            self._reply, self._ended = reply, True
            acts, self._then = self._then, []
            self._changed.notify_all()
        for act in acts:
            act(reply)


class Connection:
    """The engine's end of one Attach stream, from its registration to its end."""

    def __init__(
        self, registration: pb.Registration, daemon: DaemonProcess, *, attachment: int, silence_s: float
    ) -> None:
        """`attachment`: its number among this engine's. `silence_s`: longest time without a word from the
        daemon before `expired` says so."""
        self.daemon = daemon
        self.attachment = attachment
        self.serial = 0
        """Which of the daemon's accepted attachments this is; 0 before it is accepted."""
        self._silence_s = silence_s
        self._heartbeat_s = _DEFAULT_HEARTBEAT_S
        self._heard = time.monotonic()
        self._quiet = False
        self._ids = itertools.count(1)
        self._outbox: queue.SimpleQueue[pb.EngineMessage | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._pending: dict[int, Call] = {}
        self._closed = False
        self._outbox.put(pb.EngineMessage(id=0, registration=registration))

    def accepted(self, registered: pb.Registered) -> None:
        """The daemon has answered the registration."""
        self.serial = self.daemon.accepted
        if registered.heartbeat_interval_s > 0:
            self._heartbeat_s = registered.heartbeat_interval_s / 2

    @property
    def superseded(self) -> bool:
        """Whether the same process has accepted a later attachment: it drained this one first."""
        return 0 < self.serial < self.daemon.accepted

    @property
    def quiet(self) -> bool:
        """Whether the daemon let a deadline pass and has said nothing since: asking again would only
        cost the engine another deadline."""
        return self._quiet

    def late(self) -> None:
        """A caller's deadline has passed without an answer."""
        self._quiet = True

    def send(self, message: pb.EngineMessage) -> Call | None:
        """Queue a message under an id of ours; None when the stream has ended, and nothing was sent."""
        call = Call()
        with self._mutex:
            if self._closed:
                return None
            message.id = next(self._ids)
            self._pending[message.id] = call
            self._outbox.put(message)
        return call

    def outgoing(self, expired: Callable[[], None]) -> Iterator[pb.EngineMessage]:
        """The stream's requests until it is closed; a heartbeat whenever there was nothing else to say.
        Calls `expired` when the daemon has been silent for too long."""
        while True:
            try:
                message = self._outbox.get(timeout=self._heartbeat_s)
            except queue.Empty:
                message = pb.EngineMessage(id=0, heartbeat=pb.Heartbeat())
            if message is None:
                return
            if time.monotonic() - self._heard > self._silence_s:
                expired()
                return
            yield message

    def deliver(self, message: pb.DaemonMessage) -> None:
        """Give an answer to the call that waits for it."""
        self._heard = time.monotonic()
        self._quiet = False
        with self._mutex:
            call = self._pending.pop(message.id, None)
        if call is not None:
            call.end(message)

    def close(self) -> None:
        """End every call without an answer; later sends are refused. A second time does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            pending, self._pending = self._pending, {}
            self._outbox.put(None)
        for call in pending.values():
            call.end(None)
