"""A Mooncake master of our own: on loopback ports, started anew when it dies, gone when we are.

Owns the process. Whoever calls `start` and `tend` must be one thread that outlives the master: the kernel
kills it with the thread that started it.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from storage_backends.base import StorageError
from storage_backends.mooncake.library import master_binary

_START_S = 10.0
_TRIES = 5
_LISTENS = "0A"

_STARTER = """
import ctypes, os, signal, sys
parent, binary = int(sys.argv[1]), sys.argv[2]
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
    sys.exit("cannot be bound to the life of its parent")
os.execv(binary, sys.argv[2:])
"""
"""Ends with its parent from before the master's first instruction on; 1 is PR_SET_PDEATHSIG."""


class EmbeddedMaster:
    """Its ports stay the same over restarts, so that clients find it again by themselves."""

    def __init__(self) -> None:
        """Raises StorageError when there is no binary."""
        self._binary = master_binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = (0, 0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def metrics(self) -> str:
        return f"127.0.0.1:{self._ports[1]}"

    @property
    def pid(self) -> int:
        """0 when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def start(self) -> None:
        """Returns when it listens. Raises StorageError."""
        for _ in range(_TRIES):
            self._ports = _free_ports()
            if self._launch():
                return
        raise StorageError(
            f"the embedded Mooncake master ({self._binary}) does not run: it says why on stderr"
        )

    def tend(self) -> bool:
        """Start it anew if it is dead. Whether it runs now."""
        return bool(self.pid) or self._launch()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _launch(self) -> bool:
        starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid())]
        self._process = subprocess.Popen(
            [*starter, self._binary, *_options(self._ports)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the daemon
        )
        ends_s = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < ends_s:
            if all(_listens(self._process.pid, port) for port in self._ports):
                return True
            time.sleep(0.005)
        self.stop()
        return False


def _options(ports: tuple[int, int]) -> list[str]:
    return [
        "--rpc_address=127.0.0.1",
        f"--rpc_port={ports[0]}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={ports[1]}",
        "--client_ttl=5",
        "--default_kv_lease_ttl=2000",  # what is leased cannot go: a pool that was just looked up is full
        "--eviction_high_watermark_ratio=0.95",
        "--eviction_ratio=0.05",
        "--logtostderr=1",
        "--minloglevel=2",
    ]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def _listens(pid: int, port: int) -> bool:
    """Whether that very process listens there, not one that took the port before it could."""
    table = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    found = [line.split() for line in table]
    inodes = {row[9] for row in found if row[3] == _LISTENS and int(row[1].partition(":")[2], 16) == port}
    if not inodes:
        return False
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return False  # it is ending, or closed a file just now: the next look tells
    return any(
        match and match[1] in inodes for match in (re.match(r"socket:\[(\d+)\]", link) for link in links)
    )
