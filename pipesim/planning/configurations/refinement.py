"""Refine the best configurations: splits by simulation, and orders for their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.evaluator import Evaluator
from pipesim.planning.configurations.search import evaluate

#: Configurations that are refined, and most simulations for each.
_BEST, _SIMULATIONS = 3, 60
#: Least gain of a step by a change, as a share of the step; below are ties.
_LEAST_GAIN = 1e-3


def refined(
    evaluator: Evaluator, ranked: Sequence[Evaluation], keeps: Callable[[PlanChoice], bool]
) -> list[Evaluation]:
    """Return new evaluations that are better than those of the best configurations.

    Layers move one by one to another stage as long as the simulated step takes less time. A
    schedule that can order its tasks for costs does so.
    """
    better = []
    for row in ranked[:_BEST]:
        best = _moved(evaluator, row, keeps)
        if evaluator.problem.takes_costs(row.choice.schedule):
            best = _shorter(evaluator, best, replace(best.choice, ordered_for_costs=True), keeps)
        if best is not row:
            better.append(best)
    return better


def _moved(
    evaluator: Evaluator, best: Evaluation, keeps: Callable[[PlanChoice], bool]
) -> Evaluation:
    """Return the best evaluation that moves of single layers reach."""
    left, improves = _SIMULATIONS, True
    while improves:
        improves = False
        for sizes in _moves(best.choice.layers_per_stage, evaluator.problem.least_at_ends):
            if left == 0:
                return best
            left -= 1
            choice = replace(best.choice, layers_per_stage=sizes)
            shorter = _shorter(evaluator, best, choice, keeps)
            if shorter is not best:
                best, improves = shorter, True
                break
    return best


def _moves(sizes: tuple[int, ...], least_at_ends: int) -> Iterator[tuple[int, ...]]:
    """Yield splits in which one layer is on another stage; from the largest stages first."""
    last = len(sizes) - 1
    order = sorted(range(len(sizes)), key=lambda stage: -sizes[stage])
    for source in order:
        if sizes[source] <= (least_at_ends if source in (0, last) else 1):
            continue
        for target in reversed(order):
            if sizes[target] <= sizes[source] and target != source:
                moved = list(sizes)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _shorter(
    evaluator: Evaluator,
    best: Evaluation,
    choice: PlanChoice,
    keeps: Callable[[PlanChoice], bool],
) -> Evaluation:
    """Return the evaluation of a configuration if it gains enough of the step, else ``best``."""
    if not keeps(choice):
        return best
    bounds = evaluator.bounds(choice)
    most = (1 - _LEAST_GAIN) * best.step
    if bounds.step > most:
        return best
    result = evaluate(evaluator, choice, bounds)
    return result if result.status == "simulated" and result.step <= most else best
