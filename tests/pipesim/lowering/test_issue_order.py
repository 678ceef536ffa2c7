"""Orders in which hosts issue tasks, and which host issues which: `lower(issue_order=, hosts=)`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules import assert_rules_hold
from strategies import costs, lowerings
from strategies import hosts as any_hosts

import pipesim as ps
from pipesim.errors import ArgumentError, PipeError, TimelineError
from pipesim.graph import Tasks
from pipesim.lowering.issue_order import ISSUE_ORDERS
from pipesim.ops import COMPUTE, Op


def computed(graph: ps.TaskGraph) -> str:
    """Return the compute tasks in issue order."""
    return " ".join(str(graph.task(k)) for k in np.flatnonzero(graph.is_op(COMPUTE)))


def forward_seconds(issue_order: Any, launch: float, m: int, n: int, **options: Any) -> float:
    """Return when the last F ends; F takes 1, messages nothing, and no time to issue."""
    schedule = ps.schedule("gpipe", n, m)
    graph = ps.lower(schedule, issue_order=issue_order, forward_only=True, **options)
    costs = ps.Costs(1, 1, launch=launch, launch_by_op={"messages": 0})
    return ps.simulate(graph, costs).makespan


def test_the_clock_cycle_costs_least() -> None:
    """By hand: launch 0.3 s, F 1 s, 8 micro-batches, 4 stages."""
    times = [forward_seconds(order, 0.3, 8, 4) for order in ISSUE_ORDERS]
    assert times == pytest.approx([11.8, 12.7, 15.5])
    assert forward_seconds("clock_cycle", 0.3, 8, 4, hosts="per_device") == pytest.approx(11.3)


@pytest.mark.parametrize(("m", "n"), [(8, 4), (5, 3), (3, 6), (4, 1)])
@pytest.mark.parametrize("launch", [0.0, 0.1, 1 / 3, 0.9])
def test_closed_forms_of_forwards(m: int, n: int, launch: float) -> None:
    """With one host; F takes 1 s.

    Micro-batch by micro-batch: the last one begins when its first F is issued, or reached. Stage by
    stage: the last stage begins when its first F is issued, or its input is there.
    """
    actual = forward_seconds("microbatch_major", launch, m, n)
    assert actual == pytest.approx(launch + (m - 1) * max(1, n * launch) + n)
    actual = forward_seconds("stage_major", launch, m, n)
    assert actual == pytest.approx(launch + (n - 1) * max(1, m * launch) + m)


@pytest.mark.parametrize("hosts", ["one", "per_device"])
def test_no_order_beats_the_clock_cycle(hosts: Any) -> None:
    """With one host, or processes, whatever launches take: the reason for the default."""
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"):
        schedule = ps.schedule(name, 4, 8)
        graphs = [ps.lower(schedule, hosts=hosts, issue_order=order) for order in ISSUE_ORDERS]
        for launch in (0.02, 0.1, 1 / 6, 1 / 3, 0.5):
            costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, launch=launch)
            clock, *others = (ps.simulate(graph, costs).makespan for graph in graphs)
            assert clock <= min(others) * (1 + 1e-12), (name, launch)


@pytest.mark.parametrize(
    ("issue_order", "expected"),
    [
        ("clock_cycle", "0F0 0F1 1F0 0R1 1F1 1R1 1B1 0B1 1R0 0R0 1B0 0B0"),
        ("microbatch_major", "0F0 1F0 0F1 1F1 1R1 1B1 0R1 0B1 1R0 1B0 0R0 0B0"),
        ("stage_major", "0F0 0F1 1F0 1F1 1R1 1B1 1R0 1B0 0R1 0B1 0R0 0B0"),
    ],
)
def test_orders_by_hand(issue_order: Any, expected: str) -> None:
    """Forwards first, as the schedule has them; then backwards."""
    schedule = ps.schedule("gpipe", 2, 2)
    graph = ps.lower(schedule, recompute="always", issue_order=issue_order, step="none")
    assert computed(graph) == expected


def test_steady_states_by_hand() -> None:
    """1F1B issues of what is possible the oldest pass, or the nearest stage."""
    schedule = ps.schedule("1f1b", 2, 3)
    graphs = [ps.lower(schedule, issue_order=order) for order in ISSUE_ORDERS[1:]]
    steps = " 1STEP 0STEP"
    assert computed(graphs[0]) == "0F0 1F0 0F1 1B0 1F1 0B0 0F2 1B1 1F2 0B1 1B2 0B2" + steps
    assert computed(graphs[1]) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0F2 1F2 1B2 1STEP 0B1 0B2 0STEP"


def test_messages_are_issued_behind_what_makes_them() -> None:
    """And replicas take turns, task by task; collectives have all their members together."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), issue_order="stage_major", n_replicas=2)
    names = [f"{graph.replica[k]}:{graph.task(k)}" for k in range(len(graph))]
    assert " ".join(names) == (
        "0:0F0 0:0SEND_F0 0:1RECV_F0 1:0F0 1:0SEND_F0 1:1RECV_F0 0:1F0 1:1F0 "
        "0:1B0 0:1SEND_B0 0:0RECV_B0 1:1B0 1:1SEND_B0 1:0RECV_B0 0:1REDUCE_GRAD 1:1REDUCE_GRAD "
        "0:1STEP 1:1STEP 0:0B0 1:0B0 0:0REDUCE_GRAD 1:0REDUCE_GRAD 0:0STEP 1:0STEP"
    )


def queues(graph: ps.TaskGraph) -> dict[tuple[int, str], list[tuple[int, str]]]:
    """Return the tasks of each stream in its order."""
    names = [(int(graph.replica[k]), str(graph.task(k))) for k in range(len(graph))]
    of_streams = zip(graph.streams, range(len(graph.streams)), strict=True)
    return {stream: [names[k] for k in graph.queues[number]] for stream, number in of_streams}


@pytest.mark.slow
@given(lowerings(), st.data())
def test_no_stream_changes_its_order(case: Any, data: st.DataObject) -> None:
    """Nor does any time, where launches take none and no link is shared (rule 7)."""
    schedule, options = case
    graphs = [ps.lower(schedule, **{**options, "issue_order": order}) for order in ISSUE_ORDERS]
    drawn = data.draw(costs(graphs[0].n_stages, graphs[0].n_devices))
    network = ps.Network(2.0, math.inf, host=ps.HostLink(1.0))
    free = replace(drawn, launch=0.0, launch_by_op=None, network=network, output_seconds=0.0)
    spans = {ps.simulate(graph, free).makespan for graph in graphs}
    assert len(spans) == 1
    assert queues(graphs[1]) == queues(graphs[2]) == queues(graphs[0])
    for graph in graphs[1:]:
        waits = graph.precedence
        assert (waits.values < waits.rows).all()
        ps.verify(graph)
    durations = drawn.of(graphs[2])
    assert_rules_hold(ps.simulate(graphs[2], durations), durations)


def test_without_overlap_a_rendezvous_does_not_deadlock() -> None:
    """Receivers' queues have to get to a message before it can be sent."""
    for order in ISSUE_ORDERS:
        graph = ps.lower(
            ps.schedule("gpipe", 3, 4), overlap=False, rendezvous=True, issue_order=order
        )
        assert ps.simulate(graph, ps.Costs(1, 2)).makespan == (4 + 2) * 3


@pytest.mark.parametrize("hosts", [[0, 0, 1], (0, 0, 1), np.array([0, 0, 1]), "0,0,1"])
def test_a_host_of_some_devices(hosts: Any, tmp_path: Path) -> None:
    """Saved and loaded too; each issues the tasks of its devices alone."""
    schedule = ps.schedule("1f1b", 3, 4)
    graph = ps.lower(schedule, hosts=hosts)
    assert graph.host.tolist() == [0, 0, 1]
    threads = ps.lower(schedule, hosts=hosts, host_threads=True)
    together = ps.simulate(threads, ps.Costs(1, 2, launch=0.5))
    together.save(tmp_path / "t.csv")
    loaded = ps.simulate(ps.Timeline.load(tmp_path / "t.csv").graph, together.costs)
    assert (loaded.issue_times == together.issue_times).all()
    timeline = ps.simulate(graph, ps.Costs(1, 2, launch=0.5))
    assert (timeline.issue_times < together.issue_times).any()
    issued = timeline.issue_times[graph.device == 2]
    np.testing.assert_allclose(issued, 0.5 * np.arange(1, len(issued) + 1))
    timeline.save(tmp_path / "t.csv")
    loaded = ps.Timeline.load(tmp_path / "t.csv")
    assert loaded.graph.host.tolist() == [0, 0, 1]
    assert ps.simulate(loaded.graph, ps.Costs(1, 2, launch=0.5)).makespan == timeline.makespan


@given(any_hosts(3))
def test_a_graph_that_is_put_in_order_keeps_its_hosts(hosts: Any) -> None:
    """Of three devices, whose tasks come in an order that is not topological."""
    stage = np.array([2, 1, 0], dtype=np.int64)
    zero = np.zeros(3, dtype=np.int64)
    tasks = Tasks(op=zero + Op.F, device=stage, stage=stage, microbatch=zero, stream=zero)
    graph = ps.TaskGraph.build(tasks, hosts=hosts)
    assert [str(graph.task(k)) for k in range(3)] == ["0F0", "1F0", "2F0"]
    named = {"one": [0, 0, 0], "per_device": [0, 1, 2]}
    assert graph.host.tolist() == (named[hosts] if isinstance(hosts, str) else hosts)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([0, 1], r"hosts has 2 numbers, for a graph of 4 devices \(of all replicas\)"),
        ([0, 0, 2, 2], "hosts names host 2, but no device has host 1; number hosts from 0"),
        ([0, 0.5, 1, 1], r"hosts: device 1 has host 0.5; hosts have whole numbers from 0 to 3"),
        ([0, True, 1, 1], "hosts: device 1 has host True"),
        ([0, 0, -1, 0], "hosts: device 2 has host -1"),
        ([0, 0, 10**9, 0], "hosts: device 2 has host 1000000000"),
        ({0: 1}, "unknown hosts {0: 1}.*; or give the number of each device's host, such as"),
        ("per-device", "unknown hosts 'per-device'; did you mean 'per_device'"),
        ("0,0,x,1", "unknown hosts '0,0,x,1'"),
    ],
)
def test_hosts_that_mean_nothing(hosts: Any, message: str) -> None:
    """Two replicas of two devices."""
    with pytest.raises(PipeError, match=message):
        ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, hosts=hosts)


def test_hosts_of_a_file_are_checked(tmp_path: Path) -> None:
    """As those that are given."""
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), hosts=[1, 0]), ps.Costs(1, 1))
    timeline.save(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    assert ",1 0\n" in text
    (tmp_path / "t.csv").write_text(text.replace(",1 0\n", ",1 1\n"))
    with pytest.raises(TimelineError, match="no device has host 0"):
        ps.Timeline.load(tmp_path / "t.csv")


def test_unknown_orders() -> None:
    with pytest.raises(ArgumentError, match="unknown issue_order 'stage'; did you mean"):
        ps.lower(ps.schedule("gpipe", 2, 2), issue_order="stage")  # type: ignore[arg-type]


def test_threads_wait_for_each_other() -> None:
    """By hand: a launch a second; host 1 issues a RECV once host 0 has issued its SEND (rule 7)."""
    options = {"issue_order": "stage_major", "hosts": "per_device", "step": "none"}
    costs = ps.Costs(1, 1, launch=1)
    issued = {}
    for host_threads in (False, True):
        graph = ps.lower(ps.schedule("gpipe", 2, 2), host_threads=host_threads, **options)
        for engine in ("simpy", "compiled"):
            times = ps.simulate(graph, costs, engine=engine).issue_times
            issued[host_threads, engine] = [
                (str(graph.task(k)), times[k]) for k in np.flatnonzero(graph.device == 1)[:4]
            ]
    names = ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]
    assert issued[False, "simpy"] == list(zip(names, [1, 2, 3, 4], strict=True))
    assert issued[True, "simpy"] == list(zip(names, [3, 5, 6, 7], strict=True))
    assert issued[True, "simpy"] == issued[True, "compiled"]
    assert issued[False, "simpy"] == issued[False, "compiled"]


def test_threads_wait_for_every_earlier_member_of_a_collective() -> None:
    """The last of three replicas waits for the other two: the first one works for all."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=3, hosts="per_device")
    first, second, third = np.flatnonzero(graph.op == Op.REDUCE_GRAD).tolist()
    assert {first, second} <= set(graph.issued_first[third].tolist())


def test_exchanges_are_of_the_forward() -> None:
    """By stage, all micro-batches of a sharded stage come before the next stage's forward."""
    graph = ps.lower(
        ps.schedule("gpipe", 4, 3), n_replicas=2, sharded=[0], exchange_work="compute",
        issue_order="stage_major",
    )  # fmt: skip
    forward = [str(graph.task(k)) for k in range(len(graph)) if graph.op[k] in (Op.F, Op.DISPATCH)]
    last = max(k for k, task in enumerate(forward) if task.startswith("0"))
    assert all(task.startswith("0") for task in forward[: last + 1])
