"""Memory of hosts that offloaded activations take over a timeline (rule 10 of docs/time.md).

An OFFLOAD takes its bytes of host memory at its start, and the RELOAD of the same activations gives
them back at its end: the copy writes to a buffer from its start, and reads from it to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COPIES, Op
from pipesim.timeline.memory import costs_of
from pipesim.timeline.task_bytes import row_bytes
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]


def peak_host_memory(timeline: Timeline) -> Floats:
    """Return the most bytes that each host holds; see `Timeline.peak_host_memory`."""
    peak = np.zeros(int(timeline.graph.host.max(initial=0)) + 1)
    host, _, held = _held(timeline)
    np.maximum.at(peak, host, held)
    return peak


def host_memory(timeline: Timeline) -> pd.DataFrame:
    """Return the bytes that hosts hold over time; see `Timeline.host_memory`."""
    from pipesim.utils.packages import pandas as pd

    n_hosts = int(timeline.graph.host.max(initial=0)) + 1
    host, time, held = _held(timeline)
    host = np.concatenate([np.arange(n_hosts), host])
    time, held = (np.concatenate([np.zeros(n_hosts), column]) for column in (time, held))
    order = np.argsort(host, kind="stable")
    frame = pd.DataFrame({"host": host, "time": time, "nbytes": held})
    return frame.iloc[order].reset_index(drop=True)


def _moved_bytes(graph: TaskGraph, costs: Costs) -> Floats:
    """Return the bytes that each OFFLOAD and RELOAD moves; any number for other tasks."""
    if graph.kinds.ops.isdisjoint(COPIES):
        return np.zeros(len(graph))
    rows = row_bytes(graph, costs)
    of_rows = np.where(graph.kinds.op[rows.kind] == Op.OFFLOAD, rows.released, rows.allocated)
    moved: Floats = of_rows[rows.row]
    return moved


def _held(timeline: Timeline) -> tuple[Ints, Floats, Floats]:
    """Return host, time and held bytes after each change, by host and in order of time.

    Raises
    ------
    CostsError
        If the sum of the bytes of a host is not finite.
    """
    graph = timeline.graph
    moved = _moved_bytes(graph, costs_of(timeline))
    begins = np.flatnonzero((graph.op == Op.OFFLOAD) & ~np.isnan(timeline.start))
    ends = np.flatnonzero((graph.op == Op.RELOAD) & ~np.isnan(timeline.end))
    task = np.concatenate([begins, ends])
    time = np.concatenate([timeline.start[begins], timeline.end[ends]])
    is_end = np.repeat([False, True], [len(begins), len(ends)])
    host = graph.host[graph.device[task]]
    # At equal times, ends come first, but those of RELOADs without duration by id, as starts do.
    later = ~is_end | (timeline.end[task] <= timeline.start[task])
    order = np.lexsort((task, later, time, host))
    change = np.where(is_end, -moved[task], moved[task])[order]
    held = np.empty_like(change)
    host = host[order]
    with np.errstate(over="ignore", invalid="ignore"):
        for number in np.unique(host).tolist():
            rows = slice(*np.searchsorted(host, [number, number + 1]))
            held[rows] = np.cumsum(change[rows])
    if not np.isfinite(held).all():
        raise CostsError(
            "a host would hold more bytes than a number can have: activation_bytes of the "
            "offloaded stages are too many to be added; check them"
        )
    return host, time[order], held
