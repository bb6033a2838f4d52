"""Ready events: what an engine has queued on its GPU must have happened before its slots are touched.

An engine records an interprocess event on its own stream and sends its handle with the request; nothing on
its side waits. Here one thread asks the driver about the events that somebody waits for, so that neither a
copy thread nor a stream stands still behind an engine that is busy. Owns the imported events.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from controller.transfers.cuda.streams import StreamDriver

POLL_S = 0.0002
MAX_EVENTS = 4096
"""Imported events at once, all engines together: an engine uses a ring of a few."""


class ReadyError(OSError):
    """An event that cannot be waited for; the message says what to do."""


@dataclass(frozen=True)
class _Wait:
    engine_id: str
    device: int
    handle: bytes
    future: Future[None]


class ReadyEvents:
    """Any thread may ask. Events are kept by engine until `forget`: importing one takes a while, and an
    engine uses the same few again and again."""

    def __init__(self, driver: StreamDriver, *, poll_s: float = POLL_S, max_events: int = MAX_EVENTS) -> None:
        self._driver = driver
        self._poll_s = poll_s
        self._max_events = max_events
        self._changed = threading.Condition(threading.Lock())
        self._events: dict[tuple[str, bytes], tuple[int, int]] = {}
        """Of an engine and a handle: device and event."""
        self._waiting: list[_Wait] = []
        self._closed = False
        self._death = ""
        self._thread = threading.Thread(target=self._serve, name="hicache-ready", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        return self._death

    def when(self, engine_id: str, device: int, handle: bytes) -> Future[None]:
        """A future that ends when the event has happened as it was recorded last before this call, or with
        CudaError or ReadyError. Asks the driver nothing on this thread. May be cancelled."""
        future: Future[None] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(ReadyError(self._death or "ready: the daemon is stopping"))
            else:
                self._waiting.append(_Wait(engine_id, device, handle, future))
                self._changed.notify()
        return future

    def forget(self, engine_id: str) -> None:
        """Close an engine's events; nobody waits for one of them any more. Raises CudaError."""
        with self._changed:
            gone = [key for key in self._events if key[0] == engine_id]
            events = [self._events.pop(key) for key in gone]
        for device, event in events:
            self._driver.close_event(device, event)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread; waiters end in ReadyError. False when it has not ended in time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self._ask()
        except BaseException as error:  # noqa: BLE001 - last line of defence: shown by `problem`
            self._death = f"the thread that watches ready events died: {type(error).__name__}: {error}"
        self._give_up(ReadyError(self._death or "ready: the daemon is stopping"))

    def _wait_for_work(self) -> bool:
        """False when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return not self._closed

    def _ask(self) -> None:
        with self._changed:
            asked, self._waiting = self._waiting, []
        left = [wait for wait in asked if not self._over(wait)]
        with self._changed:
            self._waiting += left
            if left:
                self._changed.wait_for(lambda: self._closed, timeout=self._poll_s)

    def _over(self, wait: _Wait) -> bool:
        """Whether there is no more to ask about."""
        if wait.future.cancelled():
            return True
        try:
            happened = self._driver.happened(wait.device, self._imported(wait))
        except OSError as error:
            _end(wait.future, error)
            return True
        if happened:
            _end(wait.future, None)
        return happened

    def _imported(self, wait: _Wait) -> int:
        known = self._events.get((wait.engine_id, wait.handle))
        if known is not None:
            return known[1]
        if len(self._events) >= self._max_events:
            raise ReadyError(
                f"ready: {len(self._events)} events are open; record the same few again and again"
            )
        event = self._driver.import_event(wait.device, wait.handle)
        with self._changed:
            self._events[wait.engine_id, wait.handle] = wait.device, event
        return event

    def _give_up(self, error: ReadyError) -> None:
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, []
        for wait in left:
            _end(wait.future, error)


def _end(future: Future[None], error: BaseException | None) -> None:
    """Unless whoever waited has gone meanwhile."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
