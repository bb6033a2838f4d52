"""Bad input is refused with the field and the remedy, before any side effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from controller.requests import (
    Backup,
    EngineSpec,
    Gone,
    InvalidRequest,
    Load,
    Lookup,
    MappedRegion,
    Placement,
    Prefetch,
    PrefetchPolicy,
    PrefetchState,
    Prompt,
    UnknownEngine,
)
from tests.controller.rig import SLOTS, Rig, TaggedEngine
from tests.tagged import make_layout, prompt

TOKENS = prompt(1, 24)


def place(pages: list[int], slots: list[int]) -> Placement:
    return Placement(np.array(pages, dtype=np.int32), np.array(slots, dtype=np.int32))


BAD_PLACEMENTS = {
    "wrong count": ({"full": place([0, 1], [0])}, r"components\['full'\].slots: 1 slots for 2 pages"),
    "slot too large": ({"full": place([0], [64])}, r"components\['full'\].slots.*outside \[0, 64\)"),
    "negative slot": ({"swa": place([0], [-1])}, r"components\['swa'\].slots"),
    "slot twice": ({"full": place([0, 1], [5, 5])}, r"components\['full'\].slots.*twice"),
    "negative page": ({"full": place([-1], [0])}, r"components\['full'\].pages"),
    "pages descend": ({"full": place([1, 0], [0, 1])}, r"components\['full'\].pages"),
    "page beyond": ({"full": place([6], [0])}, r"components\['full'\].pages: page 6 is beyond .* 6"),
    "unknown component": (
        {"conv": place([0], [0])},
        r"component 'conv' is not one of \['full', 'mamba', 'swa'\]",
    ),
}


@pytest.mark.parametrize("case", BAD_PLACEMENTS)
async def test_a_bad_backup_leaves_nothing_behind(engine: TaggedEngine, case: str) -> None:
    components, message = BAD_PLACEMENTS[case]
    good: Mapping[str, Placement] = {"mamba": place([5], [0])}
    with pytest.raises(InvalidRequest, match=message):
        await engine.controller.backup(Backup(engine.prompt(TOKENS), {**good, **components}))
    assert engine.lookup(TOKENS).matched_pages == 0
    assert engine.controller.status().host_used_bytes == 0


@pytest.mark.parametrize("case", [case for case in BAD_PLACEMENTS if case != "page beyond"])
async def test_a_bad_load_moves_nothing(engine: TaggedEngine, case: str) -> None:
    components, message = BAD_PLACEMENTS[case]
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    before = engine.tagged.memory.copy()
    lease_id = engine.lookup(TOKENS).lease_id
    with pytest.raises(InvalidRequest, match=message):
        await engine.controller.load(Load(engine.engine_id, lease_id, components))
    assert (engine.tagged.memory == before).all()


async def test_only_leased_pages_can_be_loaded(engine: TaggedEngine) -> None:
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    found = engine.lookup(TOKENS)
    with pytest.raises(InvalidRequest, match=r"components\['swa'\].pages: not all are under lease"):
        await engine.controller.load(Load(engine.engine_id, found.lease_id, {"swa": place([0], [0])}))


async def test_a_lease_belongs_to_one_engine_and_ends_once(engine: TaggedEngine) -> None:
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    other = TaggedEngine(engine.controller, "other")
    found = engine.lookup(TOKENS)
    with pytest.raises(Gone, match="look up again"):
        await other.controller.load(Load("other", found.lease_id, {}))
    other.controller.release("other", found.lease_id)  # not its own: changes nothing
    assert await engine.controller.load(Load(engine.engine_id, found.lease_id, {})) == 0
    engine.controller.release(engine.engine_id, found.lease_id)
    with pytest.raises(Gone, match="has ended"):
        await engine.controller.load(Load(engine.engine_id, found.lease_id, {}))


async def test_unknown_engines_are_told_to_attach(engine: TaggedEngine) -> None:
    stranger = Prompt("stranger", "r", TOKENS)
    controller = engine.controller
    with pytest.raises(UnknownEngine, match="'stranger' is not attached"):
        controller.lookup(Lookup(stranger))
    with pytest.raises(UnknownEngine):
        await controller.backup(Backup(stranger, {}))
    with pytest.raises(UnknownEngine):
        await controller.load(Load("stranger", "lease-1", {}))
    with pytest.raises(UnknownEngine):
        controller.prefetch(Prefetch(Lookup(stranger), PrefetchPolicy.BEST_EFFORT))
    with pytest.raises(UnknownEngine):
        controller.release("stranger", "lease-1")
    with pytest.raises(UnknownEngine):
        await controller.wait_prefetch("stranger", "prefetch-1")


async def test_without_storage_a_prefetch_finds_nothing(engine: TaggedEngine) -> None:
    await engine.backup(TOKENS[:12], engine.all_pages(TOKENS[:12]))
    progress = await engine.prefetch(TOKENS)
    assert (progress.state, progress.boundary, progress.storage_boundary) == (PrefetchState.DONE, 3, 3)


async def test_attach_refuses_what_it_cannot_serve(rig: Rig) -> None:
    """SIDECAR-04's sibling: a plane outside its region, a taken id, a frame larger than the slab."""
    controller = await rig.controller(capacity_bytes=64 << 10)
    layout, nbytes = make_layout(SLOTS)
    spec = EngineSpec("e", "model", "", layout, (MappedRegion(0, nbytes),))
    with pytest.raises(InvalidRequest, match=r"layout.pools\['mamba1'\].planes\[1\]: bytes"):
        controller.attach(dataclasses.replace(spec, regions=(MappedRegion(0, nbytes - 10),)))
    huge, nbytes = make_layout(SLOTS, plane_bytes={"full": ((1 << 20,),), "swa": ((8,),), "mamba": ((8,),)})
    with pytest.raises(InvalidRequest, match=r"host.capacity"):
        controller.attach(EngineSpec("e", "huge", "", huge, (MappedRegion(0, nbytes),)))
    assert controller.status().engines == ()
    controller.attach(spec)
    with pytest.raises(InvalidRequest, match="engine_id: 'e' is attached"):
        controller.attach(spec)
