"""Costs that differ between micro-batches: which micro-batches have equal costs, and their rows.

Micro-batches with equal values in all fields share a class. `pipesim.costs.pricing` prices the
kinds of a graph once a class, so that costs of equal micro-batches are found as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.rows import ROWS
from pipesim.errors import CostsError, check_count
from pipesim.graph.copies import copy_of_replicas
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from pipesim.costs.costs import Costs
    from pipesim.graph.graph import TaskGraph


Floats = NDArray[np.float64]
#: Fields whose values may differ between micro-batches.
_VARYING = tuple(name for name, row in ROWS.items() if row.varies)


class CostClasses(NamedTuple):
    """Costs of the micro-batches of a graph, each with one value a stage."""

    costs: tuple[Costs, ...]  # of each class, then their averages for tasks on whole stages
    number: Ints  # class of each task

    def rows(self, kind: Ints, n_kinds: int) -> Ints:
        """Return the row of each task in tables that have the kinds of each class in turn."""
        rows: Ints = (self.number * n_kinds + kind).astype(np.int32)
        return rows


def n_microbatches_of(costs: Costs) -> int | None:
    """Return the number of micro-batches that costs have values for; None for one for all."""
    sizes = {name: max(map(len, rows)) for name, rows in _rows(costs).items()}
    if len({*sizes.values()}) > 1:
        texts = ", ".join(f"{name} {n}" for name, n in sizes.items())
        raise CostsError(
            f"fields have values of different numbers of micro-batches: {texts}; give each field "
            "one value, one a stage, or one a stage and micro-batch"
        )
    return max(sizes.values(), default=None)


def n_priced(costs: Costs) -> int | None:
    """Return the number of micro-batches that costs are of, though all may be equal; or None."""
    work = costs.work
    return costs.n_microbatches or (None if work is None else work.n_microbatches)


def n_stages_of(value: object) -> int | None:
    """Return the number of stages that a field has values for; None for one for all."""
    if not isinstance(value, tuple) or (len(value) == 1 and isinstance(value[0], tuple)):
        return None
    return len(value)


def _entries(name: str, value: Any) -> tuple[Any, ...]:
    """Return the number, or the row of micro-batches, of each stage or skip; empty for one."""
    if not isinstance(value, tuple):
        return ()
    return tuple(size for _, size in value) if ROWS[name].item == "skip" else value


def _with_entries(name: str, value: Any, entries: Any) -> Any:
    """Return a value with other `_entries`."""
    if ROWS[name].item == "skip":
        return {skip: size for (skip, _), size in zip(value, entries, strict=True)}
    return entries if len(entries) > 1 else entries[0]


def _rows(costs: Costs) -> dict[str, list[tuple[float, ...]]]:
    """Return the rows of micro-batches of each field that has some."""
    values = ((name, getattr(costs, name)) for name in _VARYING)
    rows = {
        name: [x for x in _entries(name, value) if isinstance(x, tuple)]
        for name, value in values
        if isinstance(value, tuple)
    }
    return {name: own for name, own in rows.items() if own}


def costs_of_microbatch(costs: Costs, number: int) -> Costs:
    """Return `Costs.microbatch`."""
    n = costs.n_microbatches
    if check_count("number", number, 0) >= (n or number + 1):
        raise CostsError(f"there is no micro-batch {number} in costs of {n} micro-batches")
    return costs if n is None else _with_each(costs, operator.itemgetter(number))


def averaged(costs: Costs) -> Costs:
    """Return `Costs.averaged`."""
    work = costs.work
    if work is not None and work.n_microbatches is not None:
        costs = replace(costs, workload=replace(work, n_microbatches=None))
    if costs.n_microbatches is None:
        return costs
    return _with_each(costs, lambda row: float(np.mean(row)))


def least_costs(costs: Costs) -> Costs:
    """Return the least values of each field over micro-batches, as one value a stage."""
    return costs if costs.n_microbatches is None else _with_each(costs, min)


def largest_costs(costs: Costs) -> Costs:
    """Return the largest values of each field over micro-batches, as one value a stage."""
    return costs if costs.n_microbatches is None else _with_each(costs, max)


def most_costs(costs: Costs, parts: Sequence[Costs]) -> Costs:
    """Return ``costs`` with the largest value of each field in parts, which have one a stage."""
    joined = joined_microbatches(costs, parts, np.arange(len(parts)))
    return largest_costs(joined)


def _with_each(costs: Costs, of_row: Callable[[tuple[float, ...]], float]) -> Costs:
    """Return costs with ``of_row`` of the values of each stage, or skip."""
    changed: dict[str, Any] = {}
    for name in _rows(costs):
        value = getattr(costs, name)
        new = [of_row(x) if isinstance(x, tuple) else x for x in _entries(name, value)]
        changed[name] = _with_entries(name, value, tuple(new))
    return replace(costs, **changed)


def each_microbatch(change: Callable[..., Costs], *costs: Costs) -> Costs:
    """Return costs of several micro-batches from a change of those of each.

    ``change`` takes the costs of a micro-batch in place of each of ``costs``. Those of fewer
    micro-batches are repeated, as slices are in each sequence.
    """
    sizes = [own.n_microbatches or 1 for own in costs]
    n = max(sizes)
    if any(n % size for size in sizes):
        raise CostsError(f"costs are of different numbers of micro-batches: {sizes}")
    column = np.arange(n)
    classes = [_classes(own, size) for own, size in zip(costs, sizes, strict=True)]
    number = [of_column[column % len(of_column)] for _, of_column in classes]
    _, first, of_all = np.unique(number, axis=1, return_index=True, return_inverse=True)
    parts = [
        change(*(costs_of_microbatch(own, k % n) for own, n in zip(costs, sizes, strict=True)))
        for k in first.tolist()
    ]
    return joined_microbatches(parts[0], parts, of_all.ravel())


def joined_microbatches(costs: Costs, parts: Sequence[Costs], of_column: Ints) -> Costs:
    """Return costs whose fields of micro-batch ``k`` are those of ``parts[of_column[k]]``.

    Parts have one value a stage; ``costs`` have the other fields.
    """
    changed: dict[str, Any] = {}
    for name in _VARYING:
        values = [getattr(part, name) for part in parts]
        if all(value == values[0] for value in values):
            changed[name] = values[0]
            continue
        entries = (_entries(name, value) or (value,) for value in values)
        table = np.stack(np.broadcast_arrays(*map(np.array, entries)), axis=1)[:, of_column]
        is_skip = ROWS[name].item == "skip"
        changed[name] = _with_entries(name, values[0], table) if is_skip else table
    return replace(costs, **changed)


def repeated(costs: Costs, n: int) -> Costs:
    """Return costs with values for ``n`` micro-batches, if they have values for a divisor of it."""
    size = costs.n_microbatches
    if size is None or size == n:
        return costs
    first, of_column = _classes(costs, size)
    parts = [costs_of_microbatch(costs, k) for k in first.tolist()]
    return joined_microbatches(costs, parts, np.tile(of_column, n // size))


def cost_classes(costs: Costs, graph: TaskGraph) -> CostClasses | None:
    """Return the costs of the micro-batches of a graph; None if all have the same."""
    work, n_slices = costs.work, graph.n_slices
    if work is not None and work.n_slices not in (None, n_slices):
        own, other = (
            "whole sequences" if n == 1 else f"sequences in {n} slices"
            for n in (work.n_slices, n_slices)
        )
        raise CostsError(
            f"costs are of {own}, but the graph is of {other}; give costs(..., slices={n_slices}), "
            f"or schedule.with_slices({work.n_slices})"
        )
    n = n_priced(costs)
    if n is None:
        return None
    copy = copy_of_replicas(graph.homes)
    n_copies = 1 + int(copy.max())
    if n not in (graph.n_microbatches, n_copies * graph.n_microbatches) and (
        n != n_slices or n_slices == 1
    ):
        all_of = f", or {n_copies * graph.n_microbatches} for those of all {n_copies} replicas"
        raise CostsError(
            f"costs have values for {n} micro-batches, but the graph has {graph.n_microbatches}; "
            f"give {graph.n_microbatches} values a stage{all_of * (n_copies > 1)}"
        )
    if costs.n_microbatches is None:
        return None
    first, of_column = _classes(costs, n)
    microbatch = graph.microbatch.astype(np.int64)
    column = (copy[graph.replica] * graph.n_microbatches + microbatch) % n
    number = np.where(microbatch < 0, len(first), of_column[column])
    of_classes = (costs_of_microbatch(costs, k) for k in first.tolist())
    return CostClasses((*of_classes, averaged(costs)), number)


def distinct_costs(costs: Costs, n_microbatches: int) -> tuple[list[Costs], Ints]:
    """Return costs with one value a stage, and which of them each micro-batch of a replica has."""
    n = n_priced(costs)
    if n is not None and n != n_microbatches:
        raise CostsError(
            f"costs have values for {n} micro-batches, but {n_microbatches} are to be ordered; "
            f"give {n_microbatches} values a stage, or Costs.averaged()"
        )
    n = costs.n_microbatches
    if n is None:
        return [costs], np.zeros(n_microbatches, dtype=np.int64)
    first, of_column = _classes(costs, n)
    return [costs_of_microbatch(costs, k) for k in first.tolist()], of_column


def _classes(costs: Costs, n: int) -> tuple[Ints, Ints]:
    """Return the first micro-batch of each class, and the class of each micro-batch."""
    rows = [row for own in _rows(costs).values() for row in own]
    values: Floats = np.array(rows, dtype=np.float64).reshape(-1, n)
    _, first, inverse = np.unique(values, axis=1, return_index=True, return_inverse=True)
    return first, inverse.ravel()
