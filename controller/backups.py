"""Backups: engine slots (L1) to host frames (L2), then on to storage.

Decides which offered pages are taken: never a child without its parents, never a page twice, what
fits when room is short. A backup's pages are all published, or all given back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from controller.copying import Copier
from controller.counters import Counters
from controller.models import HOST, Engine, HostMemory, Model
from controller.requests import Backup, BackupOutcome, Busy, Placement
from controller.shelving import Shelving
from controller.transfers.scheduler import Direction
from hicache.core.identity import Namespace
from hicache.core.words import BoolArray, PageArray, Residency, SlotArray, TokenArray


@dataclass
class Plan:
    """What a backup will do for one component."""

    wanted: PageArray
    """Pages to copy, ascending."""
    sources: SlotArray
    """The engine's slots for them."""
    present_pages: int
    refused: Counter[str] = field(default_factory=Counter)
    """Pages refused, by reason."""

    def keep(self, chosen: BoolArray, reason: str) -> None:
        """Refuse every page that is not chosen."""
        if not chosen.all():
            self.refused[reason] += int((~chosen).sum())
            self.wanted, self.sources = self.wanted[chosen], self.sources[chosen]

    def outcome(self) -> BackupOutcome:
        reasons = ",".join(sorted(self.refused))
        return BackupOutcome(len(self.wanted), self.present_pages, self.refused.total(), reasons)


def plan_backup(
    present: Mapping[str, BoolArray], offered: Mapping[str, Placement], whole_path: Mapping[str, bool]
) -> dict[str, Plan]:
    """Which offered pages to copy. `present` has one entry per page and component.

    A page is taken when every page before it is present or offered in every whole-path component;
    pages behind a gap are refused as `chain_broken`. Changes nothing.
    """
    reach = len(next(iter(present.values())))
    for name, held in present.items():
        if whole_path[name]:
            have = held.copy()
            if name in offered:
                have[offered[name].pages] = True
            gaps = np.flatnonzero(~have)
            reach = min(reach, int(gaps[0]) if gaps.size else len(have))
    plans = {}
    for name, placement in offered.items():
        missing = ~present[name][placement.pages]
        plan = Plan(placement.pages[missing], placement.slots[missing], int((~missing).sum()))
        plan.keep(plan.wanted < reach, "chain_broken")
        plans[name] = plan
    return plans


class Backups:
    """Runs backups. One call of `run` is one job."""

    def __init__(self, host: HostMemory, copier: Copier, shelving: Shelving, counters: Counters) -> None:
        self._host = host
        self._copier = copier
        self._shelving = shelving
        self._counters = counters

    async def run(self, engine: Engine, backup: Backup) -> Mapping[str, BackupOutcome]:
        """Copy what is new and return when it can be read. The engine's slots are not touched afterwards.

        Raises Busy when others' fills of the same pages do not end in time, TransferFailed when bytes
        could not be moved; then nothing of it is published.
        """
        model = engine.model
        namespace = model.namespace(backup.prompt)
        n_pages = len(backup.prompt.tokens) // model.page_size
        tokens = backup.prompt.tokens[: n_pages * model.page_size]
        self._counters.backups += 1
        self._counters.uncached_tail_tokens += len(backup.prompt.tokens) - len(tokens)
        async with asyncio.timeout(self._copier.timeout_s) as deadline:
            try:
                await self._others_ended(model, namespace, tokens, n_pages)
            except TimeoutError:
                raise Busy("backup: another transfer of the same pages has not ended; try again") from None
            deadline.reschedule(None)
        plans = await self._fill(engine, namespace, tokens, n_pages, backup.components)
        self._shelving.offer(model, namespace, tokens)
        return {name: plan.outcome() for name, plan in plans.items()}

    async def _others_ended(
        self, model: Model, namespace: Namespace, tokens: TokenArray, n_pages: int
    ) -> None:
        while True:
            cursor = model.index.match(namespace, tokens).cursor
            running = model.running_fill(cursor, n_pages)
            if running is None:
                return
            await asyncio.shield(running)

    async def _fill(
        self,
        engine: Engine,
        namespace: Namespace,
        tokens: TokenArray,
        n_pages: int,
        offered: Mapping[str, Placement],
    ) -> dict[str, Plan]:
        model, index = engine.model, engine.model.index
        cursor = index.match(namespace, tokens).cursor
        present = {name: model.held(cursor, name, n_pages) == Residency.READY for name in model.shelves}
        plans = plan_backup(
            present, offered, {name: shelf.whole_path for name, shelf in model.shelves.items()}
        )
        chain = index.pin_pages(
            cursor, {name: np.flatnonzero(held).astype(np.int32) for name, held in present.items()}, tier=HOST
        )
        try:
            targets = self._room(model, plans)
            placements = {name: (plans[name].wanted, slots) for name, slots in targets.items() if len(slots)}
            self._count(plans)
            if placements:
                fill = model.begin_fill(namespace, tokens, placements)
                good: dict[str, BoolArray] | None = {
                    name: np.zeros(len(slots), dtype=bool) for name, (_, slots) in placements.items()
                }
                try:
                    self._counters.backup_bytes += await self._copier.copy(
                        Direction.STORE,
                        engine,
                        {name: (plans[name].sources, slots) for name, (_, slots) in placements.items()},
                        seal={name: (fill.hashes[name], pages) for name, (pages, _) in placements.items()},
                    )
                    good = None
                finally:
                    model.end_fill(fill, good)
            self._touch(model, namespace, tokens)
        finally:
            index.unpin(chain)
        return plans

    def _room(self, model: Model, plans: Mapping[str, Plan]) -> dict[str, SlotArray]:
        """Host slots for what the plans want, and the plans cut to what fits: whole-path components
        lose their tails (all alike), the others keep their deepest pages."""
        got: dict[str, SlotArray] = {}
        reach = np.iinfo(np.int32).max
        ordered = sorted(plans, key=lambda name: not model.shelves[name].whole_path)
        for name in ordered:
            plan, shelf = plans[name], model.shelves[name]
            plan.keep(plan.wanted < reach, "host_full")
            slots = self._host.take(model, name, len(plan.wanted))
            if len(slots) < len(plan.wanted):
                if shelf.whole_path:
                    reach = min(reach, int(plan.wanted[len(slots)]))
                    plan.keep(plan.wanted < reach, "host_full")
                else:
                    plan.keep(np.arange(len(plan.wanted)) >= len(plan.wanted) - len(slots), "host_full")
            got[name] = slots
        for name in ordered:  # a later whole-path component may have cut an earlier one's reach
            plans[name].keep(plans[name].wanted < reach, "host_full")
            surplus = got[name][len(plans[name].wanted) :]
            model.shelves[name].arena.free(surplus)
            got[name] = got[name][: len(plans[name].wanted)]
        return got

    @staticmethod
    def _touch(model: Model, namespace: Namespace, tokens: TokenArray) -> None:
        match = model.index.match(namespace, tokens)
        if match.boundaries[HOST]:
            model.index.touch(match.cursor, match.boundaries[HOST])

    def _count(self, plans: Mapping[str, Plan]) -> None:
        for plan in plans.values():
            self._counters.backup_stored_pages += len(plan.wanted)
            self._counters.backup_present_pages += plan.present_pages
            self._counters.backup_refused_host_full_pages += plan.refused["host_full"]
            self._counters.backup_refused_chain_broken_pages += plan.refused["chain_broken"]
