"""`optimize`: the best order of a placement's actions that a search finds, with a lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.errors import (
    ArgumentError,
    CostsWarning,
    check_count,
    check_flag,
    check_name,
    check_text,
    number,
)
from pipesim.lowering.lower import lower
from pipesim.order_search import (
    OBJECTIVES,
    Objective,
    OrderProblem,
    checked_bound,
    counts_all_costs,
    meets,
    order_problem,
    peak_bytes,
    schedule_of,
)
from pipesim.order_search.evaluate import ROUNDING
from pipesim.planning.first_orders import Candidate, sequential_order
from pipesim.planning.optimize_search import Effort, OrderSearch
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import simulate_many
from pipesim.simulation.simulate import checked_noise, predict_timeline
from pipesim.timeline.memory_limit import checked_memory_limit, too_low_limit
from pipesim.timeline.rates import longest_span
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names
from pipesim.utils.texts import Bytes, format_time


@dataclass(frozen=True, eq=False, repr=False)
class OptimizedSchedule(Schedule):
    """A schedule with its predicted time and a lower bound on it; used like any other schedule.

    A file that `save` writes holds the order alone. With another order of micro-batches, or other
    updates or slices, it becomes a `pipesim.Schedule`, without a predicted time.

    Attributes
    ----------
    name, placement, n_microbatches, op, stage, microbatch, ptr, overlapped
        Orders of the devices, as in `pipesim.Schedule`.
    n_batches, weight_versions, recipe, n_slices
        As in `pipesim.Schedule`.
    objective
        ``"makespan"`` or ``"span"``, which was minimized.
    makespan, span
        Seconds that `pipesim.simulate` predicts: of the step, and the longest time of a device from
        the start of its first task to the end of its last F, B, I or W.
    lower_bound
        Seconds of the objective that no order of these costs and limits goes below, also in any
        order of micro-batches.
    proved
        Whether no order is better: the objective meets the bound. A span of seconds without a
        common unit may miss this: it may be rounded to 1/4096 of itself for each task.
    first_schedule
        Name of the schedule from which the search started.
    first_value
        Seconds of the objective of that schedule.
    evaluations
        Number of moves that the local search tried.
    seconds
        Seconds that the search took.
    noisy_makespan
        Percentile of the makespans with noise (s), if there was noise; else None.
    """

    objective: Objective = "makespan"
    makespan: float = math.nan
    span: float = math.nan
    lower_bound: float = 0.0
    proved: bool = False
    first_schedule: str = ""
    first_value: float = math.nan
    evaluations: int = 0
    seconds: float = 0.0
    noisy_makespan: float | None = None

    @property
    def value(self) -> float:
        """Seconds of the objective."""
        return self.makespan if self.objective == "makespan" else self.span

    @property
    def gap(self) -> float:
        """Objective over lower bound, less 1: an optimum is at most so much better; 0 if proved."""
        if self.proved or self.value == self.lower_bound:
            return 0.0
        return self.value / self.lower_bound - 1.0 if self.lower_bound > 0.0 else math.inf

    def _ordered_anew(self, **changes: Any) -> Schedule:
        plain = Schedule(**{x.name: getattr(self, x.name) for x in fields(Schedule)})
        return replace(plain, **changes)

    def __repr__(self) -> str:
        return (
            f"<OptimizedSchedule {self.name}: {self.n_devices} devices, {self.n_stages} stages, "
            f"{self.n_microbatches} micro-batches, {self.objective} {self.value:.6g} s, "
            f"{self._proof()}>"
        )

    def _repr_html_(self) -> str:
        from pipesim.plot.html import schedule_html
        from pipesim.plot.html_tables import note_html, table_html

        head = [self.objective, "time", "above the lower bound"]
        has_bound = self.lower_bound > 0.0
        rows = [["this order", format_time(self.value), f"{self.gap:.2%}" if has_bound else "-"]]
        if self.first_schedule:
            above = f"{self.first_value / self.lower_bound - 1:.2%}" if has_bound else "-"
            first = f"{self.first_schedule}, where the search started"
            rows.append([first, format_time(self.first_value), above])
        if has_bound:
            rows.append(["lower bound of all orders", format_time(self.lower_bound), "0.00%"])
        text = f"Optimized order: {self._proof()}"
        if self.noisy_makespan is not None:
            text += f"; makespan with noise {format_time(self.noisy_makespan)}"
        text += f"; {self.evaluations:,} moves in {format_time(self.seconds)}"
        return note_html(text) + table_html(head, rows) + schedule_html(self)

    def _proof(self) -> str:
        """Return in words how far from the optimum the order can be."""
        if not math.isfinite(self.gap):
            return "no lower bound"
        return "optimal" if self.proved else f"at most {self.gap:.2%} above the optimum"


@checked_names
def optimize(
    placement: Placement,
    n_microbatches: int,
    costs: Costs,
    memory_limit: Bytes | Sequence[Bytes] | NDArray[np.float64] | None = None,
    *,
    objective: Objective = "makespan",
    seconds: float = 30.0,
    seed: int = 0,
    evaluations: int | None = None,
    split_backward: bool | None = None,
    noise: Noise | None = None,
    percentile: float = 90.0,
    progress: bool | None = None,
    name: str = "optimized",
) -> OptimizedSchedule:
    """Search for the order of a placement's actions that takes the least time.

    The search starts from the best named schedule that keeps the limit, or a list schedule. A local
    search moves tasks of the longest path (`pipesim.order_search`). Then CP-SAT proves the order
    optimal, raises the lower bound, or finds a better order, if ortools is installed
    (``pip install pipesim[optimal]``) and there are at most 6,000 tasks. With many micro-batches,
    fewer are ordered first, and a period of that order is repeated. The search ends as soon as an
    order meets the lower bound, if the search counts all costs. Ctrl-C ends it too, and the best
    order so far is returned: at least one micro-batch after the other. ``lower_bound`` is 0 if
    Ctrl-C came before the bound was computed.

    If micro-batches differ, their order is searched too. First orders take micro-batches in their
    own order and by length: the longest first, the shortest first, and the short ones at both ends.
    Then moves of micro-batches and of tasks take turns, until the effort is spent. All stages run
    micro-batches in one order; an order in which stages differ may take less time. CP-SAT's model
    takes micro-batches to be identical, so that it is not used. The lower bound holds for all
    orders, and is often far below the best one: ``proved`` is then seldom true.

    Times are those of `pipesim.simulate` for ``lower(schedule)``. Where links are shared, launches
    take time, or paths reduce gradients, the search neglects that, and the cost of overlap; a
    simulation of the best orders then decides between them.

    Parameters
    ----------
    placement
        Which device holds which stage.
    n_microbatches
        Micro-batches of a step, at least one for each path of the placement.
    costs
        Seconds and bytes of each stage, or of each stage and micro-batch.
    memory_limit
        All bytes that a device may hold, one number or one a device, as in `pipesim.simulate`. By
        default the memory of a GPU in the workload of the costs, if any. Each returned order fits.
    objective
        ``"makespan"``, or ``"span"``: the longest time of a device from its first start to its
        last end, F, B, I and W. The steps of zero-bubble schedules follow each other at that
        interval if optimizers do not wait for each other.
    seconds
        Time limit. It is checked between first orders, between periods, during the local search
        and CP-SAT, and before CP-SAT's model is built, which is kept to about a second. It does
        not limit the compilation of loops at their first use, the first named schedule, or the
        simulation of the best orders. Nor does it limit the lower bound, which takes some 10 s for
        a million tasks.
    seed
        Seed of the random numbers.
    evaluations
        Number of moves of the local search, in place of ``seconds``. Equal arguments then have
        equal results. CP-SAT's work follows from it too, so that few moves prove little of more
        than some 100 tasks.
    split_backward
        Whether the backward is I and W, or B. None: I and W if the costs have ``input_grad`` and
        ``weight_grad``.
    noise, percentile
        Noise with which all first orders and the best of the search are simulated in 64
        scenarios, even if one meets the bound without noise. The one with the least
        percentile (0 to 100) of the makespan is returned. The lower bound is that without noise.
    progress
        Whether to show a progress bar; None: in a terminal.
    name
        Name of the schedule.

    Returns
    -------
    OptimizedSchedule
        A schedule with ``makespan``, ``span``, ``lower_bound``, ``gap`` and ``proved``.

    See Also
    --------
    pipesim.order_by : Put actions in order by a priority, without a search.
    pipesim.plan : OrderSearch for the configuration, too.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=(1, 2, 1), backward=(2, 3, 2), activation_bytes=1)
    >>> schedule = ps.optimize(ps.Placement.linear(3), 6, costs, memory_limit=3, progress=False)
    >>> schedule.makespan, schedule.lower_bound, schedule.proved
    (33.0, 33.0, True)
    """
    check_name("objective", objective, OBJECTIVES)
    effort = _checked_effort(seconds, evaluations, seed)
    level = _checked_percentile(noise, percentile, objective)
    check_text("name", name)
    if progress is not None:
        check_flag("progress", progress)
    problem = order_problem(
        placement, n_microbatches, costs, split_backward=split_backward, memory_limit=memory_limit
    )
    limit = _checked_limit(problem, costs, memory_limit)
    effort.began = time.perf_counter()
    is_exact = counts_all_costs(placement, costs, split_backward=split_backward)
    with SearchBar(effort, progress) as bar:
        search = OrderSearch(
            placement, costs, limit, objective, effort, bar.show, problem,
            tries_all=noise is not None, is_exact=is_exact,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):
            search.run()
    if search.best is None:
        raise KeyboardInterrupt
    return search_result(search, name, noise, level)


def _checked_effort(seconds: object, evaluations: object, seed: object) -> Effort:
    limit = number(seconds)
    if limit is None or not 0.0 < limit < math.inf:
        raise ArgumentError(
            f"seconds must be finite and above 0, got {seconds!r:.60}; give such as 30.0, or "
            "evaluations in their place"
        )
    count = None if evaluations is None else check_count("evaluations", evaluations)
    return Effort(limit, count, check_count("seed", seed, 0))


def _checked_percentile(noise: object, percentile: object, objective: str) -> float:
    """Return the percentile by which orders are ranked under noise."""
    level = number(percentile)
    if level is None or not 0.0 <= level <= 100.0:
        raise ArgumentError(f"percentile must be 0 to 100, got {percentile!r:.60}")
    if noise is not None:
        checked_noise(noise)
        if objective != "makespan":
            raise ArgumentError(
                f"noise ranks orders by their makespan, got objective={objective!r}; leave out "
                "one of both"
            )
    return level


def _checked_limit(problem: OrderProblem, costs: Costs, memory_limit: object) -> list[float] | None:
    """Return the bytes that each device may hold, None for no limit."""
    if memory_limit is None:
        memory_limit = None if costs.work is None else costs.work.memory
    elif not np.any(costs.activation_bytes) and not np.any(costs.weight_grad_bytes):
        warn_caller(
            "memory_limit limits no order: the costs have no activation_bytes; give them, such as "
            "ps.Costs(..., activation_bytes=1, weight_grad_bytes=1) to count micro-batches of a "
            "stage",
            CostsWarning,
        )
    if memory_limit is None:
        return None
    limit = checked_memory_limit(memory_limit, problem.n_devices)
    peak = peak_bytes(problem, sequential_order(problem))
    too_full = np.flatnonzero(peak > problem.limit)
    if len(too_full):
        device = int(too_full[0])
        missing = (peak - problem.limit)[device] * (1.0 + costs.memory_reserve)
        raise too_low_limit(device, float(limit[device]), float(limit[device] + missing))
    nbytes: list[float] = limit.tolist()
    return nbytes


class SearchBar:
    """Progress bar of a search, with the best value and its gap."""

    def __init__(self, effort: Effort, progress: bool | None) -> None:
        from pipesim.utils.packages import tqdm

        self._effort = effort
        counted = effort.evaluations is not None
        self._bar = tqdm(
            total=effort.evaluations if counted else round(effort.seconds, 1),
            disable=None if progress is None else not progress,
            unit="move" if counted else "s",
            bar_format=None if counted else "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}",
        )

    def __enter__(self) -> SearchBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, search: OrderSearch) -> None:
        """Show how far the search is, and the gap."""
        if self._bar.disable or search.best is None:
            return
        counted = self._effort.evaluations is not None
        seconds = min(self._effort.share, 1.0) * self._effort.seconds
        bound, value = search.lower_bound, search.best.value
        gap = f"{value / bound - 1:.2%}" if bound > 0 else "unknown"
        text = f"{search.objective} {value:.6g} s, gap {gap}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update((search.evaluations if counted else seconds) - self._bar.n)


#: Scenarios of noise over which orders are ranked.
_SCENARIOS = 64


class _Simulated(NamedTuple):
    """A candidate and its simulated times (s)."""

    candidate: Candidate
    makespan: float
    span: float
    noisy: float | None


def search_result(
    search: OrderSearch, name: str, noise: Noise | None, level: float
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
    search: OrderSearch, candidate: Candidate, noise: Noise | None, level: float
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
