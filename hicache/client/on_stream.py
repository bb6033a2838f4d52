"""OnStream: a client whose transfers come after what the engine's GPU stream has queued.

Gives every load and backup a ready event, and takes events back when their transfers are settled. A cache
uses it in place of the plain client; nothing on the engine's host waits. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache.client.client import Client
from hicache.client.cuda import ReadyRing
from hicache.client.messages import Found, LayerCells, Lease, Placement, PrefetchPolicy, Prompt, ReadyEvent
from hicache.client.prefetching import Prefetching
from hicache.client.tickets import Ticket
from hicache.core.words import BoolArray


class OnStream:
    """`client`, for the engine that works on `stream()` (the driver's pointer, asked anew for each transfer).
    The engine fills slots, and reads what was loaded, on that stream. Not safe for threads: one
    scheduler's."""

    def __init__(self, client: Client, events: ReadyRing, stream: Callable[[], int]) -> None:
        self._client = client
        self._events = events
        self._stream = stream
        self._under_way: list[tuple[Ticket, ReadyEvent]] = []

    @property
    def ready(self) -> bool:
        return self._client.ready

    @property
    def epoch(self) -> int:
        return self._client.epoch

    def lookup(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        timeout_s: float,
    ) -> Found | None:
        """See Client."""
        return self._client.lookup(prompt, device=device, limit_pages=limit_pages, timeout_s=timeout_s)

    def start_load(
        self, lease: Lease, placements: Mapping[str, Placement], *, cells: LayerCells | None = None
    ) -> Ticket:
        """See Client; it begins after what the stream has queued, which may still read the slots."""
        ready = self._recorded()
        return self._kept(self._client.start_load(lease, placements, ready=ready, cells=cells), ready)

    def start_backup(self, prompt: Prompt, placements: Mapping[str, Placement]) -> Ticket:
        """See Client; it begins after what the stream has queued, which may still fill the slots."""
        ready = self._recorded()
        return self._kept(self._client.start_backup(prompt, placements, ready=ready), ready)

    def prefetch(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        policy: PrefetchPolicy,
        timeout_s: float = 0.0,
    ) -> Prefetching | None:
        """See Client."""
        return self._client.prefetch(
            prompt, device=device, limit_pages=limit_pages, policy=policy, timeout_s=timeout_s
        )

    def release(self, lease: Lease) -> None:
        self._client.release(lease)

    def close(self) -> None:
        """Close the client. Events of transfers that are not settled by then stay with the process."""
        self._client.close()

    def _recorded(self) -> ReadyEvent:
        settled = [entry for entry in self._under_way if entry[0].settled()]
        self._under_way = [entry for entry in self._under_way if entry not in settled]
        for _, ready in settled:
            self._events.settled(ready)
        return self._events.record(self._stream())

    def _kept(self, ticket: Ticket, ready: ReadyEvent) -> Ticket:
        self._under_way.append((ticket, ready))
        return ticket
