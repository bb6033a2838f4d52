"""Storage as the controller uses it: the stack of tiers, a writer for each, and how they come and go.

Attaching and detaching at run time changes who is asked, never what a page is called or what the index
holds of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from controller.counters import Counters
from controller.events import Reason
from controller.host import HostMemory
from controller.models import STORAGE, Model
from controller.requests import BackendStatus, Busy, Gone, InvalidRequest
from controller.settings import ControllerSettings
from controller.staging import Hold, Staged
from controller.storage import Member, StorageStack, StorageTier, TierPolicy
from controller.storage.breaker import FIRST_PAUSE_S, BreakerState
from controller.transfers.jobs import JobTable
from controller.writer import Due, Frame, StorageWriter, due_frames
from hicache.core.identity import Namespace
from hicache.core.words import TokenArray


@dataclass(frozen=True)
class Served:
    """One tier with its writer."""

    member: Member
    writer: StorageWriter
    tasks: tuple[asyncio.Task[None], ...]
    """Writing what is due, and trying a tier whose breaker is open."""


class Shelving:
    """All storage of one controller."""

    def __init__(
        self,
        stack: StorageStack,
        host: HostMemory,
        jobs: JobTable,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        self.stack = stack
        self._host = host
        self._jobs = jobs
        self._settings = settings
        self._counters = counters
        self._served: dict[str, Served] = {}

    def offer(self, model: Model, namespace: Namespace, tokens: TokenArray) -> None:
        """Write to every writable tier, in due time, what of this path is in host memory and not stored."""
        self._offer(
            [served.writer for served in self._served.values() if served.member.policy.write],
            model,
            namespace,
            tokens,
        )

    def repair(self, model: Model, namespace: Namespace, tokens: TokenArray) -> None:
        """The same, of a path that is being asked for, to the tiers that are well: an earlier write of it may
        have failed or been dropped. In direct mode host memory has nothing that is not due already."""
        if not self._settings.staging:
            well = [
                served.writer
                for served in self._served.values()
                if served.member.policy.write and not served.member.problem
            ]
            self._offer(well, model, namespace, tokens)

    def _offer(
        self, writers: Sequence[StorageWriter], model: Model, namespace: Namespace, tokens: TokenArray
    ) -> None:
        if not writers:
            return
        frames = due_frames(model, namespace, tokens, self._settings.storage_prefix)
        if frames:
            hold = self._hold(model, namespace, tokens, frames) if self._settings.staging else None
            for writer in writers:
                writer.offer(Due(model, namespace, tokens, frames, hold))

    def _hold(self, model: Model, namespace: Namespace, tokens: TokenArray, frames: Sequence[Frame]) -> Hold:
        """Until every tier that is written to is through with these frames."""
        cursor = model.index.match(namespace, tokens).cursor
        tiers = [name for name, served in self._served.items() if served.member.policy.write]
        return Hold(model, cursor, [Staged(one.key, one.component, one.page) for one in frames], tiers)

    def attach(self, tier: StorageTier, policy: TierPolicy) -> None:
        """Take a started tier in, as the last. Raises InvalidRequest when the name is taken by another."""
        if self.stack.find(tier.name):
            raise InvalidRequest(f"name: a storage tier {tier.name!r} is attached; detach it first")
        member = self.stack.add(tier, policy)
        writer = StorageWriter(member, self._jobs, self._settings, self._counters)
        tasks = (
            asyncio.create_task(writer.run(), name=f"the writer of storage {tier.name}"),
            asyncio.create_task(self._try_for_ever(member), name=f"the probe of storage {tier.name}"),
        )
        self._served[tier.name] = Served(member, writer, tasks)

    def update(self, name: str, policy: TierPolicy) -> None:
        """Use a tier for something else from now on. Raises Gone for one that is not attached."""
        self._known(name).member.policy = policy

    async def detach(self, name: str, *, force: bool, timeout_s: float) -> StorageTier:
        """Let a tier go: nothing new is asked of it, and what is in flight ends. Returns it for its owner
        to stop. Without `force`, Busy is raised, and it stays, when it does not fall idle in time; with it,
        what is left is cut off: it ends as FAILED when the tier is stopped. Queued writes are dropped,
        counted."""
        served = self._known(name)
        served.member.leaving = True
        if not await served.member.idle(timeout_s) and not force:
            served.member.leaving = False
            raise Busy(f"storage tier {name!r} is not idle after {timeout_s} s; try again, or force it")
        self.stack.remove(name)
        del self._served[name]
        await _end(served.tasks)
        self._counters.storage_write_dropped_detached_pages += served.writer.n_queued_frames
        served.writer.abandon()
        if not len(self.stack):
            for model in self._host.models:  # what nobody can be asked for is not stored
                with model.because(Reason.DETACHED):
                    model.index.drop(STORAGE)
        return served.member.tier

    async def stop(self, drain_s: float) -> None:
        """Write what is due, within a bound, wherever the tier is well; then end the writers."""
        well = [served for served in self._served.values() if not served.member.problem]
        await asyncio.gather(*(served.writer.drained(drain_s) for served in well))
        for served in self._served.values():
            await _end(served.tasks)
            served.writer.abandon()

    @property
    def takes_writes(self) -> bool:
        """Whether some tier is written to."""
        return any(served.member.policy.write for served in self._served.values())

    async def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is due in any tier; False when the time was too short."""
        writers = [served.writer for served in self._served.values()]
        return all(await asyncio.gather(*(writer.drained(timeout_s) for writer in writers)))

    def problems(self) -> list[str]:
        found = [f"storage {one.name}: {one.problem}" for one in self.stack if one.problem]
        tasks = (task for served in self._served.values() for task in served.tasks)
        return found + [f"{task.get_name()} has died" for task in tasks if task.done()]

    def status(self) -> tuple[BackendStatus, ...]:
        return tuple(_status(served) for served in self._served.values())

    async def _try_for_ever(self, member: Member) -> None:
        """Let a tier that nobody asks show that it is well again."""
        while True:
            await asyncio.sleep(FIRST_PAUSE_S)
            if member.breaker.state is not BreakerState.CLOSED:
                probe = f"{self._settings.storage_prefix}/probe"
                await member.contains([probe], self._settings.storage_timeout_s)

    def _known(self, name: str) -> Served:
        served = self._served.get(name)
        if served is None:
            raise Gone(f"name: no storage tier {name!r} is attached; attached: {sorted(self._served)}")
        return served


async def _end(tasks: tuple[asyncio.Task[None], ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _status(served: Served) -> BackendStatus:
    tier, usage = served.member.tier, served.member.tier.usage()
    return BackendStatus(
        name=tier.name,
        kind=tier.kind,
        healthy=not served.member.problem,
        problem=served.member.problem,
        n_objects=usage.n_objects,
        used_bytes=usage.used_bytes,
        capacity_bytes=usage.capacity_bytes,
        queued_writes=served.writer.n_queued,
        queued_bytes=served.writer.queued_bytes,
        read=served.member.policy.read,
        write=served.member.policy.write,
        breaker=served.member.breaker.state.value,
        off=tuple(_off(served.member)),
    )


def _off(member: Member) -> Iterator[str]:
    if not member.policy.read:
        yield "read: switched off; frames are not looked for here"
    if not member.policy.write:
        yield "write: switched off; frames are not written here"
    if member.tier.healthy and not member.tier.usage().capacity_bytes:
        yield "usage: the backend tells no capacity; watch it where it runs"
