"""What the cache has counted since it was made. Only ever grows; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Plain counts. `_pages` and `_tokens` count those; the others count events."""

    begun: int = 0
    """Requests begun."""
    hit_device_pages: int = 0
    hit_host_pages: int = 0
    hit_storage_pages: int = 0
    asked_pages: int = 0
    """Pages that could have been hits: every page of every prompt but the one with its last token."""

    no_overlap: int = 0
    """Requests that got no page because no tier that answered knew their first page."""
    no_boundary: int = 0
    """Requests that got less than the whole-path components have: a checkpoint or window was missing."""

    lookups: int = 0
    """Questions to the lower tiers."""
    lookups_away: int = 0
    """Not asked: the daemon is away, or keeps others waiting."""
    lookups_unanswered: int = 0
    """Asked in vain: refused, or no answer in time."""
    lookups_inconsistent: int = 0
    """Answers that do not fit together; read as misses."""

    loads: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    """Loads that did not end by the deadline; the request went on without them."""
    loads_adopted: int = 0
    """Late loads that came to a good end and were kept for the next request."""
    loads_no_room: int = 0
    """Loads that found no free L1 slots, not even by eviction."""
    loads_under_way: int = 0
    """Requests that asked for no load because an earlier one was late and not answered yet."""
    loads_joined: int = 0
    """Requests that found a load of their pages under way, and asked for no other."""
    loads_skipped_short: int = 0
    """Not worth it: fewer tokens than `min_load_tokens`."""
    loads_skipped_slow: int = 0
    """Not worth it: computing is expected to take less time."""
    loaded_pages: int = 0
    """Of all components."""

    prefetches: int = 0
    prefetches_unanswered: int = 0
    prefetches_again: int = 0
    """Requests that found less than their prefetch had promised, and fetched once more."""

    backups: int = 0
    backups_failed: int = 0
    backups_put_off: int = 0
    """Insertions whose backup had to wait for room in the allowed share, or for the daemon."""
    backups_forgotten: int = 0
    """Put off, and pushed out of the waiting list by later ones."""
    backed_up_pages: int = 0
    present_pages: int = 0
    """Offered, and already in host memory."""
    refused_pages: int = 0
    backup_waits: int = 0
    """Times that a call waited for a backup, because pages had to go (write-back)."""
    dropped_refused_pages: int = 0
    """Dropped without backup: they had to go, and the host had no room for them, or could not copy them."""
    dropped_away_pages: int = 0
    """Dropped without backup: they had to go while the daemon was away, or kept others waiting."""

    inserted_pages: int = 0
    """Of all components; redundant ones are not counted."""
    redundant_pages: int = 0
    evicted_pages: int = 0
    allocations_failed: int = 0
    checkpoints_skipped: int = 0
    """Checkpoints not taken because no slot was to be had."""
    uncached_tail_tokens: int = 0
    """Tokens of finished requests beyond their last whole page."""
