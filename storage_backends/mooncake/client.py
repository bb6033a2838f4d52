"""One Mooncake client from setup to its end, behind a gate that the library does not have.

Owns the store object: no call reaches it before its setup or after its close, and it is closed only when
nobody is inside. Decides nothing about when to replace it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from storage_backends.base import StorageError
from storage_backends.mooncake import codes
from storage_backends.mooncake.address import takes_connections
from storage_backends.mooncake.library import Library, Store
from storage_backends.specs import MooncakeSpec

PREFLIGHT_S = 0.5
"""A master that takes no connection within this is not tried: setup would hold the GIL for seconds."""
_TRIES = 3
_QUICK_S = 1.0
_PAGE_BYTES = 4096
_HEALTHY = 0

_LEFT_TO_EXIT: list[Client] = []
"""Clients that must not be closed, because their master is gone (17 s with the GIL held) or a call is still
inside (a crash). The process's end takes them."""


class Client:
    """All calls may come from several threads, and block. They raise StorageError once it is leaving."""

    def __init__(self, store: Store, config: object, answers: Callable[[], bool]) -> None:
        """`store` is set up; `answers` tells whether its master takes connections. Raises StorageError."""
        self._store = store
        self._config = config
        self._answers = answers
        self._inside = 0
        self._leaving = False
        self._changed = threading.Condition()
        self._page = mmap.mmap(-1, _PAGE_BYTES)
        self._page_address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self.register(self._page_address, _PAGE_BYTES)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Store]:
        with self._changed:
            if self._leaving:
                raise StorageError("the Mooncake client is being replaced: try again")
            self._inside += 1
        try:
            yield self._store
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def healthy(self) -> bool:
        """What the library thinks of its master. Costs nothing; it may think well of a dead one."""
        with self._entered() as store:
            return store.health_check() == _HEALTHY

    def register(self, address: int, nbytes: int) -> None:
        """Raises StorageError."""
        with self._entered() as store:
            if (code := store.register_buffer(address, nbytes)) != 0:
                raise StorageError(f"Mooncake cannot register {nbytes} bytes of host memory (code {code})")

    def presence(self, keys: list[str]) -> list[int]:
        with self._entered() as store:
            return store.batch_is_exist(keys)

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Returns when no byte can land any more."""
        with self._entered() as store:
            return store.batch_get_into(keys, addresses, sizes)

    def put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        with self._entered() as store:
            return store.batch_put_from(keys, addresses, sizes, self._config)

    def remove(self, keys: list[str]) -> list[int]:
        """Also what is leased: whoever reads it meanwhile finds out by its checksum."""
        with self._entered() as store:
            return store.batch_remove(keys, True)

    def length(self, key: str) -> int:
        with self._entered() as store:
            return store.get_size(key)

    def prove(self) -> None:
        """Store a page, find it, read it. Raises StorageError when that fails; a full pool proves nothing.
        A setup with a host name that nobody can resolve succeeds: only this tells."""
        address, said = self._page_address, 0
        for _ in range(_TRIES):  # one of several segments may be lost
            key, content, half = f"hicache-probe/{secrets.token_hex(8)}", secrets.token_bytes(64), 2048
            self._page[:64], self._page[half : half + 64] = content, bytes(64)
            said = self.put([key], [address], [64])[0]
            if said == codes.NO_SPACE:
                return
            if said == 0 and self.presence([key]) == [1]:
                said = self.get([key], [address + half], [64])[0]
            self.remove([key])
            if said == 64 and self._page[half : half + 64] == content:
                return
        raise StorageError(
            f"Mooncake stores nothing that can be read back (code {said}): the pool's nodes must be alive "
            "and reach each other at their `local_hostname`"
        )

    def leave(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._leaving = True

    def close(self, timeout_s: float) -> bool:
        """Let nobody in, wait until all are out, close. False when it is left to the process's exit."""
        self.leave()
        with self._changed:
            idle = self._changed.wait_for(lambda: self._inside == 0, timeout_s)
        if not idle or self._store.health_check() != _HEALTHY or not self._answers():
            _LEFT_TO_EXIT.append(self)
            return False
        self._store.close()
        return True

    @property
    def idle(self) -> bool:
        return self._inside == 0


def connect(library: Library, spec: MooncakeSpec, master: str, segment_bytes: int) -> Client:
    """Set up a client and prove that it works. Raises StorageError with the remedy."""
    hostname = spec.local_hostname or "127.0.0.1"

    def answers() -> bool:
        return takes_connections(master, PREFLIGHT_S)

    for left in reversed(range(_TRIES)):
        if not answers():
            raise StorageError(
                f"no Mooncake master takes connections at {master}: start mooncake_master there, or correct "
                "`master`"
            )
        store, began_s = library.store(), time.monotonic()
        devices = ",".join(spec.rdma_devices)
        code = store.setup(hostname, spec.metadata, segment_bytes, 0, spec.protocol, devices, master)
        if code == 0:
            break
        if not left or time.monotonic() - began_s > _QUICK_S:  # else its random port was taken
            raise StorageError(
                f"Mooncake cannot be set up with {master} (code {code}): is that a Mooncake master, of the "
                f"same release, and are {spec.metadata} and {spec.protocol} right?"
            )
    client = Client(store, library.replicate_config(spec), answers)
    try:
        client.prove()
    except StorageError:
        client.close(0.0)
        raise
    return client
