"""What is said on one connection for a part of a batch: commands in a pipeline, replies in their order.

Owns the pace: at most a window of value bytes is asked for or sent before replies are taken, so that neither
the server's buffers nor ours grow with the batch. Each exchange fills in the replies of its places as they
come, so that those that came before trouble count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from storage_backends.base import Item
from storage_backends.redis.connection import MOST_INTEGERS, Connection, Reply, encode_each, key_bytes
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.stream import Chunk

Replies: TypeAlias = "list[Reply | Exception]"
"""By place in the batch; an exception where no reply has come, and why."""
Exchange: TypeAlias = Callable[[Connection, Sequence[int], Replies, Deadline], None]

_ITEM_BYTES = 256
"""What an item counts beside its value, so that windows of empty values end."""
_MOST_SMALL = 2048
"""Commands without a value in one go."""


def reading(items: Sequence[Item], buffer: memoryview, window_bytes: int) -> Exchange:
    """GET each item into its place."""

    def exchange(connection: Connection, places: Sequence[int], replies: Replies, deadline: Deadline) -> None:
        pace = _Pace([items[place].nbytes for place in places], window_bytes)
        for turn, place in enumerate(places):
            asked = pace.next_run(turn)
            if asked:
                keys = [items[places[one]].key for one in asked]
                connection.send([encode_each("GET", keys)], len(keys), deadline)
            item = items[place]
            replies[place] = connection.reply_into(buffer[item.offset : item.offset + item.nbytes], deadline)

    return exchange


def writing(items: Sequence[Item], buffer: memoryview, window_bytes: int, ttl_ms: int) -> Exchange:
    """SET each item from its place, to expire after `ttl_ms` unless that is 0."""
    n_arguments = 5 if ttl_ms else 3
    end = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(ttl_ms)), ttl_ms) if ttl_ms else b"\r\n"

    def exchange(connection: Connection, places: Sequence[int], replies: Replies, deadline: Deadline) -> None:
        pace = _Pace([items[place].nbytes for place in places], window_bytes)
        for turn, place in enumerate(places):
            sent = pace.next_run(turn)
            if sent:
                chunks: list[Chunk] = []
                before = b""
                for one in sent:
                    item = items[places[one]]
                    key = key_bytes(item.key)
                    chunks.append(
                        b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
                        % (before, n_arguments, len(key), key, item.nbytes)
                    )
                    chunks.append(buffer[item.offset : item.offset + item.nbytes])
                    before = end
                connection.send([*chunks, end], len(sent), deadline)
            replies[place] = connection.reply(deadline)

    return exchange


def counting(command: str, keys: Sequence[str]) -> Exchange:
    """EXISTS or UNLINK each key: the replies are 1 or 0."""

    def exchange(connection: Connection, places: Sequence[int], replies: Replies, deadline: Deadline) -> None:
        step = min(_MOST_SMALL, MOST_INTEGERS)
        for start in range(0, len(places), step):
            run = places[start : start + step]
            connection.send([encode_each(command, [keys[place] for place in run])], len(run), deadline)
            for place, reply in zip(run, connection.integers(len(run), deadline), strict=True):
                replies[place] = reply

    return exchange


class _Pace:
    """How many items may be under way: a window of bytes, filled up again when half of it is through; one
    item at least."""

    def __init__(self, sizes_bytes: Sequence[int], window_bytes: int) -> None:
        self._sizes_bytes = sizes_bytes
        self._window_bytes = window_bytes
        self._begun = 0
        self._done = 0
        self._under_way_bytes = 0

    def next_run(self, turn: int) -> range:
        """The items to begin now, before the reply to item `turn` is taken; often none."""
        while self._done < turn:
            self._under_way_bytes -= self._sizes_bytes[self._done] + _ITEM_BYTES
            self._done += 1
        first = self._begun
        if first > turn and 2 * self._under_way_bytes > self._window_bytes:
            return range(first, first)
        while self._begun < len(self._sizes_bytes):
            nbytes = self._sizes_bytes[self._begun] + _ITEM_BYTES
            if self._begun > turn and self._under_way_bytes + nbytes > self._window_bytes:
                break
            self._under_way_bytes += nbytes
            self._begun += 1
        return range(first, self._begun)
