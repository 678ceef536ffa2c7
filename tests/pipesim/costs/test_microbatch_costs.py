"""Costs that differ between micro-batches: times, messages, memory, replicas, and errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawing import draw, grid
from hypothesis import given
from hypothesis import strategies as st
from strategies import schedules

import pipesim as ps
from pipesim.errors import CostsError
from pipesim.ops import Op


def lowered(name: str, n_devices: int, n_microbatches: int, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, n_devices, n_microbatches), **options)


def test_a_long_microbatch_in_a_short_pipeline() -> None:
    """Micro-batch 1 takes twice as long in all stages."""
    costs = ps.Costs(forward=[[1, 2, 1]], backward=[[1, 2, 1]])
    timeline = ps.simulate(lowered("gpipe", 2, 3, step="none"), costs)
    assert draw(timeline, transfers=False) == grid("""
        0 | F0 F1 F1 F2 .. .. .. B2 .. B1 B1 B0
        1 | .. F0 .. F1 F1 F2 B2 B1 B1 B0 .. ..
    """)


def test_values_of_one_microbatch_and_averages() -> None:
    costs = ps.Costs(forward=[[1, 2], 5], backward=2, activation_bytes=np.array([[3, 5], [1, 1]]))
    assert costs.n_microbatches == 2
    assert costs.forward == ((1.0, 2.0), (5.0, 5.0)), "a number is that of all micro-batches"
    second = costs.microbatch(1)
    assert second.n_microbatches is None
    assert (second.forward, second.backward, second.activation_bytes) == ((2, 5), 2, (5, 1))
    assert costs.averaged().forward == (1.5, 5.0)
    assert costs.scaled(2, op="F", stage=0).forward == ((2.0, 4.0), (5.0, 5.0))
    chunks = costs.in_chunks(ps.Placement.looped(2, 2))
    assert chunks.forward == ((0.5, 1.0), (2.5, 2.5), (0.5, 1.0), (2.5, 2.5))
    assert ps.Costs(1, 2).microbatch(7) == ps.Costs(1, 2) == ps.Costs(1, 2).averaged()


def test_messages_have_the_bytes_of_their_microbatch() -> None:
    costs = ps.Costs(1, 1, output_bytes=[[10, 20, 30]], network=ps.Network(bandwidth=10))
    timeline = ps.simulate(lowered("gpipe", 2, 3), costs)
    graph = timeline.graph
    for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B):
        tasks = graph.op == op
        assert timeline.nbytes[tasks].tolist() == [10 + 10 * m for m in graph.microbatch[tasks]]
    sends = graph.op == Op.SEND_F
    assert timeline.duration[sends].tolist() == [1, 2, 3]


def test_memory_of_two_lengths_by_hand() -> None:
    """Device 0 of 1F1B holds micro-batches 0 and 1, then 1 and 2; stage 1 one at a time."""
    costs = ps.Costs(1, 1, activation_bytes=[[5, 7, 1]], forward_workspace_bytes=[[0, 0, 9]])
    timeline = ps.simulate(lowered("1f1b", 2, 3), costs)
    assert timeline.memory.peak.tolist() == [17, 10]  # 7 + 1 + 9; 1 + 9
    rows = timeline.memory()
    first = rows[rows["device"] == 0]
    assert first["nbytes"].tolist() == [0, 5, 5, 12, 12, 12, 7, 17, 8, 8, 1, 1, 0, 0, 0]
    assert timeline.memory.breakdown().loc[0, "activations"] == 8
    assert timeline.memory.breakdown().loc[0, "workspace"] == 9


def test_recomputed_and_evaluated_inputs_have_their_own_bytes() -> None:
    costs = ps.Costs(1, 1, activation_bytes=[[8, 16]], output_bytes=[[1, 2]])
    graph = lowered("gpipe", 2, 2, recompute="always")
    assert ps.simulate(graph, costs).memory.peak.tolist() == [16, 1 + 16]
    evaluation = lowered("gpipe", 2, 2, forward_only=True)
    assert ps.simulate(evaluation, costs).memory.peak.tolist() == [2, 2]


def test_replicas_may_have_other_microbatches() -> None:
    """Replica 1 is slower, and both reduce when it is done: a straggler."""
    graph = lowered("gpipe", 1, 2, n_replicas=2)
    costs = ps.Costs(forward=[[1, 1, 1, 5]], backward=1, reduce_grad=1)
    timeline = ps.simulate(graph, costs)
    reduces = graph.op == Op.REDUCE_GRAD
    assert timeline.start[reduces].tolist() == [8, 8]
    both = ps.simulate(graph, ps.Costs(forward=[[1, 5]], backward=1, reduce_grad=1))
    assert both.start[reduces].tolist() == [8, 8], "the same micro-batches in both"
    assert both.makespan == timeline.makespan


@given(st.data())
def test_equal_values_are_one_value(data: st.DataObject) -> None:
    """Any schedule takes as long, and as much memory, as with one value a stage."""
    schedule = data.draw(schedules())
    graph = ps.lower(schedule)
    one = ps.Costs(1.5, input_grad=1, weight_grad=2, activation_bytes=4, output_bytes=2,
                   weight_grad_bytes=3, network=ps.Network(1, 2))  # fmt: skip
    rows = np.ones((schedule.n_stages, schedule.n_microbatches))
    several = ps.Costs(1.5 * rows, input_grad=rows, weight_grad=2 * rows,
                       activation_bytes=4 * rows, output_bytes=2 * rows, weight_grad_bytes=3 * rows,
                       network=ps.Network(1, 2))  # fmt: skip
    expected, timeline = ps.simulate(graph, one), ps.simulate(graph, several)
    assert (timeline.start == expected.start).all()
    assert (timeline.end == expected.end).all()
    assert (timeline.memory.peak == expected.memory.peak).all()


def test_files_keep_them(tmp_path: Path) -> None:
    costs = ps.Costs([[1, 2]], [[2, 3]], skip_bytes={(0, 1): [3, 4]}, launch=[[0, 1], [1, 0]])
    costs.save(tmp_path / "costs.json")
    assert ps.Costs.load(tmp_path / "costs.json") == costs
    assert costs.microbatch(1).skip_bytes == (((0, 1), 4.0),)
    assert "2 micro-batches" in repr(costs)
    assert "averages" not in costs._repr_html_()


def test_a_timeline_shows_them() -> None:
    """With ``per_microbatch``, a simulation from a timeline's costs gives its times again."""
    graph = lowered("zb_h1", 3, 4)
    generator = np.random.default_rng(0)
    seconds = generator.integers(1, 5, (3, 3, 4)).astype(float)
    network = ps.Network(latency=1, bandwidth=4)
    costs = ps.Costs(seconds[0], input_grad=seconds[1], weight_grad=seconds[2],
                     output_bytes=seconds[0], network=network)  # fmt: skip
    timeline = ps.simulate(graph, costs)
    shown = ps.Costs.from_timeline(timeline, per_microbatch=True)
    assert np.array_equal(shown.forward, costs.forward)
    assert np.array_equal(shown.weight_grad, costs.weight_grad)
    assert np.array_equal(np.array(shown.output_bytes)[:2], seconds[0][:2])
    again = ps.simulate(graph, replace(shown, network=network))
    assert (again.end == timeline.end).all()
    mean = ps.Costs.from_timeline(timeline)
    assert mean.n_microbatches is None
    assert np.allclose(mean.forward, seconds[0].mean(axis=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer_step": [[1, 2]]}, "optimizer_step is of a whole stage, but was given a value"),
        ({"parameter_bytes": [[1, 2], [3, 4]]}, "parameter_bytes is of a whole stage, but"),
        ({"backward": [[1, 2], [3]]}, "backward has 1 and 2 values of different stages; give each"),
        ({"backward": [[1, 2], []]}, "backward has 0 and 2 values of different stages"),
        ({"backward": [[1, 2], [3, -1]]}, "backward of stage 1, micro-batch 1 must be finite seco"),
        ({"backward": [[1, 2], [3, math.nan]]}, "backward of stage 1, micro-batch 1 must be fini"),
        ({"backward": [[1, 2], "3"]}, "backward of stage 1 must be finite seconds >= 0, got '3'"),
        ({"backward": [[1, 2, 3]]}, "different numbers of micro-batches: forward 2, backward 3;"),
        ({"backward": np.zeros((2, 2, 2))}, "backward of stage 0, micro-batch 0 must be finite"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CostsError, match=re.escape(message)):
        ps.Costs(**{"forward": [[1, 2]], "backward": 1, **fields})


def test_another_number_of_microbatches() -> None:
    costs = ps.Costs([[1, 2, 3]], 1)
    with pytest.raises(CostsError, match=r"for 3 micro-batches, but the graph has 4; give 4"):
        ps.simulate(lowered("gpipe", 2, 4), costs)
    with pytest.raises(CostsError, match=r"give 4 values a stage, or 8 for those of all 2 repl"):
        ps.simulate(lowered("gpipe", 2, 4, n_replicas=2), costs)
    with pytest.raises(CostsError, match=r"there is no micro-batch 3 in costs of 3 micro-batches"):
        costs.microbatch(3)
    with pytest.raises(CostsError, match=r"forward has values that differ between micro-batches"):
        costs.per_stage("forward", 2)
