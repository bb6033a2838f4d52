"""Copy tables: validation and cutting into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.memory.frames import PlaneTable
from controller.transfers.copies import CopyTable


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def byte_moves(table: CopyTable) -> list[tuple[int, int]]:
    """Every byte's way, in order."""
    rows = zip(table.source.tolist(), table.target.tolist(), table.nbytes.tolist(), strict=True)
    return [(source + i, target + i) for source, target, nbytes in rows for i in range(nbytes)]


@given(sizes=st.lists(st.integers(0, 40), max_size=30), chunk_bytes=st.integers(1, 50))
def test_chunks_are_the_same_copy_in_order_and_bounded(sizes: list[int], chunk_bytes: int) -> None:
    nbytes = column(*sizes)
    starts = np.cumsum(nbytes) - nbytes
    table = CopyTable(starts * np.uint64(2), starts + np.uint64(10_000), nbytes)
    chunks = list(table.chunks(chunk_bytes))
    assert all(len(chunk) and chunk.total_bytes <= chunk_bytes for chunk in chunks)
    assert [move for chunk in chunks for move in byte_moves(chunk)] == byte_moves(table)
    assert len(chunks) <= 2 * (table.total_bytes // chunk_bytes) + 1


def test_an_empty_table_has_no_chunks() -> None:
    assert list(CopyTable(column(), column(), column()).chunks(10)) == []


def test_columns_must_be_flat_uint64_of_one_length() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        CopyTable(column(1), column(1, 2), column(1))
    with pytest.raises(ValueError, match="uint64"):
        CopyTable(column(1), column(1).astype(np.int64), column(1))
    with pytest.raises(ValueError, match="flat"):
        CopyTable(column(1).reshape(1, 1), column(1), column(1))


def test_load_and_store_are_each_others_reverse() -> None:
    planes = PlaneTable(device=column(1, 2), host=column(10, 20), nbytes=column(5, 6))
    load, store = CopyTable.load(planes), CopyTable.store(planes)
    assert byte_moves(load) == [(target, source) for source, target in byte_moves(store)]
    assert load.source.tolist() == [10, 20]


def test_joined_tables_follow_each_other() -> None:
    one, two = CopyTable(column(1), column(2), column(3)), CopyTable(column(4), column(5), column(6))
    assert byte_moves(CopyTable.joined([one, two])) == byte_moves(one) + byte_moves(two)
    assert len(CopyTable.joined([])) == 0
