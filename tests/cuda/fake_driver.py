"""A device without a device: streams, events and memory that behave as CUDA's documentation allows, and a
race detector that knows which accesses are ordered and which only happen to come out right.

Device memory is plain memory of this process, so that bytes can be compared. What is queued on a stream runs
in the stream's order, streams run in any order (by a seed), and only when somebody waits or asks; a held
stream runs nothing. Every access is checked when it runs against all others: two of the same bytes, one
of them a write, need an order by stream, event or host (vector clocks). One that has none is a violation,
whether or not it came out right; its copy then writes poison instead of bytes.

There is one host clock: what any thread has seen happened is known to all. That is what messages between an
engine and the daemon give, and it never hides a missing wait, only a missing message.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from controller.memory.cuda import CudaError
from controller.transfers.copies import AddressArray

DEADLINE_S = 20.0
POISON = 0xEE
Clock = dict[int, int]


@dataclass
class Access:
    """A range of bytes that an operation touches."""

    start: int
    stop: int
    writes: bool

    def conflicts(self, other: Access) -> bool:
        return self.start < other.stop and other.start < self.stop and (self.writes or other.writes)


@dataclass
class Operation:
    """One thing queued on a stream."""

    what: str
    stream: int
    number: int
    """Place in its stream, from 1."""
    serial: int
    """Place among everything queued anywhere."""
    host: Clock
    """What the host knew when it queued this."""
    accesses: list[Access] = field(default_factory=list)
    act: Callable[[bool], None] = lambda poisoned: None
    may_run: Callable[[], bool] = lambda: True
    gate: bool = False
    """Waits for something outside its stream."""
    clock: Clock = field(default_factory=dict)
    """Everything that is before this; known when it runs."""


@dataclass
class Event:
    """An event and its latest record."""

    stream: int = 0
    number: int = 0


@dataclass
class Stream:
    device: int
    queue: deque[Operation] = field(default_factory=deque)
    queued: int = 0
    clock: Clock = field(default_factory=dict)
    held: bool = False


def merge(into: Clock, other: Mapping[int, int]) -> None:
    for stream, number in other.items():
        into[stream] = max(into.get(stream, 0), number)


class FakeCuda:
    """DeviceMemory and StreamDriver in one, and what a test does as the engine's process."""

    def __init__(self, *, n_devices: int = 1, seed: int = 0, batch: bool = True, strict: bool = True) -> None:
        """`strict`: memory that nobody allocated, mapped or registered is a violation; otherwise it is taken
        as host memory."""
        self._changed = threading.Condition(threading.RLock())
        self._random = random.Random(seed)
        self._batch = batch
        self._strict = strict
        self._uuids = {bytes([number]) * 16: number for number in range(n_devices)}
        self._allocations: dict[int, tuple[np.ndarray, int]] = {}
        self._exported: dict[bytes, int] = {}
        self._mapped: dict[bytes, int] = {}
        self.registered: dict[int, int] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._exported_events: dict[bytes, int] = {}
        self._names = iter(range(1, 1 << 30))
        self._serials = iter(range(1 << 62))
        self._host: Clock = {}
        self._past: list[Operation] = []
        """What has run and is not known to the host yet."""
        self.violations: list[str] = []
        self.calls: list[str] = []
        self._failures: dict[str, list[CudaError | None]] = {}
        self.lost: CudaError | None = None
        self.same_addresses = True

    # ---- what a test does -------------------------------------------------------------------------

    def fail(self, call: str, *, code: int = 2, after: int = 0) -> None:
        """The call fails once, after so many that work. Codes of lost contexts stay lost."""
        self._failures.setdefault(call, []).extend([None] * after + [CudaError(call, code, f"fake {code}")])

    def array(self, nbytes: int, *, device: int = 0, fill: int = 0) -> np.ndarray:
        """Device memory of an engine."""
        memory = np.full(nbytes, fill, dtype=np.uint8)
        with self._changed:
            self._allocations[memory.ctypes.data] = memory, device
        return memory

    def drop(self, memory: np.ndarray) -> None:
        """The engine frees its memory (it stays readable for the test, but nobody may touch it)."""
        with self._changed:
            address = memory.ctypes.data
            del self._allocations[address]
            for stream in self._streams.values():
                for operation in stream.queue:
                    if any(
                        a.start < address + memory.nbytes and address < a.stop for a in operation.accesses
                    ):
                        self.violations.append(f"{operation.what}: its memory was freed before it ran")

    def export(self, memory: np.ndarray) -> bytes:
        """The handle of an allocation."""
        handle = b"memory" + memory.ctypes.data.to_bytes(8, "little") + bytes(50)
        self._exported[handle] = memory.ctypes.data
        return handle

    def export_event(self, event: int) -> bytes:
        handle = b"event!" + event.to_bytes(8, "little") + bytes(50)
        self._exported_events[handle] = event
        return handle

    def engine_kernel(
        self,
        stream: int,
        what: str,
        *,
        writes: tuple[np.ndarray, ...] = (),
        reads: tuple[np.ndarray, ...] = (),
        act: Callable[[], None] = lambda: None,
    ) -> None:
        """The engine's own work, which reads and writes these arrays when it runs."""
        accesses = [Access(a.ctypes.data, a.ctypes.data + a.nbytes, False) for a in reads]
        accesses += [Access(a.ctypes.data, a.ctypes.data + a.nbytes, True) for a in writes]
        self._queue(stream, what, accesses, lambda poisoned: act())

    def wait_event(self, stream: int, event: int) -> None:
        """cuStreamWaitEvent: the stream waits for the record that the event has now."""
        with self._changed:
            wanted = Event(self._events[event].stream, self._events[event].number)
            operation = self._queue(stream, f"wait for event {event}", [])
            operation.gate = True
            operation.may_run = lambda: not wanted.number or self._has_run(wanted)

            def act(poisoned: bool) -> None:
                if wanted.number:
                    merge(self._streams[stream].clock, self._clock_at(wanted))

            operation.act = act

    def wait_value(self, stream: int, cells: np.ndarray, place: int, value: int) -> None:
        """cuStreamWaitValue64, greater or equal, on a cell that the host writes: what the host knew when
        it wrote is before what follows here."""
        with self._changed:
            operation = self._queue(stream, f"wait for cell {place}", [])
            operation.gate = True
            operation.may_run = lambda: int(cells[place]) >= value
            operation.act = lambda poisoned: merge(self._streams[stream].clock, self._host)

    def hold(self, stream: int) -> None:
        """Nothing of the stream runs until `let_go`."""
        self._streams[stream].held = True

    def let_go(self, stream: int) -> None:
        with self._changed:
            self._streams[stream].held = False
            self._changed.notify_all()

    def run(self) -> None:
        """Run all that may run."""
        with self._changed:
            while self._step():
                pass
            self._changed.notify_all()

    def idle(self, stream: int) -> bool:
        return not self._streams[stream].queue

    def streams(self, device: int = 0) -> list[int]:
        return [name for name, stream in self._streams.items() if stream.device == device]

    def leftovers(self) -> list[str]:
        """What nobody gave back."""
        found = [f"stream {name}" for name in self._streams]
        found += [f"mapping {handle[:14].hex()}" for handle in self._mapped]
        found += [f"event {name}" for name in self._events]
        return found + [f"registration of {nbytes} bytes" for nbytes in self.registered.values()]

    # ---- DeviceMemory -----------------------------------------------------------------------------

    def devices(self) -> Mapping[bytes, int]:
        return self._uuids

    def sees_host_addresses(self, device: int) -> bool:
        return self.same_addresses

    def open_memory(self, device: int, handle: bytes) -> int:
        self._called("open_memory")
        with self._changed:
            address = self._exported.get(handle)
            if address is None or address not in self._allocations:
                raise CudaError("cuIpcOpenMemHandle", 201, "CUDA_ERROR_INVALID_CONTEXT")
            if handle in self._mapped:
                self.violations.append("an allocation was mapped twice")
            self._mapped[handle] = address
            return address

    def close_memory(self, device: int, address: int) -> None:
        self._called("close_memory")
        with self._changed:
            (handle,) = [handle for handle, at in self._mapped.items() if at == address]
            del self._mapped[handle]

    def extent(self, device: int, address: int) -> tuple[int, int]:
        self._called("extent")
        for start, (memory, _) in self._allocations.items():
            if start <= address < start + memory.nbytes:
                return start, memory.nbytes
        raise CudaError("cuMemGetAddressRange", 1, "CUDA_ERROR_INVALID_VALUE")

    def allocate(self, device: int, nbytes: int) -> int:
        self._called("allocate")
        return int(self.array(nbytes, device=device).ctypes.data)

    def free(self, device: int, address: int) -> None:
        self.drop(self._allocations[address][0])

    def register_host(self, address: int, nbytes: int) -> None:
        self._called("register_host")
        with self._changed:
            for start, size in self.registered.items():
                if start < address + nbytes and address < start + size:
                    raise CudaError("cuMemHostRegister", 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
            self.registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        self._called("unregister_host")
        with self._changed:
            if address not in self.registered:
                raise CudaError("cuMemHostUnregister", 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
            del self.registered[address]

    # ---- StreamDriver -----------------------------------------------------------------------------

    def open_stream(self, device: int, *, urgent: bool) -> int:
        self._called("open_stream")
        with self._changed:
            name = next(self._names)
            self._streams[name] = Stream(device)
            return name

    def close_stream(self, device: int, stream: int) -> None:
        self._called("close_stream")
        with self._changed:
            if self._streams[stream].queue:
                self.violations.append("a stream was closed with copies in it")
            del self._streams[stream]

    def copy(self, device: int, stream: int, target: int, source: int, nbytes: int) -> None:
        self._called("copy")
        pieces = [(source, target, nbytes)]
        self._queue(stream, "copy", _accesses(pieces), lambda poisoned: _move(pieces, poisoned))

    def can_batch(self, device: int) -> bool:
        return self._batch

    def copy_batch(
        self,
        device: int,
        stream: int,
        target: AddressArray,
        source: AddressArray,
        nbytes: AddressArray,
        *,
        stable: bool,
    ) -> None:
        """As the real one, refuses pieces that span two registrations."""
        self._called("copy_batch")
        pieces = list(zip(source.tolist(), target.tolist(), nbytes.tolist(), strict=True))
        with self._changed:
            for start, size in [span for s, t, n in pieces for span in ((s, n), (t, n))]:
                for registered, extent in self.registered.items():
                    if registered < start + size and start < registered + extent:
                        inside = registered <= start and start + size <= registered + extent
                        if not inside:
                            raise CudaError("cuMemcpyBatchAsync", 1, "CUDA_ERROR_INVALID_VALUE")
        self._queue(stream, "batch", _accesses(pieces), lambda poisoned: _move(pieces, poisoned))

    def launch(
        self, device: int, stream: int, pieces: list[tuple[int, int, int]], act: Callable[[], None]
    ) -> None:
        """A kernel that moves these pieces when it runs; the fake's own entry, see fake_kernel.py."""
        self._called("launch")

        def move(poisoned: bool) -> None:
            if poisoned:
                _move(pieces, poisoned)
            else:
                act()

        self._queue(stream, "kernel", _accesses(pieces), move, by_kernel=True)

    def open_event(self, device: int) -> int:
        self._called("open_event")
        with self._changed:
            name = next(self._names)
            self._events[name] = Event()
            return name

    def import_event(self, device: int, handle: bytes) -> int:
        self._called("import_event")
        with self._changed:
            event = self._exported_events.get(handle)
            if event is None or event not in self._events:
                raise CudaError("cuIpcOpenEventHandle", 400, "CUDA_ERROR_INVALID_HANDLE")
            name = next(self._names)
            self._events[name] = self._events[event]
            return name

    def close_event(self, device: int, event: int) -> None:
        self._called("close_event")
        with self._changed:
            del self._events[event]

    def record(self, device: int, event: int, stream: int) -> None:
        self._called("record")
        with self._changed:
            operation = self._queue(stream, f"record event {event}", [])
            found = self._events[event]
            found.stream, found.number = stream, operation.number

    def happened(self, device: int, event: int) -> bool:
        self._called("happened")
        with self._changed:
            self.run()
            found = self._events[event]
            if not found.number:
                return True
            if not self._has_run(found):
                return False
            self._host_knows(found)
            return True

    def wait(self, device: int, event: int) -> None:
        self._called("wait")
        deadline_s = time.monotonic() + DEADLINE_S
        with self._changed:
            found = self._events[event]
            wanted = Event(found.stream, found.number)
            while wanted.number and not self._has_run(wanted):
                if self.lost:
                    raise self.lost
                if not self._step() and not self._changed.wait(deadline_s - time.monotonic()):
                    raise AssertionError("nobody let the stream go")
            if wanted.number:
                self._host_knows(wanted)

    # ---- inside -----------------------------------------------------------------------------------

    def _called(self, call: str) -> None:
        with self._changed:
            self.calls.append(call)
            planned = self._failures.get(call)
            error = planned.pop(0) if planned else None
            if error is not None:
                if error.context_lost:
                    self.lost = error
                    for stream in self._streams.values():
                        stream.queue.clear()
                    self._changed.notify_all()
                raise error
            if self.lost and call not in ("close_event", "close_stream", "unregister_host", "close_memory"):
                raise self.lost

    def _queue(
        self,
        stream: int,
        what: str,
        accesses: list[Access],
        act: Callable[[bool], None] = lambda poisoned: None,
        *,
        by_kernel: bool = False,
    ) -> Operation:
        with self._changed:
            if self._strict:
                for access in accesses:
                    self._check_known(what, access, by_kernel=by_kernel)
            queue = self._streams[stream]
            queue.queued += 1
            operation = Operation(
                what, stream, queue.queued, next(self._serials), dict(self._host), accesses, act
            )
            queue.queue.append(operation)
            self._changed.notify_all()
            return operation

    def _check_known(self, what: str, access: Access, *, by_kernel: bool) -> None:
        inside = [
            start
            for start, (memory, _) in self._allocations.items()
            if start <= access.start and access.stop <= start + memory.nbytes
        ]
        pinned = [
            start
            for start, nbytes in self.registered.items()
            if start <= access.start and access.stop <= start + nbytes
        ]
        if inside and any(start in self._mapped.values() for start in inside):
            return
        if inside or pinned:
            return
        if by_kernel or self._freed(access):
            self.violations.append(f"{what}: {access} is in no memory that the device may touch")

    def _freed(self, access: Access) -> bool:
        """Whether the address was a device's: host memory, pinned or not, may be copied by the driver."""
        return any(
            at <= access.start < at + (1 << 40)
            for at in self._exported.values()
            if at not in self._allocations
        )

    def _step(self) -> bool:
        """Run one operation, of a stream chosen by the seed; whether there was one."""
        ready = [
            name
            for name, stream in self._streams.items()
            if stream.queue and not stream.held and stream.queue[0].may_run()
        ]
        if not ready:
            return False
        name = self._random.choice(ready)
        stream = self._streams[name]
        operation = stream.queue.popleft()
        merge(stream.clock, operation.host)
        operation.clock = dict(stream.clock)
        poisoned = self._check_order(operation)
        operation.act(poisoned)
        stream.clock[name] = operation.number
        operation.clock = dict(stream.clock)
        self._past.append(operation)
        self._changed.notify_all()
        return True

    def _check_order(self, operation: Operation) -> bool:
        waiting = [
            other
            for name, stream in self._streams.items()
            if name != operation.stream
            for other in _ungated(stream.queue)
            if other.serial < operation.serial
        ]
        before = [
            other
            for other in self._past
            if other.stream != operation.stream and operation.clock.get(other.stream, 0) < other.number
        ]
        found = False
        for other in waiting + before:
            if any(mine.conflicts(theirs) for mine in operation.accesses for theirs in other.accesses):
                state = "has not run" if other in waiting else "ran, but nothing orders them"
                self.violations.append(f"{operation.what} meets {other.what}, which {state}")
                found = True
        return found

    def _has_run(self, event: Event) -> bool:
        stream = self._streams.get(event.stream)
        return stream is None or stream.clock.get(event.stream, 0) >= event.number

    def _clock_at(self, event: Event) -> Clock:
        for operation in self._past:
            if (operation.stream, operation.number) == (event.stream, event.number):
                return operation.clock
        return {event.stream: event.number}

    def _host_knows(self, event: Event) -> None:
        merge(self._host, self._clock_at(event))
        views = [self._host, *(one.host for stream in self._streams.values() for one in stream.queue)]
        self._past = [
            one for one in self._past if any(view.get(one.stream, 0) < one.number for view in views)
        ]


def _ungated(queue: deque[Operation]) -> Iterator[Operation]:
    """What nothing keeps from running any moment. What stands behind a wait is judged when it runs."""
    return takewhile(lambda operation: not operation.gate, queue)


def _accesses(pieces: list[tuple[int, int, int]]) -> list[Access]:
    return [
        access
        for source, target, nbytes in pieces
        for access in (Access(source, source + nbytes, False), Access(target, target + nbytes, True))
    ]


def _move(pieces: list[tuple[int, int, int]], poisoned: bool) -> None:
    for source, target, nbytes in pieces:
        if poisoned:
            ctypes.memset(target, POISON, nbytes)
        else:
            ctypes.memmove(target, source, nbytes)
