"""Reads from storage into host memory: asks what exists, reads one batch, verifies, publishes.

A frame whose header or checksum is wrong is deleted from storage, counted, and is a miss. Decides
nothing about which frames are worth reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from controller.counters import Counters
from controller.events import Reason
from controller.host import HostMemory
from controller.models import Model
from controller.settings import ControllerSettings
from controller.storage import StorageStack
from controller.transfers.scheduler import TransferScheduler
from hicache.core.identity import Namespace
from hicache.core.words import BoolArray, HashArray, PageArray, Residency, SlotArray, TokenArray
from storage_backends.base import Item, Outcome


@dataclass(frozen=True)
class Fetched:
    """What became of one batch of pages of one component."""

    arrived: PageArray
    """READY in host memory now, brought by this batch or by someone else meanwhile."""
    no_room: bool


class StorageReader:
    """Every byte that comes from storage passes here."""

    def __init__(
        self,
        stack: StorageStack,
        host: HostMemory,
        scheduler: TransferScheduler,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        self._stack = stack
        self._host = host
        self._scheduler = scheduler
        self._settings = settings
        self._counters = counters

    async def stored(
        self, model: Model, hashes: HashArray, asked: Mapping[str, PageArray]
    ) -> tuple[dict[str, BoolArray], bool]:
        """One batched existence query: per component, which of the asked pages storage holds for every
        rank, one entry per page of the prompt; and whether storage could answer for all of them."""
        keys = [
            item.key
            for name, pages in asked.items()
            for page in pages.tolist()
            for item in self._items(model, name, hashes[page].tobytes(), 0)
        ]
        found = {name: np.zeros(len(hashes), dtype=bool) for name in asked}
        if not keys:
            return found, True
        outcomes = await self._stack.contains(keys, timeout_s=self._settings.storage_timeout_s)
        present = np.array([outcome is Outcome.OK for outcome in outcomes])
        start = 0
        for name, pages in asked.items():
            per_page = len(model.shelves[name].parts)
            stop = start + per_page * len(pages)
            found[name][pages] = present[start:stop].reshape(len(pages), per_page).all(axis=1)
            start = stop
        return found, Outcome.FAILED not in outcomes

    async def fetch(
        self,
        model: Model,
        namespace: Namespace,
        tokens: TokenArray,
        name: str,
        pages: PageArray,
        timeout_s: float,
    ) -> Fetched:
        """Bring one component's pages to host memory, as many as fit, evicting on demand. Must not be
        cancelled: bytes in flight would lose their owner."""
        index = model.index
        n_pages = len(tokens) // model.page_size
        held = model.held(index.match(namespace, tokens).cursor, name, n_pages)[pages]
        missing = pages[held == Residency.ABSENT]
        slots, short = self._host.take(model, name, len(missing), namespace.salt)
        missing = missing[: len(slots)]
        arrived = pages[held == Residency.READY]
        if len(missing):
            fill = model.begin_fill(namespace, tokens, {name: (missing, slots)})
            good = corrupt = np.zeros(len(missing), dtype=bool)
            try:
                good, corrupt = await self._read(model, name, fill.hashes[name], missing, slots, timeout_s)
            finally:
                with model.because(Reason.PREFETCH):
                    model.end_fill(fill, {name: good})
            for chosen, lost in ((corrupt, Reason.CORRUPT), (~corrupt, Reason.UNREADABLE)):
                self._remember(model, namespace, tokens, name, missing[chosen], good[chosen], lost)
            arrived = np.union1d(arrived, missing[good]).astype(np.int32)
        return Fetched(arrived, bool(short))

    async def _read(
        self,
        model: Model,
        name: str,
        hashes: HashArray,
        pages: PageArray,
        slots: SlotArray,
        timeout_s: float,
    ) -> tuple[BoolArray, BoolArray]:
        """Read every rank's frame of these pages into their slots; which pages are whole and right, and
        which are damaged."""
        shelf = model.shelves[name]
        per_page = [
            self._items(model, name, row.tobytes(), offset)
            for row, offset in zip(hashes, shelf.arena.offsets(slots).tolist(), strict=True)
        ]
        items = [item for one in per_page for item in one]
        transfer = await self._stack.read(items, timeout_s=timeout_s)
        await asyncio.shield(transfer.settled)  # until then a byte may still land in these slots

        def became(outcome: Outcome) -> BoolArray:
            """Shape (pages, parts)."""
            return np.array([one is outcome for one in transfer.outcomes]).reshape(len(pages), -1)

        arrived = became(Outcome.OK)
        intact = np.zeros_like(arrived)
        addresses = shelf.arena.addresses(slots)
        for i, part in enumerate(shelf.parts):
            read = arrived[:, i]
            at = addresses[read] + np.uint64(part.offset)
            verify = partial(part.frames.verify, at, hashes[read], pages[read])
            intact[read, i] = await asyncio.wrap_future(self._scheduler.run(verify))
        corrupt = became(Outcome.WRONG_SIZE) | (arrived & ~intact)
        good: BoolArray = np.all(intact, axis=1)
        self._counters.prefetch_read_pages += int(good.sum())
        self._counters.prefetch_read_bytes += int(good.sum()) * shelf.frame_bytes
        self._counters.prefetch_corrupt_pages += int(corrupt.any(axis=1).sum())
        self._counters.prefetch_absent_pages += int(became(Outcome.ABSENT).any(axis=1).sum())
        self._counters.prefetch_failed_pages += int(became(Outcome.FAILED).any(axis=1).sum())
        if corrupt.any():
            bad = [item.key for item, wrong in zip(items, corrupt.ravel(), strict=True) if wrong]
            await self._stack.delete(bad, timeout_s=self._settings.storage_timeout_s)
        damaged: BoolArray = np.any(corrupt, axis=1)
        return good, damaged

    def remember(
        self,
        model: Model,
        namespace: Namespace,
        tokens: TokenArray,
        asked: Mapping[str, PageArray],
        found: Mapping[str, BoolArray],
    ) -> None:
        """Correct the index's knowledge of storage by an existence query's answer."""
        for name, pages in asked.items():
            self._remember(model, namespace, tokens, name, pages, found[name][pages], Reason.ABSENT)

    @staticmethod
    def _remember(
        model: Model,
        namespace: Namespace,
        tokens: TokenArray,
        name: str,
        pages: PageArray,
        stored: BoolArray,
        lost: Reason,
    ) -> None:
        cursor = model.index.match(namespace, tokens).cursor
        known = pages < cursor.boundary
        with model.because(Reason.FOUND):
            model.index.mark_stored(cursor, name, pages[known & stored])
        with model.because(lost):
            model.index.forget_stored(cursor, name, pages[known & ~stored])

    def _items(self, model: Model, name: str, page_hash: bytes, offset: int) -> tuple[Item, ...]:
        return model.shelves[name].items(self._settings.storage_prefix, model.ranks, page_hash, offset)
