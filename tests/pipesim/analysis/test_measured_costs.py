"""Costs from timelines: what they show of a run, and what would be if something were changed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import without_costs
from strategies import cases
from tracing import DATA, traced, write

import pipesim as ps
from pipesim.analysis.measured_costs import message_waits, output_bytes, stage_seconds
from pipesim.errors import ArgumentError, CostsError, TimelineError, UnknownNameError
from pipesim.ops import Op

NETWORK = ps.Network(latency=0.25, bandwidth=2.0)


def run(
    name: str = "1f1b", costs: ps.Costs | None = None, m: int = 4, **options: Any
) -> ps.Timeline:
    """Simulate two devices."""
    costs = costs or ps.Costs((1, 2), (3, 5), output_bytes=(3, 0), network=NETWORK)
    return ps.simulate(ps.lower(ps.schedule(name, 2, m), **options), costs)


def test_by_hand() -> None:
    """What went in comes out: seconds a stage, bytes of messages, latency and bandwidth."""
    costs = ps.Costs.from_timeline(without_costs(run()))
    assert costs.forward == (1, 2)
    assert costs.backward == (3, 5)
    assert (costs.input_grad, costs.weight_grad, costs.recompute) == (None, None, None)
    assert costs.optimizer_step == (0, 0)
    assert costs.output_bytes == pytest.approx((3, 0))
    assert costs.network.latency == pytest.approx(0.25)
    assert costs.network.bandwidth == pytest.approx(2)


def test_mean_and_median() -> None:
    """Of the four F of stage 0, one takes five times as long."""
    timeline = run("gpipe")
    first = np.flatnonzero((timeline.graph.op == Op.F) & (timeline.graph.stage == 0))[-1]
    end = timeline.end.copy()
    end[first] += 4
    slow = replace(timeline, end=end)
    assert ps.Costs.from_timeline(slow).per_stage("forward", 2)[0] == pytest.approx(2)
    assert ps.Costs.from_timeline(slow, average="median").per_stage("forward", 2)[0] == 1


@pytest.mark.slow
@given(case=cases())
def test_any_simulation_gives_its_durations_back(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Seconds of every operation that each stage has."""
    graph, costs = case
    back = ps.Costs.from_timeline(ps.simulate(graph, costs))
    plain = (graph.kinds.overlapped == 0)[graph.kind]
    for name, op in (("forward", Op.F), ("recompute", Op.R), ("optimizer_step", Op.STEP)):
        if ((graph.op == op) & plain).any():
            stages = np.unique(graph.stage[(graph.op == op) & plain])
            estimate, expected = (c.per_stage(name, graph.n_stages)[stages] for c in (back, costs))
            assert estimate == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_recomputes_with_experts() -> None:
    """An R repeats the exchanges of its forward, also if the costs name no layers with experts."""
    graph = ps.lower(
        ps.schedule("1f1b", 2, 2), recompute="always", n_replicas=2, expert_layers=(0, 1)
    )
    costs = ps.Costs(1, 2, recompute=1, network=ps.Network(latency=0.25))
    timeline = ps.simulate(graph, costs)
    recomputes = (graph.op == Op.R) & (graph.stage == 1)
    assert set(timeline.duration[recomputes]) == {1 + 2 * 0.25}
    assert ps.Costs.from_timeline(timeline).recompute == (1, 1)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(2, 4),
    st.integers(4, 6),
    st.sampled_from([0.0, 0.125, 2.0]),
)
def test_costs_of_a_run_predict_it(name: str, p: int, m: int, latency: float) -> None:
    """Without contention, simulating from them gives the makespan of what they were taken from."""
    costs = ps.Costs(1, 1.5, output_bytes=1, network=ps.Network(latency=latency, bandwidth=8))
    timeline = ps.simulate(ps.lower(ps.schedule(name, p, m)), costs)
    back = ps.Costs.from_timeline(without_costs(timeline))
    assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)


def test_what_if() -> None:
    """Another schedule, more micro-batches, free messages, a faster stage."""
    timeline = run()
    costs = ps.Costs.from_timeline(timeline)
    assert ps.simulate(run("gpipe").graph, costs).makespan == pytest.approx(run("gpipe").makespan)
    assert ps.simulate(run(m=9).graph, costs).makespan == pytest.approx(run(m=9).makespan)
    free = ps.Costs.from_timeline(timeline, network=ps.Network())
    assert ps.simulate(timeline.graph, free).makespan == 4 * (2 + 5) + 1 + 3
    faster = ps.simulate(timeline.graph, free.scaled(stage=1, factor=0.5))
    assert (
        faster.makespan
        == ps.simulate(timeline.graph, ps.Costs((1, 1), (3, 2.5), optimizer_step=0.0)).makespan
    )


def test_from_traces_to_what_if(tmp_path: Path) -> None:
    """Traces of a run in one schedule predict another: imported, averaged, simulated."""
    costs = ps.Costs((1e-3, 2e-3), (3e-3, 5e-3), network=ps.Network(latency=1e-4))
    measured, other = run("gpipe", costs, step="none"), run("1f1b", costs, step="none")
    imported = ps.Timeline.from_chrome(write(tmp_path, traced(measured)))
    assert ps.replay(imported).makespan == pytest.approx(measured.makespan)
    estimate = ps.Costs.from_timeline(imported)
    assert ps.simulate(other.graph, estimate).makespan == pytest.approx(other.makespan)


def test_of_a_real_run() -> None:
    """All fields are set, and messages took their time."""
    costs = ps.Costs.from_timeline(ps.Timeline.from_chrome(DATA, output_bytes=1 << 16))
    assert len(costs.forward) == len(costs.backward) == 4
    assert min(costs.forward) > 0.5e-3
    assert 0 < costs.network.latency < 5e-3
    assert costs.output_bytes == (1 << 16, 1 << 16, 1 << 16, 0)


def split_run(costs: ps.Costs, *orders: str) -> ps.Timeline:
    """Simulate one micro-batch in orders of one's own."""
    actions = [order.split() for order in orders]
    schedule = ps.Schedule.from_orders(actions, placement=ps.Placement.linear(2), n_microbatches=1)
    return ps.simulate(ps.lower(schedule), costs)


def test_split_and_recomputed_backwards() -> None:
    """B has the sum of I and W; a stage that recomputes nothing has F for R."""
    costs = ps.Costs(1, None, 2, 3, recompute=0.5)
    split = ps.Costs.from_timeline(split_run(costs, "0F0 0I0 0W0", "1F0 1I0 1W0"))
    assert split.input_grad == (2, 2)
    assert split.weight_grad == (3, 3)
    assert split.backward == (5, 5)
    again = ps.Costs.from_timeline(run("1f1b", costs, recompute="always"))
    assert again.recompute == (0.5, 0.5)
    estimate = ps.Costs.from_timeline(split_run(costs, "0F0 0I0 0W0", "1F0 1B0"))
    assert estimate.backward == (5, 5)
    assert estimate.input_grad is None


def test_other_fields() -> None:
    """Bytes that a timeline does not show come from its own costs, or are given."""
    timeline = run(costs=ps.Costs(1, 2, activation_bytes=7, output_bytes=4, launch=0.5))
    costs = ps.Costs.from_timeline(timeline, parameter_bytes=9)
    assert costs.activation_bytes == 7
    assert costs.parameter_bytes == 9
    assert costs.launch == 0
    assert ps.Costs.from_timeline(timeline, launch=0.25).launch == 0.25
    assert ps.Costs.from_timeline(timeline, forward=8).forward == 8


def test_one_device_has_no_messages() -> None:
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 1, 2)), ps.Costs(1, 2))
    assert ps.Costs.from_timeline(timeline).network == ps.Network()


def test_messages_that_nobody_waited_for() -> None:
    """Their latency is the time from the end of SEND to that of RECV."""
    timeline = run("gpipe", ps.Costs((1, 50), (1, 50), network=ps.Network(latency=0.25)), m=2)
    assert ps.Costs.from_timeline(timeline).network.latency == pytest.approx(0.25)


def test_messages_without_sizes() -> None:
    """All that they took is latency, the time that their SENDs held included."""
    timeline = replace(run(), costs=None, sizes=np.zeros(len(run())))
    network = ps.Costs.from_timeline(timeline).network
    assert network.latency == pytest.approx(0.25 + 1.5)
    assert network.bandwidth == math.inf


def test_parts() -> None:
    """What a profile uses too: means, waits, sizes."""
    timeline = run("gpipe", m=1, step="none")
    assert stage_seconds(timeline, Op.F).tolist() == [1, 2]
    assert np.isnan(stage_seconds(timeline, Op.W)).all()
    assert message_waits([timeline, timeline]).tolist() == [1.75] * 4
    assert output_bytes(timeline).tolist() == [3, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"average": "mode"}, UnknownNameError, "unknown average 'mode'"),
        ({"forwards": 1}, UnknownNameError, "unknown cost 'forwards'; did you mean 'forward'"),
        ({"forward": math.nan}, CostsError, "forward must be finite"),
        ({"network": 3}, CostsError, "network must be"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ps.Costs.from_timeline(run(), **options)


def test_bad_timelines() -> None:
    with pytest.raises(ArgumentError, match="costs come from a Timeline, got TaskGraph"):
        ps.Costs.from_timeline(run().graph)  # type: ignore[arg-type]
    timeline = run()
    end = timeline.end.copy()
    end[-1] = np.nan
    with pytest.raises(TimelineError, match="is partial: 1 of 34 tasks did not run"):
        ps.Costs.from_timeline(replace(timeline, end=end))
