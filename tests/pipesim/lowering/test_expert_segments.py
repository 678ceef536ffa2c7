"""Stages with experts: segments, exchanges of tokens, pairs that hide them, costs and memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, GraphError
from pipesim.graph import Tasks
from pipesim.ops import Action, Op, Overlapped

#: A second for each segment of one layer, and for each exchange.
SECONDS = ps.Costs(
    3, input_grad=3, weight_grad=3, expert_layers=1, exchange_dispatch=1, exchange_combine=1
)


def lowered(name: str, n_devices: int, n_microbatches: int, **options: Any) -> ps.TaskGraph:
    schedule = ps.schedule(name, n_devices, n_microbatches)
    return ps.lower(schedule, **{"expert_layers": 1, "step": "none", **options})


def pair() -> ps.Schedule:
    """Return F and B of micro-batch 0, of which the B is paired with the F of micro-batch 1."""
    both = Overlapped(Action(0, Op.F, 1), Action(0, Op.B, 0))
    return ps.Schedule.from_orders([["0F0", both, "0B1"]])


def test_exchanges_of_one_microbatch_are_exposed() -> None:
    """The compute stream waits for each of them."""
    timeline = ps.simulate(lowered("gpipe", 1, 1), replace(SECONDS, backward=3))
    assert draw(timeline) == grid("""
        0          | F0 .. F0 .. F0 B0 .. B0 .. B0
        0 exchange | .. d0 .. c0 .. .. C0 .. D0 ..
    """)


def test_a_pair_hides_them() -> None:
    """Segments of F1 and B0 alternate, so that each exchange runs behind the other's segment."""
    graph = ps.lower(pair(), expert_layers=1, step="none")
    timeline = ps.simulate(graph, replace(SECONDS, backward=3))
    assert draw(timeline) == grid("""
        0          | F0 .. F0 .. F0 F1 B0 F1 B0 F1 B0 B1 .. B1 .. B1
        0 exchange | .. d0 .. c0 .. .. d1 C0 c1 D0 .. .. C1 .. D1 ..
    """)


def test_a_pair_without_experts_stays_one_action() -> None:
    graph = ps.lower(pair(), expert_layers=0)
    assert graph.kinds.overlapped.any()
    assert len(graph) == len(ps.lower(pair()))
    assert not ps.lower(pair(), expert_layers=1).kinds.overlapped.any()


def test_exchanges_share_their_links_with_messages() -> None:
    """Two devices of a node have one NIC: an exchange waits for a message that holds it."""
    nodes = ps.Nodes(1, nic_bandwidth=1.0, n_nics=1)
    graph = lowered("gpipe", 2, 2, n_replicas=2)
    costs = ps.Costs(
        3, backward=3, expert_layers=1, expert_replicas=2, dispatch_bytes=2, combine_bytes=2,
        output_bytes=4, network=ps.Network(nodes=nodes),
    )  # fmt: skip
    timeline = ps.simulate(graph, costs)
    free = ps.simulate(graph, replace(costs, output_bytes=0))
    assert free.duration[graph.op == Op.ALL_TO_ALL].tolist() == [1.0] * 32
    assert timeline.makespan > free.makespan + 3 * 4
    assert (timeline.start == ps.simulate(graph, costs, engine="simpy").start).all()
    slower = ps.Network(nodes=replace(nodes, nic_bandwidth=0.5))
    again = ps.Costs.from_timeline(timeline, network=slower)
    assert (again.dispatch_bytes, again.combine_bytes) == (2, 2)
    assert ps.simulate(graph, again).duration[graph.op == Op.ALL_TO_ALL].tolist() == [2.0] * 32


def test_layers_are_numbered_in_the_order_in_which_they_run() -> None:
    graph = lowered("gpipe", 1, 1, expert_layers=2)
    (exchange,) = (k for k, (_, name) in enumerate(graph.streams) if name == "exchange")
    assert [str(graph.task(int(task))) for task in graph.queues[exchange]] == [
        *("0ALL_TO_ALL0.dispatch0", "0ALL_TO_ALL0.combine0"),
        *("0ALL_TO_ALL0.dispatch1", "0ALL_TO_ALL0.combine1"),
        *("0ALL_TO_ALL0.combine_grad0", "0ALL_TO_ALL0.dispatch_grad0"),
        *("0ALL_TO_ALL0.combine_grad1", "0ALL_TO_ALL0.dispatch_grad1"),
    ]
    assert {Action.parse(str(graph.task(k))) for k in range(len(graph))} == {
        graph.task(k).action for k in range(len(graph))
    }


def test_a_graph_without_the_tasks_takes_as_long_when_nothing_overlaps() -> None:
    """F, B and I have the seconds of their exchanges; R has them in either graph."""
    for options in ({}, {"recompute": "always"}):
        for name in ("1f1b", "zb_h1"):
            graph = lowered(name, 3, 4, **options)
            whole = lowered(name, 3, 4, expert_layers=(), **options)
            times = [ps.simulate(x, SECONDS).makespan for x in (graph, whole)]
            assert times[0] == pytest.approx(times[1])


def test_dualpipe_hides_most_exchanges() -> None:
    """A pair takes little longer than its compute (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).

    Without tasks for exchanges all are exposed.
    """
    costs = ps.Costs(
        4, input_grad=4, weight_grad=4, expert_layers=1, exchange_dispatch=1, exchange_combine=1
    )
    options: dict[str, Any] = {"step": "none"}
    hidden, exposed, free = (
        ps.simulate(ps.lower(ps.schedule("dualpipe", 8, 40), **options, **layers), c).makespan
        for layers, c in (
            ({"expert_layers": 1}, costs),
            ({}, costs),
            ({}, ps.Costs(4, input_grad=4, weight_grad=4)),
        )
    )
    assert free < hidden < exposed
    assert (hidden - free) / (exposed - free) < 0.35


def test_segments_have_the_shares_of_costs() -> None:
    shares = ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.5, 0.5, 0.0))
    graph = lowered("zb_h1", 2, 2)
    costs = replace(SECONDS, forward=8.0, input_grad=4.0, segments=[shares] * 2)
    timeline = ps.simulate(graph, costs)
    for op, seconds, own in ((Op.F, 8, shares[0]), (Op.I, 4, shares[2])):
        for part, share in enumerate(own):
            tasks = (graph.op == op) & (graph.part == part)
            assert timeline.duration[tasks].tolist() == pytest.approx([seconds * share] * 4)
    shown = ps.Costs.from_timeline(timeline)
    assert shown.expert_layers == (1.0, 1.0)
    assert np.allclose(shown.segments[0][0], shares[0])
    assert ps.simulate(graph, shown).makespan == pytest.approx(timeline.makespan)


def test_micro_batches_have_the_seconds_of_their_segments() -> None:
    costs = replace(SECONDS, forward=[[3, 4, 5, 6]] * 2, backward=[[6, 5, 4, 3]] * 2)
    timeline = ps.simulate(lowered("1f1b", 2, 4), costs)
    shown = ps.Costs.from_timeline(timeline, per_microbatch=True)
    assert np.allclose(shown.forward, costs.forward)
    assert np.allclose(shown.backward, costs.backward)  # type: ignore[arg-type]
    assert ps.simulate(timeline.graph, shown).makespan == pytest.approx(timeline.makespan)


def test_memory_is_that_of_whole_tasks() -> None:
    """The first segment of F allocates, the last of B releases."""
    costs = replace(
        SECONDS, backward=3.0, activation_bytes=8, output_bytes=2, weight_grad_bytes=3,
        forward_workspace_bytes=1, backward_workspace_bytes=4,
    )  # fmt: skip
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpipe", {}),
        ("1f1b", {"recompute": "always"}),
        ("zb_h1", {}),
        ("1f1b", {"forward_only": True}),
    ]
    for name, options in cases:
        graph = lowered(name, 2, 4, **options)
        whole = lowered(name, 2, 4, **options, expert_layers=())
        peaks = [ps.simulate(x, costs).memory.peak.tolist() for x in (graph, whole)]
        assert peaks[0] == peaks[1]


def test_groups_of_replicas() -> None:
    """Replicas 0 and 1 exchange tokens, and 2 and 3: a slow one delays its own group alone."""
    graph = lowered("gpipe", 1, 1, n_replicas=4, expert_replicas=2)
    members = {
        tuple(sorted(graph.replica[list(graph.collectives[k])].tolist()))
        for k in range(len(graph.collectives))
        if graph.op[graph.collectives[k][0]] == Op.ALL_TO_ALL
    }
    assert members == {(0, 1), (2, 3)}
    slow = replace(SECONDS, backward=3.0, forward=[[3, 3, 3, 9]])
    timeline = ps.simulate(graph, slow)
    last = [timeline.end[(graph.replica == r) & (graph.op == Op.B)].max() for r in range(4)]
    assert last == [10, 10, 16, 16]
    bidirectional = ps.lower(ps.schedule("dualpipe", 2, 4), expert_layers=1, n_replicas=2)
    ps.verify(bidirectional)
    copies = [set(bidirectional.replica[m].tolist()) for m in _exchanges(bidirectional)]
    assert {frozenset(x) for x in copies} == {frozenset({0, 2}), frozenset({1, 3})}


def _exchanges(graph: ps.TaskGraph) -> list[np.ndarray]:
    members = (graph.collectives[k] for k in range(len(graph.collectives)))
    return [own for own in members if graph.op[own[0]] == Op.ALL_TO_ALL]


def test_files_keep_them(tmp_path: Path) -> None:
    graph = lowered("1f1b", 2, 4, n_replicas=4, expert_replicas=2)
    timeline = ps.simulate(graph, SECONDS)
    timeline.save(tmp_path / "timeline.csv")
    back = ps.Timeline.load(tmp_path / "timeline.csv")
    assert back.graph.expert_replicas == 2
    assert (back.start == timeline.start).all()
    assert (back.graph.dependencies.values == graph.dependencies.values).all()
    timeline.to_chrome(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_layers": [1]}, "expert_layers has 1 values for 2 stages; give one number, or"),
        ({"expert_layers": -1}, "expert_layers of stage 0 must be at least 0, got -1"),
        ({"expert_layers": [1, 0.5]}, "expert_layers of stage 1 must be a whole number, got 0.5"),
        ({"expert_layers": "1"}, "expert_layers must be the number of layers with experts of each"),
        ({"expert_layers": None}, "expert_layers must be the number of layers with experts of ea"),
        ({"expert_layers": 10**6}, "expert_layers of stage 0 must be at most 1000, got 1000000"),
        ({"expert_replicas": 2}, "expert_replicas=2 replicas that together have all experts do n"),
        ({"expert_replicas": 0}, "expert_replicas must be at least 1, got 0"),
        (
            {"sharded": [0], "n_replicas": 2},
            "expert_layers gives stage 0 1 layers with experts, but it is a sharded embedding",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        lowered("gpipe", 2, 2, **options)


def test_costs_of_other_layers() -> None:
    with pytest.raises(
        CostsError, match=r"2 layers with experts in stage 0 .*lowered with 1; give"
    ):
        ps.simulate(lowered("gpipe", 2, 2), replace(SECONDS, backward=3.0, expert_layers=2))


def test_an_exchange_without_a_member_is_refused() -> None:
    graph = lowered("gpipe", 1, 1, n_replicas=2)
    kept = ~((graph.op == Op.ALL_TO_ALL) & (graph.replica == 1) & (graph.part == 5))
    columns = ("op", "device", "stage", "microbatch", "stream", "replica", "part")
    codes = graph.kinds.stream[graph.kind]
    tasks = Tasks(
        **{n: (codes if n == "stream" else getattr(graph, n))[kept].astype(int) for n in columns}
    )
    with pytest.raises(GraphError, match=r"0ALL_TO_ALL0.dispatch0.*experts are on 2 consecutive"):
        ps.verify(ps.TaskGraph.build(tasks))


def test_throughput_counts_micro_batches() -> None:
    """Not their segments."""
    costs = ps.Costs(1e-3, 2e-3, exchange_dispatch=1e-4, exchange_combine=1e-4)
    for layers in (0, 2):
        graph = ps.lower(ps.schedule("1f1b", 4, 8), n_replicas=2, expert_layers=layers)
        timeline = ps.simulate(graph, costs)
        assert timeline.throughput * timeline.makespan == pytest.approx(16)


def test_costs_of_recomputes_leave_their_exchanges_out() -> None:
    costs = ps.Costs(
        1e-3, 2e-3, recompute=1e-3, expert_layers=2, exchange_dispatch=1e-4, exchange_combine=1e-4
    )
    schedule = ps.schedule("1f1b", 2, 4)
    graph = ps.lower(schedule, n_replicas=2, recompute="always", expert_layers=2)
    timeline = ps.simulate(graph, costs)
    measured = ps.Costs.from_timeline(timeline)
    assert measured.recompute == pytest.approx((1e-3, 1e-3))
    assert ps.simulate(graph, measured).makespan == pytest.approx(timeline.makespan)


def test_halves_given_together_contain_their_exchanges() -> None:
    """In a graph without tasks for them; other F, B, I and R have them in addition."""
    costs = ps.Costs(1, input_grad=1, weight_grad=1, overlapped=2.5, expert_layers=1,
                     exchange_dispatch=0.25, exchange_combine=0.25)  # fmt: skip
    graph = ps.lower(ps.schedule("dualpipev", 2, 4))
    timeline = ps.simulate(graph, costs)
    half = graph.kinds.overlapped[graph.kind] > 0
    seconds = timeline.duration[(graph.op == Op.F) & ~half]
    assert set(seconds) == {1.5}
    n_pairs = (half & (graph.op == Op.F)).sum()
    assert timeline.duration[half].sum() == pytest.approx(2.5 * n_pairs)


@pytest.mark.parametrize("n_stages", [1, 3])
def test_segments_of_other_stages(n_stages: int) -> None:
    """Shares are for each stage of the graph."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, expert_layers=1)
    shares = [[(0.5, 0.25, 0.25)] * 3] * n_stages
    costs = ps.Costs(1, 2, expert_layers=1, expert_replicas=2, segments=shares)
    with pytest.raises(CostsError, match=f"segments has {n_stages} values for 2 stages"):
        ps.simulate(graph, costs)
