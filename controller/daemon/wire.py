"""The wire in our own types, and back: the one place that knows protobuf's messages.

Parses once, strictly: what comes out is well formed, and bad input raises InvalidRequest naming the
field. Arrays are views of the message's bytes where possible. Knows no engine and asks nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.memory.cuda import HANDLE_BYTES, UUID_BYTES
from controller.memory.device_regions import DeviceHandle
from controller.memory.regions import RegionError
from controller.requests import (
    Backup,
    BackupOutcome,
    CloseSession,
    Found,
    InvalidRequest,
    LayerCells,
    Load,
    Lookup,
    Placement,
    Prefetch,
    PrefetchPolicy,
    PrefetchState,
    Progress,
    Prompt,
    ReadyEvent,
    Status,
)
from hicache.core.layout import ComponentSpec, Kind, Layout, LayoutError, Plane, Pool
from hicache.core.words import BoolArray, PageArray, token_array
from proto.v1 import hicache_pb2 as pb

T = TypeVar("T")
TICKET_BYTES = 16
MAX_NAME_CHARS = 512
"""Longest id or name a request may carry."""
MAX_REGIONS = 256
MAX_RANKS = 64

_KINDS: Mapping[int, Kind] = {
    pb.Component.FULL: Kind.FULL,
    pb.Component.SWA: Kind.SWA,
    pb.Component.MAMBA: Kind.MAMBA,
    pb.Component.CHUNKED: Kind.CHUNKED,
}
_POLICIES: Mapping[int, PrefetchPolicy] = {
    pb.BEST_EFFORT: PrefetchPolicy.BEST_EFFORT,
    pb.WAIT_COMPLETE: PrefetchPolicy.WAIT_COMPLETE,
    pb.TIMEOUT: PrefetchPolicy.TIMEOUT,
}
_STATES: Mapping[PrefetchState, pb.PrefetchProgress.State] = {
    PrefetchState.PLANNING: pb.PrefetchProgress.PLANNING,
    PrefetchState.READING: pb.PrefetchProgress.READING,
    PrefetchState.DONE: pb.PrefetchProgress.DONE,
    PrefetchState.CANCELLED: pb.PrefetchProgress.CANCELLED,
    PrefetchState.FAILED: pb.PrefetchProgress.FAILED,
}


@dataclass(frozen=True)
class RegionTicket:
    """A region named by the ticket under which its descriptor was handed over."""

    ticket: bytes
    nbytes: int


@dataclass(frozen=True)
class Registration:
    """What an engine says when it attaches; its regions are not mapped yet."""

    engine_id: str
    model: str
    revision: str
    layout: Layout
    regions: tuple[RegionTicket | DeviceHandle, ...]
    group_id: str = ""
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class DaemonStatus:
    """The daemon's own part of a status answer, beside the controller's."""

    version: str
    boot_id: str
    uptime_s: float
    ready: bool
    progress: str
    problems: tuple[str, ...]
    """The controller's problems and the daemon's own."""
    counters: Mapping[str, int]
    """The controller's counters and the daemon's own."""
    controller: Status


# ---- from the wire ----------------------------------------------------------------------------------


def registration(message: pb.Registration) -> Registration:
    """Parse and check a registration, its layout against the sizes of its regions included."""
    regions = tuple(
        _region(region, f"registration.regions[{i}]")
        for i, region in enumerate(_bounded(message.regions, MAX_REGIONS, "registration.regions"))
    )
    tickets = [region.ticket for region in regions if isinstance(region, RegionTicket)]
    if len(set(tickets)) != len(tickets):
        raise InvalidRequest("registration.regions: a ticket is named twice; each region has its own")
    layout = _layout(message.layout)
    try:
        layout.validate([region.nbytes for region in regions])
    except LayoutError as error:
        raise InvalidRequest(f"registration.{error}") from error
    return Registration(
        engine_id=required(message.engine_id, "registration.engine_id"),
        model=required(message.model, "registration.model"),
        revision=checked_name(message.revision, "registration.revision"),
        layout=layout,
        regions=regions,
        group_id=checked_name(message.group_id, "registration.group_id"),
        rank=message.rank,
        ranks=_ranks(message),
    )


def _region(message: pb.Region, where: str) -> RegionTicket | DeviceHandle:
    if message.nbytes < 1:
        raise InvalidRequest(f"{where}.nbytes: 0; give the region's size")
    if message.WhichOneof("memory") == "cuda":
        cuda = message.cuda
        try:
            return DeviceHandle(cuda.handle, cuda.offset, message.nbytes, cuda.device_uuid)
        except RegionError as error:
            raise InvalidRequest(f"{where}.{error}") from error
    if len(message.ticket) != TICKET_BYTES:
        raise InvalidRequest(f"{where}.ticket: {len(message.ticket)} bytes; a ticket has {TICKET_BYTES}")
    return RegionTicket(message.ticket, message.nbytes)


def _ranks(message: pb.Registration) -> int:
    ranks = message.ranks or 1
    if ranks > MAX_RANKS or message.rank >= ranks or (ranks > 1 and not message.group_id):
        raise InvalidRequest(
            f"registration.ranks: rank {message.rank} of {ranks} in group {message.group_id!r}; give a "
            f"group, at most {MAX_RANKS} ranks, and a rank below their number"
        )
    return ranks


def lookup(message: pb.LookupPrefixRequest, engine_id: str) -> Lookup:
    return Lookup(_prompt(message.prompt, engine_id), _device(message.device), message.limit_pages)


def prefetch(message: pb.PrefetchRequest, engine_id: str) -> Prefetch:
    policy = _POLICIES.get(message.policy)
    if policy is None:
        raise InvalidRequest(
            f"policy: {message.policy} is none of the policies; use BEST_EFFORT, WAIT_COMPLETE or TIMEOUT"
        )
    if not math.isfinite(message.timeout_s) or message.timeout_s < 0:
        raise InvalidRequest(f"timeout_s: {message.timeout_s}; give seconds >= 0, 0 for the daemon's own")
    wanted = Lookup(_prompt(message.prompt, engine_id), _device(message.device), message.limit_pages)
    return Prefetch(wanted, policy, message.timeout_s)


def load(message: pb.LoadRequest, engine_id: str) -> Load:
    lease_id = required(message.lease_id, "lease_id")
    cells = None
    if message.HasField("cells"):
        if message.cells.offset % 8:
            raise InvalidRequest(f"cells.offset: {message.cells.offset}; give a multiple of 8")
        cells = LayerCells(message.cells.region, message.cells.offset, message.cells.value)
    return Load(engine_id, lease_id, _placements(message.components), _ready(message), cells)


def backup(message: pb.BackupRequest, engine_id: str) -> Backup:
    placements = _placements(message.components)
    return Backup(_prompt(message.prompt, engine_id), placements, _ready(message))


def close_session(message: pb.CloseSessionRequest, engine_id: str) -> CloseSession:
    session_id = required(message.session_id, "session_id")
    salt = checked_name(message.salt, "salt")
    return CloseSession(engine_id, session_id, message.session_generation, salt)


def _ready(message: pb.LoadRequest | pb.BackupRequest) -> ReadyEvent | None:
    if not message.HasField("ready"):
        return None
    handle, device = message.ready.handle, message.ready.device_uuid
    if len(handle) != HANDLE_BYTES or len(device) != UUID_BYTES:
        raise InvalidRequest(
            f"ready: a handle of {len(handle)} bytes on a device of {len(device)}; "
            f"a CUDA IPC handle has {HANDLE_BYTES}, a device UUID {UUID_BYTES}"
        )
    return ReadyEvent(device, handle)


def required(text: str, field: str) -> str:
    """A name that must be there."""
    if not text:
        raise InvalidRequest(f"{field}: empty; it is required")
    return checked_name(text, field)


def checked_name(text: str, field: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{field}: {len(text)} characters; use at most {MAX_NAME_CHARS}")
    return text


def _prompt(message: pb.Prompt, engine_id: str) -> Prompt:
    try:
        tokens = token_array(message.tokens)
    except ValueError as error:
        raise InvalidRequest(f"prompt.{error}") from error
    return Prompt(
        engine_id=engine_id,
        request_id=checked_name(message.request_id, "prompt.request_id"),
        tokens=tokens,
        adapter=checked_name(message.adapter, "prompt.adapter"),
        salt=checked_name(message.salt, "prompt.salt"),
        session_id=checked_name(message.session_id, "prompt.session_id"),
        session_generation=message.session_generation,
    )


def _device(messages: Sequence[pb.ComponentResidency]) -> Mapping[str, BoolArray]:
    found: dict[str, BoolArray] = {}
    for message in messages:
        component = _component(message.component, found, "device")
        packed = np.frombuffer(message.resident, dtype=np.uint8)
        found[component] = np.unpackbits(packed, bitorder="little").view(np.bool_)
    return found


def _placements(messages: Sequence[pb.ComponentSlots]) -> Mapping[str, Placement]:
    found: dict[str, Placement] = {}
    for message in messages:
        component = _component(message.component, found, "components")
        where = f"components[{component!r}]"
        pages = _numbers(message.pages, f"{where}.pages")
        slots = _numbers(message.slots, f"{where}.slots")
        if len(pages) != len(slots):
            raise InvalidRequest(f"{where}: {len(pages)} pages and {len(slots)} slots; give one slot a page")
        if len(pages) > 1 and not bool((pages[1:] > pages[:-1]).all()):
            raise InvalidRequest(f"{where}.pages: not ascending; sort them and name each page once")
        found[component] = Placement(pages, slots)
    return found


def _component(name: str, found: Mapping[str, object], field: str) -> str:
    component = required(name, f"{field}[{len(found)}].component")
    if component in found:
        raise InvalidRequest(f"{field}[{component!r}]: named twice; name each component once")
    return component


def _numbers(packed: bytes, field: str) -> NDArray[np.int32]:
    if len(packed) % 4:
        raise InvalidRequest(
            f"{field}: {len(packed)} bytes is not a multiple of 4; send packed little-endian int32"
        )
    numbers = np.frombuffer(packed, dtype="<i4")
    if numbers.size and int(numbers.min()) < 0:
        raise InvalidRequest(f"{field}: {int(numbers.min())} is negative; number from 0")
    return numbers


def _layout(message: pb.Layout) -> Layout:
    return Layout(
        page_size=message.page_size,
        components=tuple(
            ComponentSpec(one.name, _kind(one), one.tokens)
            for one in _bounded(message.components, 64, "registration.layout.components")
        ),
        pools=tuple(_pool(pool) for pool in _bounded(message.pools, 256, "registration.layout.pools")),
    )


def _pool(message: pb.Pool) -> Pool:
    where = f"registration.layout.pools[{message.name!r}]"
    return Pool(
        name=required(message.name, "registration.layout.pools.name"),
        component=message.component,
        n_slots=message.n_slots,
        planes=tuple(
            Plane(plane.region, plane.offset, plane.stride, plane.nbytes, plane.layer)
            for plane in _bounded(message.planes, 8192, f"{where}.planes")
        ),
        format=checked_name(message.format, f"{where}.format"),
        replicated=message.replicated,
    )


def _kind(message: pb.Component) -> Kind:
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequest(
            f"registration.layout.components[{message.name!r}].kind: {message.kind}; "
            "use FULL, SWA, MAMBA or CHUNKED"
        )
    return kind


def _bounded(items: Sequence[T], most: int, field: str) -> Sequence[T]:
    if len(items) > most:
        raise InvalidRequest(f"{field}: {len(items)} entries; at most {most} are accepted")
    return items


# ---- to the wire ------------------------------------------------------------------------------------


def found_reply(found: Found) -> pb.LookupPrefixReply:
    return pb.LookupPrefixReply(
        lease_id=found.lease_id,
        boundary=found.boundary,
        load=[pb.ComponentPages(component=name, pages=packed(pages)) for name, pages in found.load.items()],
        storage_boundary=found.storage_boundary,
        matched_pages=found.matched_pages,
        branching_boundary=found.branching_boundary,
        lease_s=found.lease_s,
    )


def progress_reply(progress: Progress) -> pb.PrefetchProgress:
    return pb.PrefetchProgress(
        state=_STATES[progress.state],
        boundary=progress.boundary,
        storage_boundary=progress.storage_boundary,
        arrived_pages=progress.arrived_pages,
        wanted_pages=progress.wanted_pages,
        reason=progress.reason,
    )


def backup_reply(outcomes: Mapping[str, BackupOutcome]) -> pb.BackupReply:
    return pb.BackupReply(
        outcomes=[
            pb.BackupReply.Outcome(
                component=name,
                stored_pages=outcome.stored_pages,
                present_pages=outcome.present_pages,
                refused_pages=outcome.refused_pages,
                reason=outcome.reason,
            )
            for name, outcome in outcomes.items()
        ]
    )


def packed(numbers: PageArray) -> bytes:
    """An array as the wire has it: little-endian int32."""
    return np.ascontiguousarray(numbers, dtype="<i4").tobytes()


def status_reply(daemon: DaemonStatus) -> pb.StatusReply:
    status = daemon.controller
    return pb.StatusReply(
        version=daemon.version,
        boot_id=daemon.boot_id,
        uptime_s=daemon.uptime_s,
        ready=daemon.ready,
        progress=daemon.progress,
        problems=daemon.problems,
        counters=daemon.counters,
        host_used_bytes=status.host_used_bytes,
        host_capacity_bytes=status.host_capacity_bytes,
        engines=_copied(pb.EngineStatus, status.engines),
        pools=_copied(pb.PoolStatus, status.pools),
        backends=_copied(pb.BackendStatus, status.backends),
        retained=_copied(pb.Retained, status.retained),
        running_prefetches=status.running_prefetches,
        open_sessions=status.open_sessions,
    )


def _copied(message: Callable[..., T], items: Iterable[object]) -> list[T]:
    """Status entries have the same field names on both sides (a test compares them)."""
    return [message(**vars(item)) for item in items]
