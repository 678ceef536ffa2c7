"""Orders of F, I and W under given costs: list them, compare them, find the shortest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pipesim.costs.costs import Costs
from pipesim.errors import CostsError
from pipesim.list_scheduling.order_by import PRIORITIES
from pipesim.list_scheduling.problem import Problem, first_values
from pipesim.list_scheduling.scheduler import Ranks, list_orders
from pipesim.lowering.lower import lower
from pipesim.ops import Op
from pipesim.order_search import (
    LaneOrder,
    OrderProblem,
    counts_all_costs,
    evaluate,
    improve,
    meets,
    order_problem,
    schedule_of,
)
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.rates import longest_span


class Score(NamedTuple):
    """Longest span of a device, first start to last end, and makespan (s)."""

    span: float
    makespan: float

    def is_no_worse(self, other: Score) -> bool:
        """Return whether neither span nor makespan is longer than another, but for rounding."""
        return meets(self.span, other.span) and meets(self.makespan, other.makespan)


@dataclass(frozen=True)
class CostedOrders:
    """Orders of F, I and W of one placement (with one path), and their times under costs.

    Times are those of a simulation without skips or replicas. The makespan includes optimizer
    steps, and the span does not. ``problem`` has seconds of F, I, W, messages and STEPs.
    ``simulated_costs`` are those that the compiled evaluator does not count in full: with launches,
    or with links that several channels share. None: it counts all.
    """

    placement: Placement
    problem: OrderProblem
    simulated_costs: Costs | None

    def with_equal_lengths(self) -> CostedOrders:
        """Return the same orders with F, I and W of one second, and nothing else."""
        problem, none = self.problem, np.zeros_like(self.problem.latency)
        seconds, tail = np.ones_like(problem.seconds), np.zeros_like(problem.tail)
        problem = problem._replace(seconds=seconds, latency=none, hold=none, tail=tail)
        return CostedOrders(self.placement, problem, None)

    def with_microbatches(self, n_microbatches: int) -> CostedOrders:
        """Return the orders of another number of micro-batches."""
        count = np.full_like(self.problem.count, n_microbatches)
        return replace(self, problem=self.problem._replace(count=count))

    def quick_score(self, order: LaneOrder) -> Score:
        """Return the score of an order without launches, and with links of their own."""
        times = evaluate(self.problem, order)
        return Score(times.span, times.makespan)

    def score(self, order: LaneOrder) -> Score:
        """Return the score of an order; it is simulated where launches or links need it."""
        if self.simulated_costs is None:
            return self.quick_score(order)
        graph = lower(self.schedule(order, "candidate"))
        timeline = predict_timeline(graph, self.simulated_costs)
        return Score(longest_span(timeline), timeline.makespan)

    def schedule(self, order: LaneOrder, name: str) -> Schedule:
        """Return an order as a schedule."""
        return schedule_of(self.problem, order, self.placement, name)


def with_equal_microbatches(costs: Costs, n_microbatches: int) -> Costs:
    """Return costs in which micro-batches have their average seconds and their largest bytes.

    Named schedules repeat one pattern, which is thus made for the average micro-batch. It keeps a
    memory limit for any order of micro-batches.
    """
    n = costs.n_microbatches
    if n is None:
        return costs
    if n % n_microbatches:
        raise CostsError(
            f"costs have values for {n} micro-batches, but the schedule has {n_microbatches}; "
            f"give {n_microbatches} values a stage, or Costs.averaged()"
        )
    largest: dict[str, Any] = {}
    for name in ("activation_bytes", "weight_grad_bytes"):
        value = getattr(costs, name)
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            rows = np.max(value, axis=1)
            largest[name] = rows if len(rows) > 1 else float(rows[0])
    return replace(costs.averaged(), **largest)


def costed_orders(placement: Placement, n_microbatches: int, costs: Costs) -> CostedOrders:
    """Return the orders of a placement with one path, under costs."""
    costs = replace(costs, skip_bytes=None)
    problem = order_problem(placement, n_microbatches, costs, split_backward=True)
    is_exact = counts_all_costs(placement, costs, split_backward=True)
    return CostedOrders(placement, problem, None if is_exact else costs)


def list_lanes(
    problem: Problem, ranks: Ranks, in_flight: ArrayLike, patience: float = 0.0
) -> LaneOrder:
    """Return the list scheduler's order of a placement with one path.

    ``in_flight`` is the most micro-batches between F and I, one number a stage; that of ``problem``
    is not read. ``ranks`` start the micro-batches of a stage in order. ``patience`` is that of
    `pipesim.order_by`.
    """
    limited = problem._replace(in_flight=np.asarray(in_flight, float))
    actions, ptr = list_orders(limited, ranks, patience)
    phase, stage = np.divmod(problem.lane[actions], problem.n_stages)
    return LaneOrder(stage * problem.n_phases + phase, ptr)


# The shortest of many orders within the memory of a schedule

#: Priorities that are tried besides a schedule's own ones.
_PRIORITIES = ("forward_first", "backward_first")
#: Least gap before the next F or I that a W may start in, as a share of the seconds of W.
_PATIENCE = (0.0, 0.3, 0.5, 0.75, 1.0)
#: Most listed orders that are simulated, if the compiled evaluator does not count all costs.
_FINALISTS = 3
#: Moves of the local search for each task, and at most: moves times tasks, about 40 ms.
_MOVES, _MOST_WORK = 3, 8_000_000
#: Temperature of the local search, in mean seconds of a task: it accepts hardly any worse order.
_TEMPERATURE = 0.02


def shortest_order(
    times: CostedOrders,
    problem: Problem,
    own_ranks: Iterable[Ranks],
    in_flight: ArrayLike,
    first: LaneOrder,
) -> LaneOrder:
    """Return an order of less makespan than ``first``, or ``first`` if none is found.

    The list scheduler makes orders of ``problem`` with several priorities, those of ``own_ranks``
    among them, numbers of micro-batches in flight (``in_flight`` a stage, and one more) and
    patience of W. A local search improves the shortest one. The search is short, and always makes
    the same moves. ``first`` keeps the limits.
    """
    orders = {first.lanes.tobytes(): first}
    ranks = [*own_ranks, *(PRIORITIES[name](problem) for name in _PRIORITIES)]
    places = [np.asarray(in_flight, float) + more for more in (0, 1)]
    for variant in itertools.product(ranks, places, _PATIENCE):
        order = list_lanes(problem, *variant)
        orders.setdefault(order.lanes.tobytes(), order)
    ranked = sorted(orders.values(), key=lambda order: times.quick_score(order).makespan)
    n_tasks = len(first.lanes)
    improved = improve(
        _with_limits(times.problem, problem),
        ranked[0],
        evaluations=min(_MOVES * n_tasks, _MOST_WORK // n_tasks),
        seed=0,
        temperature=_TEMPERATURE,
    )
    if times.simulated_costs is None:
        return improved
    longest = times.score(first).makespan
    finalists = [improved, *ranked[:_FINALISTS]]
    return next((x for x in finalists if meets(times.score(x).makespan, longest)), first)


def _with_limits(problem: OrderProblem, listed: Problem) -> OrderProblem:
    """Return the lanes with the bytes and limits of the list scheduler's problem."""
    f_bytes, w_bytes = (
        first_values(listed, x)[problem.stage] for x in (listed.f_bytes, listed.w_bytes)
    )
    return problem._replace(
        allocated=np.where(problem.op == Op.F, f_bytes, 0.0),
        released=np.select([problem.op == Op.I, problem.op == Op.W], [f_bytes - w_bytes, w_bytes]),
        workspace=np.zeros_like(problem.seconds),
        limit=listed.limits,
    )
