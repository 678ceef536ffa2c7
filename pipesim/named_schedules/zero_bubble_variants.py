"""The variants of ZB-1p and ZB-2p: numbers of micro-batches in flight, and patience of W."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.list_scheduling.priorities import action_ranks
from pipesim.list_scheduling.problem import make_problem
from pipesim.named_schedules.costed_orders import CostedOrders, Score, list_lanes
from pipesim.ops import Op
from pipesim.order_search import LaneOrder

__all__ = ["best_variant"]

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
    costs: Costs,
    limits: list[float],
    n_microbatches: int,
    times: CostedOrders,
    longest: Score | None = None,
) -> LaneOrder | None:
    """Return the order with the shortest span; None if all are worse than ``longest``.

    Parameters
    ----------
    costs
        Costs by which the list scheduler orders actions.
    limits
        Bytes of activations that devices may hold, one a device.
    n_microbatches
        Number of micro-batches of the schedule.
    times
        Times by which variants are compared; of the same costs.
    longest
        Span and makespan of which the order may exceed neither.
    """
    variants = _Variants(costs, limits, times)
    ranked = variants.ranked(min(n_microbatches, _COMPARED * len(limits)), longest)
    make_order = variants.orders(n_microbatches)
    if longest is None:
        return make_order(ranked[0])
    orders = [make_order(variant) for variant in ranked[:_FINALISTS]]
    scored = [(times.score(order), order) for order in orders]
    fitting = [row for row in scored if row[0].is_no_worse(longest)]
    return min(fitting, key=lambda row: row[0])[1] if fitting else None


@dataclass(frozen=True)
class _Variants:
    """The variants of one schedule; attributes as for `best_variant`."""

    costs: Costs
    limits: list[float]
    times: CostedOrders

    def ranked(self, m: int, longest: Score | None) -> list[_Variant]:
        """Return variants with different orders, the best first; the first one among equals."""
        make_order, times = self.orders(m), self.times.of_microbatches(m)
        goal = self._least_span(m) * (1 + _ROUNDING)
        scores: dict[bytes, tuple[Score, int, _Variant]] = {}
        for number, variant in enumerate(self._all(m)):
            order = make_order(variant)
            if (key := order.lanes.tobytes()) in scores:
                continue
            score = times.quick_score(order)
            scores[key] = score, number, variant
            if score.span <= goal and (longest is None or score.is_no_worse(longest)):
                break
        return [variant for _, _, variant in sorted(scores.values(), key=lambda row: row[:2])]

    def orders(self, m: int) -> Callable[[_Variant], LaneOrder]:
        """Return the function that makes the order of a variant."""
        problem = make_problem(self.times.placement, m, self.costs, True, self.limits, None)
        ranks = action_ranks("forward_first", problem, (Op.F, Op.I, Op.W))
        return lambda variant: list_lanes(problem, ranks, *variant)

    def _all(self, m: int) -> Iterator[_Variant]:
        """Yield the values to try."""
        p = len(self.limits)
        forward, backward = (
            self.costs.per_stage(name, p).mean() for name in ("forward", "input_grad")
        )
        after = np.arange(p)[::-1]
        slopes = list(_SLOPES)
        if forward > 0:  # as many as the device can run until its first I is ready
            slopes.insert(0, (forward + backward) / forward)
        tried = set()
        for slope, patience in itertools.product(slopes, _PATIENCE):
            places = tuple(np.minimum(1 + np.floor(slope * after + _ROUNDING), m).tolist())
            if (places, patience) not in tried:
                tried.add((places, patience))
                yield places, patience

    def _least_span(self, m: int) -> float:
        """Return a lower bound on the longest span: work, and the wait for the first I (s).

        The wait begins when the device's memory is full.
        """
        p = len(self.limits)
        forward, backward, weight, held = (
            self.costs.per_stage(name, p)
            for name in ("forward", "input_grad", "weight_grad", "activation_bytes")
        )
        places = np.full(p, m)
        holds = held > 0
        places[holds] = np.minimum(m, np.array(self.limits)[holds] / held[holds] + _ROUNDING)
        first = np.cumsum((forward + backward)[::-1])[::-1] - backward
        wait = np.maximum(0, first - places * forward)
        return float((m * (forward + backward + weight) + wait).max())
