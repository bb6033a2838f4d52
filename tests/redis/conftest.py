"""Servers that whole modules share, and backends on them that are closed at the end of each test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from storage_backends.base import StorageBackend
from storage_backends.redis.backend import RedisBackend
from storage_backends.specs import RedisSpec
from tests.redis.servers import Cluster, Server, Watched, binary, running

PASSWORD = "correct horse battery staple"
LEAST_RIGHTS = ("+get", "+set", "+exists", "+unlink", "+ping", "+select", "+info", "+dbsize", "~*")
"""What docs/backends.md tells people to grant."""


class Certificates(NamedTuple):
    ca: str
    cert: str
    key: str


@pytest.fixture(scope="session")
def redis_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def shared_server(redis_directory: Path) -> Iterator[Server]:
    with running(Server(redis_directory / "shared")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """Runs, empty; for tests that leave it running as it was."""
    shared_server.flush()
    return shared_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """Runs, for this test alone, which may do to it what it likes."""
    with running(Server(tmp_path / "own")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(redis_directory: Path) -> Iterator[Cluster]:
    cluster = Cluster(redis_directory / "cluster")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture(scope="session")
def shared_watched(redis_directory: Path) -> Iterator[Watched]:
    watched = Watched(redis_directory / "watched")
    try:
        watched.start()
        yield watched
    finally:
        watched.kill()


@pytest.fixture
def watched(shared_watched: Watched) -> Watched:
    shared_watched.flush()
    return shared_watched


@pytest.fixture(scope="session")
def certificates(redis_directory: Path) -> Certificates:
    """An authority, and one certificate that it signed, for both ends."""
    openssl = binary("openssl")
    ca, ca_key, cert, key, asked, names = (
        str(redis_directory / name) for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "csr", "names")
    )
    Path(names).write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signing = [openssl, "x509", "-req", "-in", asked]
    commands = (
        [openssl, "req", "-x509", *ec, "-keyout", ca_key, "-out", ca, "-subj", "/CN=test authority"],
        [openssl, "req", *ec, "-keyout", key, "-out", asked, "-subj", "/CN=localhost"],
        [*signing, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert, "-extfile", names],
    )
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return Certificates(ca, cert, key)


@pytest.fixture(scope="session")
def tls_server(redis_directory: Path, certificates: Certificates) -> Iterator[Server]:
    """Port with TLS that asks for the client's certificate; the Unix socket is for the test itself."""
    options = ["--port", "0", "--tls-ca-cert-file", certificates.ca, "--tls-auth-clients", "yes"]
    options += ["--tls-cert-file", certificates.cert, "--tls-key-file", certificates.key]
    server = Server(redis_directory / "tls", *options)
    server.options = (*options, "--tls-port", str(server.port))
    with running(server):
        yield server


Open = Callable[..., StorageBackend]


@pytest.fixture
def open_redis() -> Iterator[Open]:
    """Open a backend from the fields of its spec; all are closed at the end."""
    opened: list[StorageBackend] = []

    def open_one(**fields: object) -> StorageBackend:
        import msgspec

        opened.append(RedisBackend(msgspec.convert({"kind": "redis", **fields}, RedisSpec)))
        return opened[-1]

    yield open_one
    for backend in opened:
        backend.close()
