"""`LaneOrder`: each device's order as numbers of lanes; to and from a `Schedule`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.errors import ScheduleError
from pipesim.ops import Op
from pipesim.order_search.problem import OrderProblem, has_equal_microbatches
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints


class LaneOrder(NamedTuple):
    """The order of each device: the lanes of its tasks; and the order of micro-batches.

    The k-th task of a lane is of the k-th micro-batch of its path.
    """

    lanes: Ints  # lane of each task
    ptr: Ints  # device ``d`` runs ``lanes[ptr[d]:ptr[d + 1]]``
    # The micro-batches of path 0 in the order in which all lanes run them, then those of path 1,
    # and so on; None for their own order.
    microbatches: Ints | None = None


def lane_order(problem: OrderProblem, schedule: Schedule) -> LaneOrder:
    """Return the order of a schedule; micro-batches of a path lose their numbers if identical.

    If they differ, all lanes take them in the order of F of stage 0. So the times of a schedule in
    which stages take them in other orders change.
    """
    columns = ("device", "path", "stage", "op")
    size = [max(problem.n_devices, schedule.n_devices), 0, 0, len(Op)]
    size[1:3] = (1 + max(getattr(x, k).max() for x in (problem, schedule)) for k in columns[1:3])
    number = np.full(size, -1, dtype=np.int64)
    number[tuple(getattr(problem, k) for k in columns)] = np.arange(len(problem.count))
    lanes = number[tuple(getattr(schedule, k) for k in columns)]
    has_parts = schedule.n_batches > 1 or schedule.n_slices > 1
    if schedule.overlapped is not None or has_parts or (lanes < 0).any():
        raise ScheduleError(
            f"schedule {schedule.name!r} has actions that the problem does not have: overlapped "
            "ones, recomputes, several mini-batches, slices of sequences, other operations, or "
            "another placement"
        )
    if not np.array_equal(np.bincount(lanes, minlength=len(problem.count)), problem.count):
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_microbatches} micro-batches, but the "
            f"problem has {n_microbatches(problem)}"
        )
    ptr = schedule.ptr.astype(np.int64)
    if has_equal_microbatches(problem):
        return LaneOrder(lanes, ptr)
    forwards = np.flatnonzero((schedule.op == Op.F) & (schedule.stage == 0))
    by_path = forwards[np.argsort(schedule.path[forwards], kind="stable")]
    return LaneOrder(lanes, ptr, schedule.microbatch[by_path].astype(np.int64))


def path_counts(problem: OrderProblem) -> Ints:
    """Return the number of micro-batches of each path."""
    _, first = np.unique(problem.path, return_index=True)
    counts: Ints = problem.count[first]
    return counts


def first_tasks(problem: OrderProblem) -> Ints:
    """Return the first task of each lane, the tasks of lane 0 first; shape ``(n_lanes,)``."""
    first: Ints = np.cumsum(problem.count) - problem.count
    return first


def task_lanes(problem: OrderProblem) -> Ints:
    """Return the lane of each task, the tasks of lane 0 first."""
    return np.repeat(np.arange(len(problem.count)), problem.count)


def lanes_in_turn(problem: OrderProblem) -> Ints:
    """Return the lanes as a micro-batch runs them: F down the stages, the others up."""
    is_forward = problem.op == Op.F
    stage = np.where(is_forward, problem.stage, -problem.stage)
    return np.lexsort((problem.op, stage, ~is_forward))


def sorted_order(problem: OrderProblem, *keys: Ints) -> LaneOrder:
    """Return the order in which each device runs its tasks by keys, the last key first.

    Keys have one value a task, the tasks of lane 0 first. Tasks with equal keys follow
    `lanes_in_turn`.
    """
    lane, rank = task_lanes(problem), np.argsort(lanes_in_turn(problem))
    device = problem.device[lane]
    order = np.lexsort((rank[lane], *keys, device))
    n_tasks = np.bincount(device, minlength=problem.n_devices)
    return LaneOrder(lane[order], np.append(0, np.cumsum(n_tasks)))


def rows_of(problem: OrderProblem, microbatches: Ints | None) -> Ints:
    """Return the row of each task, the tasks of lane 0 first, for an order of micro-batches."""
    n_lanes, lane = len(problem.count), task_lanes(problem)
    if has_equal_microbatches(problem):
        return lane
    counts = path_counts(problem)
    offset = np.cumsum(counts) - counts
    place = offset[problem.path[lane]] + np.arange(len(lane)) - first_tasks(problem)[lane]
    microbatch = place if microbatches is None else microbatches[place]
    rows: Ints = problem.class_of[microbatch] * n_lanes + lane
    return rows


def n_microbatches(problem: OrderProblem) -> int:
    """Return the number of micro-batches of all paths."""
    return int(path_counts(problem).sum())


def occurrences(lanes: Ints) -> Ints:
    """Return how often the lane of each task came before it; shape ``(n_tasks,)``.

    >>> occurrences(np.array([0, 0, 1, 0, 1])).tolist()
    [0, 1, 0, 2, 1]
    """
    by_lane = np.argsort(lanes, kind="stable")
    counts = np.bincount(lanes)
    first = np.cumsum(counts) - counts
    number = np.empty(len(lanes), dtype=np.int64)
    number[by_lane] = np.arange(len(lanes)) - first[lanes[by_lane]]
    return number


def schedule_of(
    problem: OrderProblem, order: LaneOrder, placement: Placement, name: str
) -> Schedule:
    """Return an order as a schedule; identical micro-batches of a path are numbered in order."""
    lanes, ptr, microbatches = order
    counts = path_counts(problem)
    offset = np.cumsum(counts) - counts
    microbatch = offset[problem.path[lanes]] + occurrences(lanes)
    if microbatches is not None:
        microbatch = microbatches[microbatch]
    return Schedule(
        name=name,
        placement=placement,
        n_microbatches=int(counts.sum()),
        op=problem.op[lanes].astype(np.int8),
        stage=problem.stage[lanes].astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        ptr=ptr.astype(np.int64),
    )
