"""Reads from storage into host memory: asks what exists, reads one batch, verifies, publishes.

A frame whose header or checksum is wrong is deleted from storage, counted, and is a miss. Decides
nothing about which frames are worth reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.counters import Counters
from controller.models import HostMemory, Model
from controller.settings import ControllerSettings
from controller.storage import StorageStack
from controller.transfers.scheduler import TransferScheduler
from hicache.core.identity import Namespace, storage_key
from hicache.core.words import BoolArray, HashArray, PageArray, Residency, TokenArray
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
        self, hashes: HashArray, asked: Mapping[str, PageArray]
    ) -> tuple[dict[str, BoolArray], bool]:
        """One batched existence query: per component, which of the asked pages storage holds, one
        entry per page of the prompt; and whether storage could answer for all of them."""
        keys = [
            self._key(name, hashes[page].tobytes())
            for name, pages in asked.items()
            for page in pages.tolist()
        ]
        found = {name: np.zeros(len(hashes), dtype=bool) for name in asked}
        if not keys:
            return found, True
        outcomes = await self._stack.contains(keys, timeout_s=self._settings.storage_timeout_s)
        answers = iter(outcomes)
        for name, pages in asked.items():
            for page in pages.tolist():
                found[name][page] = next(answers) is Outcome.OK
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
        index, shelf = model.index, model.shelves[name]
        n_pages = len(tokens) // model.page_size
        held = model.held(index.match(namespace, tokens).cursor, name, n_pages)[pages]
        missing = pages[held == Residency.ABSENT]
        slots = self._host.take(model, name, len(missing))
        no_room = len(slots) < len(missing)
        missing = missing[: len(slots)]
        arrived = pages[held == Residency.READY]
        if len(missing):
            fill = model.begin_fill(namespace, tokens, {name: (missing, slots)})
            good = np.zeros(len(missing), dtype=bool)
            try:
                hashes = fill.hashes[name]
                items = [
                    Item(self._key(name, row.tobytes()), offset, shelf.frames.frame_bytes)
                    for row, offset in zip(hashes, shelf.arena.offsets(slots).tolist(), strict=True)
                ]
                transfer = await self._stack.read(items, timeout_s=timeout_s)
                await asyncio.shield(transfer.settled)  # until then a byte may still land in these slots
                good = np.array([outcome is Outcome.OK for outcome in transfer.outcomes])
                wrong = np.array([outcome is Outcome.WRONG_SIZE for outcome in transfer.outcomes])
                addresses = shelf.arena.addresses(slots)
                intact = np.zeros(len(missing), dtype=bool)
                intact[good] = await asyncio.wrap_future(
                    self._scheduler.run(
                        lambda: shelf.frames.verify(addresses[good], hashes[good], missing[good])
                    )
                )
                corrupt, good = wrong | (good & ~intact), intact
                self._count(transfer.outcomes, int(corrupt.sum()), int(good.sum()), shelf.frames.frame_bytes)
                if corrupt.any():
                    await self._stack.delete(
                        [item.key for item, bad in zip(items, corrupt, strict=True) if bad],
                        timeout_s=self._settings.storage_timeout_s,
                    )
            finally:
                model.end_fill(fill, {name: good})
            self._remember(model, namespace, tokens, name, missing, good)
            arrived = np.union1d(arrived, missing[good]).astype(np.int32)
        return Fetched(arrived, no_room)

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
            self._remember(model, namespace, tokens, name, pages, found[name][pages])

    @staticmethod
    def _remember(
        model: Model, namespace: Namespace, tokens: TokenArray, name: str, pages: PageArray, stored: BoolArray
    ) -> None:
        cursor = model.index.match(namespace, tokens).cursor
        known = pages < cursor.boundary
        model.index.mark_stored(cursor, name, pages[known & stored])
        model.index.forget_stored(cursor, name, pages[known & ~stored])

    def _key(self, name: str, page_hash: bytes) -> str:
        return storage_key(self._settings.storage_prefix, name, 0, 1, page_hash)

    def _count(self, outcomes: Sequence[Outcome], n_corrupt: int, n_good: int, frame_bytes: int) -> None:
        self._counters.prefetch_read_pages += n_good
        self._counters.prefetch_read_bytes += n_good * frame_bytes
        self._counters.prefetch_corrupt_pages += n_corrupt
        self._counters.prefetch_absent_pages += sum(outcome is Outcome.ABSENT for outcome in outcomes)
        self._counters.prefetch_failed_pages += sum(outcome is Outcome.FAILED for outcome in outcomes)
