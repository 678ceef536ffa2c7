"""`Timeline.why.gap`, `Timeline.why.lower_bound`, and the column of `compare`."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest

import pipesim as ps
from pipesim.simulation import LogNormal

COSTS = ps.Costs(forward=1, backward=2, activation_bytes=4)


def run(name: str, costs: ps.Costs = COSTS, p: int = 4, m: int = 8) -> ps.Timeline:
    """Simulate a named schedule."""
    return ps.simulate(ps.lower(ps.schedule(name, p, m)), costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_optimal_schedules_have_no_gap(name: str) -> None:
    """With equal stages, GPipe and 1F1B are optimal."""
    timeline = run(name)
    assert timeline.why.lower_bound == timeline.makespan == 33
    assert timeline.why.gap == 0


def test_a_gap_by_hand() -> None:
    """One micro-batch at a time takes 8 (4 + 8); the pipeline needs (8 + 3) 3."""
    assert run("naive").why.gap == pytest.approx(96 / 33 - 1)
    limited = replace(run("naive"), limits=4.0)
    assert limited.memory.fits
    assert limited.why.gap == 0, "no order that keeps this limit is faster"


def test_a_limit_that_is_not_kept_does_not_count() -> None:
    """The bound is then that of all orders."""
    timeline = replace(run("gpipe"), limits=4.0)
    assert timeline.memory.fits is False
    assert timeline.why.lower_bound == timeline.makespan
    assert timeline.why.gap == 0


def test_rounding_is_no_gap() -> None:
    """Times that are no whole numbers lower the bound by their rounding, which is no gap."""
    timeline = run("1f1b", ps.Costs(forward=0.1, backward=0.7 / 3))
    assert timeline.why.lower_bound < timeline.makespan
    assert timeline.why.gap == 0


def test_unknown() -> None:
    """Without costs, with noise, after a run, and if tasks did not run, nothing is known."""
    timeline = run("1f1b")
    noise = ps.Noise(task=LogNormal(0.1), seed=0)
    ended = timeline.end.copy()
    ended[-1] = math.nan
    for other in (
        replace(timeline, costs=None),
        replace(timeline, start=2 * timeline.start, end=2 * timeline.end),
        replace(timeline, end=ended),
        ps.simulate(timeline.graph, COSTS, noise=noise),
    ):
        assert math.isnan(other.why.lower_bound)
        assert math.isnan(other.why.gap)
    still = replace(run("1f1b", ps.Costs(forward=0, backward=0)))
    assert math.isnan(still.why.gap), "a bound of 0 s"


def test_column_of_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing where it is unknown, and for graphs whose bound takes long."""
    slow, measured = run("naive"), replace(run("1f1b"), costs=None)
    table = ps.compare({"a": slow, "b": measured})
    assert table.loc["a", "gap"] == slow.why.gap
    assert math.isnan(table.loc["b", "gap"])
    assert "gap" not in ps.compare({"b": measured})
    module = importlib.import_module("pipesim.analysis.compare")
    monkeypatch.setattr(module, "MOST_TASKS", len(slow) - 1)
    assert "gap" not in ps.compare({"a": slow})
