"""The contract of every copy engine, as a test class: inherit it and give the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.transfers.copies import CopyEngine, CopyTable

MEMORY_BYTES = 600_000


@dataclass(frozen=True)
class Run:
    """`count` pieces of one size at even distances on both sides; distances are gaps, so that pieces
    of one run do not overlap."""

    nbytes: int
    count: int
    source_gap: int
    target_gap: int
    backwards: bool


sizes = st.one_of(st.integers(0, 70), st.integers(100, 9000), st.sampled_from([4096, 8192, 40_000]))
runs = st.lists(
    st.builds(
        Run,
        nbytes=sizes,
        count=st.one_of(st.integers(1, 4), st.integers(5, 40)),
        source_gap=st.sampled_from([0, 0, 1, 13, 64]),
        target_gap=st.sampled_from([0, 0, 1, 7, 128]),
        backwards=st.booleans(),
    ),
    max_size=8,
)


def offsets_of(chosen: list[Run]) -> list[tuple[int, int, int]]:
    """Source offset, target offset and size of each piece, side by side from the start."""
    pieces: list[tuple[int, int, int]] = []
    source_at = target_at = 3
    for run in chosen:
        places = []
        for _ in range(run.count):
            if max(source_at, target_at) + run.nbytes > MEMORY_BYTES - 3:
                break
            places.append((source_at, target_at, run.nbytes))
            source_at += run.nbytes + run.source_gap
            target_at += run.nbytes + run.target_gap
        pieces += reversed(places) if run.backwards else places
        source_at, target_at = source_at + 1, target_at + 2
    return pieces


class CopyEngineLaws:
    """Thorough for one engine; `make` is called once per test."""

    @pytest.fixture
    def make(self) -> Callable[[], CopyEngine]:
        raise AssertionError("a test class of an engine overrides this")

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(chosen=runs, order=st.randoms(use_true_random=False), shuffle=st.booleans())
    def test_moves_exactly_the_table(
        self, make: Callable[[], CopyEngine], chosen: list[Run], order: object, shuffle: bool
    ) -> None:
        pieces = offsets_of(chosen)
        if shuffle:
            order.shuffle(pieces)  # type: ignore[attr-defined]  # random.Random, as Hypothesis makes it
        source = np.random.default_rng(len(pieces)).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        target = np.random.default_rng(len(pieces) + 1).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        expected, untouched = target.copy(), source.copy()
        for source_at, target_at, nbytes in pieces:
            expected[target_at : target_at + nbytes] = source[source_at : source_at + nbytes]
        make().copy(table_of(source, target, pieces))
        assert np.array_equal(target, expected)
        assert np.array_equal(source, untouched)

    def test_one_source_may_go_to_many_targets(self, make: Callable[[], CopyEngine]) -> None:
        source = np.arange(100, dtype=np.uint8)
        target = np.zeros(1200, dtype=np.uint8)
        make().copy(table_of(source, target, [(5, 100 * i, 90) for i in range(12)]))
        assert (target.reshape(12, 100)[:, :90] == source[5:95]).all()
        assert not target.reshape(12, 100)[:, 90:].any()

    def test_an_empty_table_is_fine(self, make: Callable[[], CopyEngine]) -> None:
        make().copy(table_of(np.zeros(1, np.uint8), np.zeros(1, np.uint8), []))

    def test_a_piece_of_many_mebibytes(self, make: Callable[[], CopyEngine]) -> None:
        source = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8)
        target = np.zeros_like(source)
        make().copy(table_of(source, target, [(1, 2, (9 << 20) - 3)]))
        assert np.array_equal(target[2:-1], source[1:-2])
        assert not target[:2].any()
        assert not target[-1:].any()


def table_of(source: np.ndarray, target: np.ndarray, pieces: list[tuple[int, int, int]]) -> CopyTable:
    columns = np.array(pieces, dtype=np.uint64).reshape(-1, 3)
    return CopyTable(
        columns[:, 0] + np.uint64(source.ctypes.data),
        columns[:, 1] + np.uint64(target.ctypes.data),
        columns[:, 2].copy(),
    )
