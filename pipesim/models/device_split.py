"""Splits of layers by local search: such that devices are balanced, or a simulation is fastest.

`pipesim.balanced_split` is exact for devices with one stage each. For others, this is an iterated
local search (Lourenço, Martin and Stützle, "Iterated Local Search", 2003) over the borders
between stages. A local search moves borders as long as that improves the split. It starts from
several splits, and then from perturbations of the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Differences below this share of the largest value do not count: they are rounding.
_EXACT = 1e-9
#: Most splits of a problem for which all of them are tried.
_FEW = 20_000
#: Number of stages times perturbations of the best split. Each starts a local search.
_PERTURBATIONS = 400
#: Number of stages times the most stages that a move of one layer goes past.
_SPAN = 4096


@dataclass(frozen=True)
class SplitProblem:
    """Layers, stages and devices of a split. A split is given by its borders.

    Borders are the first layer of each stage, and the number of layers at the end.

    Attributes
    ----------
    sums
        Sums of the values of all layers before each layer, of the modules beside the layers too;
        shape ``(n_values, n_layers + 1)``. The first value is seconds, others are bytes.
    ends
        Values of the modules that the first and the last stage have beside layers (embedding, and
        LM head); shape ``(n_values, 2)``.
    inputs
        Bytes of the input of a stage that begins with each layer; shape ``(n_layers + 1,)``.
    least
        Fewest layers of each stage; shape ``(n_stages,)``.
    load
        Micro-batches of each stage that a device computes, as a share; shape
        ``(n_devices, n_stages)``.
    other_load
        Seconds of each device besides those of layers, such as of messages that block it.
    held
        Numbers of each value of each stage, then of each stage's input, that a device holds at
        once; one row a moment; shape ``(n_moments, n_values * n_stages)``.
    holder
        Device of each moment; shape ``(n_moments,)``.
    limit
        Most bytes of those at each moment; shape ``(n_moments,)``.
    least_seconds
        Lower bounds, which can be added, of the seconds of a step that a device computes: for each
        layer, and before and after them for the other modules of the first and the last stage.
        Shape ``(n_layers + 2,)``.
    """

    sums: Floats
    ends: Floats
    inputs: Floats
    least: Ints
    load: Floats
    other_load: Floats
    held: Floats
    holder: Ints
    limit: Floats
    least_seconds: Floats

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.inputs) - 1

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.least)

    def stage_values(self, borders: Ints) -> Floats:
        """Return the values of stages; shape ``(n_values, n_splits, n_stages)``."""
        values: Floats = self.sums[:, borders[:, 1:]] - self.sums[:, borders[:, :-1]]
        values[:, :, 0] += self.ends[:, :1]
        values[:, :, -1] += self.ends[:, 1:]
        return values

    def loads(self, borders: Ints) -> Floats:
        """Return the seconds of each device a micro-batch; shape ``(n_splits, n_devices)``."""
        seconds: Floats = self.stage_values(borders)[0] @ self.load.T
        return seconds + self.other_load

    def lower_bound(self, borders: Ints) -> Floats:
        """Return a lower bound of the seconds of a step; shape ``(n_splits,)``."""
        edges = borders + 1
        edges[:, 0], edges[:, -1] = 0, self.n_layers + 2
        stages = np.diff(np.concatenate([[0.0], self.least_seconds.cumsum()])[edges], axis=1)
        bound: Floats = (stages @ self.load.T).max(axis=1)
        return bound

    def held_bytes(self, borders: Ints) -> Floats:
        """Return the bytes at each moment; shape ``(n_splits, n_moments)``."""
        values = self.stage_values(borders)[1:]
        stages = np.concatenate([*values, self.inputs[borders[:, :-1]]], axis=1)
        nbytes: Floats = stages @ self.held.T
        return nbytes

    def peak_bytes(self, borders: Ints) -> Floats:
        """Return the most bytes that each device holds with one split."""
        peak = np.zeros(len(self.load))
        np.maximum.at(peak, self.holder, self.held_bytes(borders[None])[0])
        return peak

    def excess(self, borders: Ints) -> Floats:
        """Return the bytes beyond the limit, as a sum over moments; shape ``(n_splits,)``."""
        if not len(self.limit):
            return np.zeros(len(borders))
        over: Floats = np.maximum(0.0, self.held_bytes(borders) - self.limit).sum(axis=1)
        return over

    def keys(self, borders: Ints, even: bool = True) -> Floats:
        """Return the objectives to minimize, most important first; shape ``(3 or 4, n_splits)``.

        They are bytes beyond the limit, seconds of the busiest device, and the sum of squares of
        the seconds: of stages, if ``even``, and of devices.
        """
        stages, loads = self.stage_values(borders)[0], self.loads(borders)
        squares = [(loads**2).sum(axis=1)]
        if even:
            squares.insert(0, (stages**2).sum(axis=1))
        return np.array([self.excess(borders), loads.max(axis=1), *squares])


def balanced_borders(problem: SplitProblem, starts: Sequence[Ints], seed: int = 0) -> Ints:
    """Return the borders of the best split that the search finds.

    The best split has the fewest bytes beyond the limit. Among such splits, its busiest device has
    the fewest seconds. Among these, its stages are the most even. All splits are tried if there are
    few. Otherwise the search begins with ``starts``, and ``seed`` is that of the perturbations.
    """
    if n_splits(problem) <= _FEW:
        return _best_of(problem, all_borders(problem))
    random = np.random.default_rng(seed)
    best = _best_of(problem, np.array([_local_optimum(problem, start, False) for start in starts]))
    for _ in range(_PERTURBATIONS // problem.n_stages if problem.n_stages > 2 else 0):
        optimum = _local_optimum(problem, perturbed_borders(problem, best, random), False)
        best = _best_of(problem, np.array([best, optimum]))
    return _local_optimum(problem, best, True)


def n_splits(problem: SplitProblem) -> int:
    """Return the number of splits of a problem."""
    spare = problem.n_layers - int(problem.least.sum())
    return comb(spare + problem.n_stages - 1, problem.n_stages - 1)


def all_borders(problem: SplitProblem) -> Ints:
    """Return the borders of all splits; shape ``(n_splits(problem), n_stages + 1)``."""
    spare, n = problem.n_layers - int(problem.least.sum()), problem.n_stages
    # Bars between the layers to spare, as in the count of such splits; a bar takes a place too.
    # One stage leaves no bars, of which there is one choice.
    bars = list(combinations(range(spare + n - 1), n - 1))
    return _between(problem, np.array(bars, dtype=np.int64).reshape(len(bars), n - 1))


def random_borders(problem: SplitProblem, random: np.random.Generator) -> Ints:
    """Return the borders of a random split; each split is as likely as the others."""
    spare, n = problem.n_layers - int(problem.least.sum()), problem.n_stages
    bars = np.sort(random.choice(spare + n - 1, n - 1, replace=False))
    borders: Ints = _between(problem, bars[None])[0]
    return borders


def _between(problem: SplitProblem, bars: Ints) -> Ints:
    """Return the borders of splits from the places of bars between the layers to spare."""
    inner = bars - np.arange(problem.n_stages - 1) + np.cumsum(problem.least)[:-1]
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, problem.n_layers)))


def _best_of(problem: SplitProblem, borders: Ints, even: bool = True) -> Ints:
    kept = np.arange(len(borders))
    for row in problem.keys(borders, even):
        values = row[kept]
        kept = kept[values <= values.min() + _EXACT * abs(values).max()]
    best: Ints = borders[kept[0]]
    return best


def _local_optimum(problem: SplitProblem, borders: Ints, even: bool) -> Ints:
    """Return a local optimum: borders that no move improves. Each step takes the best move."""
    while True:
        # The first of equals is kept, so that equal splits end the search.
        best = _best_of(problem, np.vstack([borders, neighbours(problem, borders)]), even)
        if (best == borders).all():
            return borders
        borders = best


def neighbours(problem: SplitProblem, borders: Ints) -> Ints:
    """Return the splits that one move makes of another; shape ``(n_splits, n_stages + 1)``.

    - A layer goes from one stage to another: all borders between them move by one.
    - One border moves, to anywhere between its neighbours.
    """
    n = problem.n_stages
    # Moving borders first..last by one, up or down, takes a layer from a stage for another.
    first, last = np.triu_indices(n - 1)
    near = last - first <= _SPAN // n
    first, last, column = first[near] + 1, last[near] + 1, np.arange(n + 1)
    shift = (first[:, None] <= column) & (column <= last[:, None])
    low, high = borders[:-2] + problem.least[:-1], borders[2:] - problem.least[1:]
    places = [(i + 1, place) for i in range(n - 1) for place in range(low[i], high[i] + 1)]
    border, place = np.array(places, dtype=np.int64).reshape(-1, 2).T
    moved = np.repeat(borders[None], len(places), axis=0)
    moved[np.arange(len(places)), border] = place
    table = np.concatenate([borders + shift, borders - shift, moved])
    is_possible = (np.diff(table, axis=1) >= problem.least).all(axis=1)
    possible: Ints = table[is_possible & (table != borders).any(axis=1)]
    return possible


def perturbed_borders(problem: SplitProblem, borders: Ints, random: np.random.Generator) -> Ints:
    """Return a perturbation: some borders move to random places between their neighbours."""
    borders = borders.copy()
    for border in random.integers(1, problem.n_stages, 3).tolist():
        low = borders[border - 1] + problem.least[border - 1]
        high = borders[border + 1] - problem.least[border]
        borders[border] = random.integers(low, high + 1)
    return borders


def layer_counts(borders: Ints) -> tuple[int, ...]:
    """Return the layers of each stage."""
    return tuple(np.diff(borders).tolist())


# Splits with which a schedule takes the least time, by simulation

#: Splits that are tried before a search ends in which none may be used.
_VAIN = 64


@dataclass
class SplitSearch:
    """Local searches over splits, each simulated once, up to ``most`` simulations.

    ``makespan`` is infinite for a split that does not fit. The ``width`` most promising moves from
    a split are tried, or all.
    """

    problem: SplitProblem
    makespan: Callable[[Ints], float]
    most: int
    width: int | None = None
    seconds: dict[tuple[int, ...], float] = field(default_factory=dict)

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
            table = table[order[self.problem.lower_bound(table[order]) < limit]][: self.width]
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

    If there are at most ``most`` splits, it is the fastest of all. Otherwise it is never slower
    than any of ``starts``. Perturbations of the best split and random splits, by ``seed``, start
    local searches in turn, as long as any of the ``most`` simulations besides those of ``starts``
    are left. ``makespan`` is infinite for a split that does not fit. ``problem`` tells which moves
    are tried first.
    """
    random = np.random.default_rng(seed)
    simulations = SplitSearch(problem, makespan, most + len(starts))
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
