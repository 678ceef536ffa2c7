"""Search configurations in the order of their bounds, without those that cannot win."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from pipesim.errors import ArgumentError, PipeError, check_function, check_list
from pipesim.models.device_split import Ints, SplitSearch, layer_counts
from pipesim.planning.choice import Evaluation, PlanChoice, invalid
from pipesim.planning.plan_bounds import Bounds
from pipesim.planning.plan_evaluator import Evaluator
from pipesim.planning.problem import PlanProblem
from pipesim.planning.search_space import SearchSpace
from pipesim.simulation.noise import Noise
from pipesim.simulation.scenarios import simulate_many
from pipesim.sweeps.worker_pool import LostCall, run_calls
from pipesim.utils.texts import format_bytes, format_time

if TYPE_CHECKING:
    from tqdm.std import tqdm


#: Configurations of one call of a worker, and calls of a round for each worker.
_BATCH, _CALLS = 50, 2
#: Most processes for which rounds are cut.
_MOST_WORKERS = 4096


@dataclass(frozen=True)
class Workers:
    """Number of processes, and backend of joblib, as for `pipesim.sweep`."""

    n_jobs: int
    backend: str | None

    @property
    def is_this_process(self) -> bool:
        """Whether configurations are evaluated without any worker."""
        return self.n_jobs == 1 and self.backend is None


@dataclass
class PlanSearch:
    """Evaluations of configurations, and those that are left, with their bounds, by bound.

    The ``n_best`` are to be found. ``complete`` is False after an interrupt.
    """

    evaluator: Evaluator
    n_best: int
    evaluations: list[Evaluation] = field(default_factory=list)
    left: list[tuple[PlanChoice, Bounds]] = field(default_factory=list)
    complete: bool = True
    _steps: list[float] = field(default_factory=list)
    _front: list[tuple[float, float]] = field(default_factory=list)

    def add(self, choices: Iterable[PlanChoice]) -> None:
        """Add configurations with their splits; those that fit in no order are done at once."""
        for choice in choices:
            bounds = self.evaluator.bounds(choice)
            unfit = self.evaluator.unfit(choice, bounds)
            if unfit is not None:
                self.evaluations.append(unfit)
            else:
                self.left.append((choice, bounds))
        self.left.sort(key=lambda row: row[1].step)

    def run(self, workers: Workers, report: Callable[[int], object]) -> None:
        """Evaluate what may win; ``report`` gets the number of configurations that are done."""
        rounds = self._rounds_here() if workers.is_this_process else self._rounds(workers)
        try:
            with closing(rounds):  # type: ignore[type-var]  # a generator
                for done in rounds:
                    report(done)
        except KeyboardInterrupt:
            self.complete = False

    def _rounds_here(self) -> Iterator[int]:
        """Evaluate in this process, one by one; yield how many more are done."""
        rows, self.left = self.left, []
        for place, (choice, bounds) in enumerate(rows):
            try:
                self._finish(self._result(choice, bounds))
            except BaseException:
                self.left = rows[place:]
                raise
            yield 1

    def _rounds(self, workers: Workers) -> Iterator[int]:
        """Evaluate in rounds of calls to workers; yield how many more are done."""
        from pipesim.utils.packages import joblib

        n_jobs = min(workers.n_jobs, _MOST_WORKERS)
        n_calls = _CALLS * (n_jobs if n_jobs > 0 else max(2, int(joblib.cpu_count())))
        while self.left:
            batches, n_done = self._next_batches(n_calls)
            yield n_done
            incumbents = Incumbents(self.n_best, tuple(self._steps), tuple(self._front))
            calls = {
                str(k): (self.evaluator.problem, [choice for choice, _ in batch], incumbents)
                for k, batch in enumerate(batches)
            }
            running = run_calls(
                evaluate_all, calls, n_jobs=min(n_jobs, max(2, len(calls))), backend=workers.backend
            )
            with closing(running) as finished:
                for key, result in finished:
                    rows = batches[int(key)]
                    if isinstance(result, LostCall):
                        result = [_failed(choice, bounds, result.reason) for choice, bounds in rows]
                    for evaluation in result:
                        self._finish(evaluation)
                    yield len(rows)

    def _next_batches(self, n: int) -> tuple[list[list[tuple[PlanChoice, Bounds]]], int]:
        """Take the next batches; return them, and how many configurations cannot win."""
        chosen: list[tuple[PlanChoice, Bounds]] = []
        n_done = place = 0
        while place < len(self.left) and len(chosen) < n * _BATCH:
            choice, bounds = self.left[place]
            place += 1
            if self._cannot_win(bounds):
                self._finish(_cannot_win(choice, bounds))
                n_done += 1
            else:
                chosen.append((choice, bounds))
        self.left = self.left[place:]
        graph_settings = attrgetter(
            "schedule", "pipeline_parallel", "n_chunks", "n_microbatches", "data_parallel",
            "shard_optimizer", "n_slices",
        )  # fmt: skip

        def key(row: tuple[PlanChoice, Bounds]) -> tuple[Any, ...]:
            choice, _ = row
            return *graph_settings(choice), str(choice.merged), choice.group_size or 0

        chosen.sort(key=key)  # those of one worker share graphs
        return [chosen[k : k + _BATCH] for k in range(0, len(chosen), _BATCH)], n_done

    def _result(self, choice: PlanChoice, bounds: Bounds) -> Evaluation:
        """Return the evaluation of a configuration, or that it cannot win."""
        if self._cannot_win(bounds):
            return _cannot_win(choice, bounds)
        return evaluate(self.evaluator, choice, bounds, self._cannot_win)

    def _cannot_win(self, bounds: Bounds) -> bool:
        """Return whether bounds rule out a place among the best and one on the front."""
        if len(self._steps) < self.n_best or bounds.step <= -self._steps[0]:
            return False
        memory = float(bounds.memory.max())
        return any(step <= bounds.step and held <= memory for step, held in self._front)

    def _finish(self, evaluation: Evaluation) -> None:
        """Add an evaluation, and keep the best steps and the front."""
        self.evaluations.append(evaluation)
        if evaluation.status != "simulated":
            return
        step, memory = evaluation.step, evaluation.memory
        if len(self._steps) < self.n_best:
            heapq.heappush(self._steps, -step)
        else:
            heapq.heappushpop(self._steps, -step)
        if not any(a <= step and b <= memory for a, b in self._front):
            self._front = [(a, b) for a, b in self._front if not (step <= a and memory <= b)]
            self._front.append((step, memory))


def evaluate(
    evaluator: Evaluator,
    choice: PlanChoice,
    bounds: Bounds,
    cannot_win: Callable[[Bounds], bool] = lambda _: False,
) -> Evaluation:
    """Return the evaluation of a configuration; an error of the project makes it invalid.

    Memory comes first, since it needs no simulation.
    """
    try:
        memory = evaluator.memory(choice)
        if memory is not None:
            unfit = evaluator.unfit(choice, bounds, memory)
            if unfit is not None:
                return unfit
            bounds = Bounds(bounds.step, memory)
            if cannot_win(bounds):
                return _cannot_win(choice, bounds)
        return evaluator.evaluate(choice, bounds, memory)
    except PipeError as error:
        return _failed(choice, bounds, str(error))


class Incumbents(NamedTuple):
    """Best steps and front of a search, by which workers rule configurations out.

    Attributes are those of `PlanSearch`, as tuples.
    """

    n_best: int
    steps: tuple[float, ...]
    front: tuple[tuple[float, float], ...]


def evaluate_all(
    problem: PlanProblem, choices: Sequence[PlanChoice], incumbents: Incumbents
) -> list[Evaluation]:
    """Return the evaluations of configurations, in a worker."""
    search = PlanSearch(
        Evaluator(problem), incumbents.n_best,
        _steps=list(incumbents.steps), _front=list(incumbents.front),
    )  # fmt: skip
    rows = [(choice, search.evaluator.bounds(choice)) for choice in choices]
    for choice, bounds in sorted(rows, key=lambda row: row[1].step):
        search._finish(search._result(choice, bounds))
    return search.evaluations


def _failed(choice: PlanChoice, bounds: Bounds, reason: str) -> Evaluation:
    """Return the evaluation of a configuration that could not be simulated."""
    return invalid(choice, reason)._replace(bound=bounds.step)


def _cannot_win(choice: PlanChoice, bounds: Bounds) -> Evaluation:
    """Return the evaluation of a configuration that its bounds rule out."""
    nan, memory = float("nan"), float(bounds.memory.max())
    reason = (
        f"takes at least {format_time(bounds.step)} and {format_bytes(memory)} a device: another "
        "one is as good or better in both"
    )
    return Evaluation(choice, nan, bounds.step, memory, nan, "cannot win", reason)


#: Functions of users that all must keep a configuration.
Filters = Sequence[Callable[[PlanChoice], bool]]


def checked_filters(where: Any) -> Filters:
    """Return the functions that configurations must pass."""
    listed = [] if where is None else [where] if callable(where) else where
    functions = check_list("where", listed, "a function, or a list of functions")
    for function in functions:
        check_function("where", function, "where(choice)")
    return functions


def keeps(filters: Filters, choice: PlanChoice) -> bool:
    """Return whether all functions keep a configuration."""
    for function in filters:
        try:
            answer: object = function(choice)
        except Exception as error:
            raise ArgumentError(
                f"where raised {type(error).__name__} for {choice}: {error}; it must return True "
                "or False"
            ) from error
        if not isinstance(answer, (bool, np.bool_)):
            raise ArgumentError(
                f"where must return True or False, got {answer!r:.60} for {choice}"
                + "; it may lack a return" * (answer is None)
            )
        if not answer:
            return False
    return True


# Refine the best configurations: splits by simulation, and orders for their costs.

#: Configurations that are refined; most simulations for each, and most moves from a split.
_BEST, _SIMULATIONS, _WIDTH = 3, 61, 24
#: Least gain of a step by a change, as a share of the step; below are ties.
_LEAST_GAIN = 1e-3


def refined(
    evaluator: Evaluator, ranked: Sequence[Evaluation], keeps: Callable[[PlanChoice], bool]
) -> list[Evaluation]:
    """Return new evaluations that are better than those of the best configurations.

    Layers move to other stages as long as the simulated step takes less time. A schedule that can
    order its tasks for costs does so.
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
    """Return the best evaluation that a local search over splits reaches."""
    if best.choice.pipeline_parallel == 1:
        return best

    def step(borders: Ints) -> float:
        nonlocal best
        choice = replace(best.choice, layers_per_stage=layer_counts(borders))
        if choice != best.choice:
            best = _shorter(evaluator, best, choice, keeps)
        return best.step if choice == best.choice else np.inf

    search = SplitSearch(evaluator.split_problem(best.choice), step, _SIMULATIONS, _WIDTH)
    search.local_optimum(np.cumsum([0, *best.choice.layers_per_stage]))
    return best


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


# Stages of a plan: bounds, steps, refinement and noise, each with a progress bar and Ctrl-C.

#: Scenarios of noise for each of the best.
_SCENARIOS = 200


def fill_search(
    search: PlanSearch, space: SearchSpace, filters: Filters, progress: bool | None
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
    search: PlanSearch, choices: Sequence[PlanChoice], filters: Filters, bar: tqdm[NoReturn]
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


def run_search(search: PlanSearch, workers: Workers, progress: bool | None) -> None:
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
    search: PlanSearch, rows: list[Evaluation], filters: Filters, progress: bool | None
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
    search: PlanSearch,
    rows: list[Evaluation],
    noise: Noise,
    percentile: float,
    progress: bool | None,
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
