"""Find the members of each collective, and the backward that each bucket needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.tasks import Kinds
from pipesim.ops import COLLECTIVES, Op
from pipesim.utils.csr import CSR, Ints

__all__ = ["default_groups", "group_members", "partial_dependencies"]


def default_groups(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> Ints | None:
    """Number the collectives: one for each operation, stage, part and micro-batch.

    The members are the tasks of all replicas. Return one number a task, -1 for tasks without a
    collective; None without collectives.
    """
    collective = kinds.is_op(COLLECTIVES)
    if not collective.any():
        return None
    members = np.flatnonzero(collective[kind])
    own = kind[members]
    number = kinds.op[own]
    for column in (kinds.stage[own], kinds.part[own] + 1, microbatch[members].astype(np.int64) + 1):
        number = number * (int(column.max(initial=0)) + 1) + column
    group = np.full(len(kind), -1, dtype=np.int64)
    group[members] = np.unique(number, return_inverse=True)[1]
    return group


def group_members(group: Ints | None) -> CSR:
    """Return the members of each group; groups are numbered anew, in order."""
    if group is None or not (group >= 0).any():
        return CSR(np.zeros(1, np.int64), np.empty(0, np.int64))
    members = np.flatnonzero(group >= 0)
    unique, number = np.unique(group[members], return_inverse=True)
    return CSR.from_pairs(number, members, len(unique))


def partial_dependencies(kinds: Kinds, kind: Ints, needs: CSR) -> Ints:
    """Return the last backward that each bucket of gradients needs, -1 for other tasks.

    Empty without buckets.
    """
    is_bucket = (kinds.op == Op.REDUCE_GRAD) & (kinds.part >= 0)
    if not is_bucket.any():
        return np.empty(0, dtype=np.int64)
    backward = np.full(len(kind), -1, dtype=np.int64)
    rows = needs.rows
    of_buckets = np.flatnonzero(is_bucket[kind[rows]])
    np.maximum.at(backward, rows[of_buckets], needs.values[of_buckets])
    return backward
