"""The verbs over real gRPC: unary calls and the stream answer alike, and every refusal has its code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from controller.daemon.metrics import COUNTED_CODES
from controller.daemon.verbs import CODES
from controller.requests import (
    Busy,
    CloseSession,
    Gone,
    InvalidRequest,
    PrefetchPolicy,
    RequestError,
    TransferFailed,
    UnknownEngine,
)
from proto.v1 import hicache_pb2 as pb
from tests.daemon.conftest import Opener
from tests.daemon.rig import WAIT_S, Engine, Rig, until

TOKENS = np.arange(12, dtype="<i4").tobytes()
FULL = [pb.ComponentSlots(component="full", pages=TOKENS[:8], slots=TOKENS[4:12])]


def prompt(engine_id: str = "engine", boot_id: str = "", tokens: bytes = TOKENS) -> pb.Prompt:
    return pb.Prompt(engine_id=engine_id, boot_id=boot_id, request_id="r", tokens=tokens)


@pytest.fixture
async def engine(rig: Rig) -> AsyncIterator[Engine]:
    async with rig.engine() as one:
        yield one


async def refusal(call: object) -> tuple[StatusCode, str]:
    assert hasattr(call, "__await__")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


def requests(engine_id: str, boot_id: str = "") -> dict[str, object]:
    """One good request of every verb, by the name of its field on the stream."""
    who = {"engine_id": engine_id, "boot_id": boot_id}
    return {
        "lookup_prefix": pb.LookupPrefixRequest(prompt=prompt(engine_id, boot_id)),
        "prefetch": pb.PrefetchRequest(prompt=prompt(engine_id, boot_id)),
        "wait_prefetch": pb.WaitPrefetchRequest(prefetch_id="p", **who),
        "cancel_prefetch": pb.CancelPrefetchRequest(prefetch_id="p", **who),
        "load": pb.LoadRequest(lease_id="lease", components=FULL, **who),
        "backup": pb.BackupRequest(prompt=prompt(engine_id, boot_id), components=FULL),
        "release_lease": pb.ReleaseLeaseRequest(lease_id="lease", **who),
        "close_session": pb.CloseSessionRequest(session_id="s", session_generation=3, salt="t", **who),
    }


METHODS = {
    "lookup_prefix": "LookupPrefix",
    "prefetch": "Prefetch",
    "wait_prefetch": "WaitPrefetch",
    "cancel_prefetch": "CancelPrefetch",
    "load": "Load",
    "backup": "Backup",
    "release_lease": "ReleaseLease",
    "close_session": "CloseSession",
}


@pytest.mark.parametrize("verb", METHODS)
async def test_a_unary_call_and_the_stream_answer_alike(rig: Rig, engine: Engine, verb: str) -> None:
    unary = await getattr(rig.cache, METHODS[verb])(requests("engine")[verb])
    streamed = await engine.ask(**{verb: requests("")[verb]})
    assert streamed.WhichOneof("body") == verb
    reply = getattr(streamed, verb)
    for one in (unary, reply):
        if isinstance(one, pb.LookupPrefixReply):
            one.lease_id = one.lease_id.split("-")[0]
        if isinstance(one, pb.PrefetchReply):
            one.prefetch_id = one.prefetch_id.split("-")[0]
    assert unary == reply


async def test_requests_reach_the_controller_whole(rig: Rig, engine: Engine) -> None:
    bits = pb.ComponentResidency(component="full", resident=b"\x05")
    message = pb.PrefetchRequest(
        prompt=prompt(""), device=[bits], limit_pages=2, policy=pb.TIMEOUT, timeout_s=0.5
    )
    await engine.ask(prefetch=message)
    found = rig.controller.prefetches[0]
    assert found.policy is PrefetchPolicy.TIMEOUT
    assert (found.timeout_s, found.lookup.limit_pages) == (0.5, 2)
    assert found.lookup.prompt.engine_id == "engine"
    assert found.lookup.prompt.tokens.tolist() == list(range(12))
    assert found.lookup.device["full"][:3].tolist() == [True, False, True]


@pytest.mark.parametrize("verb", METHODS)
async def test_an_unknown_engine_is_told_to_attach(rig: Rig, verb: str) -> None:
    code, text = await refusal(getattr(rig.cache, METHODS[verb])(requests("stranger")[verb]))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "engine_id: 'stranger' is not attached" in text


@pytest.mark.parametrize("verb", METHODS)
async def test_another_boot_is_told_to_attach(rig: Rig, engine: Engine, verb: str) -> None:
    code, text = await refusal(getattr(rig.cache, METHODS[verb])(requests("engine", "boot-0")[verb]))
    assert code is StatusCode.FAILED_PRECONDITION
    assert text.startswith("boot_id: 'boot-0' is not this boot")
    answer = await engine.ask(**{verb: requests("", "boot-0")[verb]})
    assert answer.error.code == StatusCode.FAILED_PRECONDITION.value[0]
    await getattr(rig.cache, METHODS[verb])(requests("engine", "boot-1")[verb])


async def test_a_stream_speaks_for_its_own_engine_only(rig: Rig, engine: Engine) -> None:
    answer = await engine.ask(lookup_prefix=pb.LookupPrefixRequest(prompt=prompt("other")))
    assert answer.error.code == StatusCode.INVALID_ARGUMENT.value[0]
    assert "'other' on the stream of 'engine'" in answer.error.message
    assert (await engine.ask(lookup_prefix=pb.LookupPrefixRequest(prompt=prompt("engine")))).HasField(
        "lookup_prefix"
    )


BAD = {
    "tokens not a multiple of 4 bytes": (
        "lookup_prefix",
        pb.LookupPrefixRequest(prompt=prompt(tokens=b"12345")),
        "prompt.tokens",
    ),
    "no engine": ("lookup_prefix", pb.LookupPrefixRequest(prompt=prompt("")), "engine_id: empty"),
    "slots of the wrong count": (
        "load",
        pb.LoadRequest(
            engine_id="engine",
            lease_id="lease",
            components=[pb.ComponentSlots(component="full", pages=TOKENS[:8], slots=TOKENS[:4])],
        ),
        "components['full']: 2 pages and 1 slots",
    ),
    "no lease": ("load", pb.LoadRequest(engine_id="engine"), "lease_id: empty"),
    "pages out of order": (
        "backup",
        pb.BackupRequest(
            prompt=prompt(),
            components=[
                pb.ComponentSlots(component="full", pages=TOKENS[4:8] + TOKENS[:4], slots=TOKENS[:8])
            ],
        ),
        "components['full'].pages: not ascending",
    ),
    "no prefetch": ("wait_prefetch", pb.WaitPrefetchRequest(engine_id="engine"), "prefetch_id: empty"),
    "odd policy": ("prefetch", pb.PrefetchRequest(prompt=prompt(), policy=9), "policy: 9"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_input_is_refused_and_leaves_nothing_behind(rig: Rig, engine: Engine, what: str) -> None:
    """The controller never hears of it; the connection and the engine go on."""
    verb, message, field = BAD[what]
    code, text = await refusal(getattr(rig.cache, METHODS[verb])(message))
    assert code is StatusCode.INVALID_ARGUMENT
    assert text.startswith(field)
    controller = rig.controller
    assert controller.lookups == controller.loads == controller.backups == controller.prefetches == []
    assert (await engine.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("a: wrong"), StatusCode.INVALID_ARGUMENT),
        (UnknownEngine("b: who"), StatusCode.FAILED_PRECONDITION),
        (Gone("c: gone"), StatusCode.NOT_FOUND),
        (Busy("d: full"), StatusCode.RESOURCE_EXHAUSTED),
        (TransferFailed("e: broken"), StatusCode.ABORTED),
    ],
)
async def test_every_refusal_has_its_code_and_its_text(
    rig: Rig, engine: Engine, error: Exception, code: StatusCode
) -> None:
    rig.controller.raises = error
    assert await refusal(rig.cache.Load(requests("engine")["load"])) == (code, str(error))
    answer = await engine.ask(load=requests("")["load"])
    assert (answer.error.code, answer.error.message) == (code.value[0], str(error))


async def test_an_unexpected_error_keeps_its_text_and_is_counted(rig: Rig, engine: Engine) -> None:
    """The caller learns that it is our fault, the operator learns what it was; nobody loses the process."""
    rig.controller.raises = ZeroDivisionError("tenant secret")
    code, text = await refusal(rig.cache.LookupPrefix(requests("engine")["lookup_prefix"]))
    assert code is StatusCode.INTERNAL
    assert "secret" not in text
    answer = await engine.ask(load=requests("")["load"])
    assert answer.error.code == StatusCode.INTERNAL.value[0]
    assert "secret" not in answer.error.message
    code, text = await refusal(rig.admin.Flush(pb.FlushRequest()))
    assert code is StatusCode.INTERNAL
    assert "secret" not in text
    assert rig.faults.count == 3
    assert "internal error in flush: ZeroDivisionError (3 since start)" in next(iter(rig.faults.problems()))
    rig.controller.raises = None
    assert (await rig.admin.Status(pb.StatusRequest())).problems[0].startswith("internal error")


async def test_answers_come_in_any_order(rig: Rig, engine: Engine) -> None:
    rig.controller.may_land.clear()
    slow = await engine.send(load=requests("")["load"])
    quick = await engine.send(lookup_prefix=requests("")["lookup_prefix"])
    assert (await engine.read()).id == quick
    rig.controller.may_land.set()
    last = await engine.read()
    assert (last.id, last.load.nbytes) == (slow, 2)


async def test_requests_in_flight_are_bounded_per_engine(open_rig: Opener) -> None:
    async with open_rig(max_requests_in_flight=3) as rig, rig.engine("a") as a, rig.engine("b") as b:
        rig.controller.may_land.clear()
        slow = [await a.send(load=requests("")["load"]) for _ in range(3)]
        refused = await a.ask(lookup_prefix=requests("")["lookup_prefix"])
        assert refused.error.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert (await a.ask(heartbeat=pb.Heartbeat())).HasField("heartbeat")
        assert (await b.ask(lookup_prefix=requests("")["lookup_prefix"])).HasField("lookup_prefix")
        rig.controller.may_land.set()
        assert sorted([(await a.read()).id for _ in slow]) == slow
        assert (await a.ask(lookup_prefix=requests("")["lookup_prefix"])).HasField("lookup_prefix")


@pytest.mark.parametrize("n_tokens", [1_000_000, 4_000_000])
async def test_long_prompts_fit(rig: Rig, engine: Engine, n_tokens: int) -> None:
    """CONFIG-05: gRPC's default of 4 MiB does not apply, in either direction."""
    tokens = np.zeros(n_tokens, dtype="<i4").tobytes()
    reply = await rig.cache.LookupPrefix(pb.LookupPrefixRequest(prompt=prompt(tokens=tokens)))
    assert len(reply.load[0].pages) == n_tokens


async def test_a_message_above_the_limit_gets_a_clear_status(open_rig: Opener) -> None:
    """CONFIG-05: and the server stays healthy."""
    async with open_rig(max_message_bytes=1 << 20) as rig, rig.engine():
        message = pb.LookupPrefixRequest(prompt=prompt(tokens=bytes(1 << 20)))
        code, text = await refusal(rig.cache.LookupPrefix(message))
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert str(1 << 20) in text
        small = pb.LookupPrefixRequest(prompt=prompt())
        assert (await rig.cache.LookupPrefix(small)).boundary == 3


async def test_a_client_that_pings_often_stays_connected(open_rig: Opener, rig: Rig) -> None:
    """CONFIG-06: keep-alive pings, forty times as often as reported there, close nothing. gRPC's own limit
    would send GOAWAY (too many pings) after three."""
    options = [
        ("grpc.keepalive_time_ms", 250),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(f"unix:{rig.socket_path}", options=options) as channel:
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        with pytest.raises(TimeoutError):  # eight pings later it is in the same state
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 2.2)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_callers_deadline_ends_its_wait(rig: Rig, engine: Engine) -> None:
    """CONFIG-07: DEADLINE_EXCEEDED in time, the controller's waiting is cancelled, a second call works."""
    rig.controller.may_land.clear()
    message = requests("engine")["wait_prefetch"]
    code, _ = await refusal(rig.cache.WaitPrefetch(message, timeout=0.1))
    assert code is StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(WAIT_S):
        await rig.controller.wait_cancelled.wait()
    rig.controller.may_land.set()
    assert (await rig.cache.WaitPrefetch(message)).boundary == 3


async def test_a_cancelled_load_still_ends_well(rig: Rig, engine: Engine) -> None:
    """CONFIG-07: bytes in flight belong to the job, not to the caller that gave up."""
    rig.controller.may_land.clear()
    call = rig.cache.Load(requests("engine")["load"])
    await until(lambda: rig.controller.in_flight == 1, "the load has begun")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await engine.ask(heartbeat=pb.Heartbeat())
    assert rig.controller.in_flight == 1
    rig.controller.may_land.set()
    await until(lambda: rig.controller.landed == 1, "the load has landed")


async def test_a_session_is_told_with_the_prompt_and_closed_by_its_names(rig: Rig, engine: Engine) -> None:
    about = prompt("", "")
    about.session_id, about.session_generation = "chat", 7
    await engine.ask(lookup_prefix=pb.LookupPrefixRequest(prompt=about))
    assert rig.controller.lookups[-1].prompt.session_id == "chat"
    assert rig.controller.lookups[-1].prompt.session_generation == 7
    reply = await engine.ask(close_session=requests("")["close_session"])
    assert reply.close_session.closed
    assert rig.controller.closed == [CloseSession("engine", "s", 3, "t")]
    empty = await engine.ask(close_session=pb.CloseSessionRequest())
    assert empty.error.message.startswith("session_id: empty")


async def test_before_it_is_ready_the_daemon_says_so(rig: Rig) -> None:
    """MEMORY-07: requests before readiness get UNAVAILABLE and the reason, never a wait."""
    rig.readiness.phase = type(rig.readiness.phase).STARTING
    rig.readiness.starting("host memory: 3 of 9 MiB ready")
    for call in (
        rig.cache.LookupPrefix(requests("engine")["lookup_prefix"]),
        rig.admin.Flush(pb.FlushRequest()),
        rig.cache.Load(requests("engine")["load"]),
    ):
        code, text = await refusal(call)
        assert code is StatusCode.UNAVAILABLE
        assert "host memory: 3 of 9 MiB ready" in text
    early = Engine(rig, "early")
    assert await early.ended() is StatusCode.UNAVAILABLE
    status = await rig.admin.Status(pb.StatusRequest())
    assert (status.ready, status.progress) == (False, "host memory: 3 of 9 MiB ready")


async def test_while_it_drains_who_is_here_is_served_and_nothing_new(rig: Rig, engine: Engine) -> None:
    rig.readiness.drain()
    assert (await engine.ask(lookup_prefix=requests("")["lookup_prefix"])).HasField("lookup_prefix")
    refused = await engine.ask(prefetch=requests("")["prefetch"])
    assert refused.error.code == StatusCode.UNAVAILABLE.value[0]
    assert "draining" in refused.error.message
    late = Engine(rig, "late")
    assert await late.ended() is StatusCode.UNAVAILABLE
    status = await rig.admin.Status(pb.StatusRequest())
    assert (status.ready, status.progress) == (False, "draining")
    rig.readiness.resume()
    assert (await engine.ask(prefetch=requests("")["prefetch"])).HasField("prefetch")


async def test_status_and_flush(rig: Rig, engine: Engine) -> None:
    rig.controller.problems.append("a copy thread died")
    status = await rig.admin.Status(pb.StatusRequest())
    assert [one.engine_id for one in status.engines] == ["engine"]
    assert (status.pools[0].component, status.pools[0].resident_pages) == ("full", 3)
    assert list(status.problems) == ["a copy thread died"]
    assert (status.host_used_bytes, status.host_capacity_bytes) == (10, 100)
    assert status.counters["lookups"] == 0
    flushed = await rig.admin.Flush(pb.FlushRequest())
    assert (flushed.dropped_pages, flushed.kept_pages) == (7, 2)


async def test_requests_are_counted_by_verb_and_code(rig: Rig, engine: Engine) -> None:
    """OBS-03: every series is there from the start, then holds the right number."""

    def sample(verb: str, code: str) -> float | None:
        return rig.registry.get_sample_value("hicache_requests_total", {"verb": verb, "code": code})

    for verb in METHODS:
        for code in ("OK", "INVALID_ARGUMENT", "INTERNAL", "CANCELLED", "UNAVAILABLE", "ABORTED"):
            assert sample(verb, code) == 0
    await engine.ask(load=requests("")["load"])
    await engine.ask(load=pb.LoadRequest())
    assert (sample("load", "OK"), sample("load", "INVALID_ARGUMENT")) == (1, 1)


def test_every_kind_of_refusal_has_a_code() -> None:
    assert set(CODES) == set(RequestError.__subclasses__())
    assert set(CODES.values()) <= set(COUNTED_CODES)
