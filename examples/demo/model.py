"""A small hybrid language model: recurrent, sliding-window and full-attention layers over paged memory.

It computes tokens' results and nothing else: reads and writes the slots it is given, chooses none.
Its arithmetic is exact (see `examples.demo.arithmetic`): states, KV and logits are bit for bit the same
however a prompt is cut into calls. Weights are seeded, not trained; its words mean nothing, but every
word depends on the whole context, which is what a cache can get wrong: what layers add is large against
the residual, so that one lost page among a hundred changes the words within a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from examples.demo.arithmetic import (
    ACTIVATION_MAX,
    ATTENTION_WEIGHT_MAX,
    DECAY_UNIT,
    EMBEDDING_MAX,
    RESIDUAL_MAX,
    ROTATION_UNIT,
    STATE_MAX,
    WEIGHT_MAX,
    Shape,
    norm,
    requantise,
    require_exact,
    rotate,
)
from examples.demo.memory import FULL, SWA, PagedMemory
from hicache.core.words import SlotArray, TokenArray

_QUERY_BLOCK = 64
"""Queries whose scores are formed at a time: bounds the score matrix, changes no result."""
_SCORE_SHIFT = 12
"""A score of 2**12 weighs 1: 0.7 standard deviations of a random query and key."""
_STATE_BASE_DECAY = (255, 252, 240, 192)
_STATE_READ_SHIFT = (13, 12, 11, 10)


@dataclass(frozen=True)
class Place:
    """Where a request's state lies: slots of its FULL and SWA pages by page number (-1 where the model
    will not look), and the MAMBA slot that holds the state before the next token."""

    full: SlotArray
    swa: SlotArray
    mamba: int


class _Attention:
    """Weights of one attention layer."""

    def __init__(self, shape: Shape, draw: _Draw) -> None:
        inner = shape.heads * shape.head_width
        self.query_key_value = draw(shape.width, inner + 2 * shape.kv_heads * shape.head_width)
        self.out = draw(inner, shape.width)


class _Recurrence:
    """Weights of one recurrent layer."""

    def __init__(self, shape: Shape, draw: _Draw) -> None:
        self.inputs = draw(shape.width, shape.channels)
        self.taps = draw(shape.taps, shape.channels)
        self.decay = draw(shape.width, shape.state_heads)
        self.out = draw(shape.state_heads * shape.value_width, shape.width)


class _FeedForward:
    """Weights of the two linear maps that follow every layer."""

    def __init__(self, shape: Shape, draw: _Draw) -> None:
        self.up = draw(shape.width, shape.hidden)
        self.down = draw(shape.hidden, shape.width)


class _Draw:
    """Seeded integer weights."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def __call__(self, rows: int, columns: int, largest: int = WEIGHT_MAX) -> torch.Tensor:
        drawn = self._random.integers(-largest, largest + 1, (rows, columns))
        return torch.from_numpy(drawn.astype(np.float32))


class HybridModel:
    """The model over `memory`. `forward` is all it does; `n_tokens` counts what really ran through it."""

    def __init__(self, shape: Shape, memory: PagedMemory, seed: int) -> None:
        require_exact(shape)
        draw = _Draw(seed)
        self.shape = shape
        self.n_tokens = 0
        self._memory = memory
        self._embedding = draw(shape.vocabulary, shape.width, EMBEDDING_MAX)
        self._recurrences = [_Recurrence(shape, draw) for _ in range(shape.repeats)]
        self._attentions = {
            kind: [_Attention(shape, draw) for _ in range(shape.repeats)] for kind in (SWA, FULL)
        }
        self._feed_forwards = [_FeedForward(shape, draw) for _ in range(3 * shape.repeats)]
        self._unembedding = draw(shape.width, shape.vocabulary)
        angles = np.arange(shape.max_tokens)[:, None] * (
            10000.0 ** (-np.arange(shape.head_width // 2) / (shape.head_width // 2))
        )
        self._cosine = torch.from_numpy(np.rint(ROTATION_UNIT * np.cos(angles)).astype(np.float32))[:, None]
        self._sine = torch.from_numpy(np.rint(ROTATION_UNIT * np.sin(angles)).astype(np.float32))[:, None]
        self._base_decay = torch.tensor(_STATE_BASE_DECAY, dtype=torch.float32)[: shape.state_heads]
        self._read_scale = torch.tensor([2.0**-s for s in _STATE_READ_SHIFT])[: shape.state_heads, None]

    @torch.inference_mode()
    def forward(self, tokens: TokenArray, start: int, place: Place) -> torch.Tensor:
        """Run tokens at positions [start, start + len(tokens)); return the last one's logits (integers).

        Reads the KV of all earlier tokens (FULL) and of the window (SWA), and the state in
        `place.mamba`; writes the tokens' KV into their pages' slots and the state after them back.
        Raises ValueError for an empty call or a position past `shape.max_tokens`.
        """
        stop = start + len(tokens)
        if not len(tokens) or stop > self.shape.max_tokens:
            raise ValueError(
                f"tokens: positions [{start}, {stop}); need 1 to {self.shape.max_tokens} of them"
            )
        self.n_tokens += len(tokens)
        residual = self._embedding[torch.from_numpy(tokens.astype(np.int64))]
        for i in range(self.shape.repeats):
            residual = self._add(residual, self._recurrent(i, norm(residual), place.mamba))
            residual = self._add(residual, self._feed_forward(3 * i, norm(residual)))
            residual = self._add(residual, self._attend(SWA, i, norm(residual), start, place.swa))
            residual = self._add(residual, self._feed_forward(3 * i + 1, norm(residual)))
            residual = self._add(residual, self._attend(FULL, i, norm(residual), start, place.full))
            residual = self._add(residual, self._feed_forward(3 * i + 2, norm(residual)))
        return (norm(residual[-1:]) @ self._unembedding)[0]

    def greedy(self, logits: torch.Tensor) -> int:
        """The most likely token; of equals the one with the smallest id."""
        return int(np.flatnonzero(logits.numpy() == logits.max().item())[0])

    @staticmethod
    def _add(residual: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return (residual + change).clamp_(-RESIDUAL_MAX, RESIDUAL_MAX)

    def _feed_forward(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        weights = self._feed_forwards[layer]
        hidden = requantise(normed @ weights.up, 8, 0, ACTIVATION_MAX)
        return requantise(hidden @ weights.down, 9)

    def _attend(self, kind: str, i: int, normed: torch.Tensor, start: int, slots: SlotArray) -> torch.Tensor:
        shape, weights = self.shape, self._attentions[kind][i]
        n = len(normed)
        split = requantise(normed @ weights.query_key_value, 8).view(n, -1, shape.head_width)
        queries, keys, values = torch.split(split, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cosine, sine = self._cosine[start : start + n], self._sine[start : start + n]
        queries, keys = rotate(queries, cosine, sine), rotate(keys, cosine, sine)
        self._write(kind, i, keys, values, start, slots)
        window = shape.window_tokens if kind == SWA else shape.max_tokens
        oldest = max(0, start - window + 1)
        all_keys, all_values = self._read(kind, i, oldest, start + n, slots)
        mixed = torch.empty(n, shape.heads, shape.head_width)
        for at in range(0, n, _QUERY_BLOCK):
            end = min(n, at + _QUERY_BLOCK)
            first = max(oldest, start + at - window + 1) - oldest
            last = start + end - oldest
            mixed[at:end] = _mix(
                queries[at:end],
                all_keys[:, :, first:last],
                all_values[:, first:last],
                oldest + first,
                start + at,
                window,
            )
        return requantise(mixed.view(n, -1) @ weights.out, 7)

    def _write(
        self, kind: str, i: int, keys: torch.Tensor, values: torch.Tensor, start: int, slots: SlotArray
    ) -> None:
        positions = np.arange(start, start + len(keys))
        pages = slots[positions // self.shape.page_size]
        if (pages < 0).any():
            raise ValueError(
                f"{kind}: a page in positions [{start}, {start + len(keys)}) has no slot to write to"
            )
        at = torch.from_numpy(pages.astype(np.int64)), torch.from_numpy(positions % self.shape.page_size)
        self._memory.keys[kind][i][at] = keys
        self._memory.values[kind][i][at] = values

    def _read(
        self, kind: str, i: int, oldest: int, stop: int, slots: SlotArray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [heads, width, tokens] and values [heads, tokens, width] of positions [oldest, stop)."""
        size = self.shape.page_size
        wanted = slots[oldest // size : -(-stop // size)]
        if (wanted < 0).any():
            raise ValueError(f"{kind}: no slot to read a page of positions [{oldest}, {stop}) from")
        pages = torch.from_numpy(wanted.astype(np.int64))
        cut = slice(oldest % size, oldest % size + stop - oldest)
        keys = self._memory.keys[kind][i][pages].flatten(0, 1)[cut]
        values = self._memory.values[kind][i][pages].flatten(0, 1)[cut]
        return keys.permute(1, 2, 0), values.transpose(0, 1)

    def _recurrent(self, i: int, normed: torch.Tensor, slot: int) -> torch.Tensor:
        shape, weights, n = self.shape, self._recurrences[i], len(normed)
        state, tail = self._memory.states[i][slot], self._memory.tails[i][slot]
        inputs = torch.cat((tail, requantise(normed @ weights.inputs, 8)))
        tail.copy_(inputs[n:])
        convolved = sum((inputs[j : j + n] * weights.taps[j] for j in range(shape.taps)), torch.zeros(()))
        heads = requantise(convolved, 5).view(n, shape.state_heads, -1)
        sizes = [shape.key_width, shape.key_width, shape.value_width]
        queries, keys, values = torch.split(heads, sizes, dim=-1)
        change = requantise(normed @ weights.decay, 10).add_(self._base_decay)
        decay = change.clamp_(DECAY_UNIT // 2, DECAY_UNIT - 1).mul_(1.0 / DECAY_UNIT)
        states = requantise(keys[..., None] * values[..., None, :], 4, -STATE_MAX, STATE_MAX)
        _scan(state.numpy(), states.numpy(), decay[..., None, None].numpy())
        state.copy_(states[-1])
        read = (queries[..., None] * states).sum(-2)
        mixed = requantise(read.mul_(self._read_scale), 0)
        return requantise(mixed.view(n, -1) @ weights.out, 7)


def _mix(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, start: int, window: int
) -> torch.Tensor:
    """Attention of queries at positions from `start` over keys at positions from `first`.

    A weight is floor(score / 2**12) within [0, 7]; the result is the weighted sum over the square root
    of one plus the sum of weights, which keeps its scale whatever the length of the context.
    """
    n, heads, width = queries.shape
    groups = len(keys)
    grouped = queries.view(n, groups, heads // groups, width).transpose(0, 1).reshape(groups, -1, width)
    scores = torch.bmm(grouped * 2.0**-_SCORE_SHIFT, keys)
    weights = scores.clamp_(0, ATTENTION_WEIGHT_MAX).floor_()
    distance = (start + torch.arange(n))[:, None] - (first + torch.arange(keys.shape[2]))
    hidden = (distance < 0) | (distance >= window)
    weights.view(groups, n, heads // groups, -1).masked_fill_(hidden[None, :, None], 0.0)
    total = weights.sum(-1, keepdim=True).add_(1.0)
    mixed = torch.bmm(weights, values).div_(total.sqrt_())
    return (
        requantise(mixed, 1).view(groups, n, heads // groups, width).transpose(0, 1).reshape(n, heads, width)
    )


def _scan(state: NDArray[np.float32], changes: NDArray[np.float32], decay: NDArray[np.float32]) -> None:
    """Turn changes[t] into the state after token t, in place: clamp(trunc(previous * decay[t]) + changes[t]).

    Token by token: truncation makes the step depend on the state, so no chunk-parallel form is exact.
    """
    previous, kept = state, np.empty_like(state)
    for t in range(len(changes)):
        current = changes[t]
        np.multiply(previous, decay[t], out=kept)
        np.trunc(kept, out=kept)
        np.add(current, kept, out=current)
        np.minimum(current, STATE_MAX, out=current)
        np.maximum(current, -STATE_MAX, out=current)
        previous = current
    changes += 0.0
