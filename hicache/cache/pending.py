"""Loading: a load-back that a request was begun without waiting for.

The request can be used at once with what L1 had; what the load brings becomes part of it when the engine
says so, and not before, so that no boundary moves while the engine computes. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hicache.cache.loads import Load
from hicache.client.layers import LayerRow
from hicache.core.words import SlotArray


class Loading:
    """Made by `UnifiedRadixCache.begin(..., wait=False)`, ended by `end`, or with its request."""

    def __init__(
        self,
        load: Load,
        take: Callable[[float], None],
        poll: Callable[[], int],
        *,
        boundary: int,
        slots: Mapping[str, SlotArray],
        stored_from: int | None,
    ) -> None:
        self.load = load
        self.boundary = boundary
        """Pages that the request will have if all goes well; where another request's load was joined, what
        it has now: how much more that will be shows at the end."""
        self.slots = slots
        """Per component, the slots of pages [0, boundary), to be read layer by layer, each when it has
        landed. What is computed from them counts only if the request has that boundary after `end`."""
        self.stored_from = stored_from
        """The boundary that L1 and L2 could serve before the request's prefetch, where that is known."""
        self._take = take
        self._poll = poll

    @property
    def layers(self) -> LayerRow | None:
        """Which layers have landed. None for a load that is shared, without a board, or when it is full."""
        return self.load.row

    def done(self) -> bool:
        """Whether waiting is of no more use: it has ended, or its time is over. Waits for nothing."""
        self._poll()
        return self.load.ended or self.load.late

    def end(self, timeout_s: float = 0.0) -> None:
        """Take what has come, after waiting at most so long, and go on: from now on the request's boundary,
        slots and private state are settled. A load that has not ended goes on for whoever comes next."""
        self._take(timeout_s)
