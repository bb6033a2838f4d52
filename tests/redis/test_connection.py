"""The protocol: whatever the pieces a reply comes in, its value is one; a doubtful connection is closed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.redis.address import Address
from storage_backends.redis.connection import Connection, Reply, encode, encode_each
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import ErrorReply, Garbled, Late, Lost
from storage_backends.redis.stream import Chunk, open_stream
from tests.redis.servers import Server

SOON = Deadline.after(3600)


class Torn:
    """A stream whose bytes come in pieces of the lengths given, and which then ends."""

    def __init__(self, raw: bytes, lengths: Sequence[int]) -> None:
        self._raw = raw
        self._lengths = list(lengths)
        self.sent: list[bytes] = []
        self.is_closed = False

    def send(self, chunks: Sequence[Chunk], deadline: Deadline) -> None:
        self.sent += [bytes(chunk) for chunk in chunks]

    def receive(self, into: memoryview, deadline: Deadline) -> int:
        n = min(len(into), len(self._raw), self._lengths.pop() if self._lengths else 1 << 20)
        if not self._raw:
            raise Lost("ended")
        into[:n] = self._raw[:n]
        self._raw = self._raw[n:]
        return n

    def fill(self, into: memoryview, deadline: Deadline) -> None:
        while len(into):
            into = into[self.receive(into, deadline) :]

    def is_quiet(self) -> bool:
        return not self._raw

    def close(self) -> None:
        self.is_closed = True


def torn(raw: bytes, lengths: Sequence[int] = (), n_replies: int = 1) -> Connection:
    connection = Connection(Torn(raw, lengths))
    connection.send([b""], n_replies, SOON)
    return connection


REPLIES: list[tuple[bytes, Reply]] = [
    (b"+OK\r\n", b"OK"),
    (b":0\r\n", 0),
    (b":-12\r\n", -12),
    (b"-OOM command not allowed\r\n", ErrorReply("OOM command not allowed")),
    (b"$-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
    (b"*0\r\n", []),
    (b"*-1\r\n", None),
    (b"*3\r\n:1\r\n$1\r\nx\r\n*1\r\n+y\r\n", [1, b"x", [b"y"]]),
    (b"_\r\n", None),
    (b"#t\r\n", 1),
    (b"#f\r\n", 0),
    (b",1.5\r\n", 1.5),
    (b"(123456789012345678901234567890\r\n", 123456789012345678901234567890),
    (b"!5\r\nERR x\r\n", ErrorReply("ERR x")),
    (b"=5\r\ntxt:x\r\n", b"x"),
    (b"%1\r\n+k\r\n:2\r\n", [b"k", 2]),
    (b"~2\r\n:1\r\n:2\r\n", [1, 2]),
    (b">2\r\n+invalidate\r\n:9\r\n+OK\r\n", b"OK"),
]


@given(st.lists(st.sampled_from(REPLIES), max_size=12), st.lists(st.integers(1, 40), max_size=200))
def test_replies_are_the_same_in_any_pieces(sequence: list[tuple[bytes, Reply]], lengths: list[int]) -> None:
    connection = torn(b"".join(raw for raw, _ in sequence), lengths, len(sequence))
    assert [connection.reply(SOON) for _ in sequence] == [value for _, value in sequence]
    assert connection.is_clean


BODIES = st.sampled_from([0, 1, 100, 16383, 16384, 16385, 70000]).map(bytes) | st.binary(max_size=200)


@given(
    st.lists(st.tuples(BODIES | st.none(), st.integers(-1, 1)), max_size=8),
    st.lists(st.integers(1, 30000), max_size=60),
)
def test_a_body_comes_into_its_place_or_nowhere(
    values: list[tuple[bytes | None, int]], lengths: list[int]
) -> None:
    """Values of the length asked arrive whole; others, nil and errors change no byte, and what follows is
    read from its beginning."""
    raw = b"".join(b"$-1\r\n" if body is None else b"$%d\r\n%b\r\n" % (len(body), body) for body, _ in values)
    connection = torn(raw + b"-ERR end\r\n", lengths, len(values) + 1)
    for body, difference in values:
        size = len(body or b"") + difference
        place = bytearray(b"\xa5" * max(0, size))
        found = connection.reply_into(memoryview(place), SOON)
        assert found == (None if body is None else len(body))
        if body is not None and len(body) == len(place):
            assert place == body
        else:
            assert set(place) <= {0xA5}
    assert connection.reply_into(memoryview(bytearray(5)), SOON) == ErrorReply("ERR end")
    assert connection.is_clean


@given(st.lists(st.sampled_from([":0", ":1", ":1", "-ERR no", ":25"]), max_size=60), st.data())
def test_many_integers_are_what_one_by_one_would_be(lines: list[str], data: st.DataObject) -> None:
    raw = "".join(f"{line}\r\n" for line in lines).encode()
    lengths = data.draw(st.lists(st.integers(1, 50), max_size=100))
    one_by_one = torn(raw, (), len(lines))
    expected = [one_by_one.reply(SOON) for _ in lines]
    connection = torn(raw, lengths, len(lines))
    assert connection.integers(len(lines), SOON) == expected
    assert connection.is_clean


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 400\r\n",
        b"$x\r\n",
        b"$3\r\nabcd\r\n",
        b":1x\r\n",
        b"*1\r\n" * 20,
        b"+" + b"x" * 40000,
        b"\0\r\n",
    ],
)
def test_what_is_no_protocol_is_told_and_the_connection_is_not_clean(raw: bytes) -> None:
    connection = torn(raw)
    with pytest.raises(Garbled):
        connection.reply(SOON)
    assert not connection.is_clean


@pytest.mark.parametrize("raw", [b"+OK\r\n", b":1\r\n", b"*1\r\n$1\r\nx\r\n", b"%0\r\n"])
def test_a_reply_of_another_kind_is_no_value(raw: bytes) -> None:
    connection = torn(raw)
    with pytest.raises(Garbled):
        connection.reply_into(memoryview(bytearray(2)), SOON)
    assert not connection.is_clean


@given(st.integers(0, 30))
def test_a_connection_that_owes_a_reply_is_not_clean(n_bytes: int) -> None:
    """However far the reply has come when it ends."""
    connection = torn(b"$20\r\naaaaaaaaaaaaaaaaaaaa\r\n"[:n_bytes])
    if n_bytes == 27:
        connection.reply(SOON)
    elif n_bytes < 27:
        with pytest.raises(Lost):
            connection.reply(SOON)
        assert not connection.is_clean


def test_bytes_that_nobody_asked_for_make_it_unclean() -> None:
    connection = torn(b"+OK\r\n+OK\r\n")
    assert connection.reply(SOON) == b"OK"
    assert not connection.is_clean


KEYS = st.lists(st.text(st.characters(codec=None), max_size=12), max_size=20)


@given(KEYS | st.lists(st.text("abc01", min_size=4, max_size=4), max_size=20))
def test_keys_are_encoded_alike_together_and_alone(keys: list[str]) -> None:
    alone = b"".join(encode("GET", key) for key in keys)
    assert encode_each("GET", keys) == alone
    assert alone.count(b"*2\r\n$3\r\nGET\r\n") >= len(keys)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_of_the_protocol(server: Server, version: int) -> None:
    """Values, nil, integers, errors, maps: the same from a real server in RESP2 and RESP3."""
    connection = Connection(open_stream(Address.parse(server.address), None, SOON))
    assert isinstance(connection.ask(SOON, "HELLO", version), list)
    assert connection.ask(SOON, "SET", "k", b"\0\r\n") == b"OK"
    connection.send([encode_each("GET", ["k", "nothing"])], 2, SOON)
    place = bytearray(3)
    assert connection.reply_into(memoryview(place), SOON) == 3
    assert place == b"\0\r\n"
    assert connection.reply_into(memoryview(place), SOON) is None
    assert connection.ask(SOON, "HGETALL", "nothing") == []
    assert connection.ask(SOON, "INCR", "k") == ErrorReply("ERR value is not an integer or out of range")
    told = connection.ask(SOON, "INFO", "memory")
    assert isinstance(told, bytes)
    assert told.startswith(b"# Memory")
    assert connection.is_quiet()
    connection.close()


def test_a_deadline_that_has_passed_is_late_at_once(server: Server) -> None:
    stream = open_stream(Address.parse(server.address), None, SOON)
    past = Deadline.after(-1)
    for wait in (
        lambda: stream.send([b"PING\r\n"], past),
        lambda: stream.receive(memoryview(bytearray(10)), past),
        lambda: stream.fill(memoryview(bytearray(10)), past),
        lambda: open_stream(Address.parse(server.address), None, past),
    ):
        with pytest.raises(Late):
            wait()
    stream.close()
