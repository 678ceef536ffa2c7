"""All orders of a tiny problem, for comparison by brute force."""

import itertools

import numpy as np

from pipesim.order_search import LaneOrder, OrderProblem, evaluate
from pipesim.planning.cp_sat_model import lane_reach


def device_orders(problem: OrderProblem, device: int) -> list[list[int]]:
    """Return all orders of one device's lanes that its own dependencies and limit allow."""
    reach = lane_reach(problem)
    lanes = np.flatnonzero(problem.device == device).tolist()
    orders: list[list[int]] = []

    def extend(row: list[int], counts: dict[int, int], held: float) -> None:
        if len(row) == sum(problem.count[lanes]):
            orders.append(row)
        for lane in lanes:
            ready = all(counts[x] > counts[lane] for x in lanes if reach[x, lane])
            peak = held + problem.allocated[lane] + problem.workspace[lane]
            if ready and counts[lane] < problem.count[lane] and peak <= problem.limit[device]:
                left = held + problem.allocated[lane] - problem.released[lane]
                extend([*row, lane], {**counts, lane: counts[lane] + 1}, left)

    extend([], dict.fromkeys(lanes, 0), 0.0)
    return orders


def all_orders(problem: OrderProblem) -> list[LaneOrder]:
    """Return all orders within the limits that do not deadlock, the longest first."""
    rows = [device_orders(problem, d) for d in range(problem.n_devices)]
    ptr = np.cumsum([0, *(len(row[0]) for row in rows)])
    orders = [LaneOrder(np.concatenate(x), ptr) for x in itertools.product(*rows)]
    makespans = np.array([evaluate(problem, order).makespan for order in orders])
    ranked = np.argsort(-makespans, kind="stable")
    return [orders[k] for k in ranked if np.isfinite(makespans[k])]
