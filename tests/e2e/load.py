"""A steady load on a daemon whose storage is in trouble, and what must hold of it, whatever the trouble is.

The load: prompts that host memory has, new ones, and ones that only storage has, checked byte by byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hicache.core.words import Tier, TokenArray
from proto.v1 import hicache_pb2 as pb
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

SLOTS = {"full": 24, "swa": 24, "mamba": 6}
"""Two prompts of ten pages fill L1, so that one of three in turn is never there."""
PAGES = 10
HOT = [prompt(seed, 43) for seed in range(3)]
COLD = [prompt(seed, 43) for seed in range(100, 104)]
MOST_FRESH = 24
SOON_S = 5.0
"""After recovery, new writes and reads work within this."""
HIT_S = 2.0 + 5.0
"""Deadlines of a lookup and of a load: the longest that a hit in host memory may take."""
TURNS = 8
"""So many turns of the load must end while the trouble lasts."""


class Hit(NamedTuple):
    """What came of a prompt that host memory must have; some of it may be left in L1."""

    host_pages: int
    device_pages: int
    took_s: float


class Load:
    """One engine that never stops asking, in a thread of its own."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.turns = 0
        self.hits: list[Hit] = []
        self.asked: dict[int, TokenArray] = {}
        """The prompts that are new, and those that only storage has, by seed or position."""
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            hit = self.engine.serve(f"hot {self.turns}", HOT[self.turns % len(HOT)])
            host, device = hit.hit_pages[Tier.HOST], hit.hit_pages[Tier.DEVICE]
            self.hits.append(Hit(host, device, time.monotonic() - began_s))
            if self.turns < MOST_FRESH:
                self._ask(1000 + self.turns, prompt(1000 + self.turns, 43))
            if self.turns < len(COLD):
                self._ask(self.turns, COLD[self.turns])
            self.engine.settle()  # backups to host memory never wait for storage
            self.turns += 1
            self._ended.wait(0.02)

    def _ask(self, number: int, tokens: TokenArray) -> None:
        self.asked[number] = tokens
        self.engine.serve(f"asked {number}", tokens)

    def end(self) -> None:
        self._ended.set()


class Trial:
    """A daemon with one storage tier, what it holds, and the load on it."""

    def __init__(self, folder: Path, backend: Mapping[str, object]) -> None:
        self.daemon = LiveDaemon(
            folder,
            storage={"tiers": [{"backend": dict(backend), "required": False}], "timeout_s": 0.6},
            prefetch={"base_s": 1.0},
        )
        try:
            self.engine = LiveEngine(self.daemon.address, *make_layout(SLOTS))
            self.other = LiveEngine(self.daemon.address, *make_layout(SLOTS), engine_id="other")
        except BaseException:
            self.daemon.close()
            raise
        self._numbers = iter(range(5000, 6000))

    def close(self) -> None:
        for engine in (self.engine, self.other):
            engine.close()
        self.daemon.close()

    def prepare(self) -> None:
        """COLD in storage alone, HOT in host memory and storage."""
        for number, tokens in enumerate(COLD):
            self.engine.serve(f"cold {number}", tokens)
            self.engine.settle()
        self.await_written()
        self.daemon.flush()
        for number, tokens in enumerate(HOT):
            self.engine.serve(f"hot {number}", tokens)
            self.engine.settle()
        self.await_written()

    @contextmanager
    def load(self) -> Iterator[Load]:
        """The load, from before the trouble until after the recovery; its own failures are raised."""
        load = Load(self.engine)
        with ThreadPoolExecutor(1) as pool:
            running: Future[None] = pool.submit(load.run)
            try:
                yield load
            finally:
                load.end()
            running.result(60)

    def endure(self, load: Load, told: Callable[[pb.StatusReply], bool], at_least_s: float = 0.0) -> None:
        """Until the trouble is told and the load has gone on for a while under it: every prompt that host
        memory has came from there, within its deadlines."""
        first, ends_s = len(load.hits), time.monotonic() + at_least_s
        wait_until(lambda: told(self.daemon.status()), "the trouble to be told", tell=self.daemon.status)
        last = load.turns + TURNS
        wait_until(
            lambda: load.turns >= last and time.monotonic() >= ends_s,
            "the load to go on",
            within_s=60 + at_least_s,
        )
        hits = load.hits[first:]
        missed = [hit for hit in hits if hit.host_pages == 0 or hit.host_pages + hit.device_pages != PAGES]
        assert missed == []
        assert max(hit.took_s for hit in hits) < HIT_S
        assert self.engine.cache.counters.lookups_unanswered == 0

    def await_recovery(self) -> None:
        """New prompts are written, and read back from storage, soon."""
        tried = []

        def works() -> bool:
            tokens = prompt(next(self._numbers), 43)
            self.other.serve("new", tokens)
            self.other.settle()
            ends_s = time.monotonic() + 1.0
            while not self._is_written() and time.monotonic() < ends_s:
                time.sleep(0.01)
            self._forget(self.other)
            tried.append(self.other.serve("back", tokens).hit_pages[Tier.STORAGE])
            return tried[-1] == PAGES

        wait_until(
            works, "writes and reads to work again", SOON_S, tell=lambda: (tried, self.daemon.status())
        )

    def check_after(self, load: Load) -> None:
        """Nothing leaks, health is well, and storage has, or gets, all that was asked for meanwhile."""
        wait_until(lambda: not self._held(), "pins and inbound pages to go", tell=self._held)
        wait_until(lambda: not self.daemon.status().problems, "health", tell=self.daemon.status)
        assert self.engine.cache.audit() == self.other.cache.audit() == []
        prompts = [*HOT, *load.asked.values()]
        for _ in range(2):  # the first time finds the holes
            self.await_written()
            self._forget(self.engine)
            found = []
            for number, tokens in enumerate(prompts):
                found.append(self.engine.serve(f"after {number}", tokens).hit_pages[Tier.STORAGE])
                self.engine.settle()
        assert found == [PAGES] * len(prompts), (found, self.daemon.status())
        wait_until(lambda: not self._held(), "pins and inbound pages to go", tell=self._held)

    def _forget(self, engine: LiveEngine) -> None:
        """From L1 and L2, so that only storage can have it."""
        for name, n_slots in SLOTS.items():
            engine.cache.evict(name, n_slots)
        self.daemon.flush()

    def await_written(self) -> None:
        wait_until(self._is_written, "writes to storage", tell=self.daemon.status)

    def _is_written(self) -> bool:
        return not any(backend.queued_writes for backend in self.daemon.status().backends)

    def _held(self) -> list[str]:
        pools = self.daemon.status().pools
        return [str(pool) for pool in pools if pool.pinned_pages or pool.inbound_pages]
