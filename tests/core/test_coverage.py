"""Laws of coverage: what the rules promise, and the joint boundary against trying every boundary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.coverage import (
    Checkpoint,
    Chunked,
    Coverage,
    SlidingWindow,
    WholePath,
    joint_boundary,
    leading,
)

coverages = st.one_of(
    st.just(WholePath()),
    st.just(Checkpoint()),
    st.builds(SlidingWindow, st.integers(1, 9)),
    st.builds(Chunked, st.integers(1, 9)),
)
bitmaps = st.lists(st.booleans() | st.just(True), max_size=30)


class EveryOther(Coverage):
    """A rule somebody else might write: only `start`."""

    def start(self, boundary: int) -> int:
        return (boundary - 1) // 2


@given(coverage=coverages | st.just(EveryOther()), boundary=st.integers(1, 200))
def test_a_rule_looks_back_and_never_decreases(coverage: Coverage, boundary: int) -> None:
    assert 0 <= coverage.start(boundary) < boundary
    assert coverage.start(boundary) <= coverage.start(boundary + 1)
    assert not coverage.whole_path or coverage.start(boundary) == 0


@given(coverage=coverages | st.just(EveryOther()), n=st.integers(0, 60))
def test_many_boundaries_at_once_are_the_same_rule(coverage: Coverage, n: int) -> None:
    boundaries = np.arange(1, n + 1)
    assert coverage.starts(boundaries).tolist() == [coverage.start(b) for b in range(1, n + 1)]


@given(parts=st.lists(st.tuples(coverages, bitmaps), min_size=1, max_size=4), limit=st.integers(0, 35))
def test_the_joint_boundary_is_the_deepest_one_that_every_rule_allows(
    parts: list[tuple[Coverage, list[bool]]], limit: int
) -> None:
    available = [np.array(bits, dtype=np.bool_) for _, bits in parts]
    expected = max(
        (
            boundary
            for boundary in range(1, limit + 1)
            if all(
                page < len(bits) and bits[page]
                for coverage, bits in parts
                for page in range(coverage.start(boundary), boundary)
            )
        ),
        default=0,
    )
    assert joint_boundary([coverage for coverage, _ in parts], available, limit) == expected


@given(bits=bitmaps)
def test_leading_counts_up_to_the_first_gap(bits: list[bool]) -> None:
    assert leading(np.array(bits, dtype=np.bool_)) == (bits.index(False) if False in bits else len(bits))


@pytest.mark.parametrize(
    ("coverage", "boundary", "first"),
    [
        (WholePath(), 7, 0),
        (SlidingWindow(4), 7, 3),
        (SlidingWindow(4), 3, 0),
        (Checkpoint(), 7, 6),
        (Chunked(4), 4, 0),
        (Chunked(4), 5, 4),
        (Chunked(4), 8, 4),
    ],
)
def test_the_rules_by_example(coverage: Coverage, boundary: int, first: int) -> None:
    assert coverage.start(boundary) == first
