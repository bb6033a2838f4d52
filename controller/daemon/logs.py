"""Logs: structured lines on standard error, each event limited in rate so that no trouble floods them.

Decides what is left out; what is left out is counted in the event's next line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping

import structlog

WINDOW_S = 10.0


class RateLimit:
    """A structlog processor: at most `most` lines of one event and level in each window."""

    def __init__(self, most: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._window_s = window_s
        self._clock = clock
        self._windows: dict[str, tuple[float, int, int]] = {}

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, object]
    ) -> MutableMapping[str, object]:
        """Pass the line on or drop it (structlog.DropEvent)."""
        key = f"{method} {event.get('event')}"
        now_s = self._clock()
        begun_s, passed, left_out = self._windows.get(key, (now_s, 0, 0))
        if now_s - begun_s >= self._window_s:
            begun_s, passed = now_s, 0
        if passed >= self._most:
            self._windows[key] = begun_s, passed, left_out + 1
            raise structlog.DropEvent
        if left_out:
            event["left_out"] = left_out
        self._windows[key] = begun_s, passed + 1, 0
        return event


def configure_logs(level: str, form: str, max_per_event: int) -> None:
    """Set up logging for this process; `form` is `text` or `json`."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            pad_event_to=24,
            # Never one that shows local variables: prompts and tenants' salts are among them.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    traces: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info] if form == "json" else []
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            RateLimit(max_per_event, WINDOW_S),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *traces,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
