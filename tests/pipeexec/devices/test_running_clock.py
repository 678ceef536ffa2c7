"""Time in which a process ran: gaps between looks count as a part of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeexec.devices.running_clock import RunningClock, RunningTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the time, which the test sets."""
    now = [100.0]
    monkeypatch.setattr("pipeexec.devices.running_clock.time.monotonic", lambda: now[0])
    return now


def polled(now: list[float], seconds: float, look: Callable[[], object]) -> None:
    """Look every 0.1 s."""
    for _ in range(round(seconds / 0.1)):
        now[0] += 0.1
        look()


def test_time_between_looks_counts(clock: list[float]) -> None:
    subject = RunningClock()
    polled(clock, 3.0, subject.read)
    assert subject.read() == pytest.approx(3.0)


def test_a_freeze_counts_as_one_gap(clock: list[float]) -> None:
    subject = RunningClock(longest_gap=0.3)
    polled(clock, 1.0, subject.read)
    clock[0] += 60.0
    assert subject.read() == pytest.approx(1.3)
    polled(clock, 1.0, subject.read)
    assert subject.read() == pytest.approx(2.3)


@pytest.mark.parametrize("limit", [0.4, 1.0, 5.0, 60.0])
def test_a_limit_is_not_over_after_a_freeze(clock: list[float], limit: float) -> None:
    """Also a short one; but after as much time in which the process polled."""
    subject = RunningTimer(limit)
    clock[0] += 100 * limit
    assert not subject.is_over
    polled(clock, limit + 0.2, lambda: subject.is_over)
    assert subject.is_over


def test_a_wait_that_begins_again(clock: list[float]) -> None:
    subject = RunningTimer(1.0)
    polled(clock, 0.8, lambda: subject.is_over)
    subject.restart()
    polled(clock, 0.9, lambda: subject.is_over)
    assert not subject.is_over
    polled(clock, 0.2, lambda: subject.is_over)
    assert subject.is_over


def test_slow_polls_are_counted_in_full(clock: list[float]) -> None:
    """A watchdog of many processes looks every few seconds."""
    subject = RunningTimer(10.0, period=2.0)
    for _ in range(4):
        clock[0] += 2.5
        assert not subject.is_over
    clock[0] += 2.5
    assert subject.is_over
