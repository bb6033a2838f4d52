"""The section of the configuration: what contradicts itself is refused with words; secrets stay out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from storage_backends.base import StorageError
from storage_backends.redis.address import Address
from storage_backends.specs import RedisSpec, open_backend


def spec(**fields: object) -> RedisSpec:
    return msgspec.convert({"kind": "redis", **fields}, RedisSpec)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "give `addresses`"),
        ({"embedded": True, "addresses": ["a:1"]}, "exclude each other"),
        ({"embedded": True, "mode": "cluster"}, "leave `mode` out"),
        ({"embedded": True, "password_env": "A"}, "leave TLS and passwords out"),
        ({"embedded": True, "capacity_bytes": 1 << 20}, "capacity_bytes"),
        ({"addresses": ["a:1", "b:1"]}, "takes one address"),
        ({"addresses": ["a"]}, "write host:port"),
        ({"addresses": ["a:0"]}, "write host:port"),
        ({"addresses": ["::1:6379"]}, "write host:port"),
        ({"addresses": ["unix:socket"]}, "absolute path"),
        ({"addresses": ["unix:/a"], "mode": "cluster"}, "`mode: single` only"),
        ({"addresses": ["a:1"], "mode": "sentinel"}, "go together"),
        ({"addresses": ["a:1"], "sentinel_service": "x"}, "go together"),
        ({"addresses": ["a:1"], "mode": "cluster", "db": 1}, "`db: 0`"),
        ({"addresses": ["a:1"], "password_env": "A", "password_file": "/b"}, "not both"),
        ({"addresses": ["a:1"], "username": "u"}, "needs `password_env`"),
        ({"addresses": ["a:1"], "password": "secret"}, "unknown field `password`"),
        ({"addresses": ["a:1"], "tls_ca": "/a"}, "need `tls: true`"),
        ({"addresses": ["a:1"], "tls": True, "tls_key": "/a"}, "needs `tls_cert`"),
        ({"addresses": ["unix:/a"], "tls": True}, "over TCP only"),
        ({"addresses": ["a:1"], "connections": 0}, "connections"),
        ({"addresses": ["a:1"], "ttl_s": -1}, "ttl_s"),
        ({"addresses": ["a:1"], "op_timeout_s": 0}, "op_timeout_s"),
        ({"addresses": ["a:1"], "read_window_bytes": 1}, "read_window_bytes"),
        ({"addresses": ["a:1"], "write_window_bytes": 1 << 30}, "write_window_bytes"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(fields: Mapping[str, object], words: str) -> None:
    """CONFIG-03: at the reading of the file, not at the first request."""
    with pytest.raises(msgspec.ValidationError, match=words):
        spec(**fields)


@pytest.mark.parametrize("text", ["a:1", "127.0.0.1:6379", "[::1]:6379", "unix:/run/redis.sock"])
def test_addresses_are_written_as_they_were_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"password_env": "TEST_NOT_SET"}, "TEST_NOT_SET .* is not set"),
        ({"password_file": "/nowhere/secret"}, "/nowhere/secret cannot be read"),
        ({"tls": True, "tls_ca": "/nowhere/ca"}, "/nowhere/ca"),
    ],
)
def test_a_secret_that_is_not_there_is_told_at_opening(fields: Mapping[str, object], words: str) -> None:
    with pytest.raises(StorageError, match=words):
        open_backend(spec(addresses=["127.0.0.1:1"], **fields))
