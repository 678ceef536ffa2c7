"""Check every invariant of a schedule or a task graph, and find deadlocks.

Each invariant of a schedule and of a graph is a function.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, DeadlockError, GraphError, ScheduleError
from pipesim.graph.compute_tasks import compute_graph
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.dependencies import duplicate_task, overlapped_pairs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import (
    COLLECTIVES,
    COMPUTE,
    INPUT_GRADS,
    LISTED,
    OF_DEVICES,
    RECVS,
    SCHEDULED,
    SENDS,
    WEIGHT_GRADS,
    Action,
    Op,
    is_expert_exchange,
)
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.checks import checked_names
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

# Schedules: each action once, on its device, in a valid order

#: If a schedule lacks more than this number of actions for each that it lists, the missing actions
#: are not searched for.
_MOST_CELLS_PER_ACTION = 1000


def verify_listing(schedule: Schedule) -> None:
    """Check all invariants of a schedule except deadlocks."""
    n_stages, n_microbatches = schedule.n_stages, schedule.n_microbatches
    n_actions, placement = len(schedule.op), schedule.placement
    if schedule.n_batches < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has n_batches={schedule.n_batches}; give at least 1, with "
            "schedule.with_updates"
        )
    _check_slices(schedule)
    if n_stages * n_microbatches > _MOST_CELLS_PER_ACTION * n_actions:
        raise ScheduleError(
            f"schedule {schedule.name!r} lists {n_actions} actions, but {n_stages} stages and "
            f"n_microbatches={n_microbatches} need at least {2 * n_stages * n_microbatches}; give "
            "the number of micro-batches that it has"
        )
    if n_microbatches < placement.n_paths:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {n_microbatches} micro-batches for the "
            f"{placement.n_paths} paths of its placement; give each path one at least"
        )
    listed = np.zeros((n_stages, n_microbatches), dtype=np.uint8)
    columns = schedule.op, schedule.stage, schedule.microbatch, schedule.ptr
    paths = placement.path_of(n_microbatches)
    if not _lists_all(*columns, np.asarray(placement.paths), paths, listed):
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
    listed: NDArray[np.uint8],
) -> bool:
    """Return whether each cell has one F, and one B or one I and one W, and at most one R.

    A cell is a stage and micro-batch, and its actions must be on its device. ``listed`` is
    zeros at first, and gets a bit for each operation of each cell.
    """
    n_stages, n_microbatches = listed.shape
    for device in range(len(ptr) - 1):
        for k in range(ptr[device], ptr[device + 1]):
            s, m = stage[k], microbatch[k]
            if not (0 <= op[k] <= 4 and 0 <= s < n_stages and 0 <= m < n_microbatches):
                return False
            bit = 1 << op[k]
            if home[path[m], s] != device or listed[s, m] & bit:
                return False
            listed[s, m] |= bit
    for s in range(n_stages):
        for m in range(n_microbatches):
            if listed[s, m] & 15 != 3 and listed[s, m] & 15 != 13:  # F and B; F, I and W; maybe R
                return False
    return True


def _refuse(schedule: Schedule, index: SupportsIndex, problem: str) -> None:
    """Raise for the action at ``index`` of the columns, with the grid."""
    device, position = schedule.place(int(index))
    action = schedule.orders[device][position]
    raise ScheduleError(
        f"schedule {schedule.name!r}: device {device}, position {position}: {action} {problem}\n"
        f"{schedule.grid(mark=(device, position))}"
    )


def _check_cells(schedule: Schedule) -> None:
    """Check each action: operation, range, device, and that it is listed once."""
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
    cell = schedule.stage.astype(np.int64) * n_microbatches + schedule.microbatch
    key = schedule.op * np.int64(n_stages * n_microbatches) + cell
    _, first = np.unique(key, return_index=True)
    repeated = np.ones(len(schedule), dtype=bool)
    repeated[first] = False
    for index in np.flatnonzero(repeated):
        _refuse(schedule, index, "is a duplicate; it is listed before")


def _check_counts(schedule: Schedule) -> None:
    """Check that each stage and micro-batch has F, and B or else both I and W."""
    shape = schedule.n_stages, schedule.n_microbatches
    present = {op: np.zeros(shape, dtype=bool) for op in SCHEDULED}
    for op, cells in present.items():
        of_op = schedule.op == op
        cells[schedule.stage[of_op], schedule.microbatch[of_op]] = True
    for half in (Op.I, Op.W):
        for stage, microbatch in np.argwhere(present[Op.B] & present[half]):
            of_cell = (schedule.stage == stage) & (schedule.microbatch == microbatch)
            index = np.flatnonzero(of_cell & (schedule.op == half))[0]
            _refuse(schedule, index, f"is listed with {Action(int(stage), Op.B, int(microbatch))}, "
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


def _check_slices(schedule: Schedule) -> None:
    """Check that mini-batches and paths have whole sequences."""
    n_slices = schedule.n_slices
    if n_slices == 1:
        return
    size = schedule.n_microbatches // schedule.n_batches
    if n_slices < 1 or size % n_slices:
        raise ScheduleError(
            f"schedule {schedule.name!r} has n_slices={n_slices}, but {size} micro-batches a "
            "mini-batch, each one slice; give a divisor, with schedule.with_slices"
        )
    paths = schedule.placement.path_of(schedule.n_microbatches).reshape(-1, n_slices)
    for sequence in np.flatnonzero((paths != paths[:, :1]).any(axis=1))[:1]:
        raise ScheduleError(
            f"schedule {schedule.name!r}: slices of sequence {sequence} take several paths through "
            "the stages, but a stage keeps keys and values for the slices of its own path; give a "
            "number of micro-batches of which each path has whole sequences"
        )


def _check_overlaps(schedule: Schedule) -> None:
    """Check that each overlapped action is an F and the B or I after it."""
    if schedule.overlapped is None:
        return
    first = np.flatnonzero(schedule.overlapped)
    second_op = np.append(schedule.op, -1)[first + 1]
    is_pair = (schedule.op[first] == Op.F) & np.isin(second_op, list(INPUT_GRADS))
    for index in first[~is_pair | np.isin(first + 1, schedule.ptr)]:
        _refuse(schedule, index, "is overlapped with nothing: an F overlaps with the B or I "
                                 "listed right after it")  # fmt: skip


def _check_updates(schedule: Schedule) -> None:
    """Check mini-batches: their number, their order on each stage, and the weights of each F."""
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
            "paths take one mini-batch at a time"
        )
    batch = schedule.microbatch // (schedule.n_microbatches // n_batches)
    ends = np.flatnonzero(np.isin(schedule.op, tuple(WEIGHT_GRADS)))
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


# Task graphs: tasks, overlaps, collectives, messages and ids


def _named(graph: TaskGraph, task: SupportsIndex) -> str:
    return f"task {task} ({graph.task(int(task))})"


def check_tasks(graph: TaskGraph) -> None:
    """Check all invariants of a graph except its ids and deadlocks."""
    n, kinds = len(graph), graph.kinds
    if ((graph.dependencies.values < 0) | (graph.dependencies.values >= n)).any():
        raise GraphError(f"a dependency names a task outside 0..{n - 1}")
    duplicate = duplicate_task(kinds, graph.kind, graph.microbatch, graph.n_microbatches)
    if duplicate >= 0:
        raise GraphError(f"{graph.task(duplicate)} is in the graph twice")
    homes = graph.homes[kinds.replica, kinds.stage]
    for task in np.flatnonzero((homes != kinds.device)[graph.kind]):
        raise GraphError(
            f"{_named(graph, task)} is on device {graph.device[task]}, but stage "
            f"{graph.stage[task]} lies on device {homes[graph.kind[task]]} as well; a stage lies "
            "on one"
        )
    for task in np.flatnonzero(graph.is_op(COMPUTE) & ~graph.on_compute):
        raise GraphError(
            f"{_named(graph, task)} is on stream {graph.task(int(task)).stream!r}; it belongs on "
            "'compute'"
        )
    members = graph.collectives.values
    for task in members[~graph.is_op(COLLECTIVES)[members]]:
        raise GraphError(
            f"{_named(graph, task)} is in a group; only collectives "
            f"({', '.join(op.name for op in sorted(COLLECTIVES))}) have members"
        )
    _check_halves(graph)
    _check_members(graph)
    _check_messages(graph)


def check_ids(graph: TaskGraph) -> None:
    """Check that ids are a topological order."""
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


def _check_halves(graph: TaskGraph) -> None:
    """Check that overlapped tasks are an F and the B or I right after it on its stream."""
    halves = np.flatnonzero((graph.kinds.overlapped > 0)[graph.kind])
    forward, backward = overlapped_pairs(graph.kinds, graph.kind, graph.stream_of_kind)
    whole = graph.queue_predecessor[backward] == forward
    for half in np.setdiff1d(halves, np.concatenate([forward[whole], backward[whole]])):
        raise GraphError(
            f"{_named(graph, half)} is overlapped with nothing: an F overlaps with the B or I "
            "right after it on its stream"
        )


def _check_members(graph: TaskGraph) -> None:
    """Check that a collective has one operation, and the members that its operation asks for.

    A collective of a stage has one member of each replica that trains.
    """
    members, number = graph.collectives.values, graph.collectives.rows
    first = members[graph.collectives.ptr[number]]
    for unlike in np.flatnonzero(graph.op[members] != graph.op[first])[:1].tolist():
        one, other = (graph.task(int(task[unlike])) for task in (first, members))
        raise GraphError(
            f"task {one.id} ({one}) and task {other.id} ({other}) are members of one collective; "
            "give tasks of different operations different groups"
        )
    of_devices = graph.is_op(OF_DEVICES)[members]
    _check_device_members(graph, members[of_devices], number[of_devices])
    members, number = members[~of_devices], number[~of_devices]
    of_experts = is_expert_exchange(graph.op[members], graph.part[members])
    _check_expert_members(graph, members[of_experts], number[of_experts])
    members, number = members[~of_experts], number[~of_experts]
    cells, cell_of_member = np.unique(
        number * graph.n_stages + graph.stage[members], return_inverse=True
    )
    n_members = np.zeros((len(cells), graph.n_replicas), dtype=np.int64)
    np.add.at(n_members, (cell_of_member, graph.replica[members]), 1)
    trains = np.zeros(graph.n_replicas, dtype=bool)
    trains[graph.replica[graph.is_op(WEIGHT_GRADS)]] = True
    needed = trains & graph.kinds.holds[:, cells % graph.n_stages].T
    for cell, replica in np.argwhere((n_members > 1) | (needed & (n_members == 0)))[:1].tolist():
        task = graph.task(int(members[cell_of_member == cell][0]))
        n = n_members[cell, replica]
        has = "lacks it" if n == 0 else f"has {n} of it"
        raise GraphError(
            f"task {task.id} ({task}) is of replica {task.replica} on device {task.device}, but "
            f"replica {replica} {has}: a collective of stage {task.stage} has one member of each "
            f"of the {graph.n_replicas} replicas; give each replica the same tasks of the stage"
        )


def _check_expert_members(graph: TaskGraph, members: Ints, number: Ints) -> None:
    """Check that each exchange of experts has a member of each replica of its group, and no others.

    Groups are consecutive data-parallel replicas, as many as `TaskGraph.expert_replicas`.
    """
    if not len(members):
        return
    copies = copy_of_replicas(graph.homes)
    size = graph.expert_replicas or 1 + int(copies.max())
    _, first, collective = np.unique(number, return_index=True, return_inverse=True)
    copy = copies[graph.replica[members]]
    group = copy // size
    wrong = (np.bincount(collective) != size)[collective] | (group != group[first][collective])
    _, row, count = np.unique(
        collective * (1 + copies.max()) + copy, return_index=True, return_counts=True
    )
    wrong[row] |= count > 1
    for task in map(graph.task, members[np.flatnonzero(wrong)[:1]].tolist()):
        raise GraphError(
            f"task {task.id} ({task}) is of replica {task.replica}, in an exchange of experts with "
            f"other members: experts are on {size} consecutive replicas, and each has one member; "
            "give all of them the same exchanges"
        )


def _check_device_members(graph: TaskGraph, members: Ints, number: Ints) -> None:
    """Check that each collective has one member on each of its devices, and no others.

    The devices of a REDUCE_TIED are those of its group's stages, in its replica. GRAD_NORM has all.
    """
    used = np.unique(graph.kinds.device)
    for group in np.unique(number).tolist():
        own = members[number == group]
        first = graph.task(int(own[0]))
        devices = used
        if first.op == Op.REDUCE_TIED:
            devices = np.unique(graph.homes[first.replica, list(graph.tied[first.part])])
        if not np.array_equal(np.sort(graph.device[own]), devices):
            raise GraphError(
                f"task {first.id} ({first}) is a member of a collective on devices "
                f"{np.sort(graph.device[own]).tolist()}; a {first.op} has one member on each of "
                f"devices {devices.tolist()}"
            )


def _check_messages(graph: TaskGraph) -> None:
    """Check that transfers pair up and that each channel keeps its sender's order."""
    for lone in np.flatnonzero(graph.is_op(SENDS | RECVS) & (graph.pair < 0)):
        raise GraphError(
            f"{_named(graph, lone)} has no counterpart at the other end; every SEND needs its RECV"
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


#: Blocked streams that a deadlock error lists.
_MOST_NAMED = 16


@checked_names
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
