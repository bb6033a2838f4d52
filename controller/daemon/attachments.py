"""The engines' lives: who is attached, with which mapped memory, and the orderly end of each.

An attachment begins when its registration is accepted and ends once, for one reason. Ending drains the
engine's jobs in the controller, then unmaps its memory, and waits for nobody else. Nothing is unmapped
while a byte may still move. Reads and writes no stream.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeVar

import structlog

from controller.daemon.faults import Faults
from controller.daemon.handoff import Handoff
from controller.daemon.port import Controller, NotReady
from controller.daemon.wire import RegionTicket, Registration
from controller.memory.cuda import CudaError
from controller.memory.device_regions import DeviceHandle
from controller.memory.regions import RegionError, map_region
from controller.requests import Busy, EngineSpec, InvalidRequest, MappedRegion

T = TypeVar("T")
log = structlog.get_logger("hicache.engines")


class MappedMemory(Protocol):
    """A region of either kind, owned."""

    @property
    def mapped(self) -> MappedRegion: ...
    def close(self) -> None: ...


class Gpus(Protocol):
    """What maps engines' GPU memory. Blocks: called on threads only."""

    def open(self, handle: DeviceHandle) -> MappedMemory:
        """Raises RegionError."""

    def forget(self, engine_id: str) -> None:
        """Give back what the engine's requests have left here; its memory is closed by itself."""


class Ending(Enum):
    """Why an attachment ended."""

    LEFT = "the engine closed its stream"
    SILENT = "no heartbeat in time"
    REPLACED = "the same engine id attached again"
    STOPPING = "the daemon is stopping"
    REFUSED = "the registration was refused"


class Attachment:
    """One engine's stay. Whoever holds it asks `Attachments` to end it; `ended` says that this began,
    `closed` that its jobs are drained and its memory is given back."""

    def __init__(self, engine_id: str, heard_s: float) -> None:
        self.engine_id = engine_id
        self.heard_s = heard_s
        self.ending: Ending | None = None
        self.ended_s = 0.0
        self.ended = asyncio.Event()
        self.closed = asyncio.Event()
        self.regions: list[MappedMemory] = []
        self.in_controller = False
        self.jobs: set[asyncio.Task[object]] = set()
        """Loads and backups under way; they outlive the calls that began them."""


class Attachments:
    """All attachments of one daemon. All calls on the event loop."""

    def __init__(
        self,
        controller: Controller,
        handoff: Handoff,
        faults: Faults,
        *,
        heartbeat_timeout_s: float,
        drain_timeout_s: float,
        gpus: Gpus | None = None,
    ) -> None:
        self._controller = controller
        self._gpus = gpus
        self._faults = faults
        self._handoff = handoff
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._open: dict[str, Attachment] = {}
        self._closings: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.attached = 0
        self.ended = dict.fromkeys(Ending, 0)

    async def attach(self, wanted: Registration) -> Attachment:
        """Map the engine's memory and make it known to the controller. An earlier attachment of the
        same id is ended first, and its jobs are drained. Whatever fails leaves nothing behind."""
        fds = self._claim(wanted)
        on_gpus: dict[int, MappedMemory] = {}
        try:
            await self._map_on_gpus(wanted.regions, on_gpus)
            await self._succeed(wanted.engine_id)
            if self._stopping:
                raise NotReady("the daemon is stopping; attach again when it is back")
            return self._begin(wanted, fds, on_gpus)
        finally:
            for fd in fds.values():
                os.close(fd)
            await self._unmap(list(on_gpus.values()))

    def _begin(
        self, wanted: Registration, fds: Mapping[int, int], on_gpus: dict[int, MappedMemory]
    ) -> Attachment:
        """Decide and register in one step of the loop: nobody comes in between."""
        attachment = Attachment(wanted.engine_id, self._now_s())
        self._open[wanted.engine_id] = attachment
        try:
            for i, region in enumerate(wanted.regions):
                try:
                    memory = on_gpus.pop(i) if i in on_gpus else map_region(fds[i], region.nbytes)
                    attachment.regions.append(memory)
                except RegionError as error:
                    raise InvalidRequest(f"registration.regions[{i}]: {error}") from error
            mapped = tuple(region.mapped for region in attachment.regions)
            self._controller.attach(
                EngineSpec(
                    wanted.engine_id,
                    wanted.model,
                    wanted.revision,
                    wanted.layout,
                    mapped,
                    wanted.group_id,
                    wanted.rank,
                    wanted.ranks,
                )
            )
            attachment.in_controller = True
        finally:
            if not attachment.in_controller:
                self.end(attachment, Ending.REFUSED)
        self.attached += 1
        self._watch(attachment, self._now_s())
        log.info("engine_attached", engine=wanted.engine_id, model=wanted.model, regions=len(mapped))
        return attachment

    def heard(self, attachment: Attachment) -> None:
        """The engine gave a sign of life."""
        attachment.heard_s = self._now_s()

    def end(self, attachment: Attachment, why: Ending) -> None:
        """Begin the attachment's end; a second reason changes nothing. Returns at once."""
        if attachment.ending is not None:
            return
        attachment.ending = why
        attachment.ended_s = self._now_s()
        attachment.ended.set()
        self.ended[why] += 1
        closing = asyncio.get_running_loop().create_task(self._close(attachment))
        self._closings.add(closing)
        closing.add_done_callback(self._closed)

    async def end_all(self, timeout_s: float) -> bool:
        """Refuse further engines, end all attachments, and wait for that; False when time ran out."""
        self._stopping = True
        for attachment in list(self._open.values()):
            self.end(attachment, Ending.STOPPING)
        if not self._closings:
            return True
        _, late = await asyncio.wait(self._closings, timeout=timeout_s)
        return not late

    async def to_the_end(self, engine_id: str, job: Coroutine[object, object, T]) -> T:
        """Run a job that moves bytes. When the caller is cancelled the job goes on, and the engine's end
        waits for it."""
        task = asyncio.get_running_loop().create_task(job)
        if attachment := self._open.get(engine_id):
            attachment.jobs.add(task)
            task.add_done_callback(attachment.jobs.discard)
        task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    def problems(self) -> Iterator[str]:
        """Engines whose end takes too long."""
        for attachment in self._open.values():
            if attachment.ending is not None and self._now_s() - attachment.ended_s > self._drain_timeout_s:
                yield f"engine {attachment.engine_id}: its transfers do not end; its memory stays mapped"

    # ---- inside

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _claim(self, wanted: Registration) -> dict[int, int]:
        """The descriptors, by the numbers of their regions."""
        fds: dict[int, int] = {}
        for i, region in enumerate(wanted.regions):
            if not isinstance(region, RegionTicket):
                continue
            fd = self._handoff.claim(region.ticket)
            if fd is None:
                for claimed in fds.values():
                    os.close(claimed)
                raise InvalidRequest(
                    f"registration.regions[{i}].ticket: no descriptor waits under it; "
                    "send it on the fd socket right before attaching"
                )
            fds[i] = fd
        return fds

    async def _map_on_gpus(
        self, regions: Sequence[RegionTicket | DeviceHandle], mapped: dict[int, MappedMemory]
    ) -> None:
        """Map what lies on GPUs, by the numbers of the regions. What is in `mapped` when this raises is the
        caller's to unmap."""
        for i, region in enumerate(regions):
            if isinstance(region, RegionTicket):
                continue
            if self._gpus is None:
                raise InvalidRequest(
                    f"registration.regions[{i}].cuda: this daemon uses no GPU; start it with access to the "
                    "engine's, or with transfers.engine other than cpu"
                )
            opening = asyncio.ensure_future(asyncio.to_thread(self._gpus.open, region))
            try:
                async with asyncio.timeout(self._drain_timeout_s):
                    mapped[i] = await asyncio.shield(opening)
            except RegionError as error:
                raise InvalidRequest(f"registration.regions[{i}].{error}") from error
            except TimeoutError:
                raise Busy(
                    f"registration.regions[{i}].cuda: not mapped after {self._drain_timeout_s} s; the GPU's "
                    "driver is busy or stuck; attach again"
                ) from None
            finally:
                if i not in mapped:
                    opening.add_done_callback(self._unmap_late)

    def _unmap_late(self, opening: asyncio.Future[MappedMemory]) -> None:
        """Nobody waits for this mapping any more."""
        if not opening.cancelled() and opening.exception() is None:
            unmapping = asyncio.ensure_future(self._unmap([opening.result()]))
            self._closings.add(unmapping)
            unmapping.add_done_callback(self._closed)

    async def _unmap(self, regions: Sequence[MappedMemory]) -> None:
        """Gigabytes of page tables take a while to give back: done on a thread of its own."""
        for region in regions:
            try:
                await asyncio.to_thread(region.close)
            except CudaError as error:
                self._faults.caught("unmap", error)

    async def _succeed(self, engine_id: str) -> None:
        """End earlier attachments of this id and wait until their jobs are drained."""
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while (earlier := self._open.get(engine_id)) is not None:
                    self.end(earlier, Ending.REPLACED)
                    await earlier.closed.wait()
        except TimeoutError:
            raise Busy(
                f"registration.engine_id: transfers of the earlier {engine_id!r} have not ended after "
                f"{self._drain_timeout_s} s; attach again"
            ) from None

    def _watch(self, attachment: Attachment, due_s: float) -> None:
        """End the attachment when it has been silent for too long; otherwise look again when it could be.

        A look that comes late shows that this process itself stood still: what the engine said meanwhile
        is not read yet, so it gets its time anew."""
        if self._now_s() - due_s > self._heartbeat_timeout_s / 4:
            self.heard(attachment)
        left_s = attachment.heard_s + self._heartbeat_timeout_s - self._now_s()
        if left_s <= 0:
            log.warning("engine_silent", engine=attachment.engine_id, after_s=self._heartbeat_timeout_s)
            self.end(attachment, Ending.SILENT)
        elif attachment.ending is None:
            due_s = self._now_s() + left_s
            asyncio.get_running_loop().call_at(due_s, self._watch, attachment, due_s)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        if not closing.cancelled() and (error := closing.exception()):
            self._faults.caught("detach", error)

    async def _close(self, attachment: Attachment) -> None:
        """Drain, then unmap. If draining fails the memory stays mapped: better a leak than stray bytes."""
        if attachment.in_controller:
            await self._controller.detach(attachment.engine_id)
        if attachment.jobs:
            await asyncio.wait(attachment.jobs)
        if self._gpus is not None:
            await asyncio.to_thread(self._gpus.forget, attachment.engine_id)
        del self._open[attachment.engine_id]
        attachment.closed.set()
        regions, attachment.regions = attachment.regions, []
        if regions:
            await self._unmap(regions)
        if attachment.in_controller:
            log.info("engine_detached", engine=attachment.engine_id, why=_text(attachment.ending))


def _text(ending: Ending | None) -> str:
    return ending.value if ending else ""


def _retrieve(task: asyncio.Task[T]) -> None:
    """A job whose caller has gone may fail unseen; the controller has counted the failure."""
    if not task.cancelled():
        task.exception()
