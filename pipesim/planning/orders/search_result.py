"""`search_result`: the best order of a search, by simulation."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from pipesim.lowering.lower import lower
from pipesim.order_search import checked_bound, meets, schedule_of
from pipesim.order_search.objective import ROUNDING
from pipesim.planning.orders.first_orders import Candidate
from pipesim.planning.orders.optimized_schedule import OptimizedSchedule
from pipesim.planning.orders.order_search_run import Search
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import simulate_many
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.device_spans import longest_span

#: Scenarios of noise over which orders are ranked.
_SCENARIOS = 64


class _Simulated(NamedTuple):
    """A candidate and its simulated times (s)."""

    candidate: Candidate
    makespan: float
    span: float
    noisy: float | None


def search_result(
    search: Search, name: str, noise: Noise | None, level: float
) -> OptimizedSchedule:
    """Return the best order, with its simulated times."""
    assert search.best is not None
    best = _simulated(search, search.best, noise, level)
    first = _simulated(search, search.first or search.best, noise, level)
    value = getattr(best, search.objective)
    is_exact = abs(value - search.best.value) <= ROUNDING * search.best.value
    if not is_exact or noise is not None:
        rows = [best, first, *(_simulated(search, x, noise, level) for x in search.kept[:-1])]
        key = "noisy" if noise is not None else search.objective
        best = min(rows, key=lambda row: getattr(row, key))
        value = getattr(best, search.objective)
    schedule = schedule_of(search.problem, best.candidate.order, search.placement, name)
    bound = checked_bound(search.lower_bound, value, "the search")
    return OptimizedSchedule(
        **{key: getattr(schedule, key) for key in schedule.__dataclass_fields__},
        objective=search.objective,
        makespan=best.makespan,
        span=best.span,
        lower_bound=bound,
        proved=meets(value, bound),
        first_schedule=first.candidate.name,
        first_value=getattr(first, search.objective),
        evaluations=search.evaluations,
        seconds=time.perf_counter() - search.effort.began,
        noisy_makespan=best.noisy,
    )


def _simulated(
    search: Search, candidate: Candidate, noise: Noise | None, level: float
) -> _Simulated:
    """Return the times of a candidate that `pipesim.simulate` predicts."""
    schedule = schedule_of(search.problem, candidate.order, search.placement, candidate.name)
    graph = lower(schedule)
    timeline = predict_timeline(graph, search.costs)
    noisy = None
    if noise is not None:
        many = simulate_many(graph, search.costs, noise, _SCENARIOS, n_jobs=1, progress=False)
        noisy = float(np.percentile(many.makespan, level))
    return _Simulated(candidate, float(timeline.makespan), longest_span(timeline), noisy)
