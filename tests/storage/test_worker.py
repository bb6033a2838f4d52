"""The worker process itself: it obeys one daemon, ends with it, and survives everything else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_backends import worker
from storage_backends.base import Item, Outcome, Usage
from storage_backends.faults import Fault, FaultKind, FaultySpec
from storage_backends.messages import (
    LENGTH,
    Answer,
    Close,
    Contains,
    NotOpened,
    Open,
    Opened,
    Probe,
    Probed,
    Read,
    Reply,
    Request,
    WorkerSpec,
    Write,
    body_bytes,
    framed,
    parse_reply,
)
from storage_backends.specs import FileSpec, MemorySpec
from tests.storage.conftest import DEADLINE_S, Gate, Slab, eventually, is_running


class Daemon:
    """The daemon's end, by hand."""

    def __init__(self, slab: Slab) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE_S)
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "storage_backends.worker",
                    f"--socket-fd={theirs.fileno()}",
                    f"--slab-fd={slab.fd}",
                    f"--parent-pid={os.getpid()}",
                ],
                pass_fds=(theirs.fileno(), slab.fd),
            )

    def say(self, message: Request) -> None:
        self.socket.sendall(framed(message))

    def hear(self) -> Reply:
        return parse_reply(self._exactly(body_bytes(self._exactly(LENGTH.size))))

    def _exactly(self, nbytes: int) -> bytes:
        received = self.socket.recv(nbytes, socket.MSG_WAITALL)
        assert len(received) == nbytes, "the worker has hung up"
        return received

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def daemon(slab: Slab) -> Iterator[Daemon]:
    daemon = Daemon(slab)
    yield daemon
    daemon.socket.close()
    daemon.process.kill()
    daemon.process.wait()


@pytest.fixture
def serving(daemon: Daemon, slab: Slab) -> Callable[[WorkerSpec], Daemon]:
    def start(spec: WorkerSpec) -> Daemon:
        daemon.say(Open(spec, slab.nbytes, 1))
        assert daemon.hear() == Opened()
        return daemon

    return start


def later() -> float:
    return time.monotonic() + DEADLINE_S


def test_it_answers_and_closes(serving: Callable[[WorkerSpec], Daemon], slab: Slab) -> None:
    daemon = serving(MemorySpec(capacity_bytes=1 << 20))
    daemon.say(Write(1, later(), slab.fill("a", "b")))
    assert daemon.hear() == Answer(1, [Outcome.OK, Outcome.OK])
    daemon.say(Read(2, later(), slab.places("b", "x", "a")))
    assert daemon.hear() == Answer(2, [Outcome.OK, Outcome.ABSENT, Outcome.OK])
    assert slab.holds([slab.places("b", "x", "a")[0], slab.places("b", "x", "a")[2]])
    daemon.say(Probe(3, later()))
    assert daemon.hear() == Probed(3, Usage(2, 8192, 1 << 20))
    daemon.say(Close())
    assert daemon.ends() == 0


def test_replies_come_as_they_are_ready_not_in_the_order_asked(
    serving: Callable[[WorkerSpec], Daemon], slab: Slab, gate: Gate
) -> None:
    frozen = Fault(kind=FaultKind.FREEZE, on=frozenset({"write"}))
    gate.close()
    daemon = serving(FaultySpec(inner=MemorySpec(), faults=(frozen,), gate=str(gate.path)))
    daemon.say(Write(1, later(), slab.fill("a")))
    daemon.say(Contains(2, later(), ["a"]))
    assert daemon.hear() == Answer(2, [Outcome.ABSENT])
    gate.open()
    assert daemon.hear() == Answer(1, [Outcome.OK])


def test_what_has_not_begun_by_its_deadline_never_begins(
    serving: Callable[[WorkerSpec], Daemon], slab: Slab
) -> None:
    daemon = serving(MemorySpec())
    daemon.say(Write(1, time.monotonic() - 0.001, slab.fill("a", "b")))
    reply = daemon.hear()
    assert isinstance(reply, Answer)
    assert (reply.outcomes, reply.problem[:8]) == ([Outcome.FAILED] * 2, "too busy")
    daemon.say(Contains(2, later(), ["a", "b"]))
    assert daemon.hear() == Answer(2, [Outcome.ABSENT] * 2)


@pytest.mark.parametrize("kind", [FaultKind.BREAK, FaultKind.REFUSE])
def test_a_mistake_in_the_backend_is_an_answer_and_the_worker_lives(
    serving: Callable[[WorkerSpec], Daemon], slab: Slab, kind: FaultKind
) -> None:
    """L3-11: whatever a batch call does, its thread goes on."""
    fault = Fault(kind=kind, on=frozenset({"read", "ping"}), times=2)
    daemon = serving(FaultySpec(inner=MemorySpec(), faults=(fault,)))
    daemon.say(Read(1, later(), slab.places("a", "b")))
    reply = daemon.hear()
    assert isinstance(reply, Answer)
    assert reply.outcomes == [Outcome.FAILED] * 2
    assert "injected: read" in reply.problem
    daemon.say(Probe(2, later()))
    probed = daemon.hear()
    assert isinstance(probed, Probed)
    assert probed.usage is None
    assert "injected: ping" in probed.problem
    daemon.say(Read(3, later(), slab.places("a")))
    assert daemon.hear() == Answer(3, [Outcome.ABSENT])


@pytest.mark.parametrize(
    "answers", [[], [Outcome.OK] * 4, [Outcome.OK] * 6, [Outcome.OK, None, *[Outcome.OK] * 3]]
)
def test_a_batch_answer_with_a_missing_element_is_a_mistake_not_an_answer(answers: list[Outcome]) -> None:
    """L3-11: five items, and not five outcomes."""
    with pytest.raises(RuntimeError, match="for 5 items"):
        worker._checked(answers, 5)


def test_a_range_outside_the_slab_is_failed(serving: Callable[[WorkerSpec], Daemon], slab: Slab) -> None:
    daemon = serving(MemorySpec())
    daemon.say(Write(1, later(), [Item("a", slab.nbytes - 1, 2), *slab.fill("b")]))
    assert daemon.hear() == Answer(1, [Outcome.FAILED, Outcome.OK])


def test_a_backend_that_cannot_be_opened_says_why(daemon: Daemon, slab: Slab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    daemon.say(Open(FileSpec(path=str(tmp_path / "file")), slab.nbytes, 1))
    reply = daemon.hear()
    assert isinstance(reply, NotOpened)
    assert str(tmp_path / "file") in reply.problem
    assert daemon.ends() == 1


@pytest.mark.parametrize("slab_bytes", [0, -1, (8 << 20) + 1])
def test_a_slab_of_another_size_is_refused(daemon: Daemon, slab_bytes: int) -> None:
    daemon.say(Open(MemorySpec(), slab_bytes, 1))
    reply = daemon.hear()
    assert isinstance(reply, NotOpened)
    assert "host slab" in reply.problem
    assert daemon.ends() == 1


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff\xff\xff\xff", LENGTH.pack(3) + b"abc", framed(Close()), framed(Contains(1, 0.0, ["a"]))],
    ids=["too long", "no message", "close first", "ask first"],
)
def test_a_daemon_that_speaks_nonsense_is_left(daemon: Daemon, nonsense: bytes) -> None:
    daemon.socket.sendall(nonsense)
    assert daemon.ends() == 2


def test_it_ends_when_the_socket_closes(serving: Callable[[WorkerSpec], Daemon]) -> None:
    daemon = serving(MemorySpec())
    daemon.socket.close()
    assert daemon.ends() == 2


def test_it_ends_when_the_socket_closes_while_an_operation_is_frozen(
    serving: Callable[[WorkerSpec], Daemon], slab: Slab, gate: Gate
) -> None:
    gate.close()
    frozen = Fault(kind=FaultKind.FREEZE, on=frozenset({"read"}))
    daemon = serving(FaultySpec(inner=MemorySpec(), faults=(frozen,), gate=str(gate.path)))
    daemon.say(Read(1, later(), slab.places("a")))
    asyncio.run(eventually(gate.n_held))
    daemon.socket.close()
    assert daemon.ends() == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_not_for_it(
    serving: Callable[[WorkerSpec], Daemon], number: signal.Signals
) -> None:
    """LIFE-05: service managers signal all processes; the daemon still needs its worker to drain."""
    daemon = serving(MemorySpec())
    daemon.process.send_signal(number)
    daemon.say(Contains(1, later(), ["a"]))
    assert daemon.hear() == Answer(1, [Outcome.ABSENT])


PARENT = """
import asyncio, os, sys
from controller.storage import StorageTier
from storage_backends.specs import MemorySpec

async def main():
    fd = os.memfd_create("slab")
    os.ftruncate(fd, 1 << 20)
    tier = StorageTier("test", MemorySpec(), fd, 1 << 20)
    await tier.start(strict=True)
    print(tier.worker_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "stopped"])
def test_it_does_not_outlive_a_daemon_that_is_killed(frozen: bool) -> None:
    """L3-06: kill -9 of the daemon leaves no worker behind, not even one that is stopped itself."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if frozen:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    asyncio.run(eventually(lambda: not is_running(pid)))
