"""Splits of layers with which a schedule takes the least time, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipesim.costs.device_split import (
    Ints,
    SplitProblem,
    all_borders,
    n_splits,
    neighbours,
    perturbed_borders,
    random_borders,
)

#: Times that differ by this share are equal: the rest is rounding.
_EXACT = 1e-9
#: Splits that are tried before a search ends in which none may be used.
_VAIN = 64


class _Simulations:
    """Seconds of splits, each simulated once, up to a number of simulations."""

    def __init__(self, problem: SplitProblem, makespan: Callable[[Ints], float], most: int) -> None:
        self.problem, self.makespan, self.most = problem, makespan, most
        self.seconds: dict[tuple[int, ...], float] = {}

    @property
    def spent(self) -> bool:
        """Whether no simulation is left, or none of several splits may be used.

        Splits with the fewest bytes beyond the limit come first, so that others fit even less.
        """
        if len(self.seconds) < min(self.most, _VAIN):
            return False
        return len(self.seconds) >= self.most or min(self.seconds.values()) == np.inf

    def time(self, borders: Ints) -> float:
        """Return the seconds of a split."""
        key = tuple(borders.tolist())
        if key not in self.seconds:
            self.seconds[key] = self.makespan(borders)
        return self.seconds[key]

    def fastest(self, splits: Sequence[Ints]) -> Ints:
        """Return the fastest of splits, of those with the fewest bytes beyond the limit first."""
        order = np.argsort(self.problem.excess(np.array(splits)), kind="stable")
        best: Ints = splits[order[0]]
        for index in order.tolist():
            if self.spent:
                break
            best = min(best, splits[index], key=self.time)
        return best

    def local_optimum(self, borders: Ints) -> Ints:
        """Return a local optimum; the local search tries moves that balance devices first."""
        while not self.spent:
            table = neighbours(self.problem, borders)
            excess, busiest, squares, _ = self.problem.keys(table)
            limit = self.time(borders) * (1 - _EXACT)
            order = np.lexsort((squares, busiest.round(12), excess))
            table = table[order[self.problem.lower_bound(table[order]) < limit]]
            faster = (x for x in table if not self.spent and self.time(x) < limit)
            step = next(faster, None)
            if step is None:
                return borders
            borders = step
        return borders


def fastest_borders(
    problem: SplitProblem,
    starts: Sequence[Ints],
    makespan: Callable[[Ints], float],
    most: int,
    seed: int = 0,
) -> Ints:
    """Return the borders of the fastest split that a search by simulation finds.

    If there are at most ``most`` splits, it is the fastest of all.

    Parameters
    ----------
    problem
        Layers, stages and devices, to tell which moves are tried first.
    starts
        Borders of the first splits. The result is never slower than any of them.
    makespan
        Seconds of a step with a split; infinite for a split that does not fit.
    most
        Most simulations, besides those of ``starts``.
    seed
        Seed of perturbations of the best split and of random splits. In turn, each starts a local
        search, as long as simulations are left.
    """
    random = np.random.default_rng(seed)
    simulations = _Simulations(problem, makespan, most + len(starts))
    if n_splits(problem) <= most:
        return simulations.fastest([*starts, *all_borders(problem)])
    best = min(starts, key=simulations.time)
    for start in sorted(starts, key=simulations.time):
        best = min(best, simulations.local_optimum(start), key=simulations.time)
    for number in range(most if problem.n_stages > 2 else 0):
        if simulations.spent:
            break
        changed = (
            perturbed_borders(problem, best, random)
            if number % 2
            else random_borders(problem, random)
        )
        changed = simulations.local_optimum(changed)
        # Among equals the newest is kept, from which other splits are near.
        best = min(changed, best, key=simulations.time)
    return best
