"""Loops that turn rules, as tables of kinds, into the dependencies and pairs of tasks.

Every task has a *cell*: its kind's base plus its micro-batch plus 1, so that a task on a whole
stage (micro-batch -1) has one too. `index_tasks` notes which task is in each cell, `wire` looks
up the cells that each task needs.
"""

from __future__ import annotations

from typing import NamedTuple

from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

__all__ = ["KindRules", "index_tasks", "wire"]


class KindRules(NamedTuple):
    """The rules of each kind, as bases of cells; -1 for none.

    Attributes
    ----------
    base
        Of the kind's own cells; shape ``(n_kinds,)``.
    pair
        Of the other end of a message, likewise.
    ptr
        Kind ``k`` has rules ``ptr[k]`` to ``ptr[k + 1]``.
    through
        Of what stands in for what is needed, the first that is there; shape ``(n_rules, most)``.
    needs
        Of what is needed; shape ``(n_rules, 2)``.
    every
        Whether what is needed is of several micro-batches, up to the task's: 0 if not, 1 if so, 2
        if what stands in for it is of several too, one of each ``group``; shape ``(n_rules,)``.
    span
        How many micro-batches: those of a mini-batch, or of a reduction; shape ``(n_rules,)``.
    group
        Micro-batches of a reduction of the task's stage, 0 for all of a mini-batch; shape
        ``(n_rules,)``.
    """

    base: Ints
    pair: Ints
    ptr: Ints
    through: Ints
    needs: Ints
    every: Ints
    span: Ints
    group: Ints


@kernel()
def index_tasks(kind: Ints, microbatch: Ints, base: Ints, index: Ints, counts: Ints) -> int:
    """Fill ``index`` (comes in as -1) and ``counts`` (of each kind); return a task seen twice."""
    twice = -1
    for task in range(len(kind)):
        of = kind[task]
        counts[of] += 1
        cell = base[of] + microbatch[task] + 1
        if index[cell] < 0:
            index[cell] = task
        elif twice < 0:
            twice = index[cell]
    return twice


@kernel()
def wire(
    kind: Ints,
    microbatch: Ints,
    index: Ints,
    n_microbatches: int,
    pair_base: Ints,
    rules_ptr: Ints,
    through: Ints,
    needs: Ints,
    every: Ints,
    span: Ints,
    group: Ints,
    ptr: Ints,
    values: Ints,
    pair: Ints,
) -> int:
    """Fill dependencies (CSR) and pairs; return the number of dependencies.

    A task on a whole stage has the number of the last micro-batch of its mini-batch, or none where
    there is one mini-batch.
    """
    total = 0
    for task in range(len(kind)):
        of, column = kind[task], microbatch[task] + 1
        for rule in range(rules_ptr[of], rules_ptr[of + 1]):
            last, first = column + 1, column
            if every[rule]:
                last = 1 + (n_microbatches if column == 0 else column)
                first = 1 if column == 0 else max(1, column - span[rule] + 1)
            before = total
            for choice in range(through.shape[1]) if every[rule] < 2 else range(0):
                if through[rule, choice] >= 0 and total == before:
                    found = index[through[rule, choice] + column]
                    if found >= 0:
                        values[total] = found
                        total += 1
            if total > before:
                continue
            instead = through[rule, 0] if every[rule] == 2 else -1
            size = max(1, group[rule])
            # Reductions have the number of the last micro-batch of their group.
            for cell in range(first + size - 1, last, size) if instead >= 0 else range(0):
                if index[instead + cell] >= 0:
                    values[total] = index[instead + cell]
                    total += 1
            for choice in range(2):
                base = needs[rule, choice]
                for cell in range(first, last) if base >= 0 else range(0):
                    ends = cell + (first - cell - 1) % size  # its group
                    if instead >= 0 and ends < last and index[instead + ends] >= 0:
                        continue
                    if index[base + cell] >= 0:
                        values[total] = index[base + cell]
                        total += 1
        ptr[task + 1] = total
        pair[task] = -1
        if pair_base[of] >= 0:
            pair[task] = index[pair_base[of] + column]
    return total
