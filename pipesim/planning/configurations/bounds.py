"""Certified lower bounds on step and memory of a configuration, in any order of its tasks.

A device that holds stages S of a pipeline, for m micro-batches:

- cannot start before the first micro-batch has gone forward through the stages before min S;
- computes F and B (or I and W) of S for all micro-batches one after another;
- if backwards are not split, ends with a B of a stage in S, and the stages before that one still
  have to go backward;
- ends its last backward before the gradients of that stage are reduced, its optimizer steps, and
  its parameters are gathered.

The longest sum of these over devices is a bound on the step. So is the longest path of a stage: the
first micro-batch reaches it, it computes F and B (or I) of all, and the last one goes back to stage
0, whose gradients are then reduced. Memory is at least parameters,
gradients and optimizer, with the activations and the workspace of one micro-batch of one stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.network.network import Network, all_reduce_seconds
from pipesim.scheduling.placement import Layout, Placement, replica_devices
from pipesim.utils.csr import Ints, bincount

__all__ = [
    "Bounds",
    "DeviceWork",
    "Reductions",
    "StageDevices",
    "device_work",
    "least_end",
    "least_memory",
    "reductions",
]

Floats = NDArray[np.float64]
#: Share by which bounds are lowered, since sums of seconds are rounded.
_ROUNDING = 1e-9
#: Bytes of a stage's gradients that no GPU holds.
_MOST_BYTES = 1e13


class Bounds(NamedTuple):
    """Lower bounds on the seconds of a step, and on the bytes of each device of a pipeline.

    Bytes include the allocator's reserve.
    """

    step: float
    memory: Floats


class StageDevices(NamedTuple):
    """Devices of the stages of a placement of one path, for sums and extremes over their stages.

    Attributes
    ----------
    device
        Device of each stage.
    n_devices
        Number of devices, each of which has a stage.
    stages
        Stages in order of their devices.
    starts
        Position in ``stages`` of the first stage of each device.
    """

    device: Ints
    n_devices: int
    stages: Ints
    starts: Ints

    @classmethod
    def of_placement(cls, placement: Placement) -> StageDevices:
        """Return the devices of the stages of a placement."""
        device = np.array(placement.paths[0])
        stages = np.argsort(device, kind="stable")
        starts = np.searchsorted(device[stages], np.arange(placement.n_devices))
        return cls(device, placement.n_devices, stages, starts)

    @property
    def first(self) -> Ints:
        """First stage of each device."""
        return self.stages[self.starts]

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the values of the stages of each device."""
        return bincount(self.device, values, self.n_devices)

    def least(self, values: Floats) -> Floats:
        """Return the least value of the stages of each device."""
        least: Floats = np.minimum.reduceat(values[self.stages], self.starts)
        return least

    def most(self, values: Floats) -> Floats:
        """Return the largest value of the stages of each device."""
        most: Floats = np.maximum.reduceat(values[self.stages], self.starts)
        return most


class Reductions(NamedTuple):
    """Seconds of an all-reduce over the replicas of each device: at least a line of its bytes.

    Attributes
    ----------
    least
        Seconds without bytes; shape ``(n_devices,)``.
    slope
        Seconds a byte; shape ``(n_devices,)``.
    """

    least: Floats
    slope: Floats


class DeviceWork(NamedTuple):
    """Seconds of each device of a pipeline, shape ``(n_devices,)``, and of each stage.

    Attributes
    ----------
    busy
        Work for one micro-batch.
    head
        Seconds before the device can start.
    tail
        Seconds after its last backward until all micro-batches are done.
    stage_busy
        F and B, or I, of each stage for one micro-batch; shape ``(n_stages,)``.
    stage_ends
        Seconds before a stage can start, and from its last B (or I) to the last backward of stage
        0, its W included; shape ``(n_stages,)``.
    """

    busy: Floats
    head: Floats
    tail: Floats
    stage_busy: Floats
    stage_ends: Floats

    def least_step(self, n_microbatches: int, end: Floats, first: int) -> float:
        """Return the bound on a step.

        ``end`` is the result of `least_end`, ``first`` the device of stage 0.
        """
        total = n_microbatches * self.busy + self.head + np.maximum(self.tail, end)
        path = n_microbatches * self.stage_busy + self.stage_ends
        return float(max(total.max(), path.max() + end[first])) * (1 - _ROUNDING)


def device_work(costs: Costs, devices: StageDevices, *, splits_backward: bool) -> DeviceWork:
    """Return the work of each device; ``splits_backward`` if any backward is I and W."""
    n = len(devices.device)
    forward, backward = costs.per_stage("forward", n), costs.per_stage("backward", n)
    chain = backward  # what the stages before wait for
    if splits_backward:
        chain = np.zeros(n) if costs.input_grad is None else costs.per_stage("input_grad", n)
        chain = np.minimum(backward, chain)
        backward = _least_backward(costs, n)
    head, tail = (_sums_before(x) for x in (forward, backward))
    ends = head[1:] - forward + chain.cumsum() - chain + (backward[0] - chain[0])
    if splits_backward:  # a W may come last, which nothing waits for
        tail = np.zeros(n + 1)
    return DeviceWork(
        devices.sums(forward + backward), head[devices.first], tail[devices.first],
        forward + chain, ends,
    )  # fmt: skip


def _sums_before(values: Floats) -> Floats:
    """Return the sum of the values before each stage, and that of all."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


def _least_backward(costs: Costs, n_stages: int) -> Floats:
    """Return the least seconds of a backward of each stage: of B, or of I and W."""
    whole = costs.per_stage("backward", n_stages)
    if costs.input_grad is None or costs.weight_grad is None:
        return whole
    parts = costs.per_stage("input_grad", n_stages) + costs.per_stage("weight_grad", n_stages)
    return np.minimum(whole, parts)


def reductions(
    network: Network, n_replicas: int, n_devices: int, layout: Layout, algorithm: str
) -> Reductions | None:
    """Return bounds on all-reduces over the replicas of each device; None for one replica.

    Seconds are a line of bytes for each algorithm, and the least of such lines is concave: it lies
    above its chord from 0 to `_MOST_BYTES`.
    """
    if n_replicas == 1:
        return None
    devices = replica_devices(n_replicas, n_devices, layout)
    formulas = [all_reduce_seconds(network, np.sort(column), algorithm) for column in devices.T]
    least, most = (np.array([x(nbytes) for x in formulas]) for nbytes in (0.0, _MOST_BYTES))
    return Reductions(least, (most - least) / _MOST_BYTES)


def least_end(
    costs: Costs, devices: StageDevices, shares: int, reduction: Reductions | None
) -> Floats:
    """Return the least seconds from the last backward of each device to the end of the step.

    ``shares`` is the number of replicas that share the optimizer, ``reduction`` the result of
    `reductions`.
    """
    n, device = len(devices.device), devices.device
    seconds = costs.per_stage("optimizer_step", n) / shares
    if reduction is not None:
        nbytes = costs.per_stage("gradient_bytes", n)
        if shares > 1:  # a reduce-scatter of gradients and an all-gather of parameters
            nbytes = (nbytes + costs.per_stage("parameter_bytes", n)) / 2
        seconds += reduction.least[device] + reduction.slope[device] * nbytes
    return devices.least(seconds)


def least_memory(costs: Costs, devices: StageDevices, shares: int) -> Floats:
    """Return the least bytes of each device, the allocator's reserve included."""
    n = len(devices.device)
    held = costs.per_stage("parameter_bytes", n) + costs.per_stage("gradient_bytes", n)
    held = held + costs.per_stage("optimizer_bytes", n) / shares
    workspace = np.maximum(
        costs.per_stage("forward_workspace_bytes", n),
        costs.per_stage("backward_workspace_bytes", n),
    )
    used = devices.most(costs.per_stage("activation_bytes", n) + workspace)
    least: Floats = devices.sums(held) + used
    return least * (1 + costs.memory_reserve) * (1 - _ROUNDING)
