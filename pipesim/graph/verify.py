"""Check every invariant of a schedule or a task graph, and show what is wrong in its grid.

Longer than most files, as each invariant is a function of its own, and all of them are here.
"""

from __future__ import annotations

import math
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, DeadlockError, GraphError, ScheduleError
from pipesim.graph.graph import TaskGraph
from pipesim.graph.overlaps import overlapped_pairs
from pipesim.graph.tasks import Kinds, StreamKind
from pipesim.graph.wiring import duplicate_task
from pipesim.ops import COLLECTIVES, COMPUTE, LISTED, RECVS, SCHEDULED, SENDS, Action, Op
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["compute_graph", "compute_listing", "verify", "verify_listing"]

_MOST_NAMED = 16
#: Where more than so many actions are missing for each that is there, they are not searched for.
_MOST_CELLS_PER_ACTION = 1000


def verify(what: Schedule | TaskGraph) -> None:
    """Raise if a schedule or a task graph breaks an invariant; return None if all hold.

    A schedule must list, for every stage and micro-batch, one F and either one B or one I and one
    W, and may list one R between them, on the device that holds the stage, in an order that can
    run; an F is overlapped with the B after it; and of several mini-batches, a stage ends the
    backward of one before the next one's, and has the weights that a forward needs. A graph's
    streams must run every task once, its messages must pair up and keep their sender's order, its
    collectives have a member of each replica, its ids must be a topological order, and nothing may
    wait for itself in a circle.

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
    """Return the kinds of compute action of a schedule, and each action's, device after device.

    The paths of a bidirectional placement are replicas. Halves of overlapped actions are kinds of
    their own.
    """
    homes = np.asarray(schedule.placement.paths)
    shape = len(LISTED), schedule.n_stages, schedule.placement.n_paths, 2
    code = schedule.op * np.int32(schedule.n_stages) + schedule.stage
    if shape[2] > 1 or schedule.overlapped is not None:
        code = (code * np.int64(shape[2]) + schedule.path) * 2 + _halves(schedule)
    else:
        shape = (*shape[:2], 1, 1)
    there = np.zeros(math.prod(shape), dtype=bool)
    there[code] = True
    op, stage, path, half = np.unravel_index(np.flatnonzero(there), shape)
    number = (np.cumsum(there) - 1).astype(np.int32)
    stream = np.full_like(op, StreamKind.COMPUTE)
    kinds = Kinds(op, homes[path, stage], stage, path, stream, half)
    return kinds, number[code]


def _halves(schedule: Schedule) -> NDArray[np.bool_]:
    """Mark both halves of each overlapped action."""
    if schedule.overlapped is None:
        return np.zeros(len(schedule), dtype=bool)
    after = np.zeros_like(schedule.overlapped)
    after[1:] = schedule.overlapped[:-1]
    return schedule.overlapped | after


def compute_graph(schedule: Schedule) -> TaskGraph:
    """Return the compute actions of a schedule as a graph, device after device."""
    return TaskGraph.of_kinds(
        *compute_listing(schedule), schedule.microbatch, n_batches=schedule.n_batches
    )


def verify_listing(schedule: Schedule) -> None:
    """Do what `verify` does for a schedule, except to see whether its order can run."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    if schedule.n_batches < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has n_batches={schedule.n_batches}; give at least 1, with "
            "schedule.with_updates"
        )
    if n_stages * n_microbatches > _MOST_CELLS_PER_ACTION * len(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {len(schedule)} actions, but {n_stages} stages and "
            f"n_microbatches={n_microbatches} need at least {2 * n_stages * n_microbatches}; give "
            "the number of micro-batches that it has"
        )
    _check_paths(schedule)
    seen = np.zeros((n_stages, n_microbatches), dtype=np.uint8)
    columns = schedule.op, schedule.stage, schedule.microbatch, schedule.ptr
    paths = schedule.placement.path_of(n_microbatches)
    if not _lists_all(*columns, np.asarray(schedule.placement.paths), paths, seen):
        _check_cells(schedule)
        _check_counts(schedule)
    _check_overlaps(schedule)
    _check_updates(schedule)


@kernel()
def _lists_all(
    op: Ints,
    stage: Ints,
    microbatch: Ints,
    ptr: Ints,
    home: Ints,
    path: Ints,
    seen: NDArray[np.uint8],
) -> bool:
    """Whether each cell has F, and B or else I and W, once, on its device, and R at most once.

    ``seen`` comes in as zeros.
    """
    n_stages, n_microbatches = seen.shape
    for device in range(len(ptr) - 1):
        for k in range(ptr[device], ptr[device + 1]):
            s, m = stage[k], microbatch[k]
            if not (0 <= op[k] <= 4 and 0 <= s < n_stages and 0 <= m < n_microbatches):
                return False
            bit = 1 << op[k]
            if home[path[m], s] != device or seen[s, m] & bit:
                return False
            seen[s, m] |= bit
    for s in range(n_stages):
        for m in range(n_microbatches):
            if seen[s, m] & 15 != 3 and seen[s, m] & 15 != 13:  # F and B; F, I and W; maybe R
                return False
    return True


def _verify_schedule(schedule: Schedule) -> None:
    verify_listing(schedule)
    _check_deadlock(compute_graph(schedule), f"schedule {schedule.name!r}", schedule)


def _refuse(schedule: Schedule, index: SupportsIndex, problem: str) -> None:
    """Raise for the action at ``index`` of the columns."""
    device, position = schedule.place(int(index))
    action = schedule.orders[device][position]
    raise ScheduleError(
        f"schedule {schedule.name!r}: device {device}, position {position}: {action} {problem}\n"
        f"{schedule.grid(mark=(device, position))}"
    )


def _check_cells(schedule: Schedule) -> None:
    """Check each action by itself: operation, range, place, and that it is listed once."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    for index in np.flatnonzero(~np.isin(schedule.op, sorted(LISTED))):
        _refuse(schedule, index, "is no operation that a schedule lists (F, B, I, W, R)")
    for index in np.flatnonzero((schedule.stage < 0) | (schedule.stage >= n_stages)):
        _refuse(schedule, index, f"names a stage outside 0..{n_stages - 1}")
    for index in np.flatnonzero(
        (schedule.microbatch < 0) | (schedule.microbatch >= n_microbatches)
    ):
        _refuse(schedule, index, f"names a micro-batch outside 0..{n_microbatches - 1}")
    home = np.asarray(schedule.placement.paths)[schedule.path, schedule.stage]
    for index in np.flatnonzero(home != schedule.device):
        of_path = f" for micro-batch {schedule.microbatch[index]}"
        _refuse(schedule, index, f"is misplaced: stage {schedule.stage[index]} lies on device "
                f"{home[index]}{of_path if schedule.placement.n_paths > 1 else ''}")  # fmt: skip
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
            path = schedule.placement.path_of(schedule.n_microbatches)[microbatch]
            device = schedule.placement.paths[path][stage]
            end = len(schedule.orders[device])
            raise ScheduleError(
                f"schedule {schedule.name!r}: device {device} lacks "
                f"{Action(int(stage), op, int(microbatch))} ({int(cells.sum())} {op.name} missing "
                f"in all); add it to the order\n{schedule.grid(mark=(device, end))}"
            )


def _check_paths(schedule: Schedule) -> None:
    """Check that each path has a micro-batch."""
    if schedule.n_microbatches < schedule.placement.n_paths:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_microbatches} micro-batches for the "
            f"{schedule.placement.n_paths} paths of its placement; give each path one at least"
        )


def _check_overlaps(schedule: Schedule) -> None:
    """Check that each overlapped action is an F and the B after it."""
    if schedule.overlapped is None:
        return
    at = np.flatnonzero(schedule.overlapped)
    after = np.append(schedule.op, -1)[at + 1]
    last = np.isin(at + 1, schedule.ptr)
    for index in at[(schedule.op[at] != Op.F) | (after != Op.B) | last]:
        _refuse(schedule, index, "is overlapped with nothing: what overlaps is an F with the "
                                 "B listed right after it")  # fmt: skip


def _check_updates(schedule: Schedule) -> None:
    """Check mini-batches: how many, their order on each stage, and the weights that F needs."""
    name, n_batches, versions = schedule.name, schedule.n_batches, schedule.weight_versions
    if n_batches == 1:
        return
    if versions == "one" or schedule.n_microbatches % n_batches:
        raise ScheduleError(
            f"schedule {name!r} has {n_batches} mini-batches of {schedule.n_microbatches} "
            f"micro-batches in all and weight_versions={versions!r}; mini-batches are of one size, "
            'and several in a step need "stashed" or "double_buffered" weights'
        )
    if schedule.placement.n_paths > 1:
        raise ScheduleError(
            f"schedule {name!r} has {n_batches} mini-batches, and a placement of several paths; "
            "a bidirectional pipeline takes one at a time"
        )
    batch = schedule.microbatch // (schedule.n_microbatches // n_batches)
    ends = np.flatnonzero(np.isin(schedule.op, (Op.B, Op.W)))
    place = np.lexsort((ends, schedule.stage[ends], schedule.path[ends]))
    ends = ends[place]
    same = (np.diff(schedule.stage[ends]) == 0) & (np.diff(schedule.path[ends]) == 0)
    for k in np.flatnonzero(same & (np.diff(batch[ends]) < 0)):
        _refuse(schedule, ends[k + 1], "belongs to an earlier mini-batch than the backward before "
                                       "it; a stage steps after each mini-batch")  # fmt: skip
    if versions == "double_buffered":
        _check_buffers(schedule, batch, ends)


def _check_buffers(schedule: Schedule, batch: Ints, ends: Ints) -> None:
    """Check that F of mini-batch t comes after the whole backward of t - 2 on its stage."""
    last = np.full((schedule.placement.n_paths, schedule.n_stages, schedule.n_batches), -1)
    last[schedule.path[ends], schedule.stage[ends], batch[ends]] = ends
    forward = np.flatnonzero((schedule.op == Op.F) & (batch >= 2))
    needed = last[schedule.path[forward], schedule.stage[forward], batch[forward] - 2]
    for index in forward[needed > forward]:
        _refuse(schedule, index, f"needs the weights that mini-batch {batch[index] - 2} leaves, "
                "whose backward comes later; give mini-batches more micro-batches")  # fmt: skip


def _verify_graph(graph: TaskGraph) -> None:
    if graph.verified:
        return
    n, kinds = len(graph), graph.kinds
    if ((graph.dependencies.values < 0) | (graph.dependencies.values >= n)).any():
        raise GraphError(f"a dependency names a task outside 0..{n - 1}")
    duplicate = duplicate_task(kinds, graph.kind, graph.microbatch, graph.n_microbatches)
    if duplicate >= 0:
        raise GraphError(f"{graph.task(duplicate)} is in the graph twice")
    homes = graph.homes[kinds.replica, kinds.stage]
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
    _check_halves(graph)
    _check_members(graph)
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


def _check_halves(graph: TaskGraph) -> None:
    """Check that overlapped tasks are an F and the B right after it on its stream."""
    halves = np.flatnonzero((graph.kinds.overlapped > 0)[graph.kind])
    forward, backward = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    whole = graph.queue_predecessor[backward] == forward
    for half in np.setdiff1d(halves, np.concatenate([forward[whole], backward[whole]])):
        raise GraphError(
            f"task {half} ({graph.task(int(half))}) is overlapped with nothing: what overlaps is "
            "an F with the B right after it on its stream"
        )


def _check_members(graph: TaskGraph) -> None:
    """Check that a collective is of one operation, with one member of each replica that trains."""
    members, number = graph.collectives.values, graph.collectives.rows
    first = members[graph.collectives.ptr[number]]
    for unlike in np.flatnonzero(graph.op[members] != graph.op[first])[:1].tolist():
        one, other = (graph.task(int(task[unlike])) for task in (first, members))
        raise GraphError(
            f"task {one.id} ({one}) and task {other.id} ({other}) are members of one collective; "
            "give tasks of different operations different groups"
        )
    cells, of = np.unique(number * graph.n_stages + graph.stage[members], return_inverse=True)
    there = np.zeros((len(cells), graph.n_replicas), dtype=np.int64)
    np.add.at(there, (of, graph.replica[members]), 1)
    trains = np.zeros(graph.n_replicas, dtype=bool)
    trains[graph.replica[graph.is_op(frozenset({Op.B, Op.W}))]] = True
    for cell, replica in np.argwhere((there > 1) | (trains & (there == 0)))[:1].tolist():
        task = graph.task(int(members[of == cell][0]))
        has = "lacks it" if there[cell, replica] == 0 else f"has {there[cell, replica]} of it"
        raise GraphError(
            f"task {task.id} ({task}) is of replica {task.replica} on device {task.device}, but "
            f"replica {replica} {has}: a collective of stage {task.stage} has one member of each "
            f"of the {graph.n_replicas} replicas; give each replica the same tasks of the stage"
        )


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


def _check_deadlock(graph: TaskGraph, label: str, schedule: Schedule | None = None) -> None:
    """Raise if tasks wait for each other in a circle.

    Of a `compute_graph` the ids are the places in the columns of its ``schedule``: its positions
    are named then, and its grid is shown.
    """
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
        needed = [task for task in needed if task != head] or needed
        position = blocked[0] if schedule is None else schedule.place(head)[1]
        waits = ", ".join(f"{graph.task(t)} on device {graph.device[t]}" for t in needed)
        lines.append(
            f"  device {device}, {stream}: {graph.task(head)} (position {position}) "
            f"waits for {waits}"
        )
    grid = ""
    if schedule is not None:
        grid = "\n" + schedule.grid(mark=schedule.place(int(stuck.argmax())))
    more = len(lines) - _MOST_NAMED
    rest = [f"  ... and {more} more streams"] if more > 0 else []
    raise DeadlockError(
        f"{label} deadlocks: {len(lines)} streams wait for each other; their blocked heads are\n"
        + "\n".join(lines[:_MOST_NAMED] + rest)
        + "\nlist what is waited for before what waits for it"
        + grid
    )
