"""MooncakeBackend: frames in a Mooncake pool, moved between it and the registered host slab without a copy.

Owns the ranges that the library may touch, the parts that a batch goes in, and what codes mean. A read or
write returns only when the library has: until then bytes may land. Absent objects, lost nodes and a lost
master are told apart; nothing is retried but a write that made a full pool evict.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from storage_backends.base import Item, Outcome, StorageBackend, StorageError, Usage
from storage_backends.mooncake import codes
from storage_backends.mooncake.address import host_and_port, takes_connections
from storage_backends.mooncake.client import PREFLIGHT_S, Client, connect
from storage_backends.mooncake.keeper import Keeper
from storage_backends.mooncake.library import Library, takes_key
from storage_backends.mooncake.master import EmbeddedMaster
from storage_backends.mooncake.queries import Queries
from storage_backends.mooncake.slices import SliceBudget, parts
from storage_backends.specs import MooncakeSpec

EVICTION_S = 0.03
"""A refused write makes the master evict, within 10 ms; after this it is tried once more."""
MOST_KEYS = 8192
"""Keys in one question."""
_LIBRARY_GAVE_UP_S = 55.0
"""The library gives a transfer up after 60 s, without knowing that it has ended."""

Connect = Callable[[], Client]
Part = Sequence[tuple[int, Item]]


class MooncakeBackend(StorageBackend):
    """A pure client of a pool, a client that also gives it memory, or a pool of its own."""

    def __init__(
        self,
        spec: MooncakeSpec,
        connect_client: Connect | None = None,
        answers: Callable[[], bool] | None = None,
    ) -> None:
        """Raises StorageError when no master can be reached or the pool does not work."""
        self._spec = spec
        self._library = Library(spec)
        self._master = EmbeddedMaster() if spec.embedded else None
        self._address = self._size_bytes = 0
        self._pinned: ctypes.Array[ctypes.c_char] | None = None
        """Keeps the buffer exported while the library may touch it."""
        self._budget = SliceBudget(spec.slices)
        self._queries = Queries(spec.op_timeout_s)
        self._keeper = Keeper(connect_client or self._connected, answers or self._answers, self._master)

    def _connected(self) -> Client:
        segment_bytes = self._spec.capacity_bytes if self._spec.embedded else self._spec.segment_bytes
        return connect(self._library, self._spec, self._master_address(), segment_bytes)

    def _answers(self) -> bool:
        return takes_connections(self._master_address(), PREFLIGHT_S)

    def _master_address(self) -> str:
        return self._master.address if self._master is not None else self._spec.master

    def register(self, buffer: memoryview) -> None:
        self._pinned = (ctypes.c_char * buffer.nbytes).from_buffer(buffer)
        self._address, self._size_bytes = ctypes.addressof(self._pinned), buffer.nbytes
        self._keeper.register(self._address, self._size_bytes)

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        return self._ask(keys, lambda client, asked: client.presence(asked), codes.of_presence)

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return self._ask(keys, lambda client, asked: client.remove(asked), codes.of_removal)

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        return self._move(items, self._read_part)

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        return self._move(items, self._write_part, least_bytes=1)

    def usage(self) -> Usage:
        """Of the whole pool, also what others hold there."""
        metrics = self._master.metrics if self._master is not None else self._spec.metrics
        return _pool_usage(metrics, self._spec.op_timeout_s) if metrics else Usage(0, 0, 0)

    def ping(self) -> None:
        if self.contains(["hicache-probe"]) == [Outcome.FAILED]:
            raise StorageError("the Mooncake master refuses queries or does not answer them")
        if self._keeper.problem:
            raise StorageError(self._keeper.problem)

    def close(self) -> None:
        self._keeper.close()
        self._queries.close()
        self._pinned = None

    # questions

    def _ask(
        self,
        keys: Sequence[str],
        call: Callable[[Client, list[str]], list[int]],
        meaning: Callable[[int], Outcome],
    ) -> list[Outcome]:
        """The call runs in a thread that is left behind when it is late: it touches no buffer."""
        client = self._keeper.client()
        outcomes = [Outcome.FAILED] * len(keys)
        plain = all(keys) and all(map(str.isascii, keys))
        places = range(len(keys)) if plain else [i for i, key in enumerate(keys) if takes_key(key)]
        for begin in range(0, len(places), MOST_KEYS):
            asked = places[begin : begin + MOST_KEYS]
            texts = [keys[place] for place in asked]
            said = self._queries.ask(partial(call, client, texts))
            self._keeper.hear(said)
            known = {code: meaning(code) for code in set(said)}
            for place, code in zip(asked, said, strict=True):
                outcomes[place] = known[code]
        return outcomes

    # batches

    def _move(
        self,
        items: Sequence[Item],
        move_part: Callable[[Client, Part], list[Outcome]],
        least_bytes: int = 0,
    ) -> list[Outcome]:
        """Part by part; what has not begun in time is not begun. The pool holds no empty objects."""
        ends_s = time.monotonic() + self._spec.op_timeout_s
        outcomes = [Outcome.FAILED] * len(items)
        for number, part in enumerate(parts(self._usable(items, least_bytes))):
            if time.monotonic() > ends_s or not self._budget.take(len(part), ends_s - time.monotonic()):
                break
            try:
                done = move_part(self._keeper.client(), part)
            except StorageError:
                if number == 0:
                    raise
                break  # what earlier parts have done is done
            finally:
                self._budget.give_back(len(part))
            for (place, _), outcome in zip(part, done, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _usable(self, items: Sequence[Item], least_bytes: int) -> Part:
        """The items that the library may have, with their places. TCP moves bytes outside the registered
        range without a word, and RDMA does not: no pointer is made but from items that pass here."""
        end, least = self._size_bytes, least_bytes
        return [
            (place, item)
            for place, item in enumerate(items)
            if item.offset >= 0 and least <= item.nbytes <= end - item.offset and takes_key(item.key)
        ]

    def _call(
        self,
        client: Client,
        part: Part,
        call: Callable[[list[str], list[int], list[int]], list[int]],
    ) -> list[int]:
        began_s = time.monotonic()
        items = [item for _, item in part]
        said = call(
            [item.key for item in items],
            [self._address + item.offset for item in items],
            [item.nbytes for item in items],
        )
        if len(said) != len(items):
            raise StorageError(f"Mooncake answered {len(said)} codes for {len(items)} objects")
        self._keeper.judge(client, said)
        if time.monotonic() - began_s > _LIBRARY_GAVE_UP_S and codes.TRANSFER_FAILED in said:
            _end_process()
        return said

    def _read_part(self, client: Client, part: Part) -> list[Outcome]:
        said = self._call(client, part, client.get)
        outcomes = [
            Outcome.OK if code == item.nbytes else codes.of_read(code, item.nbytes)
            for code, (_, item) in zip(said, part, strict=True)
        ]
        if codes.BAD_PARAMETERS in said:  # mostly: the object is larger than the range
            for place, (_, item) in enumerate(part):
                if said[place] == codes.BAD_PARAMETERS:
                    outcomes[place] = codes.of_length(client.length(item.key), item.nbytes)
        return outcomes

    def _write_part(self, client: Client, part: Part) -> list[Outcome]:
        said = self._call(client, part, client.put)
        outcomes = [codes.of_write(code) if code else Outcome.OK for code in said]
        if Outcome.FULL in outcomes:
            refused = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.FULL]
            time.sleep(EVICTION_S)
            again = self._call(client, [part[place] for place in refused], client.put)
            for place, code in zip(refused, again, strict=True):
                outcomes[place] = codes.of_write(code)
        return outcomes


def _pool_usage(metrics: str, timeout_s: float) -> Usage:
    """Raises StorageError when the master's HTTP port does not answer."""
    connection = http.client.HTTPConnection(*host_and_port(metrics), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise StorageError(f"the Mooncake master's `metrics` at {metrics} do not answer: {error}") from error
    finally:
        connection.close()
    found = dict(re.findall(r"^(master_\w+) (\d+)", text, re.M))
    try:
        names = ("master_key_count", "master_allocated_bytes", "master_total_capacity_bytes")
        return Usage(*(int(found[name]) for name in names))
    except KeyError as error:
        raise StorageError(
            f"{metrics} is no Mooncake master's `metrics`: {error} is missing there"
        ) from error


def _end_process() -> None:
    """Only death can promise now that no byte lands later. A storage worker is made for it; in it this is
    the second net, because the daemon ends a worker that is late by seconds."""
    print(
        "mooncake: a transfer outlived the library's own limit; this process ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(70)
