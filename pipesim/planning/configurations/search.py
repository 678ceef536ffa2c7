"""Search configurations in the order of their bounds, without those that cannot win."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from pipesim.errors import PipeError
from pipesim.planning.configurations.bounds import Bounds
from pipesim.planning.configurations.choice import Evaluation, PlanChoice, invalid
from pipesim.planning.configurations.evaluator import Evaluator
from pipesim.planning.configurations.problem import PlanProblem
from pipesim.sweeps.worker_pool import LostCall, run_calls
from pipesim.utils.units import format_bytes, format_time

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
class Search:
    """Evaluations of configurations, and those that are left.

    Attributes
    ----------
    evaluator
        Evaluates configurations.
    n_best
        Number of the best to find.
    evaluations
        Configurations that are done.
    left
        Configurations that are left, with their bounds, by bound.
    complete
        False after an interrupt.
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
        n_jobs = min(workers.n_jobs, _MOST_WORKERS)
        n_calls = _CALLS * (n_jobs if n_jobs > 0 else _cores())
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
        chosen.sort(key=lambda row: _shape(row[0]))  # those of one worker share graphs
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

    Attributes are those of `Search`, as tuples.
    """

    n_best: int
    steps: tuple[float, ...]
    front: tuple[tuple[float, float], ...]


def evaluate_all(
    problem: PlanProblem, choices: Sequence[PlanChoice], incumbents: Incumbents
) -> list[Evaluation]:
    """Return the evaluations of configurations, in a worker."""
    search = Search(
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
    reason = (
        f"takes at least {format_time(bounds.step)} and {format_bytes(float(bounds.memory.max()))} "
        "a device: another one is as good or better in both"
    )
    nan = float("nan")
    memory = float(bounds.memory.max())
    return Evaluation(choice, nan, bounds.step, memory, nan, "cannot win", reason)


def _shape(choice: PlanChoice) -> tuple[object, ...]:
    """Return the values that a graph depends on."""
    return (choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_microbatches,
            choice.data_parallel, choice.shard_optimizer, choice.n_slices)  # fmt: skip


def _cores() -> int:
    """Return the number of cores that workers may use."""
    from pipesim.utils.packages import joblib

    return max(2, int(joblib.cpu_count()))
