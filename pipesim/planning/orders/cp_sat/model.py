"""`OrderModel`: orders of a problem as a CP-SAT model.

- Each task is an interval, and no two intervals of a device overlap.
- The tasks of a lane are in order of micro-batches, which are identical.
- A message is a delay. Where messages may wait for their channel, each is an interval too.
- A memory limit is precedence where that suffices (`memory_arcs`), else sums of booleans.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from pipesim.order_search import OrderProblem
from pipesim.planning.orders.cp_sat.memory_counts import memory_arcs
from pipesim.planning.orders.cp_sat.memory_sums import add_memory_sums
from pipesim.planning.orders.cp_sat.precedence import (
    Windows,
    lane_arcs,
    may_queue,
    windows,
)
from pipesim.planning.orders.cp_sat.ticks import TickProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


class OrderModel:
    """A CP-SAT model with the variables of a problem's tasks.

    Attributes
    ----------
    model
        The model.
    least, most, horizon
        Bounds on the objective, and the latest end of a task, in ticks.
    start
        Start of each task in ticks, ``start[lane][number]``.
    messages
        Start of each message that may wait, ``messages[lane][number]``; of its receiving lane.
    before
        Boolean for "task a comes before task b", ``before[a, b]``; tasks are (lane, number).
    objective
        Makespan or span in ticks.
    bounds
        Bounds on the times of tasks.
    memory
        Precedence that follows from the memory limits.
    """

    objective: cp_model.IntVar

    def __init__(
        self, problem: OrderProblem, ticks: TickProblem, least: int, most: int, horizon: int
    ) -> None:
        from pipesim.utils.packages import cp_model

        self.problem, self.ticks = problem, ticks
        self.least, self.most, self.horizon = least, most, horizon
        self.model = cp_model.CpModel()
        self.memory = memory_arcs(problem, ticks)
        self.arcs = [*lane_arcs(problem, ticks), *self.memory.arcs]
        self.bounds: Windows = windows(problem, ticks, self.arcs)
        self.start: list[list[cp_model.IntVar]] = []
        self.messages: dict[int, list[cp_model.IntVar]] = {}
        self.before: dict[tuple[tuple[int, int], tuple[int, int]], cp_model.IntVar] = {}


def order_model(
    problem: OrderProblem,
    ticks: TickProblem,
    least: int,
    most: int,
    first_starts: list[int | None] | None = None,
) -> OrderModel:
    """Return the model of a problem whose objective is from ``least`` to ``most`` ticks.

    Parameters
    ----------
    problem, ticks
        The problem, in seconds and in ticks.
    least, most
        Bounds on the objective in ticks.
    first_starts
        None: the objective is the makespan. Else it is the span, and these are the starts of the
        first task of each device (ticks), or None for a device whose first task may vary.
    """
    horizon = most if first_starts is None else _span_horizon(problem, ticks, most, first_starts)
    built = OrderModel(problem, ticks, least, most, horizon)
    _add_tasks(built)
    _add_arcs(built)
    _add_messages(built)
    add_memory_sums(built)
    built.objective = built.model.new_int_var(least, most, "objective")
    if first_starts is None:
        _add_makespan(built)
    else:
        _add_span(built, first_starts)
    built.model.minimize(built.objective)
    return built


def _add_tasks(built: OrderModel) -> None:
    """Add the intervals of tasks, and that those of a device do not overlap."""
    model, problem = built.model, built.problem
    intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.n_devices)]
    seconds, device = built.ticks.seconds.tolist(), problem.device.tolist()
    latest = built.horizon - built.bounds.to_end
    for lane, count in enumerate(problem.count.tolist()):
        row = []
        for i in range(count):
            first, last = int(built.bounds.head[lane, i]), int(latest[lane, i])
            start = model.new_int_var(min(first, last), last, "")
            if first > last:  # no order ends by the horizon
                model.add_bool_or([])
            row.append(start)
            intervals[device[lane]].append(
                model.new_fixed_size_interval_var(start, seconds[lane], "")
            )
        built.start.append(row)
    for tasks in intervals:
        model.add_no_overlap(tasks)


def _add_arcs(built: OrderModel) -> None:
    """Add the precedence of dependencies, of lanes and of memory."""
    seconds = built.ticks.seconds.tolist()
    for source, target, shift, delay in built.arcs:
        for a, b in zip(built.start[source], built.start[target][shift:], strict=False):
            built.model.add(b >= a + seconds[source] + delay)


def _add_messages(built: OrderModel) -> None:
    """Add the intervals of messages that may wait for their channel.

    They are sent in any order, which is a relaxation: a channel keeps the order of its sender.
    """
    model, problem, ticks = built.model, built.problem, built.ticks
    channels: dict[int, list[cp_model.IntervalVar]] = {}
    for lane in np.flatnonzero(may_queue(problem, ticks)).tolist():
        source, hold = int(problem.needs[lane, 0]), int(ticks.hold[lane, 0])
        latency, seconds = int(ticks.latency[lane, 0]), int(ticks.seconds[source])
        row = []
        for a, b in zip(built.start[source], built.start[lane], strict=True):
            sent = model.new_int_var(0, built.horizon, "")
            model.add(sent >= a + seconds)
            model.add(b >= sent + hold + latency)
            interval = model.new_fixed_size_interval_var(sent, hold, "")
            channels.setdefault(int(problem.channel[lane, 0]), []).append(interval)
            row.append(sent)
        for a, b in itertools.pairwise(row):
            model.add(b >= a + hold)
        built.messages[lane] = row
    for intervals in channels.values():
        model.add_no_overlap(intervals)


def _add_makespan(built: OrderModel) -> None:
    """Make the objective at least the end of each device's STEPs."""
    tail = built.ticks.tail[built.problem.device] + built.ticks.seconds
    for lane, row in enumerate(built.start):
        built.model.add(built.objective >= row[-1] + int(tail[lane]))


def _span_horizon(
    problem: OrderProblem, ticks: TickProblem, most: int, first_starts: list[int | None]
) -> int:
    """Return the latest end of an order whose tasks start early and whose span is ``most``."""
    fixed = [x for x in first_starts if x is not None]
    if len(fixed) == len(first_starts):
        return max(fixed) + most
    in_turn = ticks.seconds + (ticks.latency + ticks.hold).sum(axis=1)
    return int((in_turn * problem.count).sum())


def _add_span(built: OrderModel, first_starts: list[int | None]) -> None:
    """Make the objective at least the time from each device's first start to its last end."""
    model, problem = built.model, built.problem
    for device, fixed in enumerate(first_starts):
        lanes = np.flatnonzero(problem.device == device).tolist()
        first: cp_model.IntVar | int = 0 if fixed is None else fixed
        if fixed is None:
            first = model.new_int_var(0, built.horizon, "")
            for lane in lanes:
                model.add(first <= built.start[lane][0])
        for lane in lanes:
            end = built.start[lane][-1] + int(built.ticks.seconds[lane])
            model.add(built.objective + first >= end)
