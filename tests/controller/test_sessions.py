"""Sessions in host memory: turns from lookup to backup, closing, generations, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from controller import sessions
from controller.models import HOST, Model
from controller.requests import Backup, CloseSession, Lookup, Prompt, UnknownEngine
from hicache.core.words import TokenArray
from tests.controller.rig import Rig, TaggedEngine
from tests.tagged import prompt

TURNS = [prompt(1, 40)]
for _seed in range(2, 6):
    TURNS.append(np.concatenate([TURNS[-1], prompt(_seed, 20)]))
"""Five turns of one conversation: 10, 15, 20, 25 and 30 pages."""
IDS = (f"request {n}" for n in range(1 << 30))


def turn_of(engine: TaggedEngine, tokens: TokenArray, session: str, generation: int, salt: str) -> Prompt:
    about = engine.prompt(tokens, salt)
    return replace(about, request_id=next(IDS), session_id=session, session_generation=generation)


def begin(
    engine: TaggedEngine, tokens: TokenArray, session: str = "s", generation: int = 0, salt: str = ""
) -> Prompt:
    """A turn's lookup."""
    about = turn_of(engine, tokens, session, generation, salt)
    found = engine.controller.lookup(Lookup(about))
    if found.lease_id:
        engine.controller.release(engine.engine_id, found.lease_id)
    return about


async def finish(engine: TaggedEngine, about: Prompt) -> None:
    """The turn's backup."""
    placements = engine.compute(about.tokens, engine.all_pages(about.tokens), about.salt)
    try:
        await engine.controller.backup(Backup(about, placements))
    finally:
        engine.forget(placements)


def model_of(engine: TaggedEngine) -> Model:
    return engine.controller._host.models[0]


def references(engine: TaggedEngine, tokens: TokenArray, salt: str = "") -> list[int]:
    """Sessions that count on each page of FULL."""
    index = model_of(engine).index
    cursor = index.match(engine.namespace(salt), tokens).cursor
    return index.sessions.references(cursor, "full", 0, cursor.boundary)


def close(engine: TaggedEngine, session: str = "s", generation: int = 0, salt: str = "") -> bool:
    return engine.controller.close_session(CloseSession(engine.engine_id, session, generation, salt))


async def test_a_growing_session_counts_once_and_closing_leaves_nothing(engine: TaggedEngine) -> None:
    """SESSION-02: 5 turns; another session shares the start and splits nodes; close one, then the other."""
    for tokens in TURNS:
        await finish(engine, begin(engine, tokens))
    assert references(engine, TURNS[-1]) == [1] * 30
    other = np.concatenate([TURNS[0][:16], prompt(99, 24)])
    await finish(engine, begin(engine, other, "t"))
    assert references(engine, TURNS[-1]) == [2] * 4 + [1] * 26
    assert engine.controller.status().open_sessions == 2
    assert close(engine)
    assert references(engine, TURNS[-1]) == [1] * 4 + [0] * 26
    assert close(engine, "t")
    assert references(engine, TURNS[-1]) == [0] * 30
    assert engine.controller.status().open_sessions == 0
    assert engine.lookup(TURNS[-1]).boundary == 30  # SESSION-06: closed, it still matches


async def test_a_turn_that_finishes_after_close_brings_nothing_back(engine: TaggedEngine) -> None:
    """SESSION-01: also of an earlier generation; closing what is not open is harmless."""
    turn = begin(engine, TURNS[0])
    assert close(engine)
    await finish(engine, turn)
    assert references(engine, TURNS[0]) == [0] * 10
    assert not close(engine, "never heard of")
    await finish(engine, begin(engine, TURNS[0]))  # the same generation stays closed
    assert references(engine, TURNS[0]) == [0] * 10
    late = begin(engine, TURNS[0], generation=1)
    await finish(engine, begin(engine, prompt(50, 40), generation=2))
    await finish(engine, late)
    assert references(engine, TURNS[0]) == [0] * 10
    assert references(engine, prompt(50, 40)) == [1] * 10
    await finish(engine, begin(engine, TURNS[0], generation=1))  # begun late, too
    assert references(engine, TURNS[0]) == [0] * 10
    assert engine.controller.status().open_sessions == 1


async def test_an_aborted_turn_leaves_the_last_finished_one(engine: TaggedEngine) -> None:
    """SESSION-05: cancel before start, disconnect during a turn; the next turns count as ever."""
    await finish(engine, begin(engine, TURNS[0]))
    begin(engine, TURNS[1])  # aborted
    assert references(engine, TURNS[0]) == [1] * 10
    await finish(engine, begin(engine, TURNS[2]))
    begin(engine, TURNS[3])
    await engine.controller.detach(engine.engine_id)
    engine.controller.attach(engine.spec)
    await finish(engine, begin(engine, TURNS[3]))
    assert references(engine, TURNS[3]) == [1] * 25


async def test_a_turn_whose_pages_are_all_there_is_finished_by_an_empty_backup(engine: TaggedEngine) -> None:
    await engine.backup(TURNS[0], engine.all_pages(TURNS[0]))
    about = begin(engine, TURNS[0])
    assert await engine.controller.backup(Backup(about, {})) == {}
    assert references(engine, TURNS[0]) == [1] * 10


async def test_an_idle_session_is_evicted_after_what_nobody_counts_on(engine: TaggedEngine) -> None:
    """SESSION-04, SESSION-03: unreferenced first, older first, then the session's; none of it is pinned."""
    a, b, c = (prompt(seed, 40) for seed in (11, 12, 13))
    await finish(engine, begin(engine, a))
    for tokens in (b, c):
        await engine.backup(tokens, engine.all_pages(tokens))
    index = model_of(engine).index

    for gone, expected in ((10, [10, 0, 10]), (10, [10, 0, 0]), (10, [0, 0, 0])):
        model = model_of(engine)
        model.give_back(index.evict("full", HOST, gone).freed)
        cursors = [index.match(engine.namespace(), tokens) for tokens in (a, b, c)]
        assert [match.boundaries[HOST] for match in cursors] == expected


async def test_tenants_sessions_of_one_id_do_not_meet(engine: TaggedEngine) -> None:
    """KEY-01's kind, for sessions: closing one tenant's leaves the other's."""
    for salt in ("", "t", "1:t"):
        await finish(engine, begin(engine, TURNS[0], salt=salt))
    assert close(engine, salt="t")
    assert [references(engine, TURNS[0], salt)[0] for salt in ("", "t", "1:t")] == [1, 0, 1]


async def test_open_sessions_are_bounded(engine: TaggedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SESSION-01: bounded memory, for clients that never close: the session longest without a turn goes."""
    monkeypatch.setattr(sessions, "MOST_OPEN", 3)
    monkeypatch.setattr(sessions, "MOST_TURNS", 2)
    await finish(engine, begin(engine, TURNS[0], "first"))
    for n in range(3):
        begin(engine, TURNS[0], f"s{n}")
    assert engine.controller.status().open_sessions == 3
    assert references(engine, TURNS[0]) == [0] * 10
    assert len(engine.controller._sessions._turns) == 2


async def test_only_an_attached_engine_closes_sessions(rig: Rig, engine: TaggedEngine) -> None:
    with pytest.raises(UnknownEngine):
        engine.controller.close_session(CloseSession("nobody", "s"))


async def test_all_ranks_make_one_turn(rig: Rig) -> None:
    """RANKS' kind: a group's turn counts once, whoever of them asks first."""
    controller = await rig.controller()
    ranks = list(_ranks(controller))
    tokens = TURNS[0]
    about = [turn_of(rank, tokens, "s", 0, "") for rank in ranks]
    about = [replace(one, request_id="r") for one in about]
    for one in about:
        controller.lookup(Lookup(one))
    parts = [rank.compute(tokens, rank.all_pages(tokens)) for rank in ranks]
    await asyncio.gather(
        *(controller.backup(Backup(one, part)) for one, part in zip(about, parts, strict=True))
    )
    assert references(ranks[0], tokens) == [1] * 10


def _ranks(controller: object) -> Iterator[TaggedEngine]:
    for rank in range(2):
        yield TaggedEngine(controller, f"e{rank}", group_id="g", rank=rank, ranks=2)
