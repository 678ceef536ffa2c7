"""Critical path of a timeline: the last wait of every task, and the chain that sets the makespan.

The last wait of a task is for the task that stopped blocking it last, and has a reason.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.blocking import Floats, joint_issue_times, last_link_holder, release_times
from pipesim.errors import TimelineError
from pipesim.ops import RECVS, SENDS
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

if TYPE_CHECKING:
    import pandas as pd


Bools = NDArray[np.bool_]


class WaitReason(IntEnum):
    """Reason of the last wait of a task for another one. ``str`` gives its word in tables."""

    DEPENDENCY = 0  # the task needs the result of the other task
    STREAM = 1  # the other task is the one before it on its stream
    MESSAGE = 2  # the task is a RECV, and the other task is its SEND
    RENDEZVOUS = 3  # the task is a SEND; the other task is before its RECV on the receiver's stream
    LINK = 4  # the other task held a link that the task needs
    GROUP = 5  # the task is in a collective, of which another member waited for the other task
    HOST = 6  # the host issued the task late; there is no other task
    START = 7  # the task waited for the start of the step alone

    def __str__(self) -> str:
        return self.name.lower()


# Reasons as plain numbers for compiled loops.
_DEPENDENCY, _STREAM, _MESSAGE, _RENDEZVOUS, _LINK, _GROUP, _HOST, _START = map(int, WaitReason)


class LastWaits(NamedTuple):
    """Last wait of every task; arrays of shape ``(len(graph),)``."""

    task: NDArray[np.int64]  # task that each waited for last; -1 for HOST and START
    reason: NDArray[np.int8]  # a `WaitReason`


def last_waits(timeline: Timeline) -> LastWaits:
    """Return the task that each task waited for last, and the reason of that wait.

    The order in which candidates count:

    - A RECV with a duration waits for its SEND, as both end together.
    - If the last of ``graph.precedence`` that stopped blocking the task did so at its start or
      later, the task waits for it. If several did so at the same time, the largest id counts. The
      SEND of a RECV is not among them.
    - Otherwise the host, the SEND of a RECV, or the task that held a link, if it explains the
      start.
    - Otherwise the last of ``graph.precedence``, although the task started later.

    Tasks that did not start have -1 and START. Tasks that did not run to their end block no other
    task. Where measured times contradict the order of the graph, tasks may wait in a circle.
    """
    graph = timeline.graph
    columns = _Columns(
        precedence_ptr=graph.precedence.ptr,
        precedence=graph.precedence.values,
        released=release_times(timeline),
        dependency_ptr=graph.dependencies.ptr,
        dependencies=graph.dependencies.values,
        queue_predecessor=graph.queue_predecessor,
        pair=graph.pair,
        receives=graph.is_op(RECVS),
        sends=graph.is_op(SENDS),
        ran=timeline.ran,
        start=timeline.start,
        end=timeline.end,
        issued=joint_issue_times(graph, timeline.issue_times),
        link_holder=last_link_holder(timeline),
        has_recorded_issues=timeline.issued is not None,
    )
    waits = LastWaits(
        np.full(len(graph), -1, dtype=np.int64), np.full(len(graph), _START, dtype=np.int8)
    )
    _fill_last_waits(columns, waits)
    return waits


def chain_to(timeline: Timeline, waits: LastWaits, task: int) -> list[int]:
    """Return the chain of tasks that led to a task, each of which waited for the one before."""
    chain = [task]
    while (before := int(waits.task[chain[-1]])) >= 0:
        chain.append(before)
        if len(chain) > len(timeline):
            raise TimelineError(
                f"timeline {timeline.name!r} has no chain to task {task}: by its times, task "
                f"{before} ({timeline.graph.task(before)}) waited for itself, through other tasks; "
                "check that start and end keep the order of streams and messages"
            )
    return chain[::-1]


class _Columns(NamedTuple):
    """Columns of a timeline and its graph; one entry a task, but for the two CSR."""

    precedence_ptr: Ints
    precedence: Ints
    released: Floats  # when each of ``precedence`` stopped blocking its successor (s)
    dependency_ptr: Ints
    dependencies: Ints
    queue_predecessor: Ints
    pair: Ints
    receives: Bools
    sends: Bools
    ran: Bools
    start: Floats
    end: Floats
    issued: Floats  # with partners (s)
    link_holder: Ints  # -1 if none
    has_recorded_issues: bool


def _last_blocker(columns: _Columns, task: int, sender: int) -> int:
    """Return the position in ``precedence`` of the last blocker of ``task``; -1 if none.

    ``sender`` does not count. If several stopped blocking at the same time, the largest id counts.
    """
    last = -1
    for k in range(columns.precedence_ptr[task], columns.precedence_ptr[task + 1]):
        other = columns.precedence[k]
        if other == sender or not columns.ran[other]:
            continue
        if (
            last < 0
            or columns.released[k] > columns.released[last]
            or (columns.released[k] == columns.released[last] and other > columns.precedence[last])
        ):
            last = k
    return last


def _blocker_reason(columns: _Columns, task: int, blocker: int) -> int:
    """Return the reason why ``task`` waits for one of its ``precedence``."""
    if columns.pair[task] == blocker:
        return _MESSAGE
    for k in range(columns.dependency_ptr[task], columns.dependency_ptr[task + 1]):
        if columns.dependencies[k] == blocker:
            return _DEPENDENCY
    if columns.queue_predecessor[task] == blocker:
        return _STREAM
    return _RENDEZVOUS if columns.sends[task] else _GROUP


def _last_wait(columns: _Columns, task: int) -> tuple[int, int]:
    """Return the task that ``task`` waited for last, -1 if none, and the reason."""
    start = columns.start[task]
    sender = int(columns.pair[task]) if columns.receives[task] else -1
    # A RECV ends with its SEND, whenever it was reached.
    if sender >= 0 and columns.ran[sender] and columns.end[task] > start:
        return sender, _MESSAGE
    blocker, free = -1, 0.0
    position = _last_blocker(columns, task, sender)
    if position >= 0:
        blocker, free = int(columns.precedence[position]), columns.released[position]
        if free >= start:
            return blocker, _blocker_reason(columns, task, blocker)
    issued = columns.issued[task]
    if issued >= start > 0:
        return -1, _HOST
    if sender >= 0:
        return sender, _MESSAGE
    holder = int(columns.link_holder[task])
    held_until = columns.end[holder] if holder >= 0 else 0.0
    if holder >= 0 and held_until == start:
        return holder, _LINK
    # A recorded issue time is a little before the start of its task.
    if columns.has_recorded_issues and max(free, held_until) < issued <= start:
        return -1, _HOST
    if blocker >= 0:
        return blocker, _blocker_reason(columns, task, blocker)
    return -1, _START


@kernel(_last_blocker, _blocker_reason, _last_wait, allocates=False)
def _fill_last_waits(columns: _Columns, waits: LastWaits) -> None:
    """Fill ``waits`` for each task that started; it comes in as -1 and `WaitReason.START`."""
    for task in range(len(columns.start)):
        if not np.isnan(columns.start[task]):
            waits.task[task], waits.reason[task] = _last_wait(columns, task)


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
        columns["peak_memory"] = timeline.memory.peak
    return pd.DataFrame(columns).rename_axis("device")


def critical_path(timeline: Timeline) -> pd.DataFrame:
    """Return the chain of tasks that sets the makespan, first task first.

    The search goes backwards from the task that ends last. The predecessor of a task on the chain
    is the task that it waited for last (`last_waits`).

    Returns
    -------
    pandas.DataFrame
        The columns of ``timeline.frame``, and ``waited_for``: the reason of the task's last wait,
        a word of `WaitReason`.
        ``gap`` is the time between the two tasks, such as latency (s); below 0 for a message that
        is received while it is sent, and gradients that are reduced during their backward.

    Raises
    ------
    TimelineError
        If no task ran, or if tasks waited for each other in a circle, as by measured times that
        contradict the order of the graph.

    Examples
    --------
    >>> import pipesim as ps
    >>> graph = ps.lower(ps.schedule("gpipe", 2, 2))
    >>> path = ps.simulate(graph, ps.Costs(forward=1, backward=2)).why.critical_path()
    >>> print(path.loc[path["device"] == 1, ["op", "microbatch", "end", "waited_for"]])
              op  microbatch  end  waited_for
    task
    6     RECV_F           1  2.0     message
    7          F           1  3.0  dependency
    8          B           1  5.0  dependency
    12         B           0  7.0      stream
    13    SEND_B           0  7.0  dependency
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
