"""The asyncio client: the same calls and promises, waited for by the event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_daemon import FakeDaemon, FakeProcess

from hicache.client import (
    AsyncClient,
    Client,
    Lease,
    Outcome,
    Placement,
    PrefetchPolicy,
    PrefetchState,
    Prompt,
)
from tests.live import LiveDaemon

ROOT = Path(__file__).resolve().parents[2]
PROMPT = Prompt("r1", np.arange(12, dtype=np.int32))
PAGES = {"full": Placement(np.arange(2, dtype=np.int32), np.array([5, 3], np.int32))}
LEASE = Lease("l", 1)
SOON_S = 20.0

Connect = Callable[..., Client]


async def attached(connect: Connect) -> AsyncClient:
    client = AsyncClient(connect())
    assert await client.wait_attached(SOON_S), client.problem
    return client


async def lookup(client: AsyncClient, timeout_s: float = SOON_S) -> int | None:
    found = await client.lookup(PROMPT, device={}, limit_pages=2, timeout_s=timeout_s)
    return None if found is None else found.boundary


async def test_every_verb_is_answered(daemon: FakeDaemon, connect: Connect) -> None:
    client = await attached(connect)
    assert client.ready
    assert client.problem == ""
    assert client.epoch == 1
    client.release(LEASE)
    assert (await asyncio.to_thread(daemon.seen, "release_lease")).release_lease.lease_id == "l"
    assert await lookup(client) is not None
    load = client.start_load(LEASE, PAGES)
    assert await client.outcome(load, SOON_S) is Outcome.OK
    assert await client.settled(load, SOON_S)
    backup = client.start_backup(PROMPT, PAGES)
    assert await client.outcome(backup, SOON_S) is Outcome.OK
    prefetching = client.prefetch(PROMPT, device={}, limit_pages=2, policy=PrefetchPolicy.TIMEOUT)
    assert prefetching is not None
    progress = await client.progress(prefetching, SOON_S)
    assert progress is not None
    assert progress.state is PrefetchState.DONE
    await client.close()
    assert await lookup(client) is None


async def test_the_loop_goes_on_while_calls_wait_and_many_wait_at_once(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = await attached(connect)
    daemon.hold("lookup_prefix")
    waiting = [asyncio.ensure_future(lookup(client)) for _ in range(50)]
    await asyncio.to_thread(daemon.seen, "lookup_prefix")
    assert not any(task.done() for task in waiting)
    daemon.let_go("lookup_prefix")
    assert None not in await asyncio.gather(*waiting)


async def test_a_deadline_is_kept_and_what_is_found_later_is_released(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = await attached(connect)
    daemon.hold("lookup_prefix")
    assert await lookup(client, timeout_s=0.05) is None
    assert not client.ready, "a daemon that keeps callers waiting is asked nothing more"
    assert await lookup(client, timeout_s=60) is None
    daemon.let_go("lookup_prefix")
    await asyncio.to_thread(daemon.seen, "release_lease")


async def test_a_cancelled_lookup_leaves_no_lease_behind(daemon: FakeDaemon, connect: Connect) -> None:
    client = await attached(connect)
    daemon.hold("lookup_prefix")
    task = asyncio.ensure_future(lookup(client))
    await asyncio.to_thread(daemon.seen, "lookup_prefix")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    daemon.let_go("lookup_prefix")
    await asyncio.to_thread(daemon.seen, "release_lease")


async def test_slots_are_free_only_when_the_ticket_is_settled(
    spawn: Callable[[str], FakeProcess], connect: Connect
) -> None:
    """A frozen daemon: pending, not settled; dead: settled. As with the plain client."""
    process = spawn("one")
    client = await attached(connect)
    process.freeze()
    load = client.start_load(LEASE, PAGES)
    assert await client.outcome(load, timeout_s=0.05) is Outcome.PENDING
    assert not await client.settled(load, timeout_s=0.05)
    process.kill()
    assert await client.settled(load, SOON_S)
    assert await client.outcome(load, SOON_S) is Outcome.FAILED


async def test_a_loop_that_is_gone_does_not_disturb_the_clients_thread(
    daemon: FakeDaemon, connect: Connect
) -> None:
    client = await attached(connect)
    daemon.hold("load")
    ticket = client.start_load(LEASE, PAGES)

    def another_loop() -> Outcome:
        return asyncio.run(client.outcome(ticket, timeout_s=0.05))

    assert await asyncio.to_thread(another_loop) is Outcome.PENDING
    daemon.let_go("load")
    assert await client.outcome(ticket, SOON_S) is Outcome.OK
    assert await lookup(client) is not None


def test_the_example_runs(tmp_path: Path) -> None:
    """Against `hicache serve`; its own part is some 30 lines."""
    daemon = LiveDaemon(tmp_path)
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "async_engine.py"), daemon.address],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "4 pages came back: True\n"
    finally:
        daemon.close()
