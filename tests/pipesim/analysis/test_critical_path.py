"""Totals of a timeline, and its critical path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from kernels import as_python, compiled
from rules import all_reduced, issue_times
from simulated_runs import run, without_costs
from strategies import cases

import pipesim as ps
from pipesim.analysis.critical_path import WaitReason, device_table, last_waits
from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE, RECVS, Op

SLOW = ps.Network(bandwidth=1)


def path(timeline: ps.Timeline) -> str:
    """Return the critical path as text: ``task(waited for, gap)``."""
    return " ".join(
        f"{timeline.graph.task(int(task))}({row.waited_for}{f' {row.gap:g}' if row.gap else ''})"
        for task, row in timeline.why.critical_path().iterrows()
    )


def waits_by_task(timeline: ps.Timeline) -> dict[str, str]:
    """Return the last wait of each task as text: ``reason predecessor``."""
    graph, waits = timeline.graph, last_waits(timeline)
    names = [str(graph.task(task)) for task in range(len(graph))]
    return {
        name: f"{WaitReason(reason)} {names[task] if task >= 0 else ''}".rstrip()
        for name, task, reason in zip(names, waits.task, waits.reason, strict=True)
    }


def test_totals_by_hand() -> None:
    """GPipe, two devices of different speed: 0..3 on one, 1..6 on the other, then back."""
    costs = ps.Costs(forward=(1, 2), backward=(1, 2))
    timeline = run("gpipe", 2, 2, costs)
    # 0 | F0 F1 .. .. .. .. B1 .. B0
    # 1 | .. F0 F0 F1 F1 B1 B1 B0 B0 then device 0 at 9
    assert timeline.makespan == 10
    assert timeline.busy.tolist() == [4, 8]
    assert timeline.idle.tolist() == [6, 2]
    assert timeline.utilization.tolist() == [0.4, 0.8]
    assert timeline.bubble_fraction == 0.4
    assert timeline.throughput == 0.2


def test_recompute_is_not_a_bubble() -> None:
    """R computes, and so does STEP; messages do not."""
    costs = ps.Costs(1, 2, recompute=1, optimizer_step=3, output_bytes=1, network=SLOW)
    timeline = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 2), recompute="always"), costs)
    assert timeline.busy.tolist() == [2 * (1 + 1 + 2) + 3] * 2


def test_device_table() -> None:
    """One row a device; memory if costs are known."""
    timeline = run("1f1b", 2, 3, ps.Costs(1, 2, activation_bytes=4))
    table = device_table(timeline)
    assert list(table.columns) == ["busy", "idle", "utilization", "peak_memory"]
    assert table["busy"].tolist() == [9, 9]
    assert table["peak_memory"].tolist() == [8, 4]
    assert "peak_memory" not in device_table(replace(timeline, costs=None))


@pytest.mark.slow
@given(cases())
def test_totals(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Busy and idle make up the makespan, and the bubble is the idle share."""
    graph, costs = case
    timeline = ps.simulate(graph, costs)
    compute = graph.is_op(COMPUTE)
    assert timeline.makespan == timeline.end.max()
    for device in range(graph.n_devices):
        own = compute & (graph.device == device)
        busy = math.fsum(timeline.end[own]) - math.fsum(timeline.start[own])
        assert timeline.busy[device] == pytest.approx(busy, rel=1e-9, abs=1e-9)
    assert timeline.idle == pytest.approx(timeline.makespan - timeline.busy)
    assert 0 <= timeline.bubble_fraction <= 1
    if timeline.makespan:
        assert timeline.bubble_fraction == pytest.approx(1 - timeline.utilization.mean(), abs=1e-9)
        forwards = (graph.op == Op.F) & (graph.stage == 0)
        cells = {*zip(graph.replica[forwards], graph.microbatch[forwards], strict=True)}
        assert timeline.throughput == pytest.approx(len(cells) / timeline.makespan)


def test_nothing_ran() -> None:
    """No division by zero."""
    whole = run("gpipe", 2, 1, ps.Costs(1, 1))
    nothing = np.full(len(whole), np.nan)
    timeline = ps.Timeline(whole.graph, nothing, nothing, whole.nbytes, whole.costs)
    assert timeline.makespan == 0
    assert timeline.bubble_fraction == 1
    assert timeline.throughput == 0
    assert timeline.utilization.tolist() == [0, 0]
    with pytest.raises(TimelineError, match="'gpipe' has no task that ran"):
        timeline.why.critical_path()


def test_critical_path_through_the_slowest_device() -> None:
    """Down the first micro-batch, along device 1, and up the last."""
    timeline = run("gpipe", 2, 2, ps.Costs(forward=(1, 2), backward=(1, 2)))
    assert path(timeline) == (
        "0F0(start) 0SEND_F0(dependency) 1RECV_F0(message) 1F0(dependency) 1F1(stream) "
        "1B1(dependency) 1B0(stream) 1SEND_B0(dependency) 0RECV_B0(message) 0B0(dependency)"
    )


def test_critical_path_through_messages() -> None:
    """Latency is a gap; a message with a duration is a task."""
    network = ps.Network(latency=5, bandwidth=1)
    timeline = run("gpipe", 2, 1, ps.Costs(1, 2, output_bytes=3, network=network))
    # RECV.start = SEND.start + 5, three seconds long: it begins 2 after the SEND has ended.
    assert path(timeline) == (
        "0F0(start) 0SEND_F0(dependency) 1RECV_F0(message 2) 1F0(dependency) 1B0(dependency) "
        "1SEND_B0(dependency) 0RECV_B0(message 2) 0B0(dependency)"
    )


def test_critical_path_of_a_receive_that_waits_for_its_stream() -> None:
    """Received late, on ``compute``: the stream is the cause, although the message is younger."""
    costs = ps.Costs(forward=(1, 3), backward=1, output_bytes=1, network=SLOW)
    assert path(run("gpipe", 2, 2, costs, overlap=False)).startswith(
        "0F0(start) 0SEND_F0(dependency) 1RECV_F0(message -1) 1F0(dependency) 1RECV_F1(stream)"
    )


def test_critical_path_of_a_receive_that_waits_for_its_message() -> None:
    """Reached at 8, but it ends with the message's tail, at 10: that is the cause."""
    network = ps.Network(latency=2, bandwidth=1)
    costs = ps.Costs(forward=(1, 2), backward=1, output_bytes=3, network=network)
    timeline = run("gpipe", 2, 2, costs, overlap=False)
    assert path(timeline).startswith(
        "0F0(start) 0SEND_F0(dependency) 0F1(stream) 0SEND_F1(dependency) 1RECV_F1(message) "
        "1F1(dependency)"
    )


def test_critical_path_through_a_long_latency() -> None:
    """The message comes at 16, the stream is free at 14: not the stream's fault."""
    costs = ps.Costs(forward=(3, 1), backward=(1, 2), network=ps.Network(latency=10))
    assert path(run("gpipe", 2, 2, costs, overlap=False)) == (
        "0F0(start) 0SEND_F0(dependency) 0F1(stream) 0SEND_F1(dependency) 1RECV_F1(message 10) "
        "1F1(dependency) 1B1(dependency) 1SEND_B1(dependency) 1B0(stream) 1SEND_B0(dependency) "
        "0RECV_B0(message 10) 0B0(dependency)"
    )


def test_critical_path_through_a_shared_link() -> None:
    """0SEND_F1 waits from 8 to 9 for 1SEND_F0, which came first (rule 8)."""
    link = ps.Link(latency=0, bandwidth=1, pairs=((0, 1), (1, 2)))
    network = ps.Network(links=(link,))
    costs = ps.Costs(forward=(4, 1, 1), backward=1, output_bytes=2, network=network)
    assert "1SEND_F0(dependency) 0SEND_F1(link) 1RECV_F1(message" in path(run("gpipe", 3, 2, costs))


def test_critical_path_of_a_host() -> None:
    """The chain begins where a task was issued late (rule 7)."""
    timeline = run("gpipe", 1, 2, ps.Costs(forward=1, backward=1, launch=3))
    assert path(timeline) == "0B0(host 12)"
    late = run("gpipe", 1, 2, ps.Costs(forward=5, backward=5, launch=1))
    assert path(late) == "0F0(host 1) 0F1(stream) 0B1(dependency) 0B0(stream)"


def test_critical_path_with_a_host_a_device() -> None:
    """0F1 is the third that host 0 issues; what comes later waits for messages, not for hosts."""
    costs = ps.Costs(1, 1, launch=1, network=ps.Network(latency=3))
    assert path(run("gpipe", 2, 2, costs, hosts="per_device")) == (
        "0F1(host 3) 0SEND_F1(dependency) 1RECV_F1(message 3) 1F1(dependency) 1B1(dependency) "
        "1B0(stream) 1SEND_B0(dependency) 0RECV_B0(message 3) 0B0(dependency)"
    )


def test_critical_path_of_those_that_meet() -> None:
    """The host that is late may be that of the other end, or of another member."""
    costs = ps.Costs(1, (1, 20), launch=(1, 5), output_bytes=10, network=SLOW)
    timeline = run("gpipe", 2, 1, costs, hosts="per_device", rendezvous=True)
    # 0SEND_F0 is issued at 2, but 1RECV_F0 at 5.
    assert path(timeline) == (
        "0SEND_F0(host 5) 1RECV_F0(message -10) 1F0(dependency) 1B0(dependency) "
        "1SEND_B0(dependency) 0RECV_B0(message -10) 0B0(dependency)"
    )
    # Device 1 is issued its part at 12, when all gradients have been there since 10.
    graph = all_reduced(hosts="per_device")
    assert path(ps.simulate(graph, ps.Costs(1, 1, launch=(1, 4)))) == "0REDUCE_GRAD(host 12)"


def test_a_circle_of_waits_is_refused() -> None:
    """Times that contradict the order of a stream: 0SEND_F1 before 0SEND_F0, on one link."""
    timeline = run("gpipe", 2, 2, ps.Costs(1, 1, output_bytes=2, network=SLOW))
    ids = {str(timeline.graph.task(task)): task for task in range(len(timeline))}
    start, end = timeline.start.copy(), timeline.end.copy()
    for name, since, until in (("0SEND_F1", 2, 5), ("0SEND_F0", 5, 6)):
        start[ids[name]], end[ids[name]] = since, until
    contradictory = replace(timeline, start=start, end=end)
    assert waits_by_task(contradictory)["0SEND_F0"] == "link 0SEND_F1"
    assert waits_by_task(contradictory)["0SEND_F1"] == "stream 0SEND_F0"
    with pytest.raises(TimelineError, match=r"'gpipe' has no chain to task.*\(0SEND_F0\) waited"):
        contradictory.why.critical_path()


def test_last_waits_of_1f1b_by_hand() -> None:
    """Two devices; messages take no time."""
    # 0 | F0 F1 .. .. B0 B0 .. B1 B1
    # 1 | .. F0 B0 B0 F1 B1 B1 .. ..
    assert waits_by_task(run("1f1b", 2, 2, ps.Costs(1, 2))) == {
        "0F0": "start",
        "0SEND_F0": "dependency 0F0",
        "1RECV_F0": "message 0SEND_F0",
        "1F0": "dependency 1RECV_F0",
        "0F1": "stream 0F0",
        "0SEND_F1": "dependency 0F1",
        "1RECV_F1": "message 0SEND_F1",
        "1B0": "dependency 1F0",
        "1SEND_B0": "dependency 1B0",
        "0RECV_B0": "message 1SEND_B0",
        "0B0": "dependency 0RECV_B0",
        "1F1": "stream 1B0",
        "1B1": "dependency 1F1",
        "1SEND_B1": "dependency 1B1",
        "0RECV_B1": "message 1SEND_B1",
        "0B1": "dependency 0RECV_B1",
    }


def test_last_waits_of_a_rendezvous_by_hand() -> None:
    """Both ends of the first message are free at 3; of the two, the larger id counts."""
    costs = ps.Costs(1, 1, output_bytes=2, network=SLOW)
    waits = waits_by_task(run("gpipe", 2, 2, costs, rendezvous=True))
    assert waits["0SEND_F1"] == "rendezvous 1RECV_F0"


def test_last_waits_of_a_group_by_hand() -> None:
    """Members wait for 0B0 together; only device 0 needs its result."""
    waits = waits_by_task(ps.simulate(all_reduced(), ps.Costs(1, 1)))
    assert waits["0REDUCE_GRAD"] == "dependency 0B0"
    assert waits["1REDUCE_GRAD"] == "group 0B0"


@pytest.mark.parametrize("options", [{}, {"rendezvous": True}, {"n_replicas": 2}])
def test_last_waits_agree_with_the_critical_path(options: dict[str, Any]) -> None:
    """The path is the chain of last waits; of measured and of partial timelines too."""
    costs = ps.Costs(
        (1, 2, 1), 2, output_bytes=1, parameter_bytes=3, launch=0.0625, network=ps.Network(0.5, 2)
    )
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 3, 4), **options), costs)
    failed = timeline.start > timeline.makespan / 2
    start, end = (np.where(failed, np.nan, seconds) for seconds in (timeline.start, timeline.end))
    partial = replace(timeline, start=start, end=end)
    measured = without_costs(timeline, issued=np.maximum(timeline.issue_times - 0.01, 0.0))
    for variant in (timeline, partial, measured):
        waits, chain = last_waits(variant), variant.why.critical_path()
        tasks = chain.index.to_numpy()
        assert len(tasks) > 5
        assert waits.task[tasks].tolist() == [-1, *tasks[:-1].tolist()]
        assert [str(WaitReason(reason)) for reason in waits.reason[tasks]] == (
            chain["waited_for"].tolist()
        )
    waits = last_waits(partial)
    assert waits.task[failed].tolist() == [-1] * failed.sum()
    assert waits.reason[failed].tolist() == [WaitReason.START] * failed.sum()


@pytest.mark.slow
def test_last_waits_compiled_and_plain() -> None:
    """The loop gives the same answer, compiled or not."""
    costs = ps.Costs((1, 2, 1), 2, output_bytes=1, launch=0.125, network=ps.Network(0.25, 2))
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 3, 6), n_replicas=2), costs)
    with as_python():
        plain = last_waits(timeline)
    with compiled():
        for column, expected in zip(last_waits(timeline), plain, strict=True):
            assert column.dtype == expected.dtype
            assert column.tolist() == expected.tolist()


@pytest.mark.slow
@given(cases())
def test_critical_path(case: tuple[ps.TaskGraph, ps.Costs]) -> None:
    """Gaps and durations add up to the makespan, and each link of the chain has its cause."""
    graph, costs = case
    timeline, tasks = ps.simulate(graph, costs), costs.of(graph)
    chain = timeline.why.critical_path()
    total = math.fsum(chain["gap"]) + math.fsum(chain["end"] - chain["start"])
    assert total == pytest.approx(timeline.makespan, rel=1e-9, abs=1e-9)
    assert chain["end"].iloc[-1] == timeline.makespan
    start, end, issued = timeline.start, timeline.end, issue_times(graph, tasks)
    before: int | None = None
    for task, cause in zip(chain.index.tolist(), chain["waited_for"], strict=True):
        label = f"{graph.task(task)} waited for {cause}"
        if cause == "start":
            assert before is None, label
            assert start[task] == 0, label
        elif cause == "host":
            others = [task]
            if graph.rendezvous and graph.pair[task] >= 0:
                others.append(int(graph.pair[task]))
            if graph.group[task] >= 0:
                others.extend(graph.collectives[graph.group[task]].tolist())
            assert before is None, label
            assert start[task] == max(issued[t] for t in others), label
        elif cause == "message":
            assert before == graph.pair[task], label
            assert graph.op[task] in RECVS, label
            latency = tasks.latency[task]
            ends_with_it = end[task] == end[before] + latency
            assert ends_with_it or start[task] == start[before] + latency, label
            assert ends_with_it or end[task] == start[task], label
        else:
            assert before is not None, label
            if graph.part[task] >= 0 and graph.op[before] in (Op.B, Op.W):  # a part of it
                assert start[before] <= start[task] <= end[before], label
            else:
                assert start[task] == end[before], label
        before = task
