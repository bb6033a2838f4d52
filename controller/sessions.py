"""Sessions of engines' clients in host memory: which turn belongs to which, from its lookup to its backup.

What a session does to eviction is the index's business (`hicache.core.sessions`); it pins nothing. Ids are
the client's; tenants' ids never meet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from controller.models import Model
from controller.requests import Prompt
from hicache.core.sessions import SessionTurn
from hicache.core.structure import Cursor

MOST_OPEN = 65_536
"""Sessions of one model; beyond it the one whose last turn began first is closed."""
MOST_TURNS = 16_384
"""Turns that have begun and not finished; beyond it the oldest is forgotten."""


@dataclass(frozen=True)
class SessionName:
    """A session as its tenant's client calls it. A higher generation is another session of the same id."""

    salt: str
    session_id: str

    def key(self, generation: int) -> str:
        """Unambiguous as one text."""
        return f"{generation}:{len(self.salt)}:{self.salt}:{self.session_id}"


class SessionBook:
    """All sessions of one controller."""

    def __init__(self) -> None:
        self._open: dict[Model, OrderedDict[SessionName, int]] = {}
        """Open sessions' generations, the one without a turn for longest first."""
        self._turns: OrderedDict[tuple[str, str], SessionTurn] = OrderedDict()
        """By group and request."""

    @property
    def n_open(self) -> int:
        return sum(map(len, self._open.values()))

    def begin(self, model: Model, group_id: str, prompt: Prompt) -> None:
        """A turn begins: it will count for the session as it is now. The first of a higher generation
        closes the earlier one."""
        if not prompt.session_id:
            return
        self._turns[group_id, prompt.request_id] = self._turn(model, prompt)
        self._turns.move_to_end((group_id, prompt.request_id))
        if len(self._turns) > MOST_TURNS:
            self._turns.popitem(last=False)

    def finish(self, model: Model, group_id: str, prompt: Prompt, cursor: Cursor, boundary: int) -> bool:
        """The turn's prompt is in host memory up to a boundary: the session counts on that from now on, and
        no longer on what it counted on before. False when the session was closed since the turn began."""
        if not prompt.session_id:
            return False
        turn = self._turns.pop((group_id, prompt.request_id), None) or self._turn(model, prompt)
        return model.index.sessions.finish(turn, cursor, boundary)

    def close(self, model: Model, name: SessionName, generation: int) -> bool:
        """End a session: its pages are ordinary, turns that finish later count for nothing. False when it
        was not open."""
        opened = self._open.get(model)
        if opened is not None and opened.get(name) == generation:
            del opened[name]
        return model.index.sessions.close(name.key(generation))

    def _turn(self, model: Model, prompt: Prompt) -> SessionTurn:
        name, generation = SessionName(prompt.salt, prompt.session_id), prompt.session_generation
        opened = self._open.setdefault(model, OrderedDict())
        before = opened.get(name)
        if before is not None and generation > before:
            self.close(model, name, before)
        turn = model.index.sessions.begin(name.key(generation))
        if before is not None and generation < before:
            self.close(model, name, generation)  # a late turn of an earlier generation brings nothing back
        elif turn.generation:  # none: the session was closed
            opened[name] = generation
            opened.move_to_end(name)
            if len(opened) > MOST_OPEN:
                oldest, its_generation = next(iter(opened.items()))
                self.close(model, oldest, its_generation)
        return turn
