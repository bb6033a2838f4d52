"""A circuit breaker: stop asking a backend that does not answer, try it now and then, notice its recovery.

Decides only whether to ask. Knows no backend, and starts nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

OPEN_AFTER_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 2.0


class BreakerState(Enum):
    CLOSED = "closed"
    """Asked as usual."""
    OPEN = "open"
    """Not asked: what would be asked is FAILED at once."""
    HALF_OPEN = "half_open"
    """One batch is let through as a trial."""


_NEXT: Mapping[BreakerState, frozenset[BreakerState]] = {
    BreakerState.CLOSED: frozenset({BreakerState.OPEN}),
    BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN}),
    BreakerState.HALF_OPEN: frozenset({BreakerState.OPEN, BreakerState.CLOSED}),
}


class Breaker:
    """Opens after `OPEN_AFTER_FAILURES` failed batches in a row; the pause before a trial doubles while
    trials fail. Times are seconds of the clock given."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it has opened."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._trial_at_s = 0.0

    def allows(self) -> bool:
        """Whether a batch may be sent now. One that is sent must be followed by `succeeded` or `failed`."""
        if self.state is BreakerState.OPEN and self._clock() >= self._trial_at_s:
            self._move(BreakerState.HALF_OPEN)
            return True
        return self.state is BreakerState.CLOSED

    def wait_s(self) -> float:
        """How long nothing will be allowed, in seconds; 0 when something may be. During a trial: a guess."""
        if self.state is BreakerState.CLOSED:
            return 0.0
        return (
            max(0.0, self._trial_at_s - self._clock()) if self.state is BreakerState.OPEN else FIRST_PAUSE_S
        )

    def succeeded(self) -> None:
        """The backend answered a batch."""
        self._failures, self._pause_s = 0, FIRST_PAUSE_S
        if self.state is BreakerState.HALF_OPEN:
            self._move(BreakerState.CLOSED)

    def failed(self) -> None:
        """The backend could not answer a batch, or not in time."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open()
        elif self.state is BreakerState.CLOSED and self._failures >= OPEN_AFTER_FAILURES:
            self._open()

    def _open(self) -> None:
        self._move(BreakerState.OPEN)
        self.opened += 1
        self._trial_at_s = self._clock() + self._pause_s

    def _move(self, to: BreakerState) -> None:
        assert to in _NEXT[self.state], f"{self.state} -> {to}"
        self.state = to
