"""Bytes of gradients that wait for their reduction, beside those that a stage always holds.

A stage that reduces after every k micro-batches has a gradient for each k of them, from their first
backward to the end of their reduction, so that the next ones may add to another while this one is
reduced. The gradient that a mini-batch reduces first is the one that the others are then added to:
it is counted with the parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.utils.csr import Ints

__all__ = ["Waiting", "waiting_gradients"]


class Waiting(NamedTuple):
    """Gradients that wait for their reduction, one entry each.

    Attributes
    ----------
    takes
        The first B (or W) that adds to it: it takes the bytes at its start.
    gives
        The REDUCE_GRAD that gives them back at its end.
    nbytes
        Bytes of the gradients of the stage.
    """

    takes: Ints
    gives: Ints
    nbytes: NDArray[np.float64]


def waiting_gradients(graph: TaskGraph, costs: Costs) -> Waiting:
    """Return the gradients of each replica's stages, but for the first of each mini-batch."""
    groups = graph.reduction_groups
    is_reduction = (graph.kinds.op == Op.REDUCE_GRAD) & (groups[graph.kinds.stage] > 0)
    if not is_reduction.any():
        none = np.empty(0, dtype=np.int64)
        return Waiting(none, none, np.empty(0))
    gives = np.flatnonzero(is_reduction[graph.kind])
    gives = gives[graph.microbatch[gives] >= 0]
    backwards = np.flatnonzero(graph.is_op(frozenset({Op.B, Op.W})))
    backwards = backwards[groups[graph.stage[backwards]] > 0]
    # Of tasks with one key the first in order of ids, which is that of their stream.
    keys, first = np.unique(_keys(graph, backwards, groups), return_index=True)
    size = graph.n_microbatches // graph.n_batches
    place = graph.replica[gives] * graph.n_stages + graph.stage[gives]
    _, sums = np.unique(
        place * graph.n_batches + graph.microbatch[gives] // size, return_index=True
    )
    gives = np.delete(gives, sums)
    wanted = _keys(graph, gives, groups)
    at = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
    there = keys[at] == wanted if len(keys) else np.zeros(len(gives), dtype=bool)
    gives, at = gives[there], at[there]
    nbytes = costs.per_stage("gradient_bytes", graph.n_stages)[graph.stage[gives]]
    return Waiting(backwards[first[at]], gives, nbytes)


def _keys(graph: TaskGraph, tasks: Ints, groups: Ints) -> Ints:
    """Return a number for each replica, stage and group of micro-batches."""
    stage = graph.stage[tasks]
    group = graph.microbatch[tasks] // groups[stage]
    return (graph.replica[tasks] * graph.n_stages + stage) * graph.n_microbatches + group
