"""What a `pipeexec.GPipe` is to the simulator: its task graph, and when its tasks ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeexec.gpipe_call import Call
from pipesim.graph import TaskGraph
from pipesim.lower import Recompute, lower
from pipesim.ops import Op
from pipesim.placement import linear
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["backward_orders", "graph_of", "timeline_of"]


def graph_of(
    recomputed: Sequence[bool],
    backward: Sequence[Sequence[int]],
    *,
    skips: Iterable[tuple[int, int]],
    overlap: bool,
    portals: bool,
    recompute_first: bool,
) -> TaskGraph:
    """Return the tasks of a forward and a backward; see `pipesim.lower` for the rest.

    Parameters
    ----------
    recomputed
        Of each micro-batch, whether it has an R: all, all but the last, or none.
    backward
        The order of the micro-batches in the backward of each partition.
    """
    m = len(recomputed)
    schedule = Schedule.from_orders(
        [
            [f"{j}F{i}" for i in range(m)] + [f"{j}B{i}" for i in order]
            for j, order in enumerate(backward)
        ],
        placement=linear(len(backward)),
        name="gpipe",
    )
    mode: Recompute = "except_last" if any(recomputed) else "never"
    return lower(
        schedule,
        recompute="always" if all(recomputed) else mode,
        overlap=overlap,
        step="none",
        skips=set(skips),
        portals=portals,
        recompute_first=recompute_first,
    )


def backward_orders(call: Call) -> list[list[int]]:
    """Return the order of the micro-batches in the backward of each partition, as they were issued.

    What needs no gradient has no backward, and comes last.
    """
    ran: list[list[int]] = [[] for _ in call.machine.stages]
    for op, j, i in call.order:
        if op == Op.B:
            ran[j].append(i)
    newest_first = range(len(call.work.recomputed))[::-1]
    return [order + [i for i in newest_first if i not in order] for order in ran]


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
        if done in call.ended and call.ended[done].passed():
            start[index] = call.clock.seconds(task.device, call.began[done])
            end[index] = call.clock.seconds(task.device, call.ended[done])
            nbytes[index] = call.work.nbytes.get(done, 0)
    sent = np.flatnonzero(graph.pair >= 0)
    nbytes[sent] = np.maximum(nbytes[sent], nbytes[graph.pair[sent]])
    return Timeline(graph, start, end, nbytes)
