"""The fd socket: descriptors arrive under tickets, are claimed once, expire, and never leak."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from controller.daemon.handoff import MAX_CONNECTIONS, Handoff
from tests.daemon.rig import WAIT_S, memory_file, offer, regions_open, until


@pytest.fixture
async def handoff(short_path: str):
    one = Handoff(f"{short_path}/s.fds", ticket_life_s=WAIT_S, max_waiting=4)
    one.start()
    yield one
    one.close()
    assert regions_open() == 0


async def offered(handoff: Handoff, ticket: bytes, n_fds: int = 1) -> bytes:
    fds = [memory_file() for _ in range(n_fds)]
    try:
        return await asyncio.to_thread(offer, handoff._path.removesuffix(".fds"), ticket, fds)
    finally:
        for fd in fds:
            os.close(fd)


async def test_a_descriptor_is_really_handed_over(handoff: Handoff, short_path: str) -> None:
    """What one side writes through its descriptor, the other reads through the claimed one."""
    fd = memory_file()
    assert await asyncio.to_thread(offer, f"{short_path}/s", b"t" * 16, [fd]) == b"1"
    claimed = handoff.claim(b"t" * 16)
    assert claimed is not None
    os.pwrite(fd, b"same memory", 100)
    assert os.pread(claimed, 11, 100) == b"same memory"
    assert not os.get_inheritable(claimed)
    os.close(fd)
    os.close(claimed)


async def test_a_ticket_is_claimed_once(handoff: Handoff) -> None:
    assert await offered(handoff, b"t" * 16) == b"1"
    claimed = handoff.claim(b"t" * 16)
    assert claimed is not None
    os.close(claimed)
    assert handoff.claim(b"t" * 16) is None
    assert handoff.claim(b"u" * 16) is None


async def test_several_descriptors_on_one_connection(handoff: Handoff) -> None:
    def client() -> list[bytes]:
        answers = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(handoff._path)
            for i in range(3):
                fd = memory_file()
                socket.send_fds(connection, [bytes([i]) * 7], [fd])
                connection.sendall(bytes([i]) * 9)  # a ticket may come in pieces
                os.close(fd)
                answers.append(connection.recv(1))
        return answers

    assert await asyncio.to_thread(client) == [b"1"] * 3
    assert handoff.n_waiting == 3


async def test_an_unclaimed_descriptor_expires(short_path: str) -> None:
    one = Handoff(f"{short_path}/s.fds", ticket_life_s=0.05)
    one.start()
    assert await offered(one, b"t" * 16) == b"1"
    await until(lambda: one.expired == 1, "the ticket expires")
    assert one.claim(b"t" * 16) is None
    assert regions_open() == 0
    one.close()


@pytest.mark.parametrize("n_fds", [0, 2, 4, 9])
async def test_anything_but_one_descriptor_is_refused(handoff: Handoff, n_fds: int) -> None:
    assert await offered(handoff, b"t" * 16, n_fds) in (b"0", b"")
    await until(lambda: handoff.n_connections == 0, "the connection is closed")
    assert (handoff.n_waiting, handoff.refused) == (0, 1)


async def test_a_ticket_in_use_is_refused(handoff: Handoff) -> None:
    assert await offered(handoff, b"t" * 16) == b"1"
    assert await offered(handoff, b"t" * 16) == b"0"
    assert handoff.n_waiting == 1


async def test_the_number_of_unclaimed_descriptors_is_bounded(handoff: Handoff) -> None:
    answers = [await offered(handoff, bytes([i]) * 16) for i in range(6)]
    assert answers == [b"1"] * 4 + [b"0"] * 2


async def test_a_client_that_stops_in_the_middle_leaves_nothing(handoff: Handoff) -> None:
    def client() -> None:
        fd = memory_file()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(handoff._path)
            socket.send_fds(connection, [b"half"], [fd])
        os.close(fd)

    await asyncio.to_thread(client)
    await until(lambda: handoff.n_connections == 0 and regions_open() == 0, "the descriptor is closed")
    assert handoff.n_waiting == 0


async def test_silent_connections_are_bounded_and_end(short_path: str) -> None:
    one = Handoff(f"{short_path}/s.fds", ticket_life_s=0.3)
    one.start()
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(MAX_CONNECTIONS + 1)]
    for client in clients[:-1]:
        client.connect(one._path)
    await until(lambda: one.n_connections == MAX_CONNECTIONS, "all are accepted")
    clients[-1].connect(one._path)
    await until(lambda: one.refused == 1, "one more is refused")
    await until(lambda: one.n_connections == 0, "silence ends them")
    for client in clients:
        client.close()
    one.close()


async def test_without_descriptors_to_spare_it_pauses_and_goes_on(
    handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepting fails for want of descriptors: no spinning, and the client is served when there are some."""
    tries = []

    class Exhausted:
        def accept(self) -> None:
            tries.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

    listener = handoff._listener
    assert listener is not None
    monkeypatch.setattr(handoff, "_listener", Exhausted())
    offering = asyncio.create_task(offered(handoff, b"t" * 16))
    await until(lambda: tries, "accepting has failed")
    monkeypatch.undo()
    assert await offering == b"1"
    assert len(tries) == 1


async def test_another_uid_is_refused(short_path: str) -> None:
    one = Handoff(f"{short_path}/s.fds", allowed_uids=frozenset({os.geteuid() + 1}))
    one.start()
    assert await offered(one, b"t" * 16) == b""
    assert (one.n_waiting, one.refused) == (0, 1)
    one.close()


async def test_closing_closes_what_waits_and_removes_the_socket(short_path: str) -> None:
    one = Handoff(f"{short_path}/s.fds")
    one.start()
    assert os.stat(f"{short_path}/s.fds").st_mode & 0o777 == 0o600
    assert await offered(one, b"t" * 16) == b"1"
    one.close()
    assert regions_open() == 0
    assert not os.path.exists(f"{short_path}/s.fds")
