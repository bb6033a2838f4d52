"""REDIS-05: batches over three nodes keep their order whatever one node does, and while slots move."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_backends.base import Outcome, StorageError
from storage_backends.redis.routes import slot_of
from storage_backends.testing import Bench, at_once, content_of, numbered
from tests.redis.conftest import LEAST_RIGHTS, PASSWORD, Open
from tests.redis.servers import Cluster, Server, eventually

OK, ABSENT, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.FAILED
QUICK = {"mode": "cluster", "op_timeout_s": 0.6, "connect_timeout_s": 0.3}
OVERRUN_S = 5.0


@pytest.fixture(scope="module")
def fragile_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that freeze its nodes or move its slots, and put both right again."""
    cluster = Cluster(tmp_path_factory.mktemp("fragile"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def fragile(fragile_cluster: Cluster) -> Cluster:
    eventually(fragile_cluster.is_whole, "the cluster")
    fragile_cluster.flush()
    return fragile_cluster


def owner_of(cluster: Cluster, key: str) -> int:
    return min(slot_of(key) // 5461, 2)


def test_slots_are_those_of_the_servers(cluster: Cluster) -> None:
    keys = [
        "123456789",
        "",
        "a",
        "{a}b",
        "a{}b",
        "{}",
        "x{y}z{q}",
        "{{a}}",
        "ключ",
        "hicache/full/0-of-1/abc",
    ]
    with cluster.nodes[0].client() as client:
        assert [slot_of(key) for key in keys] == [
            client.execute_command("CLUSTER", "KEYSLOT", key) for key in keys
        ]


def test_a_frozen_node_fails_its_own_pages_alone(fragile: Cluster, open_redis: Open) -> None:
    """REDIS-05: twelve pages on three nodes, one of which times out. Results are in the order of the request,
    the other nodes' pages arrive, and the next batch works."""
    bench = Bench(open_redis(addresses=fragile.addresses, **QUICK))
    keys = numbered(12)
    assert {owner_of(fragile, key) for key in keys} == {0, 1, 2}
    bench.write(*keys)
    with fragile.nodes[1].frozen():
        for _ in range(2):
            began_s = time.monotonic()
            found = bench.read(*keys)
            assert time.monotonic() - began_s < OVERRUN_S
            assert found == [FAILED if owner_of(fragile, key) == 1 else content_of(key) for key in keys]
        asked = bench.backend.contains([*keys, "absent on a live node"])
        assert asked[:12] == [FAILED if owner_of(fragile, key) == 1 else OK for key in keys]
        with pytest.raises(StorageError, match=fragile.nodes[1].address):
            bench.backend.ping()
    eventually(lambda: bench.read(*keys) == bench.contents(*keys), "the next batch")
    bench.backend.ping()


def test_a_node_that_answers_again_within_the_deadline_costs_nothing(
    fragile: Cluster, open_redis: Open
) -> None:
    bench = Bench(open_redis(addresses=fragile.addresses, mode="cluster", op_timeout_s=30))
    keys = numbered(12)
    bench.write(*keys)

    def freeze() -> None:
        with fragile.nodes[2].frozen():
            frozen.set()
            asked.wait(0.2)  # long enough that the batch meets it, mostly; right either way

    frozen, asked = threading.Event(), threading.Event()

    def read() -> None:
        frozen.wait(30)
        assert bench.read(*keys) == bench.contents(*keys)
        asked.set()

    at_once(freeze, read)


def test_a_node_that_dies_and_comes_back(tmp_path: Path, open_redis: Open) -> None:
    """While it is gone its pages fail and the others are served; afterwards all of it is used again, also
    though the cluster had marked it as failed."""
    cluster = Cluster(tmp_path / "cluster")
    try:
        cluster.start()
        bench = Bench(open_redis(addresses=cluster.addresses, **QUICK))
        keys = numbered(12)
        bench.write(*keys)
        cluster.nodes[0].kill()
        found = bench.read(*keys)
        assert found == [FAILED if owner_of(cluster, key) == 0 else content_of(key) for key in keys]
        with pytest.raises(StorageError):
            bench.backend.ping()
        cluster.nodes[0].start()
        eventually(lambda: bench.write(*keys) == [OK] * 12, "recovery")
        assert bench.read(*keys) == bench.contents(*keys)
    finally:
        cluster.kill()


def test_slots_that_move_are_followed(fragile: Cluster, open_redis: Open) -> None:
    """MOVED: one key's slot goes to another node while a backend is open, which still knows the old owner."""
    bench = Bench(open_redis(addresses=fragile.addresses, **QUICK))
    key = next(key for key in numbered(100) if owner_of(fragile, key) == 0)
    bench.write(key, *numbered(12))
    source, target = fragile.nodes[:2]
    slot = slot_of(key)
    hand_over(fragile, slot, source, target, keys=[key])
    try:
        assert bench.read(key, *numbered(12)) == bench.contents(key, *numbered(12))
        assert bench.write(key) == [OK]
        with target.client() as client:
            assert client.get(key) == content_of(key)
    finally:
        hand_over(fragile, slot, target, source, keys=[key])


def test_a_slot_on_the_move_is_asked_at_both_ends(fragile: Cluster, open_redis: Open) -> None:
    """ASK: keys that have moved are at the new owner, the others still at the old one, and what is not there
    at all is absent."""
    bench = Bench(open_redis(addresses=fragile.addresses, **QUICK))
    tag = next(key for key in numbered(100) if owner_of(fragile, key) == 0)
    moved, staying, absent = (f"{{{tag}}}{name}" for name in ("moved", "staying", "absent"))
    bench.write(moved, staying, "k1", "k2")
    source, target = fragile.nodes[:2]
    slot = slot_of(tag)
    begin_hand_over(slot, source, target)
    try:
        migrate(source, target, moved)
        found = bench.read(moved, "k1", absent, staying, "k2")
        assert found == [*bench.contents(moved, "k1"), ABSENT, *bench.contents(staying, "k2")]
        assert bench.backend.contains([absent, staying, moved]) == [ABSENT, OK, OK]
        assert bench.write(absent, moved, staying) == [OK, OK, OK]
        assert bench.read(absent, moved, staying) == bench.contents(absent, moved, staying)
    finally:
        for node in (source, target):
            node.flush()
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")


def begin_hand_over(slot: int, source: Server, target: Server) -> None:
    with target.client() as client, source.client() as other:
        client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        other.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))


def hand_over(cluster: Cluster, slot: int, source: Server, target: Server, keys: list[str]) -> None:
    begin_hand_over(slot, source, target)
    for key in keys:
        migrate(source, target, key)
    owner = node_id(target)
    for node in (target, source, *cluster.nodes):
        with node.client() as client:
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)


def migrate(source: Server, target: Server, key: str) -> None:
    with source.client() as client:
        client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000, "REPLACE")


def node_id(server: Server) -> str:
    with server.client() as client:
        found = client.execute_command("CLUSTER", "MYID")
    return found.decode() if isinstance(found, bytes) else str(found)


def test_the_rights_that_the_documents_name_are_enough(
    cluster: Cluster, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_REDIS_PASSWORD", PASSWORD)
    rights = [*LEAST_RIGHTS, "+cluster|slots", "+asking"]
    for node in cluster.nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", "cache", "reset", "on", f">{PASSWORD}", *rights)
    login = {"username": "cache", "password_env": "TEST_REDIS_PASSWORD"}
    bench = Bench(open_redis(addresses=cluster.addresses[:1], **login, **QUICK))
    assert bench.write(*numbered(12)) == [OK] * 12
    assert bench.read(*numbered(12)) == bench.contents(*numbered(12))
    assert bench.backend.usage().n_objects == 12


def test_seeds_that_are_down_do_not_matter_while_one_answers(fragile: Cluster, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=["127.0.0.1:1", "127.0.0.1:2", fragile.addresses[2]], **QUICK))
    assert bench.write(*numbered(12)) == [OK] * 12


def test_a_server_that_is_no_cluster_is_told(server: Server, open_redis: Open) -> None:
    with pytest.raises(
        StorageError, match=r"no node of the cluster tells its slots.*cluster support disabled"
    ):
        open_redis(addresses=[server.address], **QUICK)


def test_one_node_of_a_cluster_taken_for_a_single_server_is_told(cluster: Cluster, open_redis: Open) -> None:
    bench = Bench(open_redis(addresses=cluster.addresses[:1]))
    with pytest.raises(StorageError, match=r"MOVED.*mode: cluster"):
        bench.write(next(key for key in numbered(100) if owner_of(cluster, key) == 1))
