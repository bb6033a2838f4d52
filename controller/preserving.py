"""A flush that loses nothing: everything in host memory is in storage first, or nothing is dropped.

Believes no mark: storage is asked for every frame, what it lacks is written, and it is asked again. Between
the last answer and the flush nothing happens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np

from controller.host import HostMemory
from controller.models import Model
from controller.reader import StorageReader
from controller.requests import Refused
from controller.shelving import Shelving
from hicache.core.structure import Cursor, StaleCursor
from hicache.core.words import HashArray, PageArray, Residency

FIRST_LOOK_AGAIN_S = 0.05


class Preserving:
    """Flushes of one controller that keep what host memory holds."""

    def __init__(self, host: HostMemory, reader: StorageReader, shelving: Shelving) -> None:
        self._host = host
        self._reader = reader
        self._shelving = shelving

    async def flush(self, timeout_s: float) -> tuple[int, int]:
        """Store everything, then drop every host page that nothing holds; pages dropped and kept. Raises
        Refused, with nothing dropped, when not all of it is stored within `timeout_s`."""
        ends_s = self._now() + timeout_s
        pause_s = FIRST_LOOK_AGAIN_S
        safe: set[tuple[int, str, bytes]] = set()
        """Model, component and hash of frames that storage says it holds."""
        while lacking := self._lacking(safe):
            if self._now() >= ends_s or not self._shelving.takes_writes:
                raise Refused(self._complaint(lacking, timeout_s))
            await self._store(safe, ends_s)
            if self._lacking(safe):
                await asyncio.sleep(min(pause_s, max(0.0, ends_s - self._now())))
                pause_s *= 2
        return self._host.flush()

    def _lacking(self, safe: set[tuple[int, str, bytes]]) -> Counter[tuple[str, str]]:
        """Pages in host memory that are not known safe, by model and component."""
        lacking: Counter[tuple[str, str]] = Counter()
        for model, cursor in self._paths():
            hashes, held = self._held(model, cursor)
            for name, pages in _unsafe(model, hashes, held, safe).items():
                if len(pages):
                    lacking[model.name, name] += len(pages)
        return lacking

    async def _store(self, safe: set[tuple[int, str, bytes]], ends_s: float) -> None:
        """Ask storage for everything once, write what it lacks, and wait until that is written."""
        for model, cursor in self._paths():
            try:
                tokens = model.index.tokens(cursor)
                hashes, held = self._held(model, cursor)
            except StaleCursor:
                continue  # evicted while others were asked for
            asked = _unsafe(model, hashes, held, safe)
            if not any(map(len, asked.values())):
                continue
            found, complete = await self._reader.stored(model, hashes, asked)
            for name, pages in asked.items():
                stored = pages[found[name][pages]]
                safe.update((id(model), name, hashes[page].tobytes()) for page in stored.tolist())
            if complete:
                self._reader.remember(model, cursor.namespace, tokens, asked, found)
            self._shelving.offer(model, cursor.namespace, tokens)
            if not await self._shelving.drained(max(0.0, ends_s - self._now())):
                return

    def _paths(self) -> Iterator[tuple[Model, Cursor]]:
        for model in self._host.models:
            for cursor in model.index.leaves():
                yield model, cursor

    @staticmethod
    def _held(model: Model, cursor: Cursor) -> tuple[HashArray, dict[str, PageArray]]:
        """A path's hashes, and per component its pages that are READY in host memory."""
        n_pages = cursor.boundary
        hashes = model.index.hashes(cursor, 0, n_pages)
        return hashes, {
            name: np.flatnonzero(model.held(cursor, name, n_pages) == Residency.READY).astype(np.int32)
            for name in model.shelves
        }

    def _complaint(self, lacking: Counter[tuple[str, str]], timeout_s: float) -> str:
        what = ", ".join(f"{model}/{name}: {count} pages" for (model, name), count in lacking.items())
        why = "; ".join(self._shelving.problems()) or "storage is slower than that, or full"
        if not self._shelving.takes_writes:
            why = "no storage tier takes writes; attach one, or let one write"
        return f"preserve: nothing was dropped; not in storage after {timeout_s} s: {what} ({why})"

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _unsafe(
    model: Model, hashes: HashArray, held: dict[str, PageArray], safe: set[tuple[int, str, bytes]]
) -> dict[str, PageArray]:
    return {
        name: np.array(
            [page for page in pages.tolist() if (id(model), name, hashes[page].tobytes()) not in safe],
            dtype=np.int32,
        )
        for name, pages in held.items()
    }
