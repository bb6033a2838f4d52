"""Request: one prompt on its way through the engine, and what it holds of the cache meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.cache.lower import PrefetchUnderWay
from hicache.cache.pending import Loading
from hicache.client.messages import Prompt
from hicache.core.identity import Namespace
from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.words import SlotArray, Tier, TokenArray


@dataclass(frozen=True, eq=False)
class Queued:
    """A request that waits for its turn."""

    boundary: int
    """What L1 had of its prompt, in pages: the prefetch left that out."""
    prefetch: PrefetchUnderWay | None
    """None when L1 had everything, or the daemon was not to be had."""


@dataclass(eq=False)
class Request:
    """Made by `UnifiedRadixCache.begin`, ended by `finish` or `abort`. Read it; the cache writes it."""

    prompt: Prompt
    namespace: Namespace
    boundary: int
    """Pages that need not be computed."""
    cached_tokens: int
    """The same in tokens."""
    slots: dict[str, SlotArray]
    """Per component, the slots of pages [0, n_pages) to read from: -1 outside its coverage there. They
    stay valid until the next `insert`, `advance`, `finish` or `abort`."""
    hit_pages: Mapping[Tier, int]
    """Where the first `boundary` pages came from. STORAGE: loaded from host memory, at or beyond the
    boundary that L1 and L2 could serve when this request's prefetch was asked for."""
    branching_boundary: int
    """Deepest boundary that the whole-path components alone reach; where it is beyond `boundary`, a
    checkpoint taken there would have been of use."""
    n_pages: int
    """Pages that the cache knows of this request: `boundary`, then what has been inserted."""
    private: dict[str, int]
    """Per component, the request's own slot. It belongs to the request until that ends."""
    tokens: TokenArray
    """The first `n_pages` pages, of which the slots are."""
    cursor: Cursor
    receipt: Receipt
    loading: Loading | None = field(default=None)
    """A load that `begin` did not wait for: end it before anything else but `abort`."""
    inserted: bool = field(default=False)
    """Whether it has inserted anything yet."""
    ended: bool = field(default=False)
