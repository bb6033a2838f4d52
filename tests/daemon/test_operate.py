"""Pinning, draining and flushing by operators: real gRPC in front of a real controller; a real daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result
from grpc import StatusCode

from controller.daemon.cli import EX_FAILED, main
from controller.daemon.port import NotReady
from controller.models import HOST
from controller.settings import HostShares
from proto.v1 import hicache_pb2 as pb
from tests.controller.rig import TaggedEngine, until
from tests.daemon.operator_rig import OperatorRig, operator_rig
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

A = prompt(1, 40)
"""Ten pages."""
SMALL_BYTES = 256 << 10
"""Host memory for some forty such prompts."""


@pytest.fixture
async def rig(short_path: str) -> AsyncIterator[OperatorRig]:
    async with operator_rig(f"{short_path}/s") as one:
        yield one


async def refusal(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def stored(
    engine: TaggedEngine, tokens: object, salt: str = "", marks: list[int] | None = None
) -> None:
    await engine.backup(tokens, engine.all_pages(tokens, marks), salt)


def pin_of(tokens: object, **fields: object) -> pb.PinPrefixRequest:
    return pb.PinPrefixRequest(
        tokens=np.asarray(tokens, "<i4").tobytes(), **{"engine_id": "engine", **fields}
    )


# ---- pins


async def test_a_pinned_prefix_outlives_a_flood(short_path: str) -> None:
    """SESSION-07: flood with one-shot prompts; what is retained stays, everything else comes and goes."""
    async with operator_rig(f"{short_path}/s", capacity_bytes=SMALL_BYTES) as rig:
        engine = rig.engine()
        await stored(engine, A)
        kept = (await rig.admin.PinPrefix(pin_of(A, keep_s=60))).retained
        assert (kept.kept_pages, kept.asked_pages, kept.reason) == (10, 10, "")
        first = prompt(100, 40)
        for seed in range(100, 300):
            await stored(engine, prompt(seed, 40))
        assert rig.controller.counters.host_evicted_pages > 1000
        assert rig.controller.counters.retained_gave_way == 0
        assert engine.lookup(first).boundary == 0
        assert await engine.load_and_check(A) == 10


async def test_a_pin_beyond_its_budget_is_granted_in_part_and_says_so(rig: OperatorRig) -> None:
    """SESSION-07: ask for more than the budget: partial grant is reported, at a boundary that can be used."""
    engine = rig.engine()
    await stored(engine, A, marks=[2, 4, 7, 10])
    shelves = rig.controller._host.models[0].shelves
    pages = {"full": 6, "swa": 2, "mamba": 1}  # enough for boundary 6; checkpoints are at 4 and 7
    budget_bytes = sum(n * shelves[name].slot_bytes for name, n in pages.items())
    share = (budget_bytes + 1) / rig.controller.status().host_capacity_bytes
    kept = (await rig.admin.PinPrefix(pin_of(A, host_share=share))).retained
    assert (kept.kept_pages, kept.asked_pages, kept.reason) == (4, 10, "budget")
    assert kept.nbytes == budget_bytes - 2 * shelves["full"].slot_bytes
    await until(lambda: rig.controller.flush()[0] == 0)
    assert await engine.load_and_check(A) == 4
    none = (await rig.admin.PinPrefix(pin_of(prompt(2, 40)))).retained
    assert (none.pin_id, none.kept_pages, none.reason) == ("", 0, "not_in_host_memory")
    longer = np.concatenate([A, prompt(3, 40)])
    more = (await rig.admin.PinPrefix(pin_of(longer))).retained
    assert (more.kept_pages, more.asked_pages, more.reason) == (4, 20, "not_in_host_memory")
    again = (await rig.admin.PinPrefix(pin_of(A))).retained
    listed = (await rig.admin.Status(pb.StatusRequest())).retained
    assert [one.pin_id for one in listed] == [more.pin_id, again.pin_id]  # the same again replaces the first


async def test_all_pins_together_stay_within_the_configured_share(short_path: str) -> None:
    """SESSION-07: the budget is one for all."""
    async with operator_rig(f"{short_path}/s", retain_share=0.004) as rig:
        engine = rig.engine()
        total = 0
        for seed in range(4):
            await stored(engine, prompt(seed, 40), marks=list(range(1, 11)))
            total += (await rig.admin.PinPrefix(pin_of(prompt(seed, 40)))).retained.nbytes
            assert total <= 0.004 * rig.controller.status().host_capacity_bytes
        assert 0 < len((await rig.admin.Status(pb.StatusRequest())).retained) < 4


async def test_a_hit_extends_a_pin_and_without_one_it_ends_by_itself(
    rig: OperatorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SESSION-07: hit at 50 s, wait 61 s after the last hit; after expiry A is ordinary."""
    engine = rig.engine()
    now_s = 1000.0
    monkeypatch.setattr(rig.controller.retention, "_clock", lambda: now_s)
    await stored(engine, A)
    await rig.admin.PinPrefix(pin_of(A, keep_s=60))
    now_s += 50
    assert await engine.load_and_check(np.concatenate([A, prompt(9, 4)])) == 10
    now_s += 50
    rig.controller.retention.expire()
    assert rig.controller.retention.status()[0].left_s == 10
    await until(lambda: rig.controller._leases.expire() == 0 and len(rig.controller._leases) == 0)
    rig.controller.flush()
    assert await engine.load_and_check(prompt(2, 40)) == 0  # others do not extend it
    now_s += 11
    rig.controller.retention.expire()
    assert rig.controller.retention.status() == ()
    assert rig.controller.counters.retained_expired == 1
    await until(lambda: rig.controller.flush()[1] == 0)
    assert await engine.load_and_check(A) == 0


async def test_running_work_takes_the_room_of_pins_when_nothing_else_is_left(short_path: str) -> None:
    """SESSION-07: running work never fails because of retention: the least recently hit pin gives way."""
    async with operator_rig(f"{short_path}/s", capacity_bytes=SMALL_BYTES, retain_share=0.9) as rig:
        engine, counters = rig.engine(), rig.controller.counters
        pinned = []
        for seed in range(20):
            await stored(engine, prompt(seed, 40))
            pinned.append((await rig.admin.PinPrefix(pin_of(prompt(seed, 40)))).retained.pin_id)
        assert all(pinned)
        for seed in range(100, 200):
            tokens = prompt(seed, 40)
            outcomes = (await engine.backup(tokens, engine.all_pages(tokens))).values()
            assert [outcome.refused_pages for outcome in outcomes] == [0, 0, 0]
            assert engine.lookup(tokens).boundary == 10  # a lease: running work that holds its room
            if counters.retained_gave_way >= 3:
                break
        left = [one.pin_id for one in rig.controller.retention.status()]
        assert left == pinned[counters.retained_gave_way :]  # oldest hit first
        assert len(left) < 20


async def test_a_tenants_pins_give_way_to_its_own_work_at_its_quota(short_path: str) -> None:
    """SESSION-07, SESSION-10: retention does not make a tenant's running work fail; others' pins stay."""
    shares = HostShares(quotas_bytes={"t": 64 << 10})
    async with operator_rig(f"{short_path}/s", host_shares=shares, retain_share=0.9) as rig:
        engine = rig.engine()
        for salt in ("t", "other"):
            for seed in range(5):
                await stored(engine, prompt(seed, 40), salt=salt)
                assert (await rig.admin.PinPrefix(pin_of(prompt(seed, 40), salt=salt))).retained.pin_id
        for seed in range(100, 120):
            tokens = prompt(seed, 40)
            outcomes = (await engine.backup(tokens, engine.all_pages(tokens), "t")).values()
            assert [outcome.refused_pages for outcome in outcomes] == [0, 0, 0]
            assert engine.lookup(tokens, "t").boundary == 10  # a lease: running work that holds its room
            if rig.controller.counters.retained_gave_way >= 2:
                break
        assert rig.controller.counters.retained_gave_way >= 2
        kept = [one.namespace.salt for one in rig.controller.retention._kept.values()]
        assert kept.count("other") == 5
        assert rig.controller._host.tenant_bytes("t") <= 64 << 10


async def test_unpin_ends_a_pin_once(rig: OperatorRig) -> None:
    engine = rig.engine()
    await stored(engine, A, salt="t")
    kept = (
        await rig.admin.PinPrefix(pin_of(A, salt="t", engine_id="", model="model", revision="r1"))
    ).retained
    assert (kept.kept_pages, kept.model) == (10, "model")
    assert (await rig.admin.PinPrefix(pin_of(A))).retained.kept_pages == 0  # another tenant's
    await rig.admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=kept.pin_id))
    again = await refusal(rig.admin.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=kept.pin_id)))
    assert again.code() is StatusCode.NOT_FOUND
    assert rig.controller.flush()[1] == 0
    index = rig.controller._host.models[0].index
    assert [index.pinned(name, HOST) for name in ("full", "swa", "mamba")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.PinPrefixRequest(tokens=b"\0\0\0\0"), "engine_id: give an attached engine's id"),
        (pin_of(A, host_share=1.5), "host_share: 1.5"),
        (pin_of(A, host_share=float("nan")), "host_share: nan"),
        (pin_of(A, keep_s=-1), "keep_s: -1"),
        (pin_of(A, keep_s=float("inf")), "keep_s: inf"),
        (pb.PinPrefixRequest(engine_id="e", tokens=b"\0"), "tokens: "),
        (pin_of(A, engine_id="", model="other"), "model: 0 models are called 'other'"),
    ],
)
async def test_a_pin_that_makes_no_sense_is_refused(
    rig: OperatorRig, request_: pb.PinPrefixRequest, text: str
) -> None:
    error = await refusal(rig.admin.PinPrefix(request_))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(text)


# ---- a flush that preserves


async def test_a_preserving_flush_stores_everything_first(rig: OperatorRig, tmp_path: Path) -> None:
    """WRITE-08, healthy: what was only in host memory is in storage afterwards, whole."""
    engine = rig.engine()
    shared = prompt(7, 24)
    prompts = [np.concatenate([shared, prompt(seed, 16)]) for seed in range(20, 24)] + [prompt(30, 400)]
    for tokens in prompts[:4]:
        await stored(engine, tokens)
    backend = json.dumps({"kind": "file", "path": str(tmp_path / "objects")})
    await rig.admin.AttachStorage(pb.AttachStorageRequest(backend=backend))
    flushed = await rig.admin.Flush(pb.FlushRequest(preserve=True, timeout_s=20))
    assert flushed.dropped_pages > 0
    assert flushed.kept_pages == 0
    for tokens in prompts[:4]:
        assert engine.lookup(tokens).boundary == 0
        assert (await engine.prefetch(tokens)).boundary == 10
        assert await engine.load_and_check(tokens) == 10


async def test_a_preserving_flush_believes_no_mark(rig: OperatorRig, tmp_path: Path) -> None:
    """WRITE-08, L3-04's kind: what storage has lost since it was written is written again."""
    engine = rig.engine()
    backend = json.dumps({"kind": "file", "path": str(tmp_path / "objects")})
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
    await stored(engine, A)
    await until(lambda: rig.controller.counters.storage_written_pages == 21)
    lost = [
        path for path in (tmp_path / "objects").rglob("*") if path.is_file() and path.stat().st_size > 100
    ]
    assert len(lost) >= 21
    await rig.admin.DetachStorage(pb.DetachStorageRequest(name="l3"))
    for path in lost:
        path.unlink()
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
    await rig.admin.Flush(pb.FlushRequest(preserve=True, timeout_s=20))
    assert (await engine.prefetch(A)).boundary == 10
    assert await engine.load_and_check(A) == 10


async def test_a_preserving_flush_is_refused_when_storage_cannot(rig: OperatorRig, tmp_path: Path) -> None:
    """WRITE-08, broken: the flush is refused, nothing is cleared, the error says what is missing."""
    engine = rig.engine()
    await stored(engine, A)
    error = await refusal(rig.admin.Flush(pb.FlushRequest(preserve=True, timeout_s=0.3)))
    assert error.code() is StatusCode.FAILED_PRECONDITION
    assert "no storage tier takes writes" in error.details()
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    backend = json.dumps({"kind": "file", "path": str(blocker / "objects")})
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend, required=False))
    error = await refusal(rig.admin.Flush(pb.FlushRequest(preserve=True, timeout_s=0.3)))
    assert error.code() is StatusCode.FAILED_PRECONDITION
    for part in (
        "nothing was dropped",
        "model/full: 10 pages",
        "model/swa: 10",
        "model/mamba: 1",
        "storage l3",
    ):
        assert part in error.details()
    assert await engine.load_and_check(A) == 10
    blocker.unlink()
    await until(lambda: not rig.controller.status().problems)
    await rig.admin.Flush(pb.FlushRequest(preserve=True, timeout_s=20))
    assert engine.lookup(A).boundary == 0


async def test_a_preserving_flush_of_nothing_is_done_at_once(rig: OperatorRig) -> None:
    rig.engine()
    assert (await rig.admin.Flush(pb.FlushRequest(preserve=True))).dropped_pages == 0


# ---- draining


async def test_a_drain_tells_when_nothing_runs(rig: OperatorRig, tmp_path: Path) -> None:
    engine = rig.engine()
    backend = json.dumps({"kind": "file", "path": str(tmp_path / "objects")})
    await rig.admin.AttachStorage(pb.AttachStorageRequest(backend=backend))
    await stored(engine, A)
    drained = await rig.admin.Drain(pb.DrainRequest(timeout_s=10))
    assert (drained.idle, list(drained.running)) == (True, [])
    assert rig.controller.counters.storage_written_pages == 21
    with pytest.raises(NotReady, match="draining"):
        rig.readiness.check_takes_on()
    rig.readiness.check()  # who is here is served
    assert not rig.readiness.ready
    await rig.admin.Drain(pb.DrainRequest(resume=True))
    rig.readiness.check_takes_on()
    assert rig.readiness.ready


async def test_a_drain_says_what_still_runs(
    rig: OperatorRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.engine()
    goes_on, copied = asyncio.Event(), asyncio.Event()
    copy = rig.controller._copier.copy

    async def slow(*arguments: object, **named: object) -> int:
        copied.set()
        await goes_on.wait()
        return await copy(*arguments, **named)

    monkeypatch.setattr(rig.controller._copier, "copy", slow)
    backup = asyncio.ensure_future(stored(engine, A))
    await copied.wait()
    drained = await rig.admin.Drain(pb.DrainRequest(timeout_s=0.2))
    assert not drained.idle
    assert "1 transfers of engines" in drained.running
    waiting = asyncio.ensure_future(rig.admin.Drain(pb.DrainRequest(timeout_s=10)))
    goes_on.set()
    await backup
    assert (await waiting).idle


def hicache(daemon: LiveDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "-a", daemon.address.removeprefix("unix:")])


def test_an_operators_day(short_path: str) -> None:
    """SESSION-07, WRITE-08 on a real daemon, by the command line: pin, list, unpin, drain, preserve, restart;
    the restarted daemon has everything, byte for byte."""
    daemon = LiveDaemon(Path(short_path))
    layout, nbytes = make_layout({"full": 64, "swa": 64, "mamba": 16})
    engine = LiveEngine(daemon.address, layout, nbytes, "engine")
    try:
        engine.serve("r1", A)
        engine.settle()
        wait_until(lambda: daemon.counter("storage_written_pages") == 21, "writes")
        wait_until(lambda: not any(pool.pinned_pages for pool in daemon.status().pools), "unpinned pages")
        ids = " ".join(map(str, A.tolist()))
        pinned = hicache(daemon, "pin", "--engine", "engine", "--for", "60", ids)
        assert pinned.output == "pin-1: 10 of 10 pages kept\n"
        assert "pin-1" in hicache(daemon, "status").output
        # Pinned are ten pages of FULL, SWA's window of two, and the checkpoint.
        assert hicache(daemon, "flush").output.startswith("dropped 8 pages, kept 13")
        assert hicache(daemon, "unpin", "pin-1").output == "pin-1: unpinned\n"
        assert hicache(daemon, "unpin", "pin-1").exit_code == EX_FAILED
        nothing = hicache(daemon, "pin", "--engine", "engine", "1 2 3 4")
        assert nothing.exit_code == EX_FAILED
        assert nothing.output == "nothing: 0 of 1 pages kept (not in host memory)\n"
        drained = hicache(daemon, "drain", "--wait", "10")
        assert drained.output == "drained: nothing runs\n"
        assert "draining" in hicache(daemon, "status").output
        late = LiveEngineAttempt(daemon.address, layout, nbytes)
        assert "draining" in late.problem
        flushed = hicache(daemon, "flush", "--preserve", "--wait", "10")
        assert flushed.output == "dropped 13 pages, kept 0 that are in use\n"
    finally:
        engine.close()
        code = daemon.stop()
    assert code == 0
    daemon.start()
    try:
        again = LiveEngine(daemon.address, layout, nbytes, "again")
        request = again.serve("r2", np.concatenate([A, prompt(5, 4)]))
        assert request.boundary == 10
        again.close()
    finally:
        daemon.stop()
        daemon.close()


class LiveEngineAttempt:
    """What an engine is told that tries to attach."""

    def __init__(self, address: str, layout: object, nbytes: int) -> None:
        from proto.v1.hicache_pb2_grpc import HybridCacheStub
        from tests.daemon.rig import registration

        with grpc.insecure_channel(address) as channel:
            first = pb.EngineMessage(registration=registration("late", [b"0" * 16]))
            stream = HybridCacheStub(channel).Attach(iter([first]))
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            self.problem = str(caught.value.details())
