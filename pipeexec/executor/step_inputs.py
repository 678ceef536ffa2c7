"""The batch of a step: check it, split it into micro-batches, and warn about what it shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pipeexec.data_parallel.compiled_modules import compiled_backends
from pipeexec.devices.device import Device, RemoteDevice, Values, device_ranks
from pipeexec.distributed.processes import Processes
from pipeexec.executor.planned_task import PlannedTask
from pipeexec.executor.step_gradients import StepGradients
from pipeexec.nesting import Arguments, call_arguments, tensors_in, with_tensors
from pipeexec.stages.batches import Batch, BatchDims, check_batch, split_batches, to_devices
from pipeexec.stages.loss_function import LossFunction
from pipeexec.stages.microbatches import BatchShares, Microbatches, batch_facts
from pipeexec.stages.module_call import task_seed
from pipeexec.stages.sequence_slices import NO_SLICES, SequenceCut
from pipeexec.stages.split_backward import SplitBackward
from pipeexec.stages.stage import StageLike
from pipeexec.stages.step_loss import LossShapes, StepLoss
from pipesim.errors import (
    ArgumentError,
    ExecutionError,
    LossWarning,
    NanLossWarning,
    RandomnessWarning,
    SplitBackwardWarning,
)
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.scheduling.placement import entry_stages
from pipesim.utils.caller_warnings import warn_caller


def check_step_batch(
    inputs: Batch | None,
    targets: Any,
    graph: TaskGraph,
    devices: Sequence[Device],
    loss_stages: Iterable[int] = (),
) -> None:
    """Raise unless a step can train on a batch, and this process has the tensors that it needs."""
    if graph.forward_only:
        raise ExecutionError(
            f"a step trains, but {graph.name!r} was lowered with forward_only=True; call "
            f"{'generate' if graph.prompt_slices else 'evaluate or predict'}, or lower the "
            "schedule without it"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ExecutionError(
            "a step trains, but was called under torch.no_grad() or torch.inference_mode(); "
            "call it outside"
        )
    check_batch_is_here(inputs, targets, graph, devices, loss_stages)


def check_batch_is_here(
    inputs: Batch | None,
    targets: Any,
    graph: TaskGraph,
    devices: Sequence[Device],
    loss_stages: Iterable[int] = (),
    *,
    needs_targets: bool = True,
) -> None:
    """Raise unless a batch is valid, and this process has the tensors that it needs.

    ``loss_stages`` are the stages before the last one that have a loss.
    """
    check_batch(inputs, targets)
    entries = entry_stages(graph.edges, graph.n_stages)
    first = "the first stage" if len(entries) == 1 else "a first stage"
    rows = [("inputs", inputs, entries, first), ("targets", targets, [-1], "the last stage")]
    rows += [("targets", targets, [k], f"stage {k}, which has a loss") for k in loss_stages]

    def is_here(stages: Sequence[int]) -> bool:
        homes = graph.homes[:, list(stages)].ravel()
        return not all(isinstance(devices[d], RemoteDevice) for d in homes)

    for name, batch, stages, text in rows if needs_targets else rows[:1]:
        if batch is None and is_here(stages):
            raise ArgumentError(f"{name} are None, but this process has {text}; give them here")
    if len(entries) == 1:
        return
    for row in inputs if isinstance(inputs, Microbatches) else [inputs]:
        for stage, values in inputs_of_entries(row, entries).items():
            if row is not None and not tensors_in(values) and is_here([stage]):
                raise ArgumentError(
                    f"inputs[{stage}] have no tensors, but this process has stage {stage}, which "
                    "takes inputs of its own; give them here"
                )


def inputs_of_entries(inputs: Batch | None, entries: Sequence[int]) -> dict[int, Batch | None]:
    """Return the inputs of each stage that no other feeds, in the order in which they are given.

    Of several such stages, inputs are a mapping of their numbers. Stages of other processes may be
    left out.
    """
    if inputs is None or len(entries) == 1:
        return dict.fromkeys(entries, inputs)
    if not isinstance(inputs, Mapping) or not set(inputs) <= set(entries):
        got = list(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        example = ", ".join(f"{stage}: ..." for stage in entries)
        raise ArgumentError(
            f"stages {', '.join(map(str, entries))} have no stage before them, and each takes "
            f"inputs of its own; give inputs={{{example}}}, got {got}"
        )
    return dict(inputs) | {stage: None for stage in entries if stage not in inputs}


def warn_of_loss(loss: StepLoss, *, returns_count: bool | None) -> None:
    """Warn if losses of micro-batches do not combine to that of several, or may not."""
    number, unlike, difference = loss.unchecked_number(), loss.unlike_shapes(), loss.difference()
    if unlike is not None:
        name, shapes = unlike
        warn_caller(
            f"{name} of Microbatches have unlike shapes beyond their samples, such as {shapes[0]} "
            f"and {shapes[1]}, and loss_fn returns a mean: micro-batches are weighted by samples, "
            "so a mean over tokens is not that of all tokens; let loss_fn return the tuple (sum, "
            "count), or give px.Microbatches(targets, weights=[number of tokens of each]), or "
            "their numbers of samples if that is right",
            LossWarning,
        )
    if number is not None:
        warn_caller(
            f"the loss depends on {number}, a number that the model computes for each micro-batch: "
            "a step is that of the whole batch only if it is a mean over samples; if it is a mean "
            "over anything else (tokens that are not ignored), leave labels out of the inputs, and "
            "compute the loss in loss_fn, which can return the tuple (sum, count)",
            LossWarning,
        )
    if difference is not None:
        warn_caller(
            f"the losses of {difference.n_microbatches} micro-batches combine to "
            f"{difference.combined:.6g}, but computed at once their loss is "
            f"{difference.whole:.6g}, and gradients at the output differ by "
            f"{difference.gradients:.2g} of their norm: a step is not one of the whole batch; "
            + (
                "loss_fn returns (sum, count), and both must add up over micro-batches, but "
                f"counts add up to {difference.combined_count:g}, and at once the count is "
                f"{difference.whole_count:g}"
                if returns_count
                else "if the loss is a mean over anything else than samples (unmasked tokens, "
                "class weights), let loss_fn return the tuple (sum, count), if it is a sum, "
                "give loss_reduction='sum'"
            ),
            LossWarning,
        )


def warn_of_compiled(graph: TaskGraph, stages: Sequence[StageLike]) -> None:
    """Warn if backwards are split, and stages are compiled by a backend that splits none."""
    split = stages if (graph.op == Op.W).any() else ()
    compiled = sorted({
        stage.index for stage in split
        if not all(isinstance(x, SplitBackward) for x in compiled_backends(stage.module))
    })  # fmt: skip
    if compiled:
        warn_caller(
            f"stage {', '.join(map(str, compiled))}: torch computes all gradients of a compiled "
            "module at once, so I computes those of its weights too, and W only those of layers "
            "that are not compiled; compile with backend=px.SplitBackward(), or run a schedule "
            "without I and W, such as 1f1b",
            SplitBackwardWarning,
        )


def warn_of_untrained(gradients: StepGradients) -> None:
    """Warn of local stages whose parameters are to be trained, and got no gradient in a step.

    Left out are stages of separate gradients: a step may have none in this process.
    """
    has_gradient: dict[int, bool] = {}
    for slot, stage in enumerate(gradients.stages):
        number = slot % gradients.n_stages
        trained = [p for p in stage.module.parameters() if p.requires_grad]
        if trained and slot not in gradients.separate:
            is_any = any(p.grad is not None for p in trained)
            has_gradient[number] = has_gradient.get(number, False) or is_any
    if numbers := [number for number, is_any in has_gradient.items() if not is_any]:
        several = len(numbers) > 1
        warn_caller(
            f"the parameters of stage{'s' * several} {', '.join(map(str, numbers))} require "
            f"gradients, and got none in the step, so that {'they are' if several else 'it is'} "
            "not trained; look for detach(), no_grad() or integers there and in later stages, or "
            "set requires_grad of the parameters to False",
            LossWarning,
        )


def warn_of_nan(microbatches: Iterable[int], step: int) -> None:
    """Warn of micro-batches whose loss is NaN."""
    for microbatch in microbatches:
        warn_caller(
            f"the loss of micro-batch {microbatch} is NaN (step {step}); "
            "look at its inputs, or lower the learning rate",
            NanLossWarning,
        )


def warn_of_randomness(stages: Sequence[StageLike], before: Tensor) -> None:
    """Warn if a stage has used the generator of the process since the state ``before``.

    Stages of several threads use that generator in no fixed order.
    """
    if torch.equal(before, torch.get_rng_state()):
        return
    for stage in stages:
        stage.is_random = dict.fromkeys((True, False), True)
    warn_caller(
        "a stage drew random numbers that it did not draw in its first forward; this step "
        "cannot be repeated, later ones can",
        RandomnessWarning,
    )


@dataclass(eq=False)
class StepInputs:
    """Inputs of one step, whose ``loss`` holds the targets and adds losses of micro-batches.

    Attributes
    ----------
    microbatches
        Tensors of each micro-batch of all replicas, by the stages that take them: those without a
        stage before them. Empty for micro-batches of other processes.
    number
        Number of the step.
    arguments
        Positional and keyword arguments of these stages for each micro-batch of all replicas, with
        the tensors of the whole batch; None if a stage takes the tensors alone.
    """

    shares: BatchShares
    microbatches: dict[int, list[Values]]
    loss: StepLoss
    number: int
    arguments: dict[int, Sequence[Arguments] | None]
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
    cut: SequenceCut = NO_SLICES,
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
        cut,
    )
    if any(batch_dims.values()):  # outputs may have their samples anywhere
        loss.is_checked = True
    homes = graph.homes[shares.replica.ravel()[numbers]]
    last = [devices[d].torch_device for d in homes[:, -1]]
    entries = entry_stages(graph.edges, graph.n_stages)
    microbatches: dict[int, list[Values]] = {s: [()] * n_microbatches for s in entries}
    sample, begin = inputs[0] if isinstance(inputs, Microbatches) else inputs, 0
    for stage, own in inputs_of_entries(sample, entries).items():
        end = begin + len(tensors_in(own))
        first = [devices[d].torch_device for d in homes[:, stage]]
        parts = to_devices([values[begin:end] for values in inputs_split], first)
        for index, values in zip(numbers, parts, strict=True):
            microbatches[stage][index] = values
        begin = end
    on_last = [device.type != "meta" for device in last]
    forms = targets if isinstance(targets, Microbatches) else [targets] * len(numbers)

    def labels_on(torch_devices: Sequence[torch.device]) -> list[Any]:
        """Return the targets of each micro-batch; None for those of other processes."""
        labels: list[Any] = [None] * n_microbatches
        tensors = to_devices(targets_split, torch_devices)
        for index, label, form, device in zip(numbers, tensors, forms, torch_devices, strict=True):
            if device.type != "meta" and targets is not None:
                labels[index] = with_tensors(form, label)
        return labels

    facts = batch_facts(inputs, targets)
    weights = shares.agree(
        [] if inputs is None else sizes, [] if targets is None else sizes, processes, facts
    )
    step_loss = StepLoss(
        loss,
        weights,
        labels_on(last),
        shares,
        graph.n_batches,
        [device.torch_device for device in devices if not isinstance(device, RemoteDevice)],
        processes,
        [index for index, is_here in zip(numbers, on_last, strict=True) if is_here],
        device_ranks([devices[d] for d in graph.homes[:, -1]], processes.rank if processes else 0),
    )
    for stage in loss.of_stages:
        own = [devices[d].torch_device for d in homes[:, stage]]
        step_loss.stage_targets[stage] = labels_on(own)
    if facts is not None:
        if facts.weights is not None and loss.reduction == "sum":
            raise ArgumentError(
                "Microbatches have weights, which are those of a mean, but loss_reduction is "
                "'sum'; leave the weights out"
            )
        step_loss.output_shapes = LossShapes(
            shares.target_shapes(),
            has_weights=shares.has_weights,
            counts_positions=graph.n_slices > 1,
        )
    arguments = {
        stage: None
        if is_split
        else _microbatch_arguments(inputs, numbers, n_microbatches, entries, stage)
        for stage in entries
    }
    return StepInputs(shares, microbatches, step_loss, number, arguments)


def _microbatch_arguments(
    inputs: Batch | None,
    numbers: Sequence[int],
    n_microbatches: int,
    entries: Sequence[int],
    stage: int,
) -> Sequence[Arguments] | None:
    """Return the arguments of a stage for each micro-batch; None if they are tensors.

    ``numbers`` are those of this process's micro-batches; others have no arguments. ``entries`` are
    the stages that take inputs.
    """
    if not isinstance(inputs, Microbatches):
        arguments = _nested_arguments(inputs_of_entries(inputs, entries)[stage])
        return None if arguments is None else [arguments] * n_microbatches
    own = [_nested_arguments(inputs_of_entries(x, entries)[stage]) for x in inputs]
    rows: list[Arguments] = [((), {})] * n_microbatches
    for number, arguments in zip(numbers, own, strict=True):
        if arguments is None:  # of one, so of all: they are nested alike
            return None
        rows[number] = arguments
    return rows


def _nested_arguments(inputs: Batch | None) -> Arguments | None:
    """Return the arguments of a stage; None if they are tensors, all positional."""
    row = inputs if isinstance(inputs, tuple) else (inputs,)
    if inputs is None or all(isinstance(x, Tensor) for x in row):
        return None
    return call_arguments(inputs)
