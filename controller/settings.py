"""What the controller can be told: one frozen value, filled by the daemon's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostShares:
    """Who is sure of what, and who may have what at most."""

    floors: Mapping[str, float] = field(default_factory=dict)
    """Component -> part of host memory that others never take from it."""
    quotas_bytes: Mapping[str, int] = field(default_factory=dict)
    """Salt -> most bytes of host memory."""


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """Times in seconds, sizes in bytes. Bounds are checked where the configuration is parsed."""

    lease_s: float = 30.0
    """How long a lookup's pages stay pinned when nobody releases them."""
    host_shares: HostShares = HostShares()
    staging: bool = False
    """Host memory is a ring between engines and storage, not a cache."""
    retain_share: float = 0.5
    """Largest part of host memory that pinned prefixes may hold."""
    events_pages: int = 65_536
    """Pages whose coming and going can be read again; 0 for no events."""
    copy_timeout_s: float = 10.0
    """Longest time a load-back or backup may take between L1 and L2, queueing included."""
    storage_prefix: str = "hicache"
    """First part of every storage key."""
    storage_timeout_s: float = 2.0
    """Longest time one batch may take in storage."""
    storage_batch_bytes: int = 16 * MIB
    """Most bytes in one storage batch."""
    write_queue_bytes: int = 256 * MIB
    """Most bytes waiting to be written to storage; beyond it writes are dropped and counted."""
    write_attempts: int = 5
    """How often one frame's write is tried before it is given up."""
    prefetch_threshold_pages: int = 1
    """A prefetch that would deepen the boundary by less than this is not worth its reads."""
    prefetch_base_s: float = 1.0
    prefetch_per_1k_tokens_s: float = 0.25
    prefetch_max_s: float = 30.0
    """A prefetch's deadline: base + 1024-token steps, at most the maximum; covers queueing, the
    existence query and every component."""
    prefetch_host_share: float = 0.5
    """Largest part of host memory that prefetches may hold: while they run, and until the engine looks up."""
