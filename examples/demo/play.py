"""Plays the script to one engine and records what came of every request.

Decides the order of requests and how many are under way; takes the times. Judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.demo.engine import Ask, Served
from examples.demo.process import EngineProcess
from examples.demo.workload import Conversation, Script
from hicache.core.words import Tier, TokenArray

_UNDER_WAY = 2
"""Requests at the engine at a time: one is served while the next one waits, and is prefetched."""


@dataclass(frozen=True)
class Record:
    """One request of one client, and its answer."""

    client: int
    round: int
    prompt: TokenArray
    served: Served


@dataclass(frozen=True)
class Round:
    """One turn of every client."""

    number: int
    wall_s: float
    records: tuple[Record, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(record.served.prompt_tokens for record in self.records)

    @property
    def prefilled_tokens(self) -> int:
        return sum(record.served.prefilled_tokens for record in self.records)

    @property
    def input_tokens_per_s(self) -> float:
        """Effective: sum of prompt lengths over wall time."""
        return self.prompt_tokens / self.wall_s

    @property
    def first_token_s(self) -> float:
        """Median time from the start of a request's service to its first token."""
        return float(np.median([record.served.first_token_s for record in self.records]))

    def hit_rate(self, page_size: int, *tiers: Tier) -> float:
        """Share of the prompts' tokens that came from these tiers."""
        pages = sum(record.served.hit_pages.get(tier, 0) for record in self.records for tier in tiers)
        return pages * page_size / self.prompt_tokens


class Session:
    """The script, played to one engine round by round."""

    def __init__(
        self,
        script: Script,
        engine: EngineProcess,
        served: Callable[[Served], None],
        pause: Callable[[], object],
    ) -> None:
        """`served` is called with every answer as it comes, `pause` after every round, off the clock."""
        self._script = script
        self._engine = engine
        self._served = served
        self._pause = pause
        self._conversations = [Conversation(script, client) for client in range(script.sizes.clients)]

    def play(self, rounds: Sequence[int]) -> list[Round]:
        return [self._play_round(number) for number in rounds]

    def _play_round(self, number: int) -> Round:
        started = time.perf_counter()
        order = self._script.order(number)
        prompts = {client: self._conversations[client].prompt(number) for client in order}
        sent, records = 0, list[Record]()
        for client in order:
            while sent < len(order) and sent < len(records) + _UNDER_WAY:
                self._send(order[sent], number, prompts[order[sent]])
                sent += 1
            served = self._engine.served()
            self._served(served)
            self._conversations[client].answered(served.answer)
            records.append(Record(client, number, prompts[client], served))
        wall_s = time.perf_counter() - started
        self._pause()
        return Round(number, wall_s, tuple(records))

    def _send(self, client: int, number: int, prompt: NDArray[np.int32]) -> None:
        self._engine.ask(Ask(f"client {client} round {number}", prompt, self._script.sizes.answer_tokens))
