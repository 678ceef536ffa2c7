"""Check every invariant of a schedule or a task graph, and find deadlocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, DeadlockError
from pipesim.graph.compute_tasks import compute_graph
from pipesim.graph.graph import TaskGraph
from pipesim.graph.graph_checks import check_ids, check_tasks
from pipesim.graph.schedule_checks import verify_listing
from pipesim.scheduling.schedule import Schedule

#: Blocked streams that a deadlock error lists.
_MOST_NAMED = 16


def verify(what: Schedule | TaskGraph) -> None:
    """Raise if a schedule or a task graph breaks an invariant; return None if all hold.

    Invariants of a schedule:

    - Every stage and micro-batch has one F, and either one B or one I and one W. It may have one R
      between them.
    - Each action is listed by the device that holds its stage.
    - An overlapped F is followed by its B.
    - With several mini-batches, a stage ends the backward of one before the backward of the next
      begins, and has the weights that each forward needs.
    - The order can run: it has no deadlock.

    Invariants of a graph:

    - Its streams run every task once.
    - Messages pair up, and each channel keeps its sender's order.
    - Collectives have one member of each replica; REDUCE_TIED and GRAD_NORM one of each device.
    - No tasks wait for each other in a circle.
    - Ids are a topological order.

    Parameters
    ----------
    what
        Schedule or task graph. A graph that `pipesim.lower` made is verified already.

    Raises
    ------
    ScheduleError
        For a wrong schedule; the message shows the grid with the wrong cell marked.
    DeadlockError
        For a deadlock; the message has the next task of each blocked device and what blocks it.
    GraphError
        For a wrong graph; the message has the wrong tasks.

    See Also
    --------
    pipesim.lower : Turn a schedule into a task graph, and verify both.
    pipesim.Schedule.grid : Orders of a schedule as text.
    pipesim.audit : Time that each dependency of a graph costs.

    Examples
    --------
    Device 1 lists the backward before the forward:

    >>> import pipesim as ps
    >>> ps.verify(ps.Schedule.from_orders([["0F0", "0B0"], ["1B0", "1F0"]]))
    Traceback (most recent call last):
        ...
    pipesim.errors.DeadlockError: schedule 'custom' deadlocks: 2 streams wait for each other; ...
    """
    if isinstance(what, Schedule):
        verify_listing(what)
        _check_deadlock(compute_graph(what), f"schedule {what.name!r}", what)
    elif isinstance(what, TaskGraph):
        if what.verified:
            return
        check_tasks(what)
        _check_deadlock(what, f"graph {what.name!r}")
        check_ids(what)
        what.as_verified()
    else:
        raise ArgumentError(f"verify takes a Schedule or a TaskGraph, got {type(what).__name__}")


def _check_deadlock(graph: TaskGraph, label: str, schedule: Schedule | None = None) -> None:
    """Raise if tasks wait for each other in a circle.

    With the ``schedule`` of a `compute_graph`, the error has positions in the schedule and shows
    its grid: ids of such a graph are indices into the schedule's columns.
    """
    stuck = graph.levels < 0
    if not stuck.any():
        return
    lines = []
    for number in range(len(graph.streams)):
        blocked = np.flatnonzero(stuck[graph.queues[number]])
        if len(blocked):
            lines.append(_blocked_stream(graph, number, int(blocked[0]), stuck, schedule))
    grid = ""
    if schedule is not None:
        grid = "\n" + schedule.grid(mark=schedule.place(int(stuck.argmax())))
    more = len(lines) - _MOST_NAMED
    rest = [f"  ... and {more} more streams"] if more > 0 else []
    raise DeadlockError(
        f"{label} deadlocks: {len(lines)} streams wait for each other; their blocked heads are\n"
        + "\n".join(lines[:_MOST_NAMED] + rest)
        + "\nlist each task before the tasks that wait for it"
        + grid
    )


def _blocked_stream(
    graph: TaskGraph,
    number: int,
    position: int,
    stuck: NDArray[np.bool_],
    schedule: Schedule | None,
) -> str:
    """Return the line of an error for one stream: its blocked task, and the tasks it waits for.

    ``position`` is that of the blocked task in the stream's queue, and ``stuck`` marks the tasks
    that can never start.
    """
    device, stream = graph.streams[number]
    head = int(graph.queues[number][position])
    needed = [int(t) for t in np.unique(graph.precedence[head]) if stuck[t]]
    needed = [task for task in needed if task != head] or needed
    position = position if schedule is None else schedule.place(head)[1]
    waits = ", ".join(f"{graph.task(t)} on device {graph.device[t]}" for t in needed)
    return (
        f"  device {device}, {stream}: {graph.task(head)} (position {position}) waits for {waits}"
    )
