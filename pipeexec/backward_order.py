"""The order of the backward, through the autograd graph.

Each task and each message of a forward is one node of the graph. Nodes carry no gradients: tables
of the call do, and what a node returns is a placeholder of the right shape. So the engine, which
runs one node at a time, only says in which order backward tasks are issued, and streams run them.

Nothing in the data says whether ``B[i, j]`` or ``B[i+1, j]`` comes first. A phony tensor without
elements does: the node of ``F[i, j]`` makes one, that of ``F[i+1, j]`` takes it, and so the engine
must run ``B[i+1, j]`` first (torchgpipe, arXiv 2004.09910, section 3.2.1, figure 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["Entry", "Node", "enter", "issue", "phony"]


class Node(Protocol):
    """A task or a message, as the autograd graph sees it."""

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what becomes of tensors."""
        ...

    def go_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Issue the task or message of the backward; gradients are placeholders but at the end."""
        ...

    def forget(self) -> None:
        """Let go of what a backward would need: there will be none, or there was one."""
        ...


class Entry(Protocol):
    """Where a mini-batch enters."""

    def entry_gradient(self, i: int, k: int) -> Tensor | None:
        """Return the gradient of micro-batch ``i`` of input ``k``, once it is there."""
        ...


def phony() -> Tensor:
    """Return a tensor without elements that requires a gradient."""
    return torch.empty(0, requires_grad=True)


def issue(
    node: Node, before: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Run a node; its backward comes before that of whoever made the phony ``before``.

    Returns a phony of its own, if it was given one, and what the node returns.
    """
    after, *made = _Issue.apply(node, before, *tensors)  # type: ignore[no-untyped-call]
    return after, tuple(made)


def enter(entry: Entry, chunks: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return micro-batches of tensors of which some need a gradient."""
    parts = _Enter.apply(entry, chunks, *tensors)  # type: ignore[no-untyped-call]
    m = len(parts) // len(tensors)
    return [tuple(parts[i::m]) for i in range(m)]


class _Forgets:
    """Lets a node forget when the graph that could go back through it is gone."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __del__(self) -> None:
        self._node.forget()


class _Issue(Function):
    @staticmethod
    def forward(ctx: Any, node: Node, before: Tensor | None, *tensors: Tensor) -> Any:
        ctx.node, ctx.forgets = node, _Forgets(node)  # also if this fails
        made = node.run(tensors)
        _mark(ctx, made)
        ctx.places = [
            (x.shape, x.dtype, x.device) if need else None
            for x, need in zip(tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        return None if before is None else torch.empty(0), *made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _after: Any, *gradients: Tensor | None) -> Any:
        ctx.node.go_back(gradients)
        places = (
            None if x is None else torch.empty((), dtype=x[1], device=x[2]).expand(x[0])
            for x in ctx.places
        )
        return None, torch.empty(0) if ctx.needs_input_grad[1] else None, *places


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, entry: Entry, chunks: int, *tensors: Tensor) -> Any:
        parts = [[part.detach() for part in x.chunk(chunks)] for x in tensors]
        ctx.entry, ctx.shapes = entry, [[part.shape for part in each] for each in parts]
        flat = [part for each in parts for part in each]
        _mark(ctx, flat)
        return tuple(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        """Wait for the first partition, and put its gradients together."""
        found: list[Tensor | None] = [None, None]
        for k, shapes in enumerate(ctx.shapes):
            parts = [ctx.entry.entry_gradient(i, k) for i in range(len(shapes))]
            like = next((x for x in parts if x is not None), None)
            if like is None:
                found.append(None)
                continue
            zeros = (like.new_zeros(shape) for shape in shapes)
            found.append(
                torch.cat([z if x is None else x for x, z in zip(parts, zeros, strict=True)])
            )
        return tuple(found)


def _mark(ctx: Any, outputs: Sequence[Tensor]) -> None:
    """Mark the outputs that can have no gradient; others need not have one."""
    can_not = [x for x in outputs if not (x.is_floating_point() or x.is_complex())]
    ctx.mark_non_differentiable(*can_not)
    ctx.set_materialize_grads(False)
