"""L1 under pressure: slots come and go, and none is lost or given out twice."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine, Running, tokens_of
from fake_lower import GARBAGE, PAGE_TOKENS, FakeTransfer, fill, make_layout, tag

from hicache.cache import UnifiedRadixCache
from hicache.core.layout import ComponentSpec, Kind, Layout, LayoutError, Plane, Pool
from hicache.core.words import NO_SLOT, Tier


def begun(engine: Engine, *pages: int, **how: bool) -> Running:
    running = engine.begin(tokens_of(*pages), **how)  # type: ignore[arg-type]
    assert running is not None
    return running


@pytest.mark.parametrize("n_tokens", [0, 1, 3, 4, 5, 7, 8, 9])
def test_prompts_of_any_length_begin_and_end(n_tokens: int) -> None:
    """TREE-06: with two pages known, the boundary leaves a token and is a whole number of pages."""
    engine = Engine(lower=False, full=8)
    engine.serve(tokens_of(1, 2))
    tokens = tokens_of(1, 2)[:n_tokens]
    running = engine.begin(tokens)
    assert running is not None
    assert running.request.boundary == max(0, n_tokens - 1) // PAGE_TOKENS
    whole = n_tokens // PAGE_TOKENS
    assert engine.compute(running, whole) or whole == running.request.boundary
    engine.finish(running)


def test_inserting_less_than_a_page_changes_nothing() -> None:
    """TREE-06: accepted, and nothing is cached."""
    engine = Engine(lower=False, full=8)
    running = begun(engine, 1)
    inserted = engine.cache.insert(running.request, tokens_of(1)[:3], {"full": np.empty(0, np.int32)})
    assert (inserted.n_pages, inserted.tail_tokens) == (0, 3)
    engine.check()
    assert engine.free_slots() == {"full": 8}


def test_no_slot_markers_are_left_out_when_slots_are_freed() -> None:
    """SWA-03: half of the entries are -1; then the whole pool comes out once."""
    engine = Engine(lower=False, full=8)
    slots = engine.cache.alloc("full", 4)
    assert slots is not None
    engine.cache.free("full", np.array([slots[0], NO_SLOT, slots[1], NO_SLOT], np.int32))
    rest = engine.cache.alloc("full", 6)
    assert rest is not None
    assert sorted([*rest.tolist(), *slots[2:].tolist()]) == list(range(8))
    with pytest.raises(ValueError, match="named twice"):
        engine.cache.free("full", np.concatenate((rest, rest[:1])))


def test_window_slots_survive_hundreds_of_rounds_of_eviction_and_refill() -> None:
    """SWA-01: the same prompt again and again, its window payload evicted in between."""
    engine = Engine(share=0.5, full=12, swa=7)
    random = np.random.default_rng(1)
    for _ in range(150):
        pages = [1, 2, 3, *random.integers(4, 6, 3).tolist()]
        engine.serve(tokens_of(*pages))
        engine.cache.evict("swa", int(random.integers(1, 6)))
        running = begun(engine, *pages[: int(random.integers(1, 7))])
        engine.cache.evict("full", int(random.integers(0, 4)))
        engine.check()
        engine.abort(running)
    engine.drop_l1()
    engine.drop_l1()
    assert engine.free_slots() == {"full": 12, "swa": 7}


def test_a_window_within_a_page_keeps_its_last_page() -> None:
    """SWA-04: pages of 4 tokens, a window of 2: inserted page by page, matched whole after each."""
    layout = Layout(
        page_size=4,
        components=(ComponentSpec("full", Kind.FULL), ComponentSpec("swa", Kind.SWA, tokens=2)),
        pools=(
            Pool("f", "full", 4, (Plane(0, 0, 16, 16),)),
            Pool("s", "swa", 4, (Plane(1, 0, 16, 16),)),
        ),
    )
    cache = UnifiedRadixCache(layout, model="m")
    tokens = tokens_of(1, 2, 3)
    request = cache.begin("r", tokens)
    for n in range(1, 4):
        full, swa = cache.alloc("full", 1), cache.alloc("swa", 1)
        assert full is not None
        assert swa is not None
        table = {
            name: np.concatenate((request.slots[name], slot)) for name, slot in (("full", full), ("swa", swa))
        }
        cache.insert(request, tokens[: 4 * n], table)
        cache.advance(request, n)
        assert (request.slots["swa"] != NO_SLOT).tolist() == [False] * (n - 1) + [True]
        probe = cache.begin("p", tokens_of(1, 2, 3)[: 4 * n + 1])
        assert probe.boundary == n
        cache.abort(probe)
        assert cache.audit() == []
    cache.abort(request)


def test_what_a_request_reads_is_never_evicted() -> None:
    """MAMBA-06 and TREE-01: with a request on it, neither FULL nor its checkpoint goes, whoever asks."""
    engine = Engine(lower=False, full=6, swa=6, mamba=2)
    engine.serve(tokens_of(1, 2, 3))
    running = begun(engine, 1, 2, 3)
    for name, size in (("full", 6), ("swa", 6), ("mamba", 2)):
        assert engine.cache.evict(name, size) == 0
    assert engine.cache.alloc("full", 4) is None
    assert engine.cache.counters.allocations_failed == 1
    engine.check()
    engine.abort(running)
    assert engine.cache.evict("full", 2) == 2


def test_the_checkpoint_it_began_from_may_go_once_the_request_has_its_own() -> None:
    engine = Engine(lower=False, full=6, mamba=2)
    engine.serve(tokens_of(1, 2))
    running = begun(engine, 1, 2, 3, private=True)
    assert engine.cache.evict("mamba", 1) == 0
    engine.cache.advance(running.request, 3)
    assert engine.cache.evict("mamba", 1) == 1
    engine.check()
    assert np.array_equal(engine.memory["mamba"][running.private], tag(running.prompt, "mamba", 1))


def test_a_hit_makes_its_pages_the_last_to_go() -> None:
    """SWA-07 and TREE-05: A is older than B, then A is hit; B goes first, in every component."""
    engine = Engine(lower=False, full=4, swa=4, mamba=2)
    engine.serve(tokens_of(1, 2))
    engine.serve(tokens_of(8, 9))
    engine.abort(begun(engine, 1, 2))
    for name, n in (("swa", 1), ("mamba", 1), ("full", 2)):
        assert engine.cache.evict(name, n) == n
    running = begun(engine, 1, 2)
    assert running.request.boundary == 2


def test_an_allocation_is_whole_or_nothing() -> None:
    engine = Engine(lower=False, full=6)
    engine.serve(tokens_of(1, 2, 3))
    running = begun(engine, 1, 2)
    free = engine.free_slots()["full"]
    assert engine.cache.alloc("full", 5) is None
    assert engine.free_slots()["full"] >= free
    got = engine.cache.alloc("full", 4)
    assert got is not None
    assert len(got) == 4
    engine.check()
    engine.abort(running)


def test_chunks_of_one_request_may_be_overtaken_by_another() -> None:
    """TREE-04 in chunks: R2 is faster with the middle; R1's pages there are freed once, its view is R2's."""
    engine = Engine(lower=False, full=16, swa=8)
    slow, fast = begun(engine, 1, 2, 3, 4, 5), begun(engine, 1, 2, 3, 4, 6)
    assert engine.compute(slow, 1)
    assert engine.compute(fast, 4)
    assert engine.compute(slow, 3)
    assert slow.request.slots["full"].tolist() == fast.request.slots["full"].tolist()[:3]
    engine.finish(fast)
    assert engine.compute(slow, 5)
    engine.finish(slow)
    assert 16 - engine.free_slots()["full"] == 6 - 1 + 0


def test_an_insert_that_brings_nothing_new_is_harmless() -> None:
    engine = Engine(lower=False, full=8, swa=8)
    running = begun(engine, 1, 2)
    assert engine.compute(running, 2)
    before = {name: slots.tolist() for name, slots in running.request.slots.items()}
    tokens = running.prompt.tokens[:8]
    inserted = engine.cache.insert(running.request, tokens, running.table)
    assert {name: len(slots) for name, slots in inserted.redundant.items()} == {"full": 0, "swa": 0}
    assert {name: slots.tolist() for name, slots in running.request.slots.items()} == before
    engine.finish(running)


def test_stale_entries_of_old_pages_are_ignored() -> None:
    """An engine's table may still name slots that are another's by now: they are not taken for its own."""
    engine = Engine(lower=False, full=8, swa=3)
    running = begun(engine, 1, 2, 3, 4)
    for page in (1, 2, 3):
        assert engine.compute(running, page)
    assert engine.cache.evict("swa", 1) == 1
    others = engine.cache.alloc("swa", 1)
    assert others is not None
    engine.memory["swa"][others] = GARBAGE
    full = engine.cache.alloc("full", 1)
    assert full is not None
    fill(engine.memory, running.prompt, "full", range(3, 4), full)
    table = {
        "full": np.concatenate((running.request.slots["full"], full)),
        "swa": np.concatenate((others, running.request.slots["swa"][1:], [NO_SLOT])).astype(np.int32),
    }
    engine.cache.insert(running.request, running.prompt.tokens[:16], table)
    engine.check()
    engine.cache.free("swa", others)


def test_a_lease_is_held_until_the_load_has_ended() -> None:
    """LOADBACK-04: the source of a copy stays in place while it may still be read."""
    engine = Engine(full=8)
    engine.serve(tokens_of(1, 2, 3))
    engine.drop_l1()
    engine.lower.on_load = lambda transfer: None
    engine.abort(begun(engine, 1, 2, 3))
    assert len(engine.lower.leases) == 1
    engine.lower.loads[0].succeed()
    engine.cache.poll()
    assert engine.lower.leases == {}


def test_a_slow_load_costs_its_deadline_and_is_counted() -> None:
    """LOADBACK-05, engine's side: the request goes on with what L1 has."""
    engine = Engine(full=8)
    engine.serve(tokens_of(1, 2, 3))
    engine.cache.evict("full", 2)
    engine.lower.on_load = lambda transfer: None
    running = begun(engine, 1, 2, 3)
    assert running.request.hit_pages == {Tier.DEVICE: 1, Tier.HOST: 0, Tier.STORAGE: 0}
    assert engine.cache.counters.loads_late == 1
    assert engine.compute(running, 3)
    engine.finish(running)


def test_put_off_backups_go_without_new_requests() -> None:
    """WRITE-02: polling alone brings everything down."""
    engine = Engine(share=0.25, full=16)
    engine.lower.on_backup = lambda transfer: None
    for first in (1, 4, 7, 10):
        engine.serve(tokens_of(first, first + 1, first + 2))
    while unsettled := engine.lower.unsettled():
        for transfer in unsettled:
            transfer.succeed()
        engine.cache.poll()
    assert len(engine.lower.host) == 12


def test_what_was_put_off_first_goes_first() -> None:
    """A path that grows all the time does not keep the others waiting for ever."""
    engine = Engine(share=0.25, full=24)
    engine.lower.on_backup = lambda transfer: None
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6))
    engine.serve(tokens_of(8, 9))
    engine.serve(tokens_of(1, 2, 3, 4, 5, 6, 7))
    (first,) = engine.lower.backups
    first.succeed()
    engine.cache.poll()
    assert [backup.prompt.tokens[0] for backup in engine.lower.backups] == [1, 8]


def test_a_daemon_that_dies_under_backups_frees_their_pages() -> None:
    engine = Engine(share=1.0, full=8)
    engine.lower.on_backup = FakeTransfer.lose
    engine.serve(tokens_of(1, 2, 3))
    engine.lower.ready = False
    engine.lower.restart()
    assert engine.cache.evict("full", 8) == 3


def test_what_an_earlier_daemon_took_is_not_known_to_be_in_a_later_ones_memory() -> None:
    """The answer came, but from the process that is not the daemon any more."""
    engine = Engine(share=1.0, full=8)
    engine.lower.on_backup = lambda transfer: None
    engine.serve(tokens_of(1, 2))
    (first,) = engine.lower.backups
    engine.lower.epoch += 1
    first.succeed()
    engine.lower.host.clear()
    engine.lower.on_backup = FakeTransfer.succeed
    engine.cache.poll()
    engine.serve(tokens_of(1, 2))
    engine.drop_l1()
    assert begun(engine, 1, 2).request.boundary == 2


def test_layouts_that_make_no_sense_are_refused() -> None:
    for layout in (
        Layout(4, (), ()),
        Layout(4, (ComponentSpec("full", Kind.FULL),), ()),
        Layout(4, make_layout(full=4).components, make_layout(swa=4).pools),
    ):
        with pytest.raises(LayoutError, match="components"):
            UnifiedRadixCache(layout, model="m")
