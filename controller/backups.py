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
from controller.events import Reason
from controller.groups import Engine, Group, Meeting
from controller.host import HostMemory
from controller.models import HOST, STORAGE, Fill, Model
from controller.requests import EMPTY_PAGES, Backup, BackupOutcome, Busy, InvalidRequest, Placement
from controller.sessions import SessionBook
from controller.settings import ControllerSettings
from controller.shelving import Shelving
from controller.staging import let_go
from controller.transfers.jobs import Job
from controller.transfers.scheduler import Direction
from hicache.core.identity import Namespace
from hicache.core.pins import Receipt
from hicache.core.structure import Cursor
from hicache.core.words import BoolArray, PageArray, Residency, SlotArray, TokenArray

NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)


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


@dataclass
class Filling:
    """A planned backup whose bytes are moving."""

    plans: Mapping[str, Plan]
    fill: Fill | None
    """None when there is nothing to copy."""
    chain: Receipt
    """Pins what it builds on."""


class Joint:
    """One backup of all ranks: planned once, copied by each, published when every rank's part has landed."""

    def __init__(self, planned: asyncio.Task[Filling], meeting: Meeting[int]) -> None:
        self.planned = planned
        self.meeting = meeting
        self.outcomes: asyncio.Task[Mapping[str, BackupOutcome]] | None = None


class Backups:
    """Runs backups."""

    def __init__(
        self,
        host: HostMemory,
        copier: Copier,
        shelving: Shelving,
        sessions: SessionBook,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._full = "staging_full" if settings.staging else "host_full"
        """Why there is no room: also the name of the counter."""
        self._host = host
        self._copier = copier
        self._shelving = shelving
        self._sessions = sessions
        self._counters = counters
        self._open: dict[tuple[str, str], list[Joint]] = {}
        """By group and request: those that some rank has not taken its part in."""
        self._landing: set[asyncio.Future[None]] = set()
        """Done when a backup's bytes have landed: its pages can go then, and others have their room."""

    async def run(
        self, group: Group, engine: Engine, backup: Backup, job: Job
    ) -> Mapping[str, BackupOutcome]:
        """Copy what is new and return when it can be read. The engine's slots are not touched afterwards.

        Raises Busy when others' fills of the same pages do not end in time, TransferFailed when bytes
        could not be moved or a rank did not come; then nothing of it is published.
        """
        about = (group.group_id, backup.prompt.request_id)
        waiting = self._open.setdefault(about, [])
        joint = next((one for one in waiting if one.meeting.joins(engine.spec.rank)), None)
        if joint is None:
            planned = asyncio.ensure_future(self._plan(group.model, backup))
            joint = Joint(planned, Meeting(group.ranks, 2 * self._copier.timeout_s))
            group.opened(joint.meeting)
            joint.outcomes = asyncio.ensure_future(self._finish(joint, group, backup))
            waiting.append(joint)
            joint.meeting.over.add_done_callback(lambda _: self._close(about, joint))
        joint.meeting.take_part(engine.spec.rank, self._copy(joint, engine, backup, job))
        assert joint.outcomes is not None
        return await asyncio.shield(joint.outcomes)

    def _close(self, about: tuple[str, str], joint: Joint) -> None:
        self._open[about].remove(joint)
        if not self._open[about]:
            del self._open[about]

    async def _plan(self, model: Model, backup: Backup) -> Filling:
        """Decide what to copy, once nobody else is bringing in pages of this path; reserve its place. When
        other backups hold the room while their bytes move, wait for them, holding nothing."""
        namespace, tokens = model.namespace(backup.prompt), model.whole_pages(backup.prompt)
        self._counters.backups += 1
        self._counters.uncached_tail_tokens += len(backup.prompt.tokens) - len(tokens)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._copier.timeout_s
        while True:
            try:
                async with asyncio.timeout_at(ends_s):
                    await model.fills_ended(namespace, tokens)
            except TimeoutError:
                raise Busy("backup: another transfer of the same pages has not ended; try again") from None
            filling = self._reserve(model, namespace, tokens, backup, final=loop.time() >= ends_s)
            if filling is not None:
                self._count(filling.plans)
                return filling
            await asyncio.wait(
                self._landing, timeout=max(0.0, ends_s - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )

    def _reserve(
        self, model: Model, namespace: Namespace, tokens: TokenArray, backup: Backup, *, final: bool
    ) -> Filling | None:
        """Plan and reserve. None, with nothing held, when there is not room for all of it and other
        backups are about to leave some; unless this is the final try."""
        index = model.index
        n_pages = len(tokens) // model.page_size
        cursor = index.match(namespace, tokens).cursor
        held = {name: model.held(cursor, name, n_pages) == Residency.READY for name in model.shelves}
        present = self._with_stored(model, cursor, held) if self._settings.staging else held
        plans = plan_backup(
            present, backup.components, {name: shelf.whole_path for name, shelf in model.shelves.items()}
        )
        chain = index.pin_pages(
            cursor, {name: np.flatnonzero(row).astype(np.int32) for name, row in held.items()}, tier=HOST
        )
        if self._settings.staging and not self._shelving.takes_writes:
            for plan in plans.values():
                plan.keep(np.zeros(len(plan.wanted), dtype=bool), "no_storage")
        try:
            targets = self._room(model, plans, backup.prompt.salt)
            if self._landing and not final and any(plan.refused[self._full] for plan in plans.values()):
                for name, slots in targets.items():
                    model.shelves[name].arena.free(slots)
                index.unpin(chain)
                return None
            placements = {name: (plans[name].wanted, slots) for name, slots in targets.items() if len(slots)}
            fill = model.begin_fill(namespace, tokens, placements) if placements else None
        except BaseException:
            index.unpin(chain)
            raise
        if fill is not None:
            self._landing.add(fill.ended)
            fill.ended.add_done_callback(self._landing.discard)
        return Filling(plans, fill, chain)

    @staticmethod
    def _with_stored(model: Model, cursor: Cursor, held: Mapping[str, BoolArray]) -> dict[str, BoolArray]:
        """What host memory holds or storage is known to hold."""
        known = cursor.boundary
        present = {name: row.copy() for name, row in held.items()}
        for name, row in present.items():
            row[:known] |= model.index.residency(cursor, name, STORAGE, 0, known) == Residency.READY
        return present

    async def _copy(self, joint: Joint, engine: Engine, backup: Backup, job: Job) -> int:
        """One rank's part. Raises InvalidRequest when the rank does not offer what the first one did."""
        filling = await asyncio.shield(joint.planned)
        if filling.fill is None:
            return 0
        slots, seal = {}, {}
        for name, (pages, host) in filling.fill.placements.items():
            mine = backup.components.get(name)
            offered = mine.slots[np.isin(mine.pages, pages)] if mine else EMPTY_PAGES
            if len(offered) != len(pages):
                raise InvalidRequest(f"components[{name!r}]: every rank of a group must offer the same pages")
            slots[name] = offered, host
            seal[name] = filling.fill.hashes[name], pages
        return await self._copier.copy(Direction.STORE, engine, slots, job, seal=seal, ready=backup.ready)

    async def _finish(self, joint: Joint, group: Group, backup: Backup) -> Mapping[str, BackupOutcome]:
        """Publish, or give back, when all parts are over."""
        model = group.model
        await asyncio.wait([joint.planned])
        await asyncio.wait([joint.meeting.over])
        failure = joint.meeting.over.exception()
        filling = joint.planned.result()
        if filling.fill is not None:
            none = {name: np.zeros(len(p), dtype=bool) for name, (p, _) in filling.fill.placements.items()}
            with model.because(Reason.BACKUP, backup.prompt.session_id):
                model.end_fill(filling.fill, none if failure else None)
        model.index.unpin(filling.chain)
        self._counters.backup_bytes += sum(joint.meeting.over.result())
        namespace, tokens = model.namespace(backup.prompt), model.whole_pages(backup.prompt)
        match = model.index.match(namespace, tokens)
        boundary = match.boundaries[HOST]
        model.index.touch(match.cursor, boundary)
        self._sessions.finish(model, group.group_id, backup.prompt, match.cursor, boundary)
        self._shelving.offer(model, namespace, tokens)
        if self._settings.staging:
            let_go(model, namespace, tokens)
        return {name: plan.outcome() for name, plan in filling.plans.items()}

    def _room(self, model: Model, plans: Mapping[str, Plan], salt: str) -> dict[str, SlotArray]:
        """Host slots for what the plans want, and the plans cut to what fits: whole-path components
        lose their tails (all alike), the others keep their deepest pages. What the others need at the
        prompt's end has its room before the whole path: without it the whole path serves nothing."""
        got = dict.fromkeys(plans, NO_SLOTS)
        others = [name for name in plans if not model.shelves[name].whole_path]
        whole = [name for name in plans if model.shelves[name].whole_path]
        end = max((int(plan.wanted[-1]) + 1 for plan in plans.values() if len(plan.wanted)), default=0)
        reach, reason = np.iinfo(np.int32).max, self._full

        def take(name: str, n_pages: int) -> None:
            nonlocal reason
            slots, short = self._host.take(model, name, max(0, n_pages - len(got[name])), salt)
            got[name] = np.concatenate([got[name], slots])
            reason = "quota" if short == "quota" else self._full

        for name in others:
            take(name, int((plans[name].wanted >= model.coverages[name].start(end)).sum()))
        for name in whole:
            wanted = plans[name].wanted
            take(name, int((wanted < reach).sum()))
            if len(got[name]) < len(wanted):
                reach = min(reach, int(wanted[len(got[name])]))
        for name in whole + others:  # a later whole-path component may have cut an earlier one's reach
            plan = plans[name]
            plan.keep(plan.wanted < reach, reason)
            got[name] = self._without_surplus(model, name, got[name], len(plan.wanted))
        for name in others:
            plan = plans[name]
            take(name, len(plan.wanted))
            plan.keep(np.arange(len(plan.wanted)) >= len(plan.wanted) - len(got[name]), reason)
        return got

    @staticmethod
    def _without_surplus(model: Model, name: str, slots: SlotArray, n_pages: int) -> SlotArray:
        model.shelves[name].arena.free(slots[n_pages:])
        return slots[:n_pages]

    def _count(self, plans: Mapping[str, Plan]) -> None:
        for plan in plans.values():
            self._counters.backup_stored_pages += len(plan.wanted)
            self._counters.backup_present_pages += plan.present_pages
            self._counters.backup_refused_host_full_pages += plan.refused["host_full"]
            self._counters.backup_refused_staging_full_pages += plan.refused["staging_full"]
            self._counters.backup_refused_no_storage_pages += plan.refused["no_storage"]
            self._counters.backup_refused_quota_pages += plan.refused["quota"]
            self._counters.backup_refused_chain_broken_pages += plan.refused["chain_broken"]
