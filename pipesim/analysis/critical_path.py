"""Critical path of a timeline, and table of its devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.analysis.waits import WaitReason, chain_to, last_waits
from pipesim.errors import TimelineError
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


def device_table(timeline: Timeline) -> pd.DataFrame:
    """Return one row a device: ``busy``, ``idle`` (s), ``utilization`` (0..1), and memory.

    The column ``peak_memory`` (bytes) exists if the timeline has costs.
    """
    from pipesim.utils.packages import pandas as pd

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
    is the task that it waited for last (`pipesim.analysis.waits.last_waits`).

    Returns
    -------
    pandas.DataFrame
        The columns of ``timeline.frame``, and ``waited_for``: the reason of the task's last wait,
        a word of `pipesim.analysis.waits.WaitReason`. ``"dependency"``, ``"stream"`` (the task
        before it on its stream), ``"message"`` (its SEND), ``"rendezvous"``, ``"link"`` (another
        message), ``"group"``, ``"host"`` (it was issued late; the chain begins there) or
        ``"start"`` (of the step).
        ``gap`` is the time between the two tasks, such as latency (s); below 0 for a message that
        is received while it is sent, and gradients that are reduced during their backward.

    Raises
    ------
    TimelineError
        If no task ran, or if tasks waited for each other in a circle: times of a measurement can
        contradict the order of the graph.
    """
    if not timeline.ran.any():
        raise TimelineError(f"timeline {timeline.name!r} has no task that ran")
    waits = last_waits(timeline)
    path = chain_to(timeline, waits, int(np.nanargmax(timeline.end)))
    previous_end = np.concatenate([[0.0], timeline.end[path[:-1]]])
    frame = timeline.frame.loc[path].copy()
    frame["waited_for"] = [str(WaitReason(reason)) for reason in waits.reason[path]]
    frame["gap"] = timeline.start[path] - previous_end
    return frame
