"""The journal: replaying what it was told gives exactly what is READY in each tier, at every moment."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.core.coverage import Checkpoint, Component, SlidingWindow, WholePath
from hicache.core.identity import Namespace, page_hashes
from hicache.core.journal import Move
from hicache.core.pins import Receipt
from hicache.core.pools import SlotPool
from hicache.core.reservations import Reservation
from hicache.core.tree import Index
from hicache.core.words import NO_SLOT, Residency, SlotArray, Tier, TokenArray

COMPONENTS = (
    Component("full", WholePath()),
    Component("swa", SlidingWindow(2)),
    Component("mamba", Checkpoint()),
)
TIERS = (Tier.HOST, Tier.STORAGE)
NAMES = [component.name for component in COMPONENTS]

Content = dict[tuple[Tier, str], dict[bytes, tuple[int, bytes]]]
"""Per tier and component: hash -> page number and parent's hash."""


class Replay:
    """A router that believes the journal."""

    def __init__(self) -> None:
        self.content: Content = {(tier, name): {} for tier in TIERS for name in NAMES}
        self.moves: list[Move] = []

    def moved(self, move: Move) -> None:
        self.moves.append(move)
        here = self.content[move.tier, move.component]
        other = self.content[TIERS[1 - TIERS.index(move.tier)], move.component]
        assert (np.diff(move.pages) > 0).all()
        for page, own, parent, elsewhere in zip(
            move.pages.tolist(), move.hashes, move.parents, move.elsewhere.tolist(), strict=True
        ):
            assert (own.tobytes() in other) == elsewhere
            if move.ready:
                assert own.tobytes() not in here, "stored twice"
                here[own.tobytes()] = page, parent.tobytes()
            else:
                assert here.pop(own.tobytes())[0] == page, "removed what was not there"


class Machine:
    """An index with its pools, and the router beside it."""

    def __init__(self) -> None:
        self.replay = Replay()
        self.index = Index(1, COMPONENTS, TIERS, journal=self.replay)
        self.pools = {name: SlotPool(512) for name in NAMES}
        self.reservations: list[Reservation] = []
        self.pins: list[Receipt] = []
        self.paths: set[tuple[str, str]] = set()

    def namespace(self, salt: str) -> Namespace:
        return Namespace("m", "r", b"layout", 1, salt=salt)

    def tokens(self, pages: str) -> TokenArray:
        return np.array([ord(letter) for letter in pages], dtype=np.int32)

    def step(self, data: st.DataObject) -> None:
        pages, salt = (
            data.draw(st.text(alphabet="ab", min_size=1, max_size=7)),
            data.draw(st.sampled_from("xy")),
        )
        self.paths.add((salt, pages))
        verbs = (self.insert, self.reserve, self.end, self.know, self.evict, self.pin, self.unpin, self.drop)
        data.draw(st.sampled_from(verbs))(data, salt, pages)

    def some(self, data: st.DataObject, pages: str) -> list[int]:
        return sorted(data.draw(st.sets(st.integers(0, len(pages) - 1))))

    def insert(self, data: st.DataObject, salt: str, pages: str) -> None:
        offered = {}
        for name in NAMES:
            wanted = self.some(data, pages)
            offered[name] = np.full(len(pages), NO_SLOT, dtype=np.int32)
            offered[name][wanted] = self.take(name, len(wanted))
        done = self.index.insert(self.namespace(salt), self.tokens(pages), offered, tier=Tier.HOST)
        self.give(done.redundant)

    def reserve(self, data: st.DataObject, salt: str, pages: str) -> None:
        cursor = self.index.match(self.namespace(salt), self.tokens(pages)).cursor
        placements = {}
        for name in NAMES:
            held = self.index.residency(cursor, name, Tier.HOST, 0, cursor.boundary)
            free = [p for p in self.some(data, pages) if p >= len(held) or held[p] == Residency.ABSENT]
            if free:
                placements[name] = np.array(free, dtype=np.int32), self.take(name, len(free))
        if placements:
            reserved = self.index.reserve(
                self.namespace(salt), self.tokens(pages), placements, tier=Tier.HOST
            )
            self.reservations.append(reserved)

    def end(self, data: st.DataObject, salt: str, pages: str) -> None:
        if self.reservations:
            one = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
            self.give(self.index.publish(one) if data.draw(st.booleans()) else self.index.withdraw(one))

    def know(self, data: st.DataObject, salt: str, pages: str) -> None:
        cursor = self.index.match(self.namespace(salt), self.tokens(pages)).cursor
        if cursor.boundary:
            some = np.array(self.some(data, pages[: cursor.boundary]), dtype=np.int32)
            call = self.index.mark_stored if data.draw(st.booleans()) else self.index.forget_stored
            call(cursor, data.draw(st.sampled_from(NAMES)), some)

    def evict(self, data: st.DataObject, salt: str, pages: str) -> None:
        tier = data.draw(st.sampled_from(TIERS))
        done = self.index.evict(data.draw(st.sampled_from(NAMES)), tier, data.draw(st.integers(1, 5)))
        self.give(done.freed)

    def drop(self, data: st.DataObject, salt: str, pages: str) -> None:
        self.give(self.index.drop(data.draw(st.sampled_from(TIERS))).freed)

    def pin(self, data: st.DataObject, salt: str, pages: str) -> None:
        match = self.index.match(self.namespace(salt), self.tokens(pages))
        self.pins.append(self.index.pin(match.cursor, match.n_pages, tier=Tier.HOST))

    def unpin(self, data: st.DataObject, salt: str, pages: str) -> None:
        if self.pins:
            self.index.unpin(self.pins.pop())

    def take(self, name: str, n: int) -> SlotArray:
        slots = self.pools[name].alloc(n)
        assert slots is not None
        return slots

    def give(self, freed: dict[str, SlotArray]) -> None:
        for name, slots in freed.items():
            self.pools[name].free(slots)

    def content(self) -> Content:
        """What is READY, found by looking along every prompt ever used."""
        found: Content = {(tier, name): {} for tier in TIERS for name in NAMES}
        for salt, pages in self.paths:
            namespace, tokens = self.namespace(salt), self.tokens(pages)
            cursor = self.index.match(namespace, tokens).cursor
            chain = [namespace.seed(), *(row.tobytes() for row in page_hashes(namespace.seed(), tokens, 1))]
            for (tier, name), here in found.items():
                held = self.index.residency(cursor, name, tier, 0, cursor.boundary)
                for page in np.flatnonzero(held == Residency.READY).tolist():
                    here[chain[page + 1]] = page, chain[page]
        return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_replaying_gives_exactly_what_each_tier_holds(data: st.DataObject) -> None:
    """OBS-05, KEY-08: after every step, splits and evictions included; parents' chain is right."""
    machine = Machine()
    for _ in range(data.draw(st.integers(1, 25))):
        machine.step(data)
        assert machine.replay.content == machine.content()


def test_repeated_content_has_ids_of_its_own_and_a_parent_chain_across_splits() -> None:
    """KEY-08: a sequence of 6 identical pages under two salts: 12 different ids."""
    machine = Machine()
    for salt in "xy":
        for pages in ("aaaaaa", "aaab"):
            offered = {name: machine.take(name, len(pages)) for name in NAMES}
            done = machine.index.insert(
                machine.namespace(salt), machine.tokens(pages), offered, tier=Tier.HOST
            )
            machine.give(done.redundant)
    chains = [move for move in machine.replay.moves if move.component == "full"]
    whole = [move for move in chains if len(move.pages) == 6]
    assert len({row.tobytes() for move in whole for row in move.hashes}) == 12
    for move in whole:
        assert (move.parents[1:] == move.hashes[:-1]).all()
        assert move.parents[0].tobytes() == move.namespace.seed()
    branches = [move for move in chains if len(move.pages) == 1]
    assert [move.pages.tolist() for move in branches] == [[3], [3]]
    assert [move.parents[0].tobytes() for move in branches] == [move.hashes[2].tobytes() for move in whole]
