"""`link_engine`: the graph of a backward in which torch's engine chooses the order.

The nodes are those of torchgpipe without fork and join between micro-batches (arXiv 2004.09910,
section 3.2.1). They carry phony tensors in place of gradients, and issue tasks of the executor in
place of kernels. A micro-batch has in each partition::

    Copy ──> Wait ──> Layers ──> Wait ──> Fork ──> Join
                                            └─> Recompute

Layers issues B, and Recompute R. Copy and the first Wait are missing in the first partition, the
second Wait in the last; Fork, Recompute and Join where nothing is recomputed. The engine runs the
newest ready node of a thread. A node is as new as the nodes that its thread made before: Layers are
made by a thread a device, which each forward starts anew, all others by the caller's. So the first
steps of a process may have another order than later ones.

The phony tensors are on the devices of the partitions. On several GPUs the engine has a thread
each, and these threads race.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pipeexec.gpipe.backward_order import TaskIssuer, clock_cycles
from pipesim.ops import Op


class _Node(Function):
    """A node of one micro-batch in one partition; its phonies tie it to other nodes."""

    n_outputs = 1
    op: Op | None = None  # of the task that it issues

    @classmethod
    def append(
        cls, issuer: TaskIssuer, device: torch.device, i: int, j: int, *phonies: Tensor
    ) -> Any:
        """Return the phonies of a new node, on ``device``; it takes the given ones."""
        return cls.apply(issuer, cls.n_outputs, cls.op, device, i, j, *phonies)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(
        ctx: Any,
        issuer: TaskIssuer,
        n_outputs: int,
        op: Op | None,
        device: torch.device,
        i: int,
        j: int,
        *phonies: Tensor,
    ) -> Any:
        ctx.issuer, ctx.microbatch, ctx.partition = issuer, i, j
        ctx.partition_tasks = [] if op is None else [(op, i, j)]
        # A GPU's thread of the engine issues the tasks of its GPU; see `TaskIssuer` for the CPU's.
        ctx.is_direct = device.type != "cpu"
        ctx.n_phonies = len(phonies)
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.empty(0, device=device) for _ in range(n_outputs))
        return outputs if n_outputs > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        if ctx.is_direct:
            for task in ctx.partition_tasks:
                ctx.issuer.backward.issue(*task)
        elif ctx.partition_tasks:
            ctx.issuer.issue_or_queue(ctx.partition_tasks)
        return (None,) * (6 + ctx.n_phonies)


class Copy(_Node):
    """A message to this partition."""


class Wait(_Node):
    """A stream that waits for another."""


class Layers(_Node):
    """The layers: issues B."""

    op = Op.B


class Recompute(_Node):
    """The layers again: issues R."""

    op = Op.R


class Fork(_Node):
    """The origin of a phony for `Recompute`."""

    n_outputs = 2


class Join(_Node):
    """The end of a phony: what comes before it in the backward is issued before `Layers`."""


def link_engine(
    recomputed: Sequence[bool],
    tracked: Sequence[int],
    devices: Sequence[torch.device],
    issuer: TaskIssuer,
    phony: Tensor,
) -> list[Tensor]:
    """Append the nodes of a backward to ``phony``; return the last phony of each micro-batch.

    Parameters
    ----------
    recomputed
        For each micro-batch, whether it has R.
    tracked
        Partitions that have a backward, in order.
    devices
        Device of each partition.
    """

    def node(kind: type[_Node], i: int, j: int, *phonies: Tensor) -> Any:
        return kind.append(issuer, devices[j], i, j, *phonies)

    m, first, last = len(recomputed), tracked[0], tracked[-1]
    ends = [phony] * m  # of each micro-batch
    with ExitStack() as stack:
        threads = {
            device: stack.enter_context(ThreadPoolExecutor(1)) for device in dict.fromkeys(devices)
        }
        for cycle in clock_cycles(m, last + 1):
            cells = [(i, j) for i, j in cycle if j in tracked]
            for kind in (Copy, Wait):
                for i, j in cells:
                    if j > first:
                        ends[i] = node(kind, i, j, ends[i])
            layers = [threads[devices[j]].submit(node, Layers, i, j, ends[i]) for i, j in cells]
            for (i, j), future in zip(cells, layers, strict=True):
                ends[i] = future.result()
                if j < last:
                    ends[i] = node(Wait, i, j, ends[i])
                if recomputed[i]:
                    ends[i], fork = node(Fork, i, j, ends[i])
                    ends[i] = node(Join, i, j, ends[i], node(Recompute, i, j, fork))
    return ends
