"""The order of the backward, through the autograd graph.

Each R and each B is one node of the graph. Nodes carry no gradients, which the tables of a call do,
but phony tensors without elements, which say who comes first. So the engine, which runs one node
after the other, only says in which order the tasks of the backward are issued; streams run them.

Nothing in the data says whether ``B[i, j]`` or ``B[i+1, j]`` comes first. A phony tensor does: the
node of ``F[i, j]`` makes one, that of ``F[i+1, j]`` takes it, and so the engine must run
``B[i+1, j]`` first (torchgpipe, arXiv 2004.09910, section 3.2.1, figure 5)::

    enter ──> B[0,0] ── R[0,0] ──> B[0,1] ── R[0,1] ──> leave
                           │                    │
                           v                    v            the backward goes against the arrows
    enter ──> B[1,0] ── R[1,0] ──> B[1,1] ── R[1,1] ──> leave

Without the arrows down, the engine takes the node that was made last among those that it could run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pipesim.errors import ExecutionError
from pipesim.ops import Op

__all__ = ["Backward", "joined", "link", "ordered", "unordered"]

Cell = tuple[int, int]
Node = tuple[Op, int, int]
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


def ordered(cycles: Iterable[Sequence[Cell]], recomputed: Sequence[bool]) -> Iterator[Node]:
    """Return nodes as they are made where dependencies give the order: as forwards are issued."""
    for i, j in chain.from_iterable(cycles):
        yield Op.B, i, j
        if recomputed[i]:
            yield Op.R, i, j


def unordered(
    recomputed: Sequence[bool], partitions: Iterable[int], seed: int | None
) -> Iterator[Node]:
    """Return nodes as they are made where nothing gives an order to micro-batches.

    In each partition first those of B, in order, or shuffled if there is a ``seed``; then those of
    R, which so come first in the backward: as under torchgpipe without its dependencies, whose
    recomputes, too, are newer than any B.
    """
    draws = None if seed is None else random.Random(seed)
    for j in partitions:
        microbatches = list(range(len(recomputed)))
        if draws is not None:
            draws.shuffle(microbatches)
        yield from ((Op.B, i, j) for i in microbatches)
        yield from ((Op.R, i, j) for i in microbatches if recomputed[i])


def link(
    backward: Backward, inputs: Tensors, nodes: Iterable[Node], *, dependencies: bool
) -> Callable[[Sequence[Tensors]], Tensors]:
    """Make the graph of a backward; return what makes outputs its own.

    Parameters
    ----------
    backward
        What is to be run.
    inputs
        Of the mini-batch: those that require a gradient get theirs.
    nodes
        What to make nodes of, in this order.
    dependencies
        Whether ``B[i+1, j]`` must come before ``B[i, j]``.

    Returns
    -------
    Callable
        Takes the outputs of each micro-batch, and returns those of the mini-batch.
    """
    entry = torch.empty(0, requires_grad=True)
    if any(x.requires_grad for x in inputs):
        entry = _Enter.apply(backward, *inputs)  # type: ignore[no-untyped-call]
    made: dict[Cell, Tensor] = {}  # what the newest node of each task says
    for op, i, j in nodes:
        before = [made[i, j]] if op == Op.R else [made.get((i, j - 1), entry)]
        if dependencies and op == Op.B and i:
            before.append(made[i - 1, j])
        made[i, j] = _Task.apply(backward, op, i, j, *before)  # type: ignore[no-untyped-call]
    last = max(j for _, j in made)
    ends = [phony for (_, j), phony in made.items() if j == last]

    def leave(outputs: Sequence[Tensors]) -> Tensors:
        return _Leave.apply(backward, outputs, *ends)  # type: ignore[no-untyped-call, no-any-return]

    return leave


class _Task(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, op: Op, i: int, j: int, *before: Tensor) -> Tensor:
        ctx.task = backward, op, i, j
        ctx.nothing = (None,) * (4 + len(before))
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ExecutionError(
                "backward(create_graph=True) does not go through GPipe: there are no second "
                "derivatives; leave it out, or use the module alone"
            )
        backward, op, i, j = ctx.task
        backward.issue(op, i, j)
        return ctx.nothing  # the engine goes on to who made `before` all the same


class _Forgets:
    """Lets a backward forget when the graph that leads to it is gone."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __del__(self) -> None:
        self._backward.forget()


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: Sequence[Tensors], *ends: Tensor) -> Any:
        ctx.gradients_of, ctx.forgets = backward, _Forgets(backward)
        ctx.sizes = [
            [len(x) if x.dim() else 1 for x in parts] for parts in zip(*outputs, strict=True)
        ]
        ctx.nothing = (None,) * (2 + len(ends))
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
        return ctx.nothing


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, backward: Backward, *inputs: Tensor) -> Tensor:
        ctx.gradients_of = backward
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> Any:
        return None, *ctx.gradients_of.entry_gradients()


def joined(outputs: Sequence[Tensors]) -> Tensors:
    """Return the outputs of micro-batches as those of one mini-batch."""
    if len(outputs) == 1:
        return tuple(x.detach() for x in outputs[0])
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
