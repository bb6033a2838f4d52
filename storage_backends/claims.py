"""A writer's claim on its temporary files in a directory that several processes may share.

Owns names of temporaries and the question whether their writer still lives: a claim is a file held by
flock, so it ends with its process however that dies, in any pid namespace. Never touches a file of a
living writer, nor anything outside its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterator

_OWNER = ".owner"


class Claim:
    """A prefix for temporary names that no other living writer has."""

    def __init__(self, directory: str) -> None:
        """Raises OSError when the directory cannot be written."""
        self._directory = directory
        self._numbers = itertools.count()
        while True:
            self._stem = secrets.token_hex(8)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._owner_path(), flags, 0o600)
            if _hold(self._fd) and os.fstat(self._fd).st_nlink > 0:
                return
            os.close(self._fd)  # somebody who cleans up took it for dead before we held it

    def _owner_path(self) -> str:
        return os.path.join(self._directory, self._stem + _OWNER)

    def temporary_path(self) -> str:
        """A path that nobody else uses, now or later."""
        return os.path.join(self._directory, f"{self._stem}.{next(self._numbers)}")

    def others_alive(self) -> bool:
        """Whether another writer has a claim here."""
        stems = _stems(self._directory) - {self._stem}
        return any(not _is_dead(self._directory, stem) for stem in stems)

    def release(self) -> None:
        """Once; no temporary may be in use."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._owner_path())
        os.close(self._fd)


def clean_dead_writers(directory: str) -> int:
    """Delete the temporaries of writers that are dead. Returns how many files went."""
    n_deleted = 0
    for stem in _stems(directory):
        with _dead_writer(directory, stem) as dead:
            if not dead:
                continue
            names = [name for name in os.listdir(directory) if name.startswith(stem + ".")]
            for name in sorted(names, key=lambda name: name.endswith(_OWNER)):  # the owner's file last
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))
                    n_deleted += 1
    return n_deleted


def _stems(directory: str) -> set[str]:
    return {stem for stem, dot, _ in (name.partition(".") for name in os.listdir(directory)) if dot}


def _is_dead(directory: str, stem: str) -> bool:
    with _dead_writer(directory, stem) as dead:
        return dead


@contextlib.contextmanager
def _dead_writer(directory: str, stem: str) -> Iterator[bool]:
    """Whether that writer is dead; while the block runs nobody can come to life under its name.

    A writer makes its owner file before its temporaries, so no such file means dead.
    """
    try:
        fd = os.open(os.path.join(directory, stem + _OWNER), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _hold(fd)
    finally:
        os.close(fd)


def _hold(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
