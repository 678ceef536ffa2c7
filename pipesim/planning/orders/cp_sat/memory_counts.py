"""Memory limits as counts: how many tasks of other lanes may, or must, come before a task.

A device runs one task at a time. So the bytes that it holds before a task depend only on the
number of tasks of each of its lanes that came before. A bound on such a number is a precedence.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from pipesim.ops import Op
from pipesim.order_search import OrderProblem
from pipesim.planning.orders.cp_sat.precedence import LaneArc, topological_lanes
from pipesim.planning.orders.cp_sat.ticks import TickProblem


class MemoryArcs(NamedTuple):
    """Precedence that follows from the limits.

    Attributes
    ----------
    arcs
        Precedence that each order within the limits keeps.
    exact
        For each device, whether every order with these arcs keeps its limit.
    """

    arcs: list[LaneArc]
    exact: list[bool]


def checked_lanes(problem: OrderProblem, ticks: TickProblem, device: int) -> list[int]:
    """Return the lanes of a device whose tasks may exceed its limit when they start."""
    lanes = np.flatnonzero((problem.device == device) & (ticks.peak > 0))
    return [int(x) for x in lanes] if _can_exceed(problem, ticks, device) else []


def memory_arcs(problem: OrderProblem, ticks: TickProblem) -> MemoryArcs:
    """Return the precedence that limits enforce between the lanes of one path on a device.

    The other paths of the device hold nothing, at best. An order within the limits must exist.
    """
    arcs: list[LaneArc] = []
    exact = [True] * problem.n_devices
    for device in range(problem.n_devices):
        checked = checked_lanes(problem, ticks, device)
        if not checked:
            continue
        limit = int(ticks.limit[device])
        if len({(problem.path[x], problem.stage[x]) for x in checked}) > 1:
            exact[device] = False
            for path in np.unique(problem.path[checked]):
                arcs += _chain_arcs(problem, ticks, device, int(path))
            continue
        for lane in checked:
            own = stage_lanes(problem, lane)
            room = limit - int(ticks.peak[lane])
            stage_arcs, complete = _stage_arcs(ticks, own, own.index(lane), room)
            arcs += stage_arcs
            exact[device] &= complete
    return MemoryArcs(arcs, exact)


def stage_lanes(problem: OrderProblem, lane: int) -> list[int]:
    """Return the lanes of a lane's stage, in order of their operations."""
    same = (problem.path == problem.path[lane]) & (problem.stage == problem.stage[lane])
    return [int(x) for x in np.flatnonzero(same)]


def _can_exceed(problem: OrderProblem, ticks: TickProblem, device: int) -> bool:
    """Return whether any order can exceed the limit of a device."""
    if ticks.limit[device] < 0:
        return False
    lanes = np.flatnonzero(problem.device == device)
    most = np.maximum(ticks.held[lanes], 0) * problem.count[lanes]
    return int(most.sum() + ticks.peak[lanes].max(initial=0)) > int(ticks.limit[device])


def _stage_arcs(
    ticks: TickProblem, own: list[int], phase: int, room: int
) -> tuple[list[LaneArc], bool]:
    """Return the arcs that keep a stage within ``room`` before its operation ``phase``.

    Let ``k[q]`` be the number of micro-batches whose operation ``q`` is done, and ``q + 1`` not.
    Each holds ``size[q]``. So the limit is ``sum(k * size) <= room``, which bounds sums of k.
    Before operation ``phase`` of number i, later operations q have run ``i - sum(k[phase:q])``
    times, and earlier ones ``i + sum(k[q:phase])`` times.

    Returns
    -------
    tuple
        The arcs, and whether they suffice.
    """
    lane, last = own[phase], len(own) - 1
    size = np.cumsum(ticks.held[own])[:-1].tolist()
    least = [int(q == phase - 1) for q in range(last)]
    spare = room - sum(k * s for k, s in zip(least, size, strict=True))
    most: dict[tuple[int, int], int] = {}  # of sum(k[first:end])
    arcs = []
    for q in range(last + 1):
        if q == phase:
            continue
        first, end = min(q, phase), max(q, phase)
        smallest = min(size[first:end])
        if smallest == 0:
            continue
        most[first, end] = bound = sum(least[first:end]) + spare // smallest
        if q > phase:
            arcs.append(LaneArc(own[q], lane, bound + 1, 0))
        else:
            arcs.append(LaneArc(lane, own[q], bound, 0))
    return arcs, _suffice(size, least, most, room)


def _suffice(
    size: list[int], least: list[int], most: dict[tuple[int, int], int], room: int
) -> bool:
    """Return whether the bounds on sums of k keep ``sum(k * size) <= room``.

    The largest sum is at a corner: each k is as small as it may be, or as large as others leave it.
    """
    held = [q for q in range(len(size)) if size[q] > 0]
    for corner in itertools.permutations(held):
        k = list(least)
        for q in corner:
            bounds = [
                bound - sum(k[first:end])
                for (first, end), bound in most.items()
                if first <= q < end
            ]
            if not bounds:
                return False
            k[q] += min(bounds)
            if sum(x * s for x, s in zip(k, size, strict=True)) > room:
                return False
    return True


def _chain_arcs(problem: OrderProblem, ticks: TickProblem, device: int, path: int) -> list[LaneArc]:
    """Return arcs between the lanes of several stages, as a micro-batch runs them.

    Before number i of a step starts, i micro-batches have passed it. Those that have not passed a
    later step hold at least ``lowest`` each, so that the limit bounds their number. Weight
    gradients have run as early as they can, unless the later step is their W.
    """
    same = (problem.device == device) & (problem.path == path)
    steps = [x for x in topological_lanes(problem) if same[x] and problem.op[x] != Op.W]
    weight = {x: _weight_lane(problem, x) for x in steps}
    released = {x: 0 if w < 0 else -int(ticks.held[w]) for x, w in weight.items()}
    low = np.cumsum([int(ticks.held[x]) - released[x] for x in steps]).tolist()
    arcs = []
    for k, step in enumerate(steps):
        before = low[k - 1] if k else 0
        room = int(ticks.limit[device] - ticks.peak[step]) - before
        for j in range(k, len(steps)):
            later = steps[j]
            lowest = min(low[k:j], default=0)
            if lowest > 0:
                arcs.append(LaneArc(later, step, room // lowest + 1, 0))
            with_weight = [x + released[later] for x in low[j:]]
            lowest = min([*low[k:j], *with_weight])
            if weight[later] >= 0 and lowest > 0:
                arcs.append(LaneArc(weight[later], step, room // lowest + 1, 0))
    return arcs


def _weight_lane(problem: OrderProblem, lane: int) -> int:
    """Return the W that follows an I; -1 for other operations."""
    following = stage_lanes(problem, lane)[-1]
    return following if problem.op[lane] == Op.I and problem.op[following] == Op.W else -1
