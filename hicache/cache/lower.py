"""LowerTiers: what the cache needs from whoever keeps L2 and L3. `hicache.client.Client` is it in earnest;
tests have their own. Contract only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hicache.client.messages import (
    BackupOutcome,
    Found,
    LayerCells,
    Lease,
    Placement,
    PrefetchPolicy,
    Progress,
    Prompt,
)
from hicache.client.tickets import Outcome
from hicache.core.words import BoolArray


class Transfer(Protocol):
    """A load or a backup under way; see `hicache.client.Ticket`."""

    @property
    def outcome(self) -> Outcome: ...

    @property
    def backup_outcomes(self) -> Mapping[str, BackupOutcome]: ...

    def wait(self, timeout_s: float) -> Outcome: ...

    def settled(self) -> bool: ...


class PrefetchUnderWay(Protocol):
    """A prefetch under way; see `hicache.client.Prefetching`."""

    @property
    def boundary_before(self) -> int | None: ...

    def wait(self, timeout_s: float) -> Progress | None: ...

    def cancel(self) -> None: ...


class LowerTiers(Protocol):
    """Every verb returns by its deadline and raises nothing for trouble down there."""

    @property
    def ready(self) -> bool:
        """Whether asking is worth it."""

    @property
    def epoch(self) -> int:
        """Changes whenever what was in host memory is gone."""

    def lookup(
        self, prompt: Prompt, *, device: Mapping[str, BoolArray], limit_pages: int, timeout_s: float
    ) -> Found | None: ...

    def start_load(
        self, lease: Lease, placements: Mapping[str, Placement], *, cells: LayerCells | None = None
    ) -> Transfer: ...

    def start_backup(self, prompt: Prompt, placements: Mapping[str, Placement]) -> Transfer: ...

    def prefetch(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        policy: PrefetchPolicy,
        timeout_s: float = 0.0,
    ) -> PrefetchUnderWay | None: ...

    def release(self, lease: Lease) -> None:
        """Give up a lease; one of an earlier attachment has ended already."""

    def close(self) -> None: ...
