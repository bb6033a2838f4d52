"""Logs: limited in rate per event, and free of what callers sent."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr

import pytest
import structlog

from controller.daemon.faults import SHOWN_FOR_S, Faults
from controller.daemon.logs import RateLimit, configure_logs


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passes(limit: RateLimit, event: str) -> dict[str, object] | None:
    try:
        return dict(limit(None, "info", {"event": event}))
    except structlog.DropEvent:
        return None


def test_each_event_is_limited_and_what_is_left_out_is_counted() -> None:
    clock = Clock()
    limit = RateLimit(3, 10.0, clock)
    assert [passes(limit, "a") is not None for _ in range(5)] == [True, True, True, False, False]
    assert passes(limit, "b") is not None
    clock.now_s = 10.0
    assert passes(limit, "a") == {"event": "a", "left_out": 2}
    assert passes(limit, "a") == {"event": "a"}


@pytest.fixture
def unconfigured() -> object:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_trace_shows_code_and_no_values(form: str, unconfigured: object) -> None:
    """Prompts and tenants' salts are local variables where things go wrong; they stay out of the log."""

    def answer(salt: str) -> None:
        raise ZeroDivisionError("division")

    out = io.StringIO()
    with redirect_stderr(out):
        configure_logs("info", form, 10)
        try:
            answer("-".join(["tenant", "secret"]))
        except ZeroDivisionError as error:
            Faults().caught("lookup_prefix", error)
    assert "ZeroDivisionError: division" in out.getvalue()
    assert "test_logs.py" in out.getvalue()
    assert "tenant-secret" not in out.getvalue()
    if form == "json":
        assert json.loads(out.getvalue())["where"] == "lookup_prefix"


def test_the_level_is_respected(unconfigured: object) -> None:
    out = io.StringIO()
    with redirect_stderr(out):
        configure_logs("warning", "json", 10)
        structlog.get_logger().info("quiet")
        structlog.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["loud"]


def test_a_fault_is_shown_for_a_while() -> None:
    clock = Clock()
    faults = Faults(clock)
    assert not list(faults.problems())
    faults.caught("load", ValueError("x"))
    clock.now_s = SHOWN_FOR_S - 1
    assert list(faults.problems()) == [
        "internal error in load: ValueError (1 since start); the log has the trace"
    ]
    clock.now_s = SHOWN_FOR_S
    assert not list(faults.problems())
