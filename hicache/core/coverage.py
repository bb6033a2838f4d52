"""Coverage: which pages a component needs so that a prompt may be reused at a boundary.

This is the only place where kinds of state differ. Matching, pinning, eviction, prefetch and
load-back all follow from `Coverage.start`; the index itself names no component.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache.core.words import BoolArray


class Coverage(ABC):
    """The rule of one kind of state: to be reused at boundary b it needs the pages [start(b), b)."""

    @abstractmethod
    def start(self, boundary: int) -> int:
        """First page needed at `boundary` (in pages, >= 1). Never decreases as the boundary grows,
        and is below the boundary."""

    @property
    def whole_path(self) -> bool:
        """Whether every boundary needs every page before it, so that only tails can be given up."""
        return False


@dataclass(frozen=True)
class WholePath(Coverage):
    """FULL attention: every page of the path."""

    def start(self, boundary: int) -> int:
        return 0

    @property
    def whole_path(self) -> bool:
        return True


@dataclass(frozen=True)
class SlidingWindow(Coverage):
    """Sliding-window attention: the trailing window."""

    window_pages: int

    def start(self, boundary: int) -> int:
        return max(0, boundary - self.window_pages)


@dataclass(frozen=True)
class Checkpoint(Coverage):
    """Recurrent state: the checkpoint taken after the last page before the boundary."""

    def start(self, boundary: int) -> int:
        return boundary - 1


@dataclass(frozen=True)
class Chunked(Coverage):
    """Chunked attention: the pages since the chunk began."""

    chunk_pages: int

    def start(self, boundary: int) -> int:
        return (boundary - 1) // self.chunk_pages * self.chunk_pages


@dataclass(frozen=True)
class Component:
    """One kind of state with its own reuse rule."""

    name: str
    coverage: Coverage


def joint_boundary(coverages: Sequence[Coverage], available: Sequence[BoolArray], limit: int) -> int:
    """The deepest boundary <= `limit` (pages) at which every component's coverage is available.

    `available[i]` says for each page whether component i can be read; it may be shorter than the
    limit, pages beyond it are missing. If page m is the last missing page of a coverage [lo, b), no
    boundary in (m, b] can be valid because `start` never decreases: go on with b = m.
    """
    limit = min([limit, *(len(a) for a in available)])
    missing = [np.flatnonzero(~a[:limit]) for a in available]
    boundary, settled = limit, False
    while boundary and not settled:
        settled = True
        for coverage, gaps in zip(coverages, missing, strict=True):
            before = int(np.searchsorted(gaps, boundary))
            if before and gaps[before - 1] >= coverage.start(boundary):
                boundary, settled = int(gaps[before - 1]), False
                if not boundary:
                    break
    return boundary
