"""Mooncake through our backend against Mooncake's own batch calls, interleaved in one run.

    python -m bench.storage_mooncake [--json] [--rounds N] [--mib N]

Both move the same frames between registered host memory and a pool, with one client, in turns: whatever else
the machine does, and how connections and objects happen to lie, hits both. Figures are medians; the share is
the median of the shares of each round.

* own calls: `batch_put_from`, `batch_get_into`, `batch_is_exist` of the library, whole batch in one call.
* ours: MooncakeBackend, with its parts, budget, checks and outcomes.

TCP: the objects lie in another process, reached over loopback. Own segment: they lie in the same process,
as in an embedded pool, and the library copies.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from operator import mul

import numpy as np

from bench.storage import machine
from storage_backends.base import Item, Outcome
from storage_backends.mooncake.backend import MooncakeBackend
from storage_backends.mooncake.client import Client, connect
from storage_backends.mooncake.library import Library, Store
from storage_backends.mooncake.master import EmbeddedMaster
from storage_backends.specs import MooncakeSpec

KIB, MIB = 1 << 10, 1 << 20
FRAME_BYTES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
HEADER_BYTES = 128
PRESENCE_KEYS = 1000
START_S = 30.0


@dataclass(frozen=True)
class Figure:
    """Medians of one operation on one pool."""

    pool: str
    operation: str
    frame_bytes: int
    own_calls: float
    ours: float
    share: float
    """Ours as a share of the own calls."""


def give_memory(master: str, nbytes: int, ready: Connection) -> None:
    """The process that holds the objects; it ends with the benchmark."""
    spec = MooncakeSpec(master=master, segment_bytes=nbytes)
    client = connect(Library(spec), spec, master, nbytes)
    ready.send(True)
    threading.Event().wait()
    client.leave()


@contextmanager
def other_process(master: str, nbytes: int) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=give_memory, args=(master, nbytes, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            sys.exit("no pool in another process")
        yield
    finally:
        process.kill()
        process.join()


class OwnCalls:
    """The library as its users call it."""

    def __init__(self, store: Store, config: object, memory: mmap.mmap) -> None:
        self._store = store
        self._config = config
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def prepare(self, items: Sequence[Item]) -> tuple[list[str], list[int], list[int]]:
        places = [self._start + item.offset for item in items]
        return [item.key for item in items], places, [item.nbytes for item in items]

    def write(self, items: Sequence[Item]) -> None:
        assert set(self._store.batch_put_from(*self.prepare(items), self._config)) == {0}

    def read(self, items: Sequence[Item]) -> None:
        assert min(self._store.batch_get_into(*self.prepare(items))) > 0

    def contains(self, keys: list[str]) -> None:
        assert set(self._store.batch_is_exist(keys)) == {1}

    def delete(self, keys: list[str]) -> None:
        self._store.batch_remove(keys, True)


class Ours:
    """The backend."""

    def __init__(self, backend: MooncakeBackend, memory: mmap.mmap) -> None:
        self._backend = backend
        backend.register(memoryview(memory))

    def write(self, items: Sequence[Item]) -> None:
        assert set(self._backend.write(items)) == {Outcome.OK}

    def read(self, items: Sequence[Item]) -> None:
        assert set(self._backend.read(items)) == {Outcome.OK}

    def contains(self, keys: list[str]) -> None:
        assert set(self._backend.contains(keys)) == {Outcome.OK}

    def delete(self, keys: list[str]) -> None:
        self._backend.delete(keys)


Subject = OwnCalls | Ours
Timed = Callable[[Subject], None]


def interleaved(
    subjects: Sequence[Subject], before: Timed, timed: Timed, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each subject in each round, in changing order; the first round warms up."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for place in random.Random(number).sample((0, 1), 2):
            before(subjects[place])
            began_s = time.perf_counter()
            timed(subjects[place])
            if number:
                taken[place].append(time.perf_counter() - began_s)
    return taken


def nothing(_: Subject) -> None:
    """Where a round needs no preparation."""


def write(items: Sequence[Item], one: Subject) -> None:
    one.write(items)


def read(items: Sequence[Item], one: Subject) -> None:
    one.read(items)


def contains(keys: list[str], one: Subject) -> None:
    one.contains(keys)


def delete(keys: list[str], one: Subject) -> None:
    one.delete(keys)


def gb_s(nbytes: int, taken_s: float) -> float:
    return nbytes / taken_s / 1e9


def figures(pool: str, subjects: Sequence[Subject], pool_bytes: int, rounds: int) -> Iterator[Figure]:
    for payload_bytes in FRAME_BYTES:
        frame_bytes = payload_bytes - HEADER_BYTES
        n = pool_bytes // frame_bytes
        items = [Item(f"bench/full/0-of-1/{i:064x}", i * frame_bytes, frame_bytes) for i in range(n)]
        keys, nbytes = [item.key for item in items], n * frame_bytes
        own, ours = interleaved(subjects, partial(delete, keys), partial(write, items), rounds)
        yield figure(pool, "write, GB/s", payload_bytes, own, ours, partial(gb_s, nbytes))
        own, ours = interleaved(subjects, nothing, partial(read, items), rounds)
        yield figure(pool, "read, GB/s", payload_bytes, own, ours, partial(gb_s, nbytes))
        subjects[0].delete(keys)
    small = [Item(f"bench/full/0-of-1/{i:064x}", i * KIB, KIB) for i in range(PRESENCE_KEYS)]
    keys = [item.key for item in small]
    subjects[0].write(small)
    own, ours = interleaved(subjects, nothing, partial(contains, keys), 10 * rounds)
    yield figure(pool, "presence of 1000 keys, ms", 0, own, ours, partial(mul, 1e3))


def figure(
    pool: str,
    operation: str,
    frame_bytes: int,
    own: list[float],
    ours: list[float],
    shown: Callable[[float], float],
) -> Figure:
    share = statistics.median(a / b for a, b in zip(own, ours, strict=True))
    medians = statistics.median(own), statistics.median(ours)
    return Figure(pool, operation, frame_bytes, shown(medians[0]), shown(medians[1]), share)


def over_tcp(memory: mmap.mmap, rounds: int) -> list[Figure]:
    with running_master() as master, other_process(master.address, 4 * len(memory)):
        return compared("TCP", master, 0, memory, rounds)


def own_segment(memory: mmap.mmap, rounds: int) -> list[Figure]:
    with running_master() as master:
        return compared("own segment", master, 4 * len(memory), memory, rounds)


@contextmanager
def running_master() -> Iterator[EmbeddedMaster]:
    master = EmbeddedMaster()
    master.start()
    try:
        yield master
    finally:
        master.stop()


def compared(
    pool: str, master: EmbeddedMaster, segment_bytes: int, memory: mmap.mmap, rounds: int
) -> list[Figure]:
    spec = MooncakeSpec(master=master.address, op_timeout_s=60)
    library = Library(spec)
    store, config = library.store(), library.replicate_config(spec)
    assert store.setup("127.0.0.1", spec.metadata, segment_bytes, 0, "tcp", "", master.address) == 0
    with MooncakeBackend(spec, lambda: Client(store, config, lambda: True)) as backend:
        subjects: list[Subject] = [OwnCalls(store, config, memory), Ours(backend, memory)]
        return list(figures(pool, subjects, len(memory), rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description="Mooncake through our backend against its own batch calls.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds; figures are their medians")
    parser.add_argument("--mib", type=int, default=64, help="host memory, all of it moved each round")
    given = parser.parse_args()
    memory = mmap.mmap(-1, given.mib * MIB)
    memory.write(np.random.default_rng(0).integers(0, 256, given.mib * MIB, dtype=np.uint8).tobytes())
    found = [*over_tcp(memory, given.rounds), *own_segment(memory, given.rounds)]
    if given.json:
        print(json.dumps({"machine": machine(), "figures": [asdict(one) for one in found]}, indent=1))
        return 0
    print(json.dumps(machine()))
    for one in found:
        frame = f"{one.frame_bytes // KIB} KiB" if one.frame_bytes else ""
        figures_of = f"{one.own_calls:8.2f} {one.ours:8.2f} {one.share:6.0%}"
        print(f"{one.pool:12} {one.operation:26} {frame:>9} {figures_of}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
