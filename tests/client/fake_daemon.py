"""A scripted daemon: speaks the wire contract, holds no cache, and misbehaves on request.

In a test's own process, or (run as a program) in a process that can be stopped and killed; then it is
steered by lines on its standard input and tells what happens on its standard output.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from proto.v1 import hicache_pb2 as pb
from proto.v1.hicache_pb2_grpc import HybridCacheServicer, add_HybridCacheServicer_to_server

Answer = Callable[[pb.EngineMessage], pb.DaemonMessage | None]

ANSWERS: dict[str, Answer] = {
    "lookup_prefix": lambda m: pb.DaemonMessage(
        lookup_prefix=pb.LookupPrefixReply(lease_id=f"lease-{m.id}", boundary=3, lease_s=30)
    ),
    "prefetch": lambda m: pb.DaemonMessage(prefetch=pb.PrefetchReply(prefetch_id=f"prefetch-{m.id}")),
    "wait_prefetch": lambda m: pb.DaemonMessage(
        wait_prefetch=pb.PrefetchProgress(state=pb.PrefetchProgress.DONE, boundary=7)
    ),
    "cancel_prefetch": lambda m: pb.DaemonMessage(
        cancel_prefetch=pb.PrefetchProgress(state=pb.PrefetchProgress.CANCELLED)
    ),
    "load": lambda m: pb.DaemonMessage(load=pb.LoadReply(nbytes=1)),
    "backup": lambda m: pb.DaemonMessage(
        backup=pb.BackupReply(
            outcomes=[
                pb.BackupReply.Outcome(component=c.component, stored_pages=len(c.pages) // 4)
                for c in m.backup.components
            ]
        )
    ),
    "release_lease": lambda m: pb.DaemonMessage(release_lease=pb.ReleaseLeaseReply()),
    "heartbeat": lambda m: pb.DaemonMessage(heartbeat=pb.Heartbeat()),
}


class FakeDaemon(HybridCacheServicer):
    def __init__(self, path: str, *, boot_id: str = "boot-1", tell: Callable[[str], None] | None = None):
        self.path = path
        self.boot_id = boot_id
        self.answers: dict[str, Answer] = dict(ANSWERS)
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.registrations: list[pb.Registration] = []
        self.log: queue.Queue[pb.EngineMessage] = queue.Queue()
        self.fds: dict[bytes, int] = {}
        self._tell = tell or (lambda text: None)
        self._held: dict[str, list[tuple[queue.Queue[pb.DaemonMessage | None], pb.EngineMessage]]] = {}
        self._mutex = threading.Lock()
        self._streams: list[queue.Queue[pb.DaemonMessage | None]] = []
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        add_HybridCacheServicer_to_server(self, self._server)
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> FakeDaemon:
        for name in (self.path, self.path + ".fds"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()
        self._listener.bind(self.path + ".fds")
        self._listener.listen()
        threading.Thread(target=self._take_fds, daemon=True).start()
        return self

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_streams()
        self._server.stop(0).wait(5)
        self._pool.shutdown(wait=True)
        for fd in self.fds.values():
            os.close(fd)
        for name in (self.path, self.path + ".fds"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def hold(self, kind: str) -> None:
        """From now on messages of this kind wait for `let_go`."""
        with self._mutex:
            self._held.setdefault(kind, [])

    def let_go(self, kind: str) -> None:
        with self._mutex:
            held = self._held.pop(kind, [])
        for stream, message in held:
            self._answer(stream, message)

    def end_streams(self) -> None:
        """As when an engine's heartbeat was missed: the streams end, the process lives on."""
        with self._mutex:
            streams, self._streams = self._streams, []
            self._held = {kind: [] for kind in self._held}
        for stream in streams:
            stream.put(None)

    def seen(self, kind: str, timeout_s: float = 10.0) -> pb.EngineMessage:
        """The next message of this kind; others that came before it are dropped."""
        while True:
            message = self.log.get(timeout=timeout_s)
            if message.WhichOneof("body") == kind:
                return message

    def Attach(self, requests, context):  # noqa: N802 - the wire's name
        first = next(requests)
        if self.refuse is not None:
            context.abort(*self.refuse)
        self.registrations.append(first.registration)
        outbox: queue.Queue[pb.DaemonMessage | None] = queue.Queue()
        with self._mutex:
            self._streams.append(outbox)
        context.add_callback(lambda: outbox.put(None))
        outbox.put(
            pb.DaemonMessage(
                id=first.id,
                registered=pb.Registered(
                    boot_id=self.boot_id, daemon_pid=os.getpid(), heartbeat_interval_s=0.2
                ),
            )
        )
        threading.Thread(target=self._read, args=(requests, outbox), daemon=True).start()
        self._tell(f"attached {first.registration.engine_id}")
        return self._replies(outbox)

    @staticmethod
    def _replies(outbox: queue.Queue[pb.DaemonMessage | None]) -> Iterator[pb.DaemonMessage]:
        while (message := outbox.get()) is not None:
            yield message

    def _read(
        self, requests: Iterator[pb.EngineMessage], outbox: queue.Queue[pb.DaemonMessage | None]
    ) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in requests:
                kind = message.WhichOneof("body")
                self.log.put(message)
                self._tell(f"got {kind}")
                with self._mutex:
                    if kind in self._held:
                        self._held[kind].append((outbox, message))
                        continue
                self._answer(outbox, message)

    def _answer(self, outbox: queue.Queue[pb.DaemonMessage | None], message: pb.EngineMessage) -> None:
        reply = self.answers[message.WhichOneof("body")](message)
        if reply is not None:
            reply.id = message.id
            outbox.put(reply)

    def _take_fds(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    ticket, fds, _, _ = socket.recv_fds(connection, 16, 1)
                    if fds:
                        self.fds[ticket] = fds[0]
                        connection.send(b"1")


class FakeProcess:
    """The scripted daemon in a process of its own."""

    def __init__(self, path: str, boot_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, path, boot_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.expect("ready")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def expect(self, text: str, timeout_s: float = 20.0) -> None:
        while self._lines.get(timeout=timeout_s) != text:
            pass

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self.expect(f"did {command}")

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


def main() -> None:
    def tell(text: str) -> None:
        print(text, flush=True)

    daemon = FakeDaemon(sys.argv[1], boot_id=sys.argv[2], tell=tell)
    daemon.start()
    tell("ready")
    for line in sys.stdin:
        verb, _, kind = line.strip().partition(" ")
        {"hold": daemon.hold, "let_go": daemon.let_go}[verb](kind)
        tell(f"did {line.strip()}")
    daemon.stop()


if __name__ == "__main__":
    main()
