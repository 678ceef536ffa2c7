"""The order in which torch's autograd engine takes the backward of a pipeline by itself.

The engine has one thread for the CPU, and a queue of the nodes whose gradients are there. It takes
the newest node of its queue: the one with the largest sequence number (``CompareNodeTaskTime`` in
torch/csrc/autograd/engine.h). Numbers count the nodes that a thread has made in the forward, and
each thread counts its own. torchgpipe makes the layers' nodes in a worker thread, which is new in
each forward, and all others in the caller's thread, whose numbers are larger: a recompute that is
ready so comes before any backward.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from pipesim.ops import Action, Op
from pipesim.utils.host_memory import check_memory

__all__ = ["engine_order"]

#: The thread that made a node; of two nodes, that of the caller's thread has the larger number.
_WORKER, _CALLER = range(2)
#: Of the nodes of a stage and micro-batch, at most.
_BYTES_PER_CELL = 2000


def engine_order(
    n_stages: int, n_microbatches: int, n_recomputed: int, *, dependencies: bool = False
) -> list[Action]:
    """Return the order of R and B in the backward of torchgpipe 0.0.7 on CPUs.

    Two stages, four micro-batches, all recomputed, without dependencies, from left to right::

        stage 0 |                R3    R2 B3    R1 B2    R0 B1 B0
        stage 1 | R3 R2 R1 R0 B3    B2       B1       B0

    Parameters
    ----------
    n_stages, n_microbatches
        One or more.
    n_recomputed
        How many micro-batches are recomputed: the first ones.
    dependencies
        Whether torchgpipe's fork and join put the micro-batches in order (arXiv 2004.09910,
        section 3.2.1).

    Returns
    -------
    list
        All R and B, in the order in which the engine runs them: that of every step but the first of
        a process, where the caller's thread may have made fewer nodes than the worker.

    Raises
    ------
    CapacityError
        If the nodes would not fit in memory.
    """
    check_memory(
        f"autograd's graph of {n_stages} stages and {n_microbatches} micro-batches",
        n_stages * n_microbatches * _BYTES_PER_CELL,
        "take fewer",
    )
    graph = _forward(n_stages, n_microbatches, n_recomputed, dependencies)
    waits = [0] * len(graph)
    for node in graph:
        for other in node.inputs:
            waits[other] += 1
    ready: list[tuple[int, int]] = []

    def push(number: int) -> None:
        heapq.heappush(ready, (-graph[number].thread, -number))

    last = len(graph) - 1  # the loss, which needs all outputs
    push(last)
    order: list[Action] = []
    while ready:
        node = graph[-heapq.heappop(ready)[1]]
        if node.action is not None:
            order.append(node.action)
        for other in node.inputs:
            waits[other] -= 1
            if not waits[other]:
                push(other)
    return order


class _Node(NamedTuple):
    """A node of the graph: the thread that made it, the nodes that it comes from, its action."""

    thread: int
    inputs: tuple[int, ...]
    action: Action | None = None


class _Graph(list[_Node]):
    """Nodes in the order in which they are made; ``ends`` has the latest of each micro-batch."""

    def __init__(self, n_microbatches: int) -> None:
        super().__init__()
        self.ends: list[tuple[int, ...]] = [()] * n_microbatches

    def extend_lane(
        self,
        i: int,
        thread: int = _CALLER,
        action: Action | None = None,
        also: tuple[int, ...] = (),
    ) -> int:
        """Make the next node of micro-batch ``i``, which may come from others too."""
        self.append(_Node(thread, self.ends[i] + also, action))
        self.ends[i] = (len(self) - 1,)
        return len(self) - 1


def _forward(n: int, m: int, n_recomputed: int, dependencies: bool) -> _Graph:
    """Make the nodes of torchgpipe's forward (its ``pipeline.py``), a clock cycle at a time."""
    graph = _Graph(m)
    for cycle in range(m + n - 1):
        cells = [(cycle - j, j) for j in range(max(1 + cycle - m, 0), min(1 + cycle, n))]
        for i, j in cells:
            if dependencies and i:
                fork = graph.extend_lane(i - 1)
                graph.extend_lane(i, also=(fork,))  # the join
            if j:
                graph.extend_lane(i)  # the copy to the stage's device
        for i, j in cells:
            if j:
                graph.extend_lane(i)  # compute waits for the copy
            graph.extend_lane(i, _WORKER, Action(j, Op.B, i))
        for i, j in cells:
            if j < n - 1:
                graph.extend_lane(i)  # the next copy waits for compute
            if i < n_recomputed:
                fork = graph.extend_lane(i)
                graph.append(_Node(_CALLER, (fork,), Action(j, Op.R, i)))
                graph.extend_lane(i, also=(len(graph) - 1,))  # the join
    graph.append(_Node(_CALLER, tuple(end for ends in graph.ends for end in ends)))
    return graph
