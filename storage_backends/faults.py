"""FaultyBackend: a wrapper that makes any backend fail in chosen, repeatable ways. For tests and drills.

Decides which operations go wrong, by rules and a seed. Stores nothing itself. Its spec is not part of the
configuration file: only tests hand it to a worker.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

from msgspec import Meta, Struct

from storage_backends.base import Item, Outcome, StorageBackend, StorageError, Usage
from storage_backends.specs import BackendSpec, Spec, open_backend


class FaultKind(Enum):
    """What goes wrong with one item."""

    DELAY = "delay"
    """`delay_s` later than else."""
    FREEZE = "freeze"
    """Not before the gate is open; see FaultySpec.gate."""
    FAIL = "fail"
    """FAILED, and nothing was done."""
    ABSENT = "absent"
    """ABSENT, whatever is there: a server that evicted it."""
    FULL = "full"
    """FULL, and nothing was done."""
    FLIP = "flip"
    """OK, with one bit of what was read or stored flipped."""
    HALVE = "halve"
    """A write that stores the first half and then fails; a read that fills half and is WRONG_SIZE."""
    REFUSE = "refuse"
    """The whole batch raises StorageError."""
    BREAK = "break"
    """The whole batch raises RuntimeError: a mistake in the backend."""
    DIE = "die"
    """The process ends at once, as with a crash in native code."""


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. The first rule that applies to an item is the one that acts."""

    kind: FaultKind
    on: frozenset[str] = frozenset({"contains", "read", "write", "delete"})
    """Operations it applies to; "open" and "ping" can be named too (REFUSE, BREAK, FREEZE, DELAY, DIE)."""
    key_part: str = ""
    """Applies to keys that contain this."""
    rate: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the matching items, drawn with the seed."""
    times: Annotated[int, Meta(ge=0)] = 0
    """How often it acts at most; 0 for always."""
    delay_s: Annotated[float, Meta(ge=0)] = 0.0


class FaultySpec(Spec, frozen=True, kw_only=True, tag="faulty"):
    """A backend and what goes wrong with it."""

    inner: BackendSpec
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    gate: str = ""
    """A directory. FREEZE holds as long as it has a file `closed`, and leaves a file `held-...` there for
    each item held."""


class FaultyBackend(StorageBackend):
    """The inner backend's answers, except where a rule says otherwise."""

    def __init__(self, spec: FaultySpec) -> None:
        self._gate = spec.gate
        self._faults = spec.faults
        self._acted = [0] * len(spec.faults)
        self._draw = random.Random(spec.seed)
        self._mutex = threading.Lock()
        self._buffer = memoryview(b"")
        self._strike("open", "")
        self._inner = open_backend(spec.inner)

    def register(self, buffer: memoryview) -> None:
        self._buffer = buffer.cast("B")
        self._inner.register(buffer)

    def contains(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._strike("contains", key) or self._inner.contains([key])[0] for key in keys]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._read_one(item) for item in items]

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        return [self._write_one(item) for item in items]

    def delete(self, keys: Sequence[str]) -> list[Outcome]:
        return [self._strike("delete", key) or self._inner.delete([key])[0] for key in keys]

    def usage(self) -> Usage:
        return self._inner.usage()

    def ping(self) -> None:
        self._strike("ping", "")
        self._inner.ping()

    def close(self) -> None:
        self._inner.close()
        self._buffer = memoryview(b"")

    def _read_one(self, item: Item) -> Outcome:
        fault = self._fault("read", item.key)
        if fault is FaultKind.HALVE:
            half = item.nbytes // 2
            self._buffer[item.offset : item.offset + half] = bytes(half)
            return Outcome.WRONG_SIZE
        outcome = _OUTCOMES.get(fault) or self._inner.read([item])[0]
        if fault is FaultKind.FLIP and outcome is Outcome.OK and item.nbytes:
            self._buffer[item.offset + item.nbytes // 2] ^= 1
        return outcome

    def _write_one(self, item: Item) -> Outcome:
        fault = self._fault("write", item.key)
        if fault is FaultKind.HALVE:
            self._inner.write([Item(item.key, item.offset, item.nbytes // 2)])
            return Outcome.FAILED
        if fault is FaultKind.FLIP and item.nbytes:
            return self._write_flipped(item)
        return _OUTCOMES.get(fault) or self._inner.write([item])[0]

    def _write_flipped(self, item: Item) -> Outcome:
        """The bit is flipped in the buffer while the inner backend writes, and then set right again."""
        place = item.offset + item.nbytes // 2
        self._buffer[place] ^= 1
        try:
            return self._inner.write([item])[0]
        finally:
            self._buffer[place] ^= 1

    def _strike(self, operation: str, key: str) -> Outcome | None:
        """The outcome that a rule puts in the place of the true one."""
        return _OUTCOMES.get(self._fault(operation, key))

    def _fault(self, operation: str, key: str) -> FaultKind | None:
        """What goes wrong now; has waited, raised or died already where that is what goes wrong."""
        rule = self._choose(operation, key)
        if rule is None:
            return None
        match rule.kind:
            case FaultKind.DELAY:
                time.sleep(rule.delay_s)
            case FaultKind.FREEZE:
                self._wait_at_gate()
            case FaultKind.REFUSE:
                raise StorageError(f"injected: {operation} refused")
            case FaultKind.BREAK:
                raise RuntimeError(f"injected: {operation} broken")
            case FaultKind.DIE:
                os._exit(70)
        return rule.kind

    def _choose(self, operation: str, key: str) -> Fault | None:
        with self._mutex:
            for place, rule in enumerate(self._faults):
                if operation not in rule.on or rule.key_part not in key:
                    continue
                if rule.times and self._acted[place] >= rule.times:
                    continue
                if self._draw.random() < rule.rate:
                    self._acted[place] += 1
                    return rule
        return None

    def _wait_at_gate(self) -> None:
        held = os.path.join(self._gate, f"held-{os.getpid()}-{threading.get_ident()}")
        with open(held, "x"):
            pass
        while os.path.exists(os.path.join(self._gate, "closed")):
            time.sleep(0.005)
        os.unlink(held)


_OUTCOMES: dict[FaultKind | None, Outcome] = {
    FaultKind.FAIL: Outcome.FAILED,
    FaultKind.ABSENT: Outcome.ABSENT,
    FaultKind.FULL: Outcome.FULL,
}
