"""What happened, counted. Every series exists from the start, and only ever grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Pages unless the name says otherwise. A lookup's requested pages are the denominator of its hits."""

    lookups: int = 0
    lookup_requested_pages: int = 0
    lookup_hit_device_pages: int = 0
    lookup_hit_host_pages: int = 0
    lookup_miss_no_tokens: int = 0
    """Lookups whose first page nobody has ever backed up."""
    lookup_miss_coverage: int = 0
    """Lookups that ended before their known tokens because some component has no payload there."""
    loads: int = 0
    load_pages: int = 0
    load_bytes: int = 0
    load_failures: int = 0
    backups: int = 0
    backup_stored_pages: int = 0
    backup_present_pages: int = 0
    backup_refused_host_full_pages: int = 0
    backup_refused_staging_full_pages: int = 0
    """Direct mode: the ring is full of pages that storage has not taken yet."""
    backup_refused_no_storage_pages: int = 0
    """Direct mode: no storage tier takes writes."""
    backup_refused_quota_pages: int = 0
    """The tenant is at its quota, and the rest of what it holds is in use."""
    backup_refused_chain_broken_pages: int = 0
    backup_bytes: int = 0
    backup_failures: int = 0
    uncached_tail_tokens: int = 0
    host_evicted_pages: int = 0
    host_moved_pages: int = 0
    """Frames that changed their place so that free room came together."""
    storage_written_pages: int = 0
    storage_written_bytes: int = 0
    storage_write_retries: int = 0
    storage_write_dropped_queue_full_pages: int = 0
    storage_write_dropped_failed_pages: int = 0
    storage_write_dropped_full_pages: int = 0
    """Storage had no room, and made none."""
    storage_write_dropped_detached_pages: int = 0
    storage_write_skipped_pages: int = 0
    """Pages that left host memory, or were stored by someone else, before their turn came."""
    prefetches: int = 0
    prefetch_read_pages: int = 0
    prefetch_read_bytes: int = 0
    prefetch_absent_pages: int = 0
    prefetch_failed_pages: int = 0
    prefetch_corrupt_pages: int = 0
    """Frames whose header or checksum was wrong: deleted from storage, never served."""
    prefetch_cancelled: int = 0
    prefetch_below_threshold: int = 0
    prefetch_cut_host_capacity: int = 0
    prefetch_cut_deadline: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    retained: int = 0
    """Prefixes that an operator pinned."""
    retained_expired: int = 0
    retained_gave_way: int = 0
    """Pins given up because running work needed the room."""
    internal_errors: int = 0
    """Faults of our own that a last line of defence caught; the log has the trace."""

    def snapshot(self) -> Mapping[str, int]:
        return asdict(self)
