"""A bound on bytes in flight: who comes first is served first, and nobody waits beyond a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import deque


class ByteBudget:
    """Bytes that may be in flight at once, on one event loop. A demand above the total counts as the total,
    so that it goes through alone."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int, deadline_s: float) -> bool:
        """Wait until `nbytes` are free, and take them; True obliges to `give_back` the same number.
        False when that did not happen before `deadline_s` on the monotonic clock."""
        need_bytes = min(nbytes, self.total_bytes)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((need_bytes, granted))
        self._grant()
        try:
            if not granted.done():
                await asyncio.wait({granted}, timeout=max(0.0, deadline_s - time.monotonic()))
        except asyncio.CancelledError:
            if granted.done():
                self.give_back(nbytes)
            raise
        finally:
            if not granted.done():
                self._waiting.remove((need_bytes, granted))
                self._grant()  # it may have stood before smaller ones
        return granted.done()

    def give_back(self, nbytes: int) -> None:
        """Return what was taken; once for each successful take."""
        self.taken_bytes -= min(nbytes, self.total_bytes)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.taken_bytes + self._waiting[0][0] <= self.total_bytes:
            need_bytes, granted = self._waiting.popleft()
            self.taken_bytes += need_bytes
            granted.set_result(None)
