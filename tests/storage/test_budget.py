"""ByteBudget: never more than the total, first come first served, no wait beyond a deadline."""

from __future__ import annotations

import asyncio
import time

import pytest

from controller.storage.budget import ByteBudget
from tests.storage.conftest import DEADLINE_S, eventually


def soon() -> float:
    return time.monotonic() + DEADLINE_S


async def test_what_fits_is_taken_at_once() -> None:
    budget = ByteBudget(10)
    assert await budget.take(4, soon())
    assert await budget.take(6, soon())
    assert budget.taken_bytes == 10


async def test_who_waits_is_served_in_order_and_smaller_ones_do_not_overtake() -> None:
    budget = ByteBudget(10)
    await budget.take(8, soon())
    served: list[str] = []

    async def take(name: str, nbytes: int) -> None:
        assert await budget.take(nbytes, soon())
        served.append(name)

    large = asyncio.create_task(take("large", 9))
    small = asyncio.create_task(take("small", 1))
    await asyncio.sleep(0)
    assert served == []
    budget.give_back(8)
    await asyncio.gather(large, small)
    assert served == ["large", "small"]
    assert budget.taken_bytes == 10


async def test_who_gives_up_at_its_deadline_takes_nothing_and_lets_the_next_go() -> None:
    budget = ByteBudget(10)
    await budget.take(8, soon())
    late = asyncio.create_task(budget.take(9, time.monotonic() + 0.01))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(2, soon()))
    assert not await late
    assert await small
    assert budget.taken_bytes == 10


async def test_a_passed_deadline_still_takes_what_is_free() -> None:
    budget = ByteBudget(10)
    assert await budget.take(10, time.monotonic() - 1)
    assert not await budget.take(1, time.monotonic() - 1)


@pytest.mark.parametrize("granted_meanwhile", [False, True])
async def test_who_is_cancelled_holds_nothing(granted_meanwhile: bool) -> None:
    budget = ByteBudget(10)
    await budget.take(10, soon())
    waiting = asyncio.create_task(budget.take(5, soon()))
    await asyncio.sleep(0)
    if granted_meanwhile:
        budget.give_back(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.taken_bytes == (0 if granted_meanwhile else 10)


async def test_a_demand_above_the_total_goes_through_alone() -> None:
    budget = ByteBudget(10)
    await budget.take(1, soon())
    huge = asyncio.create_task(budget.take(1000, soon()))
    await asyncio.sleep(0)
    assert not huge.done()
    budget.give_back(1)
    assert await huge
    next_one = asyncio.create_task(budget.take(1, soon()))
    await asyncio.sleep(0)
    assert not next_one.done()
    budget.give_back(1000)
    assert await next_one
    assert budget.taken_bytes == 1


async def test_it_never_exceeds_the_total_and_ends_empty() -> None:
    budget = ByteBudget(100)
    most = 0

    async def work(number: int) -> None:
        nonlocal most
        nbytes = 7 * number % 60 + 1
        assert await budget.take(nbytes, soon())
        most = max(most, budget.taken_bytes)
        await asyncio.sleep(0)
        budget.give_back(nbytes)

    await asyncio.gather(*[work(number) for number in range(200)])
    assert 60 < most <= 100
    await eventually(lambda: budget.taken_bytes == 0)
