"""What a single server can do to us: freeze, die, forget, fill up, refuse, answer late or nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from storage_backends.base import Item, Outcome, StorageBackend, StorageError
from storage_backends.redis.backend import RedisBackend
from storage_backends.redis.deadline import Deadline
from storage_backends.specs import RedisSpec
from storage_backends.testing import Bench, at_once, content_of, numbered
from tests.redis.conftest import PASSWORD, Open
from tests.redis.scripted import Peer, bulk, scripted
from tests.redis.servers import DEADLINE_S, Server, eventually

OK, ABSENT, WRONG_SIZE, FULL, FAILED = (
    Outcome.OK,
    Outcome.ABSENT,
    Outcome.WRONG_SIZE,
    Outcome.FULL,
    Outcome.FAILED,
)
QUICK = {"op_timeout_s": 0.5, "connect_timeout_s": 0.3}
OVERRUN_S = 5.0
"""A call that was to take half a second has not kept its deadline by then, on a machine however busy."""


def within_deadline(call: Callable[[], object]) -> object:
    began_s = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - began_s < OVERRUN_S


def works(bench: Bench, key: str) -> bool:
    """Whether a write and a read go through now; trouble meanwhile is told, not hidden."""
    try:
        return bench.write(key) == [OK] and bench.read(key) == bench.contents(key)
    except StorageError:
        return False


# ---- freezing and dying -------------------------------------------------------------------------------


def test_a_frozen_server_costs_no_call_its_deadline(own_server: Server, open_redis: Open) -> None:
    """REDIS-04: SIGSTOP, which is a black hole too: connections are accepted, and nothing is answered. Every
    call ends in time with the reason, and all is well as soon as the server goes on."""
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    bench.write("a")
    backend = bench.backend
    calls: list[Callable[[], object]] = [
        lambda: backend.contains(["a"]),
        lambda: bench.read("a"),
        lambda: bench.write("b"),
        lambda: backend.delete(["b"]),
        backend.ping,
        backend.usage,
    ]
    with own_server.frozen():
        for call in calls * 2:
            with pytest.raises(StorageError, match=r"frozen"):
                within_deadline(call)
    eventually(lambda: works(bench, "c"), "recovery")
    assert bench.read("a") == bench.contents("a")


def test_a_frozen_server_is_soon_left_alone(own_server: Server, open_redis: Open) -> None:
    """Callers fail at once, without waiting in line for a server that cannot even be connected to."""
    backend = open_redis(addresses=[own_server.address], op_timeout_s=30, connect_timeout_s=0.2)
    backend.register(memoryview(bytearray(4096)))
    with own_server.frozen():
        with pytest.raises(StorageError):  # an idle connection looks good until it is used
            open_redis(addresses=[own_server.address], **QUICK)
        for _ in range(3):  # forget what the frozen server still holds open
            backend_pool_is_empty(backend)
        ended = 0
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.5:
            with pytest.raises(StorageError, match=r"frozen or overloaded"):
                backend.contains(["a"])
            ended += 1
        assert ended > 20  # waiting its 0.2 s each time, a caller would get through 8


def backend_pool_is_empty(backend: StorageBackend) -> None:
    assert isinstance(backend, RedisBackend)
    for node in backend._routes.primaries(Deadline.after(1)):
        node.small.forget_idle()
        node.bulk.forget_idle()


def test_a_server_killed_and_restarted_empty(own_server: Server, open_redis: Open) -> None:
    """REDIS-04, L3-04: while it is gone calls fail at once and say why; afterwards stale connections are
    replaced without an error, what was stored is a clean miss, and can be stored again."""
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    bench.write("a", "b")
    own_server.kill()
    for call in (lambda: bench.read("a"), lambda: bench.write("c"), bench.backend.ping):
        with pytest.raises(StorageError, match=r"cannot be reached|closed the connection"):
            within_deadline(call)
    own_server.start()
    assert bench.read("a", "b") == [ABSENT, ABSENT]
    assert bench.write("a") == [OK]
    assert bench.read("a", "b") == [*bench.contents("a"), ABSENT]


def test_a_restart_between_two_calls_is_not_noticed(own_server: Server, open_redis: Open) -> None:
    """Idle connections of a server that is new in the meantime are no trouble for anybody."""
    own_server.options = ("--appendonly", "yes", "--appendfsync", "always")
    own_server.restart()
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    for turn in range(3):
        assert bench.write(f"k{turn}") == [OK]
        own_server.restart()
        keys = numbered(turn + 1)
        assert bench.read(*keys) == bench.contents(*keys)
        assert bench.backend.contains([*keys, "x"]) == [*[OK] * len(keys), ABSENT]


def test_a_server_killed_under_load(own_server: Server, open_redis: Open) -> None:
    """REDIS-04: whatever was read is right, whatever failed said so, and it comes back by itself."""
    backend = open_redis(addresses=[own_server.address], **QUICK)
    bench = Bench(backend)
    ended = threading.Event()
    troubles: list[str] = []

    def load(thread: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            keys = [f"{thread}.{turn}.{number}" for number in range(3)]
            try:
                written = bench.write(*keys, nbytes=60_000, base=thread * 180_000)
                found = bench.read(*keys, nbytes=60_000, base=(2 << 20) + thread * 180_000)
            except StorageError as error:
                troubles.append(str(error))
                continue
            assert set(written) <= {OK, FAILED}
            for key, value in zip(keys, found, strict=True):
                assert value in (content_of(key, 60_000), ABSENT, FAILED)

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, thread) for thread in range(2)]
        try:
            for _ in range(3):  # in this thread, with which a server that it starts would die
                n_before = len(troubles)
                own_server.kill()
                eventually(lambda n_before=n_before: len(troubles) > n_before, "trouble")
                own_server.start()
                eventually(lambda: answers(backend), "recovery")
        finally:
            ended.set()
        for one in loads:
            one.result(DEADLINE_S)
    assert works(bench, "after")


def answers(backend: StorageBackend) -> bool:
    """Asked without the buffer, which the load uses."""
    try:
        return backend.contains(["x"]) == [ABSENT]
    except StorageError:
        return False


def test_a_flush_from_outside_is_a_miss(server: Server, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=[server.address]))
    bench.write("a", "b")
    server.flush()
    assert bench.backend.contains(["a", "b"]) == [ABSENT, ABSENT]
    assert bench.read("a", "b") == [ABSENT, ABSENT]
    assert bench.write("a") == [OK]
    assert bench.read("a", "b") == [*bench.contents("a"), ABSENT]


def test_a_server_that_closes_idle_connections(own_server: Server, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    for turn in range(3):
        assert bench.write(f"k{turn}") == [OK]
        assert bench.backend.contains([f"k{turn}"]) == [OK]
        with own_server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


# ---- replies that are late, torn or mad -----------------------------------------------------------------


def test_a_late_reply_is_never_taken_for_the_next_ones() -> None:
    """A reply that comes after its deadline belongs to nobody: its connection was closed. The next caller,
    who asks for another key, gets its own value over another connection."""
    go_on = threading.Event()
    answered_late = threading.Event()

    def answer(peer: Peer, words: list[bytes]) -> None:
        key = words[1].decode()
        if key == "slow":
            assert go_on.wait(DEADLINE_S)
            answered_late.set()
        peer.send(bulk(content_of(key)))

    with scripted(answer) as server:
        spec = RedisSpec(addresses=(server.address,), op_timeout_s=0.3, connections=1)
        with RedisBackend(spec) as backend:
            bench = Bench(backend)
            assert bench.read("first") == bench.contents("first")
            with pytest.raises(StorageError, match=r"did not answer within"):
                bench.read("slow")
            assert bench.read("before it comes") == bench.contents("before it comes")
            go_on.set()
            assert answered_late.wait(DEADLINE_S)
            for key in ("next", "slow", "last"):
                assert bench.read(key) == bench.contents(key)
        numbers = [number for number, words in server.commands if words[0] == b"GET"]
        assert numbers[0] == numbers[1]
        assert numbers[1] not in numbers[2:]


def test_a_stray_reply_on_an_idle_connection_is_nobodys() -> None:
    """A server, or a proxy, that says something unasked between two calls."""

    stray_sent = threading.Event()

    def answer(peer: Peer, words: list[bytes]) -> None:
        peer.send(bulk(content_of(words[1].decode())))
        if words[1] == b"first":
            assert asked_first.wait(DEADLINE_S)
            peer.send(bulk(content_of("stray")))
            stray_sent.set()

    asked_first = threading.Event()
    with scripted(answer) as server, RedisBackend(RedisSpec(addresses=(server.address,), **QUICK)) as backend:
        bench = Bench(backend)
        assert bench.read("first") == bench.contents("first")
        asked_first.set()
        assert stray_sent.wait(DEADLINE_S)
        for key in ("second", "third"):
            assert bench.read(key) == bench.contents(key)


def test_nothing_lands_in_the_buffer_after_a_read_has_returned() -> None:
    """L3-02: half of a value comes in time, the rest when the range may be another's already."""
    go_on = threading.Event()
    rest_sent = threading.Event()

    def answer(peer: Peer, words: list[bytes]) -> None:
        reply = bulk(content_of(words[1].decode(), 200_000))
        peer.send(reply[:100_000])
        assert go_on.wait(DEADLINE_S)
        try:
            peer.send(reply[100_000:])
        finally:
            rest_sent.set()

    with (
        scripted(answer) as server,
        RedisBackend(RedisSpec(addresses=(server.address,), op_timeout_s=0.3)) as backend,
    ):
        bench = Bench(backend)
        with pytest.raises(StorageError, match=r"did not answer within"):
            bench.read("slow", nbytes=200_000)
        bench.buffer[:] = b"\xa5" * len(bench.buffer)
        go_on.set()
        assert rest_sent.wait(DEADLINE_S)
        # another call, which must not finish the first one's work
        assert bench.backend.contains(["x"]) == [FAILED]
        assert set(bench.buffer) == {0xA5}


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b":7\r\n",
        b"$-5\r\n"[:1] + b"zz\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"\0\0\0",
    ],
)
def test_nonsense_is_a_failure_and_its_connection_is_not_used_again(raw: bytes) -> None:
    mad = threading.Event()
    mad.set()

    def answer(peer: Peer, words: list[bytes]) -> None:
        if mad.is_set():
            peer.send(raw)
            peer.hang_up()
        else:
            peer.send(bulk(content_of(words[1].decode())))

    with scripted(answer) as server, RedisBackend(RedisSpec(addresses=(server.address,), **QUICK)) as backend:
        bench = Bench(backend)
        with pytest.raises(StorageError):
            bench.read("k")
        mad.clear()
        assert bench.read("k") == bench.contents("k")


def test_an_error_in_a_pipeline_fails_its_item_alone() -> None:
    """L3-11: the replies around it keep their places."""

    def answer(peer: Peer, words: list[bytes]) -> None:
        key = words[1].decode()
        replies = {"p1": b"-ERR strange\r\n", "p2": b"$-1\r\n", "p3": b"$0\r\n\r\n", "p4": bulk(b"short")}
        peer.send(replies.get(key, bulk(content_of(key))))

    with scripted(answer) as server, RedisBackend(RedisSpec(addresses=(server.address,), **QUICK)) as backend:
        bench = Bench(backend)
        found = bench.read("p0", "p1", "p2", "p3", "p4", "p5")
        assert found == [
            *bench.contents("p0"),
            FAILED,
            ABSENT,
            WRONG_SIZE,
            WRONG_SIZE,
            *bench.contents("p5"),
        ]


def test_a_trickle_does_not_stretch_the_deadline() -> None:
    """A slow link: each byte comes soon after the last, and the whole far too late."""
    go_on = threading.Event()

    def answer(peer: Peer, words: list[bytes]) -> None:
        peer.send(b"$4096\r\n")
        for byte in content_of("k"):
            peer.send(bytes([byte]))
            if go_on.wait(0.02):
                return

    with scripted(answer) as server, RedisBackend(RedisSpec(addresses=(server.address,), **QUICK)) as backend:
        bench = Bench(backend)
        with pytest.raises(StorageError, match=r"did not answer within 0.5 s"):
            within_deadline(lambda: bench.read("k"))
        go_on.set()


def test_a_black_hole_costs_no_call_its_deadline(open_redis: Open) -> None:
    """REDIS-04: no connection is refused, none is made: the listener's queue is full, so the kernel drops
    what asks to come in."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        for _ in range(3):
            filler = waiting.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        with pytest.raises(StorageError, match=r"cannot be reached in time"):
            within_deadline(lambda: open_redis(addresses=[f"127.0.0.1:{listener.getsockname()[1]}"], **QUICK))


# ---- values that others have touched --------------------------------------------------------------------


def test_truncated_extended_and_foreign_values_are_wrong_size(server: Server, open_redis: Open) -> None:
    """L3-01, REDIS-02, SECURITY-03: with the tools of any client. The neighbours arrive whole, and writing
    heals each of them."""
    bench = Bench(open_redis(addresses=[server.address]))
    keys = ["p0", "p1", "p2", "p3", "p4", "p5"]
    bench.write(*keys)
    with server.client() as client:
        client.set("p1", content_of("p1")[:-1])
        client.setrange("p2", len(content_of("p2")), b"more")
        client.set("p3", b"")
        client.delete("p4")
        client.rpush("p4", "a list")
    expected = [*bench.contents("p0"), *[WRONG_SIZE] * 4, *bench.contents("p5")]
    assert bench.read(*keys) == expected
    assert bench.write(*keys) == [OK] * 6
    assert bench.read(*keys) == bench.contents(*keys)


def test_half_of_the_keys_deleted_under_load(server: Server, open_redis: Open) -> None:
    """REDIS-01: a page is one key, so it is there whole or not at all, whatever others delete."""
    bench = Bench(open_redis(addresses=[server.address]))
    keys = numbered(60)
    bench.write(*keys, nbytes=8192)
    ended = threading.Event()

    def delete() -> None:
        try:
            with server.client() as client:
                for key in keys[::2]:
                    client.delete(key)
        finally:
            ended.set()

    def read() -> None:
        while not ended.is_set():
            for key, value in zip(keys, bench.read(*keys, nbytes=8192), strict=True):
                assert value in (content_of(key, 8192), ABSENT)

    at_once(delete, read)
    assert bench.backend.contains(keys) == [ABSENT, OK] * 30


# ---- memory ---------------------------------------------------------------------------------------------

MIB = 1 << 20


def limited(server: Server, policy: str) -> None:
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 20 * MIB)
        client.config_set("maxmemory-policy", policy)


def fill(bench: Bench, n_mib: int) -> list[Outcome]:
    """Write MiB after MiB, one call each."""
    bench.buffer[:MIB] = content_of("filling", MIB)
    return [bench.backend.write([Item(f"fill{number}", 0, MIB)])[0] for number in range(n_mib)]


def test_a_full_server_without_eviction(own_server: Server, open_redis: Open) -> None:
    """REDIS-03: writes are FULL, which is no error of the batch, reads go on, health says what to do, and
    when there is room again it heals by itself."""
    limited(own_server, "noeviction")
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    outcomes = fill(bench, 40)
    n_stored = outcomes.index(FULL)
    assert n_stored >= 10
    assert set(outcomes[n_stored:]) == {FULL}
    kept = [f"fill{number}" for number in range(n_stored)]
    assert set(bench.backend.contains(kept)) == {OK}
    for key in kept:
        assert bench.backend.read([Item(key, 2 * MIB, MIB)]) == [OK]
        assert bench.buffer[2 * MIB : 3 * MIB] == content_of("filling", MIB)
    with pytest.raises(StorageError, match=r"full: .* Reads go on.*allkeys-lru"):
        bench.backend.ping()
    bench.backend.delete(kept)
    eventually(lambda: works(bench, "after"), "room")
    bench.backend.ping()


def test_a_full_server_is_healthy_again_when_somebody_else_makes_room(
    own_server: Server, open_redis: Open
) -> None:
    """REDIS-03: without one write of ours, which the breaker above may hold back."""
    limited(own_server, "noeviction")
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    assert FULL in fill(bench, 40)
    own_server.flush()

    def is_well() -> bool:
        try:
            bench.backend.ping()
        except StorageError:
            return False
        return True

    eventually(is_well, "health")


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru"])
def test_keys_with_a_ttl_make_room_under_any_evicting_policy(
    own_server: Server, open_redis: Open, policy: str
) -> None:
    """REDIS-02: 40 MiB go into 20; what was evicted is a miss, what was written last is there."""
    limited(own_server, policy)
    bench = Bench(open_redis(addresses=[own_server.address], ttl_s=3600, **QUICK))
    assert set(fill(bench, 40)) == {OK}
    found = bench.backend.contains([f"fill{number}" for number in range(40)])
    assert found[-1] is OK
    assert 10 <= found.count(OK) <= 20
    bench.backend.ping()


def test_keys_without_a_ttl_fill_a_server_that_evicts_only_volatile_ones(
    own_server: Server, open_redis: Open
) -> None:
    """REDIS-02: the service says that L3 is full, and names the ttl."""
    limited(own_server, "volatile-lru")
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    assert FULL in fill(bench, 40)
    with pytest.raises(StorageError, match=r"volatile-lru evicts nothing.*ttl_s"):
        bench.backend.ping()


def test_a_value_that_no_server_takes_fails_alone(own_server: Server, open_redis: Open) -> None:
    """The server ends the connection on which it comes; what came before it stands."""
    with own_server.client() as client:
        client.config_set("proto-max-bulk-len", MIB)
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    large = Item("large", 0, MIB + 1)
    assert bench.backend.write([Item("a", 0, 10), large]) == [OK, FAILED]
    assert bench.backend.contains(["a", "large"]) == [OK, ABSENT]
    assert works(bench, "b")


# ---- rights ---------------------------------------------------------------------------------------------


def test_a_wrong_password_is_told_with_the_remedy_and_not_shown(
    own_server: Server, open_redis: Open, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a wrong one\n")
    with own_server.client() as client:
        client.config_set("requirepass", PASSWORD)
    own_server.login = {"password": PASSWORD}
    with pytest.raises(StorageError, match=r"NOAUTH.*password_file"):
        open_redis(addresses=[own_server.address], **QUICK)
    with pytest.raises(StorageError, match=r"WRONGPASS.*password_file") as told:
        open_redis(addresses=[own_server.address], password_file=str(secret), **QUICK)
    assert "a wrong one" not in str(told.value)
    secret.write_text(PASSWORD + "\n")
    bench = Bench(open_redis(addresses=[own_server.address], password_file=str(secret), **QUICK))
    assert works(bench, "k")


def test_a_password_that_changes_in_its_file_is_used_at_once(
    own_server: Server, open_redis: Open, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one")
    with own_server.client() as client:
        client.config_set("requirepass", "one")
    own_server.login = {"password": "one"}
    bench = Bench(open_redis(addresses=[own_server.address], password_file=str(secret), **QUICK))
    assert works(bench, "a")
    with own_server.client() as client:
        client.config_set("requirepass", "two")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    own_server.login = {"password": "two"}
    with pytest.raises(StorageError, match=r"WRONGPASS"):
        bench.read("a")
    secret.write_text("two")
    assert bench.read("a") == bench.contents("a")


def test_missing_rights_are_told(
    own_server: Server, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may read and not write, and only under one prefix."""
    monkeypatch.setenv("TEST_REDIS_PASSWORD", PASSWORD)
    with own_server.client() as client:
        client.set("ours/a", content_of("ours/a"))
        rights = ["+get", "+exists", "+ping", "~ours/*"]
        client.execute_command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", *rights)
    login = {"username": "reader", "password_env": "TEST_REDIS_PASSWORD"}
    bench = Bench(open_redis(addresses=[own_server.address], **login, **QUICK))
    assert bench.read("ours/a", "theirs/a") == [*bench.contents("ours/a"), FAILED]
    with pytest.raises(StorageError, match=r"NOPERM.*docs/backends.md"):
        bench.write("ours/b")
    with pytest.raises(StorageError, match=r"NOPERM"):
        bench.backend.usage()
    bench.backend.ping()


def test_a_server_that_is_still_loading_says_so(own_server: Server, open_redis: Open) -> None:
    def answer(peer: Peer, words: list[bytes]) -> None:
        peer.send(b"-LOADING Redis is loading the dataset in memory\r\n")

    with scripted(answer) as server:
        backend = open_redis(addresses=[server.address], **QUICK)
        with pytest.raises(StorageError, match=r"LOADING.*serves when that is done"):
            backend.contains(["a", "b"])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nowhere/redis.sock"])
def test_a_server_that_is_not_there_is_told_at_opening(open_redis: Open, address: str) -> None:
    """CONFIG-01: at the start, with the address and the remedy, not as a hang later."""
    with pytest.raises(StorageError, match=f"{address} cannot be reached.*check the address"):
        within_deadline(lambda: open_redis(addresses=[address], **QUICK))


def test_a_replica_is_named_as_such(own_server: Server, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=[own_server.address], **QUICK))
    bench.write("a")
    with own_server.client() as client:
        client.replicaof("127.0.0.1", "1")
    with pytest.raises(StorageError, match=r"READONLY.*sentinel"):
        bench.write("b")
    assert bench.read("a") == bench.contents("a")
    with own_server.client() as client:
        client.replicaof("NO", "ONE")
    assert works(bench, "b")
