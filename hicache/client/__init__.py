"""How an engine talks to the daemon: shared L1 memory, one Attach stream, verbs that return at a deadline.

Never raises the daemon's trouble into the engine: what cannot be had in time reads as a miss.
"""

from hicache.client.aio import AsyncClient
from hicache.client.client import Client
from hicache.client.cuda import CudaRegion, ReadyRing, StreamCells
from hicache.client.layers import LayerBoard, LayerRow
from hicache.client.messages import (
    BackupOutcome,
    Found,
    LayerCells,
    Lease,
    Placement,
    PrefetchPolicy,
    PrefetchState,
    Progress,
    Prompt,
    RankPlace,
    ReadyEvent,
)
from hicache.client.on_stream import OnStream
from hicache.client.prefetching import Prefetching
from hicache.client.regions import SharedRegion
from hicache.client.tickets import Outcome, Ticket

__all__ = [
    "AsyncClient",
    "BackupOutcome",
    "Client",
    "CudaRegion",
    "Found",
    "LayerBoard",
    "LayerCells",
    "LayerRow",
    "Lease",
    "OnStream",
    "Outcome",
    "Placement",
    "PrefetchPolicy",
    "PrefetchState",
    "Prefetching",
    "Progress",
    "Prompt",
    "RankPlace",
    "ReadyEvent",
    "ReadyRing",
    "SharedRegion",
    "StreamCells",
    "Ticket",
]
