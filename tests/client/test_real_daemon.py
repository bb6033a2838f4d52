"""The client and the cache against `hicache serve` in a process of its own: kill, freeze, restart, refuse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from hicache import Client, ComponentSpec, Kind, Layout, Plane, Pool, SharedRegion, UnifiedRadixCache
from hicache.client import Lease, Outcome, Placement, Prompt, Ticket
from hicache.core.words import Tier, TokenArray
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

ROOT = Path(__file__).resolve().parents[2]
FRAME_BYTES = 1 << 20
N_SLOTS = 48
BIG = Layout(
    page_size=4,
    components=(ComponentSpec("full", Kind.FULL),),
    pools=(Pool("kv", "full", N_SLOTS, (Plane(0, 0, FRAME_BYTES, FRAME_BYTES),)),),
)
"""Frames large enough that a copy takes its time."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    made = LiveDaemon(tmp_path, capacity="80MiB", storage=None)
    yield made
    made.close()


class BigEngine:
    """Pages of one mebibyte, each filled with a word that names its prompt and number."""

    def __init__(self, address: str) -> None:
        self.region = SharedRegion(N_SLOTS * FRAME_BYTES)
        self.memory = self.region.array(np.uint64, (N_SLOTS, FRAME_BYTES // 8))
        self.client = Client(address, engine_id="big", model="m", layout=BIG, regions=[self.region])
        self.cache = UnifiedRadixCache(BIG, model="m", client=self.client, lookup_timeout_s=2.0)
        assert self.client.wait_attached(20)

    def serve(self, seed: int, n_pages: int = 12) -> dict[Tier, int]:
        tokens = prompt(seed, 4 * n_pages + 1)
        request = self.cache.begin(f"r{seed}", tokens)
        fresh = self.cache.alloc("full", n_pages - request.boundary)
        if fresh is None:  # pages under backups: as an engine would, serve it later
            self.cache.abort(request)
            return {}
        for page in range(request.boundary):
            assert (self.memory[request.slots["full"][page]] == self.word(seed, page)).all(), "other bytes"
        for page, slot in enumerate(fresh.tolist(), start=request.boundary):
            self.memory[slot] = self.word(seed, page)
        self.cache.finish(request, tokens, {"full": np.concatenate((request.slots["full"], fresh))})
        assert self.cache.audit() == []
        return dict(request.hit_pages)

    @staticmethod
    def word(seed: int, page: int) -> int:
        return seed << 32 | page

    def settle(self) -> None:
        backups = self.cache._backups
        assert backups is not None
        wait_until(lambda: self.cache.poll() == 0 and not backups.running, "backups")

    def close(self) -> None:
        self.cache.close()
        self.region.close()


@pytest.fixture
def big(daemon: LiveDaemon) -> Iterator[BigEngine]:
    made = BigEngine(daemon.address)
    yield made
    made.close()


def test_a_daemon_killed_in_the_middle_of_copies_frees_every_slot_and_its_successor_is_found_in_time(
    daemon: LiveDaemon, big: BigEngine
) -> None:
    """LIFE-02 under load, three times over: the engine sees misses, and within seconds of the new
    daemon's being there it is attached to it."""
    for boot in range(3):
        for seed in range(4):
            big.serve(100 * boot + seed)
        daemon.kill()
        wait_until(lambda: not big.client.ready, "the client to notice")
        big.settle()
        assert big.cache.evict("full", N_SLOTS) >= 0
        assert big.cache.pools["full"].n_free == N_SLOTS, "a dead daemon still holds slots"
        assert big.serve(100 * boot)[Tier.HOST] == 0
        daemon.start()
        wait_until(lambda: big.client.ready, "the engine to attach again", within_s=5.0)
        big.settle()
    big.cache.evict("full", N_SLOTS)
    assert big.serve(200)[Tier.HOST] == 12, "what was in L1 went to the new daemon"


def test_a_daemon_frozen_with_a_load_in_hand_holds_its_slots_until_it_has_answered(
    daemon: LiveDaemon, big: BigEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped just before it is asked for the load: the request goes on without; when the daemon
    wakes up and copies, it does so into slots that nobody was given, and the next request has them."""
    for seed in range(3):
        big.serve(seed)
        big.settle()
    big.cache.evict("full", N_SLOTS)
    big.cache._loads._load_timeout_s = 0.2  # type: ignore[union-attr]
    start_load = big.client.start_load

    def freeze_then_load(lease: Lease, placements: Mapping[str, Placement], *, cells: None) -> Ticket:
        daemon.send(signal.SIGSTOP)
        return start_load(lease, placements)

    monkeypatch.setattr(big.client, "start_load", freeze_then_load)
    assert big.serve(0) == dict.fromkeys(Tier, 0)
    monkeypatch.undo()
    assert big.cache.counters.loads_late == 1
    started = time.monotonic()
    for seed in range(10, 14):
        big.serve(seed)
        big.serve(seed)
    assert time.monotonic() - started < 10, "a frozen daemon stalls the engine"
    daemon.send(signal.SIGCONT)
    wait_until(lambda: big.client.ready, "the daemon to answer")
    big.settle()
    wait_until(lambda: big.cache.poll() == 0 and not big.cache._loads.late, "the late load")  # type: ignore[union-attr]
    big.cache.evict("full", N_SLOTS)
    assert big.cache.pools["full"].n_free == N_SLOTS
    big.cache._loads._load_timeout_s = 10.0  # type: ignore[union-attr]
    assert big.serve(1)[Tier.HOST] == 12


def test_requests_that_the_daemon_refuses_fail_alone(daemon: LiveDaemon, big: BigEngine) -> None:
    client = big.client
    tokens = prompt(1, 9)
    for slots in ([0, N_SLOTS], [0, -1], [0, 0]):
        ticket = client.start_backup(
            Prompt("r", tokens), {"full": Placement(np.array([0, 1], np.int32), np.array(slots, np.int32))}
        )
        assert ticket.wait(10) is Outcome.FAILED
        assert ticket.settled()
        assert "slot" in ticket.reason
    assert big.serve(1)[Tier.HOST] == 0
    big.settle()
    big.cache.evict("full", N_SLOTS)
    assert big.serve(1)[Tier.HOST] == 12


def test_an_engine_that_the_daemon_cannot_serve_is_told_why(daemon: LiveDaemon) -> None:
    """Frames larger than the slab: the engine works on with L1 alone, and says what is wrong."""
    nbytes = 256 << 20
    layout = Layout(4, BIG.components, (Pool("kv", "full", 1, (Plane(0, 0, nbytes, nbytes),)),))
    with (
        SharedRegion(nbytes) as region,
        Client(daemon.address, engine_id="huge", model="m", layout=layout, regions=[region]) as client,
    ):
        wait_until(lambda: "refused" in client.problem, "the refusal")
        assert "host.capacity" in client.problem
        cache = UnifiedRadixCache(layout, model="m", client=client)
        assert cache.begin("r", prompt(1, 5)).boundary == 0
        assert cache.counters.lookups_away == 1
    wait_until(lambda: not daemon.status().engines, "the daemon to forget it")


def test_two_engines_with_one_id_do_not_share_a_life(daemon: LiveDaemon) -> None:
    """The later one replaces the earlier, whose client comes back and replaces it in turn: nobody's bytes
    are wrong, and nothing hangs."""
    layout, nbytes = make_layout({"full": 12, "swa": 12, "mamba": 4})
    first = LiveEngine(daemon.address, layout, nbytes, engine_id="same")
    second = LiveEngine(daemon.address, layout, nbytes, engine_id="same")
    try:
        for seed in range(4):
            first.serve(f"a{seed}", prompt(seed, 21))
            second.serve(f"b{seed}", prompt(seed, 21))
    finally:
        first.close()
        second.close()


def test_the_example_runs_with_a_daemon_and_without(daemon: LiveDaemon, tmp_path: Path) -> None:
    """Whatever it gets from where: the example itself compares every page with what it must be."""
    assert len(run_example(daemon.address)) == 6
    alone = run_example(f"unix:{tmp_path}/nobody.sock")
    assert len(alone) == 6
    assert all(" 0 HOST, 0 STORAGE" in line for line in alone)


def run_example(address: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "minimal_engine.py"), address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class HardyEngine(LiveEngine):
    """Puts a request off when L1 has no room for it, as engines do."""

    def serve_if_room(self, name: str, tokens: TokenArray) -> bool:
        needed = {"full": len(tokens) // self.layout.page_size, "swa": len(tokens) // self.layout.page_size}
        for component, n_slots in needed.items():
            slots = self.cache.alloc(component, n_slots)
            if slots is None:
                return False
            self.cache.free(component, slots)
        self.serve(name, tokens)
        return True


def test_through_freezes_kills_and_restarts_every_byte_is_right(tmp_path: Path) -> None:
    """Growing conversations over all tiers while the daemon is stopped, continued, killed and started at
    random (from a fixed seed). `serve` compares every byte that is reused and audits the books."""
    daemon = LiveDaemon(tmp_path, capacity="1MiB")
    engine = HardyEngine(daemon.address, *make_layout({"full": 40, "swa": 40, "mamba": 8}))
    engine.cache._loads._lookup_timeout_s = 0.1  # type: ignore[union-attr]
    engine.cache._loads._load_timeout_s = 0.1  # type: ignore[union-attr]
    engine.cache._prefetch_wait_s = 0.3
    random = np.random.default_rng(7)
    turns, served, frozen = dict.fromkeys(range(8), 1), 0, False
    try:
        for step in range(150):
            who = int(random.integers(8))
            turns[who] = min(turns[who] + 1, 12) if random.random() < 0.9 else 1
            served += engine.serve_if_room(f"s{step}", prompt(who, 4 * turns[who] + int(random.integers(4))))
            trouble = random.random()
            if trouble < 0.03:
                daemon.kill()
                daemon.start()
                frozen = False
            elif trouble < 0.1:
                daemon.send(signal.SIGCONT if frozen else signal.SIGSTOP)
                frozen = not frozen
            elif trouble < 0.3 and not frozen:
                wait_until(lambda: engine.client.ready, "the engine to be attached")
        daemon.send(signal.SIGCONT)
        wait_until(lambda: engine.client.ready, "the engine to be attached")
        engine.settle()
        wait_until(lambda: engine.cache.poll() == 0 and not engine.cache._loads.late, "late loads")  # type: ignore[union-attr]
        for component, pool in engine.cache.pools.items():
            engine.cache.evict(component, pool.n_slots)
            engine.settle()
        for component, pool in engine.cache.pools.items():
            engine.cache.evict(component, pool.n_slots)
            assert pool.n_free == pool.n_slots, f"{component}: slots were lost"
        assert served > 40  # how many depends on how long a busy machine leaves the daemon frozen or away
        assert engine.cache.counters.hit_host_pages + engine.cache.counters.hit_storage_pages > 0
        assert daemon.counter("internal_errors") == 0
        wait_until(lambda: all(not pool.pinned_pages for pool in daemon.status().pools), "the daemon's pins")
    finally:
        engine.close()
        daemon.close()
