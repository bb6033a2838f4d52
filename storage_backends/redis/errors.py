"""What can go wrong between us and a server, and what a person can do about it.

Owns the exceptions of this package, which none leave it: the backend turns them into outcomes or into one
StorageError. Never decides whether something is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass


class RedisTrouble(Exception):  # noqa: N818 - a trouble, of which some are no errors of ours
    """A server could not be asked, or did not answer as it should."""


class Lost(RedisTrouble):
    """There is no connection, or it ended: refused, reset, closed. Another try may go elsewhere."""


class Late(RedisTrouble):
    """The deadline passed. Whoever waited gives up its connection with it."""


class Garbled(RedisTrouble):
    """What came is no Redis protocol."""


class Refused(RedisTrouble):
    """The server answered the opening of a connection with an error."""

    def __init__(self, address: str, error: ErrorReply) -> None:
        super().__init__(f"{address}: {error.explained()}")
        self.error = error


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error that a server answered to one command. A value, because its neighbours' answers stand."""

    text: str

    @property
    def code(self) -> str:
        """The first word: ERR, OOM, MOVED, ..."""
        return self.text.partition(" ")[0]

    def explained(self) -> str:
        """The server's words and, where there is one, the remedy."""
        remedy = _REMEDIES.get(self.code)
        return f"{self.text}: {remedy}" if remedy else self.text


_REMEDIES = {
    "NOAUTH": "it wants a password: set `username` and `password_env` or `password_file`",
    "WRONGPASS": "correct `username` or what `password_env` or `password_file` give",
    "NOPERM": "grant this user the commands and keys that docs/backends.md lists",
    "LOADING": "it is reading its data from disk; it serves when that is done",
    "MISCONF": "it cannot save its data to disk and refuses writes: free its disk, or switch saving off",
    "OOM": "it is at its maxmemory: raise it, set policy allkeys-lru, or set `ttl_s` for volatile-lru",
    "READONLY": "it is a replica: name the primary, or use `mode: sentinel` or `mode: cluster`",
    "MOVED": "it is part of a cluster: set `mode: cluster`",
    "CLUSTERDOWN": "the cluster does not serve these keys now: see `CLUSTER INFO` for the failed nodes",
    "MASTERDOWN": "it is a replica without its primary: fail over, or name the primary",
}
