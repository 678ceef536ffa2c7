"""`StepInputs` and `StepGradients`: the micro-batches of one step, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeexec.devices.device import Device, Values
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.distributed.processes import Processes
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.batches import Batch, split_batches, to_devices
from pipeexec.stages.earlier_gradients import EarlierGradients
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.random_numbers import task_seed
from pipeexec.stages.stage_like import StageLike
from pipeexec.stages.step_loss import StepLoss
from pipesim.errors import ExecutionError
from pipesim.graph.graph import TaskGraph

__all__ = ["StepGradients", "StepInputs", "split_inputs"]


@dataclass(eq=False)
class StepInputs:
    """Inputs of one step: micro-batches, loss and seed.

    Attributes
    ----------
    shares
        Share of the batch of each replica.
    microbatches
        Tensors of each micro-batch of all replicas; empty for micro-batches of other processes.
    loss
        Loss of the step: holds the targets and adds the losses of micro-batches.
    number
        Number of the step.
    seed
        Seed from which the seeds of tasks are derived.
    """

    shares: BatchShares
    microbatches: list[Values]
    loss: StepLoss
    number: int
    seed: int = field(default_factory=torch.initial_seed)

    def random_seed(self, task: PlannedTask) -> int:
        """Return the seed of a task's random numbers; 0 if its stage draws none."""
        if not task.stage.is_random.get(task.stage.module.training, True):
            return 0
        return task_seed(self.seed, self.number, task.stage.index, task.global_microbatch)


def split_inputs(
    graph: TaskGraph,
    shares: BatchShares,
    devices: Sequence[Device],
    inputs: Batch | None,
    targets: Batch | None,
    *,
    loss: LossFunction,
    number: int,
    processes: Processes | None = None,
) -> StepInputs:
    """Split a batch into micro-batches on their devices; all processes must call this.

    Raises
    ------
    ArgumentError
        If the batch has too few samples, or the batches of processes are not compatible.
    """
    n_microbatches = shares.n_shares * shares.n_microbatches
    numbers = shares.local_numbers()
    inputs_split, targets_split, sizes = split_batches(
        inputs, targets, shares.n_microbatches, len(shares.local)
    )
    homes = graph.homes[shares.replica.ravel()[numbers]]
    first, last = ([devices[d].torch_device for d in homes[:, stage]] for stage in (0, -1))
    microbatches: list[Values] = [()] * n_microbatches
    for index, values in zip(numbers, to_devices(inputs_split, first), strict=True):
        microbatches[index] = values
    labels: list[Any] = [None] * n_microbatches
    is_single = not isinstance(targets, tuple)
    for index, label in zip(numbers, to_devices(targets_split, last), strict=True):
        labels[index] = (label[0] if label else None) if is_single else label
    sizes = shares.agree(
        [] if inputs is None else sizes, [] if targets is None else sizes, processes
    )
    step_loss = StepLoss(
        loss,
        sizes,
        labels,
        shares,
        graph.n_batches,
        [device.torch_device for device in devices if not isinstance(device, RemoteDevice)],
        processes,
        [index for index, device in zip(numbers, last, strict=True) if device.type != "meta"],
        device_ranks([devices[d] for d in graph.homes[:, -1]], processes.rank if processes else 0),
    )
    return StepInputs(shares, microbatches, step_loss, number)


@dataclass(eq=False)
class StepGradients:
    """Stages that a step trains, and its gradients that are not in ``parameter.grad``.

    Attributes
    ----------
    stages, optimizers
        One for each copy of a stage, replica after replica.
    earlier
        Gradients from before the step; None if there are none, or the step adds to them.
    per_microbatch_grads
        Gradients of groups of micro-batches, by slot and last micro-batch, until they are reduced.
    reduced
        Sums over the groups reduced so far, by slot.
    buckets
        Parameters of each stage in buckets, by slot; computed at the first use.
    """

    stages: Sequence[StageLike]
    optimizers: Sequence[torch.optim.Optimizer | None]
    earlier: EarlierGradients | None = None
    per_microbatch_grads: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)
    reduced: dict[int, list[Tensor | None]] = field(default_factory=dict)
    buckets: dict[int, list[list[nn.Parameter]]] = field(default_factory=dict)

    def divide(self, slot: int, batch: int, loss: StepLoss) -> None:
        """Divide a stage's gradients of a mini-batch by the count of its loss, if there is one.

        Raises
        ------
        ExecutionError
            If the gradients include those from before the step.
        """
        stage = self.stages[slot]
        if not loss.is_counted():
            return
        is_separate = self.optimizers[slot] is not None or (
            self.earlier is not None and slot in self.earlier
        )
        if not is_separate and any(True for _ in stage.module.parameters()):
            raise ExecutionError(
                "loss_fn returned (sum, count), whose gradients are divided at the end of a step, "
                f"but gradients of stage {stage.index} accumulate over steps; give Pipeline an "
                "optimizer, or leave out DistributedDataParallel and cuda_graph"
            )
        loss.divide(stage.module, batch, stage.mean_count)
        if self.earlier is not None:
            self.earlier.end_mini_batch(slot)
