"""The task graph of a `pipeexec.GPipe`, and the measured times of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeexec.gpipe.call import Call
from pipeexec.gpipe.task_orders import PartitionTask
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import Action, Op
from pipesim.scheduling.autograd_engine import newest_first
from pipesim.scheduling.placement import linear
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline


def forward_backward_graph(
    m: int,
    backward: Sequence[Sequence[tuple[Op, int]]],
    *,
    skips: Iterable[tuple[int, int]],
    overlap: bool,
    portals: bool,
    recompute_waits: bool,
) -> TaskGraph:
    """Return the tasks of a forward and a backward; see `pipesim.lower` for the other parameters.

    Parameters
    ----------
    m
        Number of micro-batches.
    backward
        R and B of each partition, in order: operation and micro-batch.
    """
    schedule = Schedule.from_orders(
        [
            [Action(j, Op.F, i) for i in range(m)] + [Action(j, op, i) for op, i in order]
            for j, order in enumerate(backward)
        ],
        placement=linear(len(backward)),
        name="gpipe",
    )
    return lower(
        schedule,
        overlap=overlap,
        step="none",
        skips=set(skips),
        portals=portals,
        recompute_waits=recompute_waits,
    )


def backward_by_partition(
    n_partitions: int, recomputed: Sequence[bool], tasks: Iterable[PartitionTask]
) -> list[list[tuple[Op, int]]]:
    """Return R and B of each partition, in the order of ``tasks``: operation and micro-batch.

    A partition without tasks needs no gradient. It gets the tasks of the order that the
    dependencies give.
    """
    orders: list[list[tuple[Op, int]]] = [[] for _ in range(n_partitions)]
    for op, i, j in tasks:
        orders[j].append((op, i))
    default = [
        (op, i) for op, i, _ in newest_first([(i, 0) for i in range(len(recomputed))], recomputed)
    ]
    return [order or default for order in orders]


def measured_timeline(call: Call, graph: TaskGraph) -> Timeline:
    """Wait for all tasks, and return their times; NaN for tasks that did not run."""
    call.wait()
    assert call.clock is not None
    start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    nbytes = np.zeros(len(graph))
    for index in range(len(graph)):
        task = graph.task(index)
        assert task.microbatch is not None
        peer = None if task.peer_stage < 0 else task.peer_stage
        key = task.op, task.stage, task.microbatch, peer
        if key in call.end_events and call.end_events[key].is_set():
            start[index] = call.clock.seconds(task.device, call.start_events[key])
            end[index] = call.clock.seconds(task.device, call.end_events[key])
            nbytes[index] = call.tasks.nbytes.get(key, 0)
    sent = np.flatnonzero(graph.pair >= 0)
    nbytes[sent] = np.maximum(nbytes[sent], nbytes[graph.pair[sent]])
    return Timeline(graph, start, end, nbytes)
