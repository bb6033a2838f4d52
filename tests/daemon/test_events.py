"""Events as routers see them: real gRPC in front of a real controller, storage and evictions included."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from controller.models import HOST
from controller.requests import Backup
from proto.v1 import hicache_pb2 as pb
from proto.v1.hicache_pb2_grpc import EventsStub
from tests.controller.rig import TaggedEngine, until
from tests.daemon.operator_rig import OperatorRig, operator_rig
from tests.live import LiveDaemon, LiveEngine
from tests.tagged import hashes_of, make_layout, prompt

A = prompt(1, 40)
WAIT_S = 10.0
Event = pb.PlacementEvent
Content = set[tuple[int, str, bytes]]


@pytest.fixture
async def rig(short_path: str) -> AsyncIterator[OperatorRig]:
    async with operator_rig(f"{short_path}/s") as one:
        yield one


class Router:
    """A watcher that keeps what it is told, and is strict about it."""

    def __init__(self, stub: object, **request: object) -> None:
        self.call = stub.Watch(pb.WatchRequest(**request))
        self.content: Content = set()
        self.events: list[pb.PlacementEvent] = []
        self.gaps: list[tuple[int, int]] = []
        self.started: pb.WatchStarted | None = None
        self.next = 0

    async def read(self) -> str:
        """One message."""
        async with asyncio.timeout(WAIT_S):
            reply = await self.call.read()
        assert isinstance(reply, pb.WatchReply), "the stream ended"
        body = reply.WhichOneof("body")
        if body == "started":
            self.started = reply.started
            self.next = reply.started.next_sequence
        elif body == "gap":
            self.gaps.append((reply.gap.first_sequence, reply.gap.next_sequence))
            self.next = reply.gap.next_sequence
        elif body == "events":
            for event in reply.events.events:
                self.take(event)
        return str(body)

    def take(self, event: pb.PlacementEvent) -> None:
        if event.sequence:
            assert event.sequence == self.next
            self.next += 1
            self.events.append(event)
        page = event.tier, event.component, event.page_hash
        if event.kind == Event.STORED:
            assert page not in self.content
            self.content.add(page)
        else:
            self.content.remove(page)

    async def upto(self, rig: OperatorRig) -> None:
        """Everything that has happened."""
        assert rig.controller.events is not None
        while self.started is None or self.next < rig.controller.events.following:
            await self.read()

    def told(self, hashes: set[bytes], component: str) -> list[tuple[int, int, str]]:
        """Kind, tier and reason of these pages' events, runs of equal ones once."""
        out: list[tuple[int, int, str]] = []
        for event in self.events:
            if event.component != component or event.page_hash not in hashes:
                continue
            one = event.kind, event.tier, event.reason
            if not out or out[-1] != one:
                out.append(one)
        return out


def content_of(rig: OperatorRig) -> Content:
    """What the index says is READY."""
    tiers = {1: Event.HOST, 2: Event.STORAGE}
    return {
        (tiers[1 if move.tier is HOST else 2], move.component, row.tobytes())
        for move in rig.controller.contents.moves()
        for row in move.hashes
    }


def file_backend(folder: Path) -> str:
    return json.dumps({"kind": "file", "path": str(folder / "objects")})


async def stored(engine: TaggedEngine, tokens: object, salt: str = "") -> None:
    await engine.backup(tokens, engine.all_pages(tokens), salt)


async def test_a_pages_way_through_the_tiers_is_told_with_tier_and_reason(
    short_path: str, tmp_path: Path
) -> None:
    """OBS-05: back up, evict, load back, flush, damage, detach; replaying gives each tier's content."""
    async with operator_rig(f"{short_path}/s", capacity_bytes=256 << 10) as rig:
        engine, counters = rig.engine(), rig.controller.counters
        router = Router(rig.events)
        await router.read()
        backend = file_backend(tmp_path)
        await rig.admin.AttachStorage(pb.AttachStorageRequest(name="l3", backend=backend))
        await stored(engine, A)
        await until(lambda: counters.storage_written_pages == 21)
        await flooded(rig, engine, 1000)
        assert (await engine.prefetch(A)).boundary == 10
        assert await engine.load_and_check(A) == 10
        await until(lambda: rig.controller.flush()[1] == 0)
        for path in (tmp_path / "objects").rglob("*"):
            if path.is_file() and path.stat().st_size > 100:
                path.write_bytes(bytes(path.stat().st_size))
        assert (await engine.prefetch(A)).boundary == 0
        before = counters.storage_written_pages
        await stored(engine, A)
        await until(lambda: counters.storage_written_pages > before and not queued(rig))
        await rig.admin.DetachStorage(pb.DetachStorageRequest(name="l3"))
        await flooded(rig, engine, 2000)
        await router.upto(rig)
        mine = set(hashes_of(engine.namespace(), A))
        assert router.told(mine, "full") == [
            (Event.STORED, Event.HOST, "backup"),
            (Event.STORED, Event.STORAGE, "written"),
            (Event.REMOVED, Event.HOST, "demoted"),
            (Event.STORED, Event.HOST, "prefetch"),
            (Event.CLEARED, Event.HOST, "cleared"),
            (Event.REMOVED, Event.STORAGE, "corrupt"),
            (Event.STORED, Event.HOST, "backup"),
            (Event.STORED, Event.STORAGE, "written"),
            (Event.CLEARED, Event.STORAGE, "detached"),
            (Event.REMOVED, Event.HOST, "dropped"),
        ]
        assert router.content == content_of(rig)
        assert router.gaps == []


async def flooded(rig: OperatorRig, engine: TaggedEngine, first_seed: int) -> None:
    """Other prompts, until nothing of FULL of A is in host memory."""
    mine = {(Event.HOST, "full", one) for one in hashes_of(engine.namespace(), A)}
    for seed in range(first_seed, first_seed + 500):
        if not mine & content_of(rig):
            break
        await stored(engine, prompt(seed, 40))
    assert not mine & content_of(rig)
    await until(lambda: not queued(rig))


def queued(rig: OperatorRig) -> int:
    return sum(backend.queued_writes for backend in rig.controller.status().backends)


async def test_an_event_says_who_and_where_a_page_is(rig: OperatorRig) -> None:
    """KEY-08: identical pages under two salts have ids of their own, and a parent chain."""
    engine = rig.engine()
    router = Router(rig.events)
    await router.read()
    same = np.full(24, 7, dtype=np.int32)
    for salt in ("x", "y"):
        await stored(engine, same, salt)
    await router.upto(rig)
    for salt in ("x", "y"):
        chain = hashes_of(engine.namespace(salt), same)
        mine = [event for event in router.events if event.salt == salt and event.component == "full"]
        assert [event.page for event in mine] == list(range(6))
        assert [event.page_hash for event in mine] == chain
        assert [event.parent_hash for event in mine] == [engine.namespace(salt).seed(), *chain[:-1]]
        assert {event.tenant for event in mine} == {hashlib.sha256(salt.encode()).digest()}
        assert {(event.model, event.revision, event.adapter) for event in mine} == {("model", "r1", "")}
    assert len({event.page_hash for event in router.events}) == 12


async def test_over_tcp_a_tenant_is_a_hash_and_no_session_is_named(rig: OperatorRig) -> None:
    engine = rig.engine()
    routers = [Router(stub) for stub in (rig.events, rig.events_by_tcp)]
    for router in routers:
        await router.read()
    about = replace(engine.prompt(A, "secret"), session_id="chat")
    await rig.controller.backup(Backup(about, engine.compute(A, {"full": [0]}, "secret")))
    for router in routers:
        await router.upto(rig)
    inside, outside = (router.events[0] for router in routers)
    assert (inside.salt, inside.session_id) == ("secret", "chat")
    assert (outside.salt, outside.session_id) == ("", "")
    assert outside.tenant == inside.tenant == hashlib.sha256(b"secret").digest()


async def test_who_comes_back_goes_on_where_he_was(rig: OperatorRig) -> None:
    """OBS-05: replayable from a number: nothing twice, nothing missed."""
    engine = rig.engine()
    router = Router(rig.events)
    await router.read()
    await stored(engine, A)
    await router.upto(rig)
    router.call.cancel()
    await stored(engine, prompt(2, 40))
    rig.controller.flush()
    again = Router(rig.events, from_sequence=router.next, boot_id=router.started.boot_id)
    again.content = router.content
    await again.read()
    again.next = router.next
    await again.upto(rig)
    assert again.content == content_of(rig) == set()
    assert again.gaps == []
    assert not again.started.restarted
    early = Router(rig.events, from_sequence=rig.controller.events.following + 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await early.call.read()
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("from_sequence: ")


async def test_who_comes_late_begins_with_all_that_is_there(rig: OperatorRig, tmp_path: Path) -> None:
    engine = rig.engine()
    await rig.admin.AttachStorage(pb.AttachStorageRequest(backend=file_backend(tmp_path)))
    for seed in range(4):
        await stored(engine, np.concatenate([A, prompt(seed, 20)]))
    await until(lambda: not queued(rig))
    router = Router(rig.events, snapshot=True)
    await stored(engine, prompt(50, 40))
    while await router.read() != "snapshot_end":
        pass
    await router.upto(rig)
    assert router.content == content_of(rig)
    assert len(router.content) > 100


async def test_what_the_log_has_lost_is_announced(short_path: str) -> None:
    """OBS-05: a bounded log; a gap names the numbers, and what follows is complete."""
    async with operator_rig(f"{short_path}/s", events_pages=40) as rig:
        engine = rig.engine()
        for seed in range(5):
            await stored(engine, prompt(seed, 40))
        assert rig.controller.events.following == 5 * 21 + 1
        router = Router(rig.events, from_sequence=3)
        await router.read()
        router.next = 3
        await router.upto(rig)
        assert router.gaps == [(3, router.started.oldest_sequence)]
        assert router.events[0].sequence == router.started.oldest_sequence > 60
        assert router.events[-1].sequence == 105


async def test_another_boots_numbers_are_void(rig: OperatorRig) -> None:
    engine = rig.engine()
    await stored(engine, A)
    router = Router(rig.events, from_sequence=1000, boot_id="another")
    await router.read()
    assert router.started.restarted
    router.next = 1
    await router.upto(rig)
    assert router.content == content_of(rig)


async def test_events_can_be_off(short_path: str) -> None:
    async with operator_rig(f"{short_path}/s", events_pages=0) as rig:
        await stored(rig.engine(), A)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.events.Watch(pb.WatchRequest()).read()
        assert caught.value.code() is StatusCode.FAILED_PRECONDITION
        assert "events.keep_pages" in caught.value.details()


async def test_under_pressure_a_router_knows_every_tier_exactly(short_path: str, tmp_path: Path) -> None:
    """OBS-05: host memory for some forty prompts, two hundred of them, prefetches and flushes between."""
    async with operator_rig(f"{short_path}/s", capacity_bytes=256 << 10) as rig:
        engine = rig.engine()
        await rig.admin.AttachStorage(pb.AttachStorageRequest(backend=file_backend(tmp_path)))
        router = Router(rig.events)
        await router.read()
        order = np.random.default_rng(3)
        for step in range(200):
            tokens = prompt(int(order.integers(0, 60)), 40)
            await stored(engine, tokens)
            if step % 5 == 0:
                await engine.prefetch(prompt(int(order.integers(0, 60)), 40))
            if step % 67 == 66:
                rig.controller.flush()
        await until(lambda: not queued(rig))
        await router.upto(rig)
        assert rig.controller.counters.host_evicted_pages > 0
        assert router.content == content_of(rig)


def test_a_watcher_of_a_real_daemon_does_not_hold_up_its_stop(short_path: str) -> None:
    """LIFE's kind: the daemon stops in time, and says so to who watches; a new boot voids the numbers."""
    daemon = LiveDaemon(Path(short_path))
    layout, nbytes = make_layout({"full": 64, "swa": 64, "mamba": 16})
    engine = LiveEngine(daemon.address, layout, nbytes)
    replies: list[pb.WatchReply] = []
    ended: list[grpc.StatusCode] = []
    channel = grpc.insecure_channel(daemon.address)
    call = EventsStub(channel).Watch(pb.WatchRequest(snapshot=True))

    def watch(messages: Iterator[pb.WatchReply]) -> None:
        try:
            replies.extend(messages)
        except grpc.RpcError as error:
            ended.append(error.code())

    watching = threading.Thread(target=watch, args=(call,))
    try:
        watching.start()
        engine.serve("r", A)
        engine.settle()
        engine.close()
        assert daemon.stop() == 0
        watching.join(timeout=WAIT_S)
        assert ended == [StatusCode.UNAVAILABLE]
        assert "engines_not_drained" not in daemon.log.read_text()
    finally:
        daemon.close()
        channel.close()
    bodies = [reply.WhichOneof("body") for reply in replies]
    assert bodies[:2] == ["started", "snapshot_end"]
    hashes = {
        event.page_hash
        for reply in replies
        for event in reply.events.events
        if event.tier == Event.HOST and event.component == "full"
    }
    assert hashes == set(hashes_of(engine.namespace(), A))
