"""Prefetching: one prefetch of the daemon, followed from the engine's side.

Asking for one costs the engine nothing; only `wait` waits, to its deadline. Never decides a policy.
"""

from __future__ import annotations

import time

from hicache.client.connection import Call, Connection
from hicache.client.messages import Progress
from hicache.client.wire import progress_from
from proto.v1 import hicache_pb2 as pb


class Prefetching:
    """A prefetch under way. Made by `Client.prefetch`; end it with `wait` or `cancel`."""

    def __init__(self, connection: Connection, started: Call, before: Call) -> None:
        """`before`: a lookup that was sent just ahead of the prefetch."""
        self._connection = connection
        self.started = started
        """Ends when the daemon has said whether it has begun."""
        self._before = before

    @property
    def boundary_before(self) -> int | None:
        """What L1 and L2 could serve (pages) just before the prefetch began; None when it is not known."""
        reply = self._before.reply
        return reply.lookup_prefix.boundary if reply is not None and reply.HasField("lookup_prefix") else None

    def wait(self, timeout_s: float) -> Progress | None:
        """How it stands when the daemon, by the prefetch's policy, has waited enough; None when the
        daemon has not answered within `timeout_s`, or cannot (then it is cancelled)."""
        deadline = time.monotonic() + timeout_s
        if not self.started.wait(timeout_s):
            self.cancel()
            return None
        asked = self.ask()
        if asked is None:
            return None
        if not asked.wait(deadline - time.monotonic()):
            self.cancel()
            return None
        return progress_of(asked)

    def ask(self) -> Call | None:
        """Ask how it stands, once it is known to have begun; None when it has not, or the stream ended."""
        reply = self.started.reply
        if reply is None or not reply.HasField("prefetch"):
            return None
        return self._connection.send(
            pb.EngineMessage(wait_prefetch=pb.WaitPrefetchRequest(prefetch_id=reply.prefetch.prefetch_id))
        )

    def cancel(self) -> None:
        """Stop it as soon as it is known to have begun. Does not wait."""
        self.started.then(self._cancel_started)

    def _cancel_started(self, reply: pb.DaemonMessage | None) -> None:
        if reply is not None and reply.HasField("prefetch"):
            self._connection.send(
                pb.EngineMessage(
                    cancel_prefetch=pb.CancelPrefetchRequest(prefetch_id=reply.prefetch.prefetch_id)
                )
            )


def progress_of(asked: Call) -> Progress | None:
    """The answer to `Prefetching.ask`; None when there is none, or it is a refusal."""
    answer = asked.reply
    if answer is None or not answer.HasField("wait_prefetch"):
        return None
    return progress_from(answer.wait_prefetch)
