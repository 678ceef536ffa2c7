"""What a `pipeexec.GPipe` is to the simulator: its task graph, and when its tasks ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeexec.gpipe.call import Call
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import Action, Op
from pipesim.scheduling.autograd_engine import newest_first
from pipesim.scheduling.placement import linear
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

__all__ = ["graph_of", "of_partitions", "timeline_of"]


def graph_of(
    m: int,
    backward: Sequence[Sequence[tuple[Op, int]]],
    *,
    skips: Iterable[tuple[int, int]],
    overlap: bool,
    portals: bool,
    recompute_waits: bool,
) -> TaskGraph:
    """Return the tasks of a forward and a backward; see `pipesim.lower` for the rest.

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


def of_partitions(
    n_partitions: int, recomputed: Sequence[bool], tasks: Iterable[tuple[Op, int, int]]
) -> list[list[tuple[Op, int]]]:
    """Return R and B of each partition, in the order of ``tasks``.

    A task is operation, micro-batch and partition; of a partition, operation and micro-batch. A
    partition that has none, as it needs no gradient, gets those that the dependencies would give
    it.
    """
    found: list[list[tuple[Op, int]]] = [[] for _ in range(n_partitions)]
    for op, i, j in tasks:
        found[j].append((op, i))
    default = [
        (op, i) for op, i, _ in newest_first([(i, 0) for i in range(len(recomputed))], recomputed)
    ]
    return [order or default for order in found]


def timeline_of(call: Call, graph: TaskGraph) -> Timeline:
    """Return when each task ran, once all have; NaN for those that did not."""
    call.settle()
    assert call.clock is not None
    start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
    nbytes = np.zeros(len(graph))
    for index in range(len(graph)):
        task = graph.task(index)
        assert task.microbatch is not None
        peer = None if task.peer_stage < 0 else task.peer_stage
        done = task.op, task.stage, task.microbatch, peer
        if done in call.ended and call.ended[done].is_set():
            start[index] = call.clock.seconds(task.device, call.began[done])
            end[index] = call.clock.seconds(task.device, call.ended[done])
            nbytes[index] = call.work.nbytes.get(done, 0)
    sent = np.flatnonzero(graph.pair >= 0)
    nbytes[sent] = np.maximum(nbytes[sent], nbytes[graph.pair[sent]])
    return Timeline(graph, start, end, nbytes)
