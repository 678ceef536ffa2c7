"""How long messages take by size: measured between idle and between busy devices.

Messages are timed as a step sends them, so that everything on their way counts: a pipeline of
stages that pass on their input runs on the same devices. Idle: one micro-batch. Busy: the sender
has a second one to compute as the first one's message leaves; the receiver waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.devices.remote import RemoteDevice
from pipeexec.executor.pipeline import Pipeline, StepResult
from pipeexec.profiling.link_fit import STATES, Pair
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import SENDS, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SIZES", "measure_transfers", "pairs_of"]

#: Bytes of the messages that are timed.
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: Rows of the square matrices that keep a device busy, and how many products a task has.
_ROWS, _PRODUCTS = 192, 8


def pairs_of(graph: TaskGraph) -> list[Pair]:
    """Return the pairs of devices, sender first, that messages of a graph travel between."""
    sends = np.flatnonzero(graph.is_op(SENDS) & (graph.pair >= 0))
    ends = zip(graph.device[sends].tolist(), graph.device[graph.pair[sends]].tolist(), strict=True)
    return sorted(set(ends))


def measure_transfers(
    pipeline: Pipeline,
    pairs: Sequence[Pair],
    *,
    sizes: Sequence[int] = SIZES,
    repeat: int = 9,
) -> pd.DataFrame:
    """Time messages between pairs of a pipeline's devices; all of its processes must call this.

    Returns
    -------
    pandas.DataFrame
        One row a pair and size: ``source``, ``target`` (numbers of devices), ``nbytes``, and the
        median seconds from the start of the SEND until its receiver computes with the message:
        ``idle`` and ``loaded``.
    """
    import pandas as pd

    found: dict[tuple[Pair, int, str], float] = {}
    for first, second in sorted({(min(pair), max(pair)) for pair in pairs}):
        for state in STATES:
            for nbytes in sizes:
                there, back = _time(pipeline, (first, second), nbytes, state, repeat)
                found[(first, second), nbytes, state] = there
                found[(second, first), nbytes, state] = back
    rows = [
        {"source": pair[0], "target": pair[1], "nbytes": nbytes,
         **{state: found[pair, nbytes, state] for state in STATES}}
        for pair in pairs for nbytes in sizes
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["source", "target", "nbytes", *STATES])


def _time(
    pipeline: Pipeline, pair: Pair, nbytes: int, state: str, repeat: int
) -> tuple[float, float]:
    """Return the median seconds of a message from the first device to the second, and back."""
    graph = _graph(pipeline.graph.n_devices, pair, 1 if state == "idle" else 2)
    n_floats = max(1, nbytes // 4)
    inputs = torch.zeros(graph.n_microbatches, n_floats)
    stages = [_PassOn(0 if state == "idle" else _PRODUCTS) for _ in range(graph.n_stages)]
    own = [device for device in pipeline.devices if not isinstance(device, RemoteDevice)]
    chain = Pipeline(
        stages, graph, own, _first, timeout=pipeline.timeout, processes=pipeline.processes
    )
    chain.step(inputs, inputs)  # the first step learns what stages are like
    results = [chain.gather(chain.step(inputs, inputs)) for _ in range(repeat)]
    there, back = (
        float(np.median([_hop(result, op) for result in results])) for op in (Op.SEND_F, Op.SEND_B)
    )
    return there, back


def _graph(n_devices: int, pair: Pair, n_microbatches: int) -> TaskGraph:
    """Return all forwards, then all backwards, of stages of which the first two are the pair's."""
    order = [*pair, *(d for d in range(n_devices) if d not in pair)]
    rows = [""] * n_devices
    counts = range(n_microbatches)
    for stage, device in enumerate(order):
        rows[device] = " ".join(f"{stage}{op}{j}" for op in "FB" for j in counts)
    return lower(
        Schedule.from_orders(
            [row.split() for row in rows], placement=Placement(order), name="messages"
        ),
        step="none",
    )


def _hop(result: StepResult, op: Op) -> float:
    """Return the seconds from the first SEND of an op until its receiver computes with it."""
    timeline = result.timeline
    graph = timeline.graph
    stage = 0 if op is Op.SEND_F else 1
    send = int(np.flatnonzero((graph.op == op) & (graph.stage == stage))[0])
    consumers = graph.dependencies.transpose()[int(graph.pair[send])]
    return max(float(timeline.start[consumers].min() - timeline.start[send]), 1e-9)


def _first(output: Tensor, targets: Tensor) -> Tensor:
    return output[:, 0].mean()


class _PassOn(nn.Module):
    """Returns its input, after some work; its gradient likewise."""

    def __init__(self, n_products: int) -> None:
        super().__init__()
        self.n_products = n_products
        self.register_buffer("matrices", torch.zeros(2, _ROWS, _ROWS))
        self.matrices: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        passed: Tensor = _Passed.apply(x, self)  # type: ignore[no-untyped-call]
        return passed

    def work(self) -> None:
        """Keep the device busy."""
        for _ in range(self.n_products):
            torch.mm(self.matrices[0], self.matrices[0], out=self.matrices[1])


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: _PassOn) -> Tensor:
        ctx.module = module
        module.work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.work()
        return gradient, None
