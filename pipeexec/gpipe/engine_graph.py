"""`link_engine`: the graph of a backward in which torch's engine chooses the order.

The nodes are those of torchgpipe without fork and join between micro-batches (arXiv 2004.09910,
section 3.2.1). They carry phony tensors in place of gradients, and issue tasks of the executor in
place of kernels. A micro-batch has in each partition::

    copy ──> wait ──> B ──> wait ──> fork ──> join
                                       └─> R ──┘

The copy and the first wait are missing in the first partition, the second wait in the last; fork, R
and join where nothing is recomputed. The engine runs the newest ready node of a thread. A node is
as new as the nodes that its thread made before: B are made by a thread a device, which each forward
starts anew, all others by the caller's. So the first steps of a process may have another order than
later ones.

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

from pipeexec.gpipe.backward_order import (
    PartitionTask,
    TaskIssuer,
    check_first_derivative,
    clock_cycles,
)
from pipesim.ops import Op


class _Node(Function):
    """A node of one device that issues at most one task; its phonies tie it to other nodes."""

    @staticmethod
    def forward(
        ctx: Any,
        issuer: TaskIssuer,
        task: PartitionTask | None,
        device: torch.device,
        n_outputs: int,
        *phonies: Tensor,
    ) -> Any:
        ctx.issuer, ctx.task, ctx.n_inputs = issuer, task, len(phonies)
        # A GPU's thread of the engine issues the tasks of its GPU; see `TaskIssuer` for the CPU's.
        ctx.is_direct = device.type != "cpu"
        ctx.set_materialize_grads(False)
        outputs = tuple(torch.empty(0, device=device) for _ in range(n_outputs))
        return outputs if n_outputs > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        check_first_derivative()
        if ctx.task is not None:
            if ctx.is_direct:
                ctx.issuer.backward.issue(*ctx.task)
            else:
                ctx.issuer.issue_or_queue([ctx.task])
        return (None,) * (4 + ctx.n_inputs)


def link_engine(
    recomputed: Sequence[bool],
    tracked: Sequence[int],
    devices: Sequence[torch.device],
    issuer: TaskIssuer,
    phony: Tensor,
) -> Tensor:
    """Append the nodes of a backward to ``phony``; return the phony of the last node.

    Parameters
    ----------
    recomputed
        For each micro-batch, whether it has R.
    tracked
        Partitions that have a backward, in order.
    devices
        Device of each partition.
    """

    def node(task: PartitionTask | None, j: int, *phonies: Tensor, n_outputs: int = 1) -> Any:
        return _Node.apply(issuer, task, devices[j], n_outputs, *phonies)  # type: ignore[no-untyped-call]

    m, first, last = len(recomputed), tracked[0], tracked[-1]
    ends = [phony] * m  # of each micro-batch
    with ExitStack() as stack:
        threads = {
            device: stack.enter_context(ThreadPoolExecutor(1)) for device in dict.fromkeys(devices)
        }
        for cycle in clock_cycles(m, last + 1):
            cells = [(i, j) for i, j in cycle if j in tracked]
            for i, j in cells:
                if j > first:
                    ends[i] = node(None, j, ends[i])  # copy
            for i, j in cells:
                if j > first:
                    ends[i] = node(None, j, ends[i])  # wait
            layers = [threads[devices[j]].submit(node, (Op.B, i, j), j, ends[i]) for i, j in cells]
            for (i, j), future in zip(cells, layers, strict=True):
                ends[i] = future.result()
                if j < last:
                    ends[i] = node(None, j, ends[i])  # wait
                if recomputed[i]:
                    ends[i], fork = node(None, j, ends[i], n_outputs=2)
                    ends[i] = node(None, j, ends[i], node((Op.R, i, j), j, fork))  # join
    last_node: Tensor = node(None, last, *ends)
    return last_node
