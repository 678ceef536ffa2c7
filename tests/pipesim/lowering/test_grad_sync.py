"""When replicas reduce gradients and exchange rows, against grids drawn by hand and closed forms.

The numbers of the rules are those of docs/time.md. Replica 1 does what replica 0 does, so that one
of them is drawn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw_replica, grid
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import without_costs

import pipesim as ps
from pipesim.costs import TaskCosts
from pipesim.errors import ArgumentError, CostsError, GraphError
from pipesim.graph import Tasks
from pipesim.graph.tasks import StreamKind
from pipesim.ops import Op
from pipesim.simulation import LogNormal, Normal
from pipesim.simulation.simulate import ENGINES

#: A second a byte.
SLOW = ps.Network(bandwidth=1)
COSTS = ps.Costs(forward=1, backward=4, optimizer_step=1, parameter_bytes=4, network=SLOW)
EXCHANGED = ps.Costs(
    forward=1, backward=1, optimizer_step=1, parameter_bytes=2, exchange_counts=1, key_bytes=4,
    vector_bytes=4, network=SLOW,
)  # fmt: skip


def simulate(p: int, m: int, costs: ps.Costs = COSTS, **options: Any) -> ps.Timeline:
    """Simulate two replicas of GPipe, by both engines."""
    return by_both(ps.lower(ps.schedule("gpipe", p, m), **{"n_replicas": 2, **options}), costs)


def by_both(graph: ps.TaskGraph, costs: ps.Costs | TaskCosts) -> ps.Timeline:
    """Simulate by both engines, which agree."""
    one, other = (ps.simulate(graph, costs, engine=engine) for engine in ENGINES)
    assert (one.start == other.start).all()
    assert (one.end == other.end).all()
    return one


# Reductions


def test_reduced_after_the_last_backward() -> None:
    """One of 2(n-1)/n * 4 bytes."""
    assert draw_replica(simulate(1, 2, grad_sync="last")) == grid("""
        0            | F0 F1 B1 B1 B1 B1 B0 B0 B0 B0 .. .. .. .. ST
        0 collective | .. .. .. .. .. .. .. .. .. .. RG RG RG RG ..
    """)


def test_reduced_after_every_backward() -> None:
    """Each after its own, beside the next one."""
    assert draw_replica(simulate(1, 2, grad_sync="every")) == grid("""
        0            | F0 F1 B1 B1 B1 B1 B0 B0 B0 B0 .. .. .. .. ST
        0 collective | .. .. .. .. .. .. RG RG RG RG RG RG RG RG ..
    """)


def test_reduced_after_every_second_backward() -> None:
    """Two of four micro-batches together; each reduction has the number of the last of them."""
    costs = replace(COSTS, backward=1)
    assert draw_replica(simulate(1, 4, costs, grad_sync=2)) == grid("""
        0            | F0 F1 F2 F3 B3 B2 B1 B0 .. .. .. .. .. .. ST
        0 collective | .. .. .. .. .. .. RG RG RG RG RG RG RG RG ..
    """)
    graph = ps.lower(ps.schedule("1f1b", 1, 4), n_replicas=2, grad_sync=2)
    needs = {
        str(graph.task(task).action): [
            str(graph.task(k).action) for k in sorted(graph.dependencies[task].tolist())
        ]
        for task in np.flatnonzero(graph.replica == 0).tolist()
    }
    assert needs["0REDUCE_GRAD1"] == ["0B0", "0B1"]
    assert needs["0REDUCE_GRAD3"] == ["0B2", "0B3"]
    assert needs["0STEP"] == ["0REDUCE_GRAD1", "0REDUCE_GRAD3"]


def test_each_stage_reduces_as_it_was_told() -> None:
    """Stage 0 after each backward, stage 1 in two buckets during its last one."""
    costs = replace(COSTS, backward=2)
    timeline = simulate(2, 2, costs, grad_sync=("every", "bucketed"), n_buckets=2)
    assert draw_replica(timeline, "01") == grid("""
        0            | F0 F1 .. .. .. B1 B1 B0 B0 .. .. .. .. .. .. ST
        0 collective | .. .. .. .. .. .. .. RG RG RG RG RG RG RG RG ..
        1            | .. F0 F1 B1 B1 B0 B0 .. .. .. ST .. .. .. .. ..
        1 collective | .. .. .. .. .. .. R0 R0 R1 R1 .. .. .. .. .. ..
    """)


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        (1, "every"),
        (4, "last"),
        ("2", 2),
        ("every/2", ("every", 2)),
        ([4, "last"], "last"),
        ({1: 2}, ("last", 2)),
        (("bucketed", 1), ("bucketed", "every")),
    ],
)
def test_forms_of_grad_sync(form: Any, kept: Any, tmp_path: Path) -> None:
    """One value where all stages have the same; and a saved timeline has it."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync=form, n_buckets=2)
    assert graph.grad_sync == kept
    timeline = ps.simulate(graph, COSTS)
    timeline.save(tmp_path / "timeline.csv")
    loaded = ps.Timeline.load(tmp_path / "timeline.csv").graph
    assert loaded.grad_sync == kept
    assert loaded.dependencies.values.tolist() == graph.dependencies.values.tolist()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            3,
            "every 3 micro-batches, which do not divide the 4 of a mini-batch; give one of 1, 2, 4",
        ),
        (0, "grad_sync must be at least 1, got 0"),
        (2.0, r"grad_sync must be 'last', .* or a whole number k.*got 2\.0 \(float\)"),
        (["every"], "grad_sync has 1 values, and there are 2 stages"),
        ({2: "every"}, r"grad_sync names stage 2; there are 2 stages, 0\.\.1"),
        ({}, "names no stage"),
        ("every/lst", "unknown grad_sync of stage 1 'lst'; did you mean 'last'"),
    ],
)
def test_no_such_grad_sync(form: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync=form)


def test_paths_reduce_once() -> None:
    """A bidirectional pipeline has other micro-batches on each path, in whatever stage."""
    schedule = ps.schedule("chimera", 2, 4)
    with pytest.raises(ArgumentError, match=r'grad_sync="last/2", but schedule .* has 2 paths'):
        ps.lower(schedule, grad_sync={1: 2})
    assert ps.lower(schedule, grad_sync={1: "bucketed"}).grad_sync == ("last", "bucketed")


def test_reduced_in_buckets_during_the_last_backward() -> None:
    """Rule 3: a quarter of the gradients, whenever a quarter of the last backward has passed."""
    assert draw_replica(simulate(1, 2, grad_sync="bucketed", n_buckets=4)) == grid("""
        0            | F0 F1 B1 B1 B1 B1 B0 B0 B0 B0 .. ST
        0 collective | .. .. .. .. .. .. .. R0 R1 R2 R3 ..
    """)


def test_buckets_of_two_stages() -> None:
    """Each stage during its own last backward."""
    timeline = simulate(2, 2, grad_sync="bucketed", n_buckets=2)
    assert draw_replica(timeline, "01") == grid("""
        0            | F0 F1 .. .. .. .. .. B1 B1 B1 B1 B0 B0 B0 B0 .. .. ST
        0 collective | .. .. .. .. .. .. .. .. .. .. .. .. .. R0 R0 R1 R1 ..
        1            | .. F0 F1 B1 B1 B1 B1 B0 B0 B0 B0 .. .. ST .. .. .. ..
        1 collective | .. .. .. .. .. .. .. .. .. R0 R0 R1 R1 .. .. .. .. ..
    """)


def test_buckets_of_a_split_backward_come_with_the_last_weight_gradient() -> None:
    """ZB-H1's last W; I is no gradient of weights."""
    graph = ps.lower(ps.schedule("zb_h1", 1, 2), n_replicas=2, grad_sync="bucketed", n_buckets=2)
    costs = replace(COSTS, input_grad=1, weight_grad=2)
    assert draw_replica(by_both(graph, costs)) == grid("""
        0            | F0 I0 W0 W0 F1 I1 W1 W1 .. .. .. ST
        0 collective | .. .. .. .. .. .. .. R0 R0 R1 R1 ..
    """)


def test_buckets_of_unlike_sizes() -> None:
    """Three quarters of the bytes after half of the backward; the rest at its end."""
    costs = replace(COSTS, buckets=[[(0.75, 0.5), (0.25, 1.0)]])
    assert draw_replica(simulate(1, 1, costs, grad_sync="bucketed", n_buckets=2)) == grid("""
        0            | F0 B0 B0 B0 B0 .. .. ST
        0 collective | .. .. .. R0 R0 R0 R1 ..
    """)


def shared_link(nbytes: float) -> ps.Costs:
    """Return costs of two stages whose replicas reduce over one link that all share."""
    pairs = tuple((a, b) for a in range(4) for b in range(4) if a != b)
    network = ps.Network(links=(ps.Link(0, 1, pairs),))
    return replace(COSTS, parameter_bytes=nbytes, network=network)


def test_buckets_wait_for_links() -> None:
    """Rule 8: stage 0's first asks at 13, before stage 1's second, at 17, when its first ends."""
    timeline = simulate(2, 2, shared_link(8), grad_sync="bucketed", n_buckets=2)
    graph = timeline.graph
    starts = {
        (stage, part): timeline.start[(graph.stage == stage) & (graph.part == part)].tolist()
        for stage in (0, 1)
        for part in (0, 1)
    }
    assert starts == {(1, 0): [9, 9], (0, 0): [17, 17], (1, 1): [25, 25], (0, 1): [33, 33]}


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [1.0, 16.0])
@pytest.mark.parametrize("links", ["own", "shared"])
def test_noisy_buckets_in_many_scenarios(nbytes: float, links: str) -> None:
    """Side by side and one by one, by either engine: the part is of the backward as drawn."""
    costs = shared_link(nbytes) if links == "shared" else replace(COSTS, parameter_bytes=nbytes)
    graph = ps.lower(ps.schedule("gpipe", 2, 3), n_replicas=2, grad_sync="bucketed", n_buckets=3)
    noise = ps.Noise(seed=3, task=LogNormal(0.5), message=Normal(0.2))
    many = ps.simulate_many(graph, costs, noise, 4, n_jobs=1, progress=False)
    for scenario in range(4):
        one, other = (
            ps.simulate(graph, costs, noise=noise, scenario=scenario, engine=engine)
            for engine in ENGINES
        )
        assert (one.start == other.start).all()
        assert one.makespan == other.makespan == many.makespan[scenario]


def test_buckets_right_behind_their_backward_in_many_scenarios() -> None:
    """The last of four looks back furthest: at the start of the backward, as it was drawn."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, grad_sync="bucketed", n_buckets=4)
    noise = ps.Noise(seed=0, task=LogNormal(0.3))
    many = ps.simulate_many(graph, COSTS, noise, 3, n_jobs=1, progress=False)
    one_by_one = [ps.simulate(graph, COSTS, noise=noise, scenario=k).makespan for k in range(3)]
    assert many.makespan.tolist() == one_by_one


@pytest.mark.parametrize(("share", "start"), [(0.0, 1), (0.25, 2), (1.0, 5)])
def test_share_of_the_backward(share: float, start: float) -> None:
    """From its very start to its very end."""
    costs = replace(COSTS, buckets=[[(1.0, share), (0.0, 1.0)]])
    timeline = simulate(1, 1, costs, grad_sync="bucketed", n_buckets=2)
    first = np.flatnonzero(timeline.graph.part == 0)
    assert timeline.start[first].tolist() == [start] * 2


@pytest.mark.parametrize("n_stages", [1, 3])
def test_buckets_of_another_number_of_stages(n_stages: int) -> None:
    """They are refused, as other values of stages are, but not by a graph without buckets."""
    costs = replace(COSTS, buckets=[[(0.5, 0.5), (0.5, 1.0)]] * n_stages)
    with pytest.raises(CostsError, match=f"buckets has {n_stages} values for 2 stages"):
        simulate(2, 2, costs, grad_sync="bucketed", n_buckets=2)
    simulate(2, 2, costs)


@given(
    lasts=st.floats(1e-3, 1e3), begins=st.floats(0, 1e3), share=st.floats(0, 1),
    noise=st.booleans(),
)  # fmt: skip
def test_buckets_are_there_before_the_backward_ends(
    lasts: float, begins: float, share: float, noise: bool
) -> None:
    """Whatever is rounded: between its start and its end, which a share of 1 is."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, grad_sync="bucketed", n_buckets=2)
    costs = ps.Costs(forward=begins, backward=lasts, buckets=[[(0.5, share), (0.5, 1.0)]])
    varied = ps.Noise(seed=1, task=LogNormal(0.1)) if noise else None
    timeline = ps.simulate(graph, costs, noise=varied)
    start, end = timeline.start, timeline.end
    last = graph.op == Op.B
    for part, latest in ((0, end[last].max()), (1, end[last].max())):
        bucket = graph.part == part
        assert (start[bucket] >= start[last].max()).all()
        assert (start[bucket] <= latest).all()
    assert (start[graph.part == 1] == end[last].max()).all()


def test_without_shares_buckets_need_the_whole_backward() -> None:
    """Costs of tasks that do not say what buckets need; and shares must be such."""
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="bucketed", n_buckets=4)
    tasks = COSTS.of(graph)
    unsaid = replace(tasks, table=tasks.table._replace(share=None))
    timeline = by_both(graph, unsaid)
    assert (unsaid.share == 1).all()
    assert timeline.start[graph.part == 0].tolist() == [10, 10]
    assert timeline.makespan == simulate(1, 2, grad_sync="last").makespan
    wrong = tasks.table._replace(share=tasks.table.share + 1)
    with pytest.raises(CostsError, match=r"share of 0F0 \(task 0\) must be 0 to 1, got 2\.0"):
        ps.simulate(graph, replace(tasks, table=wrong))


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_no_sync_in_closed_form(m: int, recompute: str) -> None:
    """K micro-batches and one all-reduce, against K of both, where nothing overlaps."""
    t_c, t_s = (6 if recompute == "always" else 5), 4
    options = {"overlap": False, "step": "none", "recompute": recompute}
    assert simulate(1, m, grad_sync="last", **options).makespan == m * t_c + t_s
    assert simulate(1, m, grad_sync="every", **options).makespan == m * (t_c + t_s)


@pytest.mark.slow
@given(
    p=st.integers(1, 3), m=st.integers(1, 4), backward=st.integers(1, 4), nbytes=st.integers(0, 8)
)
def test_buckets_come_no_later(p: int, m: int, backward: int, nbytes: int) -> None:
    """What is reduced in parts is there no later than in one piece."""
    costs = replace(COSTS, backward=backward, parameter_bytes=nbytes)
    last, bucketed, every = (
        ps.simulate(
            ps.lower(ps.schedule("gpipe", p, m), n_replicas=2, grad_sync=sync), costs
        ).makespan
        for sync in ("last", "bucketed", "every")
    )
    assert bucketed <= last <= every
    assert bucketed >= last - nbytes


# What is read off a timeline with buckets


def test_critical_path_goes_through_a_part_of_the_backward() -> None:
    """Up to where the bucket was made; the other tasks touch."""
    path = simulate(1, 2, grad_sync="bucketed", n_buckets=2).why.critical_path()
    assert path["op"].tolist() == ["F", "F", "B", "B", "REDUCE_GRAD", "REDUCE_GRAD", "STEP"]
    assert path["gap"].tolist() == [0, 0, 0, 0, -2, 0, 0]
    assert path["waited_for"].tolist()[4] in ("dependency", "group")
    assert path["start"].tolist()[4:] == [8, 10, 12]


def test_idle_time_is_what_reductions_outlast_the_backward() -> None:
    """Two of the four seconds are beside it."""
    timeline = simulate(1, 2, grad_sync="bucketed", n_buckets=2)
    idle = timeline.why.idle_by_cause()
    assert idle["bandwidth"].tolist() == [2, 2]
    assert idle.sum(axis=1).tolist() == timeline.idle.tolist() == [2, 2]


@pytest.mark.parametrize("sync", ["last", "every", "bucketed"])
def test_replayed_from_its_own_durations(sync: Any) -> None:
    """Buckets start where they did, with costs and without."""
    timeline = simulate(2, 3, grad_sync=sync)
    for run in (timeline, replace(timeline, costs=None)):
        again = ps.replay(run)
        assert (again.start == timeline.start).all()
        parts = ps.Comparison(predicted=timeline, measured=run).error_parts()
        assert not parts.any()


def test_error_of_a_share_is_of_transfers() -> None:
    """Predicted after a half of the backward, and there after three quarters."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, grad_sync="bucketed", n_buckets=2)
    predicted, measured = (
        ps.simulate(graph, replace(COSTS, buckets=[[(0.75, share), (0.25, 1.0)]]))
        for share in (0.5, 0.75)
    )
    parts = ps.Comparison(predicted=predicted, measured=replace(measured, costs=None)).error_parts()
    assert parts["transfers"] == predicted.makespan - measured.makespan == -1
    assert parts.drop("transfers").abs().max() == pytest.approx(0)


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize(
    "options",
    [
        {"grad_sync": "last"},
        {"grad_sync": "every"},
        {"grad_sync": "bucketed", "n_buckets": 3},
        {"grad_sync": "bucketed", "n_buckets": 2, "shard_optimizer": True},
        {"sharded": [0]},
        {"sharded": [0], "exchange_work": "compute", "sparse_grad_sync": "last"},
    ],
)
def test_costs_of_a_run_with_collectives_predict_it(
    options: dict[str, Any], latency: float
) -> None:
    """What they took is measured, with or without costs."""
    network = ps.Network(latency=latency, bandwidth=2)
    costs = replace(COSTS, parameter_bytes=(3, 6), key_bytes=2, vector_bytes=4, network=network)
    timeline = simulate(2, 3, costs, **options)
    for run in (timeline, without_costs(timeline)):
        back = ps.Costs.from_timeline(run)
        assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)
    assert back.reduce_grad is not None


def test_costs_of_buckets_are_those_of_all_of_them() -> None:
    """Each has a latency; together they have one, as a single reduction would."""
    network = ps.Network(latency=0.25, bandwidth=2)
    costs = replace(COSTS, parameter_bytes=8, network=network, output_bytes=1)
    timeline = simulate(2, 1, costs, grad_sync="bucketed", n_buckets=4)
    back = ps.Costs.from_timeline(without_costs(timeline))
    whole = ps.simulate(ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2), back)
    seconds = whole.duration[whole.graph.op == Op.REDUCE_GRAD]
    assert seconds == pytest.approx(network.all_reduce(8, range(2)))
    assert back.buckets is not None
    for size, _ in back.buckets[0]:
        assert size == pytest.approx(0.25)


# A sharded optimizer


def test_sharded_optimizer() -> None:
    """ZeRO-1: an all-reduce's two halves are a collective each; half of the step and its state."""
    costs = replace(COSTS, optimizer_step=2, optimizer_bytes=8)
    timeline = simulate(1, 2, costs, shard_optimizer=True)
    assert draw_replica(timeline) == grid("""
        0            | F0 F1 B1 B1 B1 B1 B0 B0 B0 B0 .. .. ST .. ..
        0 collective | .. .. .. .. .. .. .. .. .. .. RG RG .. US US
    """)
    whole = simulate(1, 2, costs)
    assert (whole.memory.peak - timeline.memory.peak).tolist() == [4, 4]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_halves_of_the_ring_make_an_all_reduce(n: int) -> None:
    """Reduce-scatter and all-gather, whatever the number of replicas."""
    network = ps.Network(latency=1, bandwidth=2)
    costs = replace(COSTS, parameter_bytes=12, network=network)
    options = {"n_replicas": n, "shard_optimizer": True}
    timeline = simulate(1, 1, costs, **options)
    graph, seconds = timeline.graph, timeline.duration
    halves = [seconds[graph.op == op].max() for op in (Op.REDUCE_GRAD, Op.UNSHARD)]
    assert sum(halves) == pytest.approx(network.all_reduce(12, range(n)))
    assert seconds[graph.op == Op.STEP] == pytest.approx(1 / n)


def test_gathers_of_two_paths_are_in_one_order() -> None:
    """Chimera's devices hold two stages each, whose steps they take in different orders."""
    graph = ps.lower(
        ps.schedule("chimera", 4, 4), n_replicas=2, shard_optimizer=True, overlap=False
    )
    assert by_both(graph, COSTS).complete
    ps.verify(replace(graph))


# Sharded embeddings


def test_sharded_embedding_with_the_mlp_on_its_device() -> None:
    """Counts, keys, lookup, vectors; then the MLP; gradients before the backward of rows."""
    graph = ps.lower(ps.schedule("looped_bfs", 1, 2, n_chunks=2), n_replicas=2, sharded=[0])
    assert draw_replica(by_both(graph, EXCHANGED)) == grid("""
        0            | ..  ..  ..  0F0 ..  ..  ..  ..  ..  0F1 1F0 .. 1F1 1B1 1B0 .. .. .. .. 0B1 .. 0B0 ST ST
        0 collective | c0  k0  k0  ..  v0  v0  c1  k1  k1  ..  v1  v1 ..  ..  ..  RG RG g1 g1 g0  g0 ..  .. ..
    """)  # noqa: E501
    assert graph.sharded == (0,)
    assert not ((graph.op == Op.REDUCE_GRAD) & (graph.stage == 0)).any()


def test_sharded_embedding_on_a_device_of_its_own() -> None:
    """Its vectors go on to the next stage's device."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, sharded=0)
    assert draw_replica(by_both(graph, EXCHANGED), "01") == grid("""
        0            | .. .. .. F0 .. .. .. .. .. F1 .. .. .. .. .. .. B1 .. B0 ST
        0 collective | c0 k0 k0 .. v0 v0 c1 k1 k1 .. v1 v1 .. .. g1 g1 g0 g0 .. ..
        1            | .. .. .. .. .. .. F0 .. .. .. .. .. F1 B1 B0 .. .. ST .. ..
        1 collective | .. .. .. .. .. .. .. .. .. .. .. .. .. .. .. RG RG .. .. ..
    """)


# Layouts


def test_layouts_on_nodes() -> None:
    """Replicas of a stage reduce inside a node, or the stages of a replica are in one."""
    nodes = ps.Nodes(2, port_bandwidth=8, nic_bandwidth=1)
    costs = replace(COSTS, parameter_bytes=8, output_bytes=1, network=ps.Network(nodes=nodes))
    for layout, homes, reduction, message in (
        ("replica_major", [[0, 1], [2, 3]], 8, 1 / 8),
        ("stage_major", [[0, 2], [1, 3]], 1, 1),
    ):
        timeline = simulate(2, 1, costs, layout=layout)
        graph = timeline.graph
        assert graph.homes.tolist() == homes
        assert (timeline.duration[graph.op == Op.REDUCE_GRAD] == reduction).all()
        assert (timeline.duration[graph.op == Op.SEND_F] == message).all()


# Graphs that are wrong


def changed(graph: ps.TaskGraph, keep: np.ndarray, **columns: Any) -> ps.TaskGraph:
    """Build a graph of some of the tasks again, with some columns changed."""
    codes = np.array([StreamKind.code(graph.streams[s][1]) for s in graph.stream])
    merged = {
        "op": graph.op, "device": graph.device, "stage": graph.stage, "stream": codes,
        "microbatch": graph.microbatch, "replica": graph.replica, "part": graph.part, **columns,
    }  # fmt: skip
    tasks = Tasks(**{name: np.asarray(column)[keep] for name, column in merged.items()})
    return ps.TaskGraph.build(tasks, grad_sync=graph.grad_sync)


def test_a_bucket_that_a_replica_lacks_is_found() -> None:
    """Who has it and who has not are named."""
    graph = ps.lower(ps.schedule("gpipe", 2, 1), n_replicas=2, grad_sync="bucketed", n_buckets=2)
    lacks = (graph.part == 1) & (graph.replica == 1) & (graph.stage == 1)
    with pytest.raises(GraphError, match=(
        r"\(1REDUCE_GRAD\.1\) is of replica 0 on device 1, but replica 1 lacks it: a collective of "
        "stage 1 has one member of each of the 2 replicas"
    )):  # fmt: skip
        ps.verify(changed(graph, ~lacks))
    ps.verify(changed(graph, np.ones(len(graph), dtype=bool)))


def test_exchanges_that_a_replica_lacks_are_found() -> None:
    """As where a replica has fewer micro-batches of a sharded stage's keys."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2, sharded=[0])
    lacks = (graph.part == 1) & (graph.replica == 0) & (graph.microbatch == 1)
    with pytest.raises(GraphError, match=r"0ALL_TO_ALL1\.keys\) .* but replica 0 lacks it"):
        ps.verify(changed(graph, ~lacks))


def test_a_stage_that_a_replica_lacks_is_found() -> None:
    """Its gradients would be reduced with none of another replica."""
    graph = ps.lower(ps.schedule("looped_bfs", 1, 2, n_chunks=2), n_replicas=2)
    lacks = (graph.replica == 1) & (graph.stage == 1)
    with pytest.raises(GraphError, match=r"\(1REDUCE_GRAD\) .* but replica 1 lacks it: .* stage 1"):
        ps.verify(changed(graph, ~lacks))


def test_unlike_members_of_a_group_are_found() -> None:
    """A group is of one operation, and has no replica twice."""
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=2, shard_optimizer=True)
    group = np.where(graph.group >= 0, 0, -1)
    tasks = Tasks(
        op=graph.op, device=graph.device, stage=graph.stage, microbatch=graph.microbatch,
        stream=np.where(graph.group >= 0, StreamKind.COLLECTIVE, 0),
        replica=graph.replica,
    )  # fmt: skip
    with pytest.raises(GraphError, match=r"\(0REDUCE_GRAD\) and .*\(0UNSHARD\) are members of one"):
        ps.verify(ps.TaskGraph.wire(tasks, group=group))


def test_two_members_of_one_replica_are_found() -> None:
    """Reductions of both micro-batches in one group: each replica would wait for itself."""
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, grad_sync="every", overlap=False)
    collective = np.where(graph.microbatch == 0, StreamKind.COLLECTIVE, 0)
    tasks = Tasks(
        op=graph.op, device=graph.device, stage=graph.stage, microbatch=graph.microbatch,
        stream=np.where(graph.group >= 0, collective, 0), replica=graph.replica,
    )  # fmt: skip
    group = np.where(graph.group >= 0, 0, -1)
    with pytest.raises(GraphError, match=r"replica 0 has 2 of it: .* has one member of each of"):
        ps.verify(ps.TaskGraph.build(tasks, group=group, grad_sync="every"))


def test_gradients_of_their_own_size() -> None:
    """Held whole, and reduced, where the optimizer is sharded; parameters are gathered."""
    network = ps.Network(0, 1.0)
    costs = ps.Costs(
        1, 2, parameter_bytes=8, gradient_bytes=16, optimizer_bytes=24, network=network
    )
    graph = ps.lower(ps.schedule("gpipe", 1, 2), n_replicas=2, shard_optimizer=True)
    timeline = ps.simulate(graph, costs)
    assert timeline.memory.peak.tolist() == [8 + 16 + 24 / 2] * 2
    seconds = timeline.frame.groupby("op")[["start", "end"]].apply(
        lambda rows: (rows["end"] - rows["start"]).iloc[0]
    )
    assert (seconds["REDUCE_GRAD"], seconds["UNSHARD"]) == (16 / 2, 8 / 2)
    whole = ps.simulate(ps.lower(ps.schedule("gpipe", 1, 2)), costs)
    assert whole.memory.peak.tolist() == [8 + 16 + 24]
    same = ps.Costs(1, 2, parameter_bytes=8)
    assert same.per_stage("gradient_bytes", 1).tolist() == [8]


def test_a_transformers_gradients_in_32_bits_are_not_sharded() -> None:
    """ZeRO-1 shares the optimizer's 12 bytes a parameter; 2 and 4 stay."""
    model = ps.Transformer(
        hidden_size=8, n_layers=2, n_heads=1, sequence_length=2, vocabulary_size=8,
        bytes_per_gradient=4,
    )  # fmt: skip
    costs = model.costs(1, microbatch_size=1, flops_per_second=1)
    graph = ps.lower(ps.schedule("gpipe", 1, 1), n_replicas=4, shard_optimizer=True)
    static = ps.simulate(graph, costs).memory().groupby("device")["nbytes"].first()
    assert static.tolist() == [(2 + 4 + 12 / 4) * model.n_parameters] * 4


def test_a_sharded_stage_has_no_grad_sync() -> None:
    """It reduces no gradients; the error names the option for its exchanges."""
    schedule = ps.schedule("gpipe", 2, 4)
    with pytest.raises(ArgumentError, match=r"stage 0, which is sharded.*sparse_grad_sync"):
        ps.lower(schedule, n_replicas=2, sharded=[0], grad_sync={0: "every"})
    costs = ps.Costs(1, 2, exchange_bytes={1: {"keys": [[1.0, 1.0], [1.0, 1.0]]}})
    with pytest.raises(CostsError, match=r"of stage 1, but .* sharded=\[0\]"):
        ps.simulate(ps.lower(schedule, n_replicas=2, sharded=[0]), costs)
