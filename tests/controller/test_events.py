"""The event log: read from any number, what is there is complete and in order, what is not is announced."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.events import EventLog, Kind, Reason
from hicache.core.identity import Namespace
from hicache.core.journal import Move
from hicache.core.words import Tier

NAMESPACE = Namespace("m", "r", b"layout", 1)


def move(n_pages: int, *, ready: bool = True, elsewhere: list[bool] | None = None) -> Move:
    hashes = np.zeros((n_pages, 32), dtype=np.uint8)
    there = np.array(elsewhere or [False] * n_pages)
    return Move(
        NAMESPACE, "full", Tier.HOST, ready, np.arange(n_pages, dtype=np.int32), hashes, hashes, there
    )


def numbers(log: EventLog, number: int, most_pages: int) -> tuple[range, list[tuple[int, int]], int]:
    """What is missing, the (number, page) pairs read, and what to ask for next."""
    reading = log.read(number, most_pages)
    pairs = [
        (record.first + i, int(record.move.pages[i]))
        for record, start, stop in reading.parts
        for i in range(start, stop)
    ]
    return reading.missing, pairs, reading.following


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), max_size=200),
    capacity=st.integers(1, 60),
    start=st.integers(1, 300),
    most=st.integers(1, 40),
)
def test_reading_from_any_number_gives_all_that_follows_or_says_what_is_missing(
    sizes: list[int], capacity: int, start: int, most: int
) -> None:
    """OBS-05: a sequence gap is detectable, and there is no other kind of loss."""
    log = EventLog(capacity)
    everything = []
    for size in sizes:
        log.moved(move(size))
        everything += range(size)
    kept = len(everything) + 1 - log.oldest
    assert kept >= min(len(everything), capacity) - (max(sizes, default=1) - 1)
    assert kept <= max(capacity, sizes[-1] if sizes else 0)
    number, read = min(start, log.following), []
    first = number
    while number < log.following:
        missing, pairs, following = numbers(log, number, most)
        assert len(pairs) <= most
        assert following > number
        if missing:
            assert (missing.start, missing.stop) == (number, log.oldest)
            first = log.oldest
        read += pairs
        number = following
    assert read == [(n, everything[n - 1]) for n in range(max(first, log.oldest), log.following)]


def test_a_reason_holds_for_its_block_and_evictions_have_their_own() -> None:
    log = EventLog(100)
    with log.because(Reason.BACKUP, "chat"):
        log.moved(move(1))
        with log.because(Reason.CLEARED):
            log.moved(move(1, ready=False))
        log.moved(move(1, ready=False, elsewhere=[True]))
    log.moved(move(2, ready=False, elsewhere=[True, False]))
    records = [record for record, _, _ in log.read(1, 100).parts]
    assert [record.kind for record in records] == [Kind.STORED, Kind.CLEARED, Kind.REMOVED, Kind.REMOVED]
    assert [record.session_id for record in records] == ["chat", "", "chat", ""]
    assert [records[3].reason_of(i) for i in (0, 1)] == [Reason.DEMOTED, Reason.DROPPED]


async def test_a_reader_waits_for_what_is_to_come_and_for_the_end() -> None:
    log = EventLog(100)
    waiting = [asyncio.ensure_future(log.grown(n)) for n in (1, 2, 3)]
    await asyncio.sleep(0)
    log.moved(move(2))
    done, pending = await asyncio.wait(waiting[:2], timeout=5)
    assert [one.result() for one in done] == [True, True]
    assert not pending
    assert not waiting[2].done()
    log.close()
    assert not await asyncio.wait_for(waiting[2], 5)


@pytest.mark.parametrize("number", [1, 5])
def test_an_empty_log_has_nothing_to_read(number: int) -> None:
    assert numbers(EventLog(10), number, 5)[1] == []
