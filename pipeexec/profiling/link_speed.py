"""Measure the seconds of messages by size, between idle and between loaded devices.

Messages are timed in steps of a pipeline, so that every delay on their way counts. Its stages
return their input and run on the same devices.

- Idle: one micro-batch.
- Loaded: the sender computes a second micro-batch when it sends the first; the receiver waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.devices.remote import RemoteDevice
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.results.step_result import StepResult
from pipeexec.profiling.link_fit import STATES, Pair
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.ops import SENDS, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd


#: Bytes of the timed messages.
SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: Rows of the square matrices that keep a device busy, and number of products per task.
_ROWS, _PRODUCTS = 192, 8


def pairs_of(graph: TaskGraph) -> list[Pair]:
    """Return the pairs of devices between which a graph sends messages; sender first."""
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
        One row per pair and size: ``source``, ``target`` (numbers of devices), ``nbytes``,
        ``idle`` and ``loaded``. The last two are median seconds from the start of the SEND to the
        start of the task that uses the message.
    """
    from pipesim.utils.packages import pandas as pd

    medians: dict[tuple[Pair, int, str], float] = {}
    for first, second in sorted({(min(pair), max(pair)) for pair in pairs}):
        for state in STATES:
            for nbytes in sizes:
                forward, backward = _time(pipeline, (first, second), nbytes, state, repeat)
                medians[(first, second), nbytes, state] = forward
                medians[(second, first), nbytes, state] = backward
    rows = [
        {"source": pair[0], "target": pair[1], "nbytes": nbytes,
         **{state: medians[pair, nbytes, state] for state in STATES}}
        for pair in pairs for nbytes in sizes
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["source", "target", "nbytes", *STATES])


def _time(
    pipeline: Pipeline, pair: Pair, nbytes: int, state: str, repeat: int
) -> tuple[float, float]:
    """Return median seconds of a message from the first device to the second, and the reverse."""
    graph = _graph(pipeline.graph.n_devices, pair, 1 if state == "idle" else 2)
    n_floats = max(1, nbytes // 4)
    inputs = torch.zeros(graph.n_microbatches, n_floats)
    stages = [_Identity(0 if state == "idle" else _PRODUCTS) for _ in range(graph.n_stages)]
    own = [device for device in pipeline.devices if not isinstance(device, RemoteDevice)]
    chain = Pipeline(
        stages, graph, own, _first, timeout=pipeline.timeout, processes=pipeline.processes
    )
    chain.step(inputs, inputs)  # the first step learns the shapes of outputs
    results = [chain.gather(chain.step(inputs, inputs)) for _ in range(repeat)]
    forward, backward = (
        float(np.median([_message_seconds(result, op) for result in results]))
        for op in (Op.SEND_F, Op.SEND_B)
    )
    return forward, backward


def _graph(n_devices: int, pair: Pair, n_microbatches: int) -> TaskGraph:
    """Return all forwards, then all backwards, of one stage per device; the pair comes first."""
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


def _message_seconds(result: StepResult, op: Op) -> float:
    """Return the seconds from the first SEND of an op to the start of its first consumer."""
    timeline = result.timeline
    graph = timeline.graph
    stage = 0 if op is Op.SEND_F else 1
    send = int(np.flatnonzero((graph.op == op) & (graph.stage == stage))[0])
    consumers = graph.dependencies.transpose()[int(graph.pair[send])]
    return max(float(timeline.start[consumers].min() - timeline.start[send]), 1e-9)


def _first(output: Tensor, targets: Tensor) -> Tensor:
    return output[:, 0].mean()


class _Identity(nn.Module):
    """Compute some products, then return the input; likewise for its gradient."""

    def __init__(self, n_products: int) -> None:
        super().__init__()
        self.n_products = n_products
        self.register_buffer("matrices", torch.zeros(2, _ROWS, _ROWS))
        self.matrices: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        output: Tensor = _WorkingIdentity.apply(x, self)  # type: ignore[no-untyped-call]
        return output

    def work(self) -> None:
        """Keep the device busy."""
        for _ in range(self.n_products):
            torch.mm(self.matrices[0], self.matrices[0], out=self.matrices[1])


class _WorkingIdentity(torch.autograd.Function):
    """Identity whose forward and backward first call `_Identity.work`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: _Identity) -> Tensor:
        ctx.module = module
        module.work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.work()
        return gradient, None
