"""Connections to one server, lent out one at a time.

Owns how many there are, and that only clean ones come back. After trouble it forgets all idle ones, and
after a server that could not even be connected to, it is left alone for a moment, so that callers fail at
once instead of each waiting. Knows nothing of keys.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from storage_backends.redis.address import Address
from storage_backends.redis.connection import Connection
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import Garbled, Late, Lost

Connect: TypeAlias = Callable[[Address, Deadline], Connection]

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 0.8
"""How long a server that could not be connected to in time is left alone; doubles up to the longest."""


class Node:
    """One server. All calls may come from several threads at once."""

    def __init__(self, address: Address, connect: Connect, n_connections: int) -> None:
        self.address = address
        self._pause = Pause()
        self.bulk = ConnectionPool(address, connect, n_connections, self._pause)
        """For values."""
        self.small = ConnectionPool(address, connect, n_connections, self._pause)
        """For commands without values, which must not wait behind them."""

    def close(self) -> None:
        self.bulk.close()
        self.small.close()


class Pause:
    """Until when a server is left alone, and what its trouble was."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._until_s = 0.0
        self._next_s = _PAUSE_MIN_S
        self._trouble = ""

    def check(self) -> None:
        """Raises Late, at once, while the server is left alone."""
        with self._mutex:
            if time.monotonic() < self._until_s:
                raise Late(self._trouble)

    def begin(self, trouble: str) -> None:
        with self._mutex:
            self._trouble = trouble
            self._until_s = time.monotonic() + self._next_s
            self._next_s = min(2 * self._next_s, _PAUSE_MAX_S)

    def end(self) -> None:
        with self._mutex:
            self._until_s, self._next_s = 0.0, _PAUSE_MIN_S


class ConnectionPool:
    def __init__(self, address: Address, connect: Connect, size: int, pause: Pause) -> None:
        self._address = address
        self._connect = connect
        self._size = size
        self._pause = pause
        self._idle: list[Connection] = []
        self._n_open = 0
        """Lent and idle ones, and those being opened."""
        self._waiting: deque[object] = deque()
        """Whoever waits for one, the first first: else a busy reader could keep a writer out for ever."""
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Connection]:
        """A good connection. It comes back only if no reply is owed; otherwise it is closed. Raises Lost,
        Late or Refused when there is none to be had."""
        connection = self._take(deadline)
        try:
            yield connection
        except (Lost, Late, Garbled):
            connection.close()
            self.forget_idle()
            raise
        finally:
            self._give_back(connection)

    def forget_idle(self) -> None:
        """Close the idle ones: what broke one has likely broken all."""
        with self._changed:
            stale, self._idle = self._idle, []
            self._n_open -= len(stale)
            self._changed.notify_all()
        for connection in stale:
            connection.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self.forget_idle()

    def _take(self, deadline: Deadline) -> Connection:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or not (self._idle or self._n_open < self._size):
                    self._changed.wait(deadline.remaining_s(f"a connection to {self._address}"))
                if self._closed:
                    raise Lost(f"{self._address} is used no more")
                connection = self._idle_one()
                if connection is not None:
                    return connection
                self._n_open += 1
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()
        return self._opened(deadline)

    def _idle_one(self) -> Connection | None:
        """With the mutex held: the one used last that is still good."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            self._n_open -= 1
            connection.close()
        return None

    def _opened(self, deadline: Deadline) -> Connection:
        connection: Connection | None = None
        try:
            self._pause.check()
            connection = self._connected(deadline)
        finally:
            if connection is None:
                self._retire()
        return connection

    def _connected(self, deadline: Deadline) -> Connection:
        try:
            connection = self._connect(self._address, deadline)
        except Late as error:
            if time.monotonic() < deadline.at_s:  # else the caller had too little time left
                self._pause.begin(str(error))
            raise
        self._pause.end()
        return connection

    def _give_back(self, connection: Connection) -> None:
        with self._changed:
            if connection.is_clean and not self._closed:
                self._idle.append(connection)
                self._changed.notify_all()
                return
        connection.close()
        self._retire()

    def _retire(self) -> None:
        with self._changed:
            self._n_open -= 1
            self._changed.notify_all()
