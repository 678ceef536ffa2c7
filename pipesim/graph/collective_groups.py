"""Find the members of each collective, and the backward that each bucket needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.tasks import Kinds
from pipesim.ops import COLLECTIVES, Op
from pipesim.utils.csr import CSR, Ints

__all__ = ["default_collectives", "group_members", "partial_dependencies"]


def default_collectives(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32]
) -> CSR:
    """Return the members of each collective: one for each operation, stage, part and micro-batch.

    The members are the tasks of all replicas.
    """
    collective = kinds.is_op(COLLECTIVES)
    if not collective.any():
        return _members(*np.empty((2, 0), dtype=np.int64))
    members = np.flatnonzero(collective[kind])
    own = kind[members]
    number = kinds.op[own]
    for column in (kinds.stage[own], kinds.part[own] + 1, microbatch[members].astype(np.int64) + 1):
        number = number * (int(column.max(initial=0)) + 1) + column
    return _members(members, number)


def group_members(group: Ints) -> CSR:
    """Return the members of each group, -1 for none; groups are numbered anew, in order."""
    members = np.flatnonzero(group >= 0)
    return _members(members, group[members])


def _members(members: Ints, number: Ints) -> CSR:
    """Return the members of each group, given the number of the group of each."""
    if not len(members):
        return CSR(np.zeros(1, np.int64), np.empty(0, np.int64))
    unique, number = np.unique(number, return_inverse=True)
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
