"""Faults of our own that a last line of defence caught: counted, logged with their trace, and shown in
health for a while. Hides nothing from the operator and tells callers nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import structlog

SHOWN_FOR_S = 600.0

log = structlog.get_logger("hicache.faults")


class Faults:
    """All such faults of one daemon."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, str] | None = None
        self.count = 0

    def caught(self, where: str, error: BaseException) -> None:
        self.count += 1
        self._last = self._clock(), f"{where}: {type(error).__name__}"
        log.error("internal_error", where=where, exc_info=error)

    def problems(self) -> Iterator[str]:
        if self._last and self._clock() - self._last[0] < SHOWN_FOR_S:
            yield f"internal error in {self._last[1]} ({self.count} since start); the log has the trace"
