"""Bytes to and from one server, each call within a deadline.

Owns the socket. Plain sockets block in the kernel with its own timeouts, so that one system call moves a
whole body; TLS goes through Python's ssl. Knows nothing of the protocol; every failure is Lost or Late,
after which the stream is of no use.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from storage_backends.redis.address import Address
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import Late, Lost

Chunk: TypeAlias = bytes | memoryview
Target: TypeAlias = tuple[int, str | tuple[str, int]]
"""A socket family and where to connect to in it."""

_LOOPBACK_SEND_BYTES, _UNIX_SEND_BYTES = 128 << 10, 512 << 10
_MOST_CHUNKS = 1024
"""IOV_MAX: what one sendmsg takes."""


class Stream(Protocol):
    def send(self, chunks: Sequence[Chunk], deadline: Deadline) -> None:
        """All of them, in order."""

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        """At least one byte; how many."""

    def fill(self, into: memoryview, deadline: Deadline) -> None:
        """Every byte of it."""

    def is_quiet(self) -> bool:
        """Whether it is open and nothing has come unasked."""

    def close(self) -> None: ...


def open_stream(address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> Stream:
    """Connect. Raises Lost or Late."""
    plain = _connected(address, deadline)
    try:
        if tls is None:
            return PlainStream(plain, address)
        plain.settimeout(deadline.remaining_s(address))
        wrapped = tls.wrap_socket(plain, server_hostname=address.host)
        return TlsStream(wrapped, address)
    except TimeoutError as error:
        plain.close()
        raise deadline.late(address) from error
    except OSError as error:
        plain.close()
        raise Lost(f"{address}: TLS failed: {error}; check `tls_ca`, `tls_cert` and `tls_key`") from error
    except BaseException:
        plain.close()
        raise


class PlainStream:
    """TCP or a Unix socket. Timeouts are the kernel's own (SO_RCVTIMEO), because Python's cost a poll before
    each call and forbid MSG_WAITALL."""

    def __init__(self, connected: socket.socket, address: Address) -> None:
        self._socket = connected
        self._address = address
        connected.setblocking(True)

    def send(self, chunks: Sequence[Chunk], deadline: Deadline) -> None:
        for start in range(0, len(chunks), _MOST_CHUNKS):
            left = chunks[start : start + _MOST_CHUNKS]
            while left:
                self._limit(socket.SO_SNDTIMEO, deadline)
                try:
                    sent = self._socket.sendmsg(left)
                except OSError as error:
                    raise _translated(error, self._address, deadline) from error
                left = _unsent(left, sent)

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        return self._receive(into, deadline, 0)

    def fill(self, into: memoryview, deadline: Deadline) -> None:
        done = 0
        while done < len(into):
            done += self._receive(into[done:], deadline, socket.MSG_WAITALL)

    def is_quiet(self) -> bool:
        return _is_quiet(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, into: memoryview, deadline: Deadline, flags: int) -> int:
        self._limit(socket.SO_RCVTIMEO, deadline)
        try:
            n = self._socket.recv_into(into, 0, flags)
        except OSError as error:
            raise _translated(error, self._address, deadline) from error
        if n == 0:
            raise Lost(f"{self._address} closed the connection")
        return n

    def _limit(self, option: int, deadline: Deadline) -> None:
        remaining_us = max(1000, int(deadline.remaining_s(self._address) * 1e6))
        packed = struct.pack("@ll", remaining_us // 1_000_000, remaining_us % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, packed)


class TlsStream:
    """TLS over TCP."""

    def __init__(self, wrapped: ssl.SSLSocket, address: Address) -> None:
        self._socket = wrapped
        self._address = address

    def send(self, chunks: Sequence[Chunk], deadline: Deadline) -> None:
        for chunk in chunks:
            self._socket.settimeout(deadline.remaining_s(self._address))
            try:
                self._socket.sendall(chunk)
            except OSError as error:
                raise _translated(error, self._address, deadline) from error

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        self._socket.settimeout(deadline.remaining_s(self._address))
        try:
            n = self._socket.recv_into(into)
        except OSError as error:
            raise _translated(error, self._address, deadline) from error
        if n == 0:
            raise Lost(f"{self._address} closed the connection")
        return n

    def fill(self, into: memoryview, deadline: Deadline) -> None:
        done = 0
        while done < len(into):
            done += self.receive(into[done:], deadline)

    def is_quiet(self) -> bool:
        return self._socket.pending() == 0 and _is_quiet(self._socket)

    def close(self) -> None:
        self._socket.close()


def _unsent(chunks: Sequence[Chunk], sent: int) -> list[Chunk]:
    for place, chunk in enumerate(chunks):
        nbytes = len(chunk)
        if sent < nbytes:
            return [memoryview(chunk)[sent:], *chunks[place + 1 :]]
        sent -= nbytes
    return []


def _is_quiet(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return not poll.poll(0)


def _translated(error: OSError, address: Address, deadline: Deadline) -> Lost | Late:
    if isinstance(error, BlockingIOError | TimeoutError):
        return deadline.late(address)
    return Lost(f"{address}: {error.strerror or error}")


# ---- connecting ---------------------------------------------------------------------------------------


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    problem: OSError | None = None
    for family, target in _targets(address, deadline):
        candidate = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            candidate.settimeout(deadline.remaining_s(address))
            candidate.connect(target)
            _tune(candidate)
            return candidate
        except OSError as error:
            candidate.close()
            problem = error
        except Late:
            candidate.close()
            raise
    if isinstance(problem, TimeoutError):
        raise Late(f"{address} cannot be reached in time: check the address, the server and the network")
    reason = (problem.strerror or str(problem)) if problem else "no such host"
    raise Lost(f"{address} cannot be reached ({reason}): check the address, and that the server runs")


def _tune(connected: socket.socket) -> None:
    """How much may queue between us and the server. Over loopback the kernel lets megabytes queue up, which
    leave the processor's cache before they are taken: a short queue made writes 1.6 times as fast; over a
    network it would cost speed. A Unix socket's 208 KiB are a little short: writes gained 5 %."""
    if connected.family == socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if connected.getsockname()[0] == connected.getpeername()[0]:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)


def _targets(address: Address, deadline: Deadline) -> list[Target]:
    """Family and socket address of each place to try, IPv4 first."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, address.host)
        except OSError:
            continue
        return [(family, (address.host, address.port))]
    return _looked_up(address, deadline)


def _looked_up(address: Address, deadline: Deadline) -> list[Target]:
    """Ask the system's resolver, which knows no deadline, in a thread of its own."""
    found: list[Target] = []
    problem: list[str] = []

    def look() -> None:
        try:
            answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            found.extend((family, (str(place[0]), address.port)) for family, _, _, _, place in answers)
        except OSError as error:
            problem.append(error.strerror or str(error))

    looking = threading.Thread(target=look, name="resolve", daemon=True)
    looking.start()
    looking.join(deadline.remaining_s(address))
    if looking.is_alive():
        raise Late(f"the name {address.host} was not resolved in time: check DNS")
    if problem:
        raise Lost(f"{address}: {problem[0]}: check the host name")
    return sorted(dict.fromkeys(found), key=lambda place: place[0])
