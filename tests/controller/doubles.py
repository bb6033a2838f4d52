"""Doubles that misbehave on demand: a copy engine and a storage tier that move real bytes when well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from controller.memory.slab import HostSlab
from controller.storage import StorageTier, Transfer
from controller.transfers.copies import CopyTable
from controller.transfers.cpu import CpuCopyEngine
from storage_backends.base import Item, Outcome, Usage


class ScriptedCopies:
    """The CPU engine, which fails while told to."""

    def __init__(self) -> None:
        self.broken = False
        self._sound = CpuCopyEngine()

    def copy(self, table: CopyTable) -> None:
        if self.broken:
            raise OSError("copy: told to fail")
        self._sound.copy(table)


class Mood(Enum):
    SOUND = auto()
    FAILING = auto()
    """Every item FAILED, at once."""
    HANGING = auto()
    """It knows what it has, but reads and writes are FAILED: their bytes land, or are taken, when it is in
    another mood."""
    CORRUPT = auto()
    """Reads deliver one wrong bit."""
    FORGETFUL = auto()
    """Everything is ABSENT, although existence was confirmed before."""


class ScriptedTier(StorageTier):
    """A dictionary in this process with StorageTier's interface and promises, in the mood it is told."""

    def __init__(self, slab: HostSlab) -> None:
        self.name = "scripted"
        self.mood = Mood.SOUND
        self.objects: dict[str, bytes] = {}
        self._buffer = slab.buffer
        self._late: list[Callable[[], None]] = []

    def be(self, mood: Mood) -> None:
        """Change the mood; what hung lands now, as a late server's bytes would."""
        self.mood = mood
        late, self._late = self._late, []
        for land in late:
            land()

    async def contains(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        if self.mood is Mood.FAILING:
            return [Outcome.FAILED] * len(keys)
        return [Outcome.OK if key in self.objects else Outcome.ABSENT for key in keys]

    async def delete(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        if self.mood in (Mood.FAILING, Mood.HANGING):
            return [Outcome.FAILED] * len(keys)
        return [Outcome.OK if self.objects.pop(key, None) else Outcome.ABSENT for key in keys]

    async def read(self, items: Sequence[Item], *, timeout_s: float) -> Transfer:
        return self._move([lambda item=item: self._read_one(item) for item in items])  # type: ignore[misc]

    async def write(self, items: Sequence[Item], *, timeout_s: float) -> Transfer:
        return self._move([lambda item=item: self._write_one(item) for item in items])  # type: ignore[misc]

    def _move(self, steps: Sequence[Callable[[], Outcome]]) -> Transfer:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.mood is Mood.HANGING:

            def land() -> None:
                for step in steps:
                    step()
                settled.set_result(None)

            self._late.append(land)
            return Transfer([Outcome.FAILED] * len(steps), settled)
        settled.set_result(None)
        if self.mood is Mood.FAILING:
            return Transfer([Outcome.FAILED] * len(steps), settled)
        return Transfer([step() for step in steps], settled)

    def _read_one(self, item: Item) -> Outcome:
        found = self.objects.get(item.key)
        if found is None or self.mood is Mood.FORGETFUL:
            return Outcome.ABSENT
        if len(found) != item.nbytes:
            return Outcome.WRONG_SIZE
        content = bytearray(found)
        if self.mood is Mood.CORRUPT:
            content[len(content) // 2] ^= 0x10
        self._buffer[item.offset : item.offset + item.nbytes] = content
        return Outcome.OK

    def _write_one(self, item: Item) -> Outcome:
        self.objects[item.key] = bytes(self._buffer[item.offset : item.offset + item.nbytes])
        return Outcome.OK

    def usage(self) -> Usage:
        return Usage(len(self.objects), sum(map(len, self.objects.values())), 0)

    @property
    def kind(self) -> str:
        return "scripted"

    @property
    def healthy(self) -> bool:
        return True

    @property
    def problem(self) -> str:
        return ""

    def counters(self) -> Mapping[str, int]:
        return {}

    async def stop(self) -> bool:
        self.be(Mood.FAILING)
        return True
