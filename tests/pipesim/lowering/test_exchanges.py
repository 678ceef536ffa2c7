"""Work around exchanges as tasks, keys exchanged early, gradients of all micro-batches at once.

Against grids drawn by hand; replica 1 does what replica 0 does, so that one of them is drawn. A
capital letter is one task on the compute stream: D groups keys, V puts vectors in order, G
sums gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawing import draw_replica, grid

import pipesim as ps
from pipesim.errors import ArgumentError, GraphError
from pipesim.graph import Tasks
from pipesim.ops import EXCHANGES, Op
from pipesim.simulation.simulate import ENGINES

#: A second a byte; an exchange of four bytes lasts two, over two replicas.
COSTS = ps.Costs(
    forward=1, backward=1, optimizer_step=1, parameter_bytes=2, exchange_counts=1, key_bytes=4,
    vector_bytes=4, dispatch=1, reorder=1, reorder_gradients=2, network=ps.Network(bandwidth=1),
)  # fmt: skip


def simulate(name: str, *counts: int, costs: ps.Costs = COSTS, **options: Any) -> ps.Timeline:
    """Simulate two replicas of stages, of which the first is sharded, by both engines."""
    chunks = {"n_chunks": 2} if name == "looped_bfs" else {}
    graph = ps.lower(ps.schedule(name, *counts, **chunks), n_replicas=2, sharded=[0], **options)
    ps.verify(graph)
    one, other = (ps.simulate(graph, costs, engine=engine) for engine in ENGINES)
    assert (one.end == other.end).all()
    return one


# Keys of the next micro-batch


def test_keys_are_exchanged_under_the_compute_of_the_micro_batch_before() -> None:
    """F0 of four seconds hides c1 and k1; otherwise they come after v0."""
    costs = replace(COSTS, forward=(4, 1))
    assert draw_replica(simulate("gpipe", 2, 2, costs=costs)) == grid("""
        0            | .. .. .. F0 F0 F0 F0 .. .. .. .. .. F1 F1 F1 F1 .. .. .. .. .. .. B1 .. B0 ST
        0 collective | c0 k0 k0 .. .. .. .. v0 v0 c1 k1 k1 .. .. .. .. v1 v1 .. .. g1 g1 g0 g0 .. ..
    """)
    assert draw_replica(simulate("gpipe", 2, 2, costs=costs, prefetch_keys=True)) == grid("""
        0            | .. .. .. F0 F0 F0 F0 F1 F1 F1 F1 .. .. .. .. .. .. B1 .. B0 ST
        0 collective | c0 k0 k0 c1 k1 k1 .. v0 v0 .. .. v1 v1 .. .. g1 g1 g0 g0 .. ..
    """)


# Tasks of their own


def test_work_around_exchanges_competes_with_compute() -> None:
    """It is on the compute stream, where each waits behind the tasks before it."""
    assert draw_replica(simulate("looped_bfs", 1, 2, exchange_work="compute")) == grid("""
        0            | D0  ..  ..  ..  0F0 D1  ..  ..  ..  ..  0F1 V0  1F0 V1  1F1 1B1 1B0 G1 G1 ..  ..  0B1 G0 G0 ..  ..  0B0 ST ST
        0 collective | ..  c0  k0  k0  ..  v0  v0  c1  k1  k1  ..  v1  v1  ..  ..  ..  ..  RG RG g1  g1  ..  .. .. g0  g0  ..  .. ..
    """)  # noqa: E501
    timeline = simulate("gpipe", 2, 1, exchange_work="compute")
    assert draw_replica(timeline, "01") == grid("""
        0            | D0 .. .. .. F0 .. .. V0 .. .. G0 G0 .. .. B0 ST
        0 collective | .. c0 k0 k0 .. v0 v0 .. .. .. .. .. g0 g0 .. ..
        1            | .. .. .. .. .. .. .. .. F0 B0 .. .. ST .. .. ..
        1 collective | .. .. .. .. .. .. .. .. .. .. RG RG .. .. .. ..
    """)
    assert timeline.why.idle_by_cause()["straggler"].max() == 0  # G is no slow V
    back = ps.Costs.from_timeline(timeline)
    assert (back.dispatch, back.reorder, back.reorder_gradients) == ((1, 0), (1, 0), (2, 0))
    doubled = back.scaled(2)
    assert (doubled.dispatch, doubled.reorder_gradients) == ((2, 0), (4, 0))
    alike = replace(COSTS, reorder_gradients=None)
    graph = timeline.graph
    assert set(alike.of(graph).duration[graph.op == Op.REORDER]) == {1}


# Gradients of all micro-batches


def test_gradients_of_all_micro_batches_are_exchanged_once() -> None:
    """After the last backward, and the step waits for them; without more, twice the bytes."""
    timeline = simulate("gpipe", 2, 2, sparse_grad_sync="last")
    assert draw_replica(timeline) == grid("""
        0            | .. .. .. F0 .. .. .. .. .. F1 .. .. .. .. B1 B0 .. .. .. .. ST
        0 collective | c0 k0 k0 .. v0 v0 c1 k1 k1 .. v1 v1 .. .. .. .. a  a  a  a  ..
    """)
    whole = simulate("gpipe", 2, 2, sparse_grad_sync="last", step="none", grad_sync="every")
    assert draw_replica(whole) == grid("""
        0            | .. .. .. F0 .. .. .. .. .. F1 .. .. .. .. B1 B0 .. .. .. ..
        0 collective | c0 k0 k0 .. v0 v0 c1 k1 k1 .. v1 v1 .. .. .. .. a  a  a  a
    """)
    graph = timeline.graph
    nbytes = {
        name: timeline.nbytes[graph.part == EXCHANGES.index(name)].tolist()
        for name in ("gradients", "accumulated")
    }
    assert nbytes == {"gradients": [], "accumulated": [8, 8]}


def test_rows_that_occur_in_several_micro_batches_are_sent_once() -> None:
    """Of Zipf's keys the union of eight micro-batches is much less than eight times one."""
    keys = ps.Keys.zipf(1000, 500, exponent=1.1)
    sizes = keys.exchange_bytes(2, 16, n_microbatches=8)
    costs = replace(COSTS, exchange_bytes={0: sizes})
    every = simulate("gpipe", 2, 8, costs=costs)
    once = simulate("gpipe", 2, 8, costs=costs, sparse_grad_sync="last")
    sent = [
        timeline.nbytes[timeline.graph.part == EXCHANGES.index(name)].sum()
        for timeline, name in ((every, "gradients"), (once, "accumulated"))
    ]
    assert sent[1] < 0.45 * sent[0]
    union = 64 * keys.loads(n_microbatches=8)[0].sum()  # each row is sent by the rank without it
    assert sent[1] == pytest.approx(union)
    assert once.makespan < every.makespan


# What is refused


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exchange_work": "computer"}, "unknown exchange_work 'computer'; did you mean 'compute'"),
        ({"sparse_grad_sync": "once"}, "unknown sparse_grad_sync 'once'"),
        ({"prefetch_keys": 1}, "prefetch_keys must be True or False, got 1"),
        ({"sharded": [], "exchange_work": "compute"}, "exchange_work=.*no stage is sharded"),
        ({"sharded": [], "sparse_grad_sync": "last"}, "sparse_grad_sync=.*no stage is sharded"),
        ({"sharded": [1], "prefetch_keys": True}, r"stage 0 is not among sharded=\[1\]"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ps.lower(ps.schedule("gpipe", 3, 2), **{"n_replicas": 2, "sharded": [0], **options})


def test_parts_of_a_reorder() -> None:
    """Of keys there is nothing to put in order."""
    columns: dict[str, Any] = {name: np.zeros(1, np.int64) for name in ("device", "stage")}
    columns |= {"microbatch": np.zeros(1, np.int64), "stream": np.zeros(1, np.int64)}
    for part, wrong in ((1, True), (2, False), (3, False), (4, True)):
        tasks = Tasks(op=np.array([Op.REORDER]), part=np.array([part]), **columns)
        if wrong:
            with pytest.raises(GraphError, match=f"REORDER of stage 0 has part {part}; those of"):
                ps.TaskGraph.build(tasks)
        else:
            assert str(ps.TaskGraph.build(tasks).task(0)) == f"0REORDER0.{EXCHANGES[part]}"
