"""Match the tasks of two graphs, whose rows may be in another order."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import TimelineError
from pipesim.graph.graph import TaskGraph
from pipesim.timeline.timeline import Timeline

#: Columns that tell a task from all others of its step.
_IDENTITY = ("op", "stage", "microbatch", "part", "peer_stage", "replica", "device")
#: Tasks that a message names.
_N_SHOWN = 3


def matching_rows(graph: TaskGraph, other: TaskGraph) -> NDArray[np.int64] | None:
    """Return the row of each task of ``graph`` in ``other``; None if rows and streams are equal.

    Rows of tasks that are equal in all columns match in their order.

    Raises
    ------
    TimelineError
        If a graph has tasks that the other one lacks; the message names some.
    """
    if graph is other:
        return None
    own, others = _identities(graph), _identities(other)
    if own.shape == others.shape:
        if np.array_equal(own, others):
            same_streams = graph.streams == other.streams and np.array_equal(
                graph.stream, other.stream
            )
            return None if same_streams else np.arange(len(graph))
        order, other_order = np.lexsort(own), np.lexsort(others)
        if np.array_equal(own[:, order], others[:, other_order]):
            rows = np.empty(len(graph), np.int64)
            rows[order] = other_order
            return rows
    alone = _missing(own, others, graph), _missing(others, own, other)
    raise TimelineError(
        f"predicted ({graph!r}) and measured ({other!r}) are not of the same tasks: "
        + " and ".join(
            f"{tasks} {'is' if count == 1 else 'are'} only in the {role} one"
            for role, (count, tasks) in zip(("predicted", "measured"), alone, strict=True)
            if count
        )
        + "; simulate the graph that was run: pipesim.simulate(measured.graph, costs)"
    )


def _identities(graph: TaskGraph) -> NDArray[np.int64]:
    """Return the columns that tell tasks apart, shape ``(n_columns, n_tasks)``."""
    return np.stack([getattr(graph, name).astype(np.int64) for name in _IDENTITY])


def _missing(
    own: NDArray[np.int64], others: NDArray[np.int64], graph: TaskGraph
) -> tuple[int, str]:
    """Return how many tasks of a graph another one lacks, and the names of some."""
    left = Counter(map(tuple, others.T.tolist()))
    rows = []
    for row, identity in enumerate(map(tuple, own.T.tolist())):
        if left[identity]:
            left[identity] -= 1
        else:
            rows.append(row)
    names = [f"{graph.task(row).action} on device {graph.device[row]}" for row in rows[:_N_SHOWN]]
    if graph.n_replicas > 1:
        names = [
            f"{name} (replica {graph.replica[row]})" for name, row in zip(names, rows, strict=False)
        ]
    more = f" and {len(rows) - _N_SHOWN} more" if len(rows) > _N_SHOWN else ""
    return len(rows), ", ".join(names) + more


def with_rows_of(timeline: Timeline, graph: TaskGraph, rows: NDArray[np.int64] | None) -> Timeline:
    """Return a timeline of the same times on ``graph``, whose tasks are ``rows`` of its own."""
    if rows is None:
        return timeline
    sizes = timeline.nbytes if timeline.sizes is None else timeline.sizes
    return Timeline(
        graph,
        timeline.start[rows],
        timeline.end[rows],
        sizes=sizes[rows],
        costs=timeline.costs,
        name=timeline.name,
        issued=None if timeline.issued is None else timeline.issued[rows],
        limits=timeline.limits,
    )
