"""The index against the oracle: random operations, everything compared after every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.core import eviction
from hicache.core.audit import audit
from hicache.core.coverage import Checkpoint, Chunked, Component, SlidingWindow, WholePath
from hicache.core.identity import Namespace
from hicache.core.pins import Receipt
from hicache.core.policies import Policy
from hicache.core.pools import SlotPool
from hicache.core.reservations import Reservation
from hicache.core.sessions import SessionTurn
from hicache.core.structure import Cursor, StaleCursor
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, Residency, SlotArray, Tier, TokenArray

from .oracle import Oracle, Path, prefixes

COMPONENTS = (
    Component("full", WholePath()),
    Component("swa", SlidingWindow(3)),
    Component("mamba", Checkpoint()),
    Component("chunked", Chunked(4)),
    Component("latent", WholePath()),
)
TIER_SETS = ((Tier.DEVICE,), (Tier.HOST, Tier.STORAGE), (Tier.DEVICE, Tier.HOST, Tier.STORAGE))
SALTS = ("", "x")
MAX_PAGES = 9

prompts = st.text(alphabet="ab", min_size=0, max_size=MAX_PAGES)
masks = st.one_of(
    st.just([True] * MAX_PAGES), st.lists(st.booleans(), min_size=MAX_PAGES, max_size=MAX_PAGES)
)


@dataclass
class Pinned:
    receipt: Receipt
    tier: Tier
    paths: dict[str, set[Path]]


@dataclass
class Reserved:
    reservation: Reservation
    salt: str
    depth: int
    tier: Tier
    entries: dict[str, dict[Path, int]]


@dataclass
class Kept:
    cursor: Cursor
    salt: str
    pages: str
    made: int


class IndexMachine(RuleBasedStateMachine):
    """Runs every operation on both and compares."""

    @initialize(
        which=st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=4, unique=True),
        page_size=st.sampled_from([1, 4, 16]),
        tiers=st.sampled_from(TIER_SETS),
        policies=st.lists(st.just(Policy.LRU) | st.sampled_from(Policy), min_size=4, max_size=4),
        plan_from=st.sampled_from([1, 512]),
    )
    def begin(
        self,
        which: list[Component],
        page_size: int,
        tiers: tuple[Tier, ...],
        policies: list[Policy],
        plan_from: int,
    ) -> None:
        """Half of the runs plan evictions ahead in every node, not in large ones only."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(eviction, "_LARGE_PAGES", plan_from)
        self.patch.setattr(eviction, "_PLAN_AHEAD", 2)
        self.page_size, self.tiers = page_size, tiers
        self.slotted = [tier for tier in tiers if tier is not Tier.STORAGE]
        self.names = [component.name for component in which]
        chosen = dict(zip(self.names, policies, strict=False))
        self.index = Index(page_size, which, tiers, policies=chosen)
        self.oracle = Oracle(which, tiers, chosen)
        self.turns: list[tuple[SessionTurn, bool]] = []
        self.pools = {(name, tier): SlotPool(400) for name in self.names for tier in self.slotted}
        self.pinned: list[Pinned] = []
        self.reserved: list[Reserved] = []
        self.kept: list[Kept] = []

    # How prompts look.

    def namespace(self, salt: str) -> Namespace:
        return Namespace("m", "r", b"", self.page_size, salt=salt)

    def tokens(self, pages: str, tail: int = 0) -> TokenArray:
        """Pages that differ in their last token only."""
        array = np.zeros(len(pages) * self.page_size + min(tail, self.page_size - 1), dtype=np.int32)
        for n, letter in enumerate(pages, start=1):
            array[n * self.page_size - 1] = ord(letter)
        return array

    def some_cursor(self, pick: int) -> Cursor | None:
        return self.kept[pick % len(self.kept)].cursor if self.kept and pick % 3 else None

    def keep(self, cursor: Cursor, salt: str, pages: str) -> None:
        self.oracle.settle()
        self.kept.append(Kept(cursor, salt, pages[: cursor.boundary], self.oracle.tick))
        del self.kept[:-12]

    def place(self, salt: str, pages: str) -> Cursor:
        return self.index.match(self.namespace(salt), self.tokens(pages)).cursor

    def free(self, slots: Mapping[str, SlotArray], tier: Tier) -> None:
        for name, array in slots.items():
            self.pools[name, tier].free(array)

    # Operations.

    @rule(
        salt=st.sampled_from(SALTS),
        pages=prompts,
        tail=st.integers(0, 15),
        offers=st.lists(masks, min_size=4, max_size=4),
        pick=st.integers(0, 1000),
        own=st.booleans(),
    )
    def insert(
        self, salt: str, pages: str, tail: int, offers: list[list[bool]], pick: int, own: bool
    ) -> None:
        tier = self.slotted[pick % len(self.slotted)]
        salt, pages, after = self.behind_a_kept_cursor(salt, pages, pick)
        base = after.boundary if after else 0
        first = pick % (self.oracle.matched(salt, pages) + 1) if pick % 2 else base
        offered = {}
        for name, mask in zip(self.names, offers, strict=False):
            slots = np.full(len(pages) - first, NO_SLOT, dtype=np.int32)
            for page in range(first, len(pages)):
                have = self.oracle.ready[name, tier].get((salt, pages[: page + 1]))
                if mask[page] and own and have is not None:
                    slots[page - first] = have
                elif mask[page]:
                    fresh = self.pools[name, tier].alloc(1)
                    assert fresh is not None
                    slots[page - first] = fresh[0]
            offered[name] = slots
        done = self.index.insert(
            self.namespace(salt),
            self.tokens(pages, tail)[base * self.page_size :],
            offered,
            tier=tier,
            cursor=self.some_cursor(pick),
            after=after,
            first_page=first if pick % 2 else None,
            priority=pick % 4,
        )
        redundant, canonical, depth = self.oracle.insert(
            salt, pages, {name: slots.tolist() for name, slots in offered.items()}, tier, first, pick % 4
        )
        assert {name: sorted(slots) for name, slots in done.redundant.items()} == {
            name: sorted(slots) for name, slots in redundant.items()
        }
        assert {name: slots.tolist() for name, slots in done.canonical.items()} == canonical
        assert done.n_pages == done.cursor.boundary == depth
        assert done.tail_tokens == min(tail, self.page_size - 1)
        self.free(done.redundant, tier)
        self.keep(done.cursor, salt, pages)

    @rule(
        salt=st.sampled_from(SALTS),
        pages=prompts,
        limit=st.none() | st.integers(0, MAX_PAGES),
        pick=st.integers(0, 1000),
        device=st.none() | st.lists(masks, min_size=4, max_size=4),
    )
    def match(
        self, salt: str, pages: str, limit: int | None, pick: int, device: list[list[bool]] | None
    ) -> None:
        held = dict(zip(self.names, device, strict=False)) if device else {}
        salt, pages, after = self.behind_a_kept_cursor(salt, pages, pick)
        self.compare(salt, pages, limit, held, self.some_cursor(pick), after)

    def behind_a_kept_cursor(self, salt: str, pages: str, pick: int) -> tuple[str, str, Cursor | None]:
        """Sometimes: take the prompt as what follows a kept cursor. A stale one is refused."""
        if pick % 5 or not self.kept:
            return salt, pages, None
        kept = self.kept[pick // 5 % len(self.kept)]
        if self.is_stale(kept, len(kept.pages)):
            with pytest.raises(StaleCursor):
                self.index.match(self.namespace(kept.salt), self.tokens(pages), after=kept.cursor)
            return salt, pages, None
        return kept.salt, (kept.pages + pages)[:MAX_PAGES], kept.cursor

    def is_stale(self, kept: Kept, stop: int) -> bool:
        """Whether some of the pages were given up since the cursor was made."""
        self.oracle.settle()
        since = self.oracle.known_since.get((kept.salt, kept.pages[:stop])) if stop else 0
        return since is None or since > kept.made

    @rule(salt=st.sampled_from(SALTS), pages=prompts, boundary=st.integers(0, MAX_PAGES))
    def touch(self, salt: str, pages: str, boundary: int) -> None:
        cursor = self.place(salt, pages)
        boundary = min(boundary, cursor.boundary)
        self.index.touch(cursor, boundary)
        self.oracle.touch(salt, pages, boundary)

    @rule(
        salt=st.sampled_from(SALTS),
        pages=prompts,
        which=st.lists(masks, min_size=4, max_size=4),
        pick=st.integers(0, 9),
    )
    def reserve(self, salt: str, pages: str, which: list[list[bool]], pick: int) -> None:
        tier = self.slotted[pick % len(self.slotted)]
        placements, entries = {}, {}
        for name, mask in zip(self.names, which, strict=False):
            present = self.oracle.present((name, tier))
            wanted = [n for n in range(len(pages)) if mask[n] and (salt, pages[: n + 1]) not in present]
            slots = self.pools[name, tier].alloc(len(wanted))
            assert slots is not None
            placements[name] = (np.array(wanted, dtype=np.int32), slots)
            entries[name] = {(salt, pages[: n + 1]): int(slot) for n, slot in zip(wanted, slots, strict=True)}
        reservation = self.index.reserve(self.namespace(salt), self.tokens(pages), placements, tier=tier)
        for name, slots in entries.items():
            self.oracle.inbound[name, tier].update(slots)
        depth = max((len(path[1]) for slots in entries.values() for path in slots), default=0)
        self.reserved.append(Reserved(reservation, salt, depth, tier, entries))

    @precondition(lambda self: self.reserved)
    @rule(pick=st.integers(0, 1000), publish=st.booleans())
    def end_reservation(self, pick: int, publish: bool) -> None:
        reserved = self.reserved.pop(pick % len(self.reserved))
        if publish:
            surplus = self.index.publish(reserved.reservation)
            expected = self.oracle.publish(reserved.salt, reserved.depth, reserved.entries, reserved.tier)
            assert {name: sorted(slots) for name, slots in surplus.items()} == {
                name: sorted(slots) for name, slots in expected.items()
            }
            self.free(surplus, reserved.tier)
        else:
            self.free(self.index.withdraw(reserved.reservation), reserved.tier)
            self.oracle.withdraw(reserved.entries, reserved.tier)
        with pytest.raises(ValueError, match="spent"):
            self.index.publish(reserved.reservation)

    @rule(
        salt=st.sampled_from(SALTS), pages=prompts, boundary=st.integers(0, MAX_PAGES), pick=st.integers(0, 9)
    )
    def pin(self, salt: str, pages: str, boundary: int, pick: int) -> None:
        tier = self.slotted[pick % len(self.slotted)]
        cursor = self.place(salt, pages)
        boundary = min(boundary, cursor.boundary)
        receipt = self.index.pin(cursor, boundary, tier=tier)
        paths = {
            name: {
                path
                for path in prefixes((salt, pages[:boundary]))
                if boundary
                and len(path[1]) > coverage.start(boundary)
                and path in self.oracle.ready[name, tier]
            }
            for name, coverage in self.oracle.coverage.items()
        }
        self.enter_pin(Pinned(receipt, tier, paths))

    @rule(
        salt=st.sampled_from(SALTS),
        pages=prompts,
        which=st.lists(masks, min_size=4, max_size=4),
        pick=st.integers(0, 9),
    )
    def pin_pages(self, salt: str, pages: str, which: list[list[bool]], pick: int) -> None:
        tier = self.slotted[pick % len(self.slotted)]
        cursor = self.place(salt, pages)
        placements, paths = {}, {}
        for name, mask in zip(self.names, which, strict=False):
            ready = self.oracle.ready[name, tier]
            wanted = [n for n in range(cursor.boundary) if mask[n] and (salt, pages[: n + 1]) in ready]
            placements[name] = np.array(wanted, dtype=np.int32)
            paths[name] = {(salt, pages[: n + 1]) for n in wanted}
        self.enter_pin(Pinned(self.index.pin_pages(cursor, placements, tier=tier), tier, paths))

    def enter_pin(self, pinned: Pinned) -> None:
        self.pinned.append(pinned)
        for name, paths in pinned.paths.items():
            self.oracle.pin((name, pinned.tier), paths, 1)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 1000))
    def unpin(self, pick: int) -> None:
        pinned = self.pinned.pop(pick % len(self.pinned))
        self.index.unpin(pinned.receipt)
        for name, paths in pinned.paths.items():
            self.oracle.pin((name, pinned.tier), paths, -1)
        with pytest.raises(ValueError, match="spent"):
            self.index.unpin(pinned.receipt)

    @precondition(lambda self: self.pinned)
    @rule(pick=st.integers(0, 1000), page=st.integers(0, MAX_PAGES))
    def unpin_before(self, pick: int, page: int) -> None:
        pinned = self.pinned[pick % len(self.pinned)]
        name = self.names[pick % len(self.names)]
        self.index.unpin_before(pinned.receipt, name, page)
        early = {path for path in pinned.paths[name] if len(path[1]) <= page}
        pinned.paths[name] -= early
        self.oracle.pin((name, pinned.tier), early, -1)

    @rule(pick=st.integers(0, 1000), n=st.integers(0, 12))
    def evict(self, pick: int, n: int) -> None:
        name, tier = self.names[pick % len(self.names)], self.tiers[pick % len(self.tiers)]
        before = {c: dict(self.oracle.ready[c, tier]) for c in self.names}
        done = self.index.evict(name, tier, n)
        went = self.gone(before, tier)
        if tier is not Tier.STORAGE:
            assert {c: sorted(slots) for c, slots in done.freed.items()} == {
                c: sorted(before[c][path] for path in paths) for c, paths in went.items()
            }
        count, gone = self.oracle.evict((name, tier), n, went)
        assert went == gone
        assert (done.n_freed, done.short) == (count, n - count)
        self.free(done.freed, tier)

    @rule(salt=st.sampled_from(SALTS), pages=prompts, pick=st.integers(0, 1000), at_most=st.integers(0, 5))
    def thin(self, salt: str, pages: str, pick: int, at_most: int) -> None:
        """Never the frontier, a fork or what is pinned; the others in order, no more than needed."""
        name, tier = self.names[pick % len(self.names)], self.tiers[pick % len(self.tiers)]
        if self.oracle.coverage[name].whole_path:
            return
        cursor, lane = self.place(salt, pages), (name, tier)
        before = {c: dict(self.oracle.ready[c, tier]) for c in self.names}
        path = [p for p in prefixes((salt, pages[: cursor.boundary])) if p in before[name]]
        known, dead = self.oracle.known(), self.oracle.dead()
        forks = [p for p in path if sum((p[0], p[1] + letter) in known for letter in "ab") > 1]
        free = {p for p in path[:-1] if p not in forks and p not in self.oracle.pins[lane]}
        done = self.index.thin(cursor, name, tier, at_most)
        went = self.gone(before, tier)
        assert set(went) <= {name}
        gone = went.get(name, set())
        assert gone <= free
        assert len(gone) == done.n_freed == min(len(free), max(0, len(path) - at_most))
        assert done.short == max(0, len(path) - at_most) - len(gone)
        keys = {p: self.oracle.key(lane, p, dead) for p in free}
        assert max([keys[p] for p in gone], default=(0,)) <= min([keys[p] for p in free - gone], default=(9,))
        for p in gone:
            del self.oracle.ready[lane][p]
        self.free(done.freed, tier)

    @rule(pick=st.integers(0, 9))
    def drop(self, pick: int) -> None:
        """What is left is what may not be evicted one by one either."""
        tier = self.tiers[pick % len(self.tiers)]
        before = {c: dict(self.oracle.ready[c, tier]) for c in self.names}
        done = self.index.drop(tier)
        went = self.gone(before, tier)
        gone: dict[str, set[Path]] = {}
        for name in sorted(self.names, key=lambda c: not self.oracle.coverage[c].whole_path):
            for c, paths in self.oracle.evict((name, tier), 10_000, went)[1].items():
                gone.setdefault(c, set()).update(paths)
        assert went == gone
        assert done.n_freed == sum(map(len, gone.values()))
        self.free(done.freed, tier)

    def gone(self, before: Mapping[str, Mapping[Path, int]], tier: Tier) -> dict[str, set[Path]]:
        """By component, the pages that are not READY any more."""
        went: dict[str, set[Path]] = {}
        for name, paths in before.items():
            for salt, pages in paths:
                cursor = self.place(salt, pages)
                if cursor.boundary < len(pages) or not self.ready(cursor, name, tier, len(pages) - 1):
                    went.setdefault(name, set()).add((salt, pages))
        return went

    def ready(self, cursor: Cursor, name: str, tier: Tier, page: int) -> bool:
        return bool(self.index.residency(cursor, name, tier, page, page + 1)[0] == Residency.READY)

    @precondition(lambda self: Tier.STORAGE in self.tiers)
    @rule(salt=st.sampled_from(SALTS), pages=prompts, mask=masks, pick=st.integers(0, 9), store=st.booleans())
    def store(self, salt: str, pages: str, mask: list[bool], pick: int, store: bool) -> None:
        name = self.names[pick % len(self.names)]
        cursor = self.place(salt, pages)
        wanted = [n for n in range(cursor.boundary) if mask[n]]
        ready = self.oracle.ready[name, Tier.STORAGE]
        if store:
            self.index.mark_stored(cursor, name, np.array(wanted, dtype=np.int32))
            ready.update({(salt, pages[: n + 1]): 0 for n in wanted})
        else:
            self.index.forget_stored(cursor, name, np.array(wanted, dtype=np.int32))
            for n in wanted:
                ready.pop((salt, pages[: n + 1]), None)

    @precondition(lambda self: self.kept)
    @rule(pick=st.integers(0, 1000))
    def read_by_a_kept_cursor(self, pick: int) -> None:
        """A cursor reads what is there, and is stale exactly when its pages were given up since."""
        kept = self.kept[pick % len(self.kept)]
        stop = pick % (len(kept.pages) + 1)
        name, tier = self.names[pick % len(self.names)], self.tiers[pick % len(self.tiers)]
        if self.is_stale(kept, stop):
            with pytest.raises(StaleCursor):
                self.index.residency(kept.cursor, name, tier, 0, stop)
        else:
            self.compare_pages(kept.cursor, kept.salt, kept.pages[:stop])

    @rule(session=st.sampled_from("uvw"), reopen=st.booleans())
    def begin_turn(self, session: str, reopen: bool) -> None:
        if reopen:
            self.index.sessions.open(session)
        turn = self.index.sessions.begin(session)
        if turn.generation:
            self.oracle.sessions.setdefault(session, {})
        assert len(self.index.sessions) == len(self.oracle.sessions)
        self.turns.append((turn, session in self.oracle.sessions))

    @precondition(lambda self: self.turns)
    @rule(pick=st.integers(0, 1000), salt=st.sampled_from(SALTS), pages=prompts, short=st.integers(0, 3))
    def finish_turn(self, pick: int, salt: str, pages: str, short: int) -> None:
        turn, counts = self.turns.pop(pick % len(self.turns))
        cursor = self.place(salt, pages)
        boundary = max(0, cursor.boundary - short)
        assert self.index.sessions.finish(turn, cursor, boundary) == counts
        if counts:
            self.oracle.sessions[turn.session_id] = {
                name: {
                    path
                    for path in prefixes((salt, pages[:boundary]))
                    if len(path[1]) > coverage.start(boundary)
                }
                for name, coverage in self.oracle.coverage.items()
            }

    @rule(session=st.sampled_from("uvw"))
    def close(self, session: str) -> None:
        assert self.index.sessions.close(session) == (session in self.oracle.sessions)
        self.oracle.sessions.pop(session, None)
        self.turns = [(turn, counts and turn.session_id != session) for turn, counts in self.turns]

    # Comparison.

    def compare(
        self,
        salt: str,
        pages: str,
        limit: int | None,
        device: Mapping[str, list[bool]],
        cursor: Cursor | None = None,
        after: Cursor | None = None,
    ) -> None:
        found = self.index.match(
            self.namespace(salt),
            self.tokens(pages, 3)[(after.boundary if after else 0) * self.page_size :],
            limit_pages=limit,
            cursor=cursor,
            after=after,
            device={name: np.array(held, dtype=np.bool_) for name, held in device.items()} or None,
        )
        top = len(pages) if limit is None else min(limit, len(pages))
        assert found.n_pages == found.cursor.boundary == min(top, self.oracle.matched(salt, pages))
        assert dict(found.boundaries) == {
            tier: self.oracle.boundary(salt, pages, top, self.tiers[: n + 1], device)
            for n, tier in enumerate(self.tiers)
        }
        assert found.branching_boundary == self.oracle.branching(
            salt, pages, self.reachable(found.n_pages, top, device), self.tiers, device
        )

    def reachable(self, n_pages: int, top: int, device: Mapping[str, list[bool]]) -> int:
        return min(top, max([n_pages, *(len(held) for held in device.values())]))

    def compare_pages(self, cursor: Cursor, salt: str, pages: str) -> None:
        for (name, tier), ready in self.oracle.ready.items():
            inbound = self.oracle.inbound[name, tier]
            paths = list(prefixes((salt, pages)))
            state = self.index.residency(cursor, name, tier, 0, len(pages)).tolist()
            assert state == [2 if path in ready else 1 if path in inbound else 0 for path in paths]
            if tier is not Tier.STORAGE:
                slots = self.index.slots(cursor, name, tier, 0, len(pages)).tolist()
                assert slots == [ready.get(path, NO_SLOT) for path in paths]

    @invariant()
    def all_is_equal(self) -> None:
        if not hasattr(self, "oracle"):
            return
        self.oracle.settle()
        found = audit(self.index, self.pools)
        assert not found, found
        known = self.oracle.known()
        inner = {path[1][:-1] for path in known}
        for salt, pages in sorted(known):
            if pages not in inner:
                cursor = self.place(salt, pages)
                assert cursor.boundary == len(pages)
                self.compare_pages(cursor, salt, pages)
                self.compare(salt, pages + "b", None, {})
        resident = sum(len(self.oracle.present(lane)) for lane in self.oracle.ready)
        assert sum(self.index._occupancy.resident) == resident

    def teardown(self) -> None:
        """When everybody has let go, everything can be given up."""
        if not hasattr(self, "oracle"):
            return
        self.patch.undo()
        for reserved in self.reserved:
            self.free(self.index.withdraw(reserved.reservation), reserved.tier)
        for pinned in self.pinned:
            self.index.unpin(pinned.receipt)
        for session in list(self.oracle.sessions):
            self.index.sessions.close(session)
        assert all(not node.refs.any() for node in self.index._occupancy.nodes() if node.refs is not None)
        for tier in self.tiers:
            self.free(self.index.drop(tier).freed, tier)
        assert all(pool.n_free == pool.n_slots for pool in self.pools.values())
        assert not self.index._tree.roots
        found = audit(self.index, self.pools)
        assert not found, found


TestModel = IndexMachine.TestCase
TestModel.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
