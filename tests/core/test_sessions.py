"""Sessions order eviction; they pin nothing and delete nothing (SESSION scenarios)."""

from __future__ import annotations

import pytest

from hicache.core import sessions as module
from hicache.core.coverage import Checkpoint, SlidingWindow, WholePath
from hicache.core.words import Tier

from .rig import Rig

DEVICE, HOST, STORAGE = Tier.DEVICE, Tier.HOST, Tier.STORAGE


def finish(rig: Rig, session: str, pages: str) -> bool:
    """One whole turn."""
    turn = rig.index.sessions.begin(session)
    return rig.index.sessions.finish(turn, rig.insert(pages).cursor, len(pages))


def references(rig: Rig, pages: str, name: str = "full") -> list[int]:
    cursor = rig.index.match(rig.namespace(), rig.tokens(pages)).cursor
    return rig.index.sessions.references(cursor, name, 0, cursor.boundary)


def test_a_turn_that_finishes_after_close_counts_for_nothing(full: Rig) -> None:
    """SESSION-01: also when the session was opened again meanwhile, and when it was queued at close."""
    sessions = full.index.sessions
    turn = sessions.begin("s")
    assert sessions.close("s")
    cursor = full.insert("abcd").cursor
    assert not sessions.finish(turn, cursor, 4)
    assert not sessions.finish(sessions.begin("s"), cursor, 4)
    assert references(full, "abcd") == [0, 0, 0, 0]
    assert not sessions.close("nobody")
    sessions.open("s")
    assert not sessions.finish(turn, cursor, 4)
    assert references(full, "abcd") == [0, 0, 0, 0]
    assert sessions.finish(sessions.begin("s"), cursor, 4)
    assert references(full, "abcd") == [1, 1, 1, 1]


def test_closed_ids_take_bounded_memory(full: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SESSION-01."""
    monkeypatch.setattr(module, "CLOSED_IDS_KEPT", 100)
    for number in range(10_000):
        full.index.sessions.close(str(number))
    assert len(full.index.sessions._closed) == 100


def test_references_are_the_number_of_sessions_that_count_on_a_page(full: Rig) -> None:
    """SESSION-02: five turns, another session on the same start, nodes divided in between."""
    for n in range(1, 6):
        finish(full, "s", "abcdefghij"[: 2 * n])
        full.insert("abcdefghij"[: 2 * n - 1] + "XY")
    finish(full, "t", "abcd")
    full.insert("abcdefgZ")
    assert references(full, "abcdefghij") == [2, 2, 2, 2, 1, 1, 1, 1, 1, 1]
    full.check()
    full.index.sessions.close("s")
    assert references(full, "abcdefghij") == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    full.index.sessions.close("t")
    assert references(full, "abcdefghij") == [0] * 10
    assert all(node.refs is None for node in full.index._occupancy.nodes())


def test_referenced_pages_can_be_evicted_all_the_same(rigs: list[Rig]) -> None:
    """SESSION-03: ten sessions fill L1; a new prompt gets room, and a session keeps a partial hit."""
    rig = Rig({"full": WholePath()}, n_slots=40)
    rigs.append(rig)
    for number in range(10):
        finish(rig, str(number), chr(100 + number) + "xyz")
    assert rig.pools["full", DEVICE].n_free == 0
    assert rig.evict("full", 8) == (8, 0)
    rig.insert("ABCDEFGH")
    assert sorted(rig.boundary(chr(100 + number) + "xyz") for number in range(10)) == [0, 0] + [4] * 8


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_unreferenced_goes_before_an_idle_session(rigs: list[Rig], tier: Tier) -> None:
    """SESSION-04: B and C, newer but of no session, go before A; in L1 and in L2."""
    rig = Rig({"full": WholePath()}, tiers=(tier,))
    rigs.append(rig)
    finish(rig, "s", "abcdefgh")
    rig.insert("ijklmnop")
    rig.insert("qrstuvwx")
    left = []
    for _ in range(3):
        assert rig.evict("full", 8) == (8, 0)
        left.append([rig.boundary(p) for p in ("abcdefgh", "ijklmnop", "qrstuvwx")])
    assert left == [[8, 0, 8], [8, 0, 0], [0, 0, 0]]


def test_storage_does_not_look_at_sessions(rigs: list[Rig]) -> None:
    """SESSION-04, the other half."""
    rig = Rig({"full": WholePath()}, tiers=(HOST, STORAGE))
    rigs.append(rig)
    finish(rig, "s", "ab")
    rig.insert("xy")
    for prompt in ("ab", "xy"):
        cursor = rig.index.match(rig.namespace(), rig.tokens(prompt)).cursor
        rig.index.mark_stored(cursor, "full", rig.tokens(prompt) * 0 + [0, 1])
    rig.evict("full", 1, STORAGE)
    assert rig.resident("ab", "full", STORAGE) == [0]
    assert rig.resident("xy", "full", STORAGE) == [0, 1]


def test_fewer_references_go_first(full: Rig) -> None:
    for session in ("a", "b", "c"):
        finish(full, session, "pqrs")
    finish(full, "a2", "wxyz")
    finish(full, "b2", "wxyz")
    full.index.sessions.close("a")
    full.index.sessions.close("b")
    assert full.evict("full", 4) == (4, 0)
    assert full.boundary("wxyz") == 4
    assert full.boundary("pqrs") == 0


def test_an_abandoned_turn_leaves_the_session_as_it_was(full: Rig) -> None:
    """SESSION-05: turns cancelled before or during their run; the references are the last finished turn's."""
    finish(full, "s", "ab")
    full.index.sessions.begin("s")
    full.index.sessions.begin("s")
    assert references(full, "ab") == [1, 1]
    assert finish(full, "s", "abcd")
    assert references(full, "abcd") == [1, 1, 1, 1]


def test_closing_frees_nothing_and_makes_the_pages_ordinary(full: Rig) -> None:
    """SESSION-06: A still matches after close, and is the first victim as the oldest."""
    finish(full, "s", "abcd")
    full.insert("wxyz")
    full.index.sessions.close("s")
    assert full.boundary("abcd") == 4
    full.evict("full", 4)
    assert full.boundary("abcd") == 0
    assert full.boundary("wxyz") == 4


def test_a_session_counts_on_what_each_component_needs(rigs: list[Rig]) -> None:
    """FULL path, SWA window, MAMBA frontier; the next turn moves the window and the frontier along."""
    rig = Rig({"full": WholePath(), "swa": SlidingWindow(2), "mamba": Checkpoint()})
    rigs.append(rig)
    finish(rig, "s", "abcd")
    finish(rig, "s", "abcdef")
    assert references(rig, "abcdef", "full") == [1] * 6
    assert references(rig, "abcdef", "swa") == [0, 0, 0, 0, 1, 1]
    assert references(rig, "abcdef", "mamba") == [0, 0, 0, 0, 0, 1]
    rig.insert("wxyz")
    rig.evict("swa", 8)
    assert rig.boundary("abcdef") == 6
    assert rig.boundary("wxyz") == 0


def test_a_session_may_change_its_history(full: Rig) -> None:
    """A retried turn: the abandoned branch loses its references."""
    finish(full, "s", "abcd")
    finish(full, "s", "abXY")
    assert references(full, "abcd") == [1, 1, 0, 0]
    assert references(full, "abXY") == [1, 1, 1, 1]


def test_what_was_evicted_and_came_again_is_not_counted_twice(full: Rig) -> None:
    finish(full, "s", "abcd")
    full.evict("full", 2)
    full.insert("abZZ")
    assert references(full, "abZZ") == [1, 1, 0, 0]
    finish(full, "s", "abcd")
    assert references(full, "abcd") == [1, 1, 1, 1]
    full.index.sessions.close("s")
    assert references(full, "abcd") == references(full, "abZZ") == [0, 0, 0, 0]
