"""Fixtures for the controller's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.controller.rig import Rig, TaggedEngine


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Closes everything and audits every controller after the test."""
    made = Rig(tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def engine(rig: Rig) -> TaggedEngine:
    """An engine on a controller without storage."""
    return TaggedEngine(await rig.controller())
