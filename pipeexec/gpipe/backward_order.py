"""The order of the backward, through the autograd graph.

Nodes of this graph carry no gradients, which the tables of a call do, but phony tensors without
elements, which say who comes first. So the engine, which runs one node after the other, only says
in which order the tasks of the backward are issued; streams run them.

Nothing in the data says whether ``B[i, j]`` or ``B[i+1, j]`` comes first. A phony tensor does
(torchgpipe, arXiv 2004.09910, section 3.2.1): each clock cycle of the forward is a node, which
takes the phony of the one before, and so the engine must turn the cycles around::

    enter ──> B[0,0] ──> B[1,0] B[0,1] ──> B[2,0] B[1,1] ──> B[2,1] ──> leave

``B[i+1, j]`` is in the cycle behind that of ``B[i, j]``, so that it comes first in the backward,
which goes against the arrows. Each R is right before its B.

Without dependencies just the data tie tasks together, and the engine takes the newest node of those
that are ready. `pipesim.scheduling.autograd_engine` says which order that is for torchgpipe's graph
on a CPU. Here a chain of nodes, each of one task, gives the tasks that order, on GPUs too, where
torchgpipe's is a race (`pipesim.autograd_orders`).

A node may be run while another one is being run. On a GPU, a B calls the engine and waits for the
GPU's thread of the engine; meanwhile the engine runs other nodes in the thread that waits, all that
are ready. These nodes only queue their tasks, which are issued once that B has been issued, so that
no task is issued within another one. A queue belongs to one run of the engine (one ``backward()``):
several calls may be part of one run, and several threads may run one each.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pipesim.errors import ExecutionError
from pipesim.ops import Action, Op, Overlapped
from pipesim.scheduling.autograd_engine import engine_order, newest_first
from pipesim.scheduling.schedule import Schedule

__all__ = ["Backward", "Task", "in_cycles", "in_order", "joined", "link", "undirected"]

Cell = tuple[int, int]
Task = tuple[Op, int, int]
Tensors = tuple[Tensor, ...]


class Backward(Protocol):
    """What the graph gives an order to."""

    def begin(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Take the gradients of the outputs, of each micro-batch one an output."""
        ...

    def issue(self, op: Op, i: int, j: int) -> None:
        """Issue R or B of micro-batch ``i`` in partition ``j``."""
        ...

    def entry_gradients(self) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, once they are there."""
        ...

    def forget(self) -> None:
        """Let go of what a backward would need: there will be none any more."""
        ...


def in_cycles(
    backward: Backward, cycles: Iterable[Sequence[Cell]], recomputed: Sequence[bool], phony: Tensor
) -> Tensor:
    """Make a node a clock cycle of the forward behind a phony; return the phony of the last."""
    for cycle in cycles:
        tasks = newest_first(cycle, recomputed)
        phony = _Tasks.apply(backward, tasks, phony)  # type: ignore[no-untyped-call]
    return phony


def in_order(backward: Backward, tasks: Sequence[Task], phony: Tensor) -> Tensor:
    """Make a node a task behind a phony, so that they are issued in order; return the last phony.

    The first task is the newest node.
    """
    for task in reversed(tasks):
        phony = _Tasks.apply(backward, [task], phony)  # type: ignore[no-untyped-call]
    return phony


def undirected(
    n_partitions: int,
    recomputed: Sequence[bool],
    seed: int | None = None,
    schedule: Schedule | None = None,
) -> list[Task]:
    """Return the tasks of a backward that nothing orders, in the order of the engine on a CPU.

    With a ``schedule`` those of each partition are in its order instead. With a ``seed`` the
    micro-batches of each partition are shuffled: first all its R, then all its B. Both are from the
    last partition to the first.
    """
    if schedule is not None:
        orders = schedule.orders[::-1]
        return [task for order in orders for task in _listed(order, recomputed)]
    if seed is None:
        order = engine_order(n_partitions, len(recomputed), sum(recomputed))
        return [(each.op, each.microbatch or 0, each.stage) for each in order]
    draws = random.Random(seed)
    tasks: list[Task] = []
    for j in range(n_partitions):
        microbatches = list(range(len(recomputed)))
        draws.shuffle(microbatches)
        tasks += [(Op.B, i, j) for i in microbatches]
        tasks += [(Op.R, i, j) for i in microbatches if recomputed[i]]
    return tasks[::-1]


def _listed(order: Iterable[Action | Overlapped], recomputed: Sequence[bool]) -> Iterator[Task]:
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


def link(
    backward: Backward, inputs: Tensors, nodes: Callable[[Tensor], Tensor]
) -> Callable[[Sequence[Tensors]], Tensors]:
    """Make the graph of a backward; return what makes outputs its own.

    Parameters
    ----------
    backward
        What is to be run.
    inputs
        Of the mini-batch: those that require a gradient get theirs.
    nodes
        Makes the nodes of its tasks behind a phony; returns the phony of the last one.

    Returns
    -------
    Callable
        Takes the outputs of each micro-batch, and returns those of the mini-batch.
    """
    entry = torch.empty(0, requires_grad=True)
    if any(x.requires_grad for x in inputs):
        entry = _Enter.apply(backward, *inputs)  # type: ignore[no-untyped-call]
    end = nodes(entry)

    def leave(outputs: Sequence[Tensors]) -> Tensors:
        return _Leave.apply(backward, outputs, end)  # type: ignore[no-untyped-call, no-any-return]

    return leave


class _Tasks(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, tasks: Sequence[Task], _: Tensor) -> Tensor:
        ctx.tasks = backward, tasks
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ExecutionError(
                "backward(create_graph=True) does not go through GPipe: there are no second "
                "derivatives; leave it out, or use the module alone"
            )
        _issue_in_turn(*ctx.tasks)
        return None, None, None  # the engine goes on to the node before all the same


#: Tasks to issue after the one that is being issued, by the number of the engine's run. Numbers
#: are those of the process's one engine, so that this is the process's too; a run has a queue
#: only while one of its tasks is being issued.
_QUEUES: dict[int, deque[tuple[Backward, Task]]] = {}


def _issue_in_turn(backward: Backward, tasks: Sequence[Task]) -> None:
    """Issue tasks; within a task of the same run of the engine, queue them behind it.

    If a task raises, those that are queued are dropped: the engine drops the nodes behind them.
    """
    run = torch._C._current_graph_task_id()
    waiting = [(backward, task) for task in tasks]
    if run in _QUEUES:
        _QUEUES[run].extend(waiting)
        return
    queue = _QUEUES[run] = deque(waiting)
    try:
        while queue:
            owner, task = queue.popleft()
            owner.issue(*task)
    finally:
        del _QUEUES[run]


def _issue_now(backward: Backward) -> None:
    """Issue what is queued of one backward: its result is needed before the task under way ends.

    So only with several calls in one run of the engine: a call's own entry is behind all its tasks.
    """
    queue = _QUEUES.get(torch._C._current_graph_task_id(), deque())
    own = [task for owner, task in queue if owner is backward]
    others = [each for each in queue if each[0] is not backward]
    queue.clear()
    queue.extend(others)
    for task in own:
        backward.issue(*task)


class _Forgets:
    """Lets a backward forget when the graph that leads to it is gone."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __del__(self) -> None:
        self._backward.forget()


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: Sequence[Tensors], _: Tensor) -> Any:
        ctx.gradients_of, ctx.forgets = backward, _Forgets(backward)
        ctx.sizes = [
            [len(x) if x.dim() else 1 for x in parts] for parts in zip(*outputs, strict=True)
        ]
        ctx.set_materialize_grads(False)
        made = joined(outputs)
        can_not = [x for x in made if not (x.is_floating_point() or x.is_complex())]
        ctx.mark_non_differentiable(*can_not)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        parts = [
            [None] * len(sizes) if x is None else x.split(sizes) if len(sizes) > 1 else [x]
            for x, sizes in zip(gradients, ctx.sizes, strict=True)
        ]
        ctx.gradients_of.begin(list(zip(*parts, strict=True)))
        return None, None, None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, *inputs: Tensor) -> Tensor:
        ctx.gradients_of = backward
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> Any:
        _issue_now(ctx.gradients_of)
        return None, *ctx.gradients_of.entry_gradients()


def joined(outputs: Sequence[Tensors]) -> Tensors:
    """Return the outputs of micro-batches as those of one mini-batch."""
    if len(outputs) == 1:
        return tuple(x.detach() for x in outputs[0])
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
