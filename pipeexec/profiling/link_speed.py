"""Seconds of messages by size, between idle and between loaded devices: measured, and fitted.

Messages are timed in steps of a pipeline, so that every delay on their way counts. Its stages
return their input and run on the same devices.

- Idle: one micro-batch.
- Loaded: the sender computes a second micro-batch when it sends the first; the receiver waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec.devices.device import RemoteDevice
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.profiling.task_seconds import ShapeClasses
from pipesim.analysis.replay import message_times
from pipesim.errors import ArgumentError
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.network.links import HostLink, Link
from pipesim.network.network import Network
from pipesim.ops import COPIES, RECVS, SENDS, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]
#: Numbers of two devices, sender first. `ALL` stands for all pairs together.
Pair = tuple[int, int]
ALL: Pair = (-1, -1)
#: State of the devices while messages are timed.
STATES = ("idle", "loaded")
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
        stages, graph, own, lambda output, _: output[:, 0].mean(),
        timeout=pipeline.timeout, processes=pipeline.processes,
    )  # fmt: skip
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


#: A slope is accepted if it lowers the deviation to less than this share of that without slope.
_SLOPE_GAIN = 0.5
#: Mean relative deviation of a pair from the fit of all pairs above which it has a separate link.
_PAIR_DEVIATION = 0.3


@dataclass(frozen=True)
class Fit:
    """Seconds of a message as ``latency + nbytes / bandwidth``.

    Attributes
    ----------
    latency
        Seconds, never negative.
    bandwidth
        Bytes per second; ``math.inf`` if the size of messages does not matter, as when they are
        passed by reference. That is so if the largest message spends less than half of its time
        on its bytes, or if a constant deviates less than twice as much as the line.
    residual
        Mean relative deviation of the fit from each measured size: 1 for half or twice as long.
    r2
        Share of the variance of the seconds that the fit explains; NaN if they do not vary.
    """

    latency: float
    bandwidth: float
    residual: float
    r2: float

    def seconds(self, nbytes: Floats | float) -> Floats:
        """Return the seconds of messages."""
        return self.latency + np.asarray(nbytes, dtype=np.float64) / self.bandwidth


def fit(nbytes: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Fit:
    """Fit a latency and a bandwidth to the seconds of messages of several sizes.

    Candidates are all lines through two points, through one point without latency, and through one
    point without slope. The fit is the line with the least mean relative deviation. Small messages
    therefore count as much as large ones, too short as much as too long, and outliers little.
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    lines = [(0.0, b / a) for a, b in zip(x, y, strict=True) if a] + [(float(b), 0.0) for b in y]
    for i, j in combinations(range(len(x)), 2):
        if x[i] != x[j]:
            slope = (y[j] - y[i]) / (x[j] - x[i])
            lines.append((float(y[i] - slope * x[i]), float(slope)))
    deviation, latency, slope = min(
        (_deviation(a + b * x, y), a, b) for a, b in lines if a >= 0 and b >= 0
    )
    flat = min((_deviation(np.full_like(y, a), y), float(a)) for a in y)
    if slope * float(x.max()) <= latency or deviation >= _SLOPE_GAIN * flat[0]:
        (deviation, latency), slope = flat, 0.0
    rest, spread = float(((latency + slope * x - y) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return Fit(
        latency=latency,
        bandwidth=1 / slope if slope else math.inf,
        residual=deviation,
        r2=1 - rest / spread if np.ptp(y) > 0 else math.nan,
    )


def _deviation(fitted: Floats, seconds: Floats) -> float:
    """Return the mean relative deviation of fitted seconds: 1 for half, or twice, as long."""
    with np.errstate(divide="ignore"):
        return float((np.maximum(fitted / seconds, seconds / fitted) - 1).mean())


def fits(transfers: pd.DataFrame) -> dict[tuple[Pair, str], Fit]:
    """Fit the table of `measure_transfers`: by pair and state, and by `ALL` pairs and state."""
    groups = by_pair(transfers)
    if groups:
        groups[ALL] = transfers
    return {
        (pair, state): fit(group["nbytes"].to_numpy(), group[state].to_numpy())
        for pair, group in groups.items()
        for state in STATES
    }


def by_pair(transfers: pd.DataFrame) -> dict[Pair, pd.DataFrame]:
    """Return the rows of each pair of devices."""
    ends = zip(transfers["source"].tolist(), transfers["target"].tolist(), strict=True)
    return {
        pair: transfers[(transfers["source"] == pair[0]) & (transfers["target"] == pair[1])]
        for pair in sorted(set(ends))
    }


def with_fits(
    transfers: pd.DataFrame, fitted: Mapping[tuple[Pair, str], Fit]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return transfers with columns of the seconds by the fit of their pair, and the fits."""
    from pipesim.utils.packages import pandas as pd

    extended = transfers.assign(**{f"{state}_fit": math.nan for state in STATES})
    for pair, group in by_pair(transfers).items():
        for state in STATES:
            seconds = fitted[pair, state].seconds(group["nbytes"].to_numpy())
            extended.loc[group.index, f"{state}_fit"] = seconds
    rows = [
        {"source": pair[0], "target": pair[1], "state": state} | vars(line)
        for (pair, state), line in fitted.items()
    ]
    columns = ["source", "target", "state", "latency", "bandwidth", "residual", "r2"]
    return extended, pd.DataFrame(rows, columns=columns).set_index(columns[:3])


def network_of(
    transfers: pd.DataFrame, fitted: Mapping[tuple[Pair, str], Fit], timelines: Iterable[Timeline]
) -> Network:
    """Return the network of messages under load.

    Bandwidths are those of the fits. A latency is a mean over the messages of ``timelines`` for
    which a consumer waited: the seconds from SEND to consumer, less those of the bytes. If no
    consumer waited, it is the latency of the fit.

    All pairs share one latency and bandwidth, unless some pair deviates on average by more than
    30 % from the fit of all pairs and by less than half as much from its own fit. Then each pair
    has a link, and unmeasured pairs have the largest latency and the smallest bandwidth.
    """
    messages = _awaited_messages(timelines)
    all_messages = [row for rows in messages.values() for row in rows]
    if not fitted:
        return _speed(all_messages, 0.0, math.inf)
    common = fitted[ALL, "loaded"]
    network = _speed(all_messages, common.latency, common.bandwidth)
    groups = by_pair(transfers)
    if not any(_differs(group, common, fitted[pair, "loaded"]) for pair, group in groups.items()):
        return network
    links = []
    for pair in groups:
        own = fitted[pair, "loaded"]
        speed = _speed(messages.get(pair, []), own.latency, own.bandwidth)
        links.append(Link(speed.latency, speed.bandwidth, (pair,)))
    slowest = min(link.bandwidth for link in links)
    return Network(max(link.latency for link in links), slowest, tuple(links))


def message_costs(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return ``network`` and ``output_seconds`` of `Costs` from the messages of steps alone.

    A line is fitted to the seconds of SENDs by their bytes: it gives the bandwidth, and the seconds
    that a SEND holds its stream besides. Messages of one size have bandwidth alone. All pairs share
    one latency, which is as in `network_of`.
    """
    nbytes, seconds = _bytes_and_seconds(timelines, SENDS)
    if not len(nbytes):
        return {"network": Network()}
    bandwidth, held = float(nbytes.sum() / seconds.sum()), 0.0
    if np.ptp(nbytes) > 0:
        line = _fit_by_size(nbytes, seconds)
        bandwidth, held = line.bandwidth, line.latency
    awaited = _awaited_messages(timelines).values()
    messages = [(size, lasted - held) for rows in awaited for size, lasted in rows]
    return {"network": _speed(messages, 0.0, bandwidth), "output_seconds": held}


def _differs(group: pd.DataFrame, common: Fit, own: Fit) -> bool:
    """Return whether messages of a pair take clearly longer or shorter than those of all pairs."""
    seconds = common.seconds(group["nbytes"].to_numpy())
    deviation = float(np.abs(seconds / group["loaded"].to_numpy() - 1).mean())
    return deviation > max(_PAIR_DEVIATION, 2 * own.residual)


def _speed(messages: list[tuple[float, float]], latency: float, bandwidth: float) -> Network:
    """Return a network of this bandwidth; its latency is that of the messages, if any."""
    if messages:
        nbytes, seconds = np.array(messages).T
        latency = max(0.0, float((seconds - nbytes / bandwidth).mean()))
    return Network(latency=latency, bandwidth=bandwidth)


def _awaited_messages(timelines: Iterable[Timeline]) -> dict[Pair, list[tuple[float, float]]]:
    """Return bytes and seconds of messages that a consumer waited for, by pair of devices."""
    messages: dict[Pair, list[tuple[float, float]]] = {}
    for timeline in timelines:
        graph, seconds = timeline.graph, message_times(timeline, waited_only=True)
        for recv in np.flatnonzero(graph.is_op(RECVS) & ~np.isnan(seconds)).tolist():
            ends = int(graph.device[graph.pair[recv]]), int(graph.device[recv])
            row = float(timeline.nbytes[recv]), float(seconds[recv])
            messages.setdefault(ends, []).append(row)
    return messages


# Measure the bytes that OFFLOADs move, and the link to host memory, in steps that offload.
#
# Copies run beside compute tasks, as in the steps that are to be predicted.

#: Sizes for which the link is fitted, each by the median of its copies; more add no knowledge.
_MOST_SIZES = 32


def graphs_that_offload(graphs: Sequence[TaskGraph]) -> list[TaskGraph]:
    """Return the graphs with OFFLOADs."""
    return [graph for graph in graphs if graph.is_op(COPIES).any()]


def check_shares(graphs: Sequence[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs that offload different shares of one stage.

    Whole tensors are moved, so that bytes are measured for one share.
    """
    shares: dict[int, tuple[float, str]] = {}
    for graph in graphs_that_offload(graphs):
        whole = (graph.op == Op.OFFLOAD) & (graph.part < 0)
        for stage in np.unique(graph.stage[whole]).tolist():
            share = float(graph.offload_shares[stage])
            first, name = shares.setdefault(stage, (share, graph.name))
            if first != share:
                raise ArgumentError(
                    f"graph {graph.name!r} offloads the share {share:g} of stage {stage}, graph "
                    f"{name!r} {first:g}: whole tensors are moved, and one Costs has the bytes of "
                    "one share; measure each with its own pipeline"
                )


def check_microbatches(graph: TaskGraph, graphs: Sequence[TaskGraph]) -> None:
    """Raise `ArgumentError` for graphs that cannot run the `Microbatches` of another graph."""
    for other in graphs:
        if other.n_microbatches != graph.n_microbatches:
            raise ArgumentError(
                f"graph {other.name!r} offloads and has {other.n_microbatches} micro-batches, the "
                f"pipeline {graph.n_microbatches}: offloads are measured in steps of that graph, "
                "which cannot run the given Microbatches; measure each with its own pipeline"
            )


def offload_bytes(
    timelines: Sequence[Timeline], n_stages: int, classes: ShapeClasses | None = None
) -> dict[str, Any]:
    """Return ``offload_bytes`` of `Costs`: the most that an OFFLOAD of each stage moved.

    With ``classes`` of `Microbatches`, the most of each class; shape ``(n_stages, n_shares *
    n_microbatches)``. Empty if no activations were offloaded, but inputs alone, or nothing.
    """
    shape = (1, 1) if classes is None else classes.number.shape
    nbytes = np.zeros((n_stages, *shape))
    moved = False
    for timeline in timelines:
        graph = timeline.graph
        whole = np.flatnonzero((graph.op == Op.OFFLOAD) & (graph.part < 0))
        share, microbatch = np.zeros((2, len(whole)), dtype=np.int64)
        if classes is not None:
            share = copy_of_replicas(graph.homes)[graph.replica[whole]]
            microbatch = graph.microbatch[whole].astype(np.int64)
        np.maximum.at(nbytes, (graph.stage[whole], share, microbatch), timeline.nbytes[whole])
        moved |= len(whole) > 0
    if not moved:
        return {}
    flat = nbytes.reshape(n_stages, -1)
    return {"offload_bytes": tuple(flat[:, 0].tolist()) if classes is None else classes.most(flat)}


def host_link(timelines: Sequence[Timeline]) -> HostLink | None:
    """Return the link that fits the copies to and from hosts; None without any."""
    to_hosts = [timeline for timeline in timelines if timeline.graph.offload_to == "host"]
    nbytes, seconds = _bytes_and_seconds(to_hosts, COPIES)
    if not len(nbytes):
        return None
    line = _fit_by_size(nbytes, seconds)
    return HostLink(line.latency, line.bandwidth)


def _bytes_and_seconds(timelines: Sequence[Timeline], ops: frozenset[Op]) -> tuple[Floats, Floats]:
    """Return the bytes and the seconds, which are above 0, of the tasks of some operations."""
    sizes, seconds = [np.empty(0)], [np.empty(0)]
    for timeline in timelines:
        tasks = np.flatnonzero(timeline.graph.is_op(ops))
        sizes.append(timeline.nbytes[tasks])
        seconds.append(timeline.duration[tasks])
    return np.concatenate(sizes), np.maximum(np.concatenate(seconds), 1e-9)


def _fit_by_size(nbytes: Floats, seconds: Floats) -> Fit:
    """Fit a line to the median seconds of each of at most `_MOST_SIZES` sizes."""
    different = np.unique(nbytes)
    different = different[np.linspace(0, len(different) - 1, _MOST_SIZES).astype(int)]
    different = np.unique(different)
    return fit(different, [float(np.median(seconds[nbytes == size])) for size in different])
