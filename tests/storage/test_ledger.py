"""Ledger against a plain list of (name, bytes, stuck): sums, order of use, and what steps aside."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage_backends.ledger import Ledger

NAMES = st.sampled_from("abcdef")
SIZES = st.integers(0, 100)
CAPACITY_BYTES = 200


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY_BYTES)
        self.fresh: list[tuple[str, int]] = []
        self.stuck: list[tuple[str, int]] = []

    @rule(name=NAMES, nbytes=SIZES)
    def add(self, name: str, nbytes: int) -> None:
        if name in dict(self.stuck):
            self.stuck = [(other, nbytes if other == name else size) for other, size in self.stuck]
        else:
            self.fresh = [*(entry for entry in self.fresh if entry[0] != name), (name, nbytes)]
        self.ledger.add(name, nbytes)

    @rule(name=NAMES, nbytes=SIZES)
    def touch(self, name: str, nbytes: int) -> None:
        known = name in dict(self.fresh) or name in dict(self.stuck)
        assert self.ledger.touch(name, nbytes) == known
        if known:
            self.add(name, nbytes)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.fresh = [entry for entry in self.fresh if entry[0] != name]
        self.stuck = [entry for entry in self.stuck if entry[0] != name]
        self.ledger.forget(name)

    @rule()
    def oldest_steps_aside(self) -> None:
        oldest = self.ledger.oldest()
        assert oldest == (self.fresh[0] if self.fresh else None)
        if oldest is not None:
            self.ledger.set_aside(oldest[0])
            self.stuck.append(self.fresh.pop(0))

    @rule()
    def longest_stuck_is_tried_again(self) -> None:
        name = self.ledger.longest_stuck()
        assert name == (self.stuck[0][0] if self.stuck else None)
        if name is not None:
            self.ledger.set_aside(name)
            self.stuck.append(self.stuck.pop(0))

    @rule(objects=st.dictionaries(NAMES, SIZES))
    def start_again(self, objects: dict[str, int]) -> None:
        self.ledger.start_again(objects.items())
        self.fresh, self.stuck = list(objects.items()), []

    @invariant()
    def sums_agree(self) -> None:
        fresh_bytes = sum(nbytes for _, nbytes in self.fresh)
        used_bytes = fresh_bytes + sum(nbytes for _, nbytes in self.stuck)
        assert self.ledger.evictable_bytes == fresh_bytes
        assert self.ledger.used_bytes == used_bytes
        assert self.ledger.n_objects == len(self.fresh) + len(self.stuck)
        assert self.ledger.excess_bytes(7) == used_bytes + 7 - CAPACITY_BYTES


TestLedger = LedgerMachine.TestCase
