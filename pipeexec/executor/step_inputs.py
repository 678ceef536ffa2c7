"""`StepInputs`: the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pipeexec.devices.device import Device, Values
from pipeexec.devices.remote import RemoteDevice, device_ranks
from pipeexec.distributed.processes import Processes
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.nesting import Arguments, call_arguments, with_tensors
from pipeexec.stages.batch_shares import BatchShares
from pipeexec.stages.batches import Batch, split_batches, to_devices
from pipeexec.stages.loss.loss_function import LossFunction
from pipeexec.stages.loss.loss_shapes import LossShapes
from pipeexec.stages.loss.step_loss import StepLoss
from pipeexec.stages.microbatches import BatchFacts, Microbatches, batch_facts
from pipeexec.stages.random_numbers import task_seed
from pipeexec.stages.sample_dims import BatchDims
from pipeexec.stages.sequence_slices.cut_batch import SequenceCut
from pipesim.errors import ArgumentError
from pipesim.graph.graph import TaskGraph


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
    arguments
        Positional and keyword arguments of the first stage for each micro-batch of all replicas,
        with the tensors of the whole batch; None if it takes the tensors alone.
    seed
        Seed from which the seeds of tasks are derived.
    """

    shares: BatchShares
    microbatches: list[Values]
    loss: StepLoss
    number: int
    arguments: Sequence[Arguments] | None = None
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
    batch_dims: BatchDims = MappingProxyType({}),
    slice_dim: int = 1,
    is_split: bool = False,
) -> StepInputs:
    """Split a batch into micro-batches on their devices; all processes must call this.

    The first stage of a model that ``is_split`` by `pipeexec.split` takes the tensors alone.
    """
    n_microbatches = shares.n_shares * shares.n_microbatches
    numbers = shares.local_numbers()
    inputs_split, targets_split, sizes = split_batches(
        inputs,
        targets,
        shares.n_microbatches,
        len(shares.local),
        batch_dims,
        SequenceCut(graph.n_slices, slice_dim),
    )
    if any(batch_dims.values()):  # outputs may have their samples anywhere
        loss.is_checked = True
    homes = graph.homes[shares.replica.ravel()[numbers]]
    first, last = ([devices[d].torch_device for d in homes[:, stage]] for stage in (0, -1))
    microbatches: list[Values] = [()] * n_microbatches
    for index, values in zip(numbers, to_devices(inputs_split, first), strict=True):
        microbatches[index] = values
    labels: list[Any] = [None] * n_microbatches
    on_last = [device.type != "meta" for device in last]
    tensors = to_devices(targets_split, last)
    forms = targets if isinstance(targets, Microbatches) else [targets] * len(numbers)
    for index, label, form, is_here in zip(numbers, tensors, forms, on_last, strict=True):
        if is_here and targets is not None:
            labels[index] = with_tensors(form, label)
    facts = batch_facts(inputs, targets)
    weights = shares.agree(
        [] if inputs is None else sizes, [] if targets is None else sizes, processes, facts
    )
    step_loss = StepLoss(
        loss,
        weights,
        labels,
        shares,
        graph.n_batches,
        [device.torch_device for device in devices if not isinstance(device, RemoteDevice)],
        processes,
        [index for index, is_here in zip(numbers, on_last, strict=True) if is_here],
        device_ranks([devices[d] for d in graph.homes[:, -1]], processes.rank if processes else 0),
    )
    if facts is not None:
        step_loss.output_shapes = _loss_shapes(facts, shares, loss)
    arguments = None if is_split else _microbatch_arguments(inputs, graph, numbers, n_microbatches)
    return StepInputs(shares, microbatches, step_loss, number, arguments)


def _loss_shapes(facts: BatchFacts, shares: BatchShares, loss: LossFunction) -> LossShapes:
    """Return the shapes of `Microbatches`; raise `ArgumentError` for weights of a sum."""
    if facts.weights is not None and loss.reduction == "sum":
        raise ArgumentError(
            "Microbatches have weights, which are those of a mean, but loss_reduction is 'sum'; "
            "leave the weights out"
        )
    return LossShapes(shares.target_shapes(), has_weights=shares.has_weights)


def _microbatch_arguments(
    inputs: Batch | None, graph: TaskGraph, numbers: Sequence[int], n_microbatches: int
) -> Sequence[Arguments] | None:
    """Return the arguments of the first stage for each micro-batch; None if they are tensors.

    ``numbers`` are those of this process's micro-batches; others have no arguments.
    """
    if not isinstance(inputs, Microbatches):
        arguments = _nested_arguments(inputs, graph)
        return None if arguments is None else [arguments] * n_microbatches
    own = [_nested_arguments(x, graph) for x in inputs]
    rows: list[Arguments] = [((), {})] * n_microbatches
    for number, arguments in zip(numbers, own, strict=True):
        if arguments is None:  # of one, so of all: they are nested alike
            return None
        rows[number] = arguments
    return rows


def _nested_arguments(inputs: Batch | None, graph: TaskGraph) -> Arguments | None:
    """Return the arguments of the first stage; None if they are tensors, all positional."""
    row = inputs if isinstance(inputs, tuple) else (inputs,)
    if inputs is None or all(isinstance(x, Tensor) for x in row):
        return None
    if 0 in graph.sharded:
        raise ArgumentError(
            f"the first stage is sharded, and takes tensors of which the last one has the keys, "
            f"got {type(inputs).__name__}; give a tuple of tensors"
        )
    return call_arguments(inputs)
