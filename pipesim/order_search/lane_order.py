"""`LaneOrder`: each device's order as numbers of lanes; to and from a `Schedule`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.errors import ScheduleError
from pipesim.ops import Op
from pipesim.order_search.problem import OrderProblem
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints

__all__ = ["LaneOrder", "lane_order", "occurrences", "schedule_of"]


class LaneOrder(NamedTuple):
    """The order of each device: the lanes of its tasks.

    Attributes
    ----------
    lanes
        Lane of each task, the tasks of device 0 first; shape ``(n_tasks,)``. The k-th task of a
        lane is its k-th micro-batch.
    ptr
        Device ``d`` runs ``lanes[ptr[d]:ptr[d + 1]]``; shape ``(n_devices + 1,)``.
    """

    lanes: Ints
    ptr: Ints


def lane_order(problem: OrderProblem, schedule: Schedule) -> LaneOrder:
    """Return the order of a schedule; micro-batches of a path lose their numbers.

    Raises
    ------
    ScheduleError
        If the schedule has other tasks than the problem: another placement, other operations,
        another number of micro-batches, recomputes, or overlapped actions.
    """
    columns = ("device", "path", "stage", "op")
    size = [max(problem.n_devices, schedule.n_devices), 0, 0, len(Op)]
    size[1:3] = (1 + max(getattr(x, k).max() for x in (problem, schedule)) for k in columns[1:3])
    number = np.full(size, -1, dtype=np.int64)
    number[tuple(getattr(problem, k) for k in columns)] = np.arange(len(problem.count))
    lanes = number[tuple(getattr(schedule, k) for k in columns)]
    if schedule.overlapped is not None or schedule.n_batches > 1 or (lanes < 0).any():
        raise ScheduleError(
            f"schedule {schedule.name!r} has actions that the problem does not have: overlapped "
            "ones, recomputes, several mini-batches, other operations, or another placement"
        )
    if not np.array_equal(np.bincount(lanes, minlength=len(problem.count)), problem.count):
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.n_microbatches} micro-batches, but the "
            f"problem has {n_microbatches(problem)}"
        )
    return LaneOrder(lanes, schedule.ptr.astype(np.int64))


def n_microbatches(problem: OrderProblem) -> int:
    """Return the number of micro-batches of all paths."""
    _, first = np.unique(problem.path, return_index=True)
    return int(problem.count[first].sum())


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
    """Return an order as a schedule; the micro-batches of a path are numbered in order."""
    lanes, ptr = order
    _, first = np.unique(problem.path, return_index=True)
    counts = problem.count[first]
    offset = np.cumsum(counts) - counts
    microbatch = offset[problem.path[lanes]] + occurrences(lanes)
    return Schedule(
        name=name,
        placement=placement,
        n_microbatches=int(counts.sum()),
        op=problem.op[lanes].astype(np.int8),
        stage=problem.stage[lanes].astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        ptr=ptr.astype(np.int64),
    )
