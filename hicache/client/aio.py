"""AsyncClient: the client for engines that run on asyncio.

The same connection, calls and tickets as `Client`; only the waiting is the event loop's. The client's thread
wakes the loop and does nothing else there. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

from hicache.client.client import Client
from hicache.client.connection import Call
from hicache.client.messages import (
    Found,
    LayerCells,
    Lease,
    Placement,
    PrefetchPolicy,
    Progress,
    Prompt,
    ReadyEvent,
)
from hicache.client.prefetching import Prefetching, progress_of
from hicache.client.tickets import Outcome, Ticket
from hicache.core.words import BoolArray

_PAUSE_S = 0.01
"""Between two looks at whether a silent daemon's process is dead."""


class AsyncClient:
    """`client`, for one event loop. It becomes this object's: `close` closes it.

    Transfers are started and waited for in two steps, so that a task that is cancelled still has the
    ticket: its slots may be used again only when that is settled.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def ready(self) -> bool:
        """See Client."""
        return self._client.ready

    @property
    def epoch(self) -> int:
        """See Client."""
        return self._client.epoch

    @property
    def problem(self) -> str:
        """See Client."""
        return self._client.problem

    async def wait_attached(self, timeout_s: float) -> bool:
        """Whether the engine is attached, waited for at most `timeout_s`."""
        return await asyncio.to_thread(self._client.wait_attached, timeout_s)

    async def lookup(
        self, prompt: Prompt, *, device: Mapping[str, BoolArray], limit_pages: int, timeout_s: float
    ) -> Found | None:
        """See Client. A task that is cancelled meanwhile leaves no lease behind."""
        asking = self._client.ask(prompt, device=device, limit_pages=limit_pages)
        if asking is None:
            return None
        try:
            await _ended(asking.call, timeout_s)
        except asyncio.CancelledError:
            asking.give_up()
            raise
        return asking.found()

    def start_load(
        self,
        lease: Lease,
        placements: Mapping[str, Placement],
        *,
        ready: ReadyEvent | None = None,
        cells: LayerCells | None = None,
    ) -> Ticket:
        """See Client; await the ticket with `outcome`. Waits for nothing."""
        return self._client.start_load(lease, placements, ready=ready, cells=cells)

    def start_backup(
        self, prompt: Prompt, placements: Mapping[str, Placement], *, ready: ReadyEvent | None = None
    ) -> Ticket:
        """See Client; await the ticket with `outcome`. Waits for nothing."""
        return self._client.start_backup(prompt, placements, ready=ready)

    async def outcome(self, ticket: Ticket, timeout_s: float) -> Outcome:
        """How a load or backup ended, waited for at most `timeout_s`: PENDING when it has not by then, and
        the daemon is asked nothing more until it says something."""
        await _told(ticket.then, timeout_s)
        return ticket.wait(0.0)

    async def settled(self, ticket: Ticket, timeout_s: float) -> bool:
        """Whether the ticket's slots may be used again, waited for at most `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not ticket.settled():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            if ticket.done():  # the connection was lost: only the process's end or a new attachment can tell
                await asyncio.sleep(min(_PAUSE_S, left))
            else:
                await _told(ticket.then, min(10 * _PAUSE_S, left))
        return True

    def prefetch(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        policy: PrefetchPolicy,
        timeout_s: float = 0.0,
    ) -> Prefetching | None:
        """See Client; end it with `progress` or its `cancel`. Waits for nothing."""
        return self._client.prefetch(
            prompt, device=device, limit_pages=limit_pages, policy=policy, timeout_s=timeout_s
        )

    async def progress(self, prefetching: Prefetching, timeout_s: float) -> Progress | None:
        """As `Prefetching.wait`. A task that is cancelled meanwhile cancels the prefetch."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if await _ended(prefetching.started, timeout_s):
                asked = prefetching.ask()
                if asked is None or await _ended(asked, deadline - loop.time()):
                    return None if asked is None else progress_of(asked)
        except asyncio.CancelledError:
            prefetching.cancel()
            raise
        prefetching.cancel()
        return None

    def release(self, lease: Lease) -> None:
        """See Client. Waits for nothing."""
        self._client.release(lease)

    async def close(self) -> None:
        """See Client."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _ended(call: Call, timeout_s: float) -> bool:
    """Whether the call ended within `timeout_s`."""
    await _told(lambda act: call.then(lambda reply: act()), timeout_s)
    return call.ended


async def _told(then: Callable[[Callable[[], None]], None], timeout_s: float) -> None:
    """Wait until `then` runs what it is given, on whichever thread, or until the time is over."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(told.set)

    then(tell)
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, timeout_s)):
            await told.wait()
