"""RedisBackend: frames as string values of a Redis or Valkey, one key each.

Decides which outcome a reply is, and what health says of the servers. Keeps no copy of a frame, knows no
second key beside a frame's own, and never deletes what it was not told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage_backends.base import Item, Outcome, StorageBackend, StorageError, Usage
from storage_backends.redis.address import Address
from storage_backends.redis.connection import Connection, Reply, encode
from storage_backends.redis.connector import Connector
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.embedded import EmbeddedServer
from storage_backends.redis.errors import ErrorReply, Late, Lost, RedisTrouble
from storage_backends.redis.exchanges import Exchange, Replies, counting, reading, writing
from storage_backends.redis.pool import Node
from storage_backends.redis.rounds import NOT_TRIED, Batch
from storage_backends.redis.routes import ClusterSlots, OneServer, Routes, SentinelPrimary
from storage_backends.specs import RedisSpec

_MOST_VALUE_BYTES = 512 << 20
"""proto-max-bulk-len: a server ends the connection on which a longer value comes."""
_TCP_WINDOW_BYTES, _UNIX_WINDOW_BYTES = 1 << 20, 3 << 20
_PARALLEL_SERVERS = 32


class RedisBackend(StorageBackend):
    """One Redis or Valkey storage. Needs no library: only the protocol."""

    def __init__(self, spec: RedisSpec) -> None:
        """Raises StorageError with the remedy when the server cannot be used."""
        self._spec = spec
        self._buffer = memoryview(b"")
        unix = spec.embedded or spec.addresses[0].startswith("unix:")
        self._read_window_bytes = spec.read_window_bytes or (
            _UNIX_WINDOW_BYTES if unix else _TCP_WINDOW_BYTES
        )
        self._server = EmbeddedServer(spec.capacity_bytes) if spec.embedded else None
        self._routes = _routes(spec, self._server)
        self._groups = ThreadPoolExecutor(_PARALLEL_SERVERS, "redis-servers")
        """Only for batches that go to several servers."""
        self._refused_bytes = 0
        """Size of what the last write found no room for; 0 when it found room."""
        try:
            self.ping()
        except StorageError:
            self.close()
            raise

    def register(self, buffer: memoryview) -> None:
        self._buffer = buffer.cast("B")

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        return _outcomes(self._carried_out(keys, range(len(keys)), counting("EXISTS", keys)), _counted)

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return _outcomes(self._carried_out(keys, range(len(keys)), counting("UNLINK", keys)), _counted)

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        exchange = reading(items, self._buffer, self._read_window_bytes)
        replies = self._carried_out(*self._placed(items), exchange, bulk=True)
        return [_fetched(reply, item.nbytes) for item, reply in zip(items, _told(replies), strict=True)]

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        window_bytes, ttl_ms = self._spec.write_window_bytes, round(self._spec.ttl_s * 1000)
        exchange = writing(items, self._buffer, window_bytes, ttl_ms)
        outcomes = _outcomes(self._carried_out(*self._placed(items), exchange, bulk=True), _stored)
        sizes = [
            item.nbytes for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.FULL
        ]
        if sizes or Outcome.OK in outcomes:
            self._refused_bytes = max(sizes, default=0)
        return outcomes

    def usage(self) -> Usage:
        """As the servers count: bytes include what they need beside the values."""
        found = [_memory(*replies) for replies in self._asked_everywhere(("DBSIZE",), ("INFO", "memory"))]
        return Usage(
            sum(memory.n_objects for memory in found),
            sum(memory.used_bytes for memory in found),
            sum(memory.capacity_bytes for memory in found) if all(m.capacity_bytes for m in found) else 0,
        )

    def ping(self) -> None:
        self._asked_everywhere(("PING",))
        if self._refused_bytes:
            self._check_room()

    def close(self) -> None:
        self._groups.shutdown()
        self._routes.close()
        if self._server is not None:
            self._server.close()
        self._buffer = memoryview(b"")

    # batches

    def _placed(self, items: Sequence[Item]) -> tuple[list[str], list[int]]:
        """Keys, and the places of those items that lie in the buffer and that a server would take."""
        buffer_bytes = len(self._buffer)
        return [item.key for item in items], [
            place
            for place, item in enumerate(items)
            if item.lies_in(buffer_bytes) and item.nbytes <= _MOST_VALUE_BYTES
        ]

    def _carried_out(
        self, keys: Sequence[str], places: Sequence[int], exchange: Exchange, *, bulk: bool = False
    ) -> Replies:
        """A reply, or why there is none, for each key; NOT_TRIED where its place is not among `places`."""
        batch = Batch(keys, exchange, Deadline.after(self._spec.op_timeout_s), bulk)
        return batch.carry_out(places, self._routes, self._groups)

    # the servers themselves

    def _asked_everywhere(self, *commands: tuple[str, ...]) -> list[list[Reply]]:
        """The replies of every primary. Raises StorageError when one does not answer, or with an error."""
        deadline = Deadline.after(self._spec.op_timeout_s)

        def ask(node: Node) -> list[Reply]:
            with node.small.lend(deadline) as connection:
                return _all_replies(connection, commands, deadline)

        def asked(node: Node) -> list[Reply]:
            try:
                return ask(node)
            except Lost:
                return ask(node)

        try:
            try:
                nodes = self._routes.primaries(deadline)
                found = list(self._groups.map(asked, nodes)) if len(nodes) > 1 else [asked(nodes[0])]
            except (Lost, Late):
                self._routes.mark_stale()
                raise
        except RedisTrouble as trouble:
            raise StorageError(f"Redis at {trouble}") from trouble
        for replies in found:
            for reply in replies:
                if isinstance(reply, ErrorReply):
                    raise StorageError(f"Redis: {reply.explained()}")
        return found

    def _check_room(self) -> None:
        """Raises StorageError while a server has no room: it refuses writes, reads go on."""
        for replies in self._asked_everywhere(("DBSIZE",), ("INFO", "memory")):
            memory = _memory(*replies)
            if memory.room_bytes < 2 * self._refused_bytes:  # as sent, and as stored
                raise StorageError(
                    f"Redis is full: {memory.total_bytes} of {memory.capacity_bytes} bytes (maxmemory) are "
                    f"used and policy {memory.policy} evicts nothing. Reads go on, writes are refused. Raise "
                    "maxmemory, set maxmemory-policy allkeys-lru, or set `ttl_s` with a volatile policy"
                )
        self._refused_bytes = 0


# ---- what replies mean --------------------------------------------------------------------------------


def _outcomes(replies: Replies, outcome_of: Callable[[Reply | Exception], Outcome]) -> list[Outcome]:
    return [outcome_of(reply) for reply in _told(replies)]


def _told(replies: Replies) -> Replies:
    """The same. Raises StorageError when not one of them tells anything but the same trouble."""
    asked = [reply for reply in replies if reply is not NOT_TRIED]
    if asked and all(map(_is_trouble, asked)):
        raise StorageError(f"Redis: {_explained(asked[0])}")
    return replies


def _is_trouble(reply: Reply | Exception) -> bool:
    if isinstance(reply, ErrorReply):
        return reply.code not in ("OOM", "WRONGTYPE")
    return isinstance(reply, Exception)


def _explained(reply: Reply | Exception) -> str:
    return reply.explained() if isinstance(reply, ErrorReply) else str(reply)


def _counted(reply: Reply | Exception) -> Outcome:
    if isinstance(reply, int):
        return Outcome.OK if reply else Outcome.ABSENT
    return Outcome.FAILED


def _stored(reply: Reply | Exception) -> Outcome:
    if reply == b"OK":
        return Outcome.OK
    return Outcome.FULL if isinstance(reply, ErrorReply) and reply.code == "OOM" else Outcome.FAILED


def _fetched(reply: Reply | Exception, nbytes: int) -> Outcome:
    if isinstance(reply, int):
        return Outcome.OK if reply == nbytes else Outcome.WRONG_SIZE
    if reply is None:
        return Outcome.ABSENT
    if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
        return Outcome.WRONG_SIZE  # somebody's list or hash under our key
    return Outcome.FAILED


@dataclass(frozen=True, slots=True)
class _Memory:
    n_objects: int
    used_bytes: int
    """For keys and values."""
    total_bytes: int
    """What maxmemory bounds."""
    capacity_bytes: int
    """maxmemory; 0 when there is none."""
    policy: str

    @property
    def room_bytes(self) -> float:
        return self.capacity_bytes - self.total_bytes if self.capacity_bytes else float("inf")


def _memory(n_objects: Reply, told: Reply) -> _Memory:
    text = told.decode("utf-8", "replace") if isinstance(told, bytes) else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return _Memory(
            n_objects=n_objects if isinstance(n_objects, int) else 0,
            used_bytes=int(fields["used_memory_dataset"]),
            total_bytes=int(fields["used_memory"]),
            capacity_bytes=int(fields["maxmemory"]),
            policy=fields["maxmemory_policy"],
        )
    except (KeyError, ValueError) as error:
        raise StorageError(f"Redis tells its memory in words we do not know: {error}") from error


def _all_replies(
    connection: Connection, commands: Sequence[tuple[str, ...]], deadline: Deadline
) -> list[Reply]:
    connection.send([b"".join(encode(*command) for command in commands)], len(commands), deadline)
    return [connection.reply(deadline) for _ in commands]


def _routes(spec: RedisSpec, server: EmbeddedServer | None) -> Routes:
    connector = Connector(spec)
    addresses = [Address.parse(text) for text in spec.addresses]
    if server is not None:
        return OneServer(connector, spec.connections, server.address)
    match spec.mode:
        case "single":
            return OneServer(connector, spec.connections, addresses[0])
        case "sentinel":
            return SentinelPrimary(connector, spec.connections, addresses, spec.sentinel_service)
        case "cluster":
            return ClusterSlots(connector, spec.connections, addresses)
