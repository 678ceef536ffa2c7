"""Compute the times at which hosts issue tasks (rule 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel


def issue_times(
    graph: TaskGraph, launch: NDArray[np.float64], row: Ints | None = None
) -> NDArray[np.float64]:
    """Return the time at which the host has issued each task, in seconds (rule 7).

    Parameters
    ----------
    graph
        Graph; a host issues its tasks in the order of their ids.
    launch
        Seconds to issue each task, or a task of each row.
    row
        Row of each task in ``launch``; by default, each task has its own.

    Returns
    -------
    ndarray
        Shape ``(len(graph),)``.
    """
    issued = np.empty(len(graph))
    host, n_hosts = graph.host[graph.kinds.device], int(graph.host.max()) + 1
    none = CSR(np.empty(0, np.int32), np.empty(0, np.int32))
    first = graph.issued_first if graph.host_threads and n_hosts > 1 else none
    rows = np.arange(len(graph), dtype=graph.kind.dtype) if row is None else row
    clock = np.zeros(n_hosts)
    fill_issue_times(graph.kind, host, rows, launch, first.ptr, first.values, clock, issued)
    return issued


@kernel()
def fill_issue_times(
    kind: Ints,
    host: Ints,
    row: Ints,
    launch: NDArray[np.float64],
    first_ptr: Ints,
    first: Ints,
    clock: NDArray[np.float64],
    issued: NDArray[np.float64],
) -> None:
    """Fill ``issued``: each host issues its tasks in order of ids.

    ``first`` lists the tasks that other hosts have to issue before each task. Without such tasks,
    ``first_ptr`` is empty. ``clock`` is the time of each host (s), and comes in as 0.
    """
    for task in range(len(kind)):
        own = host[kind[task]]
        for k in range(first_ptr[task], first_ptr[task + 1]) if len(first_ptr) else range(0):
            clock[own] = max(clock[own], issued[first[k]])
        clock[own] += launch[row[task]]
        issued[task] = clock[own]
