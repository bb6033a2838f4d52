"""A storage worker: the process that one backend runs in (`python -m storage_backends.worker`).

Owns the backend, the threads that call it and its view of the daemon's slab. Never retries, never judges
bytes, never outlives the daemon: it ends when its socket closes, and the kernel ends it with its parent.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from storage_backends.base import Outcome, StorageBackend, StorageError
from storage_backends.faults import FaultyBackend, FaultySpec
from storage_backends.messages import (
    LENGTH,
    Answer,
    BadMessage,
    Close,
    Contains,
    Delete,
    NotOpened,
    Open,
    Opened,
    Operation,
    Probe,
    Probed,
    Read,
    Reply,
    WorkerSpec,
    Write,
    body_bytes,
    framed,
    parse_request,
)
from storage_backends.specs import open_backend

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main() -> int:
    """Serve one daemon. Returns the exit status: 0 after Close, 1 when the backend cannot be opened."""
    arguments = argparse.ArgumentParser(description="A storage worker; started by the daemon only.")
    arguments.add_argument("--socket-fd", type=int, required=True)
    arguments.add_argument("--slab-fd", type=int, required=True)
    arguments.add_argument("--parent-pid", type=int, required=True)
    given = arguments.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the daemon, which closes us once it has drained
    _end_with_parent(given.parent_pid)
    _keep_freed_memory()
    link = Link(socket.socket(fileno=given.socket_fd))
    try:
        return _serve(link, given.slab_fd)
    except (EOFError, OSError, BadMessage) as error:
        # The daemon is gone or mad. Operations may still run; publication is atomic, so they need no end.
        if not isinstance(error, EOFError):
            print(f"storage worker {os.getpid()}: {error}", file=sys.stderr, flush=True)
        os._exit(2)


def _serve(link: Link, slab_fd: int) -> int:
    first = link.receive()
    if not isinstance(first, Open):
        raise BadMessage(f"{type(first).__name__} before Open")
    try:
        slab = _map_slab(slab_fd, first.slab_bytes)
        backend = _open(first.spec)
    except StorageError as error:
        link.send(NotOpened(str(error)))
        return 1
    backend.register(memoryview(slab))
    threading.Thread(target=_touch, args=(slab,), daemon=True, name="touch-slab").start()
    link.send(Opened())
    Desk(link, backend, first.threads).serve()
    backend.close()
    return 0


class Link:
    """The socket to the daemon: one thread receives, any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def receive(self) -> Open | Operation | Close:
        """The next message. Raises EOFError when the daemon has closed, BadMessage."""
        return parse_request(self._exactly(body_bytes(self._exactly(LENGTH.size))))

    def send(self, reply: Reply) -> None:
        with self._sending:
            self._connection.sendall(framed(reply))

    def _exactly(self, nbytes: int) -> bytes:
        received = bytearray(nbytes)
        view, done = memoryview(received), 0
        while done < nbytes:
            n = self._connection.recv_into(view[done:])
            if n == 0:
                raise EOFError
            done += n
        return bytes(received)


class Desk:
    """Takes operations from the link and has threads carry them out; writes never hold up reads."""

    def __init__(self, link: Link, backend: StorageBackend, threads: int) -> None:
        self._link = link
        self._backend = backend
        self._readers = ThreadPoolExecutor(threads, "storage-read")
        self._writers = ThreadPoolExecutor(threads, "storage-write")

    def serve(self) -> None:
        """Until Close, and until the last operation has ended. Raises what Link.receive raises."""
        while not isinstance(message := self._link.receive(), Close):
            if isinstance(message, Open):
                raise BadMessage("a second Open")
            pool = self._writers if isinstance(message, Write | Delete) else self._readers
            pool.submit(self._carry_out, message)
        self._readers.shutdown()
        self._writers.shutdown()

    def _carry_out(self, operation: Operation) -> None:
        try:
            reply = self._answer(operation)
        except StorageError as error:
            reply = _failure(operation, str(error))
        except Exception as error:  # noqa: BLE001 - last line of defence: answered, counted, shown in health
            reply = _failure(operation, f"mistake in the backend: {error!r}")
        try:
            self._link.send(reply)
        except OSError:
            os._exit(2)  # the daemon is gone

    def _answer(self, operation: Operation) -> Answer | Probed:
        if time.monotonic() >= operation.deadline_s:
            return _failure(operation, "too busy: an operation waited past its deadline and was dropped")
        match operation:
            case Contains(id=id_, keys=keys):
                return Answer(id_, _checked(self._backend.contains(keys), len(keys)))
            case Read(id=id_, items=items):
                return Answer(id_, _checked(self._backend.read(items), len(items)))
            case Write(id=id_, items=items):
                return Answer(id_, _checked(self._backend.write(items), len(items)))
            case Delete(id=id_, keys=keys):
                return Answer(id_, _checked(self._backend.delete(keys), len(keys)))
            case Probe(id=id_):
                self._backend.ping()
                return Probed(id_, self._backend.usage())


def _checked(outcomes: list[Outcome], n_items: int) -> list[Outcome]:
    """One outcome for each item, or RuntimeError: a missing one would give its bytes to its neighbour."""
    if len(outcomes) != n_items or not all(isinstance(outcome, Outcome) for outcome in outcomes):
        raise RuntimeError(f"{len(outcomes)} outcomes for {n_items} items, or one that is none")
    return outcomes


def _failure(operation: Operation, problem: str) -> Answer | Probed:
    match operation:
        case Probe():
            return Probed(operation.id, None, problem)
        case Contains(keys=keys) | Delete(keys=keys):
            return Answer(operation.id, [Outcome.FAILED] * len(keys), problem)
        case Read(items=items) | Write(items=items):
            return Answer(operation.id, [Outcome.FAILED] * len(items), problem)


def _open(spec: WorkerSpec) -> StorageBackend:
    return FaultyBackend(spec) if isinstance(spec, FaultySpec) else open_backend(spec)


def _map_slab(fd: int, nbytes: int) -> mmap.mmap:
    """The daemon's slab, shared. Kept for the life of the process."""
    try:
        found_bytes = os.fstat(fd).st_size
        if nbytes <= 0 or found_bytes < nbytes:
            raise StorageError(f"the host slab has {found_bytes} bytes, not {nbytes}")
        return mmap.mmap(fd, nbytes)
    except OSError as error:
        raise StorageError(f"the host slab cannot be mapped: {error.strerror}") from error


def _touch(slab: mmap.mmap) -> None:
    """Enter the slab's pages into our page table beforehand: reading a file into pages met for the first
    time ran at 2.8 GB/s where others took 16. Where the kernel cannot, they are entered one by one later."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = ctypes.addressof(ctypes.c_char.from_buffer(slab))
    for offset in range(0, len(slab), _TOUCH_BYTES):
        if madvise(start + offset, min(_TOUCH_BYTES, len(slab) - offset), _MADV_POPULATE_WRITE) != 0:
            return


def _end_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print("storage worker: no parent-death signal here; the socket's end will do", file=sys.stderr)
    if os.getppid() != parent_pid:
        os._exit(2)  # the daemon died before the kernel knew


def _keep_freed_memory() -> None:
    """Have glibc keep freed blocks: page faults on fresh ones cost more than the copies into them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


if __name__ == "__main__":
    sys.exit(main())
