"""Sums over tied stages, and the norm of all gradients: place, members and seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, CostsError, GraphError, PipeError
from pipesim.graph import Tasks
from pipesim.ops import Op

NETWORK = ps.Network(latency=0.5, bandwidth=2.0)


def queue(graph: ps.TaskGraph, device: int, stream: str = "compute") -> str:
    number = graph.streams.index((device, stream))
    return " ".join(str(graph.task(int(task))) for task in graph.queues[number])


def times(timeline: ps.Timeline, action: str, device: int | None = None) -> list[tuple[Any, Any]]:
    """Return start and end of all tasks of an action."""
    graph = timeline.graph
    tasks = [
        task
        for task in range(len(graph))
        if str(graph.task(task)) == action and device in (None, graph.device[task])
    ]
    return [(timeline.start[task], timeline.end[task]) for task in tasks]


def needs(graph: ps.TaskGraph, action: str) -> list[list[str]]:
    return [
        sorted(str(graph.task(int(other))) for other in graph.dependencies[task])
        for task in range(len(graph))
        if str(graph.task(task)) == action
    ]


def test_three_stages_by_hand() -> None:
    """GPipe with one micro-batch; stages 0 and 2 are tied.

    device 0 | F0 . . . . . . . B0 B0 TIED      NORM STEP
    device 1 | . F0 . . . B0 B0               NORM STEP
    device 2 | . . F0 B0 B0         TIED      NORM STEP
    """
    graph = ps.lower(ps.schedule("gpipe", 3, 1), tied=[(2, 0)], grad_norm=True)
    assert graph.tied == ((0, 2),)
    assert queue(graph, 0) == "0F0 0B0 0GRAD_NORM 0STEP"
    assert queue(graph, 1) == "1F0 1B0 1GRAD_NORM 1STEP"
    assert queue(graph, 2, "collective") == "2REDUCE_TIED.0"
    assert needs(graph, "0REDUCE_TIED.0") == [["0B0"]]
    assert needs(graph, "0GRAD_NORM") == [["0B0", "0REDUCE_TIED.0"]]
    assert needs(graph, "1GRAD_NORM") == [["1B0"]]
    assert needs(graph, "0STEP") == [["0B0", "0GRAD_NORM", "0REDUCE_TIED.0"]]
    assert needs(graph, "1STEP") == [["1B0", "1GRAD_NORM"]]
    costs = ps.Costs(1, 2, optimizer_step=4, tied_bytes=8, grad_norm=(1, 3, 2), network=NETWORK)
    timeline = ps.simulate(graph, costs)
    backward = 3 * 1 + 3 * 2 + 4 * 0.5  # messages have a latency and no bytes
    assert times(timeline, "0B0") == [(backward - 2, backward)]
    # An all-reduce of 8 bytes over two devices, 8 / 2 + 2 * 0.5, and the norm of the slowest.
    assert times(timeline, "0REDUCE_TIED.0") == [(backward, backward + 5)]
    assert times(timeline, "2REDUCE_TIED.0") == [(backward, backward + 5)]
    norm = 3 + NETWORK.all_reduce(8, [0, 1, 2], "fastest")
    for stage in range(3):
        assert times(timeline, f"{stage}GRAD_NORM") == [(backward + 5, backward + 5 + norm)]
    assert timeline.makespan == backward + 5 + norm + 4
    assert timeline.nbytes[graph.op == Op.REDUCE_TIED].tolist() == [8, 8]


def test_stages_of_one_device_are_one_member() -> None:
    """The V puts first and last stage on one device: nothing to send, and one norm a device."""
    graph = ps.lower(ps.schedule("zbv", 2, 2), tied=[(0, 3)], grad_norm=True)
    assert queue(graph, 0, "collective") == "0REDUCE_TIED.0"
    assert sum(map(len, needs(graph, "0REDUCE_TIED.0"))) == 4  # the W or B of both stages
    assert [str(graph.task(int(t))) for t in np.flatnonzero(graph.op == Op.GRAD_NORM)] == [
        "0GRAD_NORM",
        "1GRAD_NORM",
    ]
    costs = ps.Costs(1, 2, input_grad=1, weight_grad=1, tied_bytes=8, grad_norm=(1, 2, 3, 4),
                     network=NETWORK)  # fmt: skip
    timeline = ps.simulate(graph, costs)
    ((start, end),) = times(timeline, "0REDUCE_TIED.0")
    assert start == end
    assert timeline.nbytes[graph.op == Op.REDUCE_TIED].tolist() == [0]
    # Both devices have stages that take 5 together.
    assert (
        timeline.duration[graph.op == Op.GRAD_NORM].tolist()
        == [5 + NETWORK.all_reduce(8, [0, 1], "fastest")] * 2
    )


@pytest.mark.parametrize("overlap", [True, False])
def test_paths_are_replicas(overlap: bool) -> None:
    """On a bidirectional pipeline each path sums its copies, and each device has one norm."""
    graph = ps.lower(
        ps.schedule("chimera", 2, 2), tied=[(0, 1)], grad_norm=True, n_replicas=2, overlap=overlap
    )
    sums = np.flatnonzero(graph.op == Op.REDUCE_TIED)
    assert sorted(zip(graph.replica[sums].tolist(), graph.device[sums].tolist(), strict=True)) == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3))
    ]
    norms = np.flatnonzero(graph.op == Op.GRAD_NORM)
    assert len(np.unique(graph.group[norms])) == 1
    assert graph.device[norms].tolist() == [0, 1, 2, 3]
    assert graph.replica[norms].tolist() == [0, 0, 2, 2]
    ps.verify(ps.TaskGraph.build(columns(graph), tied=graph.tied))
    assert graph.first_copy is not None  # the two pipelines are simulated once


def columns(graph: ps.TaskGraph) -> Tasks:
    kinds = graph.kinds
    return Tasks(
        *(getattr(kinds, name)[graph.kind] for name in ("op", "device", "stage")),
        graph.microbatch,
        *(getattr(kinds, name)[graph.kind] for name in ("stream", "replica", "overlapped")),
        *(getattr(kinds, name)[graph.kind] for name in ("peer_stage", "part")),
    )


def test_two_groups_and_reductions() -> None:
    """Each group has its number as part, its own bytes, and waits for the reductions."""
    graph = ps.lower(ps.schedule("1f1b", 3, 3), tied="0-2,1-2", n_replicas=2, grad_sync="every")
    assert graph.tied == ((0, 2), (1, 2))
    every = [f"2REDUCE_GRAD{m}" for m in range(3)]
    assert needs(graph, "2REDUCE_TIED.1") == [every, every]
    assert needs(graph, "2STEP")[0] == sorted([*every, "2REDUCE_TIED.0", "2REDUCE_TIED.1"])
    assert needs(graph, "0STEP")[0][-1] == "0REDUCE_TIED.0"
    costs = ps.Costs(1, 2, tied_bytes=(4, 8), network=NETWORK)
    timeline = ps.simulate(graph, costs)
    lasted = [end - start for start, end in times(timeline, "2REDUCE_TIED.1")]
    assert lasted == pytest.approx([5, 5])
    assert np.subtract(*times(timeline, "0REDUCE_TIED.0")[0]) == pytest.approx(-3)
    with pytest.raises(CostsError, match="tied_bytes has 2 values, but the graph has 1 groups"):
        ps.simulate(ps.lower(ps.schedule("1f1b", 3, 3), tied=[(0, 2)]), costs)
    with pytest.raises(CostsError, match="tied_bytes are of 2 groups of tied stages, but the gra"):
        ps.simulate(ps.lower(ps.schedule("1f1b", 3, 3)), costs)


def test_tied_bytes_are_priced_once() -> None:
    """In REDUCE_TIED, or without it in STEP."""
    costs = ps.Costs(1, 2, optimizer_step=1, tied_bytes=8, network=NETWORK)
    schedule = ps.schedule("gpipe", 2, 2)
    for options, step, reduce in (({}, 6, []), ({"tied": [(0, 1)]}, 1, [5, 5])):
        timeline = ps.simulate(ps.lower(schedule, **options), costs)
        graph = timeline.graph
        assert timeline.duration[graph.op == Op.STEP] == pytest.approx([step] * 2)
        assert timeline.duration[graph.op == Op.REDUCE_TIED] == pytest.approx(reduce)


def test_measured_costs_give_the_same_step() -> None:
    """Seconds of both are taken from a timeline, and saved with it."""
    graph = ps.lower(ps.schedule("interleaved_1f1b", 2, 4), tied=[(0, 3)], grad_norm=True)
    costs = ps.Costs(1, 2, optimizer_step=1, tied_bytes=8, grad_norm=3)
    timeline = ps.simulate(graph, costs.__class__(**{**costs.__dict__, "reduce_tied": 7.0}))
    back = ps.Costs.from_timeline(timeline)
    assert back.grad_norm == (3.0,) * 4
    assert back.reduce_tied == (7.0, 0.0, 0.0, 0.0)
    assert ps.simulate(graph, back).makespan == timeline.makespan


@pytest.mark.parametrize("engine", ["simpy", "compiled"])
def test_file_and_back(engine: str, tmp_path: Any) -> None:
    graph = ps.lower(
        ps.schedule("chimera", 4, 4), tied=[(0, 3), (1, 2)], grad_norm=True, n_replicas=2
    )
    costs = ps.Costs(1, 2, tied_bytes=8, grad_norm=3, parameter_bytes=4, network=NETWORK)
    timeline = ps.simulate(graph, costs, engine=engine)
    timeline.save(tmp_path / "timeline.csv")
    again = ps.Timeline.load(tmp_path / "timeline.csv")
    assert again.graph.tied == graph.tied
    assert again.end.tolist() == timeline.end.tolist()
    assert again.graph.dependencies.values.tolist() == graph.dependencies.values.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": [(0,)]}, "tied has the group .* a group has two or more different stages"),
        ({"tied": [(0, 0)]}, "tied has the group"),
        ({"tied": [(0, 4)]}, r"tied names stage 4; there are 4 stages, 0\.\.3"),
        ({"tied": 3}, "tied must be groups of stages with copies of one parameter"),
        ({"tied": "0-x"}, "tied must be groups .* got '0-x'"),
        ({"tied": {0: 3}}, "tied must be groups"),
        ({"tied": [(0, 1.5)]}, "tied: a stage must be a whole number"),
        ({"tied": [(0, 3)] * 1001}, "tied has more than 1000 groups"),
        ({"tied": [(0, 3)], "sharded": [0]}, "tied names stage 0, which is sharded"),
        ({"grad_norm": True, "step": "none"}, 'grad_norm=True, but step="none"'),
        ({"grad_norm": 1}, "grad_norm must be True or False"),
    ],
)
def test_options_that_do_not_suit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.lower(ps.schedule("gpipe", 4, 4), **options)


@pytest.mark.parametrize("options", [{"tied": [(0, 2)]}, {"grad_norm": True}])
def test_several_mini_batches_are_refused(options: dict[str, Any]) -> None:
    """A stage of PipeDream steps before others have the gradients of its mini-batch."""
    with pytest.raises(ArgumentError, match="steps 4 times while micro-batches are in flight"):
        ps.lower(ps.schedule("pipedream", 3, 4), **options)


def test_wrong_members_are_found() -> None:
    """One member a device, of a group that exists."""
    graph = ps.lower(ps.schedule("gpipe", 3, 1), tied=[(0, 2)], grad_norm=True)
    tasks = columns(graph)
    for op, message in (
        (Op.GRAD_NORM, r"collective on devices \[1, 2\]; a GRAD_NORM has one member on each of"),
        (Op.REDUCE_TIED, r"collective on devices \[2\]; a REDUCE_TIED has one .* \[0, 2\]"),
    ):
        lone = np.flatnonzero(~((tasks.op == op) & (tasks.device == 0)))
        names = ("op", "device", "stage", "microbatch", "stream", "part")
        fewer = Tasks(**{name: getattr(tasks, name)[lone] for name in names})
        with pytest.raises(GraphError, match=message):
            ps.verify(ps.TaskGraph.build(fewer, tied=[(0, 2)]))
    with pytest.raises(GraphError, match=r"2REDUCE_TIED has part 0, .* but tied is "):
        ps.TaskGraph.build(tasks, tied=[(0, 1)])


def test_torch_has_no_sum_of_tied_stages(tmp_path: Any) -> None:
    graph = ps.lower(ps.schedule("gpipe", 2, 2), tied=[(0, 1)])
    with pytest.raises(PipeError, match="has tied stages, but torch's runtime has no sum"):
        graph.save_torch_csv(tmp_path / "order.csv")
