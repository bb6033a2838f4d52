"""A TCP proxy that lets so many bytes a second through, each way, for each connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TICK_S = 0.05


class Throttle:
    """Listens on loopback, connects to one port there."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_per_s = 0
        """0 is as fast as it goes."""
        self._ended = threading.Event()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += (near, far)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(
                max(1, int(self.bytes_per_s * _TICK_S)) if self.bytes_per_s else 1 << 16
            ):
                target.sendall(chunk)
                if self.bytes_per_s:
                    self._ended.wait(_TICK_S)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def throttled(port: int) -> Iterator[Throttle]:
    proxy = Throttle(port)
    try:
        yield proxy
    finally:
        proxy.close()
