"""The storage tiers' owner: opens their workers, hands them to the controller, stops what is let go.

Keeps what each tier was opened with, so that attaching the same again is no change. Asks no backend anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from controller.daemon.config import TierEntry
from controller.memory.slab import HostSlab
from controller.requests import Busy, Gone, InvalidRequest, Refused
from controller.storage import StorageTier, TierPolicy
from controller.storage.tier import TIER_COUNTERS
from storage_backends.base import StorageError

T = TypeVar("T")
log = structlog.get_logger("hicache.storage")


class Shelves(Protocol):
    """What uses the tiers; `controller.shelving.Shelving` is it, and says what each call does."""

    def attach(self, tier: StorageTier, policy: TierPolicy) -> None: ...
    def update(self, name: str, policy: TierPolicy) -> None: ...
    async def detach(self, name: str, *, force: bool, timeout_s: float) -> StorageTier: ...


@dataclass(frozen=True)
class Owned:
    """A tier that is attached, and what it was opened with."""

    entry: TierEntry
    tier: StorageTier


class StorageTiers:
    """All storage tiers of one daemon. All calls on the event loop."""

    def __init__(self, shelves: Shelves, slab: HostSlab) -> None:
        self._shelves = shelves
        self._slab = slab
        self._owned: dict[str, Owned] = {}
        self._opening: dict[str, StorageTier] = {}
        self._changing: set[str] = set()
        self._running: set[asyncio.Task[object]] = set()
        self._departed: Counter[str] = Counter()
        """What tiers that are gone had counted."""

    async def open(self, entries: Sequence[TierEntry], progress: Callable[[str], None]) -> None:
        """Open the configured tiers, all at once, and attach them in order. Raises StorageError when one
        that is required cannot be opened; `stop` then stops the others."""
        for entry in entries:
            self._opening[entry.name] = self._tier(entry)
        progress(f"storage: opening {', '.join(self._opening)}")
        starts = (self._opening[entry.name].start(strict=entry.required) for entry in entries)
        errors = await asyncio.gather(*starts, return_exceptions=True)
        for i, error in enumerate(errors):
            if isinstance(error, StorageError):
                raise StorageError(
                    f"storage.tiers[{i}].backend: {error}; mend it, or set `required: false` there to start "
                    "without"
                ) from error
            if error is not None:
                raise error
        for entry in entries:
            self._take_in(entry, self._opening.pop(entry.name))

    async def attach(self, entry: TierEntry) -> str | None:
        """Open a tier and attach it, as the last; returns what is wrong with it, "" as a rule. None when it
        was there with the same backend: then only its policy is set. Raises InvalidRequest when the name
        is taken by another backend, Refused when it is required and cannot be opened."""
        known = self._owned.get(entry.name)
        if known is None:
            return await self._to_the_end(self._attach(entry))
        if known.entry.backend != entry.backend:
            raise InvalidRequest(
                f"name: a storage tier {entry.name!r} with another backend is attached; detach it first, or "
                "choose another name"
            )
        self.update(entry.name, TierPolicy(read=entry.read, write=entry.write))
        return None

    async def _attach(self, entry: TierEntry) -> str:
        with self._change(entry.name):
            tier = self._opening[entry.name] = self._tier(entry)
            try:
                await tier.start(strict=entry.required)
            except StorageError as error:
                raise Refused(f"backend: {error}; mend it, or attach it with `required: false`") from error
            finally:
                del self._opening[entry.name]
            self._take_in(entry, tier)
            return tier.problem

    def update(self, name: str, policy: TierPolicy) -> None:
        """Use a tier for something else from now on. Raises Gone for one that is not attached."""
        self._known(name)
        self._shelves.update(name, policy)
        log.info("storage_updated", tier=name, read=policy.read, write=policy.write)

    async def detach(self, name: str, *, force: bool, timeout_s: float) -> bool:
        """Let a tier go and stop its worker; False when the kernel does not let the worker end. Raises Gone,
        or Busy when it does not fall idle in time and may not be forced: then it stays."""
        self._known(name)
        return await self._to_the_end(self._detach(name, force, timeout_s))

    async def _detach(self, name: str, force: bool, timeout_s: float) -> bool:
        with self._change(name):
            tier = await self._shelves.detach(name, force=force, timeout_s=timeout_s)
            del self._owned[name]
            stopped = await tier.stop()
            self._departed.update(tier.counters())
        log.info("storage_detached", tier=name, forced=force, stopped=stopped)
        return stopped

    async def stop(self) -> None:
        """Stop every worker, also of those that are being opened."""
        tiers = [*self._opening.values(), *(owned.tier for owned in self._owned.values())]
        changes = list(self._running)
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)
        await asyncio.gather(*(tier.stop() for tier in tiers))

    def counters(self) -> Mapping[str, int]:
        """What all tiers together have counted, those that are gone included; every name from the start."""
        total = Counter(self._departed)
        for owned in self._owned.values():
            total.update(owned.tier.counters())
        return {name: total[name] for name in TIER_COUNTERS}

    # ---- inside

    def _tier(self, entry: TierEntry) -> StorageTier:
        return StorageTier(entry.name, entry.backend, self._slab.fd, self._slab.nbytes)

    def _take_in(self, entry: TierEntry, tier: StorageTier) -> None:
        self._shelves.attach(tier, TierPolicy(read=entry.read, write=entry.write))
        self._owned[entry.name] = Owned(entry, tier)
        log.info("storage_attached", tier=tier.name, kind=tier.kind, problem=tier.problem)

    def _known(self, name: str) -> Owned:
        if name not in self._owned:
            raise Gone(f"name: no storage tier {name!r} is attached; attached: {sorted(self._owned)}")
        return self._owned[name]

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """One at a time for each name."""
        if name in self._changing:
            raise Busy(f"name: storage tier {name!r} is being attached or detached; try again")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.remove(name)

    async def _to_the_end(self, change: Coroutine[object, object, T]) -> T:
        """Half a change is none: it goes on when its caller gives up."""
        task = asyncio.ensure_future(change)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone
