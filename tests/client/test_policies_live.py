"""Write policies and loads that are not waited for, over the real daemon. Every byte is compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache import Client, SharedRegion, UnifiedRadixCache, WritePolicy, WriteRules
from hicache.client import LayerBoard
from hicache.core.words import NO_SLOT, TokenArray
from tests.live import START_S, LiveDaemon, LiveEngine, wait_until
from tests.tagged import hashes_of, make_layout, prompt


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LiveDaemon]:
    made = LiveDaemon(tmp_path, capacity="16MiB", storage=None)
    yield made
    made.close()


class PolicyEngine(LiveEngine):
    """A tagged engine with a policy of its own, and cells for the layers of its loads."""

    def __init__(self, address: str, policy: WritePolicy, n_slots: dict[str, int]) -> None:
        layout, nbytes = make_layout(n_slots)
        super().__init__(address, layout, nbytes, engine_id=f"policy-{policy.value}")
        self.cache.close()
        self.cells = SharedRegion(4096)
        self.client = Client(
            address,
            engine_id=f"policy-{policy.value}",
            model="model",
            revision="1",
            layout=layout,
            regions=[self.region, self.cells],
        )
        n_layers = 1 + max(plane.layer for pool in layout.pools for plane in pool.planes)
        board = LayerBoard(self.cells, number=1, n_layers=n_layers, n_rows=4)
        self.layers = n_layers
        self.cache = UnifiedRadixCache(
            layout,
            model="model",
            revision="1",
            client=self.client,
            write_policy=policy,
            write_rules=WriteRules(wait_s=5.0),
            layers=board,
            lookup_timeout_s=2.0,
            load_timeout_s=5.0,
        )
        assert self.client.wait_attached(START_S), self.client.problem

    def read_by_layer(self, name: str, tokens: TokenArray) -> int:
        """Begin without waiting; read the load's slots when all layers have landed, then take it."""
        request = self.cache.begin(name, tokens, wait=False)
        loading = request.loading
        if loading is not None and loading.layers is not None:
            assert all(loading.layers.wait(layer, timeout_s=5.0) for layer in range(self.layers))
            hashes = hashes_of(self.namespace(), tokens)
            for component in self.layout.index_components():
                slots = loading.slots[component.name]
                for page in np.flatnonzero(slots != NO_SLOT).tolist():
                    self.tagged.check(component.name, int(slots[page]), hashes[page])
        if loading is not None:
            wait_until(loading.done, "the load")
            loading.end()
        self.check(request, tokens)
        boundary = request.boundary
        self.cache.abort(request)
        return boundary

    def close(self) -> None:
        super().close()
        self.cells.close()


def test_write_back_keeps_conversations_that_do_not_fit_l1(daemon: LiveDaemon) -> None:
    """Six conversations in an L1 for two: all of each comes back, and nothing was dropped without a copy."""
    engine = PolicyEngine(daemon.address, WritePolicy.WRITE_BACK, {"full": 16, "swa": 16, "mamba": 4})
    try:
        for turn in range(1, 4):
            for who in range(6):
                tokens = prompt(who, 4 * 2 * turn + 1)
                request = engine.serve(f"{who}/{turn}", tokens)
                assert request.boundary == 2 * (turn - 1)
        for who in range(6):
            assert engine.read_by_layer(f"{who}/last", prompt(who, 4 * 6 + 1)) == 6
        counters = engine.cache.counters
        assert counters.dropped_refused_pages == 0
        assert counters.dropped_away_pages == 0
        assert counters.hit_host_pages > 0
        assert daemon.counter("internal_errors") == 0
    finally:
        engine.close()


def test_write_back_goes_on_when_the_daemon_is_killed(daemon: LiveDaemon) -> None:
    engine = PolicyEngine(daemon.address, WritePolicy.WRITE_BACK, {"full": 16, "swa": 16, "mamba": 4})
    try:
        for who in range(3):
            engine.serve(f"{who}/1", prompt(who, 25))
        daemon.kill()
        wait_until(lambda: not engine.client.ready, "the client to notice")
        for who in range(3, 6):
            engine.serve(f"{who}/1", prompt(who, 25))
        assert engine.cache.counters.dropped_away_pages > 0
        daemon.start()
        wait_until(lambda: engine.client.ready, "the engine to attach again")
        for who in range(3):
            engine.serve(f"{who}/2", prompt(who, 25))
        assert engine.serve("2/3", prompt(2, 25)).boundary == 6
        engine.settle()
    finally:
        engine.close()


def test_selective_brings_back_what_two_requests_used(daemon: LiveDaemon) -> None:
    engine = PolicyEngine(
        daemon.address, WritePolicy.WRITE_THROUGH_SELECTIVE, {"full": 32, "swa": 32, "mamba": 16}
    )
    try:
        for name in ("a/1", "a/2", "b/1"):
            engine.serve(name, prompt(ord(name[0]), 25))
        engine.settle()
        for component, pool in engine.cache.pools.items():
            engine.cache.evict(component, pool.n_slots)
        assert engine.read_by_layer("a/3", prompt(ord("a"), 26)) == 6
        assert engine.read_by_layer("b/2", prompt(ord("b"), 26)) == 0
    finally:
        engine.close()
