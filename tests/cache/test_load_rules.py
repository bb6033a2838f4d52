"""Loads that are not worth it, loads that are not waited for, and loads that several requests share."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine, Running, tokens_of
from fake_lower import PAGE_TOKENS, FakeTransfer, tag

from hicache.cache import LoadRule
from hicache.cache.costs import Skip
from hicache.client import LayerBoard, SharedRegion
from hicache.core.words import NO_SLOT, Tier


def hang(transfer: FakeTransfer) -> None:
    """The deadline passes."""


def in_host_only(*pages: int, **how: object) -> Engine:
    engine = Engine(**how)  # type: ignore[arg-type]
    engine.serve(tokens_of(*pages))
    engine.drop_l1()
    return engine


def begin(engine: Engine, *pages: int, private: bool = False) -> Running:
    """Without waiting for the load."""
    running = engine.begin(tokens_of(*pages), wait=False, private=private)
    assert running is not None
    return running


# ---- what is worth it


def test_a_load_of_few_tokens_is_skipped_and_counted() -> None:
    """LOADBACK-05: the bound is on what is to be loaded, not on the prompt."""
    engine = in_host_only(1, 2, 3, full=8, rule=LoadRule(min_load_tokens=3 * PAGE_TOKENS))
    assert begin_boundary(engine, 1, 2) == 0
    assert engine.cache.counters.loads_skipped_short == 1
    assert engine.lower.leases == {}
    assert begin_boundary(engine, 1, 2, 3) == 3
    assert engine.cache.evict("full", 1) == 1
    assert begin_boundary(engine, 1, 2, 3) == 2
    assert engine.cache.counters.loads_skipped_short == 2
    assert len(engine.lower.loads) == 1


def begin_boundary(engine: Engine, *pages: int) -> int:
    running = engine.begin(tokens_of(*pages))
    assert running is not None
    boundary = running.request.boundary
    engine.abort(running)
    return boundary


def test_a_load_that_takes_longer_than_computing_is_skipped_but_tried_now_and_then() -> None:
    """LOADBACK-05: a tier that has become fast again is found out."""
    rule = LoadRule(load_tokens_per_s=100, compute_tokens_per_s=1000)
    engine = in_host_only(1, 2, 3, full=8, rule=rule)
    boundaries = [begin_boundary(engine, 1, 2, 3) for _ in range(16)]
    assert boundaries == [0] * 15 + [3]
    assert engine.cache.counters.loads_skipped_slow == 15


def test_rates_are_learned_from_loads_and_from_what_the_engine_reports() -> None:
    rule = LoadRule()
    assert rule.skip(100) is None, "nothing is known yet"
    rule.computed(1000, 1.0)
    assert rule.skip(100) is None
    rule.loaded(100, 1.0)
    assert rule.skip(100) is Skip.TOO_SLOW
    for _ in range(10):
        rule.loaded(100000, 1.0)
    assert rule.skip(100) is None
    rule.loaded(0, 1.0)
    rule.loaded(10, 0.0)
    assert rule.skip(100) is None
    fixed = LoadRule(load_tokens_per_s=10_000)
    fixed.computed(1000, 1.0)
    fixed.loaded(1, 1.0)
    assert fixed.skip(100) is None, "what is given is not learned"
    with pytest.raises(ValueError, match="compute_tokens_per_s"):
        LoadRule(compute_tokens_per_s=0)


def test_the_cache_reports_the_loads_that_it_waits_for_late_ones_too() -> None:
    engine = in_host_only(1, 2, 3, full=8)
    assert begin_boundary(engine, 1, 2, 3) == 3
    assert engine.cache.load_rule.loading.tokens_per_s is not None
    engine = in_host_only(1, 2, 3, full=8)
    engine.lower.on_load = hang
    assert begin_boundary(engine, 1, 2, 3) == 0
    assert engine.cache.load_rule.loading.tokens_per_s is not None


# ---- not waited for


def test_a_request_is_there_at_once_and_takes_what_came_when_the_engine_says_so() -> None:
    engine = in_host_only(1, 2, 3, 4, full=8, swa=8, mamba=4)
    engine.lower.on_load = hang
    running = begin(engine, 1, 2, 3, 4, private=True)
    request = running.request
    assert (request.boundary, request.n_pages) == (0, 0)
    loading = request.loading
    assert loading is not None
    assert not loading.done()
    assert loading.boundary == 4
    with pytest.raises(ValueError, match="is loading"):
        engine.cache.insert(request, running.prompt.tokens[:0], {})
    engine.lower.loads[0].succeed()
    assert loading.done()
    assert request.boundary == 0, "a boundary moved under the engine"
    engine.drop_l1()
    for component in engine.components:  # may be read before `end`, so it stays in place until then
        for page in np.flatnonzero(loading.slots[component.name] != NO_SLOT).tolist():
            got = engine.memory[component.name][loading.slots[component.name][page]]
            assert np.array_equal(got, tag(running.prompt, component.name, page))
    loading.end()
    assert request.boundary == 4
    assert request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 4, Tier.STORAGE: 0}
    assert {n: s.tolist() for n, s in request.slots.items()} == {
        n: s.tolist() for n, s in loading.slots.items()
    }
    assert np.array_equal(engine.memory["mamba"][running.private], tag(running.prompt, "mamba", 3))
    assert request.loading is None
    assert engine.cache.counters.hit_host_pages == 4
    engine.check()
    engine.abort(running)
    engine.drop_l1()
    assert engine.free_slots() == {"full": 8, "swa": 8, "mamba": 4}
    assert engine.lower.leases == {}


def test_who_does_not_want_to_wait_goes_on_with_l1_and_the_load_serves_the_next() -> None:
    """LOADBACK-02."""
    engine = in_host_only(1, 2, 3, full=8)
    engine.lower.on_load = hang
    running = begin(engine, 1, 2, 3)
    assert running.request.loading is not None
    running.request.loading.end()
    assert engine.compute(running, 3)
    engine.lower.loads[0].succeed()
    engine.finish(running)
    assert begin_boundary(engine, 1, 2, 3) == 3
    assert len(engine.lower.loads) == 1
    engine.drop_l1()
    assert engine.free_slots() == {"full": 8}


def test_fifty_sharers_join_one_transfer_and_strangers_go_their_way() -> None:
    """LOADBACK-02: one slow load; 50 prompts that share its pages and 50 that do not."""
    engine = in_host_only(*range(1, 11), full=64)
    engine.serve(tokens_of(70, 71))
    engine.drop_l1()
    engine.lower.on_load = hang
    first = begin(engine, *range(1, 11))
    sharers = [begin(engine, *range(1, 11), 100 + n) for n in range(50)]
    strangers = [begin(engine, 200 + n, 1) for n in range(50)]
    assert len(engine.lower.loads) == 1
    assert engine.cache.counters.loads_joined == 50
    assert all(stranger.request.loading is None for stranger in strangers)
    engine.lower.on_load = FakeTransfer.succeed
    assert begin_boundary(engine, 70, 71) == 2, "an unrelated load waited"
    engine.lower.loads[0].succeed()
    for running in (first, *sharers):
        assert running.request.loading is not None
        assert running.request.loading.done()
        running.request.loading.end()
        assert running.request.boundary == 10
    engine.check()


def test_who_waits_joins_a_load_that_is_under_way_and_loads_the_rest_himself() -> None:
    """LOADBACK-02."""
    engine = Engine(full=16)
    engine.serve(tokens_of(1, 2, 3))
    engine.serve(tokens_of(1, 2, 3, 4, 5))
    engine.drop_l1()

    def soon(transfer: FakeTransfer) -> None:
        if not transfer.is_settled:
            transfer.succeed()

    engine.lower.on_load = soon
    first = begin(engine, 1, 2, 3)
    second = engine.begin(tokens_of(1, 2, 3, 4, 5))
    assert second is not None
    assert second.request.hit_pages == {Tier.DEVICE: 0, Tier.HOST: 5, Tier.STORAGE: 0}
    assert [p.placements["full"].pages.tolist() for p in engine.lower.loads] == [[0, 1, 2], [3, 4]]
    assert first.request.loading is not None
    first.request.loading.end()
    assert first.request.boundary == 3


@pytest.mark.parametrize("end", [FakeTransfer.fail, FakeTransfer.lose])
def test_a_load_that_fails_leaves_the_request_what_l1_has(end) -> None:
    engine = in_host_only(1, 2, 3, full=8)
    engine.lower.on_load = hang
    running = begin(engine, 1, 2, 3)
    end(engine.lower.loads[0])
    assert running.request.loading is not None
    running.request.loading.end(1.0)
    assert running.request.boundary == 0
    assert engine.compute(running, 3)
    engine.finish(running)
    if not engine.lower.loads[0].is_settled:
        engine.lower.loads[0].settle()
    engine.cache.poll()
    assert engine.cache.counters.loads_failed == 1
    engine.drop_l1()
    assert engine.free_slots() == {"full": 8}


def test_a_load_past_its_time_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = in_host_only(1, 2, 3, full=8), [100.0]
    monkeypatch.setattr("hicache.cache.loads.time.monotonic", lambda: now[0])
    engine.lower.on_load = hang
    running = begin(engine, 1, 2, 3)
    loading = running.request.loading
    assert loading is not None
    loading.load.begun_s = now[0]
    assert not loading.done()
    now[0] += 2.5
    assert loading.done()
    loading.end(10.0)
    assert running.request.boundary == 0
    assert engine.cache.counters.loads_late == 1
    engine.lower.loads[0].succeed()
    assert begin_boundary(engine, 1, 2, 3) == 3


def test_an_aborted_request_lets_its_load_go() -> None:
    engine = in_host_only(1, 2, 3, full=4)
    engine.lower.on_load = hang
    running = begin(engine, 1, 2, 3)
    engine.abort(running)
    assert engine.cache.alloc("full", 2) is None, "slots under a load were given away"
    engine.lower.loads[0].succeed()
    engine.drop_l1()
    assert engine.free_slots() == {"full": 4}


def test_layers_can_be_read_as_they_land_and_a_failed_load_lets_all_waits_go() -> None:
    """LOADBACK-02's other half: who computes on the first layers does not wait for the last."""
    with SharedRegion(4096) as region:
        board = LayerBoard(region, number=0, n_layers=2, n_rows=1)
        engine = in_host_only(1, 2, 3, full=8, layers=board)
        engine.lower.on_load = hang
        running = begin(engine, 1, 2, 3)
        loading = running.request.loading
        assert loading is not None
        row = loading.layers
        assert row is not None
        assert not row.landed(0)
        other = begin(engine, 9)
        assert other.request.loading is None
        engine.lower.loads[0].fail()
        assert loading.done()
        assert row.wait(1, timeout_s=1.0), "a stream would hang"
        assert board.take() is None, "the row was given away while its request may read it"
        loading.end()
        assert loading.layers is None
        assert board.take() is not None
