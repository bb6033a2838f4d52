"""What callers ask the controller and what it answers, in our own frozen types.

The service parses the wire into these once; the controller never sees protobuf. Holds no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hicache.core.layout import Layout
from hicache.core.words import BoolArray, PageArray, SlotArray, TokenArray


class RequestError(Exception):
    """A request that is refused before any side effect. The message names the field and the remedy."""


class InvalidRequest(RequestError):  # noqa: N818 - the name is what it is
    """Malformed or contradictory: sending it again cannot help."""


class UnknownEngine(RequestError):  # noqa: N818
    """The engine is not attached to this boot of the daemon: attach, then ask again."""


class Gone(RequestError):  # noqa: N818
    """A lease or prefetch that does not exist, has ended, or belongs to another engine."""


class Incomplete(RequestError):  # noqa: N818
    """A group of which some rank is not attached: ask again when it is whole."""


class Busy(RequestError):  # noqa: N818
    """No room for this now; a later try may succeed."""


class Refused(RequestError):  # noqa: N818
    """As things stand this is not done; the text says what stands in the way. Nothing has changed."""


class TransferFailed(RequestError):  # noqa: N818
    """Bytes could not be moved; nothing was published and nothing may be used."""


@dataclass(frozen=True)
class MappedRegion:
    """One region of an engine's memory as this process sees it."""

    address: int
    nbytes: int
    on_device: bool = False
    """A GPU's memory: only copy engines of that device may touch it."""


@dataclass(frozen=True)
class ReadyEvent:
    """A CUDA event of the engine (IPC handle), on a device (UUID): recorded before the engine asked; its
    slots may be touched when it has happened."""

    device: bytes
    handle: bytes


@dataclass(frozen=True)
class LayerCells:
    """Where to say which layers of a load have landed: cell i, a uint64 at `offset + 8 * i` of a region in
    host memory, is set to `value` when every byte of layer i is in the engine's slots."""

    region: int
    offset: int
    value: int


@dataclass(frozen=True)
class EngineSpec:
    """What an engine says of itself when it attaches. Its regions are mapped already; whoever attached
    it unmaps them after `HybridCacheController.detach` has returned."""

    engine_id: str
    model: str
    revision: str
    layout: Layout
    regions: tuple[MappedRegion, ...]
    group_id: str = ""
    """Ranks of one tensor-parallel engine name the same group; empty for an engine of one rank."""
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Prompt:
    """Who asks, and about which prompt."""

    engine_id: str
    request_id: str
    tokens: TokenArray
    adapter: str = ""
    salt: str = ""
    session_id: str = ""
    """The conversation that this is a turn of; empty for none."""
    session_generation: int = 0


@dataclass(frozen=True)
class CloseSession:
    engine_id: str
    session_id: str
    session_generation: int = 0
    salt: str = ""


@dataclass(frozen=True)
class Lookup:
    prompt: Prompt
    device: Mapping[str, BoolArray] = field(default_factory=dict)
    """Per component, which pages the engine holds READY in L1; missing pages are absent."""
    limit_pages: int = 0
    """Deepest boundary wanted; 0 for no limit."""


@dataclass(frozen=True)
class Found:
    lease_id: str
    """Empty when nothing needs loading."""
    boundary: int
    """Pages; joint over L1 and L2."""
    load: Mapping[str, PageArray]
    """Per component, the pages to load from host so that the boundary can be used."""
    storage_boundary: int
    """The same with what is known to be in storage."""
    matched_pages: int
    branching_boundary: int
    """Deepest boundary that the whole-path components alone reach."""
    lease_s: float


class PrefetchPolicy(Enum):
    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(frozen=True)
class Prefetch:
    lookup: Lookup
    policy: PrefetchPolicy
    timeout_s: float = 0.0
    """For TIMEOUT; 0 means by configuration."""


class PrefetchState(Enum):
    PLANNING = "planning"
    READING = "reading"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """How a prefetch stands; see PrefetchProgress in the wire contract."""

    state: PrefetchState
    boundary: int
    storage_boundary: int
    arrived_pages: int
    wanted_pages: int
    reason: str = ""


@dataclass(frozen=True)
class Placement:
    """Pages of one component and the engine's slots for them: equal lengths, pages ascending."""

    pages: PageArray
    slots: SlotArray


@dataclass(frozen=True)
class Load:
    engine_id: str
    lease_id: str
    components: Mapping[str, Placement]
    ready: ReadyEvent | None = None
    cells: LayerCells | None = None


@dataclass(frozen=True)
class Backup:
    prompt: Prompt
    components: Mapping[str, Placement]
    ready: ReadyEvent | None = None


@dataclass(frozen=True)
class BackupOutcome:
    """What a backup did for one component, in pages."""

    stored_pages: int
    present_pages: int
    refused_pages: int
    reason: str = ""


@dataclass(frozen=True)
class Retain:
    """A prefix to keep in host memory. The model is an engine's, or named."""

    tokens: TokenArray
    keep_s: float
    """How long after its last hit."""
    host_share: float = 0.0
    """Most of host memory that it may take; 0 for as much as all pins together may."""
    engine_id: str = ""
    model: str = ""
    revision: str = ""
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True)
class Retained:
    """What is kept of a prefix."""

    pin_id: str
    """Empty when nothing is kept."""
    model: str
    kept_pages: int
    """The boundary up to which it is kept."""
    asked_pages: int
    nbytes: int
    left_s: float
    reason: str
    """Why less than asked: budget, or not_in_host_memory."""


@dataclass(frozen=True)
class EngineStatus:
    engine_id: str
    model: str
    attached_s: float
    leases: int
    jobs: int


@dataclass(frozen=True)
class PoolStatus:
    model: str
    component: str
    frame_bytes: int
    resident_pages: int
    inbound_pages: int
    pinned_pages: int
    stored_pages: int


@dataclass(frozen=True)
class BackendStatus:
    name: str
    kind: str
    healthy: bool
    problem: str
    n_objects: int
    used_bytes: int
    capacity_bytes: int
    queued_writes: int
    queued_bytes: int
    read: bool
    write: bool
    breaker: str
    """closed: asked as usual; open: not asked; half_open: tried."""
    off: tuple[str, ...]
    """What it does not do, and why: each begins with the capability."""


@dataclass(frozen=True)
class Status:
    problems: tuple[str, ...]
    engines: tuple[EngineStatus, ...]
    pools: tuple[PoolStatus, ...]
    backends: tuple[BackendStatus, ...]
    counters: Mapping[str, int]
    host_used_bytes: int
    host_capacity_bytes: int
    retained: tuple[Retained, ...] = ()
    running_prefetches: int = 0
    open_sessions: int = 0


EMPTY_PAGES: PageArray = np.empty(0, dtype=np.int32)
