"""What serves as L3: a directory, a Valkey server or a Mooncake pool of the demo's own.

Servers run beside the daemon, not in it as with `embedded: true`, so that what they hold outlives its
restart, as it does in production. Each ends with its context, or with the demo, however that ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from examples.demo.process import DemoError
from storage_backends.base import StorageError
from storage_backends.mooncake.library import Library
from storage_backends.mooncake.master import EmbeddedMaster
from storage_backends.redis.embedded import EmbeddedServer
from storage_backends.specs import BackendSpec, FileSpec, MooncakeSpec, RedisSpec


class Storage(Enum):
    """The kinds of L3; values as in the daemon's configuration."""

    FILE = "file"
    REDIS = "redis"
    MOONCAKE = "mooncake"

    @property
    def title(self) -> str:
        """For people."""
        return _TITLES[self]


_TITLES = {
    Storage.FILE: "files in a directory",
    Storage.REDIS: "Redis (a Valkey server beside the daemon)",
    Storage.MOONCAKE: "a Mooncake pool beside the daemon",
}


@contextmanager
def serving(storage: Storage, capacity_bytes: int, directory: Path) -> Iterator[BackendSpec]:
    """Run what this storage needs, and say how the daemon reaches it; `directory` is for its files.

    Raises DemoError with the remedy where it cannot be had."""
    directory.mkdir(parents=True)
    try:
        match storage:
            case Storage.FILE:
                yield FileSpec(path=str(directory), capacity_bytes=capacity_bytes)
            case Storage.REDIS:
                with _valkey(capacity_bytes, directory) as spec:
                    yield spec
            case Storage.MOONCAKE:
                with _pool(capacity_bytes) as spec:
                    yield spec
    except StorageError as error:
        raise DemoError(f"--storage {storage.value}: {error}") from error


@contextmanager
def _valkey(capacity_bytes: int, directory: Path) -> Iterator[RedisSpec]:
    server = EmbeddedServer(capacity_bytes, directory=str(directory))
    try:
        yield RedisSpec(addresses=(str(server.address),))
    finally:
        server.close()


@contextmanager
def _pool(capacity_bytes: int) -> Iterator[MooncakeSpec]:
    """A master, and a process whose memory is the pool."""
    master = EmbeddedMaster()
    Library(MooncakeSpec(master="127.0.0.1:1"))  # says what is missing, if something is
    master.start()
    try:
        command = [sys.executable, "-m", "examples.demo.pool_memory", master.address, str(capacity_bytes)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as owner:
            try:
                assert owner.stdout is not None
                said = owner.stdout.readline().decode().strip()
                if said != "up":
                    raise DemoError(f"the Mooncake pool has no memory: {said or 'its process ended'}")
                yield MooncakeSpec(master=master.address, metrics=master.metrics)
            finally:
                owner.kill()
    finally:
        master.stop()
