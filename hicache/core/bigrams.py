"""Bigram keys: a prompt as pairs of neighbouring tokens, for draft models that read two tokens at a time.

A view of the prompt, not another tree: an index over pairs is an ordinary index with twice the page size.
"""

from __future__ import annotations

import numpy as np

from hicache.core.words import TokenArray


def bigrams(tokens: TokenArray) -> TokenArray:
    """The pairs (t0, t1), (t1, t2), ... one after another: 2 * (n - 1) ids for n tokens, none for fewer
    than two. A page of p pairs is a page of 2 * p ids, and needs p + 1 tokens."""
    if len(tokens) < 2:
        return np.empty(0, dtype=np.int32)
    pairs = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, dtype=np.int32), 2)
    return np.ascontiguousarray(pairs).reshape(-1)
