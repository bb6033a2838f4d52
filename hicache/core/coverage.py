"""Coverage: which pages a component needs so that a prompt may be reused at a boundary.

This is the only place where kinds of state differ. Matching, pinning, eviction, prefetch and
load-back all follow from `Coverage.start`; the index itself names no component.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.core.words import BoolArray


class Coverage(ABC):
    """The rule of one kind of state: to be reused at boundary b it needs the pages [start(b), b)."""

    @abstractmethod
    def start(self, boundary: int) -> int:
        """First page needed at `boundary` (in pages, >= 1). Never decreases as the boundary grows,
        and is below the boundary."""

    def starts(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """`start` of many boundaries at once."""
        return np.fromiter(map(self.start, boundaries.tolist()), np.int64, len(boundaries))

    @property
    def whole_path(self) -> bool:
        """Whether every boundary needs every page before it, so that only tails can be given up."""
        return False


@dataclass(frozen=True)
class WholePath(Coverage):
    """FULL attention: every page of the path."""

    def start(self, boundary: int) -> int:
        return 0

    def starts(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.zeros_like(boundaries)

    @property
    def whole_path(self) -> bool:
        return True


@dataclass(frozen=True)
class SlidingWindow(Coverage):
    """Sliding-window attention: the trailing window."""

    window_pages: int

    def start(self, boundary: int) -> int:
        return max(0, boundary - self.window_pages)

    def starts(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, boundaries - self.window_pages)


@dataclass(frozen=True)
class Checkpoint(Coverage):
    """Recurrent state: the checkpoint taken after the last page before the boundary."""

    def start(self, boundary: int) -> int:
        return boundary - 1

    def starts(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        return boundaries - 1


@dataclass(frozen=True)
class Chunked(Coverage):
    """Chunked attention: the pages since the chunk began."""

    chunk_pages: int

    def start(self, boundary: int) -> int:
        return (boundary - 1) // self.chunk_pages * self.chunk_pages

    def starts(self, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        return (boundaries - 1) // self.chunk_pages * self.chunk_pages


@dataclass(frozen=True)
class Component:
    """One kind of state with its own reuse rule."""

    name: str
    coverage: Coverage


def leading(available: BoolArray) -> int:
    """Number of pages before the first missing one."""
    first = int(available.argmin()) if len(available) else 0
    return len(available) if first == 0 and (not len(available) or available[0]) else first


def joint_boundary(coverages: Sequence[Coverage], available: Sequence[BoolArray], limit: int) -> int:
    """The deepest boundary <= `limit` (pages) at which every component's coverage is available.

    `available[i]` says for each page whether component i can be read; it may be shorter than the
    limit, pages beyond it are missing. If page m is the last missing page of a coverage, no boundary in
    (m, b] can be valid, because `start` never decreases, and the next one ends behind a page that is
    there. A few such jumps settle it as a rule; where there are many gaps all boundaries are judged at
    once.
    """
    limit = max(0, min([limit, *(len(a) for a in available)]))
    for coverage, pages in zip(coverages, available, strict=True):
        if coverage.whole_path:
            limit = leading(pages[:limit])
    rest = [
        (coverage, pages)
        for coverage, pages in zip(coverages, available, strict=True)
        if not coverage.whole_path
    ]
    boundary = limit
    for _ in range(_JUMPS):
        before = boundary
        for coverage, pages in rest:
            boundary = _jump(coverage, pages, boundary)
        if boundary == before:
            return boundary
    return _deepest(rest, boundary)


_JUMPS = 8


def _jump(coverage: Coverage, pages: BoolArray, boundary: int) -> int:
    """The boundary itself when it is valid for one component, else one that the next valid is not above."""
    if not boundary:
        return 0
    start = coverage.start(boundary)
    window = pages[start:boundary][::-1]
    gap = int(window.argmin())
    if window[gap]:
        return boundary
    there = pages[: boundary - 1 - gap][::-1]
    return len(there) - int(there.argmax()) if there.any() else 0


def _deepest(parts: Sequence[tuple[Coverage, BoolArray]], limit: int) -> int:
    """The deepest valid boundary, from the last gap before every boundary."""
    boundaries = np.arange(1, limit + 1)
    good = np.ones(limit, dtype=np.bool_)
    for coverage, pages in parts:
        last_gap = np.maximum.accumulate(np.where(pages[:limit], -1, boundaries - 1))
        good &= last_gap < coverage.starts(boundaries)
    return limit - int(good[::-1].argmax()) if good.any() else 0
