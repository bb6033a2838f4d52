"""The demo's text, script and oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.demo.oracle import Ceiling, InfiniteCache
from examples.demo.plan import full_plan, quick_plan
from examples.demo.text import Tokeniser, library_files
from examples.demo.workload import Conversation, Script, Sizes

SIZES = Sizes(clients=4, rounds=4, system_tokens=50, chunk_tokens=30, answer_tokens=4)


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    tokeniser = Tokeniser(["def f(x):\n    return x\n"], 300)
    encodable = text.encode("utf-8", "replace").decode()
    tokens = tokeniser.encode(encodable)
    assert tokeniser.decode(tokens) == encodable
    assert tokens.dtype == np.int32
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_a_library_without_enough_sources_is_an_error_that_says_so() -> None:
    with pytest.raises(FileNotFoundError, match="need 3"):
        library_files(3, at_least_bytes=1 << 30)


class TestScript:
    def test_the_same_seed_plays_the_same_script(self) -> None:
        first, second = Script(SIZES, 1024, 3), Script(SIZES, 1024, 3)
        for number in range(SIZES.rounds):
            assert first.order(number) == second.order(number)
            assert sorted(first.order(number)) == list(range(SIZES.clients))
            for client in range(SIZES.clients):
                assert np.array_equal(first.turn(client, number), second.turn(client, number))

    def test_pairs_begin_alike_and_go_their_own_ways(self) -> None:
        script = Script(SIZES, 1024, 3)
        one, other = ([script.turn(client, number) for number in range(3)] for client in (2, 3))
        assert np.array_equal(one[0], other[0])
        alike = np.flatnonzero(one[1][: len(other[1])] != other[1][: len(one[1])])[0]
        assert alike > SIZES.chunk_tokens
        assert not np.array_equal(one[2][:30], other[2][:30])
        assert not np.array_equal(script.turn(0, 0), one[0])

    def test_a_conversation_grows_by_turns_and_answers(self) -> None:
        script = Script(SIZES, 1024, 3)
        conversation = Conversation(script, 1)
        first = conversation.prompt(0)
        conversation.answered((7, 8))
        assert np.array_equal(first, np.concatenate((script.system_prompt(), script.turn(1, 0))))
        assert np.array_equal(conversation.prompt(1), np.concatenate((first, [7, 8], script.turn(1, 1))))


class TestOracle:
    def test_a_conversation_goes_on_from_the_last_prompts_whole_pages(self) -> None:
        cache = InfiniteCache(4)
        tokens = np.arange(100, dtype=np.int32)
        assert cache.serve(tokens[:22]) == Ceiling(0, 0)
        cache.finish(tokens[:25])
        # pages 0 to 5 are known, but the only checkpoint is after page 4 (20 tokens)
        assert cache.serve(tokens[:40]) == Ceiling(5, 6)
        # the branch got a checkpoint at 6, and the prompt's end one at 10; a token is left to compute
        assert cache.serve(tokens[:40]) == Ceiling(6, 9)
        assert cache.serve(tokens[:41]) == Ceiling(10, 10)
        assert cache.serve(np.concatenate((tokens[:30], tokens[:9]))) == Ceiling(6, 7)

    def test_other_tokens_before_a_page_make_it_another_page(self) -> None:
        cache = InfiniteCache(4)
        cache.serve(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.int32))
        assert cache.serve(np.array([0, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.int32)) == Ceiling(0, 0)


class TestPlan:
    @pytest.mark.parametrize("make", [full_plan, quick_plan])
    def test_l1_holds_one_request_l2_not_all_and_l3_everything(self, make: type) -> None:
        plan = make(clients=None, rounds=None, seed=1)
        longest = plan.sizes.system_tokens + (plan.sizes.rounds + plan.rounds_after_restart) * (
            plan.sizes.chunk_tokens + plan.sizes.answer_tokens
        )
        page = plan.shape.page_size
        everything = plan.sizes.clients * longest // page * 32768
        assert longest // page < plan.slots.full < plan.sizes.clients * longest // page // 2
        assert plan.device_bytes < plan.host_bytes < everything < plan.storage_bytes

    def test_too_many_rounds_for_the_model_are_refused(self) -> None:
        with pytest.raises(ValueError, match="rounds: prompts would reach"):
            full_plan(clients=None, rounds=40, seed=1)
        with pytest.raises(ValueError, match="at least 2"):
            full_plan(clients=1, rounds=None, seed=1)
