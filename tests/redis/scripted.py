"""A server of our own making, for what a real one cannot be made to do: late, torn and mad replies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.redis.servers import DEADLINE_S

Answer = Callable[["Peer", list[bytes]], None]


class Peer:
    """One client's connection, seen from the server."""

    def __init__(self, connected: socket.socket, number: int) -> None:
        self.number = number
        """Which connection this is, from 0."""
        self.socket = connected
        self._received = b""

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def hang_up(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)

    def command(self) -> list[bytes] | None:
        """The next command; None when the client is gone."""
        line = self._line()
        if line is None:
            return None
        words = []
        for _ in range(int(line[1:])):
            head = self._line()
            assert head is not None
            words.append(self._exactly(int(head[1:]) + 2)[:-2])
        return words

    def _line(self) -> bytes | None:
        while b"\r\n" not in self._received:
            more = self.socket.recv(65536)
            if not more:
                return None
            self._received += more
        line, _, self._received = self._received.partition(b"\r\n")
        return line

    def _exactly(self, n: int) -> bytes:
        while len(self._received) < n:
            more = self.socket.recv(65536)
            assert more
            self._received += more
        taken, self._received = self._received[:n], self._received[n:]
        return taken


class ScriptedServer:
    """Answers each command but PING by calling `answer(peer, words)`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._peers: list[Peer] = []
        self.commands: list[tuple[int, list[bytes]]] = []
        """Connection number and words of all but PING, as they came."""
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def n_connections(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(DEADLINE_S)
        self._listener.close()
        for peer in self._peers:
            try:
                peer.hang_up()
            except OSError:
                continue
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for peer in self._peers:
            peer.socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(connected, len(self._peers))
            self._peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer: Peer) -> None:
        try:
            while (words := peer.command()) is not None:
                if words == [b"PING"]:
                    peer.send(b"+PONG\r\n")
                    continue
                self.commands.append((peer.number, words))
                self._answer(peer, words)
        except OSError:
            return  # the client, or the test, has hung up


@contextmanager
def scripted(answer: Answer) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer)
    try:
        yield server
    finally:
        server.close()


def bulk(body: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(body), body)
