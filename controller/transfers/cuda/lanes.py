"""Lanes: one device's two streams, and the rule that whoever queued bytes waits until they have landed.

Loads and stores run on streams of their own, so that they use the device's two copy engines at once.
Owns the streams and the events. Knows no engine's memory and never chooses a way to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from controller.memory.cuda import CudaError
from controller.transfers.copies import CopyError
from controller.transfers.cuda.streams import StreamDriver
from controller.transfers.scheduler import Direction


class Lanes:
    """One device's streams. Any thread; `close` after the last copy has ended."""

    def __init__(self, driver: StreamDriver, device: int) -> None:
        """Raises CudaError."""
        self._driver = driver
        self.device = device
        self._streams: dict[Direction, int] = {}
        self._events: deque[int] = deque()
        self._lost = ""
        for direction in Direction:
            urgent = direction is Direction.LOAD
            self._streams[direction] = driver.open_stream(device, urgent=urgent)

    @property
    def problem(self) -> str:
        """Why nothing can be copied any more; empty while all is well."""
        return self._lost

    def run(self, direction: Direction, submit: Callable[[int], None]) -> None:
        """Call `submit` with the direction's stream, and return when all that it queued has landed. Raises
        CopyError, and then too nothing that was queued moves any more."""
        if self._lost:
            raise CopyError(self._lost)
        stream = self._streams[direction]
        try:
            event = self._event()
        except CudaError as error:
            raise self._failed(error) from error
        try:
            submit(stream)
            self._land(event, stream)
        except CudaError as error:
            self._settle(event, stream)
            raise self._failed(error) from error
        self._events.append(event)

    def close(self) -> None:
        """Give back streams and events. Raises CudaError; a second time does nothing."""
        streams, self._streams = self._streams, {}
        events, self._events = self._events, deque()
        for event in events:
            self._driver.close_event(self.device, event)
        for stream in streams.values():
            self._driver.close_stream(self.device, stream)

    def _event(self) -> int:
        """One that nobody uses now: as many are kept as there were ever copies at once."""
        try:
            return self._events.pop()
        except IndexError:
            return self._driver.open_event(self.device)

    def _land(self, event: int, stream: int) -> None:
        self._driver.record(self.device, event, stream)
        self._driver.wait(self.device, event)

    def _settle(self, event: int, stream: int) -> None:
        """After a failed call: what was queued before it must land before anybody hears of the failure. If
        even that fails, the context is gone, and with it everything that was in flight."""
        try:
            self._land(event, stream)
        except CudaError as error:
            self._lose(error)
        else:
            self._events.append(event)

    def _failed(self, error: CudaError) -> CopyError:
        if error.context_lost:
            self._lose(error)
        return CopyError(f"device {self.device}: {error.strerror}")

    def _lose(self, error: CudaError) -> None:
        self._lost = self._lost or (
            f"device {self.device}: its context is lost ({error.strerror}); restart the daemon"
        )
