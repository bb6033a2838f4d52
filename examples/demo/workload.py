"""The workload: agents that read source files and ask about them, turn after turn.

Decides every prompt, from a seed and from what the model answered before. Knows no cache: the same
script is played to every configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.demo.text import Tokeniser, library_files
from hicache.core.words import TokenArray

_FILE_BYTES = 40_000
_SYSTEM = """You are an agent that reads the source code of a large program, part by part, and answers
questions about it. Keep everything that you have read in mind. Name functions, classes and constants
exactly as they are written. When you are not sure, say so. What follows is the project's style guide.
"""
_QUESTIONS = (
    "Which names does this part define?",
    "What can go wrong here, and who would notice?",
    "How does this part depend on what you read before?",
    "Which test would you write for it first?",
    "What would you rename, and why?",
    "Summarise this part in one sentence.",
    "Which of these lines runs most often?",
)


@dataclass(frozen=True)
class Sizes:
    """How much is asked: all counts, lengths in tokens."""

    clients: int
    rounds: int
    system_tokens: int = 1024
    chunk_tokens: int = 512
    answer_tokens: int = 12


class Script:
    """What each client adds to its conversation in each round, and in which order they come.

    All clients share a system prompt. Clients 2k and 2k + 1 read the same file: their first turns are
    equal, in the second they ask different questions about the same part, then they go their own ways.
    """

    def __init__(self, sizes: Sizes, vocabulary: int, seed: int) -> None:
        self.sizes = sizes
        files = library_files(1 + sizes.clients, at_least_bytes=_FILE_BYTES)
        self.tokeniser = Tokeniser((file.text for file in files), vocabulary)
        self._seed = seed
        self._guide = self.tokeniser.encode(_SYSTEM + files[0].text)[: sizes.system_tokens]
        self._files = files[1:]
        self._texts = [self.tokeniser.encode(file.text) for file in self._files]

    def system_prompt(self) -> TokenArray:
        return self._guide

    def turn(self, client: int, number: int) -> TokenArray:
        """What the client adds in round `number` (from 0): a part of a file and a question."""
        reader = client - client % 2 if number < 2 else client
        asker = client - client % 2 if number < 1 else client
        file = self._files[reader]
        part = self._part(reader, number)
        question = _QUESTIONS[(asker + 3 * number) % len(_QUESTIONS)]
        return np.concatenate(
            (
                self.tokeniser.encode(f"\n# {file.name}, part {number + 1}\n"),
                part,
                self.tokeniser.encode(f"\n# Question: {question}\n# Answer: "),
            )
        )

    def order(self, number: int) -> list[int]:
        """The clients in the order in which they come in round `number`."""
        shuffled = np.random.default_rng((self._seed, number)).permutation(self.sizes.clients)
        return [int(client) for client in shuffled]

    def _part(self, reader: int, number: int) -> TokenArray:
        text, length = self._texts[reader], self.sizes.chunk_tokens
        return np.take(text, np.arange(number * length, (number + 1) * length), mode="wrap")


class Conversation:
    """One client's side: all that was said so far."""

    def __init__(self, script: Script, client: int) -> None:
        self._script = script
        self._client = client
        self._said = script.system_prompt()

    def prompt(self, number: int) -> TokenArray:
        """Add the turn of round `number`; the whole conversation up to it."""
        self._said = np.concatenate((self._said, self._script.turn(self._client, number)))
        return self._said

    def answered(self, tokens: tuple[int, ...]) -> None:
        self._said = np.concatenate((self._said, np.array(tokens, dtype=np.int32)))
