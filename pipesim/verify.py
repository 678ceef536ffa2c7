"""Check every invariant of a schedule or a task graph, and show what is wrong in its grid."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pipesim.csr import Ints
from pipesim.errors import ArgumentError, DeadlockError, GraphError, ScheduleError
from pipesim.graph import TaskGraph, task_twice
from pipesim.jit import kernel
from pipesim.ops import COLLECTIVES, COMPUTE, RECVS, SCHEDULED, SENDS, Action, Op
from pipesim.schedule import Schedule
from pipesim.tasks import Kinds, StreamKind

__all__ = ["compute_graph", "compute_listing", "verify", "verify_listing"]

_MOST_NAMED = 16
#: Where more than so many actions are missing for each that is there, they are not searched for.
_MOST_CELLS_PER_ACTION = 1000


def verify(what: Schedule | TaskGraph) -> None:
    """Raise if a schedule or a task graph breaks an invariant; return None if all hold.

    A schedule must list, for every stage and micro-batch, one F and either one B or one I and one
    W, on the device that holds the stage, in an order that can run. A graph's streams must run
    every task once, its messages must pair up and keep their sender's order, its ids must be a
    topological order, and nothing may wait for itself in a circle.

    Raises
    ------
    ScheduleError
        Showing the grid with the bad cell marked.
    DeadlockError
        Naming each blocked device's head and what it waits for.
    GraphError
        Naming the tasks at fault.
    ArgumentError
        If it is neither.
    """
    if isinstance(what, Schedule):
        _verify_schedule(what)
    elif isinstance(what, TaskGraph):
        _verify_graph(what)
    else:
        raise ArgumentError(f"verify takes a Schedule or a TaskGraph, got {type(what).__name__}")


def compute_listing(schedule: Schedule) -> tuple[Kinds, NDArray[np.int32]]:
    """Return the kinds of compute action of a schedule, and each action's, device after device."""
    homes = np.asarray(schedule.placement.device_of)
    code = schedule.op * np.int32(schedule.n_stages) + schedule.stage
    there = np.zeros(len(SCHEDULED) * schedule.n_stages, dtype=bool)
    there[code] = True
    op, stage = np.divmod(np.flatnonzero(there), schedule.n_stages)
    zeros = np.zeros_like(op)
    number = (np.cumsum(there) - 1).astype(np.int32)
    return Kinds(op, homes[stage], stage, zeros, zeros + StreamKind.COMPUTE), number[code]


def compute_graph(schedule: Schedule) -> TaskGraph:
    """Return the compute actions of a schedule as a graph, device after device."""
    return TaskGraph.of_kinds(*compute_listing(schedule), schedule.microbatch)


def verify_listing(schedule: Schedule) -> None:
    """Do what `verify` does for a schedule, except to see whether its order can run."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    if n_stages * n_microbatches > _MOST_CELLS_PER_ACTION * len(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {len(schedule)} actions, but {n_stages} stages and "
            f"n_microbatches={n_microbatches} need at least {2 * n_stages * n_microbatches}; give "
            "the number of micro-batches that it has"
        )
    seen = np.zeros((n_stages, n_microbatches), dtype=np.uint8)
    homes = np.asarray(schedule.placement.device_of)
    if not _lists_all(schedule.op, schedule.stage, schedule.microbatch, schedule.ptr, homes, seen):
        _check_cells(schedule)
        _check_counts(schedule)


@kernel()
def _lists_all(
    op: Ints, stage: Ints, microbatch: Ints, ptr: Ints, home: Ints, seen: NDArray[np.uint8]
) -> bool:
    """Whether each cell has F, and B or else I and W, once, on its device; ``seen`` is zeros."""
    n_stages, n_microbatches = seen.shape
    for device in range(len(ptr) - 1):
        for k in range(ptr[device], ptr[device + 1]):
            s, m = stage[k], microbatch[k]
            if not (0 <= op[k] <= 3 and 0 <= s < n_stages and 0 <= m < n_microbatches):
                return False
            bit = 1 << op[k]
            if home[s] != device or seen[s, m] & bit:
                return False
            seen[s, m] |= bit
    for s in range(n_stages):
        for m in range(n_microbatches):
            if seen[s, m] != 3 and seen[s, m] != 13:  # F and B; F, I and W
                return False
    return True


def _verify_schedule(schedule: Schedule) -> None:
    verify_listing(schedule)
    _check_deadlock(compute_graph(schedule), f"schedule {schedule.name!r}")


def _refuse(schedule: Schedule, index: SupportsIndex, problem: str) -> None:
    """Raise for the action at ``index`` of the columns."""
    index = int(index)
    device = int(schedule.device[index])
    position = index - int(schedule.ptr[device])
    action = schedule.orders[device][position]
    raise ScheduleError(
        f"schedule {schedule.name!r}: device {device}, position {position}: {action} {problem}\n"
        f"{schedule.grid(mark=(device, position))}"
    )


def _check_cells(schedule: Schedule) -> None:
    """Check each action by itself: operation, range, place, and that it is listed once."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    for index in np.flatnonzero(~np.isin(schedule.op, sorted(SCHEDULED))):
        _refuse(schedule, index, "is no operation that a schedule lists (F, B, I, W)")
    for index in np.flatnonzero((schedule.stage < 0) | (schedule.stage >= n_stages)):
        _refuse(schedule, index, f"names a stage outside 0..{n_stages - 1}")
    for index in np.flatnonzero(
        (schedule.microbatch < 0) | (schedule.microbatch >= n_microbatches)
    ):
        _refuse(schedule, index, f"names a micro-batch outside 0..{n_microbatches - 1}")
    home = np.asarray(schedule.placement.device_of)[schedule.stage]
    for index in np.flatnonzero(home != schedule.device):
        _refuse(schedule, index, f"is misplaced: stage {schedule.stage[index]} lies on device "
                                 f"{home[index]}")  # fmt: skip
    _, first = np.unique(_keys(schedule), return_index=True)
    repeated = np.ones(len(schedule), dtype=bool)
    repeated[first] = False
    for index in np.flatnonzero(repeated):
        _refuse(schedule, index, "is a duplicate; it is listed before")


def _keys(schedule: Schedule) -> NDArray[np.int64]:
    """Number each (op, stage, micro-batch)."""
    cell = schedule.stage.astype(np.int64) * schedule.n_microbatches + schedule.microbatch
    return schedule.op * np.int64(schedule.n_stages * schedule.n_microbatches) + cell


def _check_counts(schedule: Schedule) -> None:
    """Check that each stage and micro-batch has F, and B or else both I and W."""
    shape = schedule.n_stages, schedule.n_microbatches
    present = {op: np.zeros(shape, dtype=bool) for op in SCHEDULED}
    for op, cells in present.items():
        of_op = schedule.op == op
        cells[schedule.stage[of_op], schedule.microbatch[of_op]] = True
    for half in (Op.I, Op.W):
        both = present[Op.B] & present[half]
        for stage, microbatch in np.argwhere(both):
            cell = (stage, half, microbatch)
            index = np.flatnonzero(
                (schedule.stage == cell[0])
                & (schedule.op == half)
                & (schedule.microbatch == microbatch)
            )[0]
            _refuse(schedule, index, f"stands beside {Action(int(stage), Op.B, int(microbatch))}, "
                                     "which is the whole backward")  # fmt: skip
    split = present[Op.I] | present[Op.W]
    missing = {
        Op.F: ~present[Op.F],
        Op.B: ~present[Op.B] & ~split,
        Op.I: split & ~present[Op.I],
        Op.W: split & ~present[Op.W],
    }
    for op, cells in missing.items():
        for stage, microbatch in np.argwhere(cells):
            device = schedule.placement.device_of[stage]
            end = int(schedule.ptr[device + 1] - schedule.ptr[device])
            raise ScheduleError(
                f"schedule {schedule.name!r}: device {device} lacks "
                f"{Action(int(stage), op, int(microbatch))} ({int(cells.sum())} {op.name} missing "
                f"in all); add it to the order\n{schedule.grid(mark=(device, end))}"
            )


def _verify_graph(graph: TaskGraph) -> None:
    if graph.verified:
        return
    n, kinds = len(graph), graph.kinds
    if ((graph.dependencies.values < 0) | (graph.dependencies.values >= n)).any():
        raise GraphError(f"a dependency names a task outside 0..{n - 1}")
    twice = task_twice(graph)
    if twice >= 0:
        raise GraphError(f"{graph.task(twice)} is in the graph twice")
    home = np.zeros((graph.n_replicas, graph.n_stages), dtype=np.int64)
    home[kinds.replica, kinds.stage] = kinds.device
    homes = home[kinds.replica, kinds.stage]
    for elsewhere in np.flatnonzero((homes != kinds.device)[graph.kind]):
        raise GraphError(
            f"task {elsewhere} ({graph.task(int(elsewhere))}) is on device "
            f"{graph.device[elsewhere]}, but stage {graph.stage[elsewhere]} lies on device "
            f"{homes[graph.kind[elsewhere]]} as well; a stage lies on one"
        )
    for aside in np.flatnonzero(graph.is_op(COMPUTE) & ~graph.on_compute):
        raise GraphError(
            f"task {aside} ({graph.task(int(aside))}) is on stream "
            f"{graph.task(int(aside)).stream!r}; it belongs on 'compute'"
        )
    members = graph.collectives.values
    for other in members[~graph.is_op(COLLECTIVES)[members]]:
        raise GraphError(
            f"task {other} ({graph.task(int(other))}) is in a group; only collectives "
            f"({', '.join(op.name for op in sorted(COLLECTIVES))}) have members"
        )
    _check_messages(graph)
    _check_deadlock(graph, f"graph {graph.name!r}")
    waits = graph.precedence
    late = np.flatnonzero(waits.values >= waits.rows)
    if len(late):
        first_late = graph.task(int(waits.rows[late[0]]))
        needed = graph.task(int(waits.values[late[0]]))
        raise GraphError(
            f"task {first_late.id} ({first_late}) waits for task {needed.id} ({needed}), "
            "which is issued later; ids must be a topological order: build the graph with "
            "TaskGraph.build"
        )
    graph.as_verified()


def _check_messages(graph: TaskGraph) -> None:
    """Check that transfers pair up and that each channel keeps its sender's order."""
    for lone in np.flatnonzero(graph.is_op(SENDS | RECVS) & (graph.pair < 0)):
        raise GraphError(
            f"task {lone} ({graph.task(int(lone))}) has no counterpart at the other end; every "
            "SEND needs its RECV"
        )
    recvs = np.flatnonzero(graph.is_op(RECVS))
    sends = graph.pair[recvs]
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.queues.values] = np.arange(len(graph))
    channel = graph.device[sends].astype(np.int64) * graph.n_devices + graph.device[recvs]
    order = np.lexsort((position[sends], channel))
    same = channel[order][1:] == channel[order][:-1]
    swapped = same & (position[recvs][order][1:] < position[recvs][order][:-1])
    same_streams = (graph.stream[sends][order][1:] == graph.stream[sends][order][:-1]) & (
        graph.stream[recvs][order][1:] == graph.stream[recvs][order][:-1]
    )
    for index in np.flatnonzero(swapped & same_streams):
        early, late = (graph.task(int(recvs[order[index + k]])) for k in range(2))
        sent = graph.task(int(graph.pair[early.id]))
        raise GraphError(
            f"device {early.device} receives {late} before {early}, but device {sent.device} "
            f"sends {sent} first; messages of one channel keep their sender's order"
        )


def _check_deadlock(graph: TaskGraph, label: str) -> None:
    """Raise if tasks wait for each other in a circle."""
    stuck = graph.levels < 0
    if not stuck.any():
        return
    lines = []
    for number, (device, stream) in enumerate(graph.streams):
        queue = graph.queues[number]
        blocked = np.flatnonzero(stuck[queue])
        if not len(blocked):
            continue
        head = int(queue[blocked[0]])
        needed = [int(t) for t in np.unique(graph.precedence[head]) if stuck[t]]
        waits = ", ".join(f"{graph.task(t)} on device {graph.device[t]}" for t in needed)
        lines.append(
            f"  device {device}, {stream}: {graph.task(head)} (position {blocked[0]}) "
            f"waits for {waits}"
        )
    more = len(lines) - _MOST_NAMED
    rest = [f"  ... and {more} more streams"] if more > 0 else []
    raise DeadlockError(
        f"{label} deadlocks: {len(lines)} streams wait for each other; their blocked heads are\n"
        + "\n".join(lines[:_MOST_NAMED] + rest)
        + "\nlist what is waited for before what waits for it"
    )
