"""Layouts are checked once, at attach: what does not fit together is refused with the field's name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.core.coverage import Checkpoint, Chunked, SlidingWindow, WholePath
from hicache.core.layout import (
    ComponentSpec,
    Kind,
    Layout,
    LayoutError,
    Plane,
    Pool,
    component_slots,
)

FULL = ComponentSpec("full", Kind.FULL)
SWA = ComponentSpec("swa", Kind.SWA, 128)


def split_kv() -> Layout:
    """Keys and values in one region each, a sidecar behind the keys, a window in a third region."""
    return Layout(
        page_size=64,
        components=(FULL, SWA),
        pools=(
            Pool("kv", "full", 4, (Plane(0, 0, 256, 256), Plane(1, 0, 256, 256, layer=1)), "bf16"),
            Pool("scales", "full", 4, (Plane(0, 1024, 16, 16),), "fp32"),
            Pool("window", "swa", 2, (Plane(2, 0, 512, 512),), "bf16"),
        ),
    )


REGIONS = [1088, 1024, 1024]


def changed(layout: Layout, pool: int, **fields: object) -> Layout:
    """The layout with some fields of one pool's first plane (or of the pool) replaced."""
    pools = list(layout.pools)
    plane_fields = {key: value for key, value in fields.items() if key in Plane.__dataclass_fields__}
    pool_fields = {key: value for key, value in fields.items() if key in Pool.__dataclass_fields__}
    planes = (replace(pools[pool].planes[0], **plane_fields), *pools[pool].planes[1:])  # type: ignore[arg-type]  # test data
    pools[pool] = replace(pools[pool], **{"planes": planes, **pool_fields})  # type: ignore[arg-type]  # test data
    return replace(layout, pools=tuple(pools))


def test_a_fitting_layout_is_accepted() -> None:
    split_kv().validate(REGIONS)
    assert component_slots(split_kv()) == {"full": 4, "swa": 2}
    assert [pool.name for pool in split_kv().pools_of("full")] == ["kv", "scales"]
    assert split_kv().pools[0].page_bytes == 512


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (replace(split_kv(), page_size=0), "page_size"),
        (replace(split_kv(), components=()), "components"),
        (replace(split_kv(), components=(FULL, FULL, SWA)), "named twice"),
        (replace(split_kv(), components=(replace(FULL, name="a/b"), SWA)), "a name is"),
        (replace(split_kv(), components=(FULL, replace(SWA, tokens=0))), "tokens"),
        (replace(split_kv(), components=(replace(FULL, tokens=5), SWA)), "tokens"),
        (replace(split_kv(), components=(FULL, SWA, ComponentSpec("m", Kind.MAMBA))), "no pool"),
        (changed(split_kv(), 1, n_slots=5), "equal n_slots"),
        (changed(split_kv(), 2, component="other"), "component"),
        (changed(split_kv(), 1, name="kv"), "names must differ"),
        (changed(split_kv(), 2, n_slots=0), "n_slots"),
        (changed(split_kv(), 2, planes=()), "planes"),
        (changed(split_kv(), 0, region=3), "region"),
        (changed(split_kv(), 0, region=-1), "region"),
        (changed(split_kv(), 0, nbytes=0), "nbytes"),
        (changed(split_kv(), 0, stride=255), "stride"),
        (changed(split_kv(), 0, offset=-1), "do not lie"),
        (changed(split_kv(), 2, offset=1), "do not lie"),
        (changed(split_kv(), 1, offset=1000), "overlaps"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layout: Layout, field: str) -> None:
    """KEY-10: strides and sizes that contradict the declared layout are refused at registration."""
    with pytest.raises(LayoutError, match=field):
        layout.validate(REGIONS)


@given(
    n_planes=st.integers(1, 4),
    size=st.integers(1, 8),
    spread=st.integers(0, 8),
    shift=st.integers(-3, 3),
    n_slots=st.integers(1, 6),
)
def test_planes_are_refused_exactly_when_two_share_a_byte(
    n_planes: int, size: int, spread: int, shift: int, n_slots: int
) -> None:
    """Interleaved planes of one stride: checked against the set of all their bytes."""
    stride = n_planes * size + spread
    planes = [Plane(0, 8 + n * size + (shift if n else 0), stride, size) for n in range(n_planes)]
    layout = Layout(64, (FULL,), (Pool("kv", "full", n_slots, tuple(planes)),))
    owned = [p.offset + s * p.stride + b for p in planes for s in range(n_slots) for b in range(p.nbytes)]
    region = 16 + n_slots * stride + size
    if len(owned) == len(set(owned)):
        layout.validate([region])
    else:
        with pytest.raises(LayoutError, match="overlaps"):
            layout.validate([region])


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_lengths_in_tokens_are_rounded_up_to_pages(tokens: int, pages: int) -> None:
    assert ComponentSpec("s", Kind.SWA, tokens).coverage(64) == SlidingWindow(pages)
    assert ComponentSpec("c", Kind.CHUNKED, tokens).coverage(64) == Chunked(pages)
    assert ComponentSpec("f", Kind.FULL).coverage(64) == WholePath()
    assert ComponentSpec("m", Kind.MAMBA).coverage(64) == Checkpoint()


def test_where_memory_lies_is_not_part_of_identity() -> None:
    """Engines of different sizes and places share frames."""
    moved = changed(split_kv(), 2, offset=512, n_slots=1)
    assert moved.fingerprint() == split_kv().fingerprint()
