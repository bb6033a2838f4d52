"""A lease while bytes move under it: the job holds it, whatever becomes of who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controller.requests import Load, Placement
from controller.settings import ControllerSettings
from controller.storage import TierPolicy
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.specs import MemorySpec
from tests.controller.rig import Rig, TaggedEngine, until
from tests.tagged import hashes_of, prompt

TOKENS = prompt(1, 40)


class Gated:
    """Copies that go on when the test says so."""

    def __init__(self, copy: Callable[..., Awaitable[int]]) -> None:
        self._copy = copy
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, *arguments: object, **named: object) -> int:
        self.reached.set()
        await self.open.wait()
        return await self._copy(*arguments, **named)


@pytest.mark.parametrize("ending", ["release", "expiry"])
async def test_a_caller_that_gives_up_does_not_end_the_lease_of_a_running_load(
    engine: TaggedEngine, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """LOADBACK's kind: the host frames stay while the copy reads them, and what it writes is right."""
    controller = engine.controller
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    found = engine.lookup(TOKENS)
    placements = {}
    for name, pages in found.load.items():
        slots = engine.pools[name].alloc(len(pages))
        assert slots is not None
        placements[name] = Placement(pages, slots)
    gate = Gated(controller._copier.copy)
    monkeypatch.setattr(controller._copier, "copy", gate)
    loading = asyncio.ensure_future(controller.load(Load(engine.engine_id, found.lease_id, placements)))
    await gate.reached.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    if ending == "release":
        controller.release(engine.engine_id, found.lease_id)
    else:
        later_s = controller._now() + 1000
        monkeypatch.setattr(controller._leases, "_clock", lambda: later_s)
        assert controller._leases.expire() == 0
    assert controller.flush()[1] == sum(map(len, found.load.values()))  # all of it is held
    gate.open.set()
    await until(lambda: controller.status().engines[0].jobs == 0)
    hashes = hashes_of(engine.namespace(), TOKENS)
    for name, placement in placements.items():
        for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
            engine.tagged.check(name, slot, hashes[page])
    if ending == "release":
        assert controller.flush()[1] == 0
    else:  # the use begins the lease's time anew
        assert controller.flush()[1] > 0
        monkeypatch.setattr(controller._leases, "_clock", lambda: later_s + 1000)
        assert controller._leases.expire() == 1
        assert controller.flush()[1] == 0
    assert controller.audit() == []


async def test_a_stop_waits_for_due_writes_as_long_as_it_is_told(rig: Rig, tmp_path: Path) -> None:
    """LIFE's kind: what is due is written within the time given, and a tier that hangs costs no more."""
    gate = tmp_path / "gate"
    gate.mkdir()
    freeze = Fault(kind=FaultKind.FREEZE, on=frozenset({"write"}))
    for hangs in (False, True):
        controller = await rig.controller(settings=ControllerSettings(storage_timeout_s=0.5))
        spec = FaultySpec(inner=MemorySpec(capacity_bytes=64 << 20), faults=(freeze,), gate=str(gate))
        controller.storage.attach(await rig.tier_for(controller, "l3", spec), TierPolicy())
        if hangs:
            (gate / "closed").touch()
        engine = TaggedEngine(controller)
        await engine.backup(TOKENS, engine.all_pages(TOKENS))
        async with asyncio.timeout(8):
            await controller.stop(0.2 if hangs else 8)
        assert controller.counters.storage_written_pages == (0 if hangs else 21)
        rig.controllers.remove(controller)
    (gate / "closed").unlink()
