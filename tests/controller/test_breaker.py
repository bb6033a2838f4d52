"""The circuit breaker's table, with a clock by hand."""

from __future__ import annotations

from controller.storage.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    OPEN_AFTER_FAILURES,
    Breaker,
    BreakerState,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(OPEN_AFTER_FAILURES):
        assert breaker.allows()
        breaker.failed()
    return breaker, clock


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        for _ in range(OPEN_AFTER_FAILURES - 1):
            breaker.failed()
        breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.wait_s() == 0
    breaker, _ = opened()
    assert (breaker.state, breaker.opened, breaker.allows()) == (BreakerState.OPEN, 1, False)


def test_one_trial_at_a_time_after_the_pause() -> None:
    breaker, clock = opened()
    assert breaker.wait_s() == FIRST_PAUSE_S
    clock.now_s += FIRST_PAUSE_S
    assert breaker.allows()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows()


def test_the_pause_doubles_while_trials_fail_up_to_a_bound_and_begins_anew() -> None:
    breaker, clock = opened()
    pauses = []
    for _ in range(5):
        pauses.append(breaker.wait_s())
        clock.now_s += pauses[-1]
        assert breaker.allows()
        breaker.failed()
    assert pauses == [FIRST_PAUSE_S, 1.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    clock.now_s += LONGEST_PAUSE_S
    assert breaker.allows()
    breaker.succeeded()
    for _ in range(OPEN_AFTER_FAILURES):
        breaker.failed()
    assert breaker.wait_s() == FIRST_PAUSE_S


def test_a_late_failure_of_a_batch_sent_before_it_opened_changes_nothing() -> None:
    breaker, clock = opened()
    breaker.failed()
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 1)
    clock.now_s += FIRST_PAUSE_S
    assert breaker.allows()
