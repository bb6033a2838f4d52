"""The claim to a socket path: one daemon at a time, by flock on `<socket>.lock`.

gRPC would take a live daemon's Unix socket over without a word; the claim refuses that, and makes it
safe to remove what a killed daemon left behind. The kernel gives the claim back when its owner dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from controller.daemon.config import CLAIM_SUFFIX, FD_SUFFIX


class ClaimError(Exception):
    """The socket path cannot be had; the message says who has it or what to mend."""


class SocketClaim:
    """Holds the path until `release`. Creates its directory with mode 0700 if missing, and removes the
    sockets of a dead owner."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = Path(socket_path)
        self._path = Path(socket_path + CLAIM_SUFFIX)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = self._held()
            try:
                self._remove_sockets()
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ClaimError(
                f"server.socket: {socket_path} cannot be used ({error.strerror}); "
                "name a path in a directory that this user can write"
            ) from error

    def release(self) -> None:
        """Remove the sockets and give the path back."""
        self._remove_sockets()
        with suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._fd)

    def _held(self) -> int:
        """An exclusively held descriptor of the claim file that stands at the path now."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._stands(fd):
                    return fd
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise ClaimError(
                    f"server.socket: {self._socket_path} is served by process {owner}; "
                    "stop that daemon, or give this one another path"
                ) from None
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # its owner has just left and removed it: try the next one

    def _stands(self, fd: int) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        mine = os.fstat(fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def _remove_sockets(self) -> None:
        for path in (self._socket_path, Path(f"{self._socket_path}{FD_SUFFIX}")):
            if path.is_symlink() or (path.exists() and not path.is_socket()):
                raise OSError(errno.EEXIST, f"{path} exists and is not a socket")
            path.unlink(missing_ok=True)
