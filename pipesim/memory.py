"""Memory that each device holds over a timeline (rule 10 of docs/time.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.costs import Costs
from pipesim.errors import TimelineError
from pipesim.graph import TaskGraph
from pipesim.ops import Op
from pipesim.timeline import Timeline, bincount

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["changes", "over_time", "peak_memory", "static"]


def static(graph: TaskGraph, costs: Costs) -> NDArray[np.float64]:
    """Return bytes that each device holds throughout: parameters, gradients, optimizer state."""
    parameters, optimizer = (
        costs.per_stage(name, graph.n_stages) for name in ("parameter_bytes", "optimizer_bytes")
    )
    return bincount(graph.device_of_stage, 2 * parameters + optimizer, graph.n_devices)


def changes(graph: TaskGraph, costs: Costs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bytes that each task takes at its start and gives back at its end.

    F takes its activations, or only its input where R takes the rest. B gives all back; I keeps
    ``weight_grad_bytes`` for W to give back. The input of stage 0 is the caller's and counts as 0.
    """
    activation, weight_grad, output = (
        costs.per_stage(name, graph.n_stages)
        for name in ("activation_bytes", "weight_grad_bytes", "output_bytes")
    )
    kept_input = np.minimum(np.concatenate([[0.0], output[:-1]]), activation)
    weight_grad = np.minimum(weight_grad, activation)
    recomputed = np.zeros((graph.n_stages, graph.n_microbatches), dtype=bool)
    of_r = graph.op == Op.R
    recomputed[graph.stage[of_r], graph.microbatch[of_r]] = True
    taken, given = np.zeros(len(graph)), np.zeros(len(graph))

    def put(column: NDArray[np.float64], mask: NDArray[np.bool_], of_stage: NDArray[np.float64]
            ) -> None:  # fmt: skip
        column[mask] = of_stage[graph.stage[mask]]

    dropped = recomputed[graph.stage, graph.microbatch]
    put(taken, (graph.op == Op.F) & ~dropped, activation)
    put(taken, (graph.op == Op.F) & dropped, kept_input)
    put(taken, of_r, activation - kept_input)
    put(given, graph.op == Op.B, activation)
    put(given, graph.op == Op.I, activation - weight_grad)
    put(given, graph.op == Op.W, weight_grad)
    return taken, given


def peak_memory(timeline: Timeline) -> NDArray[np.float64]:
    """Return the most bytes that each device holds; shape ``(n_devices,)``.

    Raises
    ------
    TimelineError
        If the timeline has no costs.
    """
    held = static(timeline.graph, _costs(timeline))
    peak = held.copy()
    for device, _, balance in _balances(timeline):
        peak[device] += max(0.0, balance.max(initial=0.0))
    return peak


def over_time(timeline: Timeline) -> pd.DataFrame:
    """Return bytes held after each change.

    Returns
    -------
    pandas.DataFrame
        ``device``, ``time`` (s), ``nbytes``; by device, then in order of time. The first row of
        a device is what it holds throughout, at time 0.
    """
    import pandas as pd

    held = static(timeline.graph, _costs(timeline))
    parts = [pd.DataFrame({"device": np.arange(len(held)), "time": 0.0, "nbytes": held})]
    for device, time, balance in _balances(timeline):
        parts.append(
            pd.DataFrame({"device": device, "time": time, "nbytes": held[device] + balance})
        )
    return pd.concat(parts, ignore_index=True).sort_values("device", kind="stable").reset_index(
        drop=True
    )  # fmt: skip


def _costs(timeline: Timeline) -> Costs:
    if timeline.costs is None:
        raise TimelineError(
            f"timeline {timeline.name!r} has no costs to compute memory with; "
            "load it with Timeline.load(path, costs=...)"
        )
    return timeline.costs


def _balances(
    timeline: Timeline,
) -> list[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Return device, times and bytes held beyond `static`, at every start and end in turn.

    A device's compute tasks run one after the other, so their order is the queue's.
    """
    graph = timeline.graph
    taken, given = changes(graph, _costs(timeline))
    balances = []
    for number, (device, stream) in enumerate(graph.streams):
        queue = graph.queues[number]
        queue = queue[~np.isnan(timeline.start[queue])]
        if stream != "compute" or not len(queue):
            continue
        ended = timeline.ran[queue]
        times = np.column_stack([timeline.start[queue], timeline.end[queue]]).ravel()
        steps = np.column_stack([taken[queue], -given[queue] * ended]).ravel()
        known = ~np.isnan(times)
        balances.append((device, times[known], np.cumsum(steps)[known]))
    return balances
