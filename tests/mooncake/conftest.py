"""Pools, and backends on them that are closed at the end of each test."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol, cast

import pytest

from controller.storage import StorageLimits, StorageTier
from storage_backends.base import StorageBackend
from storage_backends.mooncake.backend import MooncakeBackend
from storage_backends.mooncake.client import Client, connect
from storage_backends.mooncake.library import Library, Store
from storage_backends.specs import MooncakeSpec
from tests.mooncake.servers import POOL_BYTES, Pool, running_pool
from tests.storage.conftest import DEADLINE_S, QUICK, Slab

Open = Callable[[MooncakeSpec], MooncakeBackend]


class Unregisters(Protocol):
    def unregister_buffer(self, address: int, /) -> int: ...


class Clears(Protocol):
    def remove_all(self, force: bool, /) -> int: ...


class LentClient(Client):
    """A client around a store that outlives it: closing one takes a second, in which nothing else runs."""

    def __init__(self, store: Store, config: object) -> None:
        self._registered: list[int] = []
        super().__init__(store, config, lambda: True)

    def register(self, address: int, nbytes: int) -> None:
        super().register(address, nbytes)
        self._registered.append(address)

    def close(self, timeout_s: float) -> bool:
        self.leave()
        while self._registered:
            assert cast(Unregisters, self._store).unregister_buffer(self._registered.pop()) == 0
        return True


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[Pool]:
    with running_pool() as pool:
        yield pool


@pytest.fixture(scope="session")
def shared_store(shared_pool: Pool) -> Iterator[Store]:
    client = connect(Library(shared_pool.spec()), shared_pool.spec(), shared_pool.master.address, 0)
    yield client._store
    client.close(DEADLINE_S)


@pytest.fixture
def backend(shared_pool: Pool, shared_store: Store) -> Iterator[StorageBackend]:
    """On the shared pool, which is empty; for tests that leave pool and client as they were."""
    shared_pool.clear()
    with lent_backend(shared_pool.spec(), shared_store) as backend:
        yield backend


@pytest.fixture(scope="session")
def lonely_pool() -> Iterator[Pool]:
    """A master without other memory than the client's own."""
    with running_pool(n_owners=0) as pool:
        yield pool


@pytest.fixture(scope="session")
def lonely_store(lonely_pool: Pool) -> Iterator[Store]:
    spec = lonely_pool.spec()
    client = connect(Library(spec), spec, lonely_pool.master.address, POOL_BYTES)
    yield client._store
    client.close(DEADLINE_S)


@pytest.fixture
def own_segment(lonely_pool: Pool, lonely_store: Store) -> Iterator[StorageBackend]:
    """Its objects lie in this process, as in an embedded pool; empty."""
    assert cast(Clears, lonely_store).remove_all(True) >= 0
    with lent_backend(lonely_pool.spec(), lonely_store) as backend:
        yield backend


def lent_backend(spec: MooncakeSpec, store: Store) -> MooncakeBackend:
    config = Library(spec).replicate_config(spec)
    return MooncakeBackend(spec, lambda: LentClient(store, config))


@pytest.fixture
def pool() -> Iterator[Pool]:
    """For this test alone, which may do to it what it likes."""
    with running_pool() as pool:
        yield pool


@pytest.fixture
def open_mooncake() -> Iterator[Open]:
    """Open a backend; all are closed at the end."""
    opened: list[MooncakeBackend] = []

    def open_one(spec: MooncakeSpec) -> MooncakeBackend:
        opened.append(MooncakeBackend(spec))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(32 << 20)
    yield slab
    slab.close()


class OpenTier(Protocol):
    async def __call__(self, spec: MooncakeSpec, limits: StorageLimits = QUICK) -> StorageTier: ...


@pytest.fixture
async def open_tier(slab: Slab) -> AsyncIterator[OpenTier]:
    """Start a tier over the slab; all are stopped at the end."""
    tiers: list[StorageTier] = []

    async def start(spec: MooncakeSpec, limits: StorageLimits = QUICK) -> StorageTier:
        tiers.append(StorageTier("test", spec, slab.fd, slab.nbytes, limits=limits))
        await tiers[-1].start(strict=True)
        return tiers[-1]

    yield start
    for tier in tiers:
        assert await tier.stop()


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds; the test fails when it does not in time."""
    ends_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < ends_s, "it never came true"
        time.sleep(0.02)
