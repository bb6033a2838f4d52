"""Fixtures: the engine side of a daemon, checked for leaks afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from controller.daemon.config import Server
from tests.daemon.rig import Rig, regions_mapped, regions_open, until

Opener = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def short_path() -> Iterator[str]:
    """A directory whose sockets' paths are short enough."""
    with tempfile.TemporaryDirectory(prefix="hc") as path:
        yield path


@pytest.fixture
def open_rig(short_path: str) -> Opener:
    """Open a rig; when it is closed, nothing may be left mapped or open."""

    @asynccontextmanager
    async def opened(*, ticket_life_s: float = 30.0, **settings: object) -> AsyncIterator[Rig]:
        server = Server(**{"socket": f"{short_path}/s", "grace_s": 5.0, **settings})
        before = regions_mapped(), regions_open()
        rig = Rig(server.socket, server, ticket_life_s=ticket_life_s)
        await rig.start()
        try:
            yield rig
        finally:
            await rig.stop()
        assert rig.handoff.n_waiting == 0
        assert rig.handoff.n_connections == 0
        assert rig.controller.specs == {}
        await until(lambda: (regions_mapped(), regions_open()) == before, "every region is given back")

    return opened


@pytest.fixture
async def rig(open_rig: Opener) -> AsyncIterator[Rig]:
    async with open_rig() as one:
        yield one
