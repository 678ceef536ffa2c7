"""Several mini-batches in a step: optimizer steps between, and the weights that forwards see."""

from __future__ import annotations

import numpy as np
import pytest

import pipesim as ps
from pipesim.errors import ArgumentError, ScheduleError
from pipesim.timeline.task_bytes import weight_versions


def order(graph: ps.TaskGraph, device: int) -> str:
    tasks = np.flatnonzero((graph.device == device) & graph.on_compute)
    return " ".join(str(graph.task(int(t)))[1:] for t in tasks)


def test_a_step_after_each_mini_batch() -> None:
    """1F1B that never flushes: STEP has the number of its mini-batch's last micro-batch."""
    schedule = ps.schedule("1f1b", 2, 4).with_updates(2, "double_buffered")
    graph = ps.lower(schedule)
    assert order(graph, 0) == "F0 F1 B0 F2 B1 STEP1 F3 B2 B3 STEP3"
    assert order(graph, 1) == "F0 B0 F1 B1 STEP1 F2 B2 F3 B3 STEP3"
    steps = [t for t in range(len(graph)) if str(graph.task(t)) == "0STEP3"]
    needed = [str(graph.task(int(t))) for t in graph.dependencies[steps[0]]]
    assert needed == ["0B2", "0B3"]


@pytest.mark.usefixtures("each_engine")
def test_time() -> None:
    """A step delays what comes after it on its device, and nothing is flushed.

    F = 1, B = 2, STEP = 1::

        device 0 | F0 F1 .. B0B0 F2 .. B1B1 S1 F3 B2B2 .... B3B3 S3
        device 1 | .. F0 B0B0 F1 B1B1 S1 F2 B2B2 .. F3 B3B3 S3
    """
    graph = ps.lower(ps.schedule("1f1b", 2, 4).with_updates(2, "double_buffered"))
    timeline = ps.simulate(graph, ps.Costs(forward=1, backward=2, optimizer_step=1))
    text = {str(graph.task(k)): timeline.start[k] for k in range(len(graph))}
    assert [text[a] for a in ("0B0", "0F2", "0B1", "0STEP1", "0F3")] == [4, 6, 7, 9, 10]
    assert [text[a] for a in ("1B1", "1STEP1", "1F2", "1B2", "1F3")] == [5, 7, 8, 9, 11]
    assert timeline.makespan == 17


def test_reductions_of_replicas() -> None:
    """Each mini-batch's gradients are reduced, and each step waits for its own."""
    graph = ps.lower(ps.schedule("1f1b", 2, 4).with_updates(4, "stashed"), n_replicas=2)
    assert (graph.op == ps.Op.REDUCE_GRAD).sum() == 2 * 2 * 4
    step = next(t for t in range(len(graph)) if str(graph.task(t)) == "1STEP2")
    assert [str(graph.task(int(t))) for t in graph.dependencies[step]] == ["1REDUCE_GRAD2"]
    ps.verify(graph)


def test_versions_of_weights() -> None:
    """One; two; or the newest and those that a micro-batch in flight has begun with."""
    schedule = ps.schedule("1f1b", 4, 12)
    assert weight_versions(ps.lower(schedule)).tolist() == [[1] * 4]
    double = ps.lower(schedule.with_updates(3, "double_buffered"))
    assert weight_versions(double).tolist() == [[2] * 4]
    stashed = ps.lower(schedule.with_updates(12, "stashed"))
    assert weight_versions(stashed).tolist() == [[4, 3, 2, 1]]
    split = ps.lower(ps.schedule("zb_h1", 4, 12).with_updates(12, "stashed"))
    assert weight_versions(split).tolist() == [[4] * 4]  # until W, which the last stages put off
    costs = ps.Costs(forward=1, backward=2, parameter_bytes=10, optimizer_bytes=3)
    held = ps.simulate(stashed, costs).memory.peak  # parameters, one gradient, the optimizer
    assert held.tolist() == [53, 43, 33, 23]


def test_refused() -> None:
    """Shares that are not even, weights that are not there, and steps that are out of order."""
    schedule = ps.schedule("1f1b", 4, 8)
    with pytest.raises(ScheduleError, match="n_batches=3 mini-batches cannot share 8"):
        schedule.with_updates(3, "stashed")
    with pytest.raises(ArgumentError, match="weight_versions"):
        schedule.with_updates(2, "none")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match='several in a step need "stashed"'):
        ps.verify(schedule.with_updates(2, "one"))
    with pytest.raises(ScheduleError, match=r">0F4<"):
        ps.verify(schedule.with_updates(4, "double_buffered"))
    reverse = ps.schedule("gpipe", 2, 4).with_updates(2, "stashed")
    with pytest.raises(ScheduleError, match="belongs to an earlier mini-batch") as failed:
        ps.verify(reverse)
    assert ">0B1<" in str(failed.value)
    late = ps.Schedule.from_orders([["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"]])
    ps.verify(late)
    with pytest.raises(ScheduleError, match=r">0W0<"):
        ps.verify(late.with_updates(2, "stashed"))
    both = ps.Schedule.from_orders(
        [["0F0", "0B0", "0F1", "0B1"], ["0F2", "0B2", "0F3", "0B3"]],
        placement=ps.Placement([0], [1]),
    )
    ps.verify(both)
    with pytest.raises(ScheduleError, match="paths take one mini-batch at a time"):
        ps.verify(both.with_updates(2, "stashed"))


def test_reduced_gradients_of_mini_batches_need_steps() -> None:
    """Without them a reduction of one would run beside backwards of the next, which add to it."""
    schedule = ps.schedule("pipedream", 2, 4)
    assert schedule.n_batches > 1
    assert len(ps.lower(schedule, n_replicas=2))
    with pytest.raises(ArgumentError, match="whose gradients are reduced over replicas"):
        ps.lower(schedule, n_replicas=2, step="none")
