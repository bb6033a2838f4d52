"""What an engine asks the daemon and what it is told, in plain frozen types.

Holds no behaviour; `hicache.client.wire` alone turns these into protobuf and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hicache.core.words import PageArray, SlotArray, TokenArray


@dataclass(frozen=True)
class RankPlace:
    """Which rank of which tensor-parallel group this process is; by default an engine of its own."""

    group_id: str = ""
    rank: int = 0
    ranks: int = 1


ALONE = RankPlace()


@dataclass(frozen=True, eq=False)
class Prompt:
    """About which prompt a verb is, and for whom."""

    request_id: str
    tokens: TokenArray
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, eq=False)
class Placement:
    """Pages of one component and the engine's slots for them: equal lengths, pages ascending."""

    pages: PageArray
    slots: SlotArray


@dataclass(frozen=True)
class ReadyEvent:
    """A CUDA event, recorded on the engine's stream before a transfer is asked for: the daemon touches the
    slots when it has happened. Leave it unrecorded until the ticket is settled. See hicache.client.cuda."""

    handle: bytes
    """For other processes: 64 bytes, as from `torch.cuda.Event(interprocess=True).ipc_handle()`."""
    device_uuid: bytes
    """16 bytes."""


@dataclass(frozen=True)
class LayerCells:
    """Where the daemon says which layers of a load have landed. See hicache.client.layers."""

    region: int
    """Which of the client's regions; one in host memory."""
    offset: int
    value: int


@dataclass(frozen=True)
class Lease:
    """Pages held in host memory for the engine. It ends with the attachment under which it was given."""

    lease_id: str
    attachment: int


@dataclass(frozen=True, eq=False)
class Found:
    """What a lookup found."""

    lease: Lease | None
    """Holds the pages of `load` in host memory; None when nothing needs loading. Release it."""
    boundary: int
    """Pages; joint over L1, as the lookup described it, and L2."""
    load: Mapping[str, PageArray]
    """Per component, the pages to load from host so that the boundary can be used."""
    storage_boundary: int
    """The same with what is known to be in storage."""
    branching_boundary: int
    """Deepest boundary that the whole-path components alone reach."""


class PrefetchPolicy(Enum):
    """How long a prefetch may be waited for."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class PrefetchState(Enum):
    PLANNING = "planning"
    READING = "reading"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Progress:
    """How a prefetch stands: boundaries in pages, counts in frames."""

    state: PrefetchState
    boundary: int
    storage_boundary: int
    arrived_pages: int
    wanted_pages: int
    reason: str


@dataclass(frozen=True)
class BackupOutcome:
    """What a backup did for one component, in pages."""

    stored_pages: int
    present_pages: int
    refused_pages: int
    reason: str
