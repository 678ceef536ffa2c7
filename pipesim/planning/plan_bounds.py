"""Certified lower bounds on the step and the memory of a configuration, in any order of its tasks.

A device that holds stages S of a pipeline, for m micro-batches:

- cannot start before the first micro-batch has gone forward through the stages before min S;
- computes F and B (or I and W) of S for all micro-batches one after another;
- if backwards are not split, ends with a B of a stage in S, and the stages before that one still
  have to go backward;
- ends its last backward before the gradients of that stage are reduced, its optimizer steps, and
  its parameters are gathered.

The longest sum of these over devices is a bound on the step. So is the longest path of a stage: the
first micro-batch reaches it, it computes F and B (or I) of all, and the last one goes back to stage
0, whose gradients are then reduced.

F, B and I include the exchanges of experts, unless these run behind the other half of a pair. If
micro-batches are slices of sequences, the first F and the last B of a stage are those of a first
slice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.microbatch_costs import averaged, largest_costs, least_costs
from pipesim.costs.pricing import exchange_seconds, moved_bytes, shared_bytes
from pipesim.network.collectives import all_reduce_seconds
from pipesim.network.network import Network
from pipesim.planning.choice import Floats, StageDevices
from pipesim.scheduling.placement import Layout, replica_devices

#: Share by which bounds are lowered, since sums are rounded.
ROUNDING = 1e-9
#: Bytes of a stage's gradients that no GPU holds.
_MOST_BYTES = 1e13


class Sharing(NamedTuple):
    """Replicas that share what a stage holds.

    ``optimizer``: number of replicas that share the optimizer; 1 if each has all of it.
    ``parameters``: whether they share parameters and gradients too.
    """

    optimizer: int = 1
    parameters: bool = False


class Bounds(NamedTuple):
    """Lower bounds on the seconds of a step, and on the bytes of each device of a pipeline.

    Bytes include the allocator's reserve.
    """

    step: float
    memory: Floats


class Reductions(NamedTuple):
    """Seconds of an all-reduce over the replicas of each device: at least a line of its bytes.

    Seconds without bytes, and seconds a byte; shape ``(n_devices,)``.
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
        return float(max(total.max(), path.max() + end[first])) * (1 - ROUNDING)


def device_work(
    costs: Costs,
    devices: StageDevices,
    *,
    splits_backward: bool,
    hides_exchanges: bool = False,
    n_slices: int = 1,
) -> DeviceWork:
    """Return the work of each device for a micro-batch, or for a sequence in slices.

    ``splits_backward``: whether any backward is I and W. ``hides_exchanges``: whether exchanges of
    experts may run beside the compute of another micro-batch.
    """
    options = {"splits_backward": splits_backward, "hides_exchanges": hides_exchanges}
    if n_slices == 1 and costs.n_microbatches is not None:  # of several lengths
        mean, least = (_work_of_one(x, devices, **options) for x in (
            averaged(costs), least_costs(costs)
        ))  # fmt: skip
        return least._replace(busy=mean.busy, stage_busy=mean.stage_busy)
    if n_slices == 1:
        return _work_of_one(costs, devices, **options)
    first, *others = (
        _work_of_one(costs.microbatch(k), devices, **options) for k in range(n_slices)
    )
    for work in others:
        first = first._replace(
            busy=first.busy + work.busy, stage_busy=first.stage_busy + work.stage_busy
        )
    return first


def _work_of_one(
    costs: Costs, devices: StageDevices, *, splits_backward: bool, hides_exchanges: bool
) -> DeviceWork:
    n = len(devices.device)
    forward, backward = costs.per_stage("forward", n), costs.per_stage("backward", n)
    exchanges: Floats | float = exchange_seconds(costs, n) if costs.expert_layers else 0.0
    hidden = 2 * exchanges if hides_exchanges else 0.0
    forward += exchanges
    backward += exchanges
    chain = backward  # what the stages before wait for
    if splits_backward:
        chain = np.zeros(n) if costs.input_grad is None else costs.per_stage("input_grad", n)
        chain = np.minimum(backward, chain + exchanges)
        if costs.input_grad is not None and costs.weight_grad is not None:  # B, or I and W
            parts = costs.per_stage("input_grad", n) + costs.per_stage("weight_grad", n)
            backward = np.minimum(backward, parts + exchanges)
    # Sums of the values before each stage, and of all.
    head, tail = (np.concatenate([[0.0], x.cumsum()]) for x in (forward, backward))
    ends = head[1:] - forward + chain.cumsum() - chain + (backward[0] - chain[0])
    if splits_backward:  # a W may come last, which nothing waits for
        tail = np.zeros(n + 1)
    return DeviceWork(
        devices.sums(forward + backward - hidden), head[devices.first], tail[devices.first],
        forward + chain - hidden, ends,
    )  # fmt: skip


def reductions(
    network: Network,
    n_replicas: int,
    n_devices: int,
    layout: Layout,
    algorithm: str,
    step: int = 1,
) -> Reductions | None:
    """Return bounds on all-reduces over every ``step``-th replica of each device; None for one.

    Seconds are a line of bytes for each algorithm, and the least of such lines is concave: it lies
    above its chord from 0 to `_MOST_BYTES`.
    """
    if n_replicas == step:
        return None
    devices = replica_devices(n_replicas, n_devices, layout)
    columns = [column[::step] for column in devices.T]
    formulas = [all_reduce_seconds(network, column, algorithm) for column in columns]
    least, most = (np.array([x(nbytes) for x in formulas]) for nbytes in (0.0, _MOST_BYTES))
    return Reductions(least, (most - least) / _MOST_BYTES)


def least_end(
    costs: Costs,
    devices: StageDevices,
    sharing: Sharing,
    reduction: Reductions | None,
    of_experts: Reductions | None = None,
) -> Floats:
    """Return the least seconds from the last backward of each device to the end of the step.

    ``reduction`` is the result of `reductions`, and ``of_experts`` that of the replicas that have
    the same experts.
    """
    n, device = len(devices.device), devices.device
    seconds = costs.per_stage("optimizer_step", n) / sharing.optimizer
    if costs.reduce_copies:
        seconds += costs.per_stage("reduce_copies", n)
    has_experts = costs.expert_replicas > 1
    experts = _moved_bytes(costs, n, sharing, "expert_") if has_experts else 0.0
    if reduction is not None:
        part = 0.5 if sharing.parameters else 1.0  # a reduce-scatter is half of an all-reduce
        nbytes = _moved_bytes(costs, n, sharing) - experts
        if costs.reduced_share != 1:
            nbytes = nbytes * costs.per_stage("reduced_share", n)
        seconds += part * reduction.least[device] + reduction.slope[device] * nbytes
    if of_experts is not None:
        seconds += of_experts.slope[device] * experts
    return devices.least(seconds)


def _moved_bytes(costs: Costs, n_stages: int, sharing: Sharing, prefix: str = "") -> Floats:
    """Return the bytes of an all-reduce that takes as long as the reductions of each stage.

    If replicas share the optimizer, these are a reduce-scatter of gradients and an all-gather of
    parameters, unless parameters are gathered in the next step.
    """
    gradients = costs.per_stage(f"{prefix}gradient_bytes", n_stages) * costs.exchanged_gradients
    if sharing.optimizer == 1:
        return gradients
    if costs.gradient_exchange == "all_reduce":
        gradients *= 2
    if sharing.parameters:
        return gradients / 2
    return (gradients + costs.per_stage(f"{prefix}parameter_bytes", n_stages)) / 2


# Memory is at least parameters, gradients and optimizer, with the activations and the workspace of
# one micro-batch of one stage. When the first backward of a device begins, the activations of its
# micro-batch are held by all stages of the device. If micro-batches are slices of sequences, the
# last slice runs while the activations of the others are held. Of parameters that replicas share,
# those of a stage are gathered while it computes.


def least_memory(
    costs: Costs,
    devices: StageDevices,
    sharing: Sharing,
    *,
    splits_backward: bool = True,
    offloads: bool = False,
    n_slices: int = 1,
) -> Floats:
    """Return the least bytes of each device, the allocator's reserve included.

    If micro-batches differ, the first of a device may be the shortest, and each runs at some time.
    ``splits_backward`` and ``offloads``: whether any backward is I and W, and whether activations
    may be in host memory.
    """
    n = len(devices.device)
    shares = sharing.optimizer if sharing.parameters else 1
    held = shared_bytes(costs, n, shares, "parameter") + shared_bytes(costs, n, shares, "gradient")
    held += shared_bytes(costs, n, sharing.optimizer, "optimizer")
    of_backward: Floats | None = None
    if sharing.parameters and not splits_backward:
        of_backward = moved_bytes(costs, n, shares, "gradient")
    longest, shortest = largest_costs(costs), least_costs(costs)
    if n_slices == 1:
        most = _used_bytes(longest, n, of_backward)
    else:
        slices = [costs.microbatch(k) for k in range(n_slices)]
        used = [_used_bytes(own, n, of_backward) for own in slices]
        most = np.max(used, axis=0)
        if not offloads:  # the last slice runs with the activations of the others
            most = used[-1] + sum(own.per_stage("activation_bytes", n) for own in slices[:-1])
    gathered = moved_bytes(costs, n, shares, "parameter") if sharing.parameters else 0.0
    needed = devices.most(most + gathered)
    if n_slices == 1 and not offloads:
        activations = devices.sums(shortest.per_stage("activation_bytes", n))
        workspace = shortest.per_stage("backward_workspace_bytes", n) + gathered
        needed = np.maximum(needed, activations + devices.least(workspace))
    least: Floats = devices.sums(held) + needed
    return least * (1 + costs.memory_reserve) * (1 - ROUNDING)


def _used_bytes(costs: Costs, n_stages: int, of_backward: Floats | None) -> Floats:
    """Return activations and workspace of a micro-batch; ``of_backward`` are bytes of B besides."""
    forward, backward, activations = (
        costs.per_stage(f"{x}_bytes", n_stages)
        for x in ("forward_workspace", "backward_workspace", "activation")
    )
    if of_backward is not None:
        backward = backward + of_backward
    used: Floats = activations + np.maximum(forward, backward)
    return used
