"""Lookups over gRPC beside a bare gRPC echo of the same size, in one run.

    python -m bench.rpc [--json] [--seconds 2]

A daemon holds a prompt of 32k tokens in host memory (FULL, a window of 1024 tokens, a checkpoint; pages of
16 tokens). Its prefixes of 1k, 8k and 32k tokens are looked up on the Attach stream by `hicache.Client`, and
by plain unary calls; the echo is a grpc.aio server of two lines in a process of its own that takes the same
request bytes and gives an answer of the same length, over the same kind of socket, by the same kind of
client. One client, then eight (processes' threads share their GIL: eight is about contention); then one
client while copies run. Milliseconds, median and 99th percentile; rows alternate in short turns, so that the
machine's moods meet all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np
import yaml

from hicache import Client, SharedRegion
from hicache.client.messages import Placement, Prompt
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from hicache.core.words import TokenArray
from proto.v1 import hicache_pb2 as pb
from proto.v1.hicache_pb2_grpc import HybridCacheStub

PAGE = 16
TOKENS = 32768
SIZES = (1024, 8192, 32768)
PLANE_BYTES = 64
COPY_PLANE_BYTES = 1 << 20
COPY_SLOTS = 64
TURN_S = 0.25
PAUSE_S = 0.001
Call: TypeAlias = Callable[[], "Callable[[], object] | None"]
"""One call; returns what is to be done after it, outside of its time."""


@dataclass(frozen=True)
class Row:
    """One way of asking, for one size."""

    what: str
    tokens: int
    clients: int
    p50_ms: float
    p99_ms: float
    calls: int


def layout_of() -> tuple[Layout, int]:
    """Small pages for the prompt, and a pool of large ones to keep the copy threads busy with."""
    n_pages = TOKENS // PAGE
    sizes = {"full": (n_pages, PLANE_BYTES), "swa": (n_pages, PLANE_BYTES), "mamba": (4, PLANE_BYTES)}
    sizes["bulk"] = (COPY_SLOTS, COPY_PLANE_BYTES)
    pools, offset = [], 0
    for name, (n_slots, nbytes) in sizes.items():
        pools.append(Pool(name, name, n_slots, (Plane(0, offset, nbytes, nbytes),)))
        offset += n_slots * nbytes
    components = (
        ComponentSpec("full", Kind.FULL),
        ComponentSpec("swa", Kind.SWA, tokens=1024),
        ComponentSpec("mamba", Kind.MAMBA),
    )
    return Layout(PAGE, components, tuple(pools[:3])), offset


class Daemon:
    """`hicache serve` with an engine attached, and a prompt in its host memory."""

    def __init__(self, folder: Path) -> None:
        config = {
            "server": {"socket": str(folder / "h.sock")},
            "host": {"capacity": "256MiB"},
            "http": None,
        }
        (folder / "h.yaml").write_text(yaml.safe_dump(config))
        command = [str(Path(sys.executable).parent / "hicache"), "serve", "-c", str(folder / "h.yaml")]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self.address = f"unix:{folder / 'h.sock'}"
        self.layout, nbytes = layout_of()
        self.region = SharedRegion(nbytes)
        self.tokens = np.random.default_rng(0).integers(0, 1 << 17, TOKENS, dtype=np.int32)
        self.client = self.connect("bench")
        pages = np.arange(TOKENS // PAGE, dtype=np.int32)
        marks = np.array([size // PAGE - 1 for size in SIZES], dtype=np.int32)
        placements = {
            "full": Placement(pages, pages),
            "swa": Placement(pages, pages),
            "mamba": Placement(marks, np.arange(len(SIZES), dtype=np.int32)),
        }
        ticket = self.client.start_backup(Prompt("fill", self.tokens), placements)
        if ticket.wait(30).name != "OK":
            raise SystemExit(f"the prompt could not be backed up: {ticket.reason}")

    def connect(self, engine_id: str) -> Client:
        client = Client(
            self.address, engine_id=engine_id, model="bench", layout=self.layout, regions=[self.region]
        )
        if not client.wait_attached(30):
            raise SystemExit(f"the daemon does not take the engine: {client.problem}")
        return client

    def close(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(20)
        self._log.close()
        self.region.close()


def echo_server(socket: str) -> None:
    """The peer: grpc.aio and nothing else. Answers with as many bytes as the request's first four say."""
    import uvloop

    async def unary(request: bytes, _: object) -> bytes:
        return bytes(int.from_bytes(request[:4], "little"))

    async def stream(requests: Iterator[bytes], _: object) -> object:
        async for request in requests:  # type: ignore[attr-defined]
            yield bytes(int.from_bytes(request[:4], "little"))

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 32 << 20)])
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.stream_stream_rpc_method_handler(stream),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("echo", handlers)])
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        print("ready", flush=True)
        await server.wait_for_termination()

    uvloop.install()
    asyncio.run(serve())


class Echo:
    """A client of the echo: one call at a time."""

    def __init__(self, socket: str) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[("grpc.max_receive_message_length", 32 << 20), ("local", os.urandom(4).hex())],
        )
        self._unary = self._channel.unary_unary("/echo/Unary")
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        replies = self._channel.stream_stream("/echo/Stream")(iter(self._outbox.get, None))

        def receive() -> None:
            try:
                for reply in replies:
                    self._answers.put(reply)
            except grpc.RpcError:
                return

        threading.Thread(target=receive, daemon=True).start()

    def unary(self, request: bytes) -> None:
        self._unary(request)

    def stream(self, request: bytes) -> None:
        self._outbox.put(request)
        self._answers.get(timeout=10)


def timed(call: Call, seconds: float) -> list[float]:
    """Milliseconds of calls, one after the other, for about so long. Between two of them the last one's
    lease is given back, and what that costs is waited for."""
    taken = []
    ends = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < ends:
        after = call()
        taken.append((time.perf_counter() - begun) * 1e3)
        if after is not None:
            after()
        time.sleep(PAUSE_S)
    return taken


def measure(ways: dict[str, list[Call]], tokens: int, seconds: float) -> list[Row]:
    """Every way for `seconds` in all, in turns; each way's callers ask at the same time."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    turns = max(1, round(seconds / TURN_S))
    for callers in ways.values():
        for call in callers:
            call()
    for _ in range(turns):
        for name, callers in ways.items():
            with ThreadPoolExecutor(len(callers)) as threads:
                for one in threads.map(lambda call: timed(call, TURN_S), callers):
                    taken[name] += one
    return [
        Row(
            name,
            tokens,
            len(ways[name]),
            round(float(np.percentile(one, 50)), 3),
            round(float(np.percentile(one, 99)), 3),
            len(one),
        )
        for name, one in taken.items()
    ]


def lookup_on(client: Client, tokens: TokenArray) -> Call:
    prompt, limit = Prompt("r", tokens), len(tokens) // PAGE

    def call() -> Callable[[], object] | None:
        found = client.lookup(prompt, device={}, limit_pages=limit, timeout_s=10)
        assert found is not None
        assert found.boundary == limit
        return None if found.lease is None else partial(client.release, found.lease)

    return call


def lookup_unary(address: str, tokens: TokenArray) -> tuple[Call, bytes]:
    """The call, and the bytes of an answer."""
    stub = HybridCacheStub(grpc.insecure_channel(address, options=[("local", os.urandom(4).hex())]))
    request = pb.LookupPrefixRequest(
        prompt=pb.Prompt(engine_id="bench", request_id="r", tokens=tokens.astype("<i4").tobytes())
    )
    answer = stub.LookupPrefix(request, timeout=10)
    release = pb.ReleaseLeaseRequest(engine_id="bench")

    def call() -> Callable[[], object] | None:
        release.lease_id = stub.LookupPrefix(request, timeout=10).lease_id
        return partial(stub.ReleaseLease, release, timeout=10)

    return call, answer.SerializeToString()


def run(seconds: float) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        daemon = Daemon(folder)
        stack.callback(daemon.close)
        socket = str(folder / "echo.sock")
        command = [sys.executable, "-m", "bench.rpc", "--echo", socket]
        echo = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(echo.wait)
        stack.callback(echo.terminate)
        assert echo.stdout is not None
        echo.stdout.readline()
        extra = [daemon.connect(f"bench-{n}") for n in range(7)]
        for client in extra:
            stack.callback(client.close)
        for n_clients in (1, 8):
            for size in SIZES:
                rows += one_size(daemon, [daemon.client, *extra][:n_clients], socket, size, seconds)
        stop = threading.Event()
        busy = threading.Thread(target=keep_copying, args=(daemon, stop))
        busy.start()
        try:
            for size in SIZES:
                rows += [
                    Row(f"{row.what}, copies running", *list(asdict(row).values())[1:])
                    for row in one_size(daemon, [daemon.client], socket, size, seconds)
                ]
        finally:
            stop.set()
            busy.join()
    return rows


def one_size(daemon: Daemon, clients: list[Client], socket: str, size: int, seconds: float) -> list[Row]:
    tokens = daemon.tokens[:size]
    unary = [lookup_unary(daemon.address, tokens) for _ in clients]
    reply_bytes = len(unary[0][1])
    request = reply_bytes.to_bytes(4, "little") + bytes(4 * size + 60)
    echoes = [Echo(socket) for _ in clients]
    return measure(
        {
            "echo, stream": [lambda e=e: e.stream(request) for e in echoes],  # type: ignore[misc]
            "lookup, stream": [lookup_on(client, tokens) for client in clients],
            "echo, unary": [lambda e=e: e.unary(request) for e in echoes],  # type: ignore[misc]
            "lookup, unary": [call for call, _ in unary],
        },
        size,
        seconds,
    )


def keep_copying(daemon: Daemon, stop: threading.Event) -> None:
    """Load the whole prompt back again and again."""
    client = daemon.connect("copier")
    prompt = Prompt("copies", daemon.tokens)
    pages = np.arange(TOKENS // PAGE, dtype=np.int32)
    while not stop.is_set():
        found = client.lookup(prompt, device={}, limit_pages=len(pages), timeout_s=10)
        if found is None or found.lease is None:
            continue
        placements = {
            name: Placement(wanted, np.arange(len(wanted), dtype=np.int32))
            for name, wanted in found.load.items()
        }
        client.start_load(found.lease, placements).wait(10)
        client.release(found.lease)
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Lookups over gRPC beside a bare echo.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.echo:
        echo_server(given.echo)
        return
    rows = run(given.seconds)
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for row in rows:
        print(
            f"{row.what:32} {row.tokens:6} tokens {row.clients} client(s)  p50 {row.p50_ms:7.3f} ms  "
            f"p99 {row.p99_ms:7.3f} ms  {row.calls:6} calls"
        )


if __name__ == "__main__":
    main()
