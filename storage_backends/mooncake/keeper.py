"""Keeps one working Mooncake client, and the embedded master alive.

One thread sets up, replaces and closes clients, in the background of everybody else; it starts the embedded
master too. The library reconnects to a restarted master by itself; what it does not survive is a stuck
transport, on which every later transfer fails.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from storage_backends.base import StorageError
from storage_backends.mooncake import codes
from storage_backends.mooncake.client import Client
from storage_backends.mooncake.master import EmbeddedMaster

STUCK_CALLS = 6
"""Calls in a row of which every transfer failed, with a healthy master, after which the client must prove
itself or be replaced ..."""
_STUCK_S = 15.0
"""... and after so long it is replaced anyhow: a lost node's objects are forgotten by then."""
_TICK_S = 0.5
UNHEALTHY_S = 10.0
"""A client that does not find its master for so long, although it takes connections, is replaced."""
_REMEMBERED_S = 10.0
"""How long failed transfers show in health when nothing is tried any more."""
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_OPEN_S = 50.0
_CLOSE_S = 2.0
_END_S = 30.0


class Keeper:
    """Open from construction to `close`; then it runs nothing."""

    def __init__(
        self,
        connect: Callable[[], Client],
        answers: Callable[[], bool],
        master: EmbeddedMaster | None = None,
    ) -> None:
        """`connect` makes a client that works; `answers` tells whether the master takes connections.
        Raises StorageError when the first client cannot be made."""
        self._connect = connect
        self._answers = answers
        self._master = master
        self._client: Client | None = None
        self._reachable = True
        """Whether the master took a connection when it was last tried: the library may notice nothing."""
        self._retired: list[Client] = []
        """Replaced, with stragglers inside perhaps."""
        self._buffer = (0, 0)
        self._stuck_calls = 0
        self._stuck_since_s = self._stuck_at_s = self._healthy_at_s = self._pause_ends_s = time.monotonic()
        self._pause_s = _PAUSE_S
        self._problem = ""
        self.replacements = 0
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-keeper", daemon=True)
        self._thread.start()
        if not self._opened.wait(_OPEN_S):
            self._closing = True
            raise StorageError(f"setting up Mooncake takes longer than {_OPEN_S:g} s")
        if self._client is None:
            self._thread.join(_END_S)
            raise StorageError(self._problem)

    def client(self) -> Client:
        """The one to use now. Raises StorageError when no call would succeed."""
        with self._mutex:
            client, problem = self._client, self._problem
        if client is None:
            raise StorageError(problem or "the Mooncake client is closed")
        if not self._reachable or not client.healthy():
            raise StorageError(problem or "the Mooncake master does not answer: see whether it runs")
        return client

    def register(self, address: int, nbytes: int) -> None:
        """With the client there is and all that come."""
        with self._mutex:
            self._buffer = (address, nbytes)
        self.client().register(address, nbytes)

    def hear(self, said: Sequence[int]) -> None:
        """Learn from the codes of any call whether to look after the master now."""
        if not codes.UNANSWERED.isdisjoint(said):
            self._wake.set()

    def judge(self, client: Client, said: Sequence[int]) -> None:
        """Learn from the codes of a call that moved bytes, however late it returned."""
        self.hear(said)
        with self._mutex:
            if client is not self._client or not said:
                return
            if all(code == codes.TRANSFER_FAILED for code in said):
                self._stuck_at_s = time.monotonic()
                if not self._stuck_calls:
                    self._stuck_since_s = self._stuck_at_s
                self._stuck_calls += 1
                if self._stuck_calls >= STUCK_CALLS:
                    self._wake.set()
            elif any(code >= 0 for code in said):
                self._stuck_calls, self._pause_s = 0, _PAUSE_S

    @property
    def problem(self) -> str:
        """What is wrong although the master answers; "" when nothing is."""
        with self._mutex:
            if self._problem:
                return self._problem
            recent = time.monotonic() - self._stuck_at_s < _REMEMBERED_S
            if self._stuck_calls and recent:
                return "transfers fail: a node of the Mooncake pool is lost or frozen; its objects are misses"
            return ""

    def close(self) -> None:
        """Waits for calls that are inside, within a bound. A second time does nothing."""
        self._closing = True
        self._wake.set()
        self._thread.join(_END_S)

    # the keeper's thread

    def _run(self) -> None:
        try:
            if self._master is not None:
                self._master.start()
            self._client = self._connect()
        except StorageError as error:
            self._problem = str(error)
            self._closing = True
        self._opened.set()
        try:
            while not self._closing:
                self._wake.wait(_TICK_S)
                self._wake.clear()
                self._look()
            self._end()
        finally:
            if self._master is not None:
                self._master.stop()

    def _look(self) -> None:
        if self._master is not None and not self._master.tend():
            self._say("the embedded Mooncake master cannot be started anew")
            return
        self._retired = [client for client in self._retired if not (client.idle and _closed(client))]
        client, now_s = self._client, time.monotonic()
        self._reachable = self._answers()
        healthy = self._reachable and client is not None and client.healthy()
        if healthy or not self._reachable:
            self._healthy_at_s = now_s  # while the master is away nothing can be said of the client
        if client is None or now_s < self._pause_ends_s:
            return
        lost = now_s - self._healthy_at_s > UNHEALTHY_S
        if lost or (healthy and self._is_stuck(client)):
            self._replace()

    def _is_stuck(self, client: Client) -> bool:
        """A lost node looks the same for a while, and a replaced client takes its memory from the pool."""
        if self._stuck_calls < STUCK_CALLS:
            return False
        if time.monotonic() - self._stuck_since_s > _STUCK_S:
            return True
        try:
            client.prove()
        except StorageError:
            return True
        self._pause_ends_s = time.monotonic() + _PAUSE_S
        return False

    def _replace(self) -> None:
        """The next one first: stragglers may stay inside the old one for a minute."""
        self._pause_ends_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            fresh = self._connect()
            if self._buffer[1]:
                fresh.register(*self._buffer)
        except StorageError as error:
            self._say(f"the Mooncake client does not work and cannot be replaced: {error}")
            return
        with self._mutex:
            old, self._client = self._client, fresh
            self._stuck_calls, self._problem = 0, ""
        self.replacements += 1
        self._healthy_at_s = time.monotonic()
        if old is not None:
            old.leave()
            self._retired.append(old)
        print("mooncake: the client did not work any more and was replaced", file=sys.stderr, flush=True)

    def _say(self, problem: str) -> None:
        with self._mutex:
            if problem != self._problem:
                print(f"mooncake: {problem}", file=sys.stderr, flush=True)
            self._problem = problem

    def _end(self) -> None:
        with self._mutex:
            client, self._client = self._client, None
        for left in [*self._retired, *([client] if client is not None else [])]:
            left.close(_CLOSE_S)


def _closed(client: Client) -> bool:
    """Whether there is nothing more to do for it."""
    client.close(0.0)
    return True
