"""The CPU engine under the laws of every copy engine."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from controller.transfers import cpu
from controller.transfers.copies import CopyEngine
from controller.transfers.cpu import CpuCopyEngine
from tests.transfers.engine_laws import CopyEngineLaws, table_of


class TestCpu(CopyEngineLaws):
    @pytest.fixture
    def make(self) -> Callable[[], CopyEngine]:
        return CpuCopyEngine


class Calls:
    """Which of the three ways moved how many pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.even: list[tuple[int, ...]] = []
        self.staged: list[int] = []
        self.each: list[int] = []
        even, staged, each = np.copyto, cpu._move_staged, cpu._move_each

        def count_even(target: np.ndarray, source: np.ndarray) -> None:
            self.even.append(target.shape[:-1])
            even(target, source)

        def count_staged(table: cpu.CopyTable, nbytes: int) -> None:
            self.staged.append(len(table))
            staged(table, nbytes)

        def count_each(table: cpu.CopyTable) -> None:
            if len(table):
                self.each.append(len(table))
            each(table)

        monkeypatch.setattr(np, "copyto", count_even)
        monkeypatch.setattr(cpu, "_move_staged", count_staged)
        monkeypatch.setattr(cpu, "_move_each", count_each)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


SOURCE = np.random.default_rng(3).integers(0, 256, 400_000, dtype=np.uint8)


def moved(pieces: list[tuple[int, int, int]]) -> None:
    target = np.zeros_like(SOURCE)
    CpuCopyEngine().copy(table_of(SOURCE, target, pieces))
    for source_at, target_at, nbytes in pieces:
        assert np.array_equal(target[target_at : target_at + nbytes], SOURCE[source_at : source_at + nbytes])


def test_neighbours_on_both_sides_are_one_move(calls: Calls) -> None:
    moved([(1000 * i, 5 + 1000 * i, 1000) for i in range(50)])
    assert (calls.even, calls.staged, calls.each) == ([], [], [1])


def test_neighbouring_slots_of_two_planes_are_two_strided_copies(calls: Calls) -> None:
    first = [(100 * i, 900 * i, 100) for i in range(20)]
    second = [(50_000 + 60 * i, 100 + 900 * i, 60) for i in range(20)]
    moved(first + second)
    assert (calls.even, calls.staged, calls.each) == ([(20,), (20,)], [], [])


def test_runs_at_even_distances_are_one_call(calls: Calls) -> None:
    """Neighbouring slots of many planes; the last plane is of another size, the fourth elsewhere."""
    at = [0, 9000, 18_000, 100_000, 36_000, 45_000, 54_000]
    pieces = [(at[k] + 500 * i, 1000 * i + 100 * k, 90) for k in range(7) for i in range(10)]
    moved([*pieces, *((200_000 + 300 * i, 1000 * i + 700, 80) for i in range(10))])
    assert sorted(calls.even) == [(3, 10), (3, 10), (10,), (10,)]
    assert (calls.staged, calls.each) == ([], [])


def test_a_run_of_even_distances_ends_where_sizes_change(calls: Calls) -> None:
    sizes = [90, *[60] * 12, 70, *[80] * 3, *[50] * 11]
    target = np.zeros_like(SOURCE)
    pieces = [(200 * i, 300 * i, nbytes) for i, nbytes in enumerate(sizes)]
    CpuCopyEngine().copy(table_of(SOURCE, target, pieces))
    expected = np.zeros_like(SOURCE)
    for source_at, target_at, nbytes in pieces:
        expected[target_at : target_at + nbytes] = SOURCE[source_at : source_at + nbytes]
    assert np.array_equal(target, expected)
    assert calls.even == [(12,), (11,)]


def test_scattered_small_pieces_are_staged_by_size(calls: Calls) -> None:
    order = np.random.default_rng(5).permutation(60).tolist()
    moved([(500 * i, 400 * k, 100 if k % 2 else 300) for k, i in enumerate(order)])
    assert calls.even == []
    assert calls.staged == [30, 30]


def test_large_pieces_are_moved_one_by_one(calls: Calls) -> None:
    moved([(0, 100_000, 40_000), (50_000, 200_000, 40_000), (100_000, 5, 40_000)])
    assert (calls.even, calls.staged, calls.each) == ([], [], [3])


@pytest.mark.parametrize("nbytes", [3, 60, 300, 3000])
def test_staging_takes_more_than_one_round(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Both kinds of rounds: many elements, and the few that are left."""
    monkeypatch.setattr(cpu, "_STAGED_BYTES", 6100)
    order = np.random.default_rng(6).permutation(120_000 // nbytes).tolist()
    moved([(nbytes * i, (nbytes + 7) * k, nbytes) for k, i in enumerate(order)])


@pytest.fixture
def long_slices() -> Iterator[None]:
    """No thread is made to give up the GIL: another runs only where it is released on purpose."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before_s)


PIECE_BYTES = 64_000
EVEN = [(PIECE_BYTES * i, PIECE_BYTES * i, PIECE_BYTES - 1) for i in range(300)]
MOVES: dict[str, Callable[[cpu.CopyTable], object]] = {
    "each": cpu._move_each,
    "even": cpu._move_runs,
    "staged": lambda table: cpu._move_staged(table, PIECE_BYTES - 1),
}


@pytest.mark.usefixtures("long_slices")
@pytest.mark.parametrize("way", MOVES)
def test_the_gil_is_free_while_bytes_move(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_STAGED_BYTES", PIECE_BYTES * 100)
    source = np.zeros(PIECE_BYTES * 300, dtype=np.uint8)
    target = np.zeros_like(source)
    table = table_of(source, target, EVEN)
    steps, stop = 0, threading.Event()

    def step() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1
            time.sleep(0)

    thread = threading.Thread(target=step)
    thread.start()
    deadline_s = time.monotonic() + 20
    seen = False
    while not seen and time.monotonic() < deadline_s:
        before = steps
        MOVES[way](table)
        seen = steps > before
    stop.set()
    thread.join(20)
    assert seen
    assert not target.any()
