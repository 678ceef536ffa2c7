"""The variants of ZB-1p and ZB-2p: numbers of micro-batches in flight, and patience of W."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from pipesim.list_scheduling.changed_problems import first_values, with_microbatches
from pipesim.list_scheduling.priorities import PRIORITIES
from pipesim.list_scheduling.problem import Problem
from pipesim.named_schedules.costed_orders import CostedOrders, Score, list_lanes
from pipesim.order_search import LaneOrder, meets

#: Forwards in flight on a device for each device after it: 1 in ZB-H1, 2 in ZB-H2.
_SLOPES = (2.0, 1.0, 2.25, 2.5, 1.5)
#: Least gap before the next F or I that a W may start in, as a share of the seconds of W.
_PATIENCE = (0.0, 0.75, 0.3, 0.5, 1.0)
#: Micro-batches a device on which variants are compared; with more, orders only repeat themselves.
_COMPARED = 4
#: Number of variants that are compared with all micro-batches, if a score is not to be exceeded.
_FINALISTS = 4
_ROUNDING = 1e-9

#: Micro-batches in flight on each device, and patience of W.
_Variant = tuple[tuple[float, ...], float]


def best_variant(
    problem: Problem, times: CostedOrders, longest: Score | None = None
) -> LaneOrder | None:
    """Return the order with the shortest span; None if all are worse than ``longest``.

    Parameters
    ----------
    problem
        Actions to order, with seconds, bytes and limits.
    times
        Times by which variants are compared; of the same costs.
    longest
        Span and makespan of which the order may exceed neither.
    """
    m = problem.n_microbatches
    compared = min(m, _COMPARED * problem.n_devices)
    fewer = with_microbatches(problem, compared)
    ranked = _ranked(fewer, times.with_microbatches(compared), longest)
    make_order = _order_maker(problem)
    if longest is None:
        return make_order(ranked[0])
    orders = sorted(map(make_order, ranked[:_FINALISTS]), key=times.quick_score)
    return next((x for x in orders if times.score(x).is_no_worse(longest)), None)


def _ranked(problem: Problem, times: CostedOrders, longest: Score | None) -> list[_Variant]:
    """Return variants with different orders, the best first; the first one among equals."""
    make_order = _order_maker(problem)
    goal = _least_span(problem)
    scores: dict[bytes, tuple[Score, int, _Variant]] = {}
    for number, variant in enumerate(_variants(problem)):
        order = make_order(variant)
        if (key := order.lanes.tobytes()) in scores:
            continue
        score = times.quick_score(order)
        scores[key] = score, number, variant
        if meets(score.span, goal) and (longest is None or score.is_no_worse(longest)):
            break
    return [variant for _, _, variant in sorted(scores.values(), key=lambda row: row[:2])]


def _order_maker(problem: Problem) -> Callable[[_Variant], LaneOrder]:
    """Return the function that makes the order of a variant."""
    ranks = PRIORITIES["forward_first"](problem)
    return lambda variant: list_lanes(problem, ranks, *variant)


def _variants(problem: Problem) -> Iterator[_Variant]:
    """Yield the values to try."""
    seconds = first_values(problem, problem.seconds).reshape(3, -1)
    forward, backward, _ = seconds.mean(axis=1).tolist()
    after = np.arange(problem.n_devices)[::-1]
    slopes = list(_SLOPES)
    if forward > 0:  # as many as the device can run until its first I is ready
        slopes.insert(0, (forward + backward) / forward)
    tried = set()
    for slope, patience in itertools.product(slopes, _PATIENCE):
        most = np.minimum(1 + np.floor(slope * after + _ROUNDING), problem.n_microbatches)
        places = tuple(most.tolist())
        if (places, patience) not in tried:
            tried.add((places, patience))
            yield places, patience


def _least_span(problem: Problem) -> float:
    """Return a lower bound on the longest span: work, and the wait for the first I (s).

    The wait begins when the device's memory is full.
    """
    m, held = problem.n_microbatches, first_values(problem, problem.f_bytes)
    forward, backward, weight = first_values(problem, problem.seconds).reshape(3, -1)
    places = np.full(problem.n_devices, m)
    holds = held > 0
    places[holds] = np.minimum(m, problem.limits[holds] / held[holds] + _ROUNDING)
    first = np.cumsum((forward + backward)[::-1])[::-1] - backward
    wait = np.maximum(0, first - places * forward)
    return float((m * (forward + backward + weight) + wait).max())
