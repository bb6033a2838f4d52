"""Rigs that are audited after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache.core.coverage import Checkpoint, SlidingWindow, WholePath

from .rig import Rig


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Rigs entered here are audited when the test ends."""
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.check()


@pytest.fixture
def full(rigs: list[Rig]) -> Rig:
    rigs.append(Rig({"full": WholePath()}))
    return rigs[-1]


@pytest.fixture
def hybrid(rigs: list[Rig]) -> Rig:
    """FULL and a window of 4 pages."""
    rigs.append(Rig({"full": WholePath(), "swa": SlidingWindow(4)}))
    return rigs[-1]


@pytest.fixture
def recurrent(rigs: list[Rig]) -> Rig:
    """FULL and checkpoints."""
    rigs.append(Rig({"full": WholePath(), "mamba": Checkpoint()}))
    return rigs[-1]
