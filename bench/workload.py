"""Prompts for the benchmarks of the index: a growing conversation, a bushy and a deep tree.

Parameters and seeds are those of the generators that SGLang's radix caches were measured with, so that
figures can be set side by side. Makes token arrays; knows no index.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hicache.core.words import TokenArray

VOCABULARY = 150_000


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation."""

    number: int
    prompt: TokenArray
    """History and what the user says now."""
    full: TokenArray
    """The same and the answer: what is cached in the end."""


def conversation(turns: int = 200, n_in: int = 100, n_out: int = 100, seed: int = 0) -> Iterator[Turn]:
    """One conversation that grows by n_in + n_out tokens a turn."""
    rng = random.Random(seed)
    history: list[int] = []
    for number in range(1, turns + 1):
        prompt = history + [rng.randrange(1, VOCABULARY) for _ in range(n_in)]
        full = prompt + [rng.randrange(1, VOCABULARY) for _ in range(n_out)]
        yield Turn(number, np.array(prompt, dtype=np.int32), np.array(full, dtype=np.int32))
        history = full


def bushy_tree(
    prefixes: int = 1000, leaves: int = 99, prefix_len: int = 128, leaf_len: int = 64, seed: int = 1
) -> Iterator[list[int]]:
    """Many short prompts: groups share a head, each prompt has a tail of its own; in shuffled order."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1, VOCABULARY) for _ in range(prefix_len)] for _ in range(prefixes)]
    order = [(group, leaf) for group in range(prefixes) for leaf in range(leaves)]
    rng.shuffle(order)
    for group, leaf in order:
        tail = [VOCABULARY + leaf] + [rng.randrange(1, VOCABULARY) for _ in range(leaf_len - 1)]
        yield heads[group] + tail


def deep_tree(convs: int = 1000, turns: int = 100, step: int = 64, seed: int = 2) -> Iterator[list[int]]:
    """Many conversations that grow in turn, one step each."""
    rng = random.Random(seed)
    history: list[list[int]] = [[] for _ in range(convs)]
    for _ in range(turns):
        for conv in range(convs):
            history[conv] = history[conv] + [rng.randrange(1, VOCABULARY) for _ in range(step)]
            yield history[conv]
