"""The examples of docs/index.md, so that the page and the index say the same."""

from __future__ import annotations

import numpy as np

from hicache.core.coverage import Checkpoint, SlidingWindow, WholePath
from hicache.core.words import Tier

from .rig import Rig

HOST, STORAGE = Tier.HOST, Tier.STORAGE


def runs(rig: Rig) -> list[tuple[int, int]]:
    return sorted((node.start, node.n) for node in rig.index._occupancy.nodes())


def test_nodes_come_from_branches_only(full: Rig) -> None:
    """Section 1."""
    full.insert("abcdef")
    (old,) = full.index._occupancy.nodes()
    assert runs(full) == [(0, 6)]
    full.insert("abcdXY")
    assert runs(full) == [(0, 4), (4, 2), (4, 2)]
    assert (old.start, old.n) == (4, 2)
    full.insert("abcdefgh")
    assert runs(full) == [(0, 4), (4, 2), (4, 4)]
    assert (old.start, old.n) == (4, 4)


def test_what_match_returns(rigs: list[Rig]) -> None:
    """Section 4."""
    rules = {"full": WholePath(), "swa": SlidingWindow(2), "mamba": Checkpoint()}
    rig = Rig(rules, tiers=(HOST, STORAGE))
    rigs.append(rig)
    picture = {
        ("full", HOST): "●●●●●●··",
        ("full", STORAGE): "●●●●●●●●",
        ("swa", HOST): "··●●●●··",
        ("swa", STORAGE): "·····●●·",
        ("mamba", HOST): "···●····",
        ("mamba", STORAGE): "···●··●·",
    }
    cursor = rig.insert("abcdefgh").cursor
    for (name, tier), row in reversed(picture.items()):
        there = np.array([n for n, mark in enumerate(row) if mark == "●"], dtype=np.int32)
        if tier is STORAGE:
            rig.index.mark_stored(cursor, name, there)
        else:
            receipt = rig.index.pin_pages(cursor, {name: there}, tier=tier)
            rig.evict(name, 8, tier)
            rig.index.unpin(receipt)
    for (name, tier), row in picture.items():
        assert "".join("·●"[n in rig.resident("abcdefgh", name, tier)] for n in range(8)) == row
    found = rig.index.match(rig.namespace(), rig.tokens("abcdefgZ"))
    assert found.n_pages == 7
    assert dict(found.boundaries) == {HOST: 4, STORAGE: 7}
    assert found.branching_boundary == 7


def test_what_evict_takes(full: Rig) -> None:
    """Section 7: the order f e Y X d."""
    full.insert("abcdef")
    full.insert("abcdXY")
    full.index.touch(full.index.match(full.namespace(), full.tokens("abcd")).cursor, 4)
    left = []
    for _ in range(5):
        assert full.evict("full", 1) == (1, 0)
        left.append((full.boundary("abcdef"), full.boundary("abcdXY")))
    assert left == [(5, 6), (4, 6), (4, 5), (4, 4), (3, 3)]
