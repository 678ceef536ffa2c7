"""Bytes of each device at its peak, by what they are for (rule 10 of docs/time.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.timeline.gradient_memory import waiting_gradients
from pipesim.timeline.memory import costs_of, held_bytes
from pipesim.timeline.task_bytes import gathered_bytes, static_parts
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]


def memory_breakdown(timeline: Timeline) -> pd.DataFrame:
    """Return the bytes of each device at its peak; see `Timeline.memory_breakdown`."""
    from pipesim.utils.packages import pandas as pd

    graph, costs = timeline.graph, costs_of(timeline)
    peak = timeline.peak_memory  # checks that the sums are finite
    parts = static_parts(graph, costs)
    activations, workspace, buffers, gathered = _at_peaks(timeline)
    columns = {
        "parameters": parts.parameters + gathered,
        "gradients": parts.gradients,
        "optimizer": parts.optimizer,
        "activations": activations,
        "workspace": workspace,
        "buffers": buffers,
        "reserve": costs.memory_reserve * peak,
    }
    columns["total"] = peak + columns["reserve"]
    return pd.DataFrame(columns, index=pd.RangeIndex(graph.n_devices, name="device"))


def _at_peaks(timeline: Timeline) -> tuple[Floats, Floats, Floats, Floats]:
    """Return activations, workspace, waiting gradients and gathered parameters.

    One value a device, at its first peak.
    """
    graph, costs = timeline.graph, costs_of(timeline)
    held = held_bytes(timeline)
    added, removed = np.zeros(len(graph)), np.zeros(len(graph))
    waiting = waiting_gradients(graph, costs)
    added[waiting.backward] += waiting.nbytes
    removed[waiting.reduction] += waiting.nbytes
    change = np.where(held.is_end, -removed[held.task], added[held.task])
    gathers, frees = (of_kind[graph.kind[held.task]] for of_kind in gathered_bytes(graph, costs))
    gathers = np.where(held.is_end, -frees, gathers)
    activations, workspace, buffers, gathered = np.zeros((4, graph.n_devices))
    for device in range(graph.n_devices):
        rows = slice(*np.searchsorted(held.device, [device, device + 1]))
        balance = held.balance[rows]
        if not len(balance) or balance.max() <= 0:
            continue
        top = balance.argmax()
        workspace[device] = held.workspace[rows][top]
        buffers[device] = np.cumsum(change[rows])[top]
        gathered[device] = np.cumsum(gathers[rows])[top]
        activations[device] = balance[top] - workspace[device] - buffers[device] - gathered[device]
    return activations, workspace, buffers, gathered
