"""A slab, gates, tiers that are stopped, and the check that nothing leaks, for the tests of storage."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from controller.storage import StorageLimits, StorageTier
from storage_backends.base import Item, Outcome
from storage_backends.messages import WorkerSpec
from storage_backends.testing import content_of

SLAB_BYTES = 8 << 20
OBJECT_BYTES = 4096
DEADLINE_S = 30.0
"""Nothing in these tests takes as long; whatever does has failed."""

QUICK = StorageLimits(probe_interval_s=0.05, hang_s=60.0, restart_min_s=0.01, restart_max_s=0.1)
"""Looks and restarts often; never takes a held worker for a hung one."""


class Slab:
    """Shared memory as the daemon's, with tagged content at chosen places."""

    def __init__(self, nbytes: int = SLAB_BYTES) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("test-slab")
        os.ftruncate(self.fd, nbytes)
        self.bytes = mmap.mmap(self.fd, nbytes)

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)

    def fill(self, *keys: str, nbytes: int = OBJECT_BYTES, base: int = 0) -> list[Item]:
        """Each key's own content, one after another; the items to write them."""
        items = self.places(*keys, nbytes=nbytes, base=base)
        for item in items:
            self.bytes[item.offset : item.offset + nbytes] = content_of(item.key, nbytes)
        return items

    def places(self, *keys: str, nbytes: int = OBJECT_BYTES, base: int = SLAB_BYTES // 2) -> list[Item]:
        """Items to read the keys into."""
        return [Item(key, base + place * nbytes, nbytes) for place, key in enumerate(keys)]

    def holds(self, items: list[Item]) -> bool:
        """Whether each item's range has its key's own content."""
        return all(
            self.bytes[item.offset : item.offset + item.nbytes] == content_of(item.key, item.nbytes)
            for item in items
        )


class Gate:
    """Holds the operations of a FaultySpec that has it as its gate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def close(self) -> None:
        (self.path / "closed").touch()

    def open(self) -> None:
        (self.path / "closed").unlink()

    def n_held(self) -> int:
        return sum(name.startswith("held-") for name in os.listdir(self.path))


class OpenTier(Protocol):
    def __call__(
        self, spec: WorkerSpec, limits: StorageLimits = QUICK, *, strict: bool = True
    ) -> Awaitable[StorageTier]: ...


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab()
    yield slab
    slab.close()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
async def open_tier(slab: Slab) -> AsyncIterator[OpenTier]:
    """Start a tier over the slab; all are stopped at the end, and no descriptor and no process is left."""
    tiers: list[StorageTier] = []
    before = open_descriptors()

    async def start(spec: WorkerSpec, limits: StorageLimits = QUICK, *, strict: bool = True) -> StorageTier:
        tiers.append(StorageTier("test", spec, slab.fd, slab.nbytes, limits=limits))
        await tiers[-1].start(strict=strict)
        return tiers[-1]

    yield start
    for tier in tiers:
        assert await tier.stop()
    assert children() == []
    assert open_descriptors() <= before


def open_descriptors() -> set[str]:
    """What this process has open. The listing's own descriptor is gone again, and so is what other tests
    left to the garbage collector."""
    gc.collect()
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


_strangers: set[int] = set()


@pytest.fixture(autouse=True)
def strangers() -> None:
    """Processes that other tests' session fixtures keep: none of ours."""
    _strangers.clear()
    _strangers.update(children())


def children() -> list[int]:
    """Processes of this one that were started since the test began."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        found.update(int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split())
    return sorted(found - _strangers)


def is_running(pid: int) -> bool:
    """Not gone and not waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def eventually(holds: Callable[[], object]) -> None:
    """Until it holds; the test fails when it does not in time."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        await asyncio.sleep(0.005)


async def all_ok(tier: StorageTier, slab: Slab, *keys: str) -> bool:
    """Write and read back, every byte compared."""
    written = await tier.write(slab.fill(*keys), timeout_s=DEADLINE_S)
    places = slab.places(*keys)
    got = await tier.read(places, timeout_s=DEADLINE_S)
    return {*written.outcomes, *got.outcomes} == {Outcome.OK} and slab.holds(places)
