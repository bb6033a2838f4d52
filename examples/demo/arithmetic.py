"""Exact arithmetic: integers held in float32, so that a result cannot depend on how a prompt was cut.

Activations, weights, states and KV are integers. Every sum of products that the model forms stays, in
any order and at every step of it, below 2**24 in magnitude, where float32 holds each integer exactly;
so a matrix product gives the same bits whatever its shape, blocking, thread count or use of FMA.
Around these sums stand only operations that IEEE 754 rounds correctly (scaling by a power of two,
division, square root, floor, clamp), element by element: functions of exact integers. Transcendental
functions are not used: vector and scalar forms of them differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

EXACT_LIMIT = 1 << 24
"""Below this magnitude float32 holds every integer, and so every partial sum, exactly."""

ACTIVATION_MAX = 127
WEIGHT_MAX = 40
RESIDUAL_MAX = 255
EMBEDDING_MAX = 32
ATTENTION_WEIGHT_MAX = 7
ROTATION_UNIT = 127
STATE_MAX = 8191
"""Clamp of each number of a recurrent state; fits 13 bits, so that times a decay of 8 bits it is exact."""
DECAY_UNIT = 256
NORM_GAIN = 362
"""A normed vector of width 128 has a standard deviation of 362 / sqrt(128) = 32."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Layers repeat the pattern recurrent, sliding window, full attention."""

    page_size: int = 32
    window_tokens: int = 256
    max_tokens: int = 16384
    vocabulary: int = 4096
    width: int = 128
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    state_heads: int = 4
    key_width: int = 16
    value_width: int = 16
    taps: int = 4
    repeats: int = 2
    """Layers of each kind."""

    @property
    def channels(self) -> int:
        """Width of a recurrent layer's convolved input: query, key and value of every state head."""
        return self.state_heads * (2 * self.key_width + self.value_width)


def largest_sums(shape: Shape) -> Mapping[str, int]:
    """The largest magnitude that any partial sum of each kind can take, over all inputs and weights."""
    return {
        "projection": shape.width * ACTIVATION_MAX * WEIGHT_MAX,
        "feed_forward": shape.hidden * ACTIVATION_MAX * WEIGHT_MAX,
        "attention_output": shape.heads * shape.head_width * ACTIVATION_MAX * WEIGHT_MAX,
        "recurrent_output": shape.state_heads * shape.value_width * ACTIVATION_MAX * WEIGHT_MAX,
        "squares": shape.width * RESIDUAL_MAX**2,
        "norm_numerator": RESIDUAL_MAX * NORM_GAIN,
        "score": shape.head_width * ACTIVATION_MAX**2,
        "weighted_values": shape.max_tokens * ATTENTION_WEIGHT_MAX * ACTIVATION_MAX,
        "attention_total": shape.max_tokens * ATTENTION_WEIGHT_MAX + 1,
        "rotation": 2 * ACTIVATION_MAX * ROTATION_UNIT,
        "convolution": shape.taps * ACTIVATION_MAX * WEIGHT_MAX,
        "state_decay": STATE_MAX * DECAY_UNIT,
        "state_update": STATE_MAX + ACTIVATION_MAX**2,
        "state_read": shape.key_width * ACTIVATION_MAX * STATE_MAX,
    }


def require_exact(shape: Shape) -> None:
    """Raise ValueError when a sum of this shape could leave the integers that float32 holds exactly."""
    for name, largest in largest_sums(shape).items():
        if largest >= EXACT_LIMIT:
            raise ValueError(f"{name}: partial sums reach {largest}, float32 is exact below {EXACT_LIMIT}")


def requantise(
    sums: torch.Tensor, shift: int, low: int = -ACTIVATION_MAX, high: int = ACTIVATION_MAX
) -> torch.Tensor:
    """floor(sums / 2**shift), clamped, in place; +0.0 is added so that no -0.0 is left and equal values
    have equal bytes."""
    return sums.mul_(2.0**-shift).floor_().clamp_(low, high).add_(0.0)


def norm(residual: torch.Tensor) -> torch.Tensor:
    """Integers proportional to `residual` over its root of summed squares (last dimension)."""
    squares = (residual * residual).sum(-1, keepdim=True).add_(1.0)
    return requantise((residual * NORM_GAIN).div_(squares.sqrt_()), 0)


def rotate(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions in integers: vectors [tokens, heads, width], tables [tokens, 1, width / 2]."""
    first, second = vectors.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
    return requantise(turned, 7)
