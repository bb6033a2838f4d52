"""Quotas: one tenant's flood costs nobody else a page."""

from __future__ import annotations

import pytest

from controller.models import HOST
from controller.settings import ControllerSettings, HostShares
from tests.controller.rig import Rig, TaggedEngine
from tests.tagged import prompt

KIB = 1 << 10


def tenant_bytes(engine: TaggedEngine, salt: str) -> int:
    return engine.controller._host.tenant_bytes(salt)


async def test_a_flood_of_one_tenant_leaves_the_others_pages(rig: Rig) -> None:
    """SESSION-10: two tenants with quotas and one without; one inserts many times its share. It keeps within
    its quota at every moment and has its latest prompt; the others keep all they have."""
    shares = HostShares(quotas_bytes={"small": 24 * KIB, "large": 96 * KIB})
    settings = ControllerSettings(host_shares=shares)
    controller = await rig.controller(capacity_bytes=256 * KIB, settings=settings)
    engine = TaggedEngine(controller)
    for salt in ("large", ""):
        for seed in range(3):
            await engine.backup(prompt(seed, 40), engine.all_pages(prompt(seed, 40)), salt)
    for seed in range(100, 160):
        tokens = prompt(seed, 40)
        outcomes = await engine.backup(tokens, engine.all_pages(tokens), "small")
        assert [one.refused_pages for one in outcomes.values()] == [0, 0, 0]
        assert tenant_bytes(engine, "small") <= 24 * KIB
        assert await engine.load_and_check(tokens, "small") == 10
    for salt in ("large", ""):
        for seed in range(3):
            assert await engine.load_and_check(prompt(seed, 40), salt) == 10
    assert controller.audit() == []


async def test_what_a_quota_does_not_hold_is_refused_with_that_reason(rig: Rig) -> None:
    """SESSION-10: a prompt longer than the quota, and one that comes while the rest of it is in use."""
    settings = ControllerSettings(host_shares=HostShares(quotas_bytes={"t": 12 * KIB}))
    controller = await rig.controller(capacity_bytes=256 * KIB, settings=settings)
    engine = TaggedEngine(controller)
    first = prompt(1, 40)
    await engine.backup(first, engine.all_pages(first), "t")
    held = engine.lookup(first, "t")  # a lease on all of it
    assert held.boundary == 10
    second = prompt(2, 40)
    outcomes = await engine.backup(second, engine.all_pages(second), "t")
    assert {one.reason for one in outcomes.values() if one.refused_pages} == {"quota"}
    assert controller.counters.backup_refused_quota_pages > 0
    assert controller.counters.backup_refused_host_full_pages == 0
    assert tenant_bytes(engine, "t") <= 12 * KIB
    controller.release(engine.engine_id, held.lease_id)
    outcomes = await engine.backup(second, engine.all_pages(second), "t")
    assert sum(one.refused_pages for one in outcomes.values()) == 0
    assert await engine.load_and_check(second, "t") == 10
    index = controller._host.models[0].index
    assert index.pinned("full", HOST) == 0


@pytest.mark.parametrize("n_tokens", [40, 200])
async def test_a_tenant_beyond_its_quota_in_one_prompt_keeps_a_usable_start(rig: Rig, n_tokens: int) -> None:
    """SESSION-10: what fits is a prefix that can be used, when its checkpoints allow."""
    settings = ControllerSettings(host_shares=HostShares(quotas_bytes={"t": 8 * KIB}))
    controller = await rig.controller(settings=settings)
    engine = TaggedEngine(controller)
    tokens = prompt(3, n_tokens)
    marks = list(range(1, 1 + min(10, len(tokens) // 4)))
    await engine.backup(tokens, engine.all_pages(tokens, marks), "t")
    assert tenant_bytes(engine, "t") <= 8 * KIB
    assert controller.audit() == []
