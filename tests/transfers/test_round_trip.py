"""Device to frame to device, against an oracle that knows only what a plane is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.memory.frames import FrameLayout
from controller.memory.slab import HostSlab
from controller.transfers.copies import CopyTable
from controller.transfers.cpu import CpuCopyEngine
from controller.transfers.scheduler import Direction, TransferScheduler
from hicache.core.layout import ComponentSpec, Kind, Layout, LayoutError, Plane, Pool
from tests.transfers.gated import DEADLINE_S, GatedEngine
from tests.transfers.machine import EngineMemory, HostMemory, load, store

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Shape:
    """How one pool lies in memory: each plane by itself (layer first), or all planes of a slot side by
    side (page first)."""

    nbytes: tuple[int, ...]
    page_first: bool
    plane_gap: int
    slot_gap: int


plane_bytes = st.one_of(
    st.integers(1, 40), st.integers(41, 5000), st.sampled_from([528, 4096, 8191, 8192, 16_384, 33_000])
)
shapes = st.builds(
    Shape,
    nbytes=st.one_of(
        st.lists(plane_bytes, min_size=1, max_size=5).map(tuple),
        st.tuples(st.integers(1, 600), st.integers(6, 80)).map(lambda shape: (shape[0],) * shape[1]),
    ),
    page_first=st.booleans(),
    plane_gap=st.sampled_from([0, 0, 1, 13]),
    slot_gap=st.sampled_from([0, 0, 3, 64]),
)


def placed(shape: Shape, n_slots: int, region: int, offset: int) -> tuple[tuple[Plane, ...], int]:
    """The planes from `offset` on, and where they end."""
    planes = []
    if shape.page_first:
        stride = sum(shape.nbytes) + shape.plane_gap * len(shape.nbytes) + shape.slot_gap
        at = offset
        for layer, nbytes in enumerate(shape.nbytes):
            planes.append(Plane(region, at, stride, nbytes, layer))
            at += nbytes + shape.plane_gap
        return tuple(planes), offset + stride * n_slots
    for layer, nbytes in enumerate(shape.nbytes):
        planes.append(Plane(region, offset, nbytes + shape.slot_gap, nbytes, layer))
        offset += (nbytes + shape.slot_gap) * n_slots + shape.plane_gap
    return tuple(planes), offset


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    """A layout of one to three components with up to three pools each, and its region sizes."""
    ends = [draw(st.integers(0, 9)) for _ in range(draw(st.integers(1, 3)))]
    kinds = draw(st.permutations([("full", Kind.FULL, 0), ("swa", Kind.SWA, 128), ("mamba", Kind.MAMBA, 0)]))
    components, pools = [], []
    for name, kind, tokens in kinds[: draw(st.integers(1, 3))]:
        components.append(ComponentSpec(name, kind, tokens))
        n_slots = draw(st.integers(1, 12))
        for i in range(draw(st.integers(1, 3))):
            region = draw(st.integers(0, len(ends) - 1))
            planes, ends[region] = placed(draw(shapes), n_slots, region, ends[region])
            pools.append(Pool(f"{name}{i}", name, n_slots, planes))
    return Layout(64, tuple(components), tuple(pools)), [end + 5 for end in ends]


@settings(max_examples=80, deadline=None)
@given(
    drawn=layouts(), choice=st.randoms(use_true_random=False), chunk_bytes=st.sampled_from([777, 64 * KIB])
)
def test_any_layout_comes_back_byte_for_byte(
    drawn: tuple[Layout, list[int]], choice: object, chunk_bytes: int
) -> None:
    """And nothing else is touched: neither the engine's memory nor the slab outside the table."""
    layout, region_bytes = drawn
    engine = CpuCopyEngine()
    memory = EngineMemory(layout, region_bytes, seed=1)
    for spec in layout.components:
        frames = FrameLayout(layout, spec.name)
        n_slots = layout.slots_of(spec.name)
        n_pages = choice.randint(1, n_slots)  # type: ignore[attr-defined]  # random.Random
        slots = choice.sample(range(n_slots), n_pages)  # type: ignore[attr-defined]
        back = choice.sample(range(n_slots), n_pages)  # type: ignore[attr-defined]
        host = HostMemory(frames, n_pages, seed=2)
        guards, before = host.guards(), memory.copies()
        payloads = [memory.payload(spec.name, slot) for slot in slots]

        store(engine, memory, host, slots, chunk_bytes)
        assert [host.payload(i) for i in range(n_pages)] == payloads
        assert np.array_equal(host.guards(), guards)
        assert all(map(np.array_equal, memory.regions, before))

        expected = EngineMemory(layout, region_bytes, seed=1)
        for region, found in zip(expected.regions, memory.regions, strict=True):
            region[:] = found
        for slot, payload in zip(back, payloads, strict=True):
            expected.write(spec.name, slot, payload)
        load(engine, memory, host, back, chunk_bytes)
        assert all(map(np.array_equal, memory.regions, expected.regions))
        assert [host.payload(i) for i in range(n_pages)] == payloads


@pytest.mark.parametrize("nbytes", [1, 3, 16 * KIB - 1, 16 * KIB, MIB - 1, MIB])
@pytest.mark.parametrize("n_layers", [1, 40])
def test_planes_of_one_byte_to_one_mebibyte(nbytes: int, n_layers: int) -> None:
    n_slots = 12 if nbytes * n_layers < MIB else 2
    planes, end = placed(Shape((nbytes,) * n_layers, False, 1, 1), n_slots, 0, 1)
    layout = Layout(64, (ComponentSpec("full", Kind.FULL),), (Pool("kv", "full", n_slots, planes),))
    memory = EngineMemory(layout, [end], seed=4)
    host = HostMemory(FrameLayout(layout, "full"), n_slots, seed=5)
    payloads = [memory.payload("full", slot) for slot in range(n_slots)]
    store(CpuCopyEngine(), memory, host, range(n_slots))
    for region in memory.regions:
        region[:] = 0
    load(CpuCopyEngine(), memory, host, list(reversed(range(n_slots))))
    assert [memory.payload("full", slot) for slot in reversed(range(n_slots))] == payloads


def deepseek_v4(n_full: int, n_swa: int) -> tuple[Layout, list[int]]:
    """Pages of 128 tokens. FULL: latents compressed four to one in 21 layers, three sidecars (128 to one
    in 20 layers, an indexer's keys, the compressor's states). SWA with its own slots: every layer's
    latents, two sidecars. Latents are rows of 584 bytes: 448 in fp8, 64 in bf16, 8 of scales."""
    full = [
        ("c4", Shape((32 * 584,) * 21, False, 0, 0)),
        ("c128", Shape((584,) * 20, False, 0, 0)),
        ("indexer", Shape((32 * 132,) * 21, False, 0, 0)),
        ("compressor", Shape((8192, 1040) * 21, True, 0, 16)),
    ]
    swa = [
        ("window", Shape((128 * 584,) * 43, False, 0, 0)),
        ("window_state", Shape((2048,) * 21, False, 8, 0)),
        ("window_index", Shape((520, 12) * 21, True, 0, 0)),
    ]
    ends, pools = [0, 0], []
    for region, (component, n_slots, shapes) in enumerate((("full", n_full, full), ("swa", n_swa, swa))):
        for name, shape in shapes:
            planes, ends[region] = placed(shape, n_slots, region, ends[region])
            pools.append(Pool(name, component, n_slots, planes, "fp8 584"))
    components = (ComponentSpec("full", Kind.FULL), ComponentSpec("swa", Kind.SWA, 128))
    return Layout(128, components, tuple(pools)), ends


def test_deepseek_v4_through_slab_and_scheduler() -> None:
    """FULL and SWA with own slot spaces, three sidecars on FULL and two on SWA, planes of many sizes."""
    layout, region_bytes = deepseek_v4(n_full=7, n_swa=4)
    memory = EngineMemory(layout, region_bytes, seed=21)
    rng = np.random.default_rng(22)
    frames = {name: FrameLayout(layout, name) for name in ("full", "swa")}
    assert frames["full"].payload_bytes == 21 * 32 * 584 + 20 * 584 + 21 * 32 * 132 + 21 * (8192 + 1040)
    assert frames["swa"].payload_bytes == 43 * 128 * 584 + 21 * 2048 + 21 * (520 + 12)
    moves = {"full": ([5, 0, 3, 6], [1, 6, 2, 0]), "swa": ([3, 1], [0, 3])}
    with HostSlab(40 * MIB) as slab, TransferScheduler(CpuCopyEngine(), threads=2) as scheduler:
        slab.plan([frame.frame_bytes for frame in frames.values()])
        hashes = {
            name: rng.integers(0, 256, (len(to), 32), dtype=np.uint8) for name, (_, to) in moves.items()
        }
        arenas = {name: slab.arena(frame.frame_bytes) for name, frame in frames.items()}
        payloads, addresses, backups = {}, {}, []
        for name, (slots, _) in moves.items():
            host_slots = arenas[name].alloc(len(slots))
            assert host_slots is not None
            payloads[name] = [memory.payload(name, slot) for slot in slots]
            addresses[name] = at = arenas[name].addresses(host_slots)
            table = CopyTable.store(frames[name].table(memory.mapped, np.array(slots, np.int32), at))
            pages = np.arange(len(slots), dtype=np.int32)

            def seal(name: str = name, at: np.ndarray = at, pages: np.ndarray = pages) -> None:
                frames[name].seal(at, hashes[name], pages)

            backups.append(scheduler.submit(Direction.STORE, table, then=seal))
        for backup in backups:
            backup.result(DEADLINE_S)
        for region in memory.regions:
            region[:] = 0xAA
        for name, (_, back) in moves.items():
            pages = np.arange(len(back), dtype=np.int32)
            assert frames[name].verify(addresses[name], hashes[name], pages).all()
            table = frames[name].table(memory.mapped, np.array(back, np.int32), addresses[name])
            scheduler.submit(Direction.LOAD, CopyTable.load(table)).result(DEADLINE_S)
        for name, (_, back) in moves.items():
            assert [memory.payload(name, slot) for slot in back] == payloads[name]
    untouched = [slot for slot in range(7) if slot not in moves["full"][1]]
    assert all(set(memory.payload("full", slot)) == {0xAA} for slot in untouched)


def with_sidecar(kv_bytes: int = 100, scale_bytes: int = 8, n_slots: int = 6) -> tuple[Layout, list[int]]:
    kv, end = placed(Shape((kv_bytes,) * 2, False, 0, 0), n_slots, 0, 0)
    scale, end = placed(Shape((scale_bytes,) * 2, False, 0, 0), n_slots, 0, end)
    pools = (Pool("kv", "full", n_slots, kv), Pool("scale", "full", n_slots, scale))
    return Layout(16, (ComponentSpec("full", Kind.FULL),), pools), [end]


def test_a_sidecar_follows_its_anchor_into_other_slots() -> None:
    """SIDECAR-01: side data is found through the new slots, not where it once was."""
    layout, region_bytes = with_sidecar()
    memory = EngineMemory(layout, region_bytes, seed=31)
    host = HostMemory(FrameLayout(layout, "full"), 2, seed=32)
    kept = [memory.page("scale", slot) for slot in (0, 1)]
    store(CpuCopyEngine(), memory, host, [0, 1])
    other = EngineMemory(layout, region_bytes, seed=33)  # another prompt takes all of L1
    memory.regions[0][:] = other.regions[0]
    load(CpuCopyEngine(), memory, host, [4, 2])
    assert [memory.page("scale", slot) for slot in (4, 2)] == kept
    assert [memory.page("scale", slot) for slot in (0, 1, 3, 5)] == [
        other.page("scale", slot) for slot in (0, 1, 3, 5)
    ]


def test_a_pool_that_cannot_follow_is_refused_at_registration() -> None:
    """SIDECAR-01, SIDECAR-04: never ignored, and the sizes are in the message."""
    layout, region_bytes = with_sidecar()
    kv, scale = layout.pools
    shorter = Pool("scale", "full", 5, scale.planes)
    with pytest.raises(LayoutError, match=r"'kv': 6, 'scale': 5"):
        Layout(16, layout.components, (kv, shorter)).validate(region_bytes)


def test_a_load_is_complete_only_when_every_pools_part_has_landed() -> None:
    """SIDECAR-03: the sidecar's bytes alone are late."""
    layout, region_bytes = with_sidecar(scale_bytes=60)
    frames = FrameLayout(layout, "full")
    memory = EngineMemory(layout, region_bytes, seed=41)
    host = HostMemory(frames, 1, seed=42)
    table = CopyTable.load(frames.table(memory.mapped, np.array([0], np.int32), host.addresses))
    sidecar_starts = layout.pools[1].planes[0].offset + memory.mapped[0].address
    with GatedEngine().opened_at_the_end() as engine:
        scheduler = TransferScheduler(engine, threads=4, chunk_bytes=100)
        future = scheduler.submit(Direction.LOAD, table)
        chunks = [engine.next() for _ in range(4)]
        assert len(table) == 4
        assert sum(int(target) >= sidecar_starts for target in table.target) == 2
        sidecar_sources = set(table.source[table.target >= np.uint64(sidecar_starts)].tolist())
        late = [chunk for chunk in chunks if chunk.label in sidecar_sources]
        for chunk in chunks:
            if chunk not in late:
                chunk.land()
        late[0].land()
        for _ in range(3):  # the three threads have gone on
            scheduler.submit(Direction.LOAD, table.joined([]), then=lambda: None).result(DEADLINE_S)
        assert not future.done()
        late[1].land()
        assert future.result(DEADLINE_S) is None
    assert scheduler.close(DEADLINE_S)


def test_rows_come_back_whole_with_their_scales() -> None:
    """SIDECAR-04: rows of 528 bytes, 512 of numbers and 16 of scales; the host row is the device row."""
    planes, end = placed(Shape((528 * 16,) * 3, False, 0, 0), 4, 0, 0)
    layout = Layout(16, (ComponentSpec("full", Kind.FULL),), (Pool("kv", "full", 4, planes, "fp8 528"),))
    frames = FrameLayout(layout, "full")
    assert frames.payload_bytes == 3 * 16 * 528
    memory = EngineMemory(layout, [end], seed=51)
    host = HostMemory(frames, 2, seed=52)
    rows = memory.payload("full", 1), memory.payload("full", 3)
    store(CpuCopyEngine(), memory, host, [1, 3])
    memory.regions[0][:] = 0
    load(CpuCopyEngine(), memory, host, [0, 2])
    assert (memory.payload("full", 0), memory.payload("full", 2)) == rows


def test_frames_of_logical_rows_are_never_taken_for_frames_of_whole_rows() -> None:
    """SIDECAR-04: a pool declared with 512-byte rows does not read what one of 528-byte rows wrote."""
    pages, hashes = np.zeros(1, np.int32), np.zeros((1, 32), np.uint8)
    frames = []
    for row_bytes in (528, 512):
        planes, _ = placed(Shape((row_bytes,), False, 0, 0), 1, 0, 0)
        pools = (Pool("kv", "full", 1, planes),)
        frames.append(FrameLayout(Layout(1, (ComponentSpec("full", Kind.FULL),), pools), "full"))
    slot = np.zeros(1024, dtype=np.uint8)
    address = np.array([slot.ctypes.data], dtype=np.uint64)
    frames[0].seal(address, hashes, pages)
    assert frames[0].verify(address, hashes, pages).all()
    assert not frames[1].verify(address, hashes, pages).any()


ROW, TOKENS, SLOTS, LAYERS = 24, 16, 5, 3
BLOCK = ROW * TOKENS


def kv_layout(order: str) -> tuple[Layout, list[int]]:
    """K and V of every layer as frameworks lay them out."""
    planes = []
    for layer in range(LAYERS):
        for which in range(2):
            if order == "[2, N, ...]":  # all K, then all V
                start = (2 * layer + which) * SLOTS * BLOCK
                planes.append(Plane(0, start, BLOCK, BLOCK, layer))
            elif order == "[N, 2, ...]":  # K and V of a block side by side
                start = layer * SLOTS * 2 * BLOCK + which * BLOCK
                planes.append(Plane(0, start, 2 * BLOCK, BLOCK, layer))
            else:  # packed: everything of a block together
                planes.append(Plane(0, (2 * layer + which) * BLOCK, 2 * LAYERS * BLOCK, BLOCK, layer))
    pools = (Pool("kv", "full", SLOTS, tuple(planes), "u8 k,v"),)
    return Layout(TOKENS, (ComponentSpec("full", Kind.FULL),), pools), [2 * LAYERS * SLOTS * BLOCK]


ORDERS = ("[2, N, ...]", "[N, 2, ...]", "packed")


@pytest.mark.parametrize("writer", ORDERS)
@pytest.mark.parametrize("reader", ORDERS)
def test_k_and_v_come_back_whatever_their_order_in_memory(writer: str, reader: str) -> None:
    """KEY-10: the layout is declared, not guessed from a shape; a frame has one order for all."""
    engine = CpuCopyEngine()
    first, second = (EngineMemory(*kv_layout(order), seed=s) for s, order in enumerate((writer, reader)))
    host = HostMemory(FrameLayout(first.layout, "full"), 3, seed=62)
    payloads = [first.payload("full", slot) for slot in (4, 0, 2)]
    store(engine, first, host, [4, 0, 2])
    assert FrameLayout(second.layout, "full").identity == host.frames.identity
    host.frames = FrameLayout(second.layout, "full")
    load(engine, second, host, [1, 2, 3])
    assert [second.payload("full", slot) for slot in (1, 2, 3)] == payloads


@pytest.mark.parametrize("change", [{"stride": BLOCK - 1}, {"stride": 3 * BLOCK}, {"offset": BLOCK // 2}])
def test_strides_that_do_not_match_are_refused_at_registration(change: dict[str, int]) -> None:
    """KEY-10."""
    layout, region_bytes = kv_layout("[2, N, ...]")
    (pool,) = layout.pools
    wrong = Plane(**{**vars(pool.planes[2]), **change})
    planes = (*pool.planes[:2], wrong, *pool.planes[3:])
    with pytest.raises(LayoutError, match=r"pools\['kv'\]"):
        Layout(TOKENS, layout.components, (Pool("kv", "full", SLOTS, planes),)).validate(region_bytes)
