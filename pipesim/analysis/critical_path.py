"""Critical path of a timeline, and table of its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import joint_issue_times, last_link_holder, release_times
from pipesim.errors import TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import RECVS, SENDS
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["critical_path", "device_table"]


def device_table(timeline: Timeline) -> pd.DataFrame:
    """Return one row a device: ``busy``, ``idle`` (s), ``utilization`` (0..1), and memory.

    The column ``peak_memory`` (bytes) exists if the timeline has costs.
    """
    import pandas as pd

    columns = {
        "busy": timeline.busy,
        "idle": timeline.idle,
        "utilization": timeline.utilization,
    }
    if timeline.costs is not None:
        columns["peak_memory"] = timeline.peak_memory
    return pd.DataFrame(columns).rename_axis("device")


def critical_path(timeline: Timeline) -> pd.DataFrame:
    """Return the chain of tasks that sets the makespan, first task first.

    The search goes backwards from the task that ends last. The predecessor of a task on the chain
    is the last of its predecessors that stopped blocking it.

    Returns
    -------
    pandas.DataFrame
        The columns of ``timeline.frame``, and ``waited_for``: the last reason of the task's
        wait. ``"dependency"``, ``"stream"`` (the task before it on its stream), ``"message"``
        (its SEND), ``"rendezvous"``, ``"link"`` (another message), ``"group"``, ``"host"`` (it was
        issued late; the chain begins there) or ``"start"`` (of the step).
        ``gap`` is the time between the two tasks, such as latency (s); below 0 for a message that
        is received while it is sent, and gradients that are reduced during their backward.

    Raises
    ------
    TimelineError
        If no task ran.
    """
    if not timeline.ran.any():
        raise TimelineError(f"timeline {timeline.name!r} has no task that ran")
    issued = joint_issue_times(timeline.graph, timeline.issue_times)
    held, moments = last_link_holder(timeline), release_times(timeline)
    task: int | None = int(np.nanargmax(timeline.end))
    chain: list[tuple[int, str, float]] = []
    while task is not None:
        before, cause = _cause(timeline, task, issued, held, moments)
        gap = timeline.start[task] - (0.0 if before is None else timeline.end[before])
        chain.append((task, cause, gap))
        task = before
    chain.reverse()
    frame = timeline.frame.loc[[task for task, _, _ in chain]].copy()
    frame["waited_for"] = [cause for _, cause, _ in chain]
    frame["gap"] = [gap for _, _, gap in chain]
    return frame


def _cause(
    timeline: Timeline,
    task: int,
    issued: NDArray[np.float64],
    held: Ints,
    moments: NDArray[np.float64],
) -> tuple[int | None, str]:
    """Return the task that ``task`` waited for last, and the reason; None at the step's start.

    ``moments`` are the result of `release_times` (s).
    """
    graph, start, end = timeline.graph, timeline.start, timeline.end
    entries = slice(*graph.precedence.ptr[task : task + 2])
    waited = zip(graph.precedence[task].tolist(), moments[entries].tolist(), strict=True)
    free = {t: moment for t, moment in waited if timeline.ran[t]}
    before = list(free)
    sender = int(graph.pair[task]) if graph.op[task] in RECVS else -1
    if sender in before:
        before.remove(sender)
        if end[task] > start[task]:  # a RECV ends with its SEND, whenever it was reached
            return sender, "message"
    last = max(before, key=lambda t: (free[t], t), default=None)
    if last is not None and free[last] >= start[task]:
        return last, _relation(graph, task, last)
    if issued[task] >= start[task] > 0:
        return None, "host"
    if sender >= 0:
        return sender, "message"
    holder = int(held[task])
    if holder >= 0 and end[holder] == start[task]:
        return holder, "link"
    ready = max(0.0 if last is None else free[last], 0.0 if holder < 0 else end[holder])
    if timeline.issued is not None and ready < issued[task] <= start[task]:
        return None, "host"  # a recorded issue time is a little before the start of its task
    return (None, "start") if last is None else (last, _relation(graph, task, last))


def _relation(graph: TaskGraph, task: int, before: int) -> str:
    """Return the reason why ``task`` waits for ``before``."""
    if graph.pair[task] == before:
        return "message"
    if before in graph.dependencies[task]:
        return "dependency"
    if graph.queue_predecessor[task] == before:
        return "stream"
    return "rendezvous" if graph.is_op(SENDS)[task] else "group"
