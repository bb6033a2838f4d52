"""Handover of engines' memory: the socket `<socket>.fds`, where a file descriptor waits under a ticket.

A client connects, sends a 16-byte ticket of its own choosing with one descriptor (SCM_RIGHTS), and reads
one byte: `1` accepted, `0` refused. It may repeat that on the same connection. The registration that
names the ticket claims the descriptor; what nobody claims is closed. Maps nothing, trusts nothing but
the peer's uid, and never blocks the loop.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from contextlib import suppress

import structlog

from controller.daemon.wire import TICKET_BYTES

ACCEPTED, REFUSED = b"1", b"0"
TICKET_LIFE_S = 30.0
MAX_WAITING = 256
MAX_CONNECTIONS = 64
PAUSE_S = 0.5
_MAX_FDS = 4
_PEERCRED = struct.Struct("3i")

log = structlog.get_logger("hicache.handoff")


class _Connection:
    """One client's connection: what it has sent of the ticket at hand, and when it must be done."""

    def __init__(self, sock: socket.socket, expiry: asyncio.TimerHandle) -> None:
        self.sock = sock
        self.expiry = expiry
        self.ticket = b""
        self.fds: list[int] = []


class Handoff:
    """Descriptors between their arrival and their claim. All calls on the event loop."""

    def __init__(
        self,
        path: str,
        *,
        ticket_life_s: float = TICKET_LIFE_S,
        max_waiting: int = MAX_WAITING,
        allowed_uids: frozenset[int] | None = None,
    ) -> None:
        self._path = path
        self._ticket_life_s = ticket_life_s
        self._max_waiting = max_waiting
        self._allowed_uids = allowed_uids if allowed_uids is not None else frozenset({0, os.geteuid()})
        self._waiting: dict[bytes, tuple[int, asyncio.TimerHandle]] = {}
        self._connections: dict[int, _Connection] = {}
        self._listener: socket.socket | None = None
        self.accepted = 0
        self.refused = 0
        self.expired = 0

    @property
    def n_waiting(self) -> int:
        """Descriptors that arrived and are not claimed yet."""
        return len(self._waiting)

    @property
    def n_connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Listen. The caller holds the socket's claim, so that a file left here is nobody's."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def claim(self, ticket: bytes) -> int | None:
        """The descriptor waiting under a ticket, now the caller's to close; None when there is none."""
        fd, expiry = self._waiting.pop(ticket, (None, None))
        if expiry is not None:
            expiry.cancel()
        return fd

    def close(self) -> None:
        """Stop listening and close every descriptor that nobody claimed."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        for connection in list(self._connections.values()):
            self._end(connection)
        for fd, expiry in self._waiting.values():
            expiry.cancel()
            os.close(fd)
        self._waiting.clear()

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors, say: trying again at once would only spin
            log.warning("handoff_paused", reason=error.strerror, for_s=PAUSE_S)
            self._pause(self._listener)
            return
        if len(self._connections) >= MAX_CONNECTIONS or not self._may_hand_over(sock):
            self.refused += 1
            sock.close()
            return
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._ticket_life_s, self._end_by_number, sock.fileno())
        self._connections[sock.fileno()] = connection = _Connection(sock, expiry)
        loop.add_reader(sock, self._receive, connection)

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _may_hand_over(self, sock: socket.socket) -> bool:
        _, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid not in self._allowed_uids:
            log.warning("handoff_refused", reason="uid", uid=uid)
            return False
        return True

    def _receive(self, connection: _Connection) -> None:
        wanted = TICKET_BYTES - len(connection.ticket)
        try:
            piece, fds, truncated = _receive_fds(connection.sock, wanted)
        except BlockingIOError:
            return
        except OSError:
            self._end(connection)
            return
        connection.fds.extend(fds)
        if not piece or truncated or len(connection.fds) > 1:
            self._refuse(connection, "end" if not piece else "more than one descriptor")
            return
        connection.ticket += piece
        if len(connection.ticket) == TICKET_BYTES:
            self._take(connection)

    def _take(self, connection: _Connection) -> None:
        """A whole ticket has arrived: keep its descriptor, or refuse it."""
        if not connection.fds:
            self._refuse(connection, "no descriptor")
        elif connection.ticket in self._waiting:
            self._refuse(connection, "ticket in use")
        elif len(self._waiting) >= self._max_waiting:
            self._refuse(connection, "too many unclaimed")
        elif self._answer(connection, ACCEPTED):
            loop = asyncio.get_running_loop()
            ticket, fd = connection.ticket, connection.fds.pop()
            self._waiting[ticket] = (fd, loop.call_later(self._ticket_life_s, self._expire, ticket))
            self.accepted += 1
            connection.ticket = b""
            connection.expiry.cancel()
            connection.expiry = loop.call_later(
                self._ticket_life_s, self._end_by_number, connection.sock.fileno()
            )

    def _answer(self, connection: _Connection, answer: bytes) -> bool:
        try:
            connection.sock.send(answer)
        except OSError:
            self._end(connection)
            return False
        return True

    def _refuse(self, connection: _Connection, reason: str) -> None:
        if reason != "end":
            self.refused += 1
            log.warning("handoff_refused", reason=reason)
            with suppress(OSError):
                connection.sock.send(REFUSED)
        self._end(connection)

    def _expire(self, ticket: bytes) -> None:
        fd, _ = self._waiting.pop(ticket)
        os.close(fd)
        self.expired += 1
        log.warning("handoff_expired", after_s=self._ticket_life_s)

    def _end_by_number(self, number: int) -> None:
        self._end(self._connections[number])

    def _end(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        connection.expiry.cancel()
        asyncio.get_running_loop().remove_reader(connection.sock)
        connection.sock.close()
        for fd in connection.fds:
            os.close(fd)
        connection.fds.clear()


def _receive_fds(sock: socket.socket, most_bytes: int) -> tuple[bytes, list[int], bool]:
    """Bytes, descriptors that no child process inherits, and whether more were sent than fit.
    (`socket.recv_fds` drops its flags argument in Python 3.11.)"""
    fds = array.array("i")
    piece, ancillary, flags, _ = sock.recvmsg(
        most_bytes, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return piece, list(fds), bool(flags & socket.MSG_CTRUNC)
