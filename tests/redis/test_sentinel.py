"""REDIS-06: the primary's address changes, and writes follow it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_backends.base import Outcome, StorageError
from storage_backends.testing import Bench
from tests.redis.conftest import LEAST_RIGHTS, PASSWORD, Open
from tests.redis.scripted import Peer, bulk, scripted
from tests.redis.servers import Watched, eventually

OK, FAILED = Outcome.OK, Outcome.FAILED
QUICK = {
    "mode": "sentinel",
    "sentinel_service": Watched.SERVICE,
    "op_timeout_s": 0.6,
    "connect_timeout_s": 0.3,
}


@pytest.fixture
def own_watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path / "watched")
    try:
        watched.start()
        yield watched
    finally:
        watched.kill()


def test_writes_follow_a_failover(own_watched: Watched, open_redis: Open) -> None:
    """REDIS-06: the old primary is a read-only replica now, which is not fatal: the same call goes to the new
    one, or fails as a miss until the Sentinels agree."""
    bench = Bench(open_redis(addresses=[own_watched.sentinel.address], **QUICK))
    assert bench.write("a") == [OK]
    eventually(lambda: replica_has(own_watched, "a"), "replication")
    before = own_watched.primary()
    own_watched.fail_over()

    def writes_to_the_other() -> bool:
        try:
            bench.backend.ping()  # as the tier does each second: so a silent change is noticed
            written = bench.write("b") == [OK]
        except StorageError:
            return False
        with own_watched.primary().client() as client:
            return written and client.exists("b") == 1

    eventually(writes_to_the_other, "writing to the new primary")
    assert own_watched.primary() is not before
    assert bench.read("a", "b") == bench.contents("a", "b")
    bench.backend.ping()


def test_a_primary_that_is_killed_is_replaced(own_watched: Watched, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=[own_watched.sentinel.address], **QUICK))
    bench.write("a")
    eventually(lambda: replica_has(own_watched, "a"), "replication")
    own_watched.primary().kill()
    with pytest.raises(StorageError):
        bench.read("a")

    def reads_again() -> bool:
        try:
            return bench.read("a") == bench.contents("a")
        except StorageError:
            return False

    eventually(reads_again, "failover")
    assert bench.write("b") == [OK]


def replica_has(watched: Watched, key: str) -> bool:
    replica = next(server for server in watched.servers if server is not watched.primary())
    with replica.client() as client:
        return client.exists(key) == 1


def test_a_sentinel_that_is_down_is_passed_over(watched: Watched, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=["127.0.0.1:1", watched.sentinel.address], **QUICK))
    assert bench.write("a") == [OK]


def test_sentinels_that_go_down_later_do_no_harm(own_watched: Watched, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=[own_watched.sentinel.address], **QUICK))
    own_watched.sentinel.kill()
    assert bench.write("a") == [OK]
    bench.backend.ping()
    assert bench.read("a") == bench.contents("a")


def test_the_rights_that_the_documents_name_are_enough(
    own_watched: Watched, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_REDIS_PASSWORD", PASSWORD)
    with own_watched.primary().client() as client:
        rights = [*LEAST_RIGHTS, "+role"]
        client.execute_command("ACL", "SETUSER", "cache", "reset", "on", f">{PASSWORD}", *rights)
    login = {"username": "cache", "password_env": "TEST_REDIS_PASSWORD"}
    bench = Bench(open_redis(addresses=[own_watched.sentinel.address], **login, **QUICK))
    assert bench.write("a") == [OK]
    assert bench.read("a") == bench.contents("a")
    bench.backend.ping()


def test_a_primary_that_was_replaced_and_does_not_know_it_is_left(
    own_watched: Watched, open_redis: Open
) -> None:
    """The Sentinels name another server while the old one still takes writes: the next probe finds out, and
    with it all that follows."""
    one, two = own_watched.servers
    with two.client() as client:
        client.replicaof("NO", "ONE")
    named = one

    def answer(peer: Peer, words: list[bytes]) -> None:
        peer.send(b"*2\r\n" + bulk(b"127.0.0.1") + bulk(str(named.port).encode()))

    with scripted(answer) as sentinel:
        bench = Bench(open_redis(addresses=[sentinel.address], **QUICK))
        assert bench.write("a") == [OK]
        named = two
        bench.backend.ping()
        assert bench.write("b") == [OK]
        for server, key in ((one, "a"), (two, "b")):
            with server.client() as client:
                assert client.keys() == [key.encode()]


def test_a_replica_that_is_named_as_primary_is_not_used(own_watched: Watched, open_redis: Open) -> None:
    """Sentinels lag behind: nothing is read from, or written to, what does not take itself for a primary."""
    replica = own_watched.servers[1]

    def answer(peer: Peer, words: list[bytes]) -> None:
        peer.send(b"*2\r\n" + bulk(b"127.0.0.1") + bulk(str(replica.port).encode()))

    with scripted(answer) as sentinel, pytest.raises(StorageError, match=r"is not the primary"):
        open_redis(addresses=[sentinel.address], **QUICK)


def test_an_unknown_service_is_told(watched: Watched, open_redis: Open) -> None:
    with pytest.raises(StorageError, match=r"knows no service 'other': correct `sentinel_service`"):
        open_redis(addresses=[watched.sentinel.address], **(QUICK | {"sentinel_service": "other"}))


def test_sentinels_that_are_all_down_are_told(open_redis: Open) -> None:
    with pytest.raises(StorageError, match=r"no Sentinel names a primary.*127.0.0.1:1 cannot be reached"):
        open_redis(addresses=["127.0.0.1:1"], **QUICK)
