"""Splits of a model's layers for a placement, a schedule or a graph."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import get_args

from pipesim.costs.device_split import Floats, balanced_borders, layer_counts
from pipesim.costs.layer_split import LayerPartition, Split, check_partition, checked_split
from pipesim.errors import ArgumentError, ArgumentTypeError, check_count
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.splits.simulated_split import fastest_split
from pipesim.models.splits.split_problem import LayerModel, first_borders, split_problem
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.utils.units import Bytes

#: Argument ``placement``: devices of stages, without or with the order of tasks.
Placed = Placement | Schedule | TaskGraph
#: Most layers of a model whose split is searched.
_MOST_LAYERS = 4096
_NO_ORDER = (
    "memory_limit needs to know how many micro-batches a device holds; give the schedule as "
    "placement=, or its graph"
)


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
    memory_limit: Bytes | Sequence[Bytes] | None,
) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None for a split without placement.

    ``name`` is the name of the argument ``split``. `Layers.costs` has the arguments and errors.
    """
    if placement is None:
        _check_unplaced(split, name, memory_limit)
        return None
    if not isinstance(placement, Placed):
        raise ArgumentTypeError(
            "placement must be a pipesim.Placement, a Schedule or a TaskGraph, got "
            f"{placement!r:.60} ({type(placement).__name__})"
        )
    target = placement.placement if isinstance(placement, Schedule) else placement
    word = _word(split, name, partition, target.n_stages)
    limits = None
    if memory_limit is not None:
        limits = checked_memory_limit(memory_limit, target.n_devices)
    if word == "balanced":
        _check_stages(model, target.n_stages, name)
        return _balanced(model, placement, limits)
    if limits is not None:
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


def _check_unplaced(split: object, name: str, memory_limit: object) -> None:
    """Raise `ArgumentError` for a word or a memory limit, which need a placement."""
    if is_word(split):
        raise ArgumentError(
            f"{name}={split!r} needs the number of stages: give placement=, such as "
            f"schedule.placement, or {name}=4 with partition={split!r}"
        )
    if memory_limit is not None:
        raise ArgumentError(_NO_ORDER)


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


def _balanced(model: LayerModel, placement: Placed, limits: Floats | None) -> tuple[int, ...]:
    """Return the balanced split."""
    if not isinstance(placement, Placement):
        graph = placement if isinstance(placement, TaskGraph) else lower(placement)
        return fastest_split(model, graph, limits)
    if limits is not None:
        raise ArgumentError(_NO_ORDER)
    problem = split_problem(model, placement)
    first = first_borders(problem)
    if placement.n_paths == 1 and placement.n_stages == placement.n_devices:
        return layer_counts(first)  # devices are stages, and this split is exact
    return layer_counts(balanced_borders(problem, [first]))


def _check_stages(model: LayerModel, n_stages: int, name: str) -> None:
    """Raise `ArgumentError` unless a model has as many layers as stages need."""
    needed = int(model.least(n_stages).sum())
    if needed > model.n_layers:
        raise ArgumentError(
            f"{name}: {model.n_layers} layers cannot be split into the placement's {n_stages} "
            f"stages, which need at least {needed}"
        )
    if model.n_layers > _MOST_LAYERS:
        raise ArgumentError(
            f"{name}: a balanced split of {model.n_layers} layers would take too long to find; "
            f"give the layers of each stage, or at most {_MOST_LAYERS} layers"
        )
