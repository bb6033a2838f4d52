"""The contract of a storage backend: opaque keys to frames of bytes, in batches, to and from one buffer.

A backend stores and returns bytes. It never looks into a frame, never retries, never decides what is
worth keeping for whom. `storage_backends.testing` states the contract as tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self


class Outcome(Enum):
    """What became of one item of a batch. Absent is never failed."""

    OK = "ok"
    ABSENT = "absent"
    """There is no such object, and only that."""
    WRONG_SIZE = "wrong_size"
    """There is an object of another length; nothing was delivered."""
    FULL = "full"
    """No room, and none could be made."""
    FAILED = "failed"
    """The backend could not tell or could not do it; a later try may succeed."""


class StorageError(Exception):
    """A backend that cannot be opened or used at all; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a batch: its key and its bytes' place in the registered buffer."""

    key: str
    offset: int
    nbytes: int

    def lies_in(self, buffer_bytes: int) -> bool:
        """Whether the range is inside a buffer of that length; a backend answers FAILED where it is not."""
        return self.offset >= 0 and self.nbytes >= 0 and self.offset + self.nbytes <= buffer_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """What a backend holds. `capacity_bytes` is 0 when the backend cannot tell or has no bound."""

    n_objects: int
    used_bytes: int
    capacity_bytes: int


class StorageBackend(ABC):
    """Opaque key to bytes; a context that closes it. All calls may come from several threads at once and
    block their caller.

    Per-item outcomes come back in the order of the items; one bad item never spoils its neighbours.
    No call raises because of an item; StorageError means that the whole batch could not be tried.
    An object becomes visible whole or not at all, also when the process dies while writing it.
    Writing a key that exists is a success: keys are content addresses.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def register(self, buffer: memoryview) -> None:
        """Name the one writable buffer of bytes that every Item's range lies in. Called once, before
        any read or write; the buffer outlives the backend."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        """OK, ABSENT or FAILED for each key."""

    @abstractmethod
    def read(self, items: Sequence[Item]) -> list[Outcome]:
        """Fill each item's range with its object. OK only when the object has exactly `nbytes` bytes;
        otherwise the range's content is undefined."""

    @abstractmethod
    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """Store each item's range under its key. The ranges do not change until the call returns."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        """OK when the object is gone now, ABSENT when there was none, else FAILED."""

    @abstractmethod
    def usage(self) -> Usage:
        """What is held now."""

    @abstractmethod
    def ping(self) -> None:
        """Return when the backend can be used; raise StorageError when it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Give back every resource. No other call may be running; a second close does nothing."""
