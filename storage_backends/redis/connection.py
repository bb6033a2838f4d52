"""One connection that speaks the Redis protocol (RESP2 and RESP3): commands out, replies in.

Owns the parsing, and the count of replies still to come. A connection that owes a reply, or was in the
middle of one, is never used again: whoever lends it out asks `is_clean` and closes it otherwise, so that no
late reply can be taken for the next one's. Bodies go straight to their place. Never retries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import ErrorReply, Garbled
from storage_backends.redis.stream import Chunk, Stream

Reply: TypeAlias = "int | float | bytes | None | ErrorReply | list[Reply]"

_AHEAD_BYTES = 64 << 10
_LARGE_BYTES = 16 << 10
"""From here on a body is received where it belongs, and reads before it take only a few bytes of it."""
_PEEK_BYTES = 64
_MOST_LINE_BYTES = 32 << 10
_MOST_DEPTH = 8
_NUMBER_BYTES = 4
"""Length of `:1` and its line end."""
MOST_INTEGERS = _AHEAD_BYTES // _NUMBER_BYTES


class Connection:
    """Not for two threads at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._owed = 0
        self._ahead = bytearray(_AHEAD_BYTES)
        """Received and not yet parsed: `_start` to `_stop`."""
        self._view = memoryview(self._ahead)
        self._start = self._stop = 0

    @property
    def is_clean(self) -> bool:
        """Whether every reply has come, whole, and nothing else has."""
        return self._owed == 0 and self._start == self._stop

    def is_quiet(self) -> bool:
        """Whether an idle connection is still good: open, and nothing came unasked."""
        return self.is_clean and self._stream.is_quiet()

    def close(self) -> None:
        self._owed = 1
        self._stream.close()

    def send(self, chunks: Sequence[Chunk], n_replies: int, deadline: Deadline) -> None:
        """Commands that `n_replies` replies will answer."""
        self._owed += n_replies
        self._stream.send(chunks, deadline)

    def ask(self, deadline: Deadline, *command: bytes | str | int) -> Reply:
        """One command and its reply."""
        self.send([encode(*command)], 1, deadline)
        return self.reply(deadline)

    def reply(self, deadline: Deadline) -> Reply:
        """The next reply, bodies as bytes."""
        value = self._value(deadline, 0)
        self._owed -= 1
        return value

    def reply_into(self, place: memoryview, deadline: Deadline) -> int | None | ErrorReply:
        """The next reply, its body into `place` when it is exactly as long; else the body is thrown away.
        How long the body was, None for nil, or the error."""
        peek_bytes = _PEEK_BYTES if len(place) >= _LARGE_BYTES else _AHEAD_BYTES
        kind, rest = self._line(deadline, peek_bytes)
        result: int | None | ErrorReply
        if kind == _BULK:
            result = _integer(rest)
            if result < 0:
                result = None
            else:
                if result == len(place):
                    self._body(place, deadline)
                else:
                    self._skip(result, deadline)
                self._end_of_line(deadline, peek_bytes)
        elif kind == _NIL:
            result = None
        elif kind == _ERROR:
            result = ErrorReply(rest.decode("utf-8", "replace"))
        else:
            raise Garbled(f"a reply of type {chr(kind)!r} where a value was asked")
        self._owed -= 1
        return result

    def integers(self, n: int, deadline: Deadline) -> list[Reply]:
        """The next `n` replies, at most MOST_INTEGERS, which are likely 0 or 1 each."""
        nbytes = n * _NUMBER_BYTES  # no reply is shorter
        while self._stop - self._start < nbytes:
            self._receive(deadline, _AHEAD_BYTES)
        rows = np.frombuffer(self._ahead, dtype=np.uint8, count=nbytes, offset=self._start).reshape(n, 4)
        digits = rows[:, 1] - ord("0")
        frame = rows[:, ::2] == np.frombuffer(b":\r", np.uint8)
        if frame.all() and (rows[:, 3] == ord("\n")).all() and (digits <= 1).all():
            values: list[Reply] = digits.tolist()
            self._start += nbytes
            self._owed -= n
            return values
        return [self.reply(deadline) for _ in range(n)]

    # parsing

    def _value(self, deadline: Deadline, depth: int) -> Reply:
        if depth > _MOST_DEPTH:
            raise Garbled("a reply nested too deep")
        kind, rest = self._line(deadline, _AHEAD_BYTES)
        while kind == _PUSH:  # told unasked, which is no reply
            self._values(_integer(rest), deadline, depth)
            kind, rest = self._line(deadline, _AHEAD_BYTES)
        simple = _SIMPLE.get(kind)
        return simple(rest) if simple else self._compound(kind, _integer(rest), deadline, depth)

    def _compound(self, kind: int, n: int, deadline: Deadline, depth: int) -> Reply:
        if kind in (_BULK, _VERBATIM, _BULK_ERROR):
            if n < 0:
                return None
            body = self._bytes(n, deadline)
            if kind == _BULK_ERROR:
                return ErrorReply(body.decode("utf-8", "replace"))
            return body[4:] if kind == _VERBATIM else body
        if kind in (_ARRAY, _SET):
            return None if n < 0 else self._values(n, deadline, depth)
        if kind == _MAP:
            return self._values(2 * n, deadline, depth)
        raise Garbled(f"a reply of unknown type {chr(kind)!r}")

    def _values(self, n: int, deadline: Deadline, depth: int) -> list[Reply]:
        return [self._value(deadline, depth + 1) for _ in range(n)]

    def _bytes(self, n: int, deadline: Deadline) -> bytes:
        if n > _MOST_VALUE_BYTES:
            raise Garbled(f"a body of {n} bytes where none is expected")
        body = bytearray(n)
        self._body(memoryview(body), deadline)
        self._end_of_line(deadline, _AHEAD_BYTES)
        return bytes(body)

    def _line(self, deadline: Deadline, peek_bytes: int) -> tuple[int, bytes]:
        """Type and rest of the next line."""
        while (end := self._ahead.find(b"\r\n", self._start, self._stop)) < 0:
            if self._stop - self._start > _MOST_LINE_BYTES:
                raise Garbled("a line without an end")
            self._receive(deadline, peek_bytes)
        kind, rest = self._ahead[self._start], bytes(self._view[self._start + 1 : end])
        self._start = end + 2
        return kind, rest

    def _end_of_line(self, deadline: Deadline, peek_bytes: int) -> None:
        while self._stop - self._start < 2:
            self._receive(deadline, peek_bytes)
        if self._ahead[self._start : self._start + 2] != b"\r\n":
            raise Garbled("a body without its end")
        self._start += 2

    def _body(self, place: memoryview, deadline: Deadline) -> None:
        n = min(len(place), self._stop - self._start)
        place[:n] = self._view[self._start : self._start + n]
        self._start += n
        rest = place[n:]
        while len(rest) and len(rest) < _LARGE_BYTES:
            self._receive(deadline, _AHEAD_BYTES)
            n = min(len(rest), self._stop - self._start)
            rest[:n] = self._view[self._start : self._start + n]
            self._start += n
            rest = rest[n:]
        if len(rest):
            self._stream.fill(rest, deadline)

    def _skip(self, n: int, deadline: Deadline) -> None:
        while n > 0:
            if self._start == self._stop:
                self._receive(deadline, _AHEAD_BYTES)
            skipped = min(n, self._stop - self._start)
            self._start += skipped
            n -= skipped

    def _receive(self, deadline: Deadline, peek_bytes: int) -> None:
        """More bytes, at most `peek_bytes`, behind what is there."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == _AHEAD_BYTES:
            left = self._stop - self._start
            self._view[:left] = bytes(self._view[self._start : self._stop])
            self._start, self._stop = 0, left
        place = self._view[self._stop : self._stop + peek_bytes]
        self._stop += self._stream.receive(place, deadline)


_BULK, _ERROR, _STATUS, _NUMBER, _ARRAY = b"$-+:*"
_NIL, _BOOLEAN, _DOUBLE, _BIG_NUMBER, _BULK_ERROR, _VERBATIM, _MAP, _SET, _PUSH = b"_#,(!=%~>"
_MOST_VALUE_BYTES = 64 << 20


def _integer(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError as error:
        raise Garbled(f"{digits[:20]!r} where a number belongs") from error


def _double(digits: bytes) -> float:
    try:
        return float(digits)
    except ValueError as error:
        raise Garbled(f"{digits[:20]!r} where a number belongs") from error


_SIMPLE: Mapping[int, Callable[[bytes], Reply]] = {
    _STATUS: lambda rest: rest,
    _NUMBER: _integer,
    _BIG_NUMBER: _integer,
    _ERROR: lambda rest: ErrorReply(rest.decode("utf-8", "replace")),
    _NIL: lambda rest: None,
    _BOOLEAN: lambda rest: int(rest == b"t"),
    _DOUBLE: _double,
}


def encode(*command: bytes | str | int) -> bytes:
    """One command as the protocol has it; text as UTF-8."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        raw = argument if isinstance(argument, bytes) else key_bytes(str(argument))
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def encode_each(command: str, keys: Sequence[str]) -> bytes:
    """`command key` for each key. Keys of one length, as ours are, are encoded all at once."""
    head = f"*2\r\n${len(command)}\r\n{command}\r\n"
    lengths = set(map(len, keys))
    if len(lengths) == 1:
        head = f"{head}${lengths.pop()}\r\n"
        text = head + f"\r\n{head}".join(keys) + "\r\n"
        if text.isascii():
            return text.encode("ascii")
    return b"".join([encode(command, key) for key in keys])


def key_bytes(key: str) -> bytes:
    """Any text is a key, lone surrogates included."""
    return key.encode("utf-8", "surrogatepass")
