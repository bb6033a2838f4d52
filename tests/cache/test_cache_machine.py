"""Random lives of an engine over a misbehaving daemon: after every step all books balance, and every page
that a running request reads has the bytes that recomputation would have stored."""

from __future__ import annotations

import numpy as np
import pytest
from engine import Engine, Running, tokens_of
from fake_lower import GARBAGE, PAGE_TOKENS, FakeTransfer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hicache.cache import WritePolicy
from hicache.client import Outcome

PAGES = st.lists(st.integers(1, 2), max_size=6)
TENANTS = st.sampled_from(["", "", "x"])
MANY = st.integers(0, 1000)


def hang(transfer: FakeTransfer) -> None:
    """The deadline passes."""


ENDS = st.sampled_from(
    [FakeTransfer.succeed, FakeTransfer.succeed, FakeTransfer.fail, FakeTransfer.lose, hang]
)


class EngineLife(RuleBasedStateMachine):
    sizes: dict[str, int]

    @initialize(
        share=st.sampled_from([0.25, 0.5, 1.0]),
        policy=st.sampled_from([*WritePolicy, WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH]),
    )
    def start(self, share: float, policy: WritePolicy) -> None:
        self.engine = Engine(share=share, policy=policy, **self.sizes)
        self.lower = self.engine.lower
        self.queued: list[tuple[str, list[int], str]] = []
        self.named = 0

    def running(self, n: int) -> Running:
        running = self.engine.running[n % len(self.engine.running)]
        if running.request.loading:
            self.engine.take_loaded(running)
        return running

    # ---- requests

    @rule(pages=PAGES, tail=st.integers(0, 1), salt=TENANTS, private=st.booleans())
    def begin(self, pages: list[int], tail: int, salt: str, private: bool) -> None:
        self._begin("", pages, tail, salt, private=private and "mamba" in self.sizes)

    @rule(pages=PAGES, salt=TENANTS, private=st.booleans())
    def begin_without_waiting(self, pages: list[int], salt: str, private: bool) -> None:
        private = private and "mamba" in self.sizes
        running = self.engine.begin(tokens_of(*pages), salt=salt, private=private, wait=False)
        if running is not None and running.request.loading is None:
            assert sum(running.request.hit_pages.values()) == running.request.boundary

    @precondition(lambda self: any(r.request.loading for r in self.engine.running))
    @rule(n=MANY)
    def take_what_was_loaded(self, n: int) -> None:
        loading = [running for running in self.engine.running if running.request.loading]
        running = loading[n % len(loading)]
        before = running.request.boundary
        self.engine.take_loaded(running)
        assert running.request.boundary >= before
        assert sum(running.request.hit_pages.values()) == running.request.boundary

    @rule(pages=PAGES, salt=TENANTS)
    def queue(self, pages: list[int], salt: str) -> None:
        self.named += 1
        self.queued.append((f"q{self.named}", pages, salt))
        self.engine.cache.prefetch(f"q{self.named}", tokens_of(*pages), salt=salt)

    @precondition(lambda self: self.queued)
    @rule(cancel=st.booleans())
    def leave_the_queue(self, cancel: bool) -> None:
        name, pages, salt = self.queued.pop(0)
        if cancel:
            self.engine.cache.cancel(name)
        else:
            self._begin(name, pages, 1, salt, private=False)

    def _begin(self, name: str, pages: list[int], tail: int, salt: str, *, private: bool) -> None:
        n_found, n_loads = len(self.lower.found), len(self.lower.loads)
        running = self.engine.begin(tokens_of(*pages, tail=tail), salt=salt, private=private, name=name)
        if running is None:
            return
        request = running.request
        assert sum(request.hit_pages.values()) == request.boundary
        assert request.boundary * PAGE_TOKENS < max(1, len(running.prompt.tokens))
        if len(self.lower.found) == n_found:
            return
        expected = self.lower.found[-1].boundary
        loads = self.lower.loads[n_loads:]
        no_room = self.lower.found[-1].lease is not None and not loads
        if no_room or any(load.outcome is not Outcome.OK for load in loads):
            assert request.boundary <= expected
        else:
            assert request.boundary == expected, "less than L1 and the host can serve"

    @rule(pages=PAGES, salt=TENANTS)
    def have_in_the_host_only(self, pages: list[int], salt: str) -> None:
        """As far as it fits."""
        temper, ready = (self.lower.on_load, self.lower.on_backup), self.lower.ready
        self.lower.on_load = self.lower.on_backup = FakeTransfer.succeed
        self.lower.ready = True
        running = self.engine.begin(tokens_of(*pages), salt=salt)
        assert running is not None
        for to in range(running.request.n_pages + 1, len(pages) + 1):
            self.engine.compute(running, to)
        self.engine.finish(running)
        self.engine.drop_l1()
        (self.lower.on_load, self.lower.on_backup), self.lower.ready = temper, ready

    @precondition(lambda self: self.engine.running)
    @rule(n=MANY, pages=st.integers(1, 3), checkpoint=st.booleans())
    def compute(self, n: int, pages: int, checkpoint: bool) -> None:
        running = self.running(n)
        whole = len(running.prompt.tokens) // PAGE_TOKENS
        to = min(whole, running.request.n_pages + pages)
        if to > running.request.n_pages:
            self.engine.compute(running, to, checkpoint=checkpoint)

    @precondition(lambda self: self.engine.running)
    @rule(n=MANY, beyond=st.integers(0, 2))
    def decode_on(self, n: int, beyond: int) -> None:
        running = self.running(n)
        self.engine.cache.advance(running.request, running.request.n_pages + beyond)
        self.engine.check()

    @precondition(lambda self: self.engine.running)
    @rule(n=MANY)
    def finish(self, n: int) -> None:
        self.engine.finish(self.running(n))

    @precondition(lambda self: self.engine.running)
    @rule(n=MANY)
    def abort(self, n: int) -> None:
        self.engine.abort(self.running(n))

    # ---- memory pressure

    @rule(which=MANY, n=st.integers(1, 4))
    def take_slots(self, which: int, n: int) -> None:
        """And scribble on them: they are the engine's alone."""
        name = sorted(self.sizes)[which % len(self.sizes)]
        slots = self.engine.cache.alloc(name, n)
        if slots is not None:
            self.engine.memory[name][slots] = GARBAGE
            self.engine.mine[name].extend(slots.tolist())
        self.engine.check()

    @rule(which=MANY)
    def give_slots_back(self, which: int) -> None:
        name = sorted(self.sizes)[which % len(self.sizes)]
        slots = np.array(self.engine.mine[name], np.int32)
        self.engine.mine[name].clear()
        self.engine.cache.free(name, slots)
        self.engine.check()

    @rule(which=MANY, n=st.integers(1, 6))
    def evict(self, which: int, n: int) -> None:
        name = sorted(self.sizes)[which % len(self.sizes)]
        free = self.engine.free_slots()[name]
        self.engine.cache.poll()
        free = self.engine.free_slots()[name]
        assert self.engine.cache.evict(name, n) == self.engine.free_slots()[name] - free
        self.engine.check()

    # ---- the daemon

    @rule(load=ENDS, backup=ENDS)
    def temper(self, load, backup) -> None:
        self.lower.on_load, self.lower.on_backup = load, backup

    @rule(n=MANY, well=st.booleans())
    def end_a_transfer(self, n: int, well: bool) -> None:
        unsettled = self.lower.unsettled()
        if unsettled:
            transfer = unsettled[n % len(unsettled)]
            if transfer.outcome is Outcome.FAILED:
                transfer.settle()
            elif well:
                transfer.succeed()
            else:
                transfer.fail()
            self.engine.cache.poll()
            self.engine.check()

    @rule()
    def lose_the_connection(self) -> None:
        self.lower.ready = False
        for transfer in self.lower.unsettled():
            transfer.lose()
        self.engine.cache.poll()
        self.engine.check()

    @rule()
    def be_there(self) -> None:
        self.lower.ready = True

    @rule()
    def restart_the_daemon(self) -> None:
        self.lower.restart()
        self.lower.ready = True
        self.engine.cache.poll()
        self.engine.check()

    @rule(keep=MANY, store=st.booleans())
    def lose_host_memory(self, keep: int, store: bool) -> None:
        for n, place in enumerate(list(self.lower.host)):
            if (n * 7919 + keep) % 3 == 0:
                frame = self.lower.host.pop(place)
                if store:
                    self.lower.stored[place] = frame

    @rule(frames=st.integers(0, 12))
    def have_so_much_room(self, frames: int) -> None:
        self.lower.room = dict.fromkeys(self.sizes, frames)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for running in list(engine.running):
            engine.abort(running)
        for name, _, _ in self.queued:
            engine.cache.cancel(name)
        for name, slots in engine.mine.items():
            engine.cache.free(name, np.array(slots, np.int32))
        self.lower.on_backup = FakeTransfer.succeed
        self.lower.ready = True
        for _ in range(100):
            for transfer in self.lower.unsettled():
                transfer.lose()
                transfer.settle()
            if not engine.cache.poll():
                break
        assert self.lower.leases == {}
        engine.drop_l1()
        engine.drop_l1()
        assert engine.free_slots() == self.sizes


SIZES = [
    {"full": 10},
    {"full": 12, "swa": 7},
    {"full": 12, "mamba": 3},
    {"full": 14, "swa": 9, "mamba": 4},
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "+".join(sizes))
def test_every_life_of_an_engine(sizes: dict[str, int]) -> None:
    machine = type("EngineLifeOf" + "And".join(sizes), (EngineLife,), {"sizes": sizes})
    case = machine.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    case().runTest()
