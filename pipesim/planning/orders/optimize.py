"""`optimize`: the best order of a placement's actions that a search finds, with a lower bound."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress

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
from pipesim.order_search import (
    OBJECTIVES,
    Objective,
    OrderProblem,
    counts_all_costs,
    order_problem,
    peak_bytes,
)
from pipesim.planning.orders.effort import Effort
from pipesim.planning.orders.first_orders import sequential_order
from pipesim.planning.orders.optimized_schedule import OptimizedSchedule
from pipesim.planning.orders.order_search_run import Search
from pipesim.planning.orders.search_bar import SearchBar
from pipesim.planning.orders.search_result import search_result
from pipesim.scheduling.placement import Placement
from pipesim.simulation.noise import Noise
from pipesim.simulation.simulate import checked_noise
from pipesim.timeline.memory_limit import checked_memory_limit, too_low_limit
from pipesim.utils.units import Bytes


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
    take time, or paths reduce gradients, the search neglects that; a simulation of the best
    orders then decides between them.

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

    Raises
    ------
    CostsError
        If the costs lack seconds of an operation, or are of another number of micro-batches.
    NetworkError
        If a link names a device that the placement does not have.

    Warns
    -----
    CostsWarning
        If there is a limit and the costs have no ``activation_bytes``.
    EngineWarning
        If ortools is not installed.

    See Also
    --------
    pipesim.order_by : Put actions in order by a priority, without a search.
    pipesim.lower_bound : Bound the time of all orders from below.
    pipesim.plan : Search for the configuration, too.
    pipesim.schedule : Build a schedule of the literature.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs(forward=(1, 2, 1), backward=(2, 3, 2), activation_bytes=1)
    >>> schedule = ps.optimize(ps.linear(3), 6, costs, memory_limit=3, progress=False)
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
    limit = _checked_limit(problem, costs, memory_limit, stacklevel=3)
    effort.began = time.perf_counter()
    is_exact = counts_all_costs(placement, costs, split_backward=split_backward)
    with SearchBar(effort, progress) as bar:
        search = Search(
            placement, costs, limit, objective, effort, bar.show, problem,
            tries_all=noise is not None, is_exact=is_exact,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):
            search.run()
    if search.best is None:
        raise KeyboardInterrupt
    return search_result(search, name, noise, level)


def _checked_effort(seconds: object, evaluations: object, seed: object) -> Effort:
    """Return the limits of the search."""
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


def _checked_limit(
    problem: OrderProblem, costs: Costs, memory_limit: object, stacklevel: int
) -> list[float] | None:
    """Return the bytes that each device may hold, None for no limit."""
    if memory_limit is None:
        memory_limit = None if costs.work is None else costs.work.memory
    elif not np.any(costs.activation_bytes) and not np.any(costs.weight_grad_bytes):
        warnings.warn(
            "memory_limit limits no order: the costs have no activation_bytes; give them, such as "
            "ps.Costs(..., activation_bytes=1, weight_grad_bytes=1) to count micro-batches of a "
            "stage",
            CostsWarning,
            stacklevel=stacklevel,
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
