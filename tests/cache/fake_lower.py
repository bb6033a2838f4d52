"""A scripted stand-in for the lower tiers, with real bytes: loads write into the engine's memory and
backups read from it, when and as the test says."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache.client import (
    BackupOutcome,
    Found,
    LayerCells,
    Lease,
    Outcome,
    Placement,
    PrefetchPolicy,
    PrefetchState,
    Progress,
    Prompt,
)
from hicache.core.coverage import Component, joint_boundary
from hicache.core.layout import ComponentSpec, Kind, Layout, Plane, Pool
from hicache.core.words import BoolArray, TokenArray

PAGE_TOKENS = 4
PAGE_BYTES = 16
Memory = Mapping[str, NDArray[np.uint8]]
GARBAGE = 0xEE


def make_layout(**slots: int) -> Layout:
    """Components by name: full, swa (window of 8 tokens, 2 pages) and mamba."""
    kinds = {"full": (Kind.FULL, 0), "swa": (Kind.SWA, 8), "mamba": (Kind.MAMBA, 0)}
    return Layout(
        page_size=PAGE_TOKENS,
        components=tuple(ComponentSpec(name, *kinds[name]) for name in slots),
        pools=tuple(
            Pool(f"{name}_pool", name, n, (Plane(i, 0, PAGE_BYTES, PAGE_BYTES),))
            for i, (name, n) in enumerate(slots.items())
        ),
    )


def make_memory(layout: Layout) -> dict[str, NDArray[np.uint8]]:
    return {pool.component: np.zeros((pool.n_slots, PAGE_BYTES), np.uint8) for pool in layout.pools}


def tag(prompt: Prompt, component: str, page: int) -> NDArray[np.uint8]:
    """What the payload of a page must be: it names everything that decides it."""
    path = np.ascontiguousarray(prompt.tokens[: (page + 1) * PAGE_TOKENS], "<i4").tobytes()
    said = "\0".join((prompt.adapter, prompt.salt, component, str(page))).encode()
    return np.frombuffer(hashlib.blake2b(said + path, digest_size=PAGE_BYTES).digest(), np.uint8)


Key = tuple[str, str, str, bytes]


def key(prompt: Prompt, component: str, page: int) -> Key:
    path = np.ascontiguousarray(prompt.tokens[: (page + 1) * PAGE_TOKENS], "<i4").tobytes()
    return (prompt.adapter, prompt.salt, component, path)


@dataclass
class FakeTransfer:
    """A load or backup; `act` moves the bytes."""

    kind: str
    prompt: Prompt
    placements: Mapping[str, Placement]
    act: Callable[[], None]
    spoil: Callable[[], None]
    outcomes: Callable[[], Mapping[str, BackupOutcome]] = dict
    at_wait: Callable[[FakeTransfer], None] = lambda transfer: None
    outcome: Outcome = Outcome.PENDING
    is_settled: bool = False
    backup_outcomes: Mapping[str, BackupOutcome] = field(default_factory=dict)

    def wait(self, timeout_s: float) -> Outcome:
        self.at_wait(self)
        return self.outcome

    def settled(self) -> bool:
        return self.is_settled

    def succeed(self) -> None:
        """The bytes move now, and the answer comes."""
        assert self.outcome is Outcome.PENDING
        self.act()
        self.backup_outcomes = self.outcomes()
        self.outcome, self.is_settled = Outcome.OK, True

    def fail(self) -> None:
        """A refusal: the answer says that nothing moves any more, after some bytes did."""
        self.spoil()
        self.outcome, self.is_settled = Outcome.FAILED, True

    def lose(self) -> None:
        """The connection is gone; the daemon may still be moving bytes."""
        self.outcome = Outcome.FAILED

    def settle(self) -> None:
        """After a last careless byte, it is known that nothing moves any more."""
        self.spoil()
        self.is_settled = True


@dataclass
class FakePrefetch:
    progress: Progress | None
    boundary_before: int | None = None
    at_wait: Callable[[], None] = lambda: None
    cancelled: bool = False

    def wait(self, timeout_s: float) -> Progress | None:
        self.at_wait()
        return self.progress

    def cancel(self) -> None:
        self.cancelled = True


class FakeLower:
    def __init__(self, layout: Layout, memory: Memory) -> None:
        self.components: tuple[Component, ...] = layout.index_components()
        self.memory = memory
        self.host: dict[Key, NDArray[np.uint8]] = {}
        self.stored: dict[Key, NDArray[np.uint8]] = {}
        self.ready = True
        self.epoch = 1
        self.closed = False
        self.on_load: Callable[[FakeTransfer], None] = FakeTransfer.succeed
        """What happens while the cache waits for a load."""
        self.on_backup: Callable[[FakeTransfer], None] = FakeTransfer.succeed
        """What happens as soon as a backup is asked for."""
        self.room: dict[str, int] = {}
        """Most frames of a component that the host takes; all that come where nothing is said."""
        self.acknowledged: set[Key] = set()
        """All that was ever said to be in host memory."""
        self.answer: Callable[[Found], Found | None] = lambda found: found
        self.leases: dict[str, dict[Key, NDArray[np.uint8]]] = {}
        self.found: list[Found] = []
        self.loads: list[FakeTransfer] = []
        self.backups: list[FakeTransfer] = []
        self.prefetches: list[FakePrefetch] = []
        self._leased: dict[str, Prompt] = {}
        self._ids = itertools.count(1)

    # ---- the contract

    def lookup(
        self, prompt: Prompt, *, device: Mapping[str, BoolArray], limit_pages: int, timeout_s: float
    ) -> Found | None:
        assert self.ready, "asked although it was not ready"
        boundary, here, have = self._joint(prompt, device, limit_pages)
        load = {}
        for component in self.components:
            pages = np.arange(component.coverage.start(boundary) if boundary else 0, boundary)
            load[component.name] = pages[~here[component.name][pages]].astype(np.int32)
        whole = [have[c.name] for c in self.components if c.coverage.whole_path]
        branching = min((int(np.argmin(np.append(w, False))) for w in whole), default=0)
        lease = None
        if any(len(pages) for pages in load.values()):
            lease = Lease(f"lease-{next(self._ids)}", self.epoch)
            self._leased[lease.lease_id] = prompt
            self.leases[lease.lease_id] = {
                key(prompt, name, page): self.host[key(prompt, name, page)]
                for name, pages in load.items()
                for page in pages.tolist()
            }
        found = Found(lease, boundary, load, boundary, branching)
        self.found.append(found)
        answer = self.answer(found)
        if answer is None and lease is not None:
            self.release(lease)
        return answer

    def start_load(
        self, lease: Lease, placements: Mapping[str, Placement], *, cells: LayerCells | None = None
    ) -> FakeTransfer:
        prompt, frames = self._leased[lease.lease_id], self.leases[lease.lease_id]

        def act() -> None:
            for name, placement in placements.items():
                for page, slot in zip(placement.pages.tolist(), placement.slots.tolist(), strict=True):
                    self.memory[name][slot] = frames[key(prompt, name, page)]

        def spoil() -> None:
            for name, placement in placements.items():
                self.memory[name][placement.slots] = GARBAGE

        transfer = FakeTransfer("load", prompt, placements, act, spoil, at_wait=self.on_load)
        self.loads.append(transfer)
        return transfer

    def start_backup(self, prompt: Prompt, placements: Mapping[str, Placement]) -> FakeTransfer:
        """Reads its sources only when it ends. Takes no child without its parents; where room is short,
        whole paths lose their tails and the others keep their deepest pages."""
        outcome: dict[str, BackupOutcome] = {}

        def act() -> None:
            for component in sorted(self.components, key=lambda c: not c.coverage.whole_path):
                if component.name in placements:
                    outcome[component.name] = self._store(prompt, component, placements[component.name])

        def outcomes() -> Mapping[str, BackupOutcome]:
            return outcome

        transfer = FakeTransfer("backup", prompt, placements, act, lambda: None, outcomes)
        self.backups.append(transfer)
        self.on_backup(transfer)
        return transfer

    def _store(self, prompt: Prompt, component: Component, placement: Placement) -> BackupOutcome:
        name = component.name
        pages = dict(zip(placement.pages.tolist(), placement.slots.tolist(), strict=True))
        new = [page for page in pages if key(prompt, name, page) not in self.host]
        wholes = [c.name for c in self.components if c.coverage.whole_path]
        here = [name] if component.coverage.whole_path else []

        def stands(page: int) -> bool:
            return all(
                key(prompt, whole, n) in self.host or (whole in here and n in pages)
                for whole in wholes
                for n in range(page)
            )

        chained = [page for page in new if stands(page)]
        reasons = {"chain_broken"} if len(chained) < len(new) else set()
        room = self.room.get(name, 1 << 30) - sum(place[2] == name for place in self.host)
        if len(chained) > room:
            reasons.add("host_full")
            room = max(0, room)
            chained = chained[:room] if component.coverage.whole_path else chained[len(chained) - room :]
        for page in chained:
            self.host[key(prompt, name, page)] = self.memory[name][pages[page]].copy()
        self.acknowledged |= {key(prompt, name, page) for page in pages} & self.host.keys()
        n_present = len(pages) - len(new)
        return BackupOutcome(len(chained), n_present, len(new) - len(chained), ",".join(sorted(reasons)))

    def prefetch(
        self,
        prompt: Prompt,
        *,
        device: Mapping[str, BoolArray],
        limit_pages: int,
        policy: PrefetchPolicy,
        timeout_s: float = 0.0,
    ) -> FakePrefetch | None:
        """What is stored arrives while it is waited for."""

        def arrive() -> None:
            for component in self.components:
                for page in range(limit_pages):
                    place = key(prompt, component.name, page)
                    if place in self.stored:
                        self.host[place] = self.stored[place]
            if under_way.progress is not None:
                under_way.progress = self._progress(prompt, device, limit_pages)

        before, _, _ = self._joint(prompt, device, limit_pages)
        under_way = FakePrefetch(self._progress(prompt, device, limit_pages), before, arrive)
        self.prefetches.append(under_way)
        return under_way

    def _progress(self, prompt: Prompt, device: Mapping[str, BoolArray], limit_pages: int) -> Progress:
        """With L1 as it was when the prefetch was asked for."""
        boundary, _, _ = self._joint(prompt, device, limit_pages)
        return Progress(PrefetchState.DONE, boundary, boundary, 0, 0, "")

    def release(self, lease: Lease) -> None:
        if lease.attachment == self.epoch:
            del self.leases[lease.lease_id]

    def close(self) -> None:
        self.closed = True

    # ---- what tests do to it

    def restart(self) -> None:
        """Another process, with nothing in host memory; the old one is dead."""
        self.epoch += 1
        self.host.clear()
        self.leases.clear()
        for transfer in self.unsettled():
            transfer.lose()
            transfer.settle()

    def unsettled(self) -> list[FakeTransfer]:
        return [t for t in (*self.loads, *self.backups) if not t.is_settled]

    def _joint(
        self, prompt: Prompt, device: Mapping[str, BoolArray], limit_pages: int
    ) -> tuple[int, dict[str, BoolArray], dict[str, BoolArray]]:
        """The boundary; what L1 has; what L1 and the host have."""
        here: dict[str, BoolArray] = {}
        have: dict[str, BoolArray] = {}
        for component in self.components:
            name = component.name
            below = [key(prompt, name, page) in self.host for page in range(limit_pages)]
            here[name] = np.zeros(limit_pages, bool)
            mine = device.get(name, here[name])[:limit_pages]
            here[name][: len(mine)] = mine
            have[name] = np.array(below, bool) | here[name]
        coverages = [component.coverage for component in self.components]
        boundary = joint_boundary(coverages, [have[c.name] for c in self.components], limit_pages)
        return boundary, here, have


def fill(memory: Memory, prompt: Prompt, component: str, pages: range, slots: TokenArray) -> None:
    """Compute: write what recomputation would have stored."""
    for page, slot in zip(pages, slots.tolist(), strict=True):
        memory[component][slot] = tag(prompt, component, page)
