"""Storage tiers that come and go at run time: real gRPC, real workers, and a real daemon under load."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result
from grpc import StatusCode

from controller.daemon.cli import EX_FAILED, main
from controller.daemon.tiers import StorageTiers
from controller.requests import PrefetchPolicy
from controller.storage import StorageTier
from proto.v1 import hicache_pb2 as pb
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.specs import MemorySpec
from tests.controller.rig import until
from tests.daemon.operator_rig import OperatorRig, operator_rig
from tests.live import LiveDaemon, LiveEngine, wait_until
from tests.tagged import make_layout, prompt

TOKENS = prompt(1, 40)
ALL = 21


@pytest.fixture
async def rig(short_path: str) -> AsyncIterator[OperatorRig]:
    async with operator_rig(f"{short_path}/s", storage_timeout_s=0.3) as one:
        yield one


def file_backend(folder: Path, name: str = "objects") -> str:
    return json.dumps({"kind": "file", "path": str(folder / name)})


async def refusal(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_tier_comes_and_goes_and_its_pages_keep_their_names(rig: OperatorRig, tmp_path: Path) -> None:
    """ATTACH-01, ATTACH-05: attached again, the same tier serves what it holds, byte for byte."""
    engine = rig.engine()
    backend = file_backend(tmp_path)
    reply = await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
    assert (reply.opened, reply.name, reply.problem) == (True, "l3", "")
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: rig.controller.counters.storage_written_pages == ALL)
    for _ in range(2):
        assert (await rig.admin.DetachStorage(pb.DetachStorageRequest(name="l3"))).stopped
        assert await engine.load_and_check(TOKENS) == 10  # host memory goes on serving
        await until(lambda: rig.controller.flush()[1] == 0)
        assert (await engine.prefetch(TOKENS)).storage_boundary == 0
        await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
        assert (await engine.prefetch(TOKENS)).boundary == 10
        assert await engine.load_and_check(TOKENS) == 10
    status = await rig.admin.Status(pb.StatusRequest())
    assert status.counters["backend_write_ok"] == ALL  # what the departed worker did still counts


async def test_the_same_backend_again_sets_its_use_and_another_is_refused(
    rig: OperatorRig, tmp_path: Path
) -> None:
    """ATTACH-01: same backend again = update of policy only; different backend without detach = refused."""
    backend = file_backend(tmp_path)
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
    pid = worker_of(rig.tiers, "l3").worker_pid
    spelt_otherwise = f"{{path: {tmp_path}/x/../objects, kind: file}}"
    again = await rig.admin.AttachStorage(
        pb.AttachStorageRequest(name="l3", backend=spelt_otherwise, write=False)
    )
    assert not again.opened
    one = (await rig.admin.Status(pb.StatusRequest())).backends[0]
    assert (one.read, one.write, one.breaker) == (True, False, "closed")
    assert worker_of(rig.tiers, "l3").worker_pid == pid
    other = pb.AttachStorageRequest(name="l3", backend=file_backend(tmp_path, "elsewhere"))
    error = await refusal(rig.admin.AttachStorage(other))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert "name: a storage tier 'l3' with another backend is attached; detach it first" in error.details()
    await rig.admin.UpdateStorage(pb.UpdateStorageRequest(name="l3", read=False, write=True))
    one = (await rig.admin.Status(pb.StatusRequest())).backends[0]
    assert (one.read, one.write) == (False, True)


def worker_of(tiers: StorageTiers, name: str) -> StorageTier:
    return tiers._owned[name].tier


async def test_status_says_what_a_tier_does_not_do(rig: OperatorRig) -> None:
    """ATTACH-03: backends here have all verbs by contract (an incomplete one is no StorageBackend); what is
    switched off, or not told, is named with its capability."""
    await rig.admin.AttachStorage(
        pb.AttachStorageRequest(name="archive", backend="{kind: memory}", read=False, write=False)
    )
    off = list((await rig.admin.Status(pb.StatusRequest())).backends[0].off)
    assert any(text.startswith("read: switched off") for text in off)
    assert any(text.startswith("write: switched off") for text in off)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (pb.AttachStorageRequest(), StatusCode.INVALID_ARGUMENT, "backend: empty"),
        (
            pb.AttachStorageRequest(backend="{kind: file, pth: /x}"),
            StatusCode.INVALID_ARGUMENT,
            "backend.pth: unknown key; did you mean `path`?",
        ),
        (
            pb.AttachStorageRequest(backend="{kind: file, path: /proc/nothing/here}"),
            StatusCode.FAILED_PRECONDITION,
            "mend it, or attach it with `required: false`",
        ),
        (pb.DetachStorageRequest(name="x"), StatusCode.NOT_FOUND, "no storage tier 'x' is attached"),
        (pb.DetachStorageRequest(), StatusCode.INVALID_ARGUMENT, "name: empty"),
        (
            pb.DetachStorageRequest(name="x", timeout_s=-1),
            StatusCode.INVALID_ARGUMENT,
            "timeout_s: -1.0",
        ),
        (pb.UpdateStorageRequest(name="x"), StatusCode.NOT_FOUND, "no storage tier 'x' is attached"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_with_its_reason(
    rig: OperatorRig, request_: object, code: StatusCode, text: str
) -> None:
    """CONFIG-01: at run time as at start; nothing is left behind."""
    verb = type(request_).__name__.removesuffix("Request")
    error = await refusal(getattr(rig.admin, verb)(request_))
    assert error.code() is code
    assert text in error.details()
    assert (await rig.admin.Status(pb.StatusRequest())).backends == []


async def test_a_tier_that_is_not_required_is_attached_and_tried_again(
    rig: OperatorRig, tmp_path: Path
) -> None:
    """CONFIG-01: degraded as configured, health says why, and it heals by itself."""
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    request = pb.AttachStorageRequest(backend=file_backend(blocker), name="l3", required=False)
    assert "objects" in (await rig.admin.AttachStorage(request)).problem
    assert any("storage l3" in problem for problem in rig.controller.status().problems)
    blocker.unlink()
    await until(lambda: not rig.controller.status().problems)


async def test_changes_are_for_the_unix_socket_only(rig: OperatorRig, tmp_path: Path) -> None:
    """SECURITY-02's kind: anybody on the machine reaches loopback; only the user reaches the socket."""
    attach = pb.AttachStorageRequest(name="l3", backend=file_backend(tmp_path))
    for call in (
        rig.admin_by_tcp.AttachStorage(attach),
        rig.admin_by_tcp.UpdateStorage(pb.UpdateStorageRequest(name="l3")),
        rig.admin_by_tcp.DetachStorage(pb.DetachStorageRequest(name="l3")),
        rig.admin_by_tcp.Flush(pb.FlushRequest()),
    ):
        assert (await refusal(call)).code() is StatusCode.PERMISSION_DENIED
    assert not (tmp_path / "objects").exists()
    assert (await rig.admin_by_tcp.Status(pb.StatusRequest())).ready


async def test_a_second_change_of_a_tier_waits_its_turn(rig: OperatorRig, tmp_path: Path) -> None:
    """ATTACH-04: two operators at once; one of them is told to try again, and nothing is half done."""
    request = pb.AttachStorageRequest(name="l3", backend=file_backend(tmp_path))
    both = await asyncio.gather(
        rig.admin.AttachStorage(request), rig.admin.AttachStorage(request), return_exceptions=True
    )
    errors = [one for one in both if isinstance(one, grpc.aio.AioRpcError)]
    assert [error.code() for error in errors] == [StatusCode.RESOURCE_EXHAUSTED]
    assert len((await rig.admin.Status(pb.StatusRequest())).backends) == 1


async def test_hanging_operations_refuse_a_detach_and_do_not_stop_a_forced_one(
    rig: OperatorRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATTACH-01: a broken tier, 5 prefetches and 5 backups in flight: normal is refused within its bound,
    forced ends within its; pins go, host memory serves, attaching again works. ATTACH-04: health is asked
    at the same time and not disturbed."""
    gate = tmp_path / "gate"
    gate.mkdir()
    freeze = Fault(kind=FaultKind.FREEZE, on=frozenset({"read", "write", "contains"}))
    spec = FaultySpec(inner=MemorySpec(capacity_bytes=64 << 20), faults=(freeze,), gate=str(gate))
    monkeypatch.setattr(
        StorageTiers,
        "_tier",
        lambda tiers, entry: StorageTier(entry.name, spec, tiers._slab.fd, tiers._slab.nbytes),
    )
    engine = rig.engine()
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend="{kind: memory}"))
    pid = worker_of(rig.tiers, "l3").worker_pid
    await engine.backup(TOKENS, engine.all_pages(TOKENS))
    await until(lambda: rig.controller.counters.storage_written_pages == ALL)
    (gate / "closed").touch()
    prompts = [prompt(seed, 40) for seed in range(10, 15)]
    for tokens in prompts:
        await engine.backup(tokens, engine.all_pages(tokens))
    prefetches = [
        asyncio.ensure_future(engine.prefetch(prompt(seed, 40), PrefetchPolicy.TIMEOUT, timeout_s=3.0))
        for seed in range(20, 25)
    ]
    await until(lambda: rig.tiers.counters()["late"] > 0)
    normal = rig.admin.DetachStorage(pb.DetachStorageRequest(name="l3", timeout_s=0.2), timeout=5)
    error = await refusal(normal)
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert "'l3' is not idle after 0.2 s; try again, or force it" in error.details()
    assert len((await rig.admin.Status(pb.StatusRequest())).backends) == 1
    request = pb.DetachStorageRequest(name="l3", force=True, timeout_s=0.2)
    forced = asyncio.ensure_future(rig.admin.DetachStorage(request, timeout=8))
    while not forced.done():
        assert (await rig.admin.Status(pb.StatusRequest(), timeout=2)).ready
    assert (await forced).stopped
    assert not Path(f"/proc/{pid}").exists()
    assert [progress.boundary for progress in await asyncio.gather(*prefetches)] == [0] * 5
    assert [await engine.load_and_check(tokens) for tokens in prompts] == [10] * 5
    await until(lambda: sum(pool.pinned_pages for pool in rig.controller.status().pools) == 0)
    (gate / "closed").unlink()
    await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend="{kind: memory}"))
    assert rig.controller.status().problems == ()


async def test_a_caller_that_gives_up_leaves_no_half_attached_tier(rig: OperatorRig, tmp_path: Path) -> None:
    call = rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=file_backend(tmp_path)))
    await until(lambda: bool(rig.tiers._opening))
    call.cancel()
    await until(lambda: len(rig.controller.status().backends) == 1)
    assert rig.tiers._opening == {}
    await rig.admin.DetachStorage(pb.DetachStorageRequest(name="l3"))


# ---- a real daemon


def hicache(daemon: LiveDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "-a", daemon.address.removeprefix("unix:")])


def test_tiers_come_and_go_under_a_real_engines_load(tmp_path: Path, short_path: str) -> None:
    """ATTACH-01, ATTACH-02: from the command line, normal and forced, while an engine works: every byte it
    reads is right, it never waits for the change, and each change ends."""
    daemon = LiveDaemon(Path(short_path), storage=None)
    layout, nbytes = make_layout({"full": 64, "swa": 64, "mamba": 16})
    engine = LiveEngine(daemon.address, layout, nbytes)
    stop, served = threading.Event(), 0

    def load() -> None:
        nonlocal served
        order = np.random.default_rng(7)
        while not stop.is_set():
            engine.serve(f"r{served}", prompt(int(order.integers(0, 12)), 40))
            served += 1

    working = threading.Thread(target=load)
    try:
        working.start()
        store = file_backend(tmp_path)
        for force in (False, True, False):
            attached = hicache(daemon, "attach-storage", "--name", "l3", store)
            assert attached.output == "l3: attached\n", attached.output
            before = daemon.counter("storage_written_pages")
            after = served + 20
            wait_until(lambda after=after: served >= after, "the engine to go on")
            if not force:
                wait_until(lambda before=before: daemon.counter("storage_written_pages") > before, "writes")
            assert "storage (l3)" in hicache(daemon, "status").output
            detach = ["--force", "--wait", "0.01"] if force else []
            detached = hicache(daemon, "detach-storage", "l3", *detach)
            assert detached.output == "l3: detached\n", detached.output
            after = served + 20
            wait_until(lambda after=after: served >= after, "the engine to go on")
        refused = hicache(daemon, "detach-storage", "l3")
        assert refused.exit_code == EX_FAILED
        assert "no storage tier 'l3' is attached" in refused.stderr
    finally:
        stop.set()
        working.join(timeout=30)
        alive = working.is_alive()
        engine.settle()
        engine.close()
        code = daemon.stop()
        daemon.close()
    assert not alive
    assert code == 0
    assert "internal_error" not in daemon.log.read_text()


def test_tiers_in_the_file_are_asked_in_order_and_one_may_be_away(tmp_path: Path, short_path: str) -> None:
    """CONFIG-01, L3 in trouble: a shared tier that cannot be opened is degraded, not fatal; the local one
    serves a restarted daemon; when the other can be opened it is used, with nothing restarted."""
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    local = {"name": "local", "backend": {"kind": "file", "path": str(tmp_path / "local")}}
    away = {"kind": "file", "path": str(blocker / "shared")}
    tiers = [local, {"name": "shared", "backend": away, "required": False}]
    daemon = LiveDaemon(Path(short_path), storage={"tiers": tiers})
    layout, nbytes = make_layout({"full": 64, "swa": 64, "mamba": 16})
    try:
        assert [one.name for one in daemon.status().backends] == ["local", "shared"]
        assert [one.healthy for one in daemon.status().backends] == [True, False]
        assert any("storage shared" in problem for problem in daemon.status().problems)
        engine = LiveEngine(daemon.address, layout, nbytes)
        engine.serve("r1", TOKENS)
        engine.settle()
        wait_until(lambda: daemon.counter("storage_written_pages") == ALL, "writes")
        engine.close()
        assert daemon.stop() == 0
        daemon.start()
        engine = LiveEngine(daemon.address, layout, nbytes, "again")
        request = engine.serve("r2", np.concatenate([TOKENS, prompt(5, 4)]))
        assert request.boundary == 10
        blocker.unlink()
        wait_until(lambda: all(one.healthy for one in daemon.status().backends), "the shared tier")
        engine.serve("r3", prompt(6, 40))
        engine.settle()
        wait_until(
            lambda: (blocker / "shared").is_dir() and any((blocker / "shared").rglob("*")), "its writes"
        )
        engine.close()
    finally:
        daemon.stop()
        daemon.close()
