"""Matching: how deep a prompt can be reused, per reach.

A reach is a tier together with all tiers nearer to the model. Reads columns, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hicache.core.columns import Shape
from hicache.core.coverage import joint_boundary, leading
from hicache.core.structure import Cursor, Segment
from hicache.core.words import NO_SLOT, BoolArray, Tier, lowest


@dataclass(frozen=True)
class Match:
    """How far a prompt is known. Pins nothing: pin before anything can be evicted."""

    cursor: Cursor
    n_pages: int
    """Pages whose tokens match."""
    boundaries: Mapping[Tier, int]
    """Joint boundary per reach: deepest tier -> pages that may be reused from it and the tiers above."""
    branching_boundary: int
    """Deepest boundary that the whole-path components alone reach, at the deepest reach."""


def reaches(
    shape: Shape, segments: list[Segment], limit: int, device: Mapping[str, BoolArray] | None
) -> tuple[dict[Tier, int], int]:
    """Joint boundary per reach, and the branching boundary. `segments` (deepest first) are the matched
    path from page 0; `device` pages are readable in every reach, also beyond the path."""
    boundaries: dict[Tier, int] = {}
    coverages = [component.coverage for component in shape.components]
    depth = segments[0][0].start + segments[0][2] if segments else 0
    branching = 0
    for n, tier in enumerate(shape.tiers):
        if boundaries and boundaries[shape.tiers[n - 1]] == limit:
            boundaries[tier] = limit
            branching = limit
            continue
        if not device and depth and _covered(shape, segments, depth, n + 1):
            boundaries[tier] = branching = depth
            continue
        available = [_available(shape, c, segments, depth, n + 1) for c in range(len(coverages))]
        if device:
            available = [
                _joined(pages, device.get(component.name), limit)
                for component, pages in zip(shape.components, available, strict=True)
            ]
        boundaries[tier] = joint_boundary(coverages, available, limit)
        branching = min(
            [max(map(len, available), default=0), limit]
            + [leading(available[c][:limit]) for c in shape.whole_components]
        )
    return boundaries, branching


def _covered(shape: Shape, segments: list[Segment], boundary: int, n_tiers: int) -> bool:
    """Whether every component covers the whole depth, the usual case."""
    for component, lanes in zip(shape.components, shape.of_component, strict=True):
        first = component.coverage.start(boundary)
        for node, start, stop in segments:
            low = first - node.start
            low = max(low, start)
            best = node.block[lanes[0].row, low:stop]
            for lane in lanes[1:n_tiers]:
                best = np.maximum(best, node.block[lane.row, low:stop])
            if lowest(best) <= NO_SLOT:
                return False
            if node.start + start <= first:
                break
    return True


def _available(shape: Shape, component: int, segments: list[Segment], depth: int, n_tiers: int) -> BoolArray:
    available = np.zeros(depth, dtype=np.bool_)
    for node, start, stop in segments:
        part = available[node.start + start : node.start + stop]
        for lane in shape.of_component[component][:n_tiers]:
            part |= node.block[lane.row, start:stop] > NO_SLOT
    return available


def _joined(pages: BoolArray, held: BoolArray | None, limit: int) -> BoolArray:
    if held is None:
        return pages
    joined = np.zeros(min(limit, max(len(pages), len(held))), dtype=np.bool_)
    joined[: len(pages)] = pages[: len(joined)]
    joined[: len(held)] |= held[: len(joined)]
    return joined
