"""Bytes of gradients that wait for their reduction, in addition to those that a stage always holds.

A stage that reduces after every k micro-batches has one gradient for each group of k. It holds this
gradient from the first backward of the group to the end of its reduction, since the next group adds
to another one meanwhile. The gradient that a mini-batch reduces first is the one that the others
are then added to: it is always held, and counted with the parameters.

If replicas share the gradients of a stage (`TaskGraph.parameter_shares`), only the share is always
held. Then every group's gradient is held from its first backward to the end of its reduction. If
the stage reduces once, all micro-batches are one group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.expert_pricing import moved_bytes
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.utils.csr import Ints


class Waiting(NamedTuple):
    """Gradients that wait for their reduction, one entry each.

    Attributes
    ----------
    backward
        The first B (or W) that adds to it, which allocates the bytes at its start.
    reduction
        The REDUCE_GRAD that releases them at its end.
    nbytes
        Bytes of the gradients of the stage, but for experts that no other replica has.
    """

    backward: Ints
    reduction: Ints
    nbytes: NDArray[np.float64]


def waiting_gradients(graph: TaskGraph, costs: Costs) -> Waiting:
    """Return the gradients of each replica's stages, without the first of each mini-batch.

    Of stages whose gradients are sharded, the first is among them.
    """
    none = np.empty(0, dtype=np.int64)
    if Op.REDUCE_GRAD not in graph.kinds.ops:
        return Waiting(none, none, np.empty(0))
    is_shared = graph.parameter_shares > 1
    once = is_shared & (graph.reduction_groups == 0)
    groups = np.where(once, graph.n_microbatches, graph.reduction_groups)
    is_reduction = (graph.kinds.op == Op.REDUCE_GRAD) & (groups[graph.kinds.stage] > 0)
    if not is_reduction.any():
        return Waiting(none, none, np.empty(0))
    reductions = np.flatnonzero(is_reduction[graph.kind])
    of_group = np.where(once[graph.stage], graph.n_microbatches - 1, graph.microbatch)
    reductions = reductions[of_group[reductions] >= 0]
    backwards = np.flatnonzero(graph.is_op(frozenset({Op.B, Op.W})))
    backwards = backwards[groups[graph.stage[backwards]] > 0]
    # The first task of each key in order of ids, which is the order of its stream.
    keys, first = np.unique(_keys(graph, backwards, graph.microbatch, groups), return_index=True)
    size = graph.n_microbatches // graph.n_batches
    cell = graph.replica[reductions] * graph.n_stages + graph.stage[reductions]
    batch = of_group[reductions] // size
    _, first_of_batch = np.unique(cell * graph.n_batches + batch, return_index=True)
    held = first_of_batch[~is_shared[graph.stage[reductions[first_of_batch]]]]
    reductions = np.delete(reductions, held)
    needed = _keys(graph, reductions, of_group, groups)
    index = np.minimum(np.searchsorted(keys, needed), max(0, len(keys) - 1))
    exists = keys[index] == needed if len(keys) else np.zeros(len(reductions), dtype=bool)
    reductions, index = reductions[exists], index[exists]
    n_replicas = graph.n_replicas * graph.options.n_equal
    nbytes = moved_bytes(costs, graph.n_stages, n_replicas, "gradient")[graph.stage[reductions]]
    return Waiting(backwards[first[index]], reductions, nbytes)


def _keys(graph: TaskGraph, tasks: Ints, microbatch: Ints, groups: Ints) -> Ints:
    """Return the number of each task's combination of replica, stage and group of micro-batches."""
    stage = graph.stage[tasks]
    group = microbatch[tasks] // groups[stage]
    keys: Ints = (graph.replica[tasks] * graph.n_stages + stage) * graph.n_microbatches + group
    return keys
