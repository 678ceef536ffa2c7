"""Compute the times at which hosts issue tasks (rule 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel

__all__ = ["issue_times"]


def issue_times(graph: TaskGraph, launch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time at which the host has issued each task, in seconds (rule 7).

    Parameters
    ----------
    graph
        Graph; a host issues its tasks in the order of their ids.
    launch
        Seconds to issue each task; shape ``(len(graph),)``.

    Returns
    -------
    ndarray
        Shape ``(len(graph),)``.
    """
    issued = np.zeros(len(graph))
    host = graph.host[graph.device]
    if graph.host_threads and graph.host.any():
        first = graph.issued_first
        _issue_in_threads(host, launch, first.ptr, first.values, np.zeros(len(graph.host)), issued)
        return issued
    tasks_of = CSR.group(host, graph.n_devices)
    for number in np.unique(host):
        issued[tasks_of[number]] = np.cumsum(launch[tasks_of[number]])
    return issued


@kernel()
def _issue_in_threads(
    host: Ints,
    launch: NDArray[np.float64],
    ptr: Ints,
    first: Ints,
    clock: NDArray[np.float64],
    issued: NDArray[np.float64],
) -> None:
    """Fill ``issued``; a host waits for the tasks that other hosts have to issue first."""
    for task in range(len(host)):
        own = host[task]
        for k in range(ptr[task], ptr[task + 1]):
            clock[own] = max(clock[own], issued[first[k]])
        clock[own] += launch[task]
        issued[task] = clock[own]
