"""A copy engine whose every copy waits for the test: order without clocks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from controller.transfers.copies import CopyTable

DEADLINE_S = 20.0


def labelled(label: int, n_chunks: int = 1) -> CopyTable:
    """A table of one-byte pieces; with `chunk_bytes=1` each is a chunk that carries the label."""
    column = np.full(n_chunks, label, dtype=np.uint64)
    return CopyTable(column, column, np.ones(n_chunks, dtype=np.uint64))


class Chunk:
    """A copy under way."""

    def __init__(self, table: CopyTable) -> None:
        self.label = int(table.source[0])
        self.thread = threading.get_ident()
        self._go = threading.Event()
        self._error: BaseException | None = None

    def land(self, error: BaseException | None = None) -> None:
        """Let the copy return, or raise."""
        self._error = error
        self._go.set()

    def wait(self) -> None:
        assert self._go.wait(DEADLINE_S), "the test let no copy go"
        if self._error is not None:
            raise self._error


class GatedEngine:
    def __init__(self) -> None:
        self._started: queue.Queue[Chunk] = queue.Queue()
        self._open = threading.Event()

    def copy(self, table: CopyTable) -> None:
        if self._open.is_set():
            return
        chunk = Chunk(table)
        self._started.put(chunk)
        chunk.wait()

    def next(self) -> Chunk:
        """The copy that began next; waits for it."""
        return self._started.get(timeout=DEADLINE_S)

    def labels(self, n_chunks: int) -> list[int]:
        """Let chunks land one after the other; which they were."""
        labels = []
        for _ in range(n_chunks):
            chunk = self.next()
            labels.append(chunk.label)
            chunk.land()
        return labels

    def nothing_waits(self) -> bool:
        return self._started.empty()

    @contextmanager
    def opened_at_the_end(self) -> Iterator[GatedEngine]:
        """Whatever is left in flight lands, so that a failing test does not hang."""
        try:
            yield self
        finally:
            self._open.set()
            while not self._started.empty():
                self._started.get_nowait().land()
