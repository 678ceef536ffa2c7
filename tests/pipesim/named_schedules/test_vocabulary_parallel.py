"""1F1B with a vocabulary that is divided over all devices (arXiv 2411.05288, algorithm 1)."""

from __future__ import annotations

from typing import Any

import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError
from pipesim.scheduling.registry import schedule_info

whole = st.integers(1, 9)


def make_costs(p: int, f: float, b: float, s: float, t: float, **others: Any) -> ps.Costs:
    """Return seconds of F, B, S and T; embedding and loss take no time."""
    return ps.Costs(
        forward=[0] * p + [f] * p + [s] * p + [0], backward=[0] * p + [b] * p + [t] * p + [0],
        activation_bytes=[0] * p + [1] * p + [0] * (p + 1), **others,
    )  # fmt: skip


def simulated(p: int, m: int, costs: ps.Costs, **options: Any) -> ps.Timeline:
    schedule = ps.schedule("1f1b", p, m, vocabulary_parallel=costs)
    return ps.simulate(ps.lower(schedule, step="none"), costs, **options)


def test_two_devices() -> None:
    """Drawn by hand: S and T (stages 4 and 5) run on both devices in the same periods."""
    timeline = simulated(2, 3, make_costs(2, 1, 2, 1, 1))
    assert draw(timeline, transfers=False) == grid("""
        0 | 2F0 2F1 4F0 2F2 4B0 4F1 ..  4B1 4F2 2B0 2B0 4B2 ..  2B1 2B1 ..  2B2 2B2
        1 | ..  3F0 5F0 3F1 5B0 5F1 3F2 3B0 3B0 5B1 5F2 3B1 3B1 5B2 3B2 3B2 ..  ..
    """)
    assert timeline.why.idle_by_cause().sum(axis=1).tolist() == timeline.idle.tolist()


def test_stages_and_edges() -> None:
    """All embedding slices feed the first layers, and the last layers all head slices."""
    placement = ps.schedule("1f1b", 3, 1, vocabulary_parallel=True).placement
    assert placement.device_of == (0, 1, 2, 0, 1, 2, 0, 1, 2, 2)
    assert placement.edges == (
        (0, 3), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (5, 7), (5, 8), (6, 9), (7, 9), (8, 9)
    )  # fmt: skip


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    "seconds", [(1, 2, 0.1, 0.2), (1, 3, 0.1, 0.2), (1, 2, 1, 2), (1, 1, 1, 1)], ids=str
)
def test_idle_time_is_that_of_1f1b(p: int, seconds: tuple[float, ...]) -> None:
    """The same (p-1)(f+b), and less than a period more on several devices: no period is longer."""
    m = 8 * p
    timeline = simulated(p, m, make_costs(p, *seconds))
    period, idle = sum(seconds), (p - 1) * (seconds[0] + seconds[1])
    excess = timeline.makespan - m * period - idle
    is_exact = p == 2 or seconds[2] == 1
    assert excess == pytest.approx(0, abs=1e-9) if is_exact else -1e-9 < excess < period


@given(p=st.integers(1, 4), m=st.integers(1, 7), seconds=st.tuples(whole, whole, whole, whole))
def test_any_counts_and_seconds(p: int, m: int, seconds: tuple[int, ...]) -> None:
    """Orders run, both engines agree, and devices hold the paper's p + 2 micro-batches."""
    costs = make_costs(p, *seconds, network=ps.Network(latency=0.25))
    timeline = simulated(p, m, costs, engine="simpy")
    assert timeline.end.tolist() == simulated(p, m, costs, engine="compiled").end.tolist()
    assert timeline.memory.peak.tolist() == [min(p - i + 2, m) for i in range(p)]
    form = schedule_info("1f1b").activations
    assert timeline.memory.peak.max() == form.of(p, m, vocabulary_parallel=costs)
    assert timeline.makespan >= m * sum(seconds) + (p - 1) * (seconds[0] + seconds[1])


def test_costs_decide_between_which_passes_the_vocabulary_stands() -> None:
    """With costs a step whose B takes as long as F is shorter than with an order for twice F."""
    costs = make_costs(4, 1, 1, 0.2, 0.2)
    without = ps.lower(ps.schedule("1f1b", 4, 16, vocabulary_parallel=True), step="none")
    assert simulated(4, 16, costs).makespan < 0.85 * ps.simulate(without, costs).makespan


def test_slow_messages_decide_too() -> None:
    """The order for them is shorter than that for fast messages, which leaves them no time."""
    seconds = (3, 1, 2, 0.3, 0.6)
    costs = make_costs(*seconds, network=ps.Network(latency=1))
    fast = ps.schedule("1f1b", 3, 16, vocabulary_parallel=make_costs(*seconds))
    assert simulated(3, 16, costs).makespan < 0.9 * ps.simulate(ps.lower(fast), costs).makespan


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"True, False or a pipesim.Costs, got 'yes'"):
        ps.schedule("1f1b", 2, 4, vocabulary_parallel="yes")
    with pytest.raises(ArgumentError, match="merged actions are for 1F1B without"):
        ps.schedule("1f1b", 2, 4, vocabulary_parallel=True, merged=True)
    with pytest.raises(CostsError, match="forward has 2 values for 7 stages"):
        ps.schedule("1f1b", 2, 4, vocabulary_parallel=ps.Costs(forward=[1, 2], backward=1))
