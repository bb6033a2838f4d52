"""The wire: what is well formed comes through unchanged, everything else is refused with its field's name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.daemon import wire
from controller.requests import (
    BackendStatus,
    BackupOutcome,
    EngineStatus,
    Found,
    InvalidRequest,
    Placement,
    PoolStatus,
    PrefetchPolicy,
    PrefetchState,
    Progress,
    Retained,
)
from hicache.core.layout import Kind
from proto.v1 import hicache_pb2 as pb
from tests.daemon.rig import layout_message, registration

int32 = st.integers(-(2**31), 2**31 - 1)
names = st.text(min_size=1, max_size=20)
pages = st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=30).map(sorted)


def packed(numbers: list[int]) -> bytes:
    return np.array(numbers, dtype="<i4").tobytes()


@given(st.lists(int32, max_size=100), names, st.text(max_size=20), st.text(max_size=20))
def test_a_prompt_comes_through(tokens: list[int], request_id: str, adapter: str, salt: str) -> None:
    message = pb.LookupPrefixRequest(
        prompt=pb.Prompt(request_id=request_id, adapter=adapter, salt=salt, tokens=packed(tokens)),
        limit_pages=7,
    )
    found = wire.lookup(pb.LookupPrefixRequest.FromString(message.SerializeToString()), "me")
    assert found.prompt.tokens.tolist() == tokens
    assert found.prompt.tokens.dtype == np.int32
    assert (found.prompt.engine_id, found.prompt.request_id) == ("me", request_id)
    assert (found.prompt.adapter, found.prompt.salt, found.limit_pages) == (adapter, salt, 7)


def test_tokens_are_not_copied() -> None:
    content = packed(list(range(1000)))
    message = pb.LookupPrefixRequest(prompt=pb.Prompt(tokens=content))
    tokens = wire.lookup(message, "me").prompt.tokens
    assert tokens.base is not None
    assert not tokens.flags.owndata


@given(st.dictionaries(names, st.lists(st.booleans(), max_size=70), max_size=4))
def test_bitmaps_come_through(resident: Mapping[str, list[bool]]) -> None:
    message = pb.LookupPrefixRequest(
        device=[
            pb.ComponentResidency(
                component=name, resident=np.packbits(np.array(bits, dtype=bool), bitorder="little").tobytes()
            )
            for name, bits in resident.items()
        ]
    )
    device = wire.lookup(message, "me").device
    assert set(device) == set(resident)
    for name, bits in resident.items():
        assert device[name].dtype == np.bool_
        assert device[name][: len(bits)].tolist() == bits
        assert not device[name][len(bits) :].any()


@given(st.dictionaries(names, pages, max_size=4))
def test_placements_come_through(wanted: Mapping[str, list[int]]) -> None:
    message = pb.LoadRequest(
        lease_id="lease",
        components=[
            pb.ComponentSlots(component=name, pages=packed(numbers), slots=packed(numbers[::-1]))
            for name, numbers in wanted.items()
        ],
    )
    found = wire.load(message, "me")
    assert {name: one.pages.tolist() for name, one in found.components.items()} == dict(wanted)
    assert {name: one.slots.tolist() for name, one in found.components.items()} == {
        name: numbers[::-1] for name, numbers in wanted.items()
    }


@given(st.dictionaries(names, pages, max_size=4), st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
def test_what_was_found_comes_through(load: Mapping[str, list[int]], numbers: list[int]) -> None:
    boundary, storage, matched, branching = numbers
    arrays = {name: np.array(one, dtype=np.int32) for name, one in load.items()}
    sent = wire.found_reply(Found("lease", boundary, arrays, storage, matched, branching, 12.5))
    reply = pb.LookupPrefixReply.FromString(sent.SerializeToString())
    assert {one.component: np.frombuffer(one.pages, "<i4").tolist() for one in reply.load} == dict(load)
    assert [reply.boundary, reply.storage_boundary, reply.matched_pages, reply.branching_boundary] == numbers
    assert (reply.lease_id, reply.lease_s) == ("lease", 12.5)


@pytest.mark.parametrize("state", PrefetchState)
def test_every_progress_comes_through(state: PrefetchState) -> None:
    reply = wire.progress_reply(Progress(state, 1, 2, 3, 4, "deadline"))
    assert pb.PrefetchProgress.State.Name(reply.state) == state.name
    assert (reply.boundary, reply.storage_boundary) == (1, 2)
    assert (reply.arrived_pages, reply.wanted_pages, reply.reason) == (3, 4, "deadline")


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_every_prefetch_policy_comes_through(policy: PrefetchPolicy) -> None:
    message = pb.PrefetchRequest(policy=pb.PrefetchPolicy.Value(policy.name), timeout_s=1.5)
    found = wire.prefetch(message, "me")
    assert (found.policy, found.timeout_s) == (policy, 1.5)


def test_backup_outcomes_come_through() -> None:
    reply = wire.backup_reply({"full": BackupOutcome(1, 2, 3, "host_full"), "swa": BackupOutcome(4, 5, 6)})
    assert [
        (o.component, o.stored_pages, o.present_pages, o.refused_pages, o.reason) for o in reply.outcomes
    ] == [
        ("full", 1, 2, 3, "host_full"),
        ("swa", 4, 5, 6, ""),
    ]


def slots(component: str = "full", pages: bytes = b"", slots: bytes = b"") -> pb.ComponentSlots:
    return pb.ComponentSlots(component=component, pages=pages, slots=slots)


@pytest.mark.parametrize(
    ("components", "field"),
    [
        ([slots(pages=packed([1, 2]), slots=packed([1]))], "components['full']: 2 pages and 1 slots"),
        ([slots(pages=packed([2, 1]), slots=packed([1, 2]))], "components['full'].pages: not ascending"),
        ([slots(pages=packed([1, 1]), slots=packed([1, 2]))], "components['full'].pages: not ascending"),
        ([slots(pages=packed([-1, 1]), slots=packed([1, 2]))], "components['full'].pages: -1 is negative"),
        ([slots(pages=packed([0, 1]), slots=packed([1, -2]))], "components['full'].slots: -2 is negative"),
        (
            [slots(pages=b"123", slots=packed([1]))],
            "components['full'].pages: 3 bytes is not a multiple of 4",
        ),
        ([slots(pages=packed([1]), slots=b"12345")], "components['full'].slots: 5 bytes is not a multiple"),
        ([slots(), slots()], "components['full']: named twice"),
        ([slots(component="")], "components[0].component: empty"),
        ([slots(component="x" * 513)], "components[0].component: 513 characters"),
    ],
)
def test_bad_placements_name_the_field(components: list[pb.ComponentSlots], field: str) -> None:
    for parse in (
        lambda: wire.load(pb.LoadRequest(lease_id="lease", components=components), "me"),
        lambda: wire.backup(pb.BackupRequest(components=components), "me"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse()
        assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            pb.PrefetchRequest(prompt=pb.Prompt(tokens=b"12345")),
            "prompt.tokens: 5 bytes is not a multiple of 4",
        ),
        (pb.PrefetchRequest(prompt=pb.Prompt(salt="x" * 513)), "prompt.salt: 513 characters"),
        (pb.PrefetchRequest(prompt=pb.Prompt(adapter="x" * 513)), "prompt.adapter: 513 characters"),
        (pb.PrefetchRequest(prompt=pb.Prompt(request_id="x" * 513)), "prompt.request_id: 513 characters"),
        (pb.PrefetchRequest(policy=7), "policy: 7"),
        (pb.PrefetchRequest(timeout_s=-1), "timeout_s: -1"),
        (pb.PrefetchRequest(timeout_s=math.nan), "timeout_s: nan"),
        (pb.PrefetchRequest(timeout_s=math.inf), "timeout_s: inf"),
        (pb.PrefetchRequest(device=[pb.ComponentResidency(component="a")] * 2), "device['a']: named twice"),
        (pb.PrefetchRequest(device=[pb.ComponentResidency()]), "device[0].component: empty"),
    ],
)
def test_bad_prompts_and_policies_name_the_field(message: pb.PrefetchRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.prefetch(message, "me")
    assert str(caught.value).startswith(field)


def test_a_load_needs_a_lease() -> None:
    with pytest.raises(InvalidRequest, match="lease_id: empty"):
        wire.load(pb.LoadRequest(), "me")


def test_a_registration_comes_through() -> None:
    message = registration("me", [b"t" * 16])
    found = wire.registration(message)
    assert (found.engine_id, found.model, found.revision) == ("me", "model", "r1")
    assert found.layout.components[0].kind is Kind.FULL
    assert found.layout.pools[0].planes[0].stride == 64
    assert found.regions == (wire.RegionTicket(b"t" * 16, 1 << 16),)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_component_comes_through(kind: Kind) -> None:
    layout = layout_message()
    layout.components[0].kind = pb.Component.Kind.Value(kind.name)
    layout.components[0].tokens = 64 if kind in (Kind.SWA, Kind.CHUNKED) else 0
    found = wire.registration(registration("me", [b"t" * 16], layout=layout))
    assert found.layout.components[0].kind is kind


def far_plane() -> pb.Layout:
    layout = layout_message()
    layout.pools[0].planes[0].offset = 1 << 63
    return layout


def no_kind() -> pb.Layout:
    layout = layout_message()
    layout.components[0].ClearField("kind")
    return layout


def many_planes() -> pb.Layout:
    layout = layout_message()
    layout.pools[0].planes.extend([pb.Plane(nbytes=1)] * 9000)
    return layout


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine_id": ""}, "registration.engine_id: empty"),
        ({"engine_id": "x" * 513}, "registration.engine_id: 513 characters"),
        ({"model": ""}, "registration.model: empty"),
        ({"revision": "x" * 513}, "registration.revision: 513"),
        ({"regions": [pb.Region(ticket=b"short", nbytes=1)]}, "registration.regions[0].ticket: 5 bytes"),
        ({"regions": [pb.Region(ticket=b"t" * 16)]}, "registration.regions[0].nbytes: 0"),
        (
            {"regions": [pb.Region(ticket=b"t" * 16, nbytes=1 << 16)] * 2},
            "registration.regions: a ticket is named",
        ),
        ({"regions": [pb.Region()] * 300}, "registration.regions: 300 entries"),
        ({"regions": []}, "registration.layout.pools['kv'].planes[0].region: 0; 0 regions"),
        ({"layout": pb.Layout()}, "registration.layout.page_size: 0"),
        ({"layout": pb.Layout(page_size=4)}, "registration.layout.components: empty"),
        ({"layout": far_plane()}, "registration.layout.pools['kv'].planes[0]: bytes"),
        ({"layout": no_kind()}, "registration.layout.components['full'].kind: 0"),
        ({"layout": many_planes()}, "registration.layout.pools['kv'].planes: 9001 entries"),
    ],
)
def test_a_bad_registration_names_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.registration(registration("me", [b"t" * 16], **changes))
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (EngineStatus, pb.EngineStatus),
        (PoolStatus, pb.PoolStatus),
        (BackendStatus, pb.BackendStatus),
        (Retained, pb.Retained),
    ],
)
def test_status_entries_have_the_same_fields_on_both_sides(ours: type, theirs: type) -> None:
    assert [field.name for field in dataclasses.fields(ours)] == [
        field.name for field in theirs.DESCRIPTOR.fields
    ]


def test_an_empty_placement_is_fine() -> None:
    found = wire.backup(pb.BackupRequest(components=[slots()]), "me").components["full"]
    assert isinstance(found, Placement)
    assert (len(found.pages), len(found.slots)) == (0, 0)
