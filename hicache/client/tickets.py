"""Tickets: how a transfer ended, and whether its slots may be used again.

The two are different questions. A daemon that froze in the middle of a load may go on writing when it
wakes up, and one that reads a backup late would publish what the slots hold by then. So slots are free
again only when a ticket is *settled*. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

from hicache.client.connection import Call, Connection
from hicache.client.messages import BackupOutcome
from hicache.client.wire import backup_outcomes_from


class Outcome(Enum):
    OK = auto()
    """The daemon did all of it."""
    FAILED = auto()
    """Nothing of it may be used."""
    PENDING = auto()
    """Not answered yet."""


class Ticket:
    """One load or backup that was asked for. Made by `Client`; any thread may ask it."""

    def __init__(self, call: Call | None, connection: Connection | None) -> None:
        """Both None: it was never sent."""
        self._call = call
        self._connection = connection

    @property
    def outcome(self) -> Outcome:
        if self._call is not None and not self._call.ended:
            return Outcome.PENDING
        reply = None if self._call is None else self._call.reply
        return Outcome.FAILED if reply is None or reply.HasField("error") else Outcome.OK

    @property
    def reason(self) -> str:
        """Why it failed; empty otherwise."""
        if self.outcome is not Outcome.FAILED:
            return ""
        if self._call is None:
            return "the daemon is away"
        return "the connection was lost" if self._call.reply is None else self._call.reply.error.message

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.outcome is not Outcome.PENDING

    def wait(self, timeout_s: float) -> Outcome:
        """The outcome, waited for at most `timeout_s`. A deadline that passes marks the daemon as quiet:
        it is asked nothing more until it says something."""
        if self._call is not None and not self._call.wait(timeout_s) and self._connection is not None:
            self._connection.late()
        return self.outcome

    def then(self, act: Callable[[], None]) -> None:
        """Run `act` once when the outcome is known (now, if it is), on the client's thread: do not wait
        in it."""
        if self._call is None:
            act()
        else:
            self._call.then(lambda reply: act())

    def settled(self) -> bool:
        """Whether no byte of the transfer can move any more: it was never sent, or it was answered, or
        the daemon's process is dead, or the same process has accepted a new attachment of this engine
        (before which it ends all transfers of the old one)."""
        if self._call is None or self._connection is None or self._call.reply is not None:
            return True
        return self._connection.superseded or self._connection.daemon.dead()

    @property
    def backup_outcomes(self) -> Mapping[str, BackupOutcome]:
        """Per component, what a backup did; empty unless it ended well."""
        reply = None if self._call is None else self._call.reply
        if reply is None or not reply.HasField("backup"):
            return {}
        return backup_outcomes_from(reply.backup)
