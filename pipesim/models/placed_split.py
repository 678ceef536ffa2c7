"""Splits of a model's layers for a placement, a schedule or a graph."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import get_args

import numpy as np

from pipesim.costs.device_split import Floats, Ints, SplitProblem, balanced_borders, sizes_of
from pipesim.costs.fastest_split import fastest_borders
from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    balanced_split,
    check_partition,
    checked_split,
)
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    CostsError,
    check_count,
    number,
)
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.split_problem import LayerModel, split_problem
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

__all__ = ["Placed", "is_word", "placed_sizes"]

#: What stages are balanced for.
Placed = Placement | Schedule | TaskGraph
#: Most layers of a model whose split is searched.
_MOST_LAYERS = 4096
#: Most simulations of a search, and most tasks in all of them.
_SIMULATIONS, _TASKS = 600, 3_000_000


def is_word(split: object) -> bool:
    """Return whether a split is ``"even"`` or ``"balanced"``."""
    return isinstance(split, str) and split in get_args(LayerPartition)


def placed_sizes(
    model: LayerModel,
    split: Split,
    name: str,
    *,
    partition: LayerPartition | None,
    placement: Placed | None,
    memory_limit: float | None,
) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None for a split without placement.

    ``name`` is the name of the argument ``split``. `Layers.costs` has the arguments and errors.
    """
    limit = _checked_limit(memory_limit)
    if placement is None:
        if is_word(split):
            raise ArgumentError(
                f"{name}={split!r} needs the number of stages: give placement=, such as "
                f"schedule.placement, or {name}=4 with partition={split!r}"
            )
        if limit is not None:
            raise ArgumentError(
                "memory_limit needs to know how many micro-batches a device holds; give a schedule "
                "or a graph as placement="
            )
        return None
    if not isinstance(placement, Placed):
        raise ArgumentTypeError(
            "placement must be a pipesim.Placement, a Schedule or a TaskGraph, got "
            f"{placement!r:.60} ({type(placement).__name__})"
        )
    target = placement.placement if isinstance(placement, Schedule) else placement
    word = _word(split, name, partition, target.n_stages)
    if word == "balanced":
        return _balanced(model, placement, limit, name)
    if limit is not None:
        raise ArgumentError(
            f'memory_limit chooses among the splits of "balanced"; it has no effect on {name}='
            f"{split!r:.60}"
        )
    if word == "even":
        split = target.n_stages
    sizes = checked_split(split, model.n_layers, name, ends_may_be_empty=model.has_ends)
    if len(sizes) != target.n_stages:
        raise ArgumentError(
            f"{name} has {len(sizes)} stages, but the placement has {target.n_stages}"
        )
    return sizes


def _word(split: object, name: str, partition: str | None, n_stages: int) -> str | None:
    """Return how layers are divided, or None if the layers of each stage are given."""
    if is_word(split):
        if partition not in (None, split):
            raise ArgumentError(f"{name}={split!r}, but partition={partition!r}; give one of them")
        return str(split)
    if not check_partition(partition, split, name):
        return None
    if isinstance(split, Integral) and check_count(name, split) != n_stages:
        raise ArgumentError(
            f'{name}={split}, but the placement has {n_stages} stages; give "balanced" or "even"'
        )
    return partition or "balanced"


def _checked_limit(memory_limit: float | None) -> float | None:
    """Return a limit of memory as a float."""
    if memory_limit is None:
        return None
    limit = number(memory_limit)
    if limit is None or not 0 < limit < np.inf:
        raise ArgumentError(
            f"memory_limit must be bytes of a device, finite and above 0, got {memory_limit!r:.60}"
        )
    return limit


def _balanced(
    model: LayerModel, placement: Placed, limit: float | None, name: str
) -> tuple[int, ...]:
    """Return the balanced split."""
    if model.n_layers > _MOST_LAYERS:
        raise ArgumentError(
            f"{name}: a balanced split of {model.n_layers} layers would take too long to find; "
            f"give the layers of each stage, or at most {_MOST_LAYERS} layers"
        )
    if isinstance(placement, Placement):
        if limit is not None:
            raise ArgumentError(
                "memory_limit needs to know how many micro-batches a device holds; give the "
                "schedule as placement=, or its graph"
            )
        problem = _problem(model, placement, None, name)
        return sizes_of(balanced_borders(problem, [_first_borders(problem)]))
    graph = placement if isinstance(placement, TaskGraph) else lower(placement)
    return _fastest(model, graph, limit, name)


def _problem(
    model: LayerModel, target: Placement | TaskGraph, limit: float | None, name: str
) -> SplitProblem:
    """Return the problem, checked to have as many layers as the stages need."""
    needed = int(model.least(target.n_stages).sum())
    if needed > model.n_layers:
        raise ArgumentError(
            f"{name}: {model.n_layers} layers cannot be split into the placement's "
            f"{target.n_stages} stages, which need at least {needed}"
        )
    return split_problem(model, target, limit)


def _first_borders(problem: SplitProblem) -> Ints:
    """Return the borders of a split with balanced stages."""
    seconds = np.diff(problem.sums[0])
    if not problem.least[0]:
        seconds = np.concatenate([problem.ends[0, :1], seconds, problem.ends[0, 1:]])
    sizes = np.array(balanced_split(seconds.tolist(), problem.n_stages))
    sizes[[0, -1]] -= problem.least[0] == 0
    return np.concatenate([[0], sizes.cumsum()])


def _fastest(
    model: LayerModel, graph: TaskGraph, limit: float | None, name: str
) -> tuple[int, ...]:
    """Return the split with which a graph takes the least time, by simulation."""
    from pipesim.simulation.simulate import simulate

    def makespan(borders: Ints) -> float:
        """Return the seconds of a step, infinite for a split that does not fit."""
        timeline = simulate(graph, model.costs_of(sizes_of(borders)))
        fits = limit is None or (timeline.peak_memory <= limit).all()
        return float(timeline.makespan) if fits else np.inf

    problem = _problem(model, graph, limit, name)
    first = _first_borders(problem)
    problem = replace(problem, other_load=_other_load(problem, model, graph, first))
    if limit is not None:
        first = balanced_borders(problem, [first])
        peak = simulate(graph, model.costs_of(sizes_of(first))).peak_memory
        # Bytes that are no sums over layers, such as workspaces, from one split.
        others = peak - problem.peak_bytes(first)
        problem = replace(problem, limit=problem.limit - others[problem.holder])
    starts = [balanced_borders(problem, [first]), first]
    most = min(_SIMULATIONS, _TASKS // max(1, len(graph)))
    best = fastest_borders(problem, starts, makespan, most)
    if limit is not None and makespan(best) == np.inf:
        peak = simulate(graph, model.costs_of(sizes_of(best))).peak_memory
        raise CostsError(
            f"memory_limit={limit:.4g}: no split of {model.n_layers} layers was found that fits; "
            f"{list(sizes_of(best))} needs {peak.max():.4g} bytes on device {peak.argmax()}. Give "
            "smaller micro-batches, recompute, more devices, or another schedule"
        )
    return sizes_of(best)


def _other_load(
    problem: SplitProblem, model: LayerModel, graph: TaskGraph, borders: Ints
) -> Floats:
    """Return the seconds of each device a micro-batch besides layers, such as of messages."""
    seconds = model.costs_of(sizes_of(borders)).of(graph).duration
    on_compute = graph.on_compute
    busy = np.bincount(graph.device[on_compute], seconds[on_compute], graph.n_devices)
    other: Floats = busy / graph.n_microbatches - problem.loads(borders[None])[0]
    return other
