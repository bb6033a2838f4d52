"""Direct mode: host memory as a bounded ring between the engines and storage (`host.mode: staging`).

A backup's pages stay until every storage tier that writes is through with them, whatever became of it, and
go right after; pages that were read for an engine go when nobody holds them any more. Says which pages are
held and lets go of them; reads and writes nothing. In the other mode (`cache`) it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from controller.models import HOST, Model
from hicache.core.identity import Namespace
from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.words import PageArray, Residency, TokenArray

CHUNK_PAGES = 32
"""Pages that are pinned, and let go, together."""


class Staged(NamedTuple):
    """One page of one component that waits to be written."""

    key: str
    component: str
    page: int


class Hold:
    """Pages of one path, pinned until every tier is through with them."""

    def __init__(self, model: Model, cursor: Cursor, pages: Sequence[Staged], tiers: Sequence[str]) -> None:
        self._model = model
        self._cursor = cursor
        self._chunk_of: dict[str, _Chunk] = {}
        for start in range(0, len(pages), CHUNK_PAGES):
            chunk = _Chunk(model, cursor, pages[start : start + CHUNK_PAGES], tiers)
            self._chunk_of.update((one.key, chunk) for one in chunk.pages)

    def ended(self, tier: str, keys: Iterator[str]) -> None:
        """A tier is through with these pages: written, or given up. A second time changes nothing."""
        for key in keys:
            chunk = self._chunk_of[key]
            chunk.waiting.discard((tier, key))
            if not chunk.waiting and chunk.receipt is not None:
                self._model.index.unpin(chunk.receipt)
                chunk.receipt = None
                drop(self._model, self._cursor, chunk.by_component())

    def landed(self, pages: dict[str, PageArray]) -> None:
        """No byte of these pages moves any more."""
        drop(self._model, self._cursor, pages)


class _Chunk:
    def __init__(self, model: Model, cursor: Cursor, pages: Sequence[Staged], tiers: Sequence[str]) -> None:
        self.pages = pages
        self.waiting = {(tier, one.key) for tier in tiers for one in pages}
        self.receipt: Receipt | None = model.index.pin_pages(cursor, self.by_component(), tier=HOST)

    def by_component(self) -> dict[str, PageArray]:
        found: dict[str, list[int]] = {}
        for one in self.pages:
            found.setdefault(one.component, []).append(one.page)
        return {name: np.array(pages, dtype=np.int32) for name, pages in found.items()}


def drop(model: Model, cursor: Cursor, pages: Mapping[str, PageArray]) -> None:
    """Drop these pages from host memory, as far as nobody holds them."""
    model.give_back(model.index.reclaiming.give_up(cursor, pages, tier=HOST).freed)


def let_go(model: Model, namespace: Namespace, tokens: TokenArray) -> None:
    """Drop what nobody holds of a path from host memory."""
    cursor = model.index.match(namespace, tokens).cursor
    ready = {name: model.held(cursor, name, cursor.boundary) == Residency.READY for name in model.shelves}
    drop(model, cursor, {name: np.flatnonzero(row).astype(np.int32) for name, row in ready.items()})
