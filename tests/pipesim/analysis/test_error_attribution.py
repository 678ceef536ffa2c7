"""What the error of a prediction consists of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import without_costs
from strategies import cases, costs, graphs

import pipesim as ps
from pipesim.analysis.error_attribution import PARTS, _shapley, error_parts
from pipesim.errors import ArgumentError, TimelineError
from pipesim.ops import RECVS, SENDS, Op

NETWORK = ps.Network(latency=0.25, bandwidth=4.0)
COSTS = ps.Costs(1, 2, output_bytes=1, network=NETWORK)


def graph(name: str = "1f1b", p: int = 2, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, p, m), step="none", **options)


def parts(
    task_graph: ps.TaskGraph, costs: ps.Costs, *, noise: ps.Noise | None = None, **options: Any
) -> dict[str, float]:
    """Return the parts that are not 0, of a run with ``costs`` that was predicted with `COSTS`."""
    predicted = ps.simulate(task_graph, COSTS)
    ran = without_costs(ps.simulate(task_graph, costs, noise=noise))
    causes = ps.Comparison(predicted, ran).error_parts(**options)
    assert list(causes.index) == list(PARTS)
    assert causes.sum() == pytest.approx(predicted.makespan - ran.makespan, abs=1e-9)
    return {name: seconds for name, seconds in causes.items() if abs(seconds) > 1e-9}


# By hand: one thing is wrong


def test_a_right_prediction_has_no_error() -> None:
    assert parts(graph(), COSTS) == {}
    assert parts(graph(p=3, overlap=False), COSTS) == {}
    assert parts(graph(rendezvous=True), COSTS) == {}


def test_a_slow_stage() -> None:
    """GPipe on one device: four F that take 1.5 s longer."""
    one = graph("gpipe", 1)
    assert parts(one, replace(COSTS, forward=2.5)) == pytest.approx({"durations": -6})
    # Of two stages, the second is the busier one from then on.
    both = parts(graph("gpipe"), replace(COSTS, forward=(1, 2.5)))
    assert both == pytest.approx({"durations": -6})


def test_slow_messages() -> None:
    """GPipe: the first F of stage 1 and the last B of stage 0 wait for each of them once."""
    slow = replace(COSTS, network=ps.Network(latency=0.75, bandwidth=4.0))
    assert parts(graph("gpipe"), slow) == pytest.approx({"transfers": -2 * 0.5})
    thin = replace(COSTS, network=ps.Network(latency=0.25, bandwidth=2.0))
    assert parts(graph("gpipe"), thin) == pytest.approx({"transfers": -2 * 0.25})


def test_a_message_that_nobody_waited_for() -> None:
    """It is ten times as late, arrives while its receiver is busy, and costs nothing."""
    timeline = ps.simulate(graph("gpipe", m=8), replace(COSTS, forward=(1, 5)))
    task_graph = timeline.graph
    recv = np.flatnonzero((task_graph.op == Op.RECV_F) & (task_graph.microbatch == 3))
    end = timeline.end.copy()
    end[recv] += 2.5
    late = replace(without_costs(timeline), end=end)
    causes = error_parts(timeline, late)
    assert late.duration[recv] > 2.5
    assert causes.abs().max() < 1e-9


def test_tasks_that_stray_from_their_mean() -> None:
    """The first of four F takes half a second longer, the second as much less.

    Stage 1, the busier one, starts later by the first, and gains nothing by the second.
    """
    predicted = ps.simulate(graph("gpipe"), replace(COSTS, forward=(1, 4)))
    first, second = np.flatnonzero((predicted.graph.op == Op.F) & (predicted.graph.stage == 0))[:2]
    seconds = predicted.duration
    seconds[first] += 0.5
    seconds[second] -= 0.5
    ran = without_costs(resimulated(predicted, seconds))
    causes = error_parts(predicted, ran)
    assert causes["durations"] == pytest.approx(0)
    assert causes["spread"] == pytest.approx(-0.5)
    assert causes.sum() == pytest.approx(predicted.makespan - ran.makespan)


def resimulated(timeline: ps.Timeline, seconds: Any) -> ps.Timeline:
    """Simulate with other durations of compute tasks."""
    task_graph = timeline.graph
    assert timeline.costs is not None
    tasks = timeline.costs.of(task_graph)
    return ps.simulate(task_graph, replace(tasks, drawn=np.where(task_graph.is_op(RECVS | SENDS),
                                                         tasks.duration, seconds)))  # fmt: skip


def test_a_host_that_is_late() -> None:
    """One device of four F and four B; nothing starts before it is issued, the first after 3 s."""
    slow = replace(COSTS, launch=3.0)
    one = graph("gpipe", 1)
    assert parts(one, slow, launch=3.0) == pytest.approx({"host": -(8 * 3 + 2 - 12)})
    # Without a word of the host, its lateness is a start that nothing explains.
    assert parts(one, slow) == pytest.approx({"unexplained": -(8 * 3 + 2 - 12)})


def test_a_host_known_from_costs() -> None:
    """A measured timeline with costs has its launch from them."""
    one = graph("gpipe", 1)
    ran = ps.simulate(one, replace(COSTS, launch=3.0))
    causes = error_parts(ps.simulate(one, COSTS), ran)
    assert causes["host"] == pytest.approx(-14)
    assert causes["unexplained"] == pytest.approx(0)


def shifted(timeline: ps.Timeline, tasks: Any, seconds: float) -> ps.Timeline:
    """Return a measurement in which some tasks, and all that end after they began, come later."""
    from_ = float(timeline.start[tasks].min())
    start = timeline.start + np.where(timeline.start >= from_, seconds, 0.0)
    end = timeline.end + np.where(timeline.end > from_, seconds, 0.0)
    return replace(without_costs(timeline), start=start, end=end)


def test_hand_over_between_streams() -> None:
    """Each device's messages leave half a second after what they carry is there."""
    timeline = ps.simulate(graph("gpipe", m=1), COSTS)
    send = np.flatnonzero(timeline.graph.op == Op.SEND_F)
    late = shifted(timeline, send, 0.5)
    causes = error_parts(timeline, late)
    assert causes["hand_over"] == pytest.approx(-0.5)
    assert causes.drop("hand_over").abs().max() < 1e-9


def test_waking_up_is_part_of_a_message() -> None:
    """A consumer that starts half a second after its message: as costs have it, latency."""
    timeline = ps.simulate(graph("gpipe", m=1), COSTS)
    consumer = np.flatnonzero((timeline.graph.op == Op.F) & (timeline.graph.stage == 1))
    causes = error_parts(timeline, shifted(timeline, consumer, 0.5))
    assert causes["transfers"] == pytest.approx(-0.5)
    assert causes.drop("transfers").abs().max() < 1e-9


def test_a_gap_within_a_stream_is_unexplained() -> None:
    """Between two F of one device, which had all they needed."""
    timeline = ps.simulate(graph("gpipe", 1), COSTS)
    late = shifted(timeline, 2, 0.5)
    causes = error_parts(timeline, late)
    assert causes["unexplained"] == pytest.approx(-0.5)
    assert causes.drop("unexplained").abs().max() < 1e-9


def test_causes_that_meet_share_what_they_change() -> None:
    """F of stage 1 take 4 s instead of 1, and the second message 3 s longer, in GPipe's order.

    Predicted 3 s; with the durations 9, with the message 6, with both 9, since the message then
    comes as the first F ends. On average over both orders, (6 + 3) / 2 and (3 + 0) / 2.
    """
    task_graph = graph("gpipe", m=2)
    prices, slow = ps.Costs(1, 0), ps.Costs((1, 4), 0)
    tasks = slow.of(task_graph).per_task()
    latency = tasks.latency.copy()
    latency[
        (task_graph.microbatch == 1) & ((task_graph.op == Op.SEND_F) | (task_graph.op == Op.RECV_F))
    ] = 3
    late = replace(tasks, table=tasks.table._replace(latency=latency))
    predicted, ran = ps.simulate(task_graph, prices), without_costs(ps.simulate(task_graph, late))
    assert (predicted.makespan, ran.makespan) == (3, 9)
    causes = error_parts(predicted, ran)
    assert causes["durations"] == pytest.approx(-4.5)
    assert causes["transfers"] == pytest.approx(-1.5)
    assert causes.drop(["durations", "transfers"]).abs().max() < 1e-9


def test_shares_of_three() -> None:
    """Nothing changes until all three have: a third each, and nothing for who does not play."""
    assert _shapley(lambda members: float(members == 0b1011), [True, True, False, True]) == (
        pytest.approx([-1 / 3, -1 / 3, 0, -1 / 3])
    )


def test_a_collective_that_one_member_carries_out() -> None:
    """As in one process, where the first reduces for all: the others only wait for it."""
    task_graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2)
    timeline = ps.simulate(task_graph, replace(COSTS, parameter_bytes=4, optimizer_step=1))
    first, second = np.flatnonzero(task_graph.op == Op.REDUCE_GRAD)
    last = np.flatnonzero(task_graph.op == Op.STEP)[-1]
    assert task_graph.device[last] == task_graph.device[second] != task_graph.device[first]
    start, end = timeline.start.copy(), timeline.end.copy()
    assert timeline.duration[first] > 0
    start[second] = end[first]
    end[last] += 1
    causes = error_parts(timeline, replace(without_costs(timeline), start=start, end=end))
    assert causes["durations"] == pytest.approx(-1)
    assert causes.drop("durations").abs().max() < 1e-9


def test_a_receiver_that_is_issued_late() -> None:
    """With a rendezvous, a late RECV delays the SEND: the cause is the host, not a hand-over."""
    task_graph = graph("gpipe", m=2, rendezvous=True)
    free = ps.Costs(0, 0)
    causes = error_parts(
        ps.simulate(task_graph, free),
        without_costs(ps.simulate(task_graph, replace(free, launch=0.25))),
        launch=0.25,
    )
    assert causes["host"] == pytest.approx(-0.25 * len(task_graph))
    assert causes.drop("host").abs().max() < 1e-9


# Properties


@pytest.mark.slow
@given(st.data())
def test_parts_sum_to_the_error(data: st.DataObject) -> None:
    """Of any two runs of any graph."""
    task_graph = data.draw(graphs())
    predicted, ran = (
        ps.simulate(task_graph, data.draw(costs(task_graph.n_stages, task_graph.n_devices)))
        for _ in range(2)
    )
    launch = data.draw(st.sampled_from([None, 0.0, 0.5]))
    causes = error_parts(predicted, without_costs(ran), launch=launch)
    assert causes.sum() == pytest.approx(predicted.makespan - ran.makespan, rel=1e-9, abs=1e-6)


@pytest.mark.slow
@given(cases(), st.sampled_from([0.5, 2.0]))
def test_other_durations_are_nothing_but_durations(
    case: tuple[ps.TaskGraph, ps.Costs], factor: float
) -> None:
    """Where transfers are free and all stages slow down alike, all of the error is theirs.

    The seconds of GRAD_NORM are those of a collective, which is a transfer.
    """
    task_graph, prices = case
    free = replace(
        prices,
        network=ps.Network(host=ps.HostLink()),
        launch=0.0,
        output_seconds=0.0,
        grad_norm=0.0,
    )
    predicted, ran = ps.simulate(task_graph, free), ps.simulate(task_graph, free.scaled(factor))
    causes = error_parts(predicted, without_costs(ran))
    assert causes["durations"] == pytest.approx(predicted.makespan - ran.makespan, abs=1e-6)
    assert causes.drop("durations").abs().max() < 1e-6


@pytest.mark.slow
@given(st.data())
def test_a_run_with_one_link_a_pair_leaves_nothing_unexplained(data: st.DataObject) -> None:
    """Durations, messages and the host say it all."""
    # On streams of micro-batches, messages that last wait for the link, which nothing shows.
    streams = data.draw(st.sampled_from(["per_peer", "single"]))
    task_graph = data.draw(graphs(streams=streams).filter(lambda g: not len(g.collectives)))
    network = ps.Network(latency=data.draw(st.sampled_from([0.0, 0.5])), host=ps.HostLink(0.5))
    both = [
        replace(
            data.draw(costs(task_graph.n_stages, task_graph.n_devices)),
            network=network,
            launch=launch,
            launch_by_op=None,
        )
        for launch in (0.0, 0.25)
    ]
    predicted, ran = (ps.simulate(task_graph, prices) for prices in both)
    causes = error_parts(predicted, without_costs(ran), launch=0.25)
    assert abs(causes["unexplained"]) < 1e-6


def test_without_costs_of_the_prediction() -> None:
    """As when both were loaded from files: values come from the times of the prediction."""
    task_graph = graph("1f1b", 4, 8)
    slow = replace(COSTS, forward=(1.5, 1, 1, 1), network=ps.Network(latency=0.5, bandwidth=4.0))
    predicted, ran = ps.simulate(task_graph, COSTS), without_costs(ps.simulate(task_graph, slow))
    whole, bare = error_parts(predicted, ran), error_parts(without_costs(predicted), ran)
    assert bare.sum() == pytest.approx(whole.sum())
    assert bare["durations"] == pytest.approx(whole["durations"], abs=0.05)


# Mistakes


@pytest.mark.parametrize("launch", [-1, math.nan, math.inf, "1"])
def test_a_launch_that_is_none(launch: Any) -> None:
    timeline = ps.simulate(graph(), COSTS)
    with pytest.raises(ArgumentError, match="launch must be finite seconds >= 0 a task, got"):
        error_parts(timeline, timeline, launch=launch)


def test_a_partial_timeline() -> None:
    timeline = ps.simulate(graph(), COSTS)
    end = timeline.end.copy()
    end[-1] = np.nan
    with pytest.raises(TimelineError, match="is partial: 1 of"):
        error_parts(timeline, replace(timeline, end=end))
