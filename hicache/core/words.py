"""The words of the index: tiers, residency, arrays.

Owns nothing and decides nothing; every other module of the core speaks in these terms.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenArray: TypeAlias = NDArray[np.int32]
"""Token ids, little-endian int32, one dimension, C-contiguous."""

SlotArray: TypeAlias = NDArray[np.int32]
"""Slot numbers in one component's memory of one tier; -1 where there is none."""

PageArray: TypeAlias = NDArray[np.int32]
"""Page numbers counted from the start of the prompt."""

BoolArray: TypeAlias = NDArray[np.bool_]

HashArray: TypeAlias = NDArray[np.uint8]
"""Page hashes: shape (pages, 32)."""

NO_SLOT = -1


class Tier(IntEnum):
    """Where payload lives, nearest to the model first. Prose says L1, L2, L3."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class Residency(IntEnum):
    """Where a page's frame stands in one tier."""

    ABSENT = 0
    INBOUND = 1
    """A slot is reserved and bytes are moving; no reader may see it."""
    READY = 2


def lowest(values: NDArray[np.int32] | NDArray[np.int64]) -> int:
    """Smallest entry of an array that is not empty."""
    return int(np.minimum.reduce(values))


def token_array(tokens: bytes | memoryview | NDArray[np.generic]) -> TokenArray:
    """View packed little-endian int32 bytes, or an integer array, as tokens; bytes are not copied.

    Raises ValueError when the bytes are not a whole number of tokens or an id does not fit int32.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: need a flat integer array, got {tokens.dtype} {tokens.shape}")
        if tokens.dtype == np.int32:
            return np.ascontiguousarray(tokens)
        if tokens.size and (int(tokens.max()) > 0x7FFFFFFF or int(tokens.min()) < -0x80000000):
            raise ValueError("tokens: an id does not fit int32; send ids below 2**31")
        return np.ascontiguousarray(tokens, dtype=np.int32)
    if len(tokens) % 4:
        raise ValueError(
            f"tokens: {len(tokens)} bytes is not a multiple of 4; send packed little-endian int32 ids"
        )
    return np.frombuffer(tokens, dtype="<i4")
