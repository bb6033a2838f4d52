"""The demo's engine over no cache, over L1 with room for everything and over an L1 that is far too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from examples.demo import checks
from examples.demo.arithmetic import Shape
from examples.demo.engine import Ask, Engine, EngineError, R, Served
from examples.demo.memory import FULL, MAMBA, SWA, PagedMemory, Slots, layout_of
from examples.demo.model import HybridModel
from examples.demo.nocache import NoCache
from examples.demo.play import Record, Round
from examples.demo.workload import Conversation, Script, Sizes
from hicache.cache import UnifiedRadixCache
from hicache.core.layout import component_slots
from hicache.core.words import Tier

SHAPE = Shape(page_size=4, window_tokens=12, max_tokens=1024, vocabulary=512, repeats=1)
SIZES = Sizes(clients=4, rounds=4, system_tokens=61, chunk_tokens=40, answer_tokens=6)
PLENTY = Slots(full=2000, swa=2000, mamba=200)
SCARCE = Slots(full=170, swa=40, mamba=6)
CopySlot = Callable[[str, int, int], None]


@dataclass
class Machine:
    """A model, its memory, and what the script gave when it was played to them."""

    memory: PagedMemory
    model: HybridModel
    rounds: list[Round]


def _machine(slots: Slots) -> tuple[PagedMemory, HybridModel, UnifiedRadixCache]:
    layout, nbytes = layout_of(SHAPE, slots)
    memory = PagedMemory(SHAPE, layout, bytearray(nbytes))
    cache = UnifiedRadixCache(layout, model="test", copy_slot=memory.copy_slot)
    return memory, HybridModel(SHAPE, memory, 3), cache


def _script() -> Script:
    return Script(SIZES, SHAPE.vocabulary, 7)


def _play(engine: Engine[R]) -> list[Round]:
    script = _script()
    conversations = [Conversation(script, client) for client in range(SIZES.clients)]
    rounds = []
    for number in range(SIZES.rounds):
        records = []
        for client in script.order(number):
            prompt = conversations[client].prompt(number)
            ask = Ask(f"{client}/{number}", prompt, SIZES.answer_tokens)
            engine.queue(ask)
            served = engine.serve(ask)
            conversations[client].answered(served.answer)
            records.append(Record(client, number, prompt, served))
        rounds.append(Round(number, 1.0, tuple(records)))
    return rounds


@pytest.fixture(scope="module")
def reference() -> list[Round]:
    """The script without any cache."""
    layout, nbytes = layout_of(SHAPE, PLENTY)
    memory = PagedMemory(SHAPE, layout, bytearray(nbytes))
    cache = NoCache(component_slots(layout))
    rounds = _play(Engine(HybridModel(SHAPE, memory, 3), memory, cache))
    assert cache.audit() == []
    return rounds


def test_without_a_cache_every_prompt_is_computed_from_its_first_token(reference: list[Round]) -> None:
    for record in checks.records_of(reference):
        assert record.served.prefilled_tokens == len(record.prompt)
    assert checks.computed_what_was_left("none", reference, SHAPE.page_size) == []


def test_an_l1_with_room_for_everything_serves_what_a_cache_that_never_forgets_would(
    reference: list[Round],
) -> None:
    memory, model, cache = _machine(PLENTY)
    rounds = _play(Engine(model, memory, cache))
    assert checks.same_answers("L1", rounds, reference) == []
    assert checks.computed_what_was_left("L1", rounds, SHAPE.page_size) == []
    expected = checks.ceilings(rounds, SHAPE.page_size)
    assert checks.reached_the_ceiling("L1", rounds, expected) == []
    assert any(ceiling.branching_boundary > ceiling.boundary > 0 for ceiling in expected.values())
    assert cache.audit() == []


def test_an_l1_that_must_forget_changes_no_answer_and_leaks_nothing(reference: list[Round]) -> None:
    memory, model, cache = _machine(SCARCE)
    rounds = _play(Engine(model, memory, cache))
    assert checks.same_answers("L1", rounds, reference) == []
    assert checks.computed_what_was_left("L1", rounds, SHAPE.page_size) == []
    hits = [sum(record.served.boundary for record in checks.records_of(each)) for each in (rounds, reference)]
    ceilings = checks.ceilings(rounds, SHAPE.page_size).values()
    assert 0 == hits[1] < hits[0] < sum(ceiling.boundary for ceiling in ceilings)
    assert cache.audit() == []
    cache.evict(FULL, SCARCE.full)
    cache.evict(SWA, SCARCE.swa)
    cache.evict(MAMBA, SCARCE.mamba)
    assert {name: pool.n_free for name, pool in cache.pools.items()} == {
        FULL: SCARCE.full,
        SWA: SCARCE.swa,
        MAMBA: SCARCE.mamba,
    }


class TestAWrongCacheIsNoticed:
    """The demo's checks see it when a cache gives other bytes than recomputation would."""

    def _played(
        self, reference: list[Round], copy_slot: CopySlot, memory: PagedMemory, model: HybridModel
    ) -> int:
        layout, _ = layout_of(SHAPE, PLENTY)
        cache = UnifiedRadixCache(layout, model="test", copy_slot=copy_slot)
        return len(checks.same_answers("L1", _play(Engine(model, memory, cache)), reference))

    def test_a_checkpoint_that_was_not_restored(self, reference: list[Round]) -> None:
        memory, model, _ = _machine(PLENTY)
        assert self._played(reference, lambda component, source, target: None, memory, model)

    def test_a_checkpoint_of_another_page(self, reference: list[Round]) -> None:
        memory, model, _ = _machine(PLENTY)

        def neighbour(component: str, source: int, target: int) -> None:
            memory.copy_slot(component, max(0, source - 1), target)

        assert self._played(reference, neighbour, memory, model)

    @pytest.mark.parametrize("component", [FULL, SWA])
    def test_one_wrong_number_in_one_cached_page(self, reference: list[Round], component: str) -> None:
        memory, model, cache = _machine(PLENTY)
        engine = Engine(model, memory, cache)
        first = checks.records_of(reference)[0]
        served = engine.serve(Ask("first", first.prompt, SIZES.answer_tokens))
        following = next(
            record for record in checks.records_of(reference[1:2]) if record.client == first.client
        )
        boundary = served.prompt_tokens // SHAPE.page_size
        request = cache.begin("look", following.prompt)
        slot = int(request.slots[component][boundary - 1])
        cache.abort(request)
        memory.values[component][0][slot, 0, 0, :] += 1.0
        wrong = engine.serve(Ask("second", following.prompt, SIZES.answer_tokens))
        assert wrong.boundary == boundary
        assert wrong.logits_digest != following.served.logits_digest


class TestEngine:
    def _served(self, prompts: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]) -> list[Served]:
        memory, model, cache = _machine(PLENTY)
        engine = Engine(model, memory, cache)
        return [engine.serve(Ask(str(i), prompt, 3)) for i, prompt in enumerate(prompts)]

    def test_a_prompt_shorter_than_a_page_and_one_that_ends_with_a_page(self) -> None:
        tokens = np.arange(64, dtype=np.int32)
        served = self._served([tokens[:3], tokens[:32], tokens[:32], tokens[:33]])
        assert [each.boundary for each in served] == [0, 0, 0, 8]
        assert [each.branching_boundary for each in served] == [0, 0, 7, 8]
        assert [each.prefilled_tokens for each in served] == [3, 32, 32, 1]

    def test_a_branch_gets_a_checkpoint_for_whoever_comes_third(self) -> None:
        stem, rest = (
            np.arange(40, dtype=np.int32),
            [np.full(20, fill, dtype=np.int32) for fill in (100, 200, 300)],
        )
        served = self._served([np.concatenate((stem, tail)) for tail in rest])
        assert [(each.boundary, each.branching_boundary) for each in served] == [(0, 0), (0, 10), (10, 10)]

    @pytest.mark.parametrize(("prompt", "answer"), [(0, 1), (5, 0), (1020, 5)])
    def test_a_request_that_the_model_cannot_take_is_refused_at_once(self, prompt: int, answer: int) -> None:
        memory, model, cache = _machine(PLENTY)
        with pytest.raises(EngineError, match="take 1 to 1024 tokens"):
            Engine(model, memory, cache).serve(Ask("odd", np.zeros(prompt, dtype=np.int32), answer))
        assert model.n_tokens == 0
        assert cache.audit() == []

    def test_a_request_that_does_not_fit_fails_with_a_reason_and_leaves_nothing_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("examples.demo.engine._ALLOC_TIMEOUT_S", 0.0)
        memory, model, cache = _machine(Slots(full=20, swa=40, mamba=6))
        engine = Engine(model, memory, cache)
        with pytest.raises(EngineError, match=r"full: no .* slots"):
            engine.serve(Ask("large", np.arange(200, dtype=np.int32), 3))
        assert cache.audit() == []
        assert {name: pool.n_free for name, pool in cache.pools.items()} == {FULL: 20, SWA: 40, MAMBA: 6}
        assert engine.serve(Ask("small", np.arange(30, dtype=np.int32), 3)).hit_pages[Tier.DEVICE] == 0
