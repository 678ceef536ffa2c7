"""The evaluator of orders: the times of `simulate`, the bytes of a timeline, and deadlocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import custom_schedules, seconds

import pipesim as ps
from pipesim.errors import ArgumentError, ScheduleError
from pipesim.ops import SCHEDULED, Op
from pipesim.order_search import (
    LaneOrder,
    counts_all_costs,
    evaluate,
    keeps_limit,
    lane_order,
    order_problem,
    peak_bytes,
    schedule_of,
)


@st.composite
def relabelled_orders(draw: st.DrawFn):
    """Draw an order that can run, its problem, its costs, and the schedule that it stands for."""
    schedule = (
        draw(custom_schedules(max_microbatches=5, only_chains=True))
        .with_updates(1, "one")
        .with_slices(1)
    )
    assume(schedule.overlapped is None)
    ops = set(schedule.op.tolist())
    if {Op.B, Op.W} <= ops:
        schedule = ps.order_by(schedule.placement, schedule.n_microbatches)
    split = Op.B not in set(schedule.op.tolist())
    n = schedule.n_stages
    values = st.lists(seconds, min_size=n, max_size=n).map(tuple)
    nbytes = st.lists(st.integers(0, 64).map(float), min_size=n, max_size=n).map(tuple)
    costs = ps.Costs(
        forward=draw(values),
        backward=draw(values),
        input_grad=draw(values),
        weight_grad=draw(values),
        optimizer_step=draw(st.integers(0, 3).map(float)),
        output_bytes=draw(nbytes),
        output_seconds=draw(st.sampled_from([0.0, 0.25])),
        activation_bytes=draw(nbytes),
        weight_grad_bytes=draw(nbytes),
        parameter_bytes=draw(st.sampled_from([0.0, 0.1])),
        forward_workspace_bytes=draw(nbytes),
        backward_workspace_bytes=draw(nbytes),
        memory_reserve=draw(st.sampled_from([0.0, 0.07])),
        network=ps.Network(
            latency=draw(st.sampled_from([0.0, 0.3, 2.0])),
            bandwidth=draw(st.sampled_from([math.inf, 7.0, 64.0])),
        ),
    )
    m = schedule.n_microbatches
    problem = order_problem(schedule.placement, m, costs, split_backward=split)
    return schedule, problem, costs


@given(relabelled_orders())
def test_times_and_bytes_are_those_of_simulate(case):
    """Each start, end and peak equals that of `simulate`, and so does the makespan (rules 1-4)."""
    schedule, problem, costs = case
    order = lane_order(problem, schedule)
    same = schedule_of(problem, order, schedule.placement, "order")
    timeline = ps.simulate(ps.lower(same), costs, engine="simpy")
    times = evaluate(problem, order)
    computes = timeline.graph.is_op(SCHEDULED)
    device = timeline.graph.device
    for start, column in ((times.start, timeline.start), (times.end, timeline.end)):
        expected = [column[computes & (device == d)] for d in range(same.n_devices)]
        assert np.array_equal(start, np.concatenate(expected))
    if schedule.placement.n_paths == 1:  # no reductions before STEP
        assert times.makespan == pytest.approx(timeline.makespan, rel=1e-15)
    static = timeline.memory.peak - peak_bytes(problem, order)
    held = {(device, s) for path in schedule.placement.paths for s, device in enumerate(path)}
    counts = np.bincount([device for device, _ in held])
    assert np.allclose(static, costs.parameter_bytes * 2 * counts)


@pytest.mark.slow
@given(relabelled_orders(), st.floats(0.5, 1.5))
def test_limit_is_that_of_simulate(case, share):
    """`keeps_limit` says what `Timeline.memory.fits` says, also for a peak of exactly the limit."""
    schedule, problem, costs = case
    same = schedule_of(problem, lane_order(problem, schedule), schedule.placement, "order")
    peak = ps.simulate(ps.lower(same), costs).memory.peak
    needed = peak + costs.memory_reserve * peak
    assume(needed.any())
    for limit in (needed, np.nextafter(needed, 0), share * needed):
        limited = order_problem(
            schedule.placement, schedule.n_microbatches, costs,
            split_backward=Op.B not in schedule.op, memory_limit=limit.tolist(),
        )  # fmt: skip
        assert keeps_limit(limited, lane_order(limited, same)) == (needed <= limit).all()


def test_deadlock_has_an_infinite_makespan():
    """Device 0 waits for a gradient before it runs the F that this needs."""
    problem = order_problem(ps.Placement.linear(2), 1, ps.Costs(forward=1, backward=2))
    order = LaneOrder(np.array([1, 0, 2, 3]), np.array([0, 2, 4]))
    assert evaluate(problem, order).makespan == math.inf


def test_hand_worked_messages():
    """A message of 2 s holds its channel; the next one waits, and arrives a latency of 1 s later.

    F0 and F1 end at 1 and 2 s. Their messages hold the channel in 1-3 and 3-5 s, and arrive at 4
    and 6 s.
    """
    network = ps.Network(latency=1, bandwidth=1)
    costs = ps.Costs(forward=1, backward=1, output_bytes=2, network=network)
    problem = order_problem(ps.Placement.linear(2), 2, costs)
    schedule = ps.schedule("gpipe", 2, 2, backward_order="forward")
    times = evaluate(problem, lane_order(problem, schedule))
    assert times.start.tolist()[:2] == [0, 1]
    assert times.start.tolist()[4:6] == [4, 6]


@pytest.mark.parametrize(
    "schedule",
    [
        ps.schedule("1f1b", 3, 4),
        ps.schedule("1f1b", 2, 5),
        ps.schedule("zb_h1", 2, 4),
        ps.schedule("dualpipe", 2, 4),
    ],
)
def test_orders_of_other_tasks_are_refused(schedule):
    problem = order_problem(ps.Placement.linear(2), 4, ps.Costs(forward=1, backward=2))
    with pytest.raises(ScheduleError, match="problem"):
        lane_order(problem, schedule)


def test_bad_arguments():
    costs = ps.Costs(forward=1, backward=2)
    with pytest.raises(ArgumentError, match="n_microbatches"):
        order_problem(ps.Placement.bidirectional(2), 1, costs)
    with pytest.raises(ArgumentError, match="memory_limit"):
        order_problem(ps.Placement.linear(2), 2, costs, memory_limit=-1)


def test_launches_and_shared_links_are_not_counted() -> None:
    """A link that two channels share, and hosts that launch, are for the simulator."""
    pairs = ((0, 1), (1, 2))
    own = tuple(ps.Link(1, 2, (pair,)) for pair in pairs)
    networks = {
        True: [ps.Network(latency=1), ps.Network(bandwidth=3), ps.Network(links=own)],
        False: [ps.Network(links=(ps.Link(1, 2, pairs),))],
    }
    for counted, choices in networks.items():
        for network in choices:
            costs = ps.Costs(1, 2, output_bytes=1, network=network)
            assert counts_all_costs(ps.Placement.linear(3), costs) is counted
    assert not counts_all_costs(ps.Placement.linear(3), ps.Costs(1, 2, launch=0.1))
