"""The fault wrapper: each kind of fault does what it says, to the items it names, repeatably."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_backends.base import Outcome, StorageError
from storage_backends.faults import Fault, FaultKind, FaultyBackend, FaultySpec
from storage_backends.specs import MemorySpec
from storage_backends.testing import DEADLINE_S, OBJECT_BYTES, Bench, at_once, content_of
from tests.storage.conftest import Gate

OK, ABSENT, WRONG_SIZE, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.WRONG_SIZE, Outcome.FAILED


def bench_with(*faults: Fault, seed: int = 0, gate: str = "") -> Bench:
    return Bench(FaultyBackend(FaultySpec(inner=MemorySpec(), faults=faults, seed=seed, gate=gate)))


def on(operation: str, kind: FaultKind, key_part: str = "", times: int = 0, rate: float = 1.0) -> Fault:
    return Fault(kind=kind, on=frozenset({operation}), key_part=key_part, times=times, rate=rate)


def test_a_fault_strikes_the_keys_it_names_and_no_others() -> None:
    bench = bench_with(on("read", FaultKind.ABSENT, "p2"))
    bench.write("p1", "p2", "p3")
    assert bench.read("p1", "p2", "p3") == [content_of("p1"), ABSENT, content_of("p3")]
    assert bench.backend.contains(["p2"]) == [OK]


def test_a_fault_strikes_as_often_as_it_says() -> None:
    bench = bench_with(on("write", FaultKind.FULL, times=2))
    assert bench.write("a", "b", "c") == [Outcome.FULL, Outcome.FULL, OK]
    assert bench.backend.contains(["a", "b", "c"]) == [ABSENT, ABSENT, OK]


def test_a_failed_write_stores_nothing() -> None:
    bench = bench_with(on("write", FaultKind.FAIL))
    assert bench.write("a") == [FAILED]
    assert bench.backend.contains(["a"]) == [ABSENT]


def test_flipped_reads_and_writes_differ_in_one_bit_and_say_ok() -> None:
    bench = bench_with(on("read", FaultKind.FLIP, "r"), on("write", FaultKind.FLIP, "w"))
    assert bench.write("r", "w") == [OK, OK]
    assert bytes(bench.buffer[OBJECT_BYTES : 2 * OBJECT_BYTES]) == content_of("w")
    for key, got in zip(("r", "w"), bench.read("r", "w"), strict=True):
        assert isinstance(got, bytes)
        assert int.from_bytes(got).bit_count() - int.from_bytes(content_of(key)).bit_count() in (1, -1)
        assert sum(ours != theirs for ours, theirs in zip(got, content_of(key), strict=True)) == 1


def test_a_halved_write_fails_and_leaves_half() -> None:
    """L3-07: what a writer that dies in the middle leaves in a store that publishes too early."""
    bench = bench_with(on("write", FaultKind.HALVE, times=1))
    assert bench.write("a") == [FAILED]
    assert bench.read("a") == [WRONG_SIZE]
    assert bench.write("a") == [OK]
    assert bench.read("a") == bench.contents("a")


def test_a_halved_read_is_wrong_size() -> None:
    bench = bench_with(on("read", FaultKind.HALVE))
    bench.write("a")
    assert bench.read("a") == [WRONG_SIZE]


@pytest.mark.parametrize(
    ("kind", "error"), [(FaultKind.REFUSE, StorageError), (FaultKind.BREAK, RuntimeError)]
)
def test_a_batch_fault_raises(kind: FaultKind, error: type[Exception]) -> None:
    bench = bench_with(on("contains", kind, times=1))
    with pytest.raises(error, match="injected: contains"):
        bench.backend.contains(["a"])
    assert bench.backend.contains(["a"]) == [ABSENT]


def test_opening_can_be_refused() -> None:
    with pytest.raises(StorageError, match="injected: open"):
        bench_with(on("open", FaultKind.REFUSE))


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    def struck(seed: int) -> list[Outcome]:
        return bench_with(on("contains", FaultKind.FAIL, rate=0.5), seed=seed).backend.contains(["k"] * 64)

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert {*struck(1)} == {ABSENT, FAILED}


def test_frozen_operations_wait_for_the_gate(gate: Gate, tmp_path: Path) -> None:
    bench = bench_with(on("read", FaultKind.FREEZE), gate=str(gate.path))
    bench.write("a")
    gate.close()
    ended = threading.Event()

    def read() -> None:
        assert bench.read("a") == bench.contents("a")
        ended.set()

    def release() -> None:
        while not gate.n_held():
            assert not ended.wait(0.001)
        assert not ended.is_set()
        gate.open()
        assert ended.wait(DEADLINE_S)

    tasks: tuple[Callable[[], None], ...] = (read, release)
    at_once(*tasks)
    assert gate.n_held() == 0
