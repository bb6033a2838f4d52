"""Protobuf to and from our own types, at the engine's end of the wire. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hicache.client.cuda import CudaRegion
from hicache.client.messages import (
    BackupOutcome,
    Found,
    LayerCells,
    Lease,
    Placement,
    PrefetchPolicy,
    PrefetchState,
    Progress,
    Prompt,
    RankPlace,
    ReadyEvent,
)
from hicache.client.regions import SharedRegion
from hicache.core.layout import Kind, Layout
from hicache.core.words import BoolArray
from proto.v1 import hicache_pb2 as pb

_KINDS = {
    Kind.FULL: pb.Component.FULL,
    Kind.SWA: pb.Component.SWA,
    Kind.MAMBA: pb.Component.MAMBA,
    Kind.CHUNKED: pb.Component.CHUNKED,
}

_POLICIES = {
    PrefetchPolicy.BEST_EFFORT: pb.BEST_EFFORT,
    PrefetchPolicy.WAIT_COMPLETE: pb.WAIT_COMPLETE,
    PrefetchPolicy.TIMEOUT: pb.TIMEOUT,
}

_STATES = {
    pb.PrefetchProgress.PLANNING: PrefetchState.PLANNING,
    pb.PrefetchProgress.READING: PrefetchState.READING,
    pb.PrefetchProgress.DONE: PrefetchState.DONE,
    pb.PrefetchProgress.CANCELLED: PrefetchState.CANCELLED,
    pb.PrefetchProgress.FAILED: PrefetchState.FAILED,
}


def layout_message(layout: Layout) -> pb.Layout:
    return pb.Layout(
        page_size=layout.page_size,
        components=[
            pb.Component(name=spec.name, kind=_KINDS[spec.kind], tokens=spec.tokens)
            for spec in layout.components
        ],
        pools=[
            pb.Pool(
                name=pool.name,
                component=pool.component,
                n_slots=pool.n_slots,
                format=pool.format,
                replicated=pool.replicated,
                planes=[
                    pb.Plane(
                        region=plane.region,
                        offset=plane.offset,
                        stride=plane.stride,
                        nbytes=plane.nbytes,
                        layer=plane.layer,
                    )
                    for plane in pool.planes
                ],
            )
            for pool in layout.pools
        ],
    )


def registration_message(
    *,
    engine_id: str,
    model: str,
    revision: str,
    layout: Layout,
    regions: Sequence[pb.Region],
    place: RankPlace,
) -> pb.Registration:
    return pb.Registration(
        engine_id=engine_id,
        model=model,
        revision=revision,
        layout=layout_message(layout),
        regions=regions,
        group_id=place.group_id,
        rank=place.rank,
        ranks=place.ranks,
    )


def region_message(region: SharedRegion | CudaRegion, ticket: bytes | None) -> pb.Region:
    """`ticket`: under which a shared region's fd was handed over."""
    if isinstance(region, CudaRegion):
        cuda = pb.CudaMemory(handle=region.handle, offset=region.offset, device_uuid=region.device_uuid)
        return pb.Region(cuda=cuda, nbytes=region.nbytes)
    return pb.Region(ticket=ticket, nbytes=region.nbytes)


def ready_message(ready: ReadyEvent | None) -> pb.ReadyEvent | None:
    return None if ready is None else pb.ReadyEvent(handle=ready.handle, device_uuid=ready.device_uuid)


def cells_message(cells: LayerCells | None) -> pb.LayerCells | None:
    if cells is None:
        return None
    return pb.LayerCells(region=cells.region, offset=cells.offset, value=cells.value)


def prompt_message(prompt: Prompt) -> pb.Prompt:
    return pb.Prompt(
        request_id=prompt.request_id,
        adapter=prompt.adapter,
        salt=prompt.salt,
        tokens=np.ascontiguousarray(prompt.tokens, dtype="<i4").tobytes(),
    )


def residency_messages(device: Mapping[str, BoolArray]) -> list[pb.ComponentResidency]:
    return [
        pb.ComponentResidency(
            component=component, resident=np.packbits(resident, bitorder="little").tobytes()
        )
        for component, resident in device.items()
        if len(resident)
    ]


def placement_messages(placements: Mapping[str, Placement]) -> list[pb.ComponentSlots]:
    return [
        pb.ComponentSlots(
            component=component,
            pages=np.ascontiguousarray(placement.pages, dtype="<i4").tobytes(),
            slots=np.ascontiguousarray(placement.slots, dtype="<i4").tobytes(),
        )
        for component, placement in placements.items()
        if len(placement.pages)
    ]


def policy_value(policy: PrefetchPolicy) -> pb.PrefetchPolicy:
    return _POLICIES[policy]


def found_from(reply: pb.LookupPrefixReply, attachment: int) -> Found:
    return Found(
        lease=Lease(reply.lease_id, attachment) if reply.lease_id else None,
        boundary=reply.boundary,
        load={entry.component: np.frombuffer(entry.pages, dtype="<i4") for entry in reply.load},
        storage_boundary=reply.storage_boundary,
        branching_boundary=reply.branching_boundary,
    )


def progress_from(reply: pb.PrefetchProgress) -> Progress:
    return Progress(
        state=_STATES.get(reply.state, PrefetchState.FAILED),
        boundary=reply.boundary,
        storage_boundary=reply.storage_boundary,
        arrived_pages=reply.arrived_pages,
        wanted_pages=reply.wanted_pages,
        reason=reply.reason,
    )


def backup_outcomes_from(reply: pb.BackupReply) -> Mapping[str, BackupOutcome]:
    return {
        outcome.component: BackupOutcome(
            stored_pages=outcome.stored_pages,
            present_pages=outcome.present_pages,
            refused_pages=outcome.refused_pages,
            reason=outcome.reason,
        )
        for outcome in reply.outcomes
    }
