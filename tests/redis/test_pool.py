"""Connections to one server: how many, in which turn, and which come back."""

from __future__ import annotations

import threading

import pytest

from storage_backends.redis.address import Address
from storage_backends.redis.connection import Connection
from storage_backends.redis.deadline import Deadline
from storage_backends.redis.errors import Late, Lost
from storage_backends.redis.pool import ConnectionPool, Pause
from tests.redis.servers import DEADLINE_S, eventually
from tests.redis.test_connection import Torn

SOON = Deadline.after(3600)
ADDRESS = Address("server", 1)


class Counting:
    """Opens connections on which nothing ever comes, and remembers their streams."""

    def __init__(self) -> None:
        self.streams: list[Torn] = []
        self.trouble: Exception | None = None
        self.n_tries = 0

    def __call__(self, address: Address, deadline: Deadline) -> Connection:
        self.n_tries += 1
        if self.trouble is not None:
            raise self.trouble
        self.streams.append(Torn(b"", ()))
        return Connection(self.streams[-1])


def test_a_clean_connection_is_used_again() -> None:
    connect = Counting()
    pool = ConnectionPool(ADDRESS, connect, 2, Pause())
    for _ in range(5):
        with pool.lend(SOON):
            pass
    assert len(connect.streams) == 1
    pool.close()
    assert connect.streams[0].is_closed


def test_one_that_owes_a_reply_is_closed_and_replaced() -> None:
    connect = Counting()
    pool = ConnectionPool(ADDRESS, connect, 1, Pause())
    with pool.lend(SOON) as connection:
        connection.send([b"PING"], 1, SOON)
    with pool.lend(SOON) as other:
        assert other is not connection
    assert [stream.is_closed for stream in connect.streams] == [True, False]


def test_trouble_on_one_forgets_the_idle_ones() -> None:
    connect = Counting()
    pool = ConnectionPool(ADDRESS, connect, 3, Pause())
    with pool.lend(SOON), pool.lend(SOON):
        pass
    with pytest.raises(Lost), pool.lend(SOON):
        raise Lost("reset")
    assert all(stream.is_closed for stream in connect.streams)
    with pool.lend(SOON), pool.lend(SOON), pool.lend(SOON):
        pass
    assert len(connect.streams) == 5


def test_never_more_than_the_size_and_whoever_waits_is_late_at_its_deadline() -> None:
    connect = Counting()
    pool = ConnectionPool(ADDRESS, connect, 2, Pause())
    short = Deadline.after(0.02)
    with pool.lend(SOON), pool.lend(SOON), pytest.raises(Late, match="server:1"), pool.lend(short):
        pass
    assert len(connect.streams) == 2
    with pool.lend(SOON), pool.lend(SOON):
        pass
    assert len(connect.streams) == 2


def test_a_failed_opening_takes_no_place() -> None:
    connect = Counting()
    connect.trouble = Lost("refused")
    pool = ConnectionPool(ADDRESS, connect, 1, Pause())
    for _ in range(3):
        with pytest.raises(Lost), pool.lend(SOON):
            pass
    connect.trouble = None
    with pool.lend(SOON):
        pass
    assert connect.n_tries == 4


def test_whoever_waited_first_is_first() -> None:
    """One that gives back and asks again at once goes behind the one that has waited."""
    pool = ConnectionPool(ADDRESS, Counting(), 1, Pause())
    order: list[str] = []

    def wait() -> None:
        with pool.lend(SOON):
            order.append("waited")

    with pool.lend(SOON):
        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: len(pool._waiting) == 1, "the waiter")
    with pool.lend(SOON):
        order.append("came again")
    waiter.join(DEADLINE_S)
    assert order == ["waited", "came again"]


def test_a_server_that_could_not_be_connected_to_in_time_is_left_alone() -> None:
    connect = Counting()
    connect.trouble = Late("frozen")
    pause = Pause()
    pools = [ConnectionPool(ADDRESS, connect, 1, pause) for _ in range(2)]
    for pool in pools * 3:
        with pytest.raises(Late, match="frozen"), pool.lend(SOON):
            pass
    assert connect.n_tries < 6
    connect.trouble = None
    pause.end()
    with pools[0].lend(SOON):
        pass


def test_a_caller_with_no_time_left_blames_no_server() -> None:
    connect = Counting()
    connect.trouble = Late("no time")
    pool = ConnectionPool(ADDRESS, connect, 1, Pause())
    with pytest.raises(Late), pool.lend(Deadline.after(0)):
        pass
    connect.trouble = None
    with pool.lend(SOON):
        pass


def test_after_closing_there_is_none() -> None:
    connect = Counting()
    pool = ConnectionPool(ADDRESS, connect, 2, Pause())
    with pool.lend(SOON):
        pool.close()
    assert connect.streams[0].is_closed
    with pytest.raises(Lost), pool.lend(SOON):
        pass
