"""Orders from which `optimize` starts: named schedules and list schedules that keep the limit."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.errors import PipeError
from pipesim.list_scheduling.order_by import list_schedule
from pipesim.ops import Op
from pipesim.order_search import (
    LaneOrder,
    Objective,
    OrderProblem,
    evaluate,
    first_microbatch_orders,
    has_equal_microbatches,
    keeps_limit,
    lane_order,
)
from pipesim.order_search.lane_order import (
    n_microbatches,
    occurrences,
    sorted_order,
    task_lanes,
)
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import options_of_schedules, schedule_info
from pipesim.scheduling.schedule import Schedule

#: Values that list schedules are tried with, the most promising ones first. Micro-batches in
#: flight are counted for each stage after a stage; infinity for no limit but that of memory.
_IN_FLIGHT = (1.0, 2.0, math.inf, 0.5)
_PATIENCE = (0.75, 0.0)
#: Most tasks of a problem for which list schedules are tried.
_MOST_TASKS = 20_000

#: Name of a schedule, and its options without costs.
NamedOptions = tuple[str, dict[str, Any]]


class Candidate(NamedTuple):
    """An order, the value of its objective (s), and its name."""

    order: LaneOrder
    value: float
    name: str


def first_orders(
    problem: OrderProblem,
    placement: Placement,
    costs: Costs,
    objective: Objective,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[Candidate]:
    """Yield the named schedules and list schedules that keep the limit.

    Those named schedules that are built for costs come last, since they take longest. ``is_late``
    is called before each schedule. Once it is true, none of these is yielded, and at most one more
    order of each other kind.
    """
    options = _options(problem, placement)
    yield from _candidates(problem, _named(problem, placement, options), objective, is_late)
    if problem.count.sum() <= _MOST_TASKS:
        yield from _candidates(problem, _listed(problem, placement, costs), objective, is_late)
    if not is_late():
        for_costs = _named_for_costs(problem, placement, costs, options)
        yield from _candidates(problem, for_costs, objective, is_late)


def named_orders(
    problem: OrderProblem, placement: Placement, costs: Costs, objective: Objective = "makespan"
) -> Iterator[Candidate]:
    """Yield the named schedules of a placement that keep the limit, with and without costs."""
    options = _options(problem, placement)
    schedules = itertools.chain(
        _named(problem, placement, options), _named_for_costs(problem, placement, costs, options)
    )
    yield from _candidates(problem, schedules, objective, lambda: False)


def sequential_candidate(problem: OrderProblem, objective: Objective) -> Candidate:
    """Return the sequential order, which keeps every limit in which one micro-batch fits."""
    order = sequential_order(problem)
    value = getattr(evaluate(problem, order), objective)
    return Candidate(order, value, "one micro-batch after the other")


def sequential_order(problem: OrderProblem) -> LaneOrder:
    """Return the order that runs one micro-batch of a path after the other.

    No order holds fewer bytes at most.
    """
    lanes = task_lanes(problem)
    return sorted_order(problem, problem.path[lanes], occurrences(lanes))


def _candidates(
    problem: OrderProblem,
    schedules: Iterator[Schedule | None],
    objective: Objective,
    is_late: Callable[[], bool],
) -> Iterator[Candidate]:
    """Yield the orders of schedules that keep the limit; once it is late, at most one."""
    n_orders = 0
    while not (n_orders and is_late()):
        with warnings.catch_warnings():  # left before each yield: the filters are the caller's
            warnings.simplefilter("ignore")
            try:
                schedule = next(schedules)
            except StopIteration:
                return
            candidate = None if schedule is None else _checked(problem, schedule, objective)
        if candidate is not None:
            n_orders += 1
            yield candidate


def _checked(problem: OrderProblem, schedule: Schedule, objective: Objective) -> Candidate | None:
    """Return the order of a schedule if it has the problem's tasks and keeps the limit.

    If micro-batches differ, it is the best of several orders of them.
    """
    try:
        order = lane_order(problem, schedule)
    except PipeError:
        return None
    orders = [order]
    if not has_equal_microbatches(problem):
        orders += [order._replace(microbatches=x) for x in first_microbatch_orders(problem)]
    best = None
    for variant in orders:
        value = getattr(evaluate(problem, variant), objective)
        is_better = math.isfinite(value) and (best is None or value < best.value)
        if is_better and keeps_limit(problem, variant):
            best = Candidate(variant, value, schedule.name)
    return best


def _activation_limits(problem: OrderProblem) -> list[float]:
    """Return the bytes of activations that each device may hold beside the largest workspace."""
    workspace = np.zeros(problem.n_devices)
    rows = problem.workspace.reshape(-1, len(problem.device))
    np.maximum.at(workspace, problem.device, rows.max(axis=0))
    limits: list[float] = np.maximum(problem.limit - workspace, 0.0).tolist()
    return limits


def _options(problem: OrderProblem, placement: Placement) -> list[NamedOptions]:
    """Return name and options of the schedules whose stages are placed so, the shortest ones first.

    They are ranked by their orders of a few micro-batches; those that exceed the limit come last.
    """
    p, n_chunks, n_paths = placement.n_devices, placement.n_chunks, placement.n_paths
    few = min(n_paths * max(1, math.ceil(2 * p / n_paths)), n_microbatches(problem))
    count = np.bincount(placement.path_of(few), minlength=n_paths)
    small = problem._replace(count=count[problem.path])
    sizes = {"n_chunks": n_chunks, "n_waves": max(1, n_chunks // 2)}
    rows = []
    for name, names in options_of_schedules().items():
        options = {key: sizes[key] for key in sizes if key in names}
        trial = _built(name, p, few, options)
        if trial is not None and trial.placement == placement:
            candidate = _checked(small, trial, "makespan")
            rows.append((math.inf if candidate is None else candidate.value, name, options))
    return [(name, options) for _, name, options in sorted(rows, key=lambda row: row[0])]


def _named(
    problem: OrderProblem, placement: Placement, rows: list[NamedOptions]
) -> Iterator[Schedule | None]:
    """Yield named schedules, without costs; None for those refused."""
    for name, options in rows:
        yield _built(name, placement.n_devices, n_microbatches(problem), options)


def _named_for_costs(
    problem: OrderProblem, placement: Placement, costs: Costs, rows: list[NamedOptions]
) -> Iterator[Schedule | None]:
    """Yield named schedules that are built for costs; None for those refused."""
    names = options_of_schedules()
    for name, sizes in rows:
        if "costs" not in names[name]:
            continue
        options = {**sizes, "costs": costs}
        if "activation_limit" in names[name] and np.isfinite(problem.limit).all():
            options["activation_limit"] = _activation_limits(problem)
        yield _built(name, placement.n_devices, n_microbatches(problem), options)


def _built(name: str, p: int, m: int, options: dict[str, Any]) -> Schedule | None:
    """Return a named schedule; None if it does not take these counts or costs."""
    try:
        return schedule_info(name).make(p, m, **options)
    except PipeError:
        return None


def _listed(problem: OrderProblem, placement: Placement, costs: Costs) -> Iterator[Schedule | None]:
    """Yield list schedules under the limit, by priority, micro-batches in flight and patience.

    Micro-batches that differ are taken in several orders. None stands for a schedule that the
    limit does not allow.
    """
    m = n_microbatches(problem)
    split = bool((problem.op == Op.W).any())
    after = placement.n_stages - np.arange(placement.n_stages)
    limits = _activation_limits(problem) if np.isfinite(problem.limit).any() else None
    patiences = _PATIENCE if split else _PATIENCE[:1]
    orders = [None] if has_equal_microbatches(problem) else first_microbatch_orders(problem)
    for share, priority, patience, microbatches in itertools.product(
        _IN_FLIGHT, ("forward_first", "backward_first", "critical_path"), patiences, orders
    ):
        in_flight = None
        if math.isfinite(share):
            in_flight = np.ceil(share * after).astype(int).tolist()
        try:
            yield list_schedule(
                placement, m, costs, priority=priority, activation_limit=limits,
                in_flight=in_flight, split_backward=split, patience=patience,
                name="list schedule", microbatches=microbatches,
            )  # fmt: skip
        except PipeError:
            yield None
