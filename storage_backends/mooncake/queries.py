"""Short calls with a deadline that the library does not keep: they run in threads, and are left behind late.

For calls that touch no buffer only. A bound on threads sheds load when all are stuck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from storage_backends.base import StorageError

T = TypeVar("T")

_THREADS = 4


class Queries:
    """Runs calls; all methods from any thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(_THREADS, "mooncake-query")
        self._free = threading.BoundedSemaphore(_THREADS)

    def ask(self, call: Callable[[], T]) -> T:
        """What the call returns or raises; StorageError when it takes longer than the timeout."""
        ends_s = time.monotonic() + self._timeout_s
        if not self._free.acquire(timeout=self._timeout_s):
            raise StorageError(f"the Mooncake master has not answered {_THREADS} earlier queries")
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self._free.release())
        try:
            return future.result(max(0.0, ends_s - time.monotonic()))
        except TimeoutError as error:
            raise StorageError(f"the Mooncake master did not answer within {self._timeout_s:g} s") from error

    def close(self) -> None:
        """Takes no more calls. Those that are stuck end with the library's own timeouts."""
        self._pool.shutdown(wait=False)
