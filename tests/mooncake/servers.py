"""Real Mooncake pools for tests: a master and segment owners on loopback, ended by who started them.

Each dies with the test process, however that ends. Where the package or a library it needs is missing the
tests skip, and with CI=true they fail instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage_backends.base import StorageError
from storage_backends.mooncake.library import Library
from storage_backends.mooncake.master import EmbeddedMaster
from storage_backends.specs import MooncakeSpec

ROOT = Path(__file__).parents[2]
POOL_BYTES = 64 << 20


def require_mooncake() -> None:
    """Skip, or fail where CI asks for everything."""
    try:
        Library(MooncakeSpec(master="127.0.0.1:1"))
    except StorageError as error:
        reason = f"no Mooncake here, nothing of this backend is tested: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


class Owner:
    """A process whose memory is part of the pool."""

    def __init__(self, master: str, segment_bytes: int = POOL_BYTES) -> None:
        command = [sys.executable, "-m", "tests.mooncake.segment_owner", master, str(segment_bytes)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        said = self._line()
        assert said == "up", said

    def clear(self) -> None:
        """Delete every object of the pool, whoever holds it."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"clear\n")
        self.process.stdin.flush()
        assert self._line().isdecimal()

    def kill(self) -> None:
        with self.process:
            self.process.kill()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()


class Pool:
    """A master and its owners."""

    def __init__(self) -> None:
        self.master = EmbeddedMaster()
        self.master.start()
        self.owners: list[Owner] = []

    def add_owner(self, segment_bytes: int = POOL_BYTES) -> Owner:
        self.owners.append(Owner(self.master.address, segment_bytes))
        return self.owners[-1]

    def spec(self) -> MooncakeSpec:
        return MooncakeSpec(master=self.master.address, metrics=self.master.metrics)

    def clear(self) -> None:
        self.owners[0].clear()

    def end(self) -> None:
        for owner in self.owners:
            owner.kill()
        self.master.stop()


@contextmanager
def running_pool(n_owners: int = 1, segment_bytes: int = POOL_BYTES) -> Iterator[Pool]:
    require_mooncake()
    pool = Pool()
    try:
        for _ in range(n_owners):
            pool.add_owner(segment_bytes)
        yield pool
    finally:
        pool.end()
