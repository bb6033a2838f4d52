"""The demo's model: its arithmetic is exact, and its output depends on all that a cache must keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demo.arithmetic import (
    ACTIVATION_MAX,
    EXACT_LIMIT,
    STATE_MAX,
    WEIGHT_MAX,
    Shape,
    largest_sums,
    norm,
    requantise,
    require_exact,
)
from examples.demo.memory import FULL, MAMBA, SWA, PagedMemory, Slots, layout_of
from examples.demo.model import HybridModel, Place
from hicache.core.words import TokenArray

SMALL = Shape(page_size=4, window_tokens=12, max_tokens=512, vocabulary=97, repeats=2)
N_PAGES = 24


class Bench:
    """A model over its own memory, with one page of each kind in every slot."""

    def __init__(self, shape: Shape = SMALL, seed: int = 5) -> None:
        layout, nbytes = layout_of(shape, Slots(N_PAGES, N_PAGES, 3))
        layout.validate([nbytes])
        self.shape = shape
        self.memory = PagedMemory(shape, layout, bytearray(nbytes))
        self.model = HybridModel(shape, self.memory, seed)
        pages = np.arange(N_PAGES, dtype=np.int32)
        self.place = Place(pages.copy(), pages[::-1].copy(), 0)

    def run(self, tokens: TokenArray, cuts: list[int], start: int = 0) -> torch.Tensor:
        for begin, end in zip([start, *cuts], [*cuts, len(tokens)], strict=True):
            logits = self.model.forward(tokens[begin:end], begin, self.place)
        return logits

    def bytes_of(self, n_tokens: int) -> list[bytes]:
        """All bytes that the first tokens left: FULL and SWA pages (the last one's tail is zero), state."""
        pages = range(-(-n_tokens // self.shape.page_size))
        kv = [self.memory.slot_bytes(FULL, self.place.full[p]) for p in pages]
        kv += [self.memory.slot_bytes(SWA, self.place.swa[p]) for p in pages]
        return [*kv, self.memory.slot_bytes(MAMBA, self.place.mamba)]

    def adopt(self, other: Bench, boundary: int) -> None:
        """Take over what a cache restores at a page boundary: all FULL pages, the window, the state."""
        window = -(-self.shape.window_tokens // self.shape.page_size)
        for page in range(boundary):
            _copy_page(other, self, FULL, other.place.full[page], self.place.full[page])
        for page in range(max(0, boundary - window), boundary):
            _copy_page(other, self, SWA, other.place.swa[page], self.place.swa[page])
        self.place.swa[: max(0, boundary - window)] = -1
        for theirs, ours in zip(other.memory.states, self.memory.states, strict=True):
            ours[self.place.mamba] = theirs[other.place.mamba]
        for theirs, ours in zip(other.memory.tails, self.memory.tails, strict=True):
            ours[self.place.mamba] = theirs[other.place.mamba]


def _copy_page(source: Bench, target: Bench, kind: str, one: int, other: int) -> None:
    for stores in ("keys", "values"):
        theirs, ours = getattr(source.memory, stores)[kind], getattr(target.memory, stores)[kind]
        for mine, your in zip(ours, theirs, strict=True):
            mine[other] = your[one]


def _tokens(n: int, seed: int = 0, vocabulary: int = SMALL.vocabulary) -> TokenArray:
    return np.random.default_rng(seed).integers(0, vocabulary, n).astype(np.int32)


@st.composite
def _cut_prompts(draw: st.DrawFn) -> tuple[TokenArray, list[int]]:
    n = draw(st.integers(1, N_PAGES * SMALL.page_size))
    cuts = draw(st.lists(st.integers(1, max(1, n - 1)), unique=True, max_size=8).map(sorted))
    return _tokens(n, draw(st.integers(0, 9))), [cut for cut in cuts if cut < n]


@settings(deadline=None, max_examples=40)
@given(_cut_prompts())
def test_states_kv_and_logits_do_not_depend_on_how_a_prompt_is_cut(
    case: tuple[TokenArray, list[int]],
) -> None:
    tokens, cuts = case
    whole, cut = Bench(), Bench()
    assert torch.equal(whole.run(tokens, []), cut.run(tokens, cuts))
    assert whole.bytes_of(len(tokens)) == cut.bytes_of(len(tokens))


@settings(deadline=None, max_examples=25)
@given(_cut_prompts(), st.integers(1, N_PAGES - 1))
def test_going_on_from_restored_state_gives_the_same_bits(
    case: tuple[TokenArray, list[int]], boundary: int
) -> None:
    tokens, cuts = case
    at = boundary * SMALL.page_size
    if at >= len(tokens):
        at = (len(tokens) - 1) // SMALL.page_size * SMALL.page_size
    whole, before, after = Bench(), Bench(), Bench()
    expected = whole.run(tokens, [])
    if at:
        before.run(tokens[:at], [cut for cut in cuts if cut < at])
        after.adopt(before, at // SMALL.page_size)
    assert torch.equal(after.run(tokens, [cut for cut in cuts if cut > at], start=at), expected)
    assert after.model.n_tokens == len(tokens) - at
    assert after.memory.slot_bytes(MAMBA, 0) == whole.memory.slot_bytes(MAMBA, 0)


def test_token_by_token_with_full_size_layers_equals_one_prefill() -> None:
    shape = Shape(max_tokens=1024)
    tokens = _tokens(700, vocabulary=shape.vocabulary)
    whole, cut = Bench(shape), Bench(shape)
    expected = whole.run(tokens, [])
    assert torch.equal(cut.run(tokens, [300, 301, 302, *range(640, 700)]), expected)
    assert whole.bytes_of(700) == cut.bytes_of(700)


def test_the_number_of_threads_changes_no_bit() -> None:
    tokens = _tokens(90)
    threads = torch.get_num_threads()
    results = []
    for n in (1, 2):
        torch.set_num_threads(n)
        bench = Bench()
        results.append((bench.run(tokens, []).tolist(), bench.bytes_of(90)))
    torch.set_num_threads(threads)
    assert results[0] == results[1]


class TestOutputDependsOnEverythingACacheKeeps:
    """Each kind of wrong hit is seen in the logits and in the generated words."""

    def _restored(self, tokens: TokenArray, boundary: int) -> Bench:
        before, after = Bench(), Bench()
        before.run(tokens[: boundary * SMALL.page_size], [])
        after.adopt(before, boundary)
        return after

    def _generate(self, bench: Bench, tokens: TokenArray, start: int) -> list[int]:
        logits = bench.run(tokens, [], start=start)
        generated = []
        for position in range(len(tokens), len(tokens) + 8):
            generated.append(bench.model.greedy(logits))
            logits = bench.model.forward(np.array(generated[-1:], np.int32), position, bench.place)
        return generated

    def test_a_changed_early_token_changes_what_is_generated_later(self) -> None:
        tokens = _tokens(80)
        changed = tokens.copy()
        changed[1] = (changed[1] + 1) % SMALL.vocabulary
        assert self._generate(Bench(), tokens, 0) != self._generate(Bench(), changed, 0)

    @pytest.mark.parametrize("lost", ["full early page", "full last page", "window", "state", "tail"])
    def test_wrong_restored_state_changes_what_is_generated(self, lost: str) -> None:
        tokens, boundary = _tokens(80), 18
        start = boundary * SMALL.page_size
        expected = self._generate(self._restored(tokens, boundary), tokens, start)
        wrong = self._restored(tokens, boundary)
        match lost:
            case "full early page":
                wrong.memory.clear_slot(FULL, wrong.place.full[1])
            case "full last page":
                wrong.memory.clear_slot(FULL, wrong.place.full[boundary - 1])
            case "window":
                wrong.memory.clear_slot(SWA, wrong.place.swa[boundary - 1])
            case "state":
                for state in wrong.memory.states:
                    state[0] = 0
            case "tail":
                for tail in wrong.memory.tails:
                    tail[0] = 0
        assert self._generate(wrong, tokens, start) != expected

    def test_a_checkpoint_from_one_page_earlier_changes_what_is_generated(self) -> None:
        tokens, boundary = _tokens(80), 18
        start = boundary * SMALL.page_size
        expected = self._generate(self._restored(tokens, boundary), tokens, start)
        wrong, stale = self._restored(tokens, boundary), Bench()
        stale.run(tokens[: start - SMALL.page_size], [])
        for theirs, ours in zip(stale.memory.states, wrong.memory.states, strict=True):
            ours[0] = theirs[0]
        assert self._generate(wrong, tokens, start) != expected

    def test_a_page_out_of_the_window_or_not_given_is_refused_not_guessed(self) -> None:
        tokens = _tokens(40)
        bench = Bench()
        bench.run(tokens[:32], [])
        bench.place.swa[7] = -1
        with pytest.raises(ValueError, match="swa: no slot to read"):
            bench.model.forward(tokens[32:], 32, bench.place)
        with pytest.raises(ValueError, match="positions"):
            bench.model.forward(tokens[:0], 0, bench.place)


class TestBounds:
    def test_no_partial_sum_of_the_demos_model_can_leave_the_exact_integers(self) -> None:
        assert all(largest < EXACT_LIMIT for largest in largest_sums(Shape()).values())

    def test_a_shape_whose_sums_could_be_inexact_is_refused(self) -> None:
        with pytest.raises(ValueError, match="weighted_values"):
            require_exact(Shape(max_tokens=1 << 15))

    @pytest.mark.parametrize("rows", [1, 3, 64])
    def test_products_of_the_largest_values_are_exact_in_every_shape(self, rows: int) -> None:
        for inner, weight in ((Shape().hidden, WEIGHT_MAX), (Shape().max_tokens, 7)):
            left = torch.full((rows, inner), float(ACTIVATION_MAX))
            right = torch.full((inner, 5), float(weight))
            assert (left @ right == ACTIVATION_MAX * weight * inner).all()
        state = torch.full((rows, 16), float(STATE_MAX))
        assert ((state * ACTIVATION_MAX).sum(-1) == 16 * STATE_MAX * ACTIVATION_MAX).all()

    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 300))
    def test_random_products_equal_int64(self, seed: int, rows: int, inner: int) -> None:
        draw = np.random.default_rng(seed)
        left = draw.integers(-ACTIVATION_MAX, ACTIVATION_MAX + 1, (rows, inner))
        right = draw.integers(-ACTIVATION_MAX, ACTIVATION_MAX + 1, (inner, 33))
        product = torch.from_numpy(left.astype(np.float32)) @ torch.from_numpy(right.astype(np.float32))
        assert (product.numpy() == left @ right).all()

    @settings(deadline=None)
    @given(
        st.lists(st.integers(1 - EXACT_LIMIT, EXACT_LIMIT - 1), min_size=1, max_size=40), st.integers(0, 12)
    )
    def test_requantise_is_integer_division_and_leaves_no_negative_zero(
        self, sums: list[int], shift: int
    ) -> None:
        given_sums = torch.tensor(sums, dtype=torch.float32)
        result = requantise(torch.cat((given_sums, torch.tensor([-0.0]))), shift)
        expected = [max(-127, min(127, value // 2**shift)) for value in sums]
        assert result.tolist() == [*expected, 0]
        assert not torch.signbit(result[result == 0]).any()

    def test_an_elements_norm_does_not_depend_on_its_place_in_a_batch(self) -> None:
        rows = torch.from_numpy(np.random.default_rng(1).integers(-255, 256, (67, 128)).astype(np.float32))
        together = norm(rows)
        assert all(torch.equal(norm(rows[i : i + 1])[0], together[i]) for i in range(len(rows)))
