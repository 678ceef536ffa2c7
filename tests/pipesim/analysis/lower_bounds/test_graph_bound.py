"""Bounds of lowered graphs: never above a simulation, and equal to closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import cases, skipping_cases

import pipesim as ps
from pipesim.analysis.lower_bounds.lower_bound import graph_bound
from pipesim.errors import ArgumentError, CostsError


def check(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Compare the bound of a graph with its makespan, with and without its own memory limit."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    assert graph_bound(graph, costs) <= timeline.makespan
    needed = timeline.memory.peak * (1 + costs.memory_reserve)
    if needed.any():
        bound = graph_bound(graph, costs, memory_limit=needed)
        assert bound <= timeline.makespan
        assert graph_bound(graph, costs) <= bound * (1 + 1e-12), "sums in another order"


def uneven_costs(seconds: tuple[list[float], ...], latency: float) -> ps.Costs:
    """Return costs of F and B, or of F, I and W, of each stage; one byte a micro-batch."""
    forward, *backward = seconds
    names = ("backward",) if len(backward) == 1 else ("input_grad", "weight_grad")
    return ps.Costs(
        forward,
        **dict(zip(names, backward, strict=True)),
        activation_bytes=1,
        weight_grad_bytes=1,
        network=ps.Network(latency=latency),
    )


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
        assert ps.lower_bound(ps.Placement.linear(p), m, ps.Costs(1, 2)) == (m + p - 1) * 3
        assert ps.lower_bound(ps.Placement.linear(p), m, split) == 30 * m + 10 * (p - 1)


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
        assert ps.lower_bound(ps.Placement.linear(p), m, costs, p) == within_p
        assert ps.lower_bound(ps.Placement.linear(p), m, costs, 2 * p) == within_2p


def test_limits_of_each_device_count_parameters_and_reserve() -> None:
    """One micro-batch at a time on device 0 alone: (f + b) of both devices, m times."""
    costs = ps.Costs(1, 2, activation_bytes=4, parameter_bytes=3, memory_reserve=0.5)
    one = 1.5 * (2 * 3 + 4)
    assert ps.lower_bound(ps.Placement.linear(2), 5, costs, [one, 1e9]) == 5 * 6
    assert ps.lower_bound(ps.Placement.linear(2), 5, costs, [one + 5.9, 1e9]) == 5 * 6
    assert ps.lower_bound(ps.Placement.linear(2), 5, costs, [one + 6, 1e9]) == 6 * 3


@pytest.mark.parametrize(
    ("seconds", "m", "cap", "latency", "optimum"),
    [
        (([18, 5, 17, 14], [14, 27, 19, 30]), 11, 3, 0, 680),
        (([5, 14, 8], [22, 19, 24]), 12, 2, 1, 623),
        (([5, 9, 12, 12, 6], [19, 16, 19, 6, 15], [6, 9, 14, 6, 11]), 8, 2, 3, 632),
        (([17, 19, 5], [17, 14, 12], [12, 14, 9]), 28, 2, 3, 1616),
    ],
)
def test_uneven_stages_under_a_limit(
    seconds: tuple[list[float], ...], m: int, cap: float, latency: float, optimum: float
) -> None:
    """The optimum, as CP-SAT proved it, for F and B, or F, I and W of each stage."""
    costs = uneven_costs(seconds, latency)
    placement = ps.Placement.linear(len(seconds[0]))
    assert ps.lower_bound(placement, m, costs, cap) == optimum
    assert 0.9 * optimum < ps.lower_bound(placement, m, costs, cap, search=False) <= optimum


@pytest.mark.parametrize(
    ("placement", "seconds", "m", "limit", "latency", "without_search", "optimum"),
    [
        (ps.Placement.v_shaped(2), ([8, 9, 11, 12], [8, 15, 14, 11], [10, 7, 7, 8]),
         5, 4, 2, 332, 332),
        (ps.Placement.looped(2, 2), ([15, 12, 15, 14], [9, 10, 13, 8], [10, 10, 10, 11]),
         13, 4, 1, 945, 945),
        (ps.Placement.looped(3, 2), ([13, 8, 10, 8, 11, 11], [24, 22, 21, 31, 22, 31]),
         8, 4, 1, 837, 845),
        (ps.Placement.v_shaped(3),
         ([12, 14, 13, 10, 14, 14], [14, 5, 9, 11, 7, 8], [11, 13, 10, 6, 11, 13]),
         7, 3, 0, 596, 623),
    ],
)  # fmt: skip
def test_two_uneven_stages_a_device(
    placement: ps.Placement, seconds: tuple[list[float], ...], m: int, limit: float,
    latency: float, without_search: float, optimum: float,
) -> None:  # fmt: skip
    """The optimum, which CP-SAT proved in the first two cases; W counts with six lanes, too.

    In the others, an order meets the bound.
    """
    costs = uneven_costs(seconds, latency)
    assert ps.lower_bound(placement, m, costs, limit, search=False) == without_search
    assert ps.lower_bound(placement, m, costs, limit) == optimum


def test_a_late_w_holds_its_own_bytes_alone() -> None:
    """W of stage 2 may follow all other actions of its micro-batch: it then holds 1 byte, not 5."""
    costs = ps.Costs(
        forward=[2, 7, 7, 4],
        input_grad=[2, 2, 3, 5],
        weight_grad=[5, 1, 11, 4],
        activation_bytes=[1, 5, 1, 3],
        weight_grad_bytes=[1, 2, 1, 3],
        network=ps.Network(latency=2),
    )
    order = ps.order_by(ps.Placement.v_shaped(2), 5, costs, memory_limit=10, split_backward=True)
    check((ps.lower(order), costs))


def test_recompute_of_some_micro_batches() -> None:
    """The micro-batch without R may be the first that is propagated back, as here."""
    schedule = ps.schedule("gpipe", 3, 3, backward_order="reverse")
    graph, costs = ps.lower(schedule, recompute="except_last"), ps.Costs(1, 2, recompute=50)
    makespan = ps.simulate(graph, costs).makespan
    assert graph_bound(graph, costs) == makespan == 115


def test_a_limit_counts_where_orders_are_not_counted() -> None:
    """Eight lanes on each device are too many to count orders; arcs of the limit still hold."""
    costs = ps.Costs(1, 2, activation_bytes=1)
    place = ps.Placement.looped(2, 4)
    order = ps.order_by(place, 4, costs, memory_limit=4, split_backward=False)
    bound = ps.lower_bound(place, 4, costs, 4)
    assert ps.lower_bound(place, 4, costs) < bound
    assert bound <= ps.simulate(ps.lower(order), costs).makespan


def test_either_kind_of_backward() -> None:
    """With costs of both, the bound holds for orders with B and for those with I and W."""
    costs = ps.Costs(forward=3, backward=4, input_grad=3, weight_grad=3)
    either = ps.lower_bound(ps.Placement.linear(3), 6, costs)
    for split in (False, True):
        assert either <= ps.lower_bound(ps.Placement.linear(3), 6, costs, split_backward=split)
    least = ps.Costs(forward=3, input_grad=3, weight_grad=1)
    assert either == ps.lower_bound(ps.Placement.linear(3), 6, least)


def test_bad_input() -> None:
    """Messages name the argument, the device and what it needs at least."""
    costs = ps.Costs(1, 2, activation_bytes=4, parameter_bytes=3, memory_reserve=0.5)
    place = ps.Placement.linear(2)
    with pytest.raises(ArgumentError, match=r"device 1 is 14.0 B .* needs 15.0 B .* at least 15"):
        ps.lower_bound(place, 2, costs, [15.1, 14])
    assert ps.lower_bound(place, 2, costs, 15) == 12
    assert ps.lower_bound(place, 2, ps.Costs(1, 2), 8) == ps.lower_bound(place, 2, ps.Costs(1, 2))
    with pytest.raises(CostsError, match="split_backward=True needs the seconds of I and W"):
        ps.lower_bound(place, 2, costs, split_backward=True)
    with pytest.raises(ArgumentError, match="unknown objective 'time'"):
        ps.lower_bound(place, 2, costs, objective="time")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="n_microbatches"):
        ps.lower_bound(ps.Placement.bidirectional(2), 1, costs)
