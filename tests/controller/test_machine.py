"""Random lives of the whole controller: copies that fail, storage in every mood, engines that vanish.

After every step `audit()` is empty; whatever is loaded is compared byte by byte with what its tokens say;
what was acknowledged is found. Prompts branch often: a page is four equal tokens, 0 or 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.controller import HybridCacheController
from controller.memory.slab import HostSlab
from controller.requests import Busy, Lookup, Prefetch, PrefetchPolicy, TransferFailed
from controller.settings import ControllerSettings
from controller.storage import TierPolicy
from controller.storage.breaker import BreakerState
from controller.transfers.scheduler import TransferScheduler
from hicache.core.coverage import joint_boundary
from hicache.core.words import TokenArray
from tests.controller.doubles import Mood, ScriptedCopies, ScriptedTier
from tests.controller.rig import TaggedEngine
from tests.tagged import hashes_of

T = TypeVar("T")
STREAMS = ([0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1])
PAGES = st.builds(lambda stream, n: stream[:n], st.sampled_from(STREAMS), st.integers(2, 7))
"""Prompts that share their beginnings and end anywhere."""
SALTS = st.sampled_from(["", "tenant"])


def tokens_of(pages: list[int], tail: int = 1) -> TokenArray:
    return np.concatenate([np.repeat(np.array(pages, dtype=np.int32), 4), np.full(tail, 9, dtype=np.int32)])


class ControllerMachine(RuleBasedStateMachine):
    """`self.acked` holds, per component, the hashes of pages that a backup has acknowledged since the last
    flush or restart; host memory is large enough that nothing is evicted."""

    capacity_bytes = 8 << 20
    extent_bytes: int | None = None
    exact = True
    staging = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    def call(self, decide: Callable[[], T]) -> T:
        """A plain call, made on the loop as the service makes it."""

        async def on_loop() -> T:
            return decide()

        return self.run(on_loop())

    @initialize()
    def begin(self) -> None:
        self.copies = ScriptedCopies()
        self.slab = HostSlab(self.capacity_bytes, extent_bytes=self.extent_bytes)
        self.scheduler = TransferScheduler(self.copies, threads=2)
        self.tier = ScriptedTier(self.slab)
        self.acked: dict[str, set[bytes]] = {name: set() for name in ("full", "swa", "mamba")}
        self.n_engines = 0
        self.corrupted = False
        self.leases: list[str] = []

        async def start() -> HybridCacheController:
            quick = ControllerSettings(
                staging=self.staging,
                copy_timeout_s=0.5,
                storage_timeout_s=0.05,
                prefetch_max_s=0.2,
                write_attempts=2,
                storage_batch_bytes=1024,
            )
            controller = HybridCacheController(quick, self.slab, self.scheduler)
            await controller.start()
            controller.storage.attach(self.tier, TierPolicy())
            return controller

        self.controller = self.run(start())
        self.attach()

    def attach(self) -> None:
        self.n_engines += 1
        name = f"engine {self.n_engines}"
        self.engine = self.call(lambda: TaggedEngine(self.controller, name))

    def expected(self, tokens: TokenArray, salt: str) -> int:
        """The deepest boundary that acknowledged pages serve."""
        hashes = hashes_of(self.engine.namespace(salt), tokens)
        layout = self.engine.spec.layout
        rows = [
            np.array([one in self.acked[component.name] for one in hashes], dtype=bool)
            for component in layout.index_components()
        ]
        return joint_boundary([c.coverage for c in layout.index_components()], rows, len(hashes))

    @rule(
        pages=PAGES,
        salt=SALTS,
        holes=st.one_of(st.just(set()), st.sets(st.integers(0, 6), max_size=2)),
        marks=st.sets(st.integers(1, 7)),
    )
    def back_up(self, pages: list[int], salt: str, holes: set[int], marks: set[int]) -> None:
        """FULL with holes, SWA of all pages but these, a checkpoint at the end and some others."""
        tokens, n_pages = tokens_of(pages), len(pages)
        offered = {
            "full": [page for page in range(n_pages) if page not in holes],
            "swa": [page for page in range(n_pages) if page + 1 not in holes],
            "mamba": sorted({mark - 1 for mark in marks | {n_pages} if mark <= n_pages}),
        }
        hashes = hashes_of(self.engine.namespace(salt), tokens)
        known = [one in self.acked["full"] for one in hashes]
        try:
            outcome = self.run(self.engine.backup(tokens, offered, salt))
        except TransferFailed:
            assert self.copies.broken
            return
        except Busy:
            assert self.tier.mood is Mood.HANGING  # a hung read of the same pages must end first
            return
        reach = 0
        while reach < n_pages and (known[reach] or reach in offered["full"]):
            reach += 1
        for name, wanted in offered.items():
            taken = {hashes[page] for page in wanted if page < reach}
            self.acked[name] |= taken
            one = outcome[name]
            if self.exact:
                assert one.stored_pages + one.present_pages >= len(taken)
                assert one.stored_pages + one.present_pages + one.refused_pages == len(wanted)

    @rule(pages=PAGES, salt=SALTS)
    def look_up(self, pages: list[int], salt: str) -> None:
        """Read your writes; and leases that are forgotten."""
        tokens = tokens_of(pages)
        found = self.call(lambda: self.engine.lookup(tokens, salt))
        if self.exact:
            assert found.boundary >= self.expected(tokens, salt)
        if found.lease_id:
            self.leases.append(found.lease_id)

    @rule(pages=PAGES, salt=SALTS)
    def load(self, pages: list[int], salt: str) -> None:
        """Every byte is right, or the load fails as a whole and says so."""
        tokens = tokens_of(pages)
        expected = self.expected(tokens, salt)
        try:
            boundary = self.run(self.engine.load_and_check(tokens, salt))
        except TransferFailed:
            assert self.copies.broken
            self.start_over()
            return
        assert not self.exact or boundary >= expected

    @rule(pages=PAGES, salt=SALTS)
    def back_up_in_vain(self, pages: list[int], salt: str) -> None:
        """What could not be copied is never shown, though its pages were reserved."""
        self.copies.broken = True
        self.back_up(pages, salt, set(), {1, 2, 3})
        self.copies.broken = False
        self.load(pages, salt)

    @rule(pages=PAGES, salt=SALTS, mood=st.sampled_from(Mood))
    def from_storage(self, pages: list[int], salt: str, mood: Mood) -> None:
        """Stored in peace, lost in host memory, read in some mood, loaded."""
        self.copies.broken = False
        self.change_mood(Mood.SOUND)
        self.back_up(pages, salt, set(), set())
        asked = self.storage_settles()
        self.flush()
        self.change_mood(mood)
        self.prefetch(pages, salt, PrefetchPolicy.TIMEOUT, False, 0)
        self.load(pages, salt)
        if mood is Mood.SOUND and self.exact and asked:
            assert self.call(lambda: self.engine.lookup(tokens_of(pages), salt)).boundary == len(pages)

    def storage_settles(self) -> bool:
        """Wait until everything is written; False while the breaker keeps storage from being asked."""
        member = self.controller.storage.stack.find("scripted")
        assert member is not None

        async def written() -> bool:
            while member.breaker.state is BreakerState.CLOSED:
                if not self.controller.status().backends[0].queued_writes:
                    return True
                await asyncio.sleep(0.005)
            return False

        return self.run(written())

    @rule(pages=PAGES, others=st.lists(PAGES, min_size=1, max_size=4), salt=SALTS)
    def late_bytes(self, pages: list[int], others: list[list[int]], salt: str) -> None:
        """Bytes of a hung read land after others have taken all the room they could get."""
        self.from_storage(pages, salt, Mood.HANGING)
        for other in others:
            self.back_up(other, "tenant", set(), {1, 2, 3, 4})
        self.change_mood(Mood.SOUND)
        for other in others:
            self.load(other, "tenant")

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        lease_id = self.leases.pop()
        self.call(lambda: self.controller.release(self.engine.engine_id, lease_id))

    @rule(
        pages=PAGES,
        salt=SALTS,
        policy=st.sampled_from(PrefetchPolicy),
        cancel=st.booleans(),
        naps=st.integers(0, 30),
    )
    def prefetch(self, pages: list[int], salt: str, policy: PrefetchPolicy, cancel: bool, naps: int) -> None:
        tokens = tokens_of(pages)

        async def ask() -> int:
            request = Prefetch(Lookup(self.engine.prompt(tokens, salt)), policy, 0.1)
            prefetch_id = self.controller.prefetch(request)
            for _ in range(naps):
                await asyncio.sleep(0)
            if cancel and self.tier.mood is not Mood.HANGING:  # else it waits for the last byte, as it must
                return (await self.controller.cancel_prefetch(self.engine.engine_id, prefetch_id)).boundary
            return (await self.controller.wait_prefetch(self.engine.engine_id, prefetch_id)).boundary

        assert 0 <= self.run(ask()) <= len(pages)

    @rule(mood=st.sampled_from(Mood))
    def change_mood(self, mood: Mood) -> None:
        self.corrupted = self.corrupted or mood is Mood.CORRUPT
        self.call(lambda: self.tier.be(mood))

    @rule(broken=st.booleans())
    def break_copies(self, broken: bool) -> None:
        self.copies.broken = broken

    @rule()
    def flush(self) -> None:
        self.run(asyncio.sleep(0.01))
        self.call(self.controller.flush)
        for pages in self.acked.values():
            pages.clear()

    @rule()
    def start_over(self) -> None:
        """The engine vanishes with its leases and prefetches, and another comes."""
        self.call(lambda: self.tier.be(Mood.SOUND))
        self.run(self.controller.detach(self.engine.engine_id))
        self.leases.clear()
        self.attach()

    @rule()
    def let_storage_work(self) -> None:
        self.run(asyncio.sleep(0.02))

    @invariant()
    def audited(self) -> None:
        if hasattr(self, "engine"):
            assert self.controller.audit() == []
            assert self.controller.counters.internal_errors == 0
            assert self.corrupted or not self.controller.counters.prefetch_corrupt_pages
            problems = self.call(self.controller.status).problems
            assert not [problem for problem in problems if "died" in problem]

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.start_over()
            self.run(asyncio.sleep(0.05))
            self.run(self.controller.detach(self.engine.engine_id))
            self.run(self.controller.stop(1.0))
            self.run(asyncio.sleep(0))
            self.call(self.controller.flush)
            assert self.call(self.controller.status).host_used_bytes == 0
            assert self.controller.audit() == []
            self.scheduler.close()
            self.slab.close()
        self.loop.close()


class TightMachine(ControllerMachine):
    """WRITE-04: the same with so little host memory that everything is evicted all the time: boundaries are
    what they are, but bytes are right and nothing leaks, though frames move among extents of 4 or 8."""

    capacity_bytes = 16 << 10
    extent_bytes = 2 << 10
    exact = False


class StagingMachine(ControllerMachine):
    """Direct mode over storage in every mood: nothing is a hit that is not right, nothing leaks, and at the
    end the ring is empty."""

    capacity_bytes = 16 << 10
    extent_bytes = 2 << 10
    exact = False
    staging = True


SETTINGS = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestController = ControllerMachine.TestCase
TestController.settings = SETTINGS
TestTight = TightMachine.TestCase
TestTight.settings = SETTINGS
TestStaging = StagingMachine.TestCase
TestStaging.settings = SETTINGS
