"""Orders in which a host issues tasks, other than by clock cycle.

Only the ids of tasks change. Each stream keeps its order, which is the schedule's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph, reordered
from pipesim.ops import COMPUTE, EXCHANGES, PASSES, Op
from pipesim.utils.csr import CSR, Ints
from pipesim.utils.jit import kernel

IssueOrder = Literal["clock_cycle", "microbatch_major", "stage_major"]
ISSUE_ORDERS: tuple[IssueOrder, ...] = ("clock_cycle", "microbatch_major", "stage_major")


def in_issue_order(graph: TaskGraph, issue_order: IssueOrder) -> TaskGraph:
    """Return a graph in clock-cycle order with its tasks issued in another order.

    The next task is always one that can be issued: all its predecessors are issued, including the
    task before it on its stream. Messages and collectives come right after the task that produces
    them. Compute tasks are sorted by

    - ``"microbatch_major"``: pass, then position;
    - ``"stage_major"``: position.

    A pass is the forward of a micro-batch through all stages (F and its RESHARD, DISPATCH, REORDER
    of vectors), or
    its backward (R, B, I, W, REORDER of gradients), or the STEPs of a mini-batch. Passes come in
    the order in which their first F, B or I, or STEP is issued by clock cycle. The position is that
    on the way forward and back through ``n`` stages: ``s`` for the forward of stage ``s``,
    ``2 * n - 1 - s`` for all others. Ties keep the order by clock cycle, in which replicas
    alternate, task by task.

    The complexity is O(n log n) for n tasks and dependencies.
    """
    if issue_order == "clock_cycle":
        return graph
    is_compute = graph.is_op(COMPUTE)
    position = np.where(_is_forward(graph), graph.stage, 2 * graph.n_stages - 1 - graph.stage)
    keys = [position, _passes(graph)] if issue_order == "microbatch_major" else [position]
    # lexsort takes the last key first. Ties keep the order of ids, which alone sorts messages.
    by_rank = np.lexsort([*(np.where(is_compute, key, -1) for key in keys), is_compute])
    rank = np.empty(len(graph), dtype=np.int64)
    rank[by_rank] = np.arange(len(graph))
    return reordered(graph, _topological_order(graph.precedence, rank, by_rank))


def _is_forward(graph: TaskGraph) -> NDArray[np.bool_]:
    """Return whether each task is F, its RESHARD, or DISPATCH or REORDER of vectors."""
    puts_vectors = (graph.op == Op.REORDER) & (graph.part == EXCHANGES.index("vectors"))
    frees = (graph.op == Op.RESHARD) & (graph.part == PASSES.index("forward"))
    marked: NDArray[np.bool_] = graph.is_op(frozenset({Op.F, Op.DISPATCH})) | puts_vectors | frees
    return marked


def _passes(graph: TaskGraph) -> Ints:
    """Return the first task of the pass of each compute task; any number for other tasks."""
    number = np.where(_is_forward(graph), 0, np.where(graph.op == Op.STEP, 2, 1))
    number = number * (graph.n_microbatches + 1) + graph.microbatch + 1
    first = np.full(3 * (graph.n_microbatches + 1), len(graph))
    begins = np.flatnonzero(graph.is_op(frozenset({Op.F, Op.B, Op.I, Op.STEP})))
    np.minimum.at(first, number[begins], begins)
    passes: Ints = first[number]
    return passes


def _topological_order(waits: CSR, rank: Ints, by_rank: Ints) -> Ints:
    """Return a topological order with the smallest rank among ready tasks first."""
    followers = waits.transpose()
    order = np.empty(len(rank), dtype=np.int64)
    heap = np.empty(len(rank), dtype=np.int64)
    remaining = np.diff(waits.ptr).astype(np.int64)
    _fill_order(remaining, followers.ptr, followers.values, rank, by_rank, heap, order)
    return order


@kernel()
def _fill_order(
    remaining: Ints,
    ptr: Ints,
    followers: Ints,
    rank: Ints,
    by_rank: Ints,
    heap: Ints,
    order: Ints,
) -> None:
    """Fill ``order``; ``heap`` holds the ranks of the tasks that can be issued, as a binary heap.

    The function is long because push and pop are part of its loop.
    """
    size, n_issued = 0, 0
    for k in range(len(rank)):  # ranks in order are a heap
        if remaining[by_rank[k]] == 0:
            heap[size] = k
            size += 1
    while size > 0:
        task = by_rank[heap[0]]
        order[n_issued] = task
        n_issued += 1
        size -= 1
        last, hole = heap[size], 0
        while 2 * hole + 1 < size:  # the smaller child moves up
            child = 2 * hole + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= last:
                break
            heap[hole] = heap[child]
            hole = child
        heap[hole] = last
        for k in range(ptr[task], ptr[task + 1]):
            follower = followers[k]
            remaining[follower] -= 1
            if remaining[follower] > 0:
                continue
            hole = size
            size += 1
            while hole > 0 and heap[(hole - 1) // 2] > rank[follower]:
                heap[hole] = heap[(hole - 1) // 2]
                hole = (hole - 1) // 2
            heap[hole] = rank[follower]
