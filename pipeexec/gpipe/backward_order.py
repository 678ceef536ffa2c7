"""Order the backward through the autograd graph.

Nodes of this graph carry no gradients; the tables of a call do. Nodes are tied by phony tensors,
tensors without elements. The autograd engine runs one node at a time, and so decides only in which
order the tasks of the backward are issued; streams run the tasks. Inputs and parameters are the
leaves of the graph: its last node returns their gradients where the engine is to have them.

No data dependency decides whether ``B[i, j]`` or ``B[i+1, j]`` comes first. A phony tensor decides
it (torchgpipe, arXiv 2004.09910, section 3.2.1). Each clock cycle of the forward is a node that
takes the phony of the cycle before, so the engine must run the cycles in reverse::

    enter ──> B[0,0] ──> B[1,0] B[0,1] ──> B[2,0] B[1,1] ──> B[2,1] ──> leave

``B[i+1, j]`` is in the cycle after that of ``B[i, j]``, so it comes first in the backward, which
runs against the arrows. Each R is right before its B.

Without dependencies only data tie the tasks together, and the engine chooses among the ready nodes
(`pipeexec.gpipe.engine_graph`). For an order that is imposed, a chain of nodes has one task each.

A node may run while another node is running. On a GPU, a B calls the engine and waits for the
engine's thread of that GPU. Meanwhile the engine runs all other ready nodes in the waiting thread:
nodes of other calls, as the nodes of one call wait for each other. These nodes only queue their
tasks. Queued tasks are issued after that B, so that no task is issued within another task. The
exception is a call that returns gradients of its leaves: the engine wants them from its last node,
which may run within a task of another call, but must not run within one of its own. So only the
nodes of such a call issue its tasks. Several calls may be part of one run of the engine (one
``backward()``), and several threads may run one each.
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.autograd_engine import engine_order, newest_first
from pipesim.scheduling.schedule import Schedule

#: A forward: micro-batch and partition.
Cell = tuple[int, int]
#: A task: operation, micro-batch and partition.
PartitionTask = tuple[Op, int, int]


def clock_cycles(m: int, n: int) -> Iterator[list[Cell]]:
    """Yield the forwards of each clock cycle, as micro-batch and partition, in issue order.

    In cycle ``k`` partition ``j`` runs micro-batch ``k - j`` (torchgpipe, arXiv 2004.09910, section
    3.1). The order is deterministic, and the input of each partition was made one cycle before.

    Examples
    --------
    >>> list(clock_cycles(2, 3))
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 1), (0, 2)], [(1, 2)]]
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k - m + 1), min(k + 1, n))]


def unordered_backward(
    n_partitions: int,
    recomputed: Sequence[bool],
    seed: int | None = None,
    schedule: Schedule | None = None,
) -> list[PartitionTask]:
    """Return the tasks of a backward without dependencies, in the order of the engine on a CPU.

    - With a ``schedule``, the tasks of each partition are in its order, partition by partition from
      the last to the first.
    - With a ``seed``, the micro-batches of each partition are shuffled: first all its R, then all
      its B, partition by partition from the last to the first.
    """
    if schedule is not None:
        orders = schedule.orders[::-1]
        return [task for order in orders for task in _backward_tasks(order, recomputed)]
    if seed is None:
        actions = engine_order(n_partitions, len(recomputed), sum(recomputed))
        return [(action.op, action.microbatch or 0, action.stage) for action in actions]
    draws = random.Random(seed)
    tasks: list[PartitionTask] = []
    for j in range(n_partitions):
        microbatches = list(range(len(recomputed)))
        draws.shuffle(microbatches)
        tasks += [(Op.B, i, j) for i in microbatches]
        tasks += [(Op.R, i, j) for i in microbatches if recomputed[i]]
    return tasks[::-1]


def _backward_tasks(
    order: Iterable[Action | Overlapped], recomputed: Sequence[bool]
) -> Iterator[PartitionTask]:
    """Yield R and B of a partition; an R that is not listed comes right before its B."""
    left = {i for i, again in enumerate(recomputed) if again}
    for action in order:
        assert isinstance(action, Action)
        i = action.microbatch or 0
        if action.op in (Op.R, Op.B) and i in left:
            left.remove(i)
            yield Op.R, i, action.stage
        if action.op == Op.B:
            yield Op.B, i, action.stage


Tensors = tuple[Tensor, ...]


class Backward(Protocol):
    """A backward whose tasks the graph orders."""

    def begin(self, gradients: Sequence[Sequence[Tensor | None]]) -> bool:
        """Take the gradients of the outputs: for each micro-batch, one gradient an output.

        Return whether the engine is to have the gradients of the leaves.
        """
        ...

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of micro-batch ``i`` in partition ``j``."""
        ...

    def leaf_gradients(self) -> Sequence[Tensor | None]:
        """Wait for the gradients of the leaves, and return them."""
        ...

    def forget(self) -> None:
        """Drop the tensors that a backward would need: no backward will come."""
        ...


def link_cycles(
    cycles: Iterable[Sequence[Cell]], recomputed: Sequence[bool], issuer: TaskIssuer, phony: Tensor
) -> list[Tensor]:
    """Append one node a clock cycle of the forward to ``phony``; return the last node's phony."""
    for cycle in cycles:
        tasks = newest_first(cycle, recomputed)
        phony = _Tasks.apply(issuer, tasks, phony)  # type: ignore[no-untyped-call]
    return [phony]


def link_tasks(tasks: Sequence[PartitionTask], issuer: TaskIssuer, phony: Tensor) -> list[Tensor]:
    """Append one node a task to ``phony``, so that tasks are issued in order.

    The first task is the newest node. Returns that node's phony.
    """
    for task in reversed(tasks):
        phony = _Tasks.apply(issuer, [task], phony)  # type: ignore[no-untyped-call]
    return [phony]


def link_backward(
    backward: Backward,
    inputs: Sequence[Tensor],
    nodes: Callable[[TaskIssuer, Tensor], list[Tensor]],
    parameters: Iterable[Tensor] = (),
    run: Callable[[Callable[[], Tensor]], Tensor] = operator.call,
) -> Callable[[Sequence[Tensors]], Tensors]:
    """Make the graph of a backward; return a function that ties the outputs to the graph.

    ``nodes`` appends the nodes of the tasks to a phony, and returns the phonies of the last nodes.
    The returned function takes the outputs of each micro-batch, and returns those of the
    mini-batch. ``run`` calls the function that makes the node of the leaves.
    """
    issuer = TaskIssuer(backward)
    scatter = partial(_Scatter.apply, issuer, len(inputs), *inputs, *parameters)
    ends = nodes(issuer, run(scatter))

    def leave(outputs: Sequence[Tensors]) -> Tensors:
        return _Gather.apply(issuer, outputs, *ends)  # type: ignore[no-untyped-call, no-any-return]

    return leave


#: Tasks to issue after the one that is being issued, by the number of the engine's run. A process
#: has one engine, which numbers its runs, so the table is global too. A run has a queue only while
#: one of its tasks is being issued.
_QUEUES: dict[int, deque[tuple[Backward, PartitionTask]]] = {}


class TaskIssuer:
    """Issues the tasks of one call as the engine runs the nodes of the call.

    The last node is a `_Scatter`; it ``returns_gradients`` of the leaves, or tasks add them.
    """

    def __init__(self, backward: Backward, returns_gradients: bool = False) -> None:
        self.backward, self.returns_gradients = backward, returns_gradients
        self._waiting: deque[PartitionTask] = deque()  # for the next node of this call

    def issue_or_queue(self, tasks: Sequence[PartitionTask]) -> None:
        """Issue tasks; queue them if a task of the same run of the engine is being issued."""
        queue = _QUEUES.get(torch._C._current_graph_task_id())
        if queue is not None and not self.returns_gradients:
            queue.extend((self.backward, task) for task in tasks)
            return
        self._waiting.extend(tasks)
        if queue is None:
            self.issue_waiting()

    def issue_waiting(self) -> None:
        """Issue the tasks that wait for a node of this call, then all that were queued meanwhile.

        Tasks that other calls queued are left to the task within which this node runs, if any. If
        a task raises, queued tasks are dropped: the engine drops the nodes behind them.
        """
        run = torch._C._current_graph_task_id()
        is_nested = run in _QUEUES
        queue = _QUEUES.setdefault(run, deque())
        try:
            while self._waiting:
                self.backward.issue(*self._waiting.popleft())
            while queue and not is_nested:
                owner, task = queue.popleft()
                owner.issue(*task)
        finally:
            self._waiting.clear()
            if not is_nested:
                del _QUEUES[run]


class _Tasks(Function):
    """Issues tasks, in order."""

    @staticmethod
    def forward(ctx: Any, issuer: TaskIssuer, tasks: Sequence[PartitionTask], _: Tensor) -> Tensor:
        ctx.issuer, ctx.partition_tasks = issuer, tasks
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        ctx.issuer.issue_or_queue(ctx.partition_tasks)
        return None, None, None  # the engine runs the node before nevertheless


class _ForgetOnDelete:
    """Calls ``forget`` of a backward when the graph that leads to it is deleted."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __del__(self) -> None:
        self._backward.forget()


class _Gather(Function):
    """The outputs of the mini-batch: takes their gradients."""

    @staticmethod
    def forward(ctx: Any, issuer: TaskIssuer, outputs: Sequence[Tensors], *ends: Tensor) -> Any:
        ctx.issuer, ctx.forget_on_delete = issuer, _ForgetOnDelete(issuer.backward)
        ctx.n_ends = len(ends)
        ctx.sizes = [
            [len(x) if x.dim() else 1 for x in parts] for parts in zip(*outputs, strict=True)
        ]
        ctx.set_materialize_grads(False)
        whole = join_outputs(outputs)
        integers = [x for x in whole if not (x.is_floating_point() or x.is_complex())]
        ctx.mark_non_differentiable(*integers)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        parts = [
            [None] * len(sizes) if x is None else x.split(sizes) if len(sizes) > 1 else [x]
            for x, sizes in zip(gradients, ctx.sizes, strict=True)
        ]
        issuer = ctx.issuer
        issuer.returns_gradients = issuer.backward.begin(list(zip(*parts, strict=True)))
        return (None,) * (2 + ctx.n_ends)


class _Scatter(Function):
    """The leaves, inputs and parameters: returns their gradients if the engine is to have them."""

    @staticmethod
    def forward(ctx: Any, issuer: TaskIssuer, n_inputs: int, *leaves: Tensor) -> Tensor:
        ctx.issuer, ctx.n_leaves = issuer, len(leaves)
        ctx.n_edges_read = n_inputs  # by `pipeexec.autograd_graph`
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        if not ctx.issuer.returns_gradients:
            return (None,) * (2 + ctx.n_leaves)
        ctx.issuer.issue_waiting()
        return None, None, *ctx.issuer.backward.leaf_gradients()


def join_outputs(outputs: Sequence[Tensors]) -> Tensors:
    """Return the outputs of micro-batches as the outputs of one mini-batch."""
    if len(outputs) == 1:
        return tuple(x.detach() for x in outputs[0])
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def join_gradients(
    gradients: Sequence[Mapping[Any, Tensor]], shapes: Sequence[Sequence[torch.Size]]
) -> list[Tensor | None]:
    """Return the gradients of a mini-batch's inputs, from those of its micro-batches.

    ``gradients`` are by the number of the input, ``shapes`` those of the inputs. A missing gradient
    is zero; if no micro-batch has one, it is None.
    """
    whole: list[Tensor | None] = []
    for k in range(len(shapes[0])):
        like = next((tensors[k] for tensors in gradients if k in tensors), None)
        if like is None:
            whole.append(None)
            continue
        parts = [
            tensors[k] if k in tensors else like.new_zeros(sizes[k])
            for tensors, sizes in zip(gradients, shapes, strict=True)
        ]
        whole.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return whole
