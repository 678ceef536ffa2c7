"""Apply the dependency rules to all tasks: find dependencies, and the other ends of messages.

`_index_tasks` records the task in each cell (see `pipesim.graph.kind_rules`). `_wire` looks up the
cells that each task needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.kind_rules import KindRules, kind_rules
from pipesim.graph.overlaps import with_starts
from pipesim.graph.tasks import Kinds
from pipesim.graph.tied_stages import Tied
from pipesim.utils.csr import CSR, Ints, ids_dtype
from pipesim.utils.jit import kernel


def apply_rules(
    kinds: Kinds,
    kind: Ints,
    microbatch: Ints,
    batch_size: int,
    stream_of_kind: Ints,
    groups: Ints,
    tied: Tied = (),
    n_slices: int = 1,
) -> tuple[CSR, Ints]:
    """Apply `RULES`; return the tasks that each task needs before it can start, and pairs.

    An overlapped F needs the dependencies of its B too. ``groups`` are as
    `TaskGraph.reduction_groups`, ``tied`` as `TaskGraph.tied`, ``n_slices`` as
    `TaskGraph.n_slices`.
    """
    if not len(kind):
        return CSR(np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)), np.empty(0, np.int64)
    n_microbatches = int(microbatch.max(initial=-1)) + 1
    rules, index, counts, _ = _indexed(
        kinds, kind, microbatch, n_microbatches, batch_size, groups, tied, n_slices > 1
    )
    most = int(counts @ rules.most)
    dtype = ids_dtype(max(len(kind), most))
    ptr, pair = np.zeros(len(kind) + 1, dtype=dtype), np.empty(len(kind), dtype=dtype)
    values = np.empty(most, dtype=dtype)
    total = _wire(kind, microbatch, index, n_microbatches, n_slices, rules, ptr, values, pair)
    return with_starts(CSR(ptr, values[:total]), kinds, kind, stream_of_kind), pair


def duplicate_task(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32], n_microbatches: int
) -> int:
    """Return a task with the operation, stages, micro-batch and replica of another, or -1."""
    *_, duplicate = _indexed(kinds, kind, microbatch, n_microbatches)
    return duplicate


def _indexed(
    kinds: Kinds,
    kind: NDArray[np.int32],
    microbatch: NDArray[np.int32],
    n_microbatches: int,
    batch_size: int = 1,
    groups: Ints | None = None,
    tied: Tied = (),
    has_slices: bool = False,
) -> tuple[KindRules, Ints, Ints, int]:
    """Return the rules of kinds, each cell's task, tasks of each kind, and a duplicate or -1."""
    rules, n_cells = kind_rules(kinds, n_microbatches + 1, batch_size, groups, tied, has_slices)
    index = np.full(n_cells, -1, dtype=ids_dtype(len(kind)))
    counts = np.zeros(len(kinds), dtype=np.int64)
    return rules, index, counts, _index_tasks(kind, microbatch, rules.base, index, counts)


@kernel()
def _index_tasks(kind: Ints, microbatch: Ints, base: Ints, index: Ints, counts: Ints) -> int:
    """Fill ``index`` (comes in as -1) and ``counts`` (of each kind); return a duplicate or -1."""
    duplicate = -1
    for task in range(len(kind)):
        own = kind[task]
        counts[own] += 1
        cell = base[own] + microbatch[task] + 1
        if index[cell] < 0:
            index[cell] = task
        elif duplicate < 0:
            duplicate = index[cell]
    return duplicate


@kernel()
def _wire(
    kind: Ints,
    microbatch: Ints,
    index: Ints,
    n_microbatches: int,
    n_slices: int,
    rules: KindRules,
    ptr: Ints,
    values: Ints,
    pair: Ints,
) -> int:
    """Fill dependencies (CSR) and pairs; return the number of dependencies.

    - A task on a whole stage has the number of the last micro-batch of its mini-batch, or none if
      there is one mini-batch.
    - Slice ``j`` of a sequence has a number that leaves ``j`` when divided by ``n_slices``.

    The loop is longer than 40 lines: compiled code counts references to each column that a helper
    gets, task by task, so that helpers would make it slower.
    """
    total = 0
    for task in range(len(kind)):
        own, column = kind[task], microbatch[task] + 1
        for rule in range(rules.ptr[own], rules.ptr[own + 1]):
            every = rules.every[rule]
            last, first = column + 1, column
            if every >= 3:
                offset = 1 if every == 4 else -1
                at_end = (microbatch[task] + (offset > 0)) % n_slices == 0
                if at_end or column + offset > n_microbatches:
                    continue
                last, first = last + offset, first + offset
            elif every:
                last = 1 + (n_microbatches if column == 0 else column)
                first = 1 if column == 0 else max(1, column - rules.span[rule] + 1)
            before = total
            for choice in range(rules.via.shape[1]) if every < 2 else range(0):
                if rules.via[rule, choice] >= 0 and total == before:
                    needed = index[rules.via[rule, choice] + column]
                    if needed >= 0:
                        values[total] = needed
                        total += 1
            if total > before:
                continue
            instead = rules.via[rule, 0] if every == 2 else -1
            size = max(1, rules.group[rule])
            # Reductions have the number of the last micro-batch of their group.
            for cell in range(first + size - 1, last, size) if instead >= 0 else range(0):
                if index[instead + cell] >= 0:
                    values[total] = index[instead + cell]
                    total += 1
            for choice in range(2):
                base = rules.needs[rule, choice]
                for cell in range(first, last) if base >= 0 else range(0):
                    ends = cell + (first - cell - 1) % size  # its group
                    if instead >= 0 and ends < last and index[instead + ends] >= 0:
                        continue
                    if index[base + cell] >= 0:
                        values[total] = index[base + cell]
                        total += 1
        ptr[task + 1] = total
        pair[task] = -1
        if rules.pair[own] >= 0:
            pair[task] = index[rules.pair[own] + column]
    return total
