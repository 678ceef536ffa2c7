"""Loops that turn rules, as tables of kinds, into the dependencies and pairs of tasks.

Every task has a *cell*: its kind's base plus its micro-batch plus 1, so that a task on a whole
stage (micro-batch -1) has one too. `index_tasks` notes which task is in each cell, `wire` looks
up the cells that each task needs.
"""

from __future__ import annotations

from typing import NamedTuple

from pipesim.csr import Ints
from pipesim.jit import kernel

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
        Of the message that stands in for what is needed; shape ``(n_rules,)``.
    needs
        Of what is needed; shape ``(n_rules, 2)``.
    every
        Whether that is of every micro-batch of the task's mini-batch; shape ``(n_rules,)``.
    """

    base: Ints
    pair: Ints
    ptr: Ints
    through: Ints
    needs: Ints
    every: Ints


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
    batch_size: int,
    pair_base: Ints,
    rules_ptr: Ints,
    through: Ints,
    needs: Ints,
    every: Ints,
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
            if through[rule] >= 0:
                found = index[through[rule] + column]
                if found >= 0:
                    values[total] = found
                    total += 1
                    continue
            for choice in range(2):
                base = needs[rule, choice]
                if base < 0:
                    continue
                if not every[rule]:
                    found = index[base + column]
                    if found >= 0:
                        values[total] = found
                        total += 1
                    continue
                last = n_microbatches if column == 0 else column
                first = 0 if column == 0 else max(0, column - batch_size)
                for cell in range(base + 1 + first, base + 1 + last):
                    if index[cell] >= 0:
                        values[total] = index[cell]
                        total += 1
        ptr[task + 1] = total
        pair[task] = -1
        if pair_base[of] >= 0:
            pair[task] = index[pair_base[of] + column]
    return total
