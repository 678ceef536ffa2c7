"""Replays: a simulated timeline gives itself, and a measured one what its graph explains.

``make fuzz`` runs this file with more graphs: FUZZ_EXAMPLES says how many.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from simulated_runs import without_costs
from small_pipelines import cut, data, dense, pipeline
from strategies import cases, noises, skipping_cases

import pipesim as ps
from pipesim.costs import TaskCosts
from pipesim.errors import AccuracyWarning, CostsError, TimelineError
from pipesim.ops import Op

#: Graphs of each engine and number of hosts.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
LAUNCHES = st.sampled_from([0.0, 0.1, 0.37, 1.0])


def graph(name: str = "1f1b", p: int = 2, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, p, m), **options)


def assert_itself(timeline: ps.Timeline, engine: str = "compiled") -> ps.Timeline:
    """Compare a timeline with its replay; return that."""
    again = ps.replay(timeline, engine=engine)
    for one, other in ((again.start, timeline.start), (again.end, timeline.end)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * timeline.makespan)
    same = (again.start == timeline.start).all() and (again.end == timeline.end).all()
    event(f"every start and end ==: {same}")
    event(f"makespan ==: {again.makespan == timeline.makespan}")
    return again


# What was simulated


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", "simpy"])
@pytest.mark.parametrize("hosts", ["one", "per_device"])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_simulated_timeline(hosts: str, engine: str, data: st.DataObject) -> None:
    """Of any graph: launch, noise, shared links, collectives, buckets and skips."""
    some = st.one_of(cases(hosts=hosts), skipping_cases(hosts=hosts))
    task_graph, costs = data.draw(some)
    launch = data.draw(st.one_of(LAUNCHES, st.tuples(*[LAUNCHES] * task_graph.n_stages)))
    noise = data.draw(st.one_of(st.none(), noises(task_graph)))
    timeline = ps.simulate(task_graph, replace(costs, launch=launch), noise=noise)
    assert_itself(assert_itself(timeline, engine), engine)


@pytest.mark.parametrize("hosts", ["one", "per_device"])
@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_by_hand(hosts: str, n_stages: int) -> None:
    """Hosts are late throughout: a step lasts as long as issuing it, and the last task."""
    task_graph = graph("gpipe", n_stages, 8, hosts=hosts, step="none")
    timeline = ps.simulate(task_graph, ps.Costs(1, 1, launch=4))
    issuing = max(np.bincount(task_graph.host[task_graph.device])) * 4
    assert timeline.makespan == issuing + 1 or hosts == "per_device"
    for engine in ("compiled", "simpy"):
        again = ps.replay(timeline, engine=engine)
        assert (again.start == timeline.start).all()
        assert (again.end == timeline.end).all()


def of_tasks(task_graph: ps.TaskGraph, costs: ps.Costs, *, recorded: bool) -> TaskCosts:
    """Return costs whose tasks each have a launch of their own."""
    tasks = costs.of(task_graph).per_task()
    launch = np.arange(len(task_graph)) % 5 / 7
    return replace(
        tasks, table=tasks.table._replace(launch=launch), costs=costs if recorded else None
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_launches_of_tasks(recorded: bool, tmp_path: Path) -> None:
    """Costs of tasks say when they are issued, not those of stages that they come from."""
    task_graph = graph(p=3, hosts="per_device")
    costs = ps.Costs(1, 2, launch=9, network=ps.Network(latency=0.3))
    timeline = ps.simulate(task_graph, of_tasks(task_graph, costs, recorded=recorded))
    assert timeline.issued is not None
    assert (ps.replay(timeline).end == timeline.end).all()
    assert (ps.replay(ps.replay(timeline)).end == timeline.end).all()
    timeline.save(tmp_path / "t.csv")
    loaded = ps.Timeline.load(tmp_path / "t.csv", costs=costs if recorded else None)
    assert (ps.replay(loaded).end == timeline.end).all()


@pytest.mark.parametrize("with_costs", [True, False])
@pytest.mark.parametrize("hosts", ["one", "per_device"])
def test_from_a_file(with_costs: bool, hosts: str, tmp_path: Path) -> None:
    """Issue times come back, whether or not the costs are given again."""
    costs = ps.Costs(1, 1.7, launch=(0.1, 0.7), output_bytes=3, network=ps.Network(0.1, 7.0))
    timeline = ps.simulate(graph(hosts=hosts), costs)
    timeline.save(tmp_path / "t.csv")
    loaded = ps.Timeline.load(tmp_path / "t.csv", costs=costs if with_costs else None)
    assert loaded.issued is not None
    assert loaded.issued.tolist() == timeline.issue_times.tolist()
    again = ps.replay(loaded)
    assert (again.start == timeline.start).all()
    assert (again.end == timeline.end).all()


def test_file_without_launch_is_as_it_was(tmp_path: Path) -> None:
    ps.simulate(graph(), ps.Costs(1, 2)).save(tmp_path / "t.csv")
    assert "issued" not in (tmp_path / "t.csv").read_text()


@pytest.mark.parametrize("value", ["-1", "inf", "x"])
def test_impossible_issue_times_in_a_file(value: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    ps.simulate(graph(), ps.Costs(1, 2, launch=1)).save(path)
    head, first, *rest = path.read_text().splitlines()
    assert head.split(",")[-1] == "issued"
    first = ",".join([*first.split(",")[:-1], value])
    path.write_text("\n".join([head, first, *rest, ""]))
    with pytest.raises(TimelineError, match=r"line 2.*issued"):
        ps.Timeline.load(path)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_impossible_issue_times_of_costs(value: float) -> None:
    tasks = replace(ps.Costs(1, 2).of(graph()), issued=np.full(len(graph()), value))
    with pytest.raises(CostsError, match=r"issued of 0F0 \(task 0\) must be finite and >= 0"):
        ps.simulate(graph(), tasks)


# What was measured


def test_a_gap_is_not_the_hosts() -> None:
    """Tasks that start late though they were issued: the replay is shorter by that."""
    timeline = ps.simulate(graph("gpipe", 1, 4, step="none"), ps.Costs(1, 1))
    late = np.arange(len(timeline)) * 0.5  # before each task, half a second
    gaps = {"start": timeline.start + late, "end": timeline.end + late}
    for issued in (None, np.zeros(len(timeline)), np.full(len(timeline), np.nan)):
        assert ps.replay(without_costs(timeline, issued=issued, **gaps)).makespan == 8
    # Issued 0.1 s before each starts: of every 0.5 s, the host explains what remains.
    issued = np.maximum(timeline.start + late - 0.1, 0.0)
    assert ps.replay(without_costs(timeline, issued=issued, **gaps)).makespan == pytest.approx(11.4)


def test_a_message_is_not_what_the_host_was_late_for() -> None:
    """Its latency ends when its receiver has it, though that starts later."""
    costs = ps.Costs(1, 1, launch=1, output_bytes=1, network=ps.Network(latency=1.5))
    timeline = ps.simulate(graph("gpipe", m=2), costs)
    run = without_costs(timeline, issued=timeline.issue_times)
    assert (ps.replay(run).end == timeline.end).all()
    assert ps.Costs.from_timeline(run, launch=1).network.latency == 1.5


def test_clocks_that_differ() -> None:
    """No task is issued after it has started; what clocks say otherwise delays nothing."""
    timeline = ps.simulate(graph(), ps.Costs(1, 1))
    run = without_costs(timeline, issued=timeline.start + 1e-3)
    assert ps.replay(run).makespan == timeline.makespan


def test_the_executor_records_when_tasks_are_issued(tmp_path: Path) -> None:
    """In order, before they start; and in files."""
    task_graph = graph(m=4)
    with pipeline(cut(dense(2), [1, 1]), task_graph) as subject:
        timeline = subject.step(*data(8)).timeline
    issued = timeline.issued
    assert issued is not None
    assert (np.diff(issued) > 0).all()
    assert (issued < timeline.start).all()
    timeline.save(tmp_path / "t.csv")
    assert ps.Timeline.load(tmp_path / "t.csv").issue_times.tolist() == issued.tolist()


# Other analyses


def late_run() -> tuple[ps.Timeline, ps.Timeline]:
    """Return a prediction without launch, and a run whose host was late, with issue times."""
    task_graph = graph("gpipe", m=2, step="none")
    ran = ps.simulate(task_graph, ps.Costs(1, 1, launch=1))
    return ps.simulate(task_graph, ps.Costs(1, 1)), without_costs(ran, issued=ran.issue_times)


def test_parts_of_an_error() -> None:
    """Recorded issue times are the host's part, without a value for launch."""
    predicted, ran = late_run()
    causes = ps.Comparison(predicted, ran).error_parts()
    assert causes["host"] == predicted.makespan - ran.makespan < 0
    assert causes.drop("host").abs().max() < 1e-12


def test_critical_path_and_idle_time() -> None:
    """As the run with its costs has them; and a moment between issue and start changes nothing."""
    _, ran = late_run()
    own = ps.simulate(ran.graph, ps.Costs(1, 1, launch=1))
    assert (
        ran.why.critical_path()["waited_for"].tolist()
        == own.why.critical_path()["waited_for"].tolist()
    )
    assert ran.why.critical_path()["waited_for"].iloc[0] == "host"
    priced = replace(ran, costs=ps.Costs(1, 1))  # what is recorded counts, not the costs' launch
    assert priced.why.idle_by_cause().equals(own.why.idle_by_cause())
    assert ran.issued is not None
    a_moment_before = replace(ran, issued=np.maximum(ran.issued - 1e-3, 0.0))
    assert a_moment_before.why.critical_path()["waited_for"].iloc[0] == "host"


def test_buckets_that_were_issued_late() -> None:
    """A bucket that waited for the host does not show what part of its backward it needs."""
    task_graph = graph("gpipe", 1, 1, n_replicas=2, grad_sync="bucketed", n_buckets=2, step="none")
    half = ((0.5, 0.5), (0.5, 1.0))
    costs = ps.Costs(1, 4, reduce_grad=1, buckets=(half,))
    tasks = costs.of(task_graph).per_task()
    launch = np.where((task_graph.op == Op.REDUCE_GRAD) & (task_graph.part == 0), 5.0, 0.0)
    late = ps.simulate(task_graph, replace(tasks, table=tasks.table._replace(launch=launch)))
    first = np.flatnonzero((task_graph.op == Op.REDUCE_GRAD) & (task_graph.part == 0))
    assert (late.start[first] == 10).all()  # its half of B was done at 3
    predicted = ps.simulate(task_graph, costs)
    causes = ps.Comparison(predicted, late).error_parts()
    assert causes["host"] == predicted.makespan - late.makespan < 0
    assert causes.drop("host").abs().max() == 0


def test_costs_from_a_timeline_whose_host_was_late() -> None:
    """They leave the host out, and say so, with the launch that would have it."""
    costs = ps.Costs(1, 2, launch=0.5, network=ps.Network(latency=0.1))
    timeline = ps.simulate(graph("gpipe"), costs)
    with pytest.warns(AccuracyWarning, match=r"18% of its makespan.* this timeline: 0\.5"):
        ps.Costs.from_timeline(timeline)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ps.Costs.from_timeline(timeline, launch=0.5)
        ps.Costs.from_timeline(ps.simulate(graph("gpipe"), replace(costs, launch=1e-4)))
    assert ps.simulate(timeline.graph, again).makespan == pytest.approx(timeline.makespan)
