"""MemoryBackend: objects as arrays of bytes in this process. The reference of the contract.

Keeps at most its capacity, the least recently used go first. Never touches a file or the network, and
forgets everything when it is closed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage_backends.base import Item, Outcome, StorageBackend, Usage
from storage_backends.specs import MemorySpec

Bytes: TypeAlias = NDArray[np.uint8]


class MemoryBackend(StorageBackend):
    """A dictionary with a byte capacity. numpy copies, because numpy gives up the GIL while it does."""

    def __init__(self, spec: MemorySpec) -> None:
        self._capacity_bytes = spec.capacity_bytes
        self._objects: OrderedDict[str, Bytes] = OrderedDict()
        """The least recently used first."""
        self._used_bytes = 0
        self._mutex = threading.Lock()
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)

    def register(self, buffer: memoryview) -> None:
        self._buffer = np.frombuffer(buffer, dtype=np.uint8)

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        with self._mutex:
            return [Outcome.OK if key in self._objects else Outcome.ABSENT for key in keys]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._read_one(item) for item in items]

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._write_one(item) for item in items]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        with self._mutex:
            return [Outcome.OK if self._drop(key) else Outcome.ABSENT for key in keys]

    def usage(self) -> Usage:
        with self._mutex:
            return Usage(len(self._objects), self._used_bytes, self._capacity_bytes)

    def ping(self) -> None:
        """Always well."""

    def close(self) -> None:
        with self._mutex:
            self._objects.clear()
            self._used_bytes = 0
        self._buffer = np.empty(0, dtype=np.uint8)

    def _read_one(self, item: Item) -> Outcome:
        with self._mutex:
            stored = self._objects.get(item.key)
            if stored is None:
                return Outcome.ABSENT
            if stored.nbytes != item.nbytes:
                return Outcome.WRONG_SIZE
            if not item.lies_in(self._buffer.nbytes):
                return Outcome.FAILED
            self._objects.move_to_end(item.key)
        self._buffer[item.offset : item.offset + item.nbytes] = stored
        return Outcome.OK

    def _write_one(self, item: Item) -> Outcome:
        if not item.lies_in(self._buffer.nbytes):
            return Outcome.FAILED
        if item.nbytes > self._capacity_bytes:
            return Outcome.FULL
        with self._mutex:
            present = self._objects.get(item.key)
            if present is not None and present.nbytes == item.nbytes:
                self._objects.move_to_end(item.key)
                return Outcome.OK
        stored = self._buffer[item.offset : item.offset + item.nbytes].copy()
        with self._mutex:
            self._drop(item.key)
            while self._used_bytes + stored.nbytes > self._capacity_bytes:
                self._drop(next(iter(self._objects)))
            self._objects[item.key] = stored
            self._used_bytes += stored.nbytes
        return Outcome.OK

    def _drop(self, key: str) -> bool:
        stored = self._objects.pop(key, None)
        if stored is None:
            return False
        self._used_bytes -= stored.nbytes
        return True
