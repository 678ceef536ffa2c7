"""Find the members of each collective, and the backward that each bucket needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.tasks import Kinds
from pipesim.ops import COLLECTIVES, IN_REPLICA, OF_DEVICES, Op, is_expert_exchange
from pipesim.utils.csr import CSR, Ints


def default_collectives(
    kinds: Kinds, kind: NDArray[np.int32], microbatch: NDArray[np.int32], expert_replicas: int = 0
) -> CSR:
    """Return the members of each collective: one for each operation, part and micro-batch.

    - Operations of devices (`OF_DEVICES`) have one for all stages, others one for each stage.
    - Operations in a replica (`IN_REPLICA`) have one for each replica, others one for all replicas.
    - Exchanges of experts have one for each ``expert_replicas`` data-parallel replicas, if these
      are not 0. The paths of a bidirectional pipeline have other micro-batches.
    """
    collective = kinds.is_op(COLLECTIVES)
    if not collective.any():
        return _members(*np.empty((2, 0), dtype=np.int64))
    members = np.flatnonzero(collective[kind])
    own = kind[members]
    number = kinds.op[own]
    stage = np.where(kinds.is_op(OF_DEVICES), 0, kinds.stage)[own]
    replica = np.where(kinds.is_op(IN_REPLICA), kinds.replica, 0)[own]
    if expert_replicas:
        of_experts = is_expert_exchange(number, kinds.part[own])
        copy = copy_of_replicas(kinds.homes)[kinds.replica[own]]
        replica = np.where(of_experts, copy // expert_replicas, replica)
    part, of_microbatch = kinds.part[own] + 1, microbatch[members].astype(np.int64) + 1
    for column in (stage, replica, part, of_microbatch):
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
