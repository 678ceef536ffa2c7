"""Stages of a plan: bounds, steps, refinement and noise, each with a progress bar and Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from pipesim.errors import ArgumentError
from pipesim.planning.configurations.choice import Evaluation, PlanChoice, invalid
from pipesim.planning.configurations.filters import Filters, keeps
from pipesim.planning.configurations.refinement import refined
from pipesim.planning.configurations.search import Search, Workers
from pipesim.planning.configurations.search_space import SearchSpace
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import simulate_many

if TYPE_CHECKING:
    from tqdm.auto import tqdm


#: Scenarios of noise for each of the best.
_SCENARIOS = 200


def fill_search(
    search: Search, space: SearchSpace, filters: Filters, progress: bool | None
) -> None:
    """Add the configurations of a space to a search; Ctrl-C leaves the rest out."""
    try:
        choices, ruled_out = space.choices(search.evaluator.problem)
        search.evaluations += ruled_out
        with _bar(progress, len(choices), "bounds") as bar:
            search.add(_split(search, choices, filters, bar))
    except KeyboardInterrupt:
        search.complete = False
        return
    is_empty = not search.left and all(x.status == "invalid" for x in search.evaluations)
    if choices and filters and is_empty:
        raise ArgumentError(f"where keeps none of {len(choices)} configurations; relax it")


def _split(
    search: Search, choices: Sequence[PlanChoice], filters: Filters, bar: tqdm[NoReturn]
) -> Iterator[PlanChoice]:
    """Yield configurations with their splits; rule out those that have none."""
    problem = search.evaluator.problem
    for choice in choices:
        bar.update()
        with_split = search.evaluator.with_split(choice)
        if with_split is None:
            reason = f"{problem.n_layers} layers cannot be split into {choice.n_stages} stages"
            reason += " evenly" * problem.is_even
            search.evaluations.append(invalid(choice, reason))
        elif keeps(filters, with_split):
            yield with_split


def run_search(search: Search, workers: Workers, progress: bool | None) -> None:
    """Run a search with a progress bar, unless it was interrupted."""
    if not search.complete:
        return
    with _bar(progress, len(search.left), "steps") as bar:
        search.run(workers, bar.update)


def _bar(progress: bool | None, total: int | None, what: str) -> tqdm[NoReturn]:
    """Return a progress bar; by default it is shown on a terminal."""
    from pipesim.utils.packages import tqdm

    hidden = None if progress is None else not progress
    return tqdm(total=total, disable=hidden, unit="configuration", desc=what)


def by_step(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the simulated configurations by step, then by memory."""
    rows = [x for x in evaluations if x.status == "simulated"]
    return sorted(rows, key=lambda x: (x.step, x.memory, str(x.choice)))


def with_refined(
    search: Search, rows: list[Evaluation], filters: Filters, progress: bool | None
) -> list[Evaluation]:
    """Return the ranked configurations with refined ones among them."""
    with _bar(progress, None, "refinement") as bar:

        def counted(choice: PlanChoice) -> bool:
            bar.update()
            return keeps(filters, choice)

        try:
            better = refined(search.evaluator, rows, counted)
        except KeyboardInterrupt:
            search.complete = False
            return rows
    return by_step([*rows, *better])


def with_noise(
    search: Search, rows: list[Evaluation], noise: Noise, percentile: float, progress: bool | None
) -> list[Evaluation]:
    """Return ranked configurations with the best ones ranked by a percentile of noisy steps."""
    problem = search.evaluator.problem
    best: list[Evaluation] = []
    try:
        with _bar(progress, min(search.n_best, len(rows)), "noise") as bar:
            for row in rows[: search.n_best]:
                costs = problem.costs(row.choice)
                graph = problem.graph(row.choice, problem.schedule(row.choice, costs), costs)
                many = simulate_many(graph, costs, noise, _SCENARIOS, n_jobs=1, progress=False)
                step = float(np.percentile(many.makespan, percentile))
                best.append(row._replace(noisy_step=step))
                bar.update()
    except KeyboardInterrupt:
        search.complete = False
    return sorted(best, key=lambda x: x.noisy_step) + rows[len(best) :]
