"""Orders of the backward of a pipeline: torch's autograd engine alone, and with dependencies.

torch's engine has one thread for the CPU, and a queue of the nodes whose gradients are complete. It
runs the newest node of the queue: the one with the largest sequence number
(``CompareNodeTaskTime`` in torch/csrc/autograd/engine.h). A sequence number counts the nodes that
one thread has created in the forward; each thread counts separately. torchgpipe creates the nodes
of layers in a worker thread, which is new in each forward, and all other nodes in the caller's
thread, whose numbers are larger. A recompute that is ready thus comes before any backward.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pipesim.ops import Action, Op
from pipesim.utils.host_memory import check_memory

#: Thread that created a node; nodes of the caller's thread have the larger sequence numbers.
_WORKER, _CALLER = range(2)
#: Upper bound of the memory of the nodes of a stage and micro-batch.
_BYTES_PER_CELL = 2000


def newest_first(
    cells: Sequence[tuple[int, int]], recomputed: Sequence[bool]
) -> list[tuple[Op, int, int]]:
    """Return the backward of some forwards in reverse order, each R right before its B.

    ``cells`` are the micro-batch and stage of each forward, in their order.

    >>> [(str(op), i, j) for op, i, j in newest_first([(0, 0), (1, 0)], [True, False])]
    [('B', 1, 0), ('R', 0, 0), ('B', 0, 0)]
    """
    return [
        (op, i, j)
        for i, j in reversed(cells)
        for op in ((Op.R, Op.B) if recomputed[i] else (Op.B,))
    ]


@lru_cache(maxsize=4)  # a module asks for the same order in every step
def engine_order(
    n_stages: int, n_microbatches: int, n_recomputed: int, *, dependencies: bool = False
) -> tuple[Action, ...]:
    """Return the order of R and B in the backward of torchgpipe 0.0.7 on CPUs.

    Example: two stages, four micro-batches, all recomputed, without dependencies::

        stage 0 |                R3    R2 B3    R1 B2    R0 B1 B0
        stage 1 | R3 R2 R1 R0 B3    B2       B1       B0

    The first ``n_recomputed`` micro-batches are recomputed. With ``dependencies``, torchgpipe's
    fork and join put the micro-batches in order (arXiv 2004.09910, section 3.2.1). The first step
    of a process may differ, since its caller's thread may have created fewer nodes than the worker.
    """
    check_memory(
        f"autograd's graph of {n_stages} stages and {n_microbatches} micro-batches",
        n_stages * n_microbatches * _BYTES_PER_CELL,
        "use fewer",
    )
    graph = _forward(n_stages, n_microbatches, n_recomputed, dependencies)
    n_pending = [0] * len(graph)  # nodes whose gradients a node still waits for
    for node in graph:
        for other in node.inputs:
            n_pending[other] += 1
    ready: list[tuple[int, int]] = []

    def push(number: int) -> None:
        heapq.heappush(ready, (-graph[number].thread, -number))

    push(len(graph) - 1)  # the loss, which needs all outputs
    order: list[Action] = []
    while ready:
        node = graph[-heapq.heappop(ready)[1]]
        if node.action is not None:
            order.append(node.action)
        for other in node.inputs:
            n_pending[other] -= 1
            if not n_pending[other]:
                push(other)
    return tuple(order)


class _Node(NamedTuple):
    """A node of the graph: the thread that created it, its input nodes, and its action."""

    thread: int
    inputs: tuple[int, ...]
    action: Action | None = None


class _Graph(list[_Node]):
    """Nodes in order of creation; ``ends`` has the latest ones of each micro-batch."""

    def __init__(self, n_microbatches: int) -> None:
        super().__init__()
        self.ends: list[tuple[int, ...]] = [()] * n_microbatches

    def extend_chain(
        self,
        i: int,
        thread: int = _CALLER,
        action: Action | None = None,
        more_inputs: tuple[int, ...] = (),
    ) -> int:
        """Create the next node of micro-batch ``i``; return its number."""
        self.append(_Node(thread, self.ends[i] + more_inputs, action))
        self.ends[i] = (len(self) - 1,)
        return len(self) - 1


def _forward(n: int, m: int, n_recomputed: int, dependencies: bool) -> _Graph:
    """Create the nodes of torchgpipe's forward (its ``pipeline.py``), a clock cycle at a time."""
    graph = _Graph(m)
    for cycle in range(m + n - 1):
        cells = [(cycle - j, j) for j in range(max(1 + cycle - m, 0), min(1 + cycle, n))]
        for i, j in cells:
            if dependencies and i:
                fork = graph.extend_chain(i - 1)
                graph.extend_chain(i, more_inputs=(fork,))  # the join
            if j:
                graph.extend_chain(i)  # the copy to the stage's device
        for i, j in cells:
            if j:
                graph.extend_chain(i)  # compute waits for the copy
            graph.extend_chain(i, _WORKER, Action(j, Op.B, i))
        for i, j in cells:
            if j < n - 1:
                graph.extend_chain(i)  # the next copy waits for compute
            if i < n_recomputed:
                fork = graph.extend_chain(i)
                graph.append(_Node(_CALLER, (fork,), Action(j, Op.R, i)))
                graph.extend_chain(i, more_inputs=(len(graph) - 1,))  # the join
    graph.append(_Node(_CALLER, tuple(end for ends in graph.ends for end in ends)))
    return graph
