"""A real daemon in its own process, and a tagged engine that talks to it as engines do.

The daemon is started with `hicache serve`, on a socket in a temporary directory, and ended by whoever
started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import yaml

from hicache import Client, RankPlace, SharedRegion, UnifiedRadixCache
from hicache.cache.requests import Request
from hicache.client.messages import ALONE
from hicache.core.identity import Namespace
from hicache.core.layout import Kind, Layout
from hicache.core.words import NO_SLOT, SlotArray, TokenArray
from proto.v1 import hicache_pb2 as pb
from proto.v1.hicache_pb2_grpc import AdminStub
from tests.tagged import TaggedMemory, hashes_of

START_S = 20.0
_PR_SET_PDEATHSIG = 1


def wait_until(
    met: Callable[[], bool], what: str, within_s: float = START_S, tell: Callable[[], object] = str
) -> None:
    """Wait for another process; fails, saying for what, when it does not come."""
    ends_s = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < ends_s, f"waited {within_s} s for {what}: {tell()}"
        time.sleep(0.01)


def _end_with_parent() -> None:
    """A test run that is killed leaves no daemon behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class LiveDaemon:
    """One daemon, and its successors over the same directory."""

    def __init__(self, folder: Path, *, capacity: str = "16MiB", **sections: object) -> None:
        self.address = f"unix:{folder / 'h.sock'}"
        self.objects = folder / "objects"
        self.log = folder / "daemon.log"
        self._config = folder / "hicache.yaml"
        config: dict[str, object] = {
            "server": {"socket": str(folder / "h.sock")},
            "host": {"capacity": capacity},
            "http": None,
            "storage": {"tiers": [{"backend": {"kind": "file", "path": str(self.objects)}}]},
        }
        self._config.write_text(yaml.safe_dump(config | sections))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [str(Path(sys.executable).parent / "hicache"), "serve", "-c", str(self._config)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_end_with_parent)  # noqa: PLW1509 - one prctl
        try:
            wait_until(self._ready, "the daemon")
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """As hard as it gets."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As an operator would; returns the exit code."""
        return self._end(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def status(self) -> pb.StatusReply:
        with grpc.insecure_channel(self.address) as channel:
            return AdminStub(channel).Status(pb.StatusRequest(), timeout=5)

    def counter(self, name: str) -> int:
        return int(self.status().counters[name])

    def flush(self) -> pb.FlushReply:
        with grpc.insecure_channel(self.address) as channel:
            return AdminStub(channel).Flush(pb.FlushRequest(), timeout=5)

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        try:
            return self.status().ready
        except grpc.RpcError:
            return False

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(timeout=20)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()


class LiveEngine:
    """An engine whose pages hold tagged bytes: computes what is not cached, checks all that is."""

    def __init__(
        self,
        address: str,
        layout: Layout,
        nbytes: int,
        engine_id: str = f"test:{os.getpid()}",
        place: RankPlace = ALONE,
    ) -> None:
        self.layout = layout
        self.region = SharedRegion(nbytes)
        memory = self.region.array(np.uint8, (nbytes,))
        assert memory.dtype == np.uint8
        self.tagged = TaggedMemory(layout, memory.view(np.uint8), place.rank)
        self.client = Client(
            address,
            engine_id=engine_id,
            model="model",
            revision="1",
            layout=layout,
            regions=[self.region],
            place=place,
        )
        self.cache = UnifiedRadixCache(
            layout, model="model", revision="1", client=self.client, lookup_timeout_s=2.0, load_timeout_s=5.0
        )
        assert self.client.wait_attached(START_S), self.client.problem

    def serve(self, request_id: str, tokens: TokenArray, salt: str = "") -> Request:
        """One request: reuse and check, compute the rest, leave it in the cache."""
        self.cache.prefetch(request_id, tokens, salt=salt)
        request = self.cache.begin(request_id, tokens, salt=salt)
        self.check(request, tokens, salt)
        page_size = self.layout.page_size
        n_pages = len(tokens) // page_size
        hashes = hashes_of(self.namespace(salt), tokens)
        slots: dict[str, SlotArray] = {}
        for spec in self.layout.components:
            slots[spec.name] = np.full(n_pages, NO_SLOT, dtype=np.int32)
            fresh = list(range(request.boundary, n_pages))  # what is cached already is not computed again
            if spec.kind is Kind.MAMBA:
                fresh = fresh[-1:]
            taken = self.cache.alloc(spec.name, len(fresh))
            assert taken is not None
            for page, slot in zip(fresh, taken.tolist(), strict=True):
                self.tagged.write(spec.name, slot, hashes[page])
                slots[spec.name][page] = slot
        self.cache.finish(request, tokens, slots)
        assert self.cache.audit() == []
        return request

    def check(self, request: Request, tokens: TokenArray, salt: str = "") -> None:
        """Every byte that the request would read is the right one."""
        hashes = hashes_of(self.namespace(salt), tokens)
        for component in self.layout.index_components():
            if request.boundary:
                start = component.coverage.start(request.boundary)
                slots = request.slots[component.name]
                assert (slots[start:] != NO_SLOT).all()
                for page in range(start, request.boundary):
                    self.tagged.check(component.name, int(slots[page]), hashes[page])

    def settle(self) -> None:
        """Wait until no backup is running."""
        backups = self.cache._backups
        assert backups is not None
        wait_until(lambda: self.cache.poll() == 0 and not backups.running, "backups")

    def namespace(self, salt: str = "") -> Namespace:
        return Namespace("model", "1", self.layout.fingerprint(), self.layout.page_size, salt=salt)

    def close(self) -> None:
        self.cache.close()
        self.region.close()
