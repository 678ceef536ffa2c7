"""Bounds of lowered graphs: never above a simulation, and equal to closed forms."""

from __future__ import annotations

from hypothesis import given
from strategies import cases, skipping_cases

import pipesim as ps
from pipesim.analysis.lower_bounds.graph_bound import graph_bound


def check(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Compare the bound of a graph with its makespan, with and without its own memory limit."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    assert graph_bound(graph, costs) <= timeline.makespan
    needed = timeline.peak_memory * (1 + costs.memory_reserve)
    if needed.any():
        bound = graph_bound(graph, costs, memory_limit=needed)
        assert graph_bound(graph, costs) <= bound <= timeline.makespan


@given(cases())
def test_no_makespan_is_below(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Every schedule and option of `lower`, with any costs and network."""
    check(case)


@given(skipping_cases())
def test_no_makespan_is_below_with_skips(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Skip connections likewise."""
    check(case)


def test_closed_forms() -> None:
    """GPipe and 1F1B take (m + p - 1) (f + b); ZB-H2 takes m (f + i + w) + (p - 1) f."""
    split = ps.Costs(forward=10, input_grad=12, weight_grad=8)
    for p, m in ((4, 8), (8, 32)):
        assert ps.lower_bound(ps.linear(p), m, ps.Costs(1, 2)) == (m + p - 1) * 3
        assert ps.lower_bound(ps.linear(p), m, split) == 30 * m + 10 * (p - 1)


def test_best_known_orders_under_a_limit() -> None:
    """ZB-1p and ZB-2p reach the bound, with a latency; bytes are counted as micro-batches."""
    costs = ps.Costs(
        forward=10,
        input_grad=12,
        weight_grad=8,
        activation_bytes=1,
        weight_grad_bytes=1,
        network=ps.Network(latency=1),
    )
    for p, m, within_p, within_2p in ((4, 8, 294, 273), (8, 32, 1086, 1037)):
        assert ps.lower_bound(ps.linear(p), m, costs, p) == within_p
        assert ps.lower_bound(ps.linear(p), m, costs, 2 * p) == within_2p


def test_limits_of_each_device_count_parameters_and_reserve() -> None:
    """One micro-batch at a time on device 0 alone: (f + b) of both devices, m times."""
    costs = ps.Costs(1, 2, activation_bytes=4, parameter_bytes=3, memory_reserve=0.5)
    one = 1.5 * (2 * 3 + 4)
    assert ps.lower_bound(ps.linear(2), 5, costs, [one, 1e9]) == 5 * 6
    assert ps.lower_bound(ps.linear(2), 5, costs, [one + 5.9, 1e9]) == 5 * 6
    assert ps.lower_bound(ps.linear(2), 5, costs, [one + 6, 1e9]) == 6 * 3
