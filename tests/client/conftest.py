"""A scripted daemon, a small layout, and clients that are closed after the test."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.client import Client, SharedRegion
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool

sys.path.insert(0, str(Path(__file__).parent))
from fake_daemon import FakeDaemon, FakeProcess

LAYOUT = Layout(
    page_size=4,
    components=(ComponentSpec("full", Kind.FULL),),
    pools=(Pool("kv", "full", 8, (Plane(0, 0, 64, 64),)),),
)


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hc") as folder:
        yield f"{folder}/hicache.sock"


@pytest.fixture
def daemon(socket_path: str) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(socket_path).start()
    yield fake
    fake.stop()


@pytest.fixture
def spawn(socket_path: str) -> Iterator[Callable[[str], FakeProcess]]:
    started: list[FakeProcess] = []

    def start(boot_id: str) -> FakeProcess:
        started.append(FakeProcess(socket_path, boot_id))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def connect(socket_path: str) -> Iterator[Callable[..., Client]]:
    """Makes clients of the daemon at `socket_path`."""
    clients: list[Client] = []
    regions: list[SharedRegion] = []
    numbers = itertools.count()

    def make(**settings: object) -> Client:
        regions.append(SharedRegion(512))
        arguments: dict[str, object] = {
            "engine_id": f"engine-{next(numbers)}",
            "model": "m",
            "layout": LAYOUT,
            "regions": [regions[-1]],
        } | settings
        clients.append(Client(f"unix:{socket_path}", **arguments))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    for region in regions:
        region.close()
