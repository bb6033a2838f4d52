"""The stack: several storage tiers in order, as one. Who is asked, in which order, and who not now.

Owns the tiers of one daemon and their breakers. Reads come from the first that has a frame; a tier that
is in trouble is passed over. Comes and goes at run time: nothing that the index knows depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from controller.storage.breaker import Breaker
from controller.storage.tier import StorageTier, Transfer
from storage_backends.base import Item, Outcome


@dataclass(frozen=True, kw_only=True)
class TierPolicy:
    """What one tier of the stack is used for."""

    read: bool = True
    write: bool = True


class Member:
    """One tier in the stack, behind its breaker."""

    def __init__(self, tier: StorageTier, policy: TierPolicy) -> None:
        self.tier = tier
        self.policy = policy
        self.breaker = Breaker(lambda: asyncio.get_running_loop().time())
        self.leaving = False
        self._in_flight: set[asyncio.Future[None]] = set()
        """Batches that are being asked, and bytes that may still move after their answer."""

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def problem(self) -> str:
        if self.tier.problem:
            return self.tier.problem
        state = self.breaker.state
        return "" if state.value == "closed" else f"the circuit breaker is {state.value}: it does not answer"

    async def contains(self, keys: Sequence[str], timeout_s: float) -> list[Outcome]:
        return await self._guarded(len(keys), lambda: self.tier.contains(keys, timeout_s=timeout_s))

    async def delete(self, keys: Sequence[str], timeout_s: float) -> list[Outcome]:
        return await self._guarded(len(keys), lambda: self.tier.delete(keys, timeout_s=timeout_s))

    async def move(self, verb: str, items: Sequence[Item], timeout_s: float) -> Transfer:
        """Read or write a batch."""
        settled: asyncio.Future[None] | None = None

        async def ask() -> list[Outcome]:
            nonlocal settled
            call = self.tier.read if verb == "read" else self.tier.write
            transfer = await call(items, timeout_s=timeout_s)
            settled = transfer.settled
            self._running(settled)
            return transfer.outcomes

        outcomes = await self._guarded(len(items), ask)
        return Transfer(outcomes, settled or _settled())

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing of this tier is in flight; False when the time was too short."""
        ends_s = asyncio.get_running_loop().time() + timeout_s
        while self._in_flight and (left_s := ends_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(self._in_flight), timeout=left_s)
        return not self._in_flight

    def _running(self, until: asyncio.Future[None]) -> None:
        if not until.done():
            self._in_flight.add(until)
            until.add_done_callback(self._in_flight.discard)

    async def _guarded(self, n_items: int, ask: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome]:
        if not n_items or self.leaving or not self.breaker.allows():
            return [Outcome.FAILED] * n_items
        outcomes = [Outcome.FAILED] * n_items
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running(asked)
        try:
            outcomes = await ask()
        finally:
            asked.set_result(None)
            if all(outcome is Outcome.FAILED for outcome in outcomes):
                self.breaker.failed()
            else:
                self.breaker.succeeded()
        return outcomes


class StorageStack:
    """The storage of one daemon: any number of tiers, also none."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def find(self, name: str) -> Member | None:
        return self._members.get(name)

    def add(self, tier: StorageTier, policy: TierPolicy) -> Member:
        """Take a started tier in, behind those that are there. Its name must be free."""
        if tier.name in self._members:
            raise ValueError(f"a storage tier {tier.name!r} is there already")
        member = self._members[tier.name] = Member(tier, policy)
        return member

    def remove(self, name: str) -> Member:
        """Ask this tier nothing more. What is in flight goes on: wait for `Member.idle`, or stop it."""
        member = self._members.pop(name)
        member.leaving = True
        return member

    async def contains(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        """OK where some tier has it, FAILED where none has it and one could not tell, else ABSENT."""
        members = [member for member in self if member.policy.read]
        asked = await asyncio.gather(*(member.contains(keys, timeout_s) for member in members))
        return [_best(answers) for answers in zip(*asked, strict=True)] if asked else _all_absent(keys)

    async def read(self, items: Sequence[Item], *, timeout_s: float) -> Transfer:
        """Fill each item's range from the first tier that has it whole. `settled` covers all tries."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        outcomes = [Outcome.ABSENT] * len(items)
        left = list(range(len(items)))
        pending: list[asyncio.Future[None]] = []
        for member in [member for member in self if member.policy.read]:
            if not left or loop.time() >= ends_s:
                break
            transfer = await member.move("read", [items[i] for i in left], ends_s - loop.time())
            pending.append(transfer.settled)
            for i, outcome in zip(left, transfer.outcomes, strict=True):
                outcomes[i] = _best((outcomes[i], outcome))
            left = [i for i in left if outcomes[i] is not Outcome.OK]
            if left and not transfer.settled.done():
                break  # a late byte of this tier must not mix with the next one's
        return Transfer(outcomes, _all_settled(pending))

    async def delete(self, keys: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        """From every tier. OK where it was in one and is in none now."""
        asked = await asyncio.gather(*(member.delete(keys, timeout_s) for member in self))
        return [_gone(answers) for answers in zip(*asked, strict=True)] if asked else _all_absent(keys)


_WORTH = {Outcome.OK: 4, Outcome.WRONG_SIZE: 3, Outcome.FAILED: 2, Outcome.FULL: 1, Outcome.ABSENT: 0}


def _best(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=_WORTH.__getitem__)


def _gone(outcomes: Sequence[Outcome]) -> Outcome:
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    return _best(outcomes)


def _all_absent(keys: Sequence[str]) -> list[Outcome]:
    return [Outcome.ABSENT] * len(keys)


def _settled() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def _all_settled(pending: Sequence[asyncio.Future[None]]) -> asyncio.Future[None]:
    """Done when all of them are."""
    waiting = {future for future in pending if not future.done()}
    done = asyncio.get_running_loop().create_future()
    if not waiting:
        done.set_result(None)
        return done

    def one_done(future: asyncio.Future[None]) -> None:
        waiting.discard(future)
        if not waiting and not done.done():
            done.set_result(None)

    for future in list(waiting):
        future.add_done_callback(one_done)
    return done
