"""Memory limits of devices with several stages: sums of booleans "this task comes before"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipesim.planning.orders.cp_sat.memory_counts import checked_lanes
from pipesim.planning.orders.cp_sat.precedence import lane_reach
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from pipesim.planning.orders.cp_sat.model import OrderModel


Task = tuple[int, int]


def add_memory_sums(built: OrderModel) -> None:
    """Add the limits of devices where precedence does not suffice."""
    problem, ticks = built.problem, built.ticks
    reach = lane_reach(problem)
    for device in range(problem.n_devices):
        if built.memory.exact[device]:
            continue
        lanes = np.flatnonzero((problem.device == device) & (ticks.held != 0)).tolist()
        for lane in checked_lanes(problem, ticks, device):
            room = int(ticks.limit[device] - ticks.peak[lane])
            counts = [
                _possible_counts(built, reach, lane, other) for other in lanes if other != lane
            ]
            others = [other for other in lanes if other != lane]
            _add_lane_sums(built, lane, others, counts, room)
    _add_monotony(built)


def _possible_counts(
    built: OrderModel, reach: Ints, lane: int, other: int
) -> tuple[list[int], list[int]]:
    """Return, for each task of a lane, the least and most tasks of another that come before."""
    problem, bounds, seconds = built.problem, built.bounds, built.ticks.seconds
    n, n_other = int(problem.count[lane]), int(problem.count[other])
    numbers = np.arange(n)
    least = np.where(reach[other, lane], numbers + 1, 0)
    most = np.where(reach[lane, other], numbers, n_other)
    latest = built.horizon - bounds.to_end
    # A task that must start before this one can end comes before it.
    ends = bounds.head[lane, :n] + seconds[lane]
    least = np.maximum(least, np.searchsorted(latest[other, :n_other], ends, side="left"))
    # One that cannot end before this one must start comes after it.
    other_ends = bounds.head[other, :n_other] + seconds[other]
    most = np.minimum(most, np.searchsorted(other_ends, latest[lane, :n], side="right"))
    for source, target, shift, _ in built.memory.arcs:
        if (source, target) == (other, lane):
            least = np.maximum(least, numbers - shift + 1)
        elif (source, target) == (lane, other):
            most = np.minimum(most, numbers + shift)
    least = np.minimum(least, n_other)
    return least.tolist(), np.maximum(np.minimum(most, n_other), least).tolist()


def _add_lane_sums(
    built: OrderModel,
    lane: int,
    others: list[int],
    counts: list[tuple[list[int], list[int]]],
    room: int,
) -> None:
    """Add the limit at the start of each task of a lane."""
    from pipesim.utils.packages import cp_model

    held = built.ticks.held.tolist()
    for i in range(int(built.problem.count[lane])):
        ranges = [
            (other, least[i], most[i]) for other, (least, most) in zip(others, counts, strict=True)
        ]
        worst = i * held[lane] + sum(
            held[other] * (most if held[other] > 0 else least) for other, least, most in ranges
        )
        if worst <= room:
            continue
        total = i * held[lane] + sum(held[other] * least for other, least, _ in ranges)
        pairs = [(other, j) for other, least, most in ranges for j in range(least, most)]
        terms = [_before(built, pair, (lane, i)) for pair in pairs]
        weights = [held[other] for other, _ in pairs]
        built.model.add(cp_model.LinearExpr.weighted_sum(terms, weights) <= room - total)


def _before(built: OrderModel, a: Task, b: Task) -> cp_model.LiteralT:
    """Return the boolean "task a comes before task b", made if it is new."""
    first, second = min(a, b), max(a, b)
    if (first, second) not in built.before:
        built.before[first, second] = literal = built.model.new_bool_var("")
        for x, y, condition in ((first, second, literal), (second, first, literal.negated())):
            end = built.start[x[0]][x[1]] + int(built.ticks.seconds[x[0]])
            built.model.add(built.start[y[0]][y[1]] >= end).only_enforce_if(condition)
    literal = built.before[first, second]
    return literal if a == first else literal.negated()


def _add_monotony(built: OrderModel) -> None:
    """Add that a task is before all later tasks of a lane if it is before one of them."""
    for (a, b), literal in built.before.items():
        later = built.before.get((a, (b[0], b[1] + 1)))
        if later is not None:
            built.model.add_implication(literal, later)
        earlier = built.before.get(((a[0], a[1] - 1), b))
        if earlier is not None:
            built.model.add_implication(literal, earlier)
