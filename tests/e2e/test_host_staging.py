"""Real processes in direct mode: the engine's cache over a daemon whose host memory is only a ring."""

from __future__ import annotations

from pathlib import Path

from hicache.core.words import Tier
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

SLOTS = {"full": 24, "swa": 24, "mamba": 6}  # two prompts of ten pages fill L1
PROMPTS = [prompt(seed, 43) for seed in range(6)]


def test_what_l1_lost_comes_back_from_storage_through_the_ring(tmp_path: Path) -> None:
    """Byte for byte, also in a conversation's next turn, whose earlier pages are in storage only."""
    daemon = LiveDaemon(tmp_path, host={"capacity": "1MiB", "mode": "staging"})
    engine = LiveEngine(daemon.address, *make_layout(SLOTS))

    def ring_empties() -> None:
        wait_until(
            lambda: not any(pool.resident_pages for pool in daemon.status().pools),
            "the ring to empty",
            tell=lambda: daemon.status().counters,
        )

    try:
        for number, tokens in enumerate(PROMPTS):
            engine.serve(f"r{number}", tokens)
            engine.settle()
        ring_empties()
        for number, tokens in enumerate(PROMPTS):
            request = engine.serve(f"again {number}", tokens)
            assert tuple(request.hit_pages[tier] for tier in Tier) == (0, 0, 10)
            engine.settle()
        ring_empties()
        longer = prompt(0, 43 + 20)
        assert (longer[:43] == PROMPTS[0]).all()
        assert engine.serve("next turn", longer).hit_pages[Tier.STORAGE] == 10
        engine.settle()
        ring_empties()
        assert daemon.counter("backup_refused_staging_full_pages") == 0
        assert daemon.counter("prefetch_corrupt_pages") == 0
    finally:
        engine.close()
        daemon.close()
