"""One life of a storage worker process, from spawn to death, seen from the daemon's event loop.

Owns the process, its socket and the requests it has not answered. Never restarts anything and never
gives up on a request by itself: an unanswered one ends when the process is dead, because only then can
no byte of it land in the slab any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeAlias

from storage_backends.messages import (
    LENGTH,
    Answer,
    BadMessage,
    Close,
    NotOpened,
    Open,
    Opened,
    Operation,
    Probed,
    Reply,
    body_bytes,
    framed,
    parse_reply,
)

Replied: TypeAlias = "asyncio.Future[Answer | Probed | None]"
"""Resolves with the worker's reply, or with None when the worker died without one."""

_MOST_UNSENT_BYTES = 8 << 20
_LINGER_S = 1.0
"""How long after a process's death its last words are waited for, and after its last words its death."""


class WorkerProcess:
    """A running worker. Made by `spawn`; all calls on the loop it was spawned on."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._unanswered: dict[int, tuple[float, Replied]] = {}
        self._exited: asyncio.Future[None] = loop.create_future()
        self.opened: asyncio.Future[str] = loop.create_future()
        """Resolves with "" when the backend is open, else with why it is not."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """Resolves with how the process died, when it is dead and every request has its reply or None."""
        self._watch_exit()
        self._life = asyncio.create_task(self._live(), name=f"storage-worker-{process.pid}")

    @classmethod
    async def spawn(cls, first: Open, slab_fd: int) -> WorkerProcess:
        """Start a worker and tell it what to open. Raises OSError when no process can be made."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                # On the loop itself, not in a thread: a worker dies with the thread that spawned it.
                process = subprocess.Popen(  # noqa: ASYNC220
                    _command(theirs.fileno(), slab_fd),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), slab_fd),
                    start_new_session=True,  # Ctrl-C in a terminal is for the daemon
                )
            except OSError:
                writer.transport.abort()
                raise
        worker = cls(process, reader, writer)
        writer.write(framed(first))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def takes_requests(self) -> bool:
        """False once the process is ending, or takes nothing off its socket any more."""
        transport = self._writer.transport
        return not transport.is_closing() and transport.get_write_buffer_size() < _MOST_UNSENT_BYTES

    def ask(self, deadline_s: float, request: Callable[[int], Operation]) -> Replied:
        """Send the request that is made for an id. Raises ValueError, having done nothing, when it is too
        long. The future is never cancelled and never raises."""
        self._next_id += 1
        message = framed(request(self._next_id))
        replied: Replied = asyncio.get_running_loop().create_future()
        if not self.takes_requests:
            replied.set_result(None)
            return replied
        self._unanswered[self._next_id] = (deadline_s, replied)
        self._writer.write(message)
        return replied

    def overdue(self) -> tuple[int, float]:
        """How many unanswered requests are past their deadline, and the longest by how many seconds."""
        now_s = time.monotonic()
        late_s = [now_s - deadline_s for deadline_s, _ in self._unanswered.values() if deadline_s < now_s]
        return len(late_s), max(late_s, default=0.0)

    def kill(self) -> None:
        """SIGKILL. What it had not answered resolves when it is dead. Harmless on a dead one."""
        self._process.kill()

    async def close(self, timeout_s: float) -> bool:
        """Let it finish what runs and exit; kill it when that takes longer than half of `timeout_s`.
        False when it is still not dead at the end."""
        if self.takes_requests:
            self._writer.write(framed(Close()))
        await asyncio.wait({self.ended}, timeout=timeout_s / 2)
        if not self.ended.done():
            self.kill()
            await asyncio.wait({self.ended}, timeout=timeout_s / 2)
        return self.ended.done()

    async def _live(self) -> None:
        receiving = asyncio.create_task(self._receive())
        await asyncio.wait({receiving, self._exited}, return_when=asyncio.FIRST_COMPLETED)
        if self._exited.done():
            await asyncio.wait({receiving}, timeout=_LINGER_S)  # replies that it sent before it died count
            receiving.cancel()
        self._writer.transport.abort()
        await asyncio.wait({self._exited}, timeout=_LINGER_S)
        self.kill()  # a worker whose stream ended otherwise than by its death must not go on
        await asyncio.wait({self._exited})
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        how = _how_it_died(self._process.returncode)
        if not self.opened.done():
            self.opened.set_result(f"the storage worker {how} before the backend was open")
        unanswered, self._unanswered = self._unanswered, {}
        for _, replied in unanswered.values():
            replied.set_result(None)
        self.ended.set_result(how)

    async def _receive(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(LENGTH.size)
                self._accept(parse_reply(await self._reader.readexactly(body_bytes(head))))
        except (asyncio.IncompleteReadError, ConnectionError, BadMessage):
            return  # the process is dead, or will be

    def _accept(self, reply: Reply) -> None:
        match reply:
            case Opened() | NotOpened() if self.opened.done():
                raise BadMessage("opened twice")
            case Opened():
                self.opened.set_result("")
            case NotOpened(problem=problem):
                self.opened.set_result(problem)
            case Answer(id=id_) | Probed(id=id_):
                if id_ not in self._unanswered:
                    raise BadMessage(f"a reply to {id_}, which nobody asked")
                _, replied = self._unanswered.pop(id_)
                replied.set_result(reply)

    def _watch_exit(self) -> None:
        """By pidfd: needs no child watcher, no signal handler and no thread, on any loop."""
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(self._process.pid)

        def exited() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._process.wait()
            self._exited.set_result(None)

        loop.add_reader(pidfd, exited)


def _command(socket_fd: int, slab_fd: int) -> list[str]:
    """-P: what lies in the working directory is not imported."""
    worker = [sys.executable, "-P", "-m", "storage_backends.worker"]
    return [*worker, f"--socket-fd={socket_fd}", f"--slab-fd={slab_fd}", f"--parent-pid={os.getpid()}"]


def _how_it_died(returncode: int) -> str:
    return f"was killed by signal {-returncode}" if returncode < 0 else f"exited with status {returncode}"
