"""An engine's life: how it begins, every way in which it ends, and that nothing of it stays behind.

The `open_rig` fixture checks after every test that no region is mapped, no descriptor open, no engine known.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from controller.daemon.attachments import Ending
from controller.daemon.grpc_server import stop_serving
from controller.requests import InvalidRequest
from hicache.core.layout import Layout
from proto.v1 import hicache_pb2 as pb
from proto.v1 import hicache_pb2_grpc as pb_grpc
from tests.daemon.conftest import Opener
from tests.daemon.rig import (
    REGION_BYTES,
    WAIT_S,
    Engine,
    Rig,
    handed_over,
    memory_file,
    offer,
    regions_mapped,
    regions_open,
    registration,
    until,
)

FULL = [pb.ComponentSlots(component="full", pages=bytes(4), slots=bytes(4))]
LOAD = pb.LoadRequest(lease_id="lease", components=FULL)


async def refused(engine: Engine, first: pb.EngineMessage | None) -> tuple[StatusCode, str]:
    """How an Attach that begins with this message is refused."""
    if first is None:
        await engine.stream.done_writing()
    else:
        await engine.stream.write(first)
    code = await engine.ended()
    return code, str(await engine.stream.details())


async def test_an_engine_is_told_what_it_needs(rig: Rig) -> None:
    engine = Engine(rig, "engine")
    found = await engine.attach()
    assert (found.boot_id, found.daemon_pid) == ("boot-1", os.getpid())
    assert found.heartbeat_interval_s == rig.settings.heartbeat_interval_s
    layout: Layout = rig.controller.specs["engine"].layout
    assert found.layout_fingerprint == layout.fingerprint()
    engine.leave()


async def test_the_engines_memory_is_really_mapped(rig: Rig) -> None:
    fd, ticket = memory_file(), os.urandom(16)
    assert await asyncio.to_thread(offer, rig.socket_path, ticket, [fd]) == b"1"
    engine = Engine(rig, "engine")
    await engine.register(registration("engine", [ticket]))
    mapped = rig.controller.specs["engine"].regions[0]
    assert (regions_mapped(), regions_open()) == (1, 2)  # our descriptor, and the one that the mapping keeps
    os.pwrite(fd, b"from the engine", 4096)
    seen = (np.ctypeslib.ctypes.c_char * mapped.nbytes).from_address(mapped.address)
    assert bytes(seen[4096 : 4096 + 15]) == b"from the engine"
    seen[0:4] = b"back"
    assert os.pread(fd, 4, 0) == b"back"
    os.close(fd)
    engine.leave()


async def test_closing_the_stream_ends_the_engine(rig: Rig) -> None:
    async with rig.engine("a") as a, rig.engine("b") as b:
        assert regions_mapped() == 2
        await a.stream.done_writing()
        assert await a.ended() is StatusCode.OK
        await until(lambda: "a" in rig.controller.detached and regions_mapped() == 1, "a is gone")
        assert (await b.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")


class Cable:
    """A connection to the daemon that can be cut, as when the client's process is killed."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.path = target + ".cable"
        self.writers: list[asyncio.StreamWriter] = []

    async def lay(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._connected, self.path)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(self.target)
        self.writers += [writer, there[1]]
        await asyncio.gather(self._copy(reader, there[1]), self._copy(there[0], writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@pytest.mark.parametrize("loading", [False, True])
async def test_a_connection_that_breaks_ends_the_engine(rig: Rig, loading: bool) -> None:
    """LIFE-01: mappings and references are gone as soon as the connection and the last byte are."""
    cable = Cable(rig.socket_path)
    listener = await cable.lay()
    async with grpc.aio.insecure_channel(f"unix:{cable.path}") as channel, rig.engine("other") as other:
        rig.cache = pb_grpc.HybridCacheStub(channel)
        engine = Engine(rig, "engine")
        await engine.attach()
        if loading:
            rig.controller.may_land.clear()
            await engine.send(load=LOAD)
            await until(lambda: rig.controller.in_flight == 1, "the load has begun")
        cable.cut()
        if loading:
            await until(lambda: rig.attachments.ended[Ending.LEFT] == 1, "the end has begun")
            assert regions_mapped() == 2
            rig.controller.may_land.set()
        await until(lambda: rig.controller.detached == ["engine"], "the engine is gone")
        await until(lambda: regions_mapped() == 1, "its memory is unmapped")
        assert (await other.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")
        listener.close()
    assert rig.faults.count == 0


@pytest.mark.parametrize("n_calls", [0, 3])
async def test_a_silent_engine_ends_after_the_timeout(open_rig: Opener, n_calls: int) -> None:
    """LIFE-01: an engine that says nothing any more, before its first call or after some."""
    async with open_rig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.4) as rig:
        engine = Engine(rig, "engine")
        await engine.attach()
        for _ in range(n_calls):
            await engine.ask(heartbeat=pb.Heartbeat())
        assert await engine.ended() is StatusCode.DEADLINE_EXCEEDED
        await until(lambda: regions_mapped() == 0, "its memory is given back")
        assert rig.controller.detached == ["engine"]


async def test_a_daemon_that_stood_still_blames_no_engine(open_rig: Opener) -> None:
    """After SIGSTOP and SIGCONT, or starved, it has not yet read the heartbeats that came meanwhile."""
    async with open_rig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5) as rig, rig.engine() as engine:
        time.sleep(1.5)  # noqa: ASYNC251 - the loop stands still
        assert (await engine.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")
        assert rig.controller.detached == []
        assert await engine.ended() is StatusCode.DEADLINE_EXCEEDED  # real silence still ends it


async def test_heartbeats_keep_an_engine_and_any_message_counts(open_rig: Opener) -> None:
    async with open_rig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.5) as rig, rig.engine() as engine:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 1.2
        while loop.time() < until_s:
            assert (await engine.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")
            await asyncio.sleep(0.1)
            request = pb.LookupPrefixRequest(prompt=pb.Prompt(tokens=bytes(64)))
            assert (await engine.ask(lookup_prefix=request)).HasField("lookup_prefix")
        assert rig.controller.detached == []


async def test_a_second_attach_ends_the_first_and_waits_for_its_jobs(rig: Rig) -> None:
    """LIFE-02: registering again is idempotent; the first one's jobs end before the second begins."""
    first = Engine(rig, "engine")
    await first.attach()
    rig.controller.may_land.clear()
    await first.send(load=LOAD)
    await until(lambda: rig.controller.in_flight == 1, "the load has begun")
    second = Engine(rig, "engine")
    attaching = asyncio.create_task(second.attach())
    assert await first.ended() is StatusCode.ABORTED
    assert not attaching.done()
    assert regions_mapped() == 1
    assert "engine" in rig.controller.specs
    rig.controller.may_land.set()
    assert (await attaching).boot_id == "boot-1"
    assert rig.controller.landed == 1
    assert rig.controller.detached == ["engine"]
    assert (await second.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")
    second.leave()


async def test_of_many_attaches_at_once_one_stays(rig: Rig) -> None:
    engines = [Engine(rig, "engine") for _ in range(8)]
    await asyncio.gather(*(one.attach() for one in engines), return_exceptions=True)
    await until(lambda: regions_mapped() == 1, "one region is left")
    assert list(rig.controller.specs) == ["engine"]
    for one in engines:
        one.leave()


async def test_a_unary_load_under_way_delays_the_next_attach_too(rig: Rig) -> None:
    first = Engine(rig, "engine")
    await first.attach()
    rig.controller.may_land.clear()
    call = rig.cache.Load(pb.LoadRequest(engine_id="engine", lease_id="lease", components=FULL))
    await until(lambda: rig.controller.in_flight == 1, "the load has begun")
    first.leave()
    second = Engine(rig, "engine")
    attaching = asyncio.create_task(second.attach())
    await asyncio.sleep(0.05)
    assert not attaching.done()
    rig.controller.may_land.set()
    await attaching
    assert (await call).nbytes == 1
    second.leave()


async def test_jobs_that_do_not_end_refuse_the_next_attach_and_show(open_rig: Opener) -> None:
    """Memory that a copy may still write to is never unmapped, and health says so."""
    async with open_rig(grace_s=0.2) as rig:
        first = Engine(rig, "engine")
        await first.attach()
        rig.controller.may_land.clear()
        await first.send(load=LOAD)
        await until(lambda: rig.controller.in_flight == 1, "the load has begun")
        second = Engine(rig, "engine")
        tickets = await handed_over(rig.socket_path)
        code, text = await refused(second, pb.EngineMessage(registration=registration("engine", tickets)))
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "have not ended after 0.2 s" in text
        assert regions_mapped() == 1
        await until(lambda: list(rig.attachments.problems()), "health shows it")
        assert regions_open() == 1  # the one that the first one's mapping keeps
        rig.controller.may_land.set()
        await until(lambda: regions_mapped() == 0, "then it is given back")
        assert not list(rig.attachments.problems())


BAD: dict[str, tuple[pb.EngineMessage | None, str]] = {
    "no registration": (pb.EngineMessage(heartbeat=pb.Heartbeat()), "registration: missing"),
    "nothing": (pb.EngineMessage(), "registration: missing"),
    "end of stream": (None, "ended before a registration"),
    "unknown ticket": (
        pb.EngineMessage(registration=registration("engine", [b"t" * 16])),
        "registration.regions[0].ticket: no descriptor waits",
    ),
    "no model": (
        pb.EngineMessage(registration=registration("engine", [b"t" * 16], model="")),
        "registration.model: empty",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_registration_is_refused_and_leaves_nothing(rig: Rig, what: str) -> None:
    message, expected = BAD[what]
    code, text = await refused(Engine(rig, "engine"), message)
    assert code is StatusCode.INVALID_ARGUMENT
    assert expected in text
    assert (rig.controller.specs, regions_mapped()) == ({}, 0)
    async with rig.engine():  # and the id is free
        assert regions_mapped() == 1


async def test_silence_instead_of_a_registration_ends_the_stream(open_rig: Opener) -> None:
    async with open_rig(heartbeat_interval_s=0.1, heartbeat_timeout_s=0.3) as rig:
        assert await Engine(rig, "engine").ended() is StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("nbytes", "seals", "text"),
    [
        (REGION_BYTES, 0, "F_SEAL_SHRINK"),
        (REGION_BYTES // 2, fcntl.F_SEAL_SHRINK, "bytes were announced"),
        (REGION_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, "sealed against writing"),
    ],
)
async def test_a_region_that_cannot_be_mapped_is_refused(
    rig: Rig, nbytes: int, seals: int, text: str
) -> None:
    """Also when the region before it was mapped already: nothing of either stays."""
    [good] = await handed_over(rig.socket_path)
    fd, bad = memory_file(nbytes, seals=seals), os.urandom(16)
    assert await asyncio.to_thread(offer, rig.socket_path, bad, [fd]) == b"1"
    os.close(fd)
    message = pb.EngineMessage(registration=registration("engine", [good, bad]))
    code, details = await refused(Engine(rig, "engine"), message)
    assert code is StatusCode.INVALID_ARGUMENT
    assert details.startswith("registration.regions[1]: region")
    assert text in details
    await until(lambda: regions_mapped() == 0 and regions_open() == 0, "everything is given back")


async def test_a_descriptor_that_is_no_memory_is_refused(rig: Rig) -> None:
    reading, writing = os.pipe()
    ticket = os.urandom(16)
    assert await asyncio.to_thread(offer, rig.socket_path, ticket, [reading]) == b"1"
    os.close(reading)
    os.close(writing)
    message = pb.EngineMessage(registration=registration("engine", [ticket]))
    code, details = await refused(Engine(rig, "engine"), message)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "not a memfd" in details


@pytest.mark.parametrize(
    "error", [InvalidRequest("layout: frames are larger than host.capacity"), OSError("boom")]
)
async def test_a_refusal_by_the_controller_leaves_nothing(rig: Rig, error: Exception) -> None:
    rig.controller.raises = error
    engine = Engine(rig, "engine")
    tickets = await handed_over(rig.socket_path)
    code, text = await refused(engine, pb.EngineMessage(registration=registration("engine", tickets)))
    invalid = isinstance(error, InvalidRequest)
    assert code is (StatusCode.INVALID_ARGUMENT if invalid else StatusCode.INTERNAL)
    assert ("host.capacity" in text) is invalid
    assert "boom" not in text
    await until(lambda: regions_mapped() == 0 and regions_open() == 0, "everything is given back")
    rig.controller.raises = None
    async with rig.engine():
        assert rig.controller.detached == []  # what was never attached was not detached


@pytest.mark.parametrize("body", [{}, {"registration": registration("engine", [])}])
async def test_an_odd_message_on_the_stream_is_answered(rig: Rig, body: dict[str, object]) -> None:
    async with rig.engine() as engine:
        answer = await engine.ask(**body)
        assert answer.error.code == StatusCode.INVALID_ARGUMENT.value[0]
        assert (await engine.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")


async def test_stopping_lets_a_load_end_and_answers_it(rig: Rig) -> None:
    """LIFE-05: what runs within the grace is completed, then the stream ends with UNAVAILABLE."""
    engine = Engine(rig, "engine")
    await engine.attach()
    rig.controller.may_land.clear()
    slow = await engine.send(load=LOAD)
    await until(lambda: rig.controller.in_flight == 1, "the load has begun")
    stopping = asyncio.create_task(rig.attachments.end_all(WAIT_S))
    await asyncio.sleep(0.05)
    rig.controller.may_land.set()
    assert await stopping
    answer = await engine.read()
    assert (answer.id, answer.load.nbytes) == (slow, 1)
    assert await engine.ended() is StatusCode.UNAVAILABLE
    late = Engine(rig, "late")
    tickets = await handed_over(rig.socket_path)
    code, _ = await refused(late, pb.EngineMessage(registration=registration("late", tickets)))
    assert code is StatusCode.UNAVAILABLE


async def test_stopping_does_not_wait_for_ever(open_rig: Opener) -> None:
    """LIFE-05: a load that does not end holds the stop for the grace, not longer."""
    async with open_rig(grace_s=0.2) as rig, rig.engine() as engine:
        rig.controller.may_land.clear()
        await engine.send(load=LOAD)
        await until(lambda: rig.controller.in_flight == 1, "the load has begun")
        assert not await rig.attachments.end_all(0.1)
        assert await engine.ended() is StatusCode.UNAVAILABLE
        assert regions_mapped() == 1


async def test_a_stop_completes_what_ends_within_the_grace_and_cuts_the_rest(open_rig: Opener) -> None:
    """LIFE-05: with an open stream, one call that ends in time and one that would take for ever."""
    async with open_rig(grace_s=1.0) as rig, rig.engine() as engine:
        rig.controller.may_land.clear()
        endless = rig.cache.WaitPrefetch(pb.WaitPrefetchRequest(engine_id="engine", prefetch_id="p"))
        await engine.ask(heartbeat=pb.Heartbeat())
        quick = rig.cache.Load(pb.LoadRequest(engine_id="engine", lease_id="lease", components=FULL))
        await until(lambda: rig.controller.in_flight == 1, "the load has begun")
        rig.controller.waits_may_end.clear()
        stopping = asyncio.create_task(stop_serving(rig.server, rig.attachments, 1.0))
        assert await engine.ended() is StatusCode.UNAVAILABLE
        rig.controller.may_land.set()
        assert (await quick).nbytes == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await endless
        assert caught.value.code() in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
        assert await asyncio.wait_for(stopping, WAIT_S)
        assert rig.controller.wait_cancelled.is_set()


async def test_a_client_that_does_not_read_holds_up_only_itself(rig: Rig) -> None:
    """Its answers fill the connection's window; the other engine is served all the while."""
    async with rig.engine("deaf") as deaf, rig.engine("good") as good:
        big = pb.LookupPrefixRequest(prompt=pb.Prompt(tokens=bytes(4_000_000)))
        for _ in range(20):
            await deaf.send(lookup_prefix=big)
        small = pb.LookupPrefixRequest(prompt=pb.Prompt(tokens=bytes(64)))
        for _ in range(20):
            assert (await good.ask(lookup_prefix=small)).HasField("lookup_prefix")


async def test_engines_that_come_and_go_leave_nothing(rig: Rig) -> None:
    """LIFE-01: a hundred lives, each cut at another moment."""
    for i in range(100):
        engine = Engine(rig, f"engine-{i % 7}")
        if i % 3:
            await engine.attach()
        else:
            tickets = await handed_over(rig.socket_path)
            first = pb.EngineMessage(registration=registration(engine.engine_id, tickets))
            await engine.stream.write(first)
        if i % 2:
            await engine.send(load=LOAD)
        engine.leave()
    await until(lambda: regions_mapped() == 0, "everything is unmapped")
    for ticket_life in list(rig.handoff._waiting):  # those whose registration never arrived
        claimed = rig.handoff.claim(ticket_life)
        assert claimed is not None
        os.close(claimed)
    assert rig.faults.count == 0


async def test_many_engines_at_once(rig: Rig) -> None:
    async def live(i: int) -> None:
        async with rig.engine(f"engine-{i}") as engine:
            for _ in range(10):
                request = pb.LookupPrefixRequest(prompt=pb.Prompt(tokens=bytes(16 * i)))
                assert (await engine.ask(lookup_prefix=request)).lookup_prefix.boundary == i

    await asyncio.gather(*(live(i) for i in range(16)))
