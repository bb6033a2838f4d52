"""Tables made ready for a GPU name the same bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.transfers.copies import CopyTable
from controller.transfers.cuda.pieces import coalesced, cut_at, no_longer_than, portions

BASE = 1 << 20
pieces = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 60)), min_size=0, max_size=12
)


def table_of(rows: list[tuple[int, int, int]]) -> CopyTable:
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3)
    base = np.uint64(BASE)
    return CopyTable(columns[:, 0] + base, columns[:, 1] + np.uint64(7 * BASE), columns[:, 2].copy())


def moves(table: CopyTable) -> list[tuple[int, int]]:
    """Each byte's way, in order."""
    return [
        (source + i, target + i)
        for source, target, nbytes in zip(
            table.source.tolist(), table.target.tolist(), table.nbytes.tolist(), strict=True
        )
        for i in range(nbytes)
    ]


@given(pieces)
def test_coalesced_pieces_name_the_same_bytes_and_none_could_be_joined(
    rows: list[tuple[int, int, int]],
) -> None:
    joined = coalesced(table_of(rows))
    assert moves(joined) == moves(table_of(rows))
    assert joined.nbytes.all()
    ends = joined.source + joined.nbytes, joined.target + joined.nbytes
    assert not ((ends[0][:-1] == joined.source[1:]) & (ends[1][:-1] == joined.target[1:])).any()


@given(pieces, st.lists(st.integers(0, 400), max_size=6), st.lists(st.integers(0, 400), max_size=6))
def test_no_piece_spans_a_seam_on_either_side(
    rows: list[tuple[int, int, int]], near: list[int], far: list[int]
) -> None:
    seams = np.array(sorted({BASE + one for one in near} | {7 * BASE + one for one in far}), dtype=np.uint64)
    cut = cut_at(table_of(rows), seams)
    assert moves(cut) == moves(table_of(rows))
    for start, nbytes in zip((*cut.source, *cut.target), (*cut.nbytes, *cut.nbytes), strict=True):
        assert not ((seams > start) & (seams < start + nbytes)).any()


def test_a_long_piece_is_cut_at_every_seam_that_it_spans() -> None:
    cut = cut_at(table_of([(0, 0, 300)]), np.array([BASE + 100, BASE + 200, 7 * BASE + 150], np.uint64))
    assert cut.nbytes.tolist() == [100, 50, 50, 100]


@given(pieces, st.integers(1, 70))
def test_pieces_are_no_longer_than_asked(rows: list[tuple[int, int, int]], most: int) -> None:
    cut = no_longer_than(table_of(rows), most)
    assert moves(cut) == moves(table_of(rows))
    assert not (cut.nbytes > most).any()


@given(pieces, st.integers(1, 5))
def test_portions_are_the_table_in_order(rows: list[tuple[int, int, int]], most: int) -> None:
    parts = list(portions(table_of(rows), most))
    assert all(0 < len(part) <= most for part in parts)
    assert [way for part in parts for way in moves(part)] == moves(table_of(rows))
