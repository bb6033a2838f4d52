"""The laws of a backend on real servers: TCP, Unix socket, ACL user, TLS, Cluster, Sentinel, embedded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storage_backends.base import Outcome, StorageBackend, StorageError
from storage_backends.redis.backend import RedisBackend
from storage_backends.specs import RedisSpec
from storage_backends.testing import Bench, StorageBackendLaws, at_once, numbered
from tests.redis.conftest import LEAST_RIGHTS, PASSWORD, Certificates, Open
from tests.redis.servers import Cluster, Server, Watched, eventually

OK, ABSENT = Outcome.OK, Outcome.ABSENT


class RedisLaws(StorageBackendLaws):
    """A server counts bytes its own way, with what it needs beside the values, so two laws on exact bytes are
    replaced by laws on what can be promised."""

    def test_usage_counts_objects_and_bytes(self, bench: Bench) -> None:
        assert bench.backend.usage().n_objects == 0
        bench.write("a", "b", nbytes=100_000)
        bench.write("c", nbytes=24)
        two = bench.backend.usage()
        bench.backend.delete(["b"])
        one = bench.backend.usage()
        assert (two.n_objects, one.n_objects) == (3, 2)
        assert two.used_bytes >= 200_024
        assert one.capacity_bytes == two.capacity_bytes
        eventually(
            lambda: two.used_bytes - bench.backend.usage().used_bytes >= 50_000, "UNLINK in the background"
        )

    def test_threads_work_on_different_keys_at_once(self, bench: Bench) -> None:
        def work(thread: int) -> None:
            base = thread * 16 * 4096
            for turn in range(20):
                keys = [f"{thread}.{turn}.{number}" for number in range(4)]
                assert bench.write(*keys, base=base) == [OK] * 4
                assert bench.read(*keys, base=(2 << 20) + base) == bench.contents(*keys)
                assert bench.backend.delete(keys[:2]) == [OK, OK]

        at_once(*[lambda thread=thread: work(thread) for thread in range(6)])
        assert bench.backend.usage().n_objects == 6 * 20 * 2


class TestTcp(RedisLaws):
    @pytest.fixture
    def backend(self, server: Server, open_redis: Open) -> StorageBackend:
        return open_redis(addresses=[server.address])

    def test_a_plain_client_finds_the_values_as_they_are(self, bench: Bench, server: Server) -> None:
        """One key holds a page, whole, so that no part of it can be lost alone (REDIS-01)."""
        bench.write("one/full/0-of-1/abc")
        with server.client() as client:
            assert client.keys() == [b"one/full/0-of-1/abc"]
            assert [client.get("one/full/0-of-1/abc")] == bench.contents("one/full/0-of-1/abc")
            assert client.pttl("one/full/0-of-1/abc") == -1

    def test_more_keys_than_go_in_one_pipeline(self, bench: Bench) -> None:
        keys = numbered(5000)
        assert bench.write(*keys[::2], nbytes=16) == [OK] * 2500
        assert bench.backend.contains(keys) == [OK, ABSENT] * 2500
        assert bench.backend.delete(keys) == [OK, ABSENT] * 2500

    def test_objects_survive_reopening(self, bench: Bench, server: Server, open_redis: Open) -> None:
        """L3-05, L3-06: another instance finds all of it, and closing deletes nothing."""
        bench.write("a", "b")
        bench.backend.close()
        again = Bench(open_redis(addresses=[server.address]))
        assert again.read("a", "b", "c") == [*again.contents("a", "b"), ABSENT]


class TestTcpInSmallWindows(RedisLaws):
    """One connection, the least bytes under way."""

    @pytest.fixture
    def backend(self, server: Server, open_redis: Open) -> StorageBackend:
        return open_redis(
            addresses=[server.address],
            write_window_bytes=64 << 10,
            read_window_bytes=64 << 10,
            connections=1,
            op_timeout_s=20,
        )


class TestWithTtl(RedisLaws):
    @pytest.fixture
    def backend(self, server: Server, open_redis: Open) -> StorageBackend:
        return open_redis(addresses=[server.address], ttl_s=600)

    def test_objects_expire_after_the_ttl(self, bench: Bench, server: Server) -> None:
        bench.write("a", "b")
        with server.client() as client:
            assert all(590_000 < client.pttl(key) <= 600_000 for key in ("a", "b"))
            client.pexpire("a", 1)
        eventually(lambda: bench.backend.contains(["a", "b"]) == [ABSENT, OK], "expiry")


class TestUnixSocket(RedisLaws):
    @pytest.fixture
    def backend(self, server: Server, open_redis: Open) -> StorageBackend:
        return open_redis(addresses=[f"unix:{server.path}"], db=3)

    def test_databases_are_apart(self, bench: Bench, server: Server, open_redis: Open) -> None:
        bench.write("a")
        assert open_redis(addresses=[server.address]).contains(["a"]) == [ABSENT]


class TestAclUser(RedisLaws):
    """Who has the least rights."""

    @pytest.fixture
    def backend(
        self, server: Server, open_redis: Open, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[StorageBackend]:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "cache", "reset", "on", f">{PASSWORD}", *LEAST_RIGHTS)
        monkeypatch.setenv("TEST_REDIS_PASSWORD", PASSWORD)
        yield open_redis(
            addresses=[server.address], username="cache", password_env="TEST_REDIS_PASSWORD", db=1
        )
        with server.client() as client:
            client.acl_deluser("cache")


class TestTls(RedisLaws):
    """Both ends show certificates."""

    @pytest.fixture
    def backend(self, tls_server: Server, certificates: Certificates, open_redis: Open) -> StorageBackend:
        tls_server.flush()
        return open_redis(
            addresses=[f"localhost:{tls_server.port}"],
            tls=True,
            tls_ca=certificates.ca,
            tls_cert=certificates.cert,
            tls_key=certificates.key,
        )

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"tls_ca": ""}, "TLS failed: .*tls_ca"),
            ({"tls_cert": "", "tls_key": ""}, "Redis: |Redis at "),
            ({"tls_ca": "/nowhere"}, "TLS cannot be set up with /nowhere"),
        ],
    )
    def test_without_the_right_certificates_there_is_no_connection(
        self,
        tls_server: Server,
        certificates: Certificates,
        open_redis: Open,
        change: dict[str, str],
        words: str,
    ) -> None:
        paths = {"tls_ca": certificates.ca, "tls_cert": certificates.cert, "tls_key": certificates.key}
        with pytest.raises(StorageError, match=words):
            open_redis(addresses=[f"127.0.0.1:{tls_server.port}"], tls=True, **(paths | change))


class TestCluster(RedisLaws):
    @pytest.fixture
    def backend(self, cluster: Cluster, open_redis: Open) -> StorageBackend:
        return open_redis(addresses=cluster.addresses[:1], mode="cluster")

    def test_keys_lie_where_the_cluster_says(self, bench: Bench, cluster: Cluster) -> None:
        """Slots are computed as the servers compute them, hash tags included: nothing had to be moved."""
        keys = [*numbered(300), "{tag}a", "{tag}b", "a{}b", "a{b", "{{x}}", "}{y}"]
        assert bench.write(*keys, nbytes=64) == [OK] * len(keys)
        for node in cluster.nodes:
            with node.client() as client:
                assert client.dbsize() > 0
                assert "errorstat_MOVED" not in client.info("errorstats")


class TestSentinel(RedisLaws):
    @pytest.fixture
    def backend(self, watched: Watched, open_redis: Open) -> StorageBackend:
        return open_redis(
            addresses=[watched.sentinel.address], mode="sentinel", sentinel_service=Watched.SERVICE
        )


class TestEmbedded(RedisLaws):
    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        with RedisBackend(RedisSpec(embedded=True, capacity_bytes=64 << 20)) as backend:
            yield backend
