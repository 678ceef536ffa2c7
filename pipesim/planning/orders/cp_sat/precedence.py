"""Precedence between tasks of an order, in ticks: earliest starts, and times to the end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search import OrderProblem
from pipesim.planning.orders.cp_sat.ticks import TickProblem
from pipesim.utils.csr import Ints


class LaneArc(NamedTuple):
    """Precedence between the tasks of two lanes.

    Task ``i`` of ``target`` starts no earlier than ``delay`` ticks after task ``i - shift`` of
    ``source`` has ended.
    """

    source: int
    target: int
    shift: int
    delay: int


class Windows(NamedTuple):
    """Bounds on times of tasks, in ticks; shape ``(n_lanes, largest count)``.

    Attributes
    ----------
    head
        Earliest start of each task.
    to_end
        Least time from the start of a task to the end of the step.
    """

    head: Ints
    to_end: Ints


def may_queue(problem: OrderProblem, ticks: TickProblem) -> NDArray[np.bool_]:
    """Return, for each lane, whether its messages may wait for their channel; shape (n_lanes,).

    They never wait if each message is through before the sender's next message can begin.
    """
    queues = np.zeros(len(problem.count), dtype=bool)
    for channel in np.unique(problem.channel[problem.channel >= 0]):
        lanes = np.flatnonzero(problem.channel[:, 0] == channel)
        senders = problem.needs[lanes, 0]
        queues[lanes] = ticks.hold[lanes, 0].max() > ticks.seconds[senders].min()
    return queues


def lane_arcs(problem: OrderProblem, ticks: TickProblem) -> list[LaneArc]:
    """Return the precedence of the dependencies; a message takes its hold and its latency."""
    arcs = []
    for lane, needs in enumerate(problem.needs.tolist()):
        arcs.append(LaneArc(lane, lane, 1, 0))
        for k, source in enumerate(needs):
            if source >= 0:
                delay = int(ticks.latency[lane, k] + ticks.hold[lane, k])
                arcs.append(LaneArc(source, lane, 0, delay))
    return arcs


def lane_reach(problem: OrderProblem) -> NDArray[np.bool_]:
    """Return whether a lane's task needs, at last, the other's of the same number: [from, to]."""
    n_lanes = len(problem.count)
    reach = np.zeros((n_lanes, n_lanes), dtype=bool)
    for lane in topological_lanes(problem):
        for source in problem.needs[lane]:
            if source >= 0:
                reach[:, lane] |= reach[:, source]
                reach[source, lane] = True
    return reach


def windows(problem: OrderProblem, ticks: TickProblem, arcs: list[LaneArc]) -> Windows:
    """Return bounds on times by the longest paths of arcs."""
    n_lanes, most = len(problem.count), int(problem.count.max())
    lanes = topological_lanes(problem)
    into: list[list[LaneArc]] = [[] for _ in range(n_lanes)]
    out: list[list[LaneArc]] = [[] for _ in range(n_lanes)]
    for arc in arcs:
        into[arc.target].append(arc)
        out[arc.source].append(arc)
    seconds, count = ticks.seconds.tolist(), problem.count.tolist()
    head = [[0] * most for _ in range(n_lanes)]
    for i in range(most):
        for lane in lanes:
            for source, _, shift, delay in into[lane]:
                if shift <= i < count[lane]:
                    end = head[source][i - shift] + seconds[source] + delay
                    head[lane][i] = max(head[lane][i], end)
    tail = ticks.tail[problem.device].tolist()
    to_end = [[seconds[lane] + tail[lane]] * most for lane in range(n_lanes)]
    for i in reversed(range(most)):
        for lane in reversed(lanes):
            for _, target, shift, delay in out[lane]:
                if i < count[lane] and i + shift < count[target]:
                    rest = seconds[lane] + delay + to_end[target][i + shift]
                    to_end[lane][i] = max(to_end[lane][i], rest)
    return Windows(np.array(head), np.array(to_end))


def topological_lanes(problem: OrderProblem) -> list[int]:
    """Return the lanes such that each comes after those that it needs."""
    needs, order = problem.needs.tolist(), list[int]()
    placed = [False] * len(needs)
    for lane in range(len(needs)):
        pending = [lane]
        while pending:
            missing = [x for x in needs[pending[-1]] if x >= 0 and not placed[x]]
            if missing:
                pending += missing
            elif not placed[last := pending.pop()]:
                placed[last] = True
                order.append(last)
    return order
