"""Real processes, tagged bytes: L1 -> L2 -> L3, kill -9 of the daemon, and all the way back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.core.layout import ComponentSpec, Kind
from hicache.core.words import Tier
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

SLOTS = {"full": 24, "swa": 24, "mamba": 6}  # two prompts of ten pages fill L1
PROMPTS = [prompt(seed, 43) for seed in range(6)]
FRAMES = 21  # ten pages of FULL and of SWA, one checkpoint


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    made = LiveDaemon(tmp_path)
    yield made
    made.close()


@pytest.fixture
def engine(daemon: LiveDaemon) -> Iterator[LiveEngine]:
    made = LiveEngine(daemon.address, *make_layout(SLOTS))
    yield made
    made.close()


def serve_all(engine: LiveEngine) -> list[tuple[int, int, int]]:
    """Every prompt once; pages found per tier."""
    found = []
    for number, tokens in enumerate(PROMPTS):
        request = engine.serve(f"r{number}", tokens)
        found.append(tuple(request.hit_pages[tier] for tier in Tier))
        engine.settle()
    return found  # type: ignore[return-value]  # three tiers


def test_every_tier_gives_back_what_was_computed(daemon: LiveDaemon, engine: LiveEngine) -> None:
    """L2 serves what L1 lost; after kill -9 a new daemon serves it from storage; L1 sees only misses between.

    L3-05, LIFE-02, SIDECAR-01, SIDECAR-02: anchors and sidecars of every component, compared byte by byte.
    """
    assert serve_all(engine) == [(0, 0, 0)] * 6
    assert serve_all(engine) == [(0, 10, 0)] * 6
    wait_until(
        lambda: daemon.counter("storage_written_pages") == 6 * FRAMES,
        "write-through to storage",
        tell=lambda: daemon.status().counters,
    )

    daemon.kill()
    wait_until(lambda: not engine.client.ready, "the client to notice")
    away = engine.serve("while away", PROMPTS[0])
    assert away.hit_pages[Tier.HOST] == away.hit_pages[Tier.STORAGE] == 0

    daemon.start()
    wait_until(lambda: engine.client.ready, "the engine to attach again")
    for number in range(1, 6):
        request = engine.serve(f"again {number}", PROMPTS[number])
        assert tuple(request.hit_pages[tier] for tier in Tier) == (0, 0, 10)
        engine.settle()
    assert daemon.counter("prefetch_corrupt_pages") == 0


def test_a_kill_between_backup_and_storage_loses_only_what_was_not_written(
    daemon: LiveDaemon, engine: LiveEngine
) -> None:
    """Nothing half done is ever readable: whatever the new daemon finds is right, byte for byte."""
    for number, tokens in enumerate(PROMPTS):
        engine.serve(f"r{number}", tokens)
    daemon.kill()  # wherever it is in its copies and writes
    daemon.start()
    wait_until(lambda: engine.client.ready, "the engine to attach again")
    for number, tokens in enumerate(PROMPTS):
        engine.serve(f"again {number}", tokens)  # checks every byte
        engine.settle()
    assert serve_all(engine)[0] == (0, 10, 0)


def test_a_frozen_daemon_costs_misses_and_never_a_wrong_byte(daemon: LiveDaemon, engine: LiveEngine) -> None:
    """The slots of what was under way stay out of use until the daemon has answered for them."""
    serve_all(engine)
    engine.cache._loads._load_timeout_s = 0.2  # type: ignore[union-attr]
    daemon.send(signal.SIGSTOP)
    for number, tokens in enumerate(PROMPTS):
        request = engine.serve(f"frozen {number}", tokens)
        assert request.hit_pages[Tier.HOST] == 0
    daemon.send(signal.SIGCONT)
    wait_until(lambda: engine.client.ready, "the daemon to answer again")
    engine.settle()
    assert [found[1] for found in serve_all(engine)][2:] == [10] * 4
    assert engine.cache.audit() == []


def test_engines_of_one_model_share_and_tenants_do_not(daemon: LiveDaemon, engine: LiveEngine) -> None:
    """KEY-01: a second engine, with another number of slots, finds the first one's pages."""
    engine.serve("r", PROMPTS[0], salt="tenant a")
    engine.settle()
    other = LiveEngine(daemon.address, *make_layout({"full": 40, "swa": 30, "mamba": 3}), engine_id="other")
    try:
        assert other.serve("s", PROMPTS[0], salt="tenant b").boundary == 0
        other.settle()
        assert other.serve("t", PROMPTS[0], salt="tenant a").hit_pages[Tier.HOST] == 10
    finally:
        other.close()


def test_a_vanished_engine_disturbs_nobody(daemon: LiveDaemon, engine: LiveEngine) -> None:
    """LIFE-01: its leases and mappings go; what it backed up stays for others."""
    gone = LiveEngine(daemon.address, *make_layout(SLOTS), engine_id="gone")
    gone.serve("r", PROMPTS[0])
    gone.settle()
    gone.cache.begin("unfinished", np.concatenate([PROMPTS[0], PROMPTS[1]]))
    gone.close()
    wait_until(lambda: len(daemon.status().engines) == 1, "the daemon to let it go")
    wait_until(lambda: all(pool.pinned_pages == 0 for pool in daemon.status().pools), "pins to go")
    assert engine.serve("s", PROMPTS[0]).hit_pages[Tier.HOST] == 10


def test_every_component_and_sidecar_of_deepseek_v4s_shape(tmp_path: Path) -> None:
    """FULL and SWA with slot spaces of their own, three sidecars on FULL, two on SWA, planes of all sizes."""
    layout, nbytes = make_layout(
        {"full": 24, "swa": 16},
        page_size=4,
        components=(ComponentSpec("full", Kind.FULL), ComponentSpec("swa", Kind.SWA, tokens=10)),
        plane_bytes={
            "full": ((576, 576, 1), (128, 16), (33,), (7, 1024)),
            "swa": ((256, 256), (3,), (64, 5)),
        },
    )
    daemon = LiveDaemon(tmp_path)
    engine = LiveEngine(daemon.address, layout, nbytes)
    try:
        prompts = [prompt(seed, 40) for seed in range(4)]
        for tokens in prompts:
            request = engine.cache.begin("r", tokens)
            engine.cache.abort(request)
            engine.serve("r", tokens)
            engine.settle()
        assert engine.serve("again", prompts[0]).hit_pages[Tier.HOST] == 9  # one token is left to compute
        engine.settle()
        wait_until(lambda: daemon.counter("storage_written_pages") >= 4 * 20, "write-through to storage")
        daemon.kill()
        daemon.start()
        wait_until(lambda: engine.client.ready, "the engine to attach again")
        assert engine.serve("after", prompts[1]).hit_pages[Tier.STORAGE] == 9
    finally:
        engine.close()
        daemon.close()
