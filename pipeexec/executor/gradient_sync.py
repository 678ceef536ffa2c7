"""Gradient reduction over replicas: once, after every k micro-batches, or in overlapped buckets.

*Every k*: the backwards of each k micro-batches add to separate gradients. The backwards of the
next k can then run while these gradients are summed. STEP uses the sums.

*Buckets*: a backward sets an event when all gradients of a bucket are computed. The bucket is then
summed while the backward still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipeexec.data_parallel.gradient_reduction import sum_gradients
from pipeexec.executor.planned_task import Handler, PlannedTask
from pipeexec.executor.step import Step
from pipeexec.stages.restore import add_gradients
from pipesim.errors import ExecutionError


def split_buckets(module: nn.Module, n: int) -> list[list[nn.Parameter]]:
    """Return a module's parameters in ``n`` buckets of about equal bytes, the last ones first.

    If the forward uses the parameters in the order of their registration, a backward computes their
    gradients in the order of the buckets.
    """
    parameters = list(module.parameters())[::-1]
    total = sum(p.nbytes for p in parameters)
    split: list[list[nn.Parameter]] = [[] for _ in range(n)]
    offset = 0
    for parameter in parameters:
        center = offset + parameter.nbytes / 2
        split[min(n - 1, int(center * n / total)) if total else 0].append(parameter)
        offset += parameter.nbytes
    return split


def mark_buckets(handler: Handler, step: Step, task: PlannedTask) -> None:
    """Run a backward; set the event of each bucket when its gradients are computed."""
    n_buckets = 0 if task.sync is None else task.sync.n_buckets_marked
    setters = [step.events.milestones[task.id, bucket][1] for bucket in range(n_buckets)]
    pending = task.stage.pending_parameters(task.microbatch)
    trained = [
        [p for p in bucket if p.requires_grad and (pending is None or id(p) in pending)]
        for bucket in _buckets(step, task.slot, n_buckets)
    ]
    with _bucket_events(trained, setters):
        handler(step, task)


@contextmanager
def _bucket_events(
    bucket_parameters: Sequence[Sequence[nn.Parameter]], setters: Sequence[Callable[[], object]]
) -> Iterator[None]:
    """Set each bucket's event when all its parameters have gradients, at the latest on exit."""
    n_missing = [len(parameters) for parameters in bucket_parameters]
    ready = {number for number, n in enumerate(n_missing) if not n}
    for number in ready:
        setters[number]()

    with_gradient: set[int] = set()

    def count_gradient(bucket: int, parameter: Tensor) -> None:
        if id(parameter) in with_gradient:
            raise ExecutionError(
                "a backward computed the gradient of a parameter of shape "
                f"{tuple(parameter.shape)} more than once, as "
                "torch.utils.checkpoint(use_reentrant=True) does, so the time at which its bucket "
                'is complete is unknown; use use_reentrant=False, or lower with grad_sync="last"'
            )
        with_gradient.add(id(parameter))
        n_missing[bucket] -= 1
        if not n_missing[bucket]:
            ready.add(bucket)
            setters[bucket]()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(count_gradient, number))
        for number, parameters in enumerate(bucket_parameters)
        for parameter in parameters
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for number in sorted({*range(len(setters))} - ready):
            setters[number]()


def last_microbatch_in_group(microbatch: int, group_size: int) -> int:
    """Return the last micro-batch of a micro-batch's group; the group's REDUCE_GRAD has it."""
    return (microbatch // group_size + 1) * group_size - 1


def add_to_group(handler: Handler, group_size: int, step: Step, task: PlannedTask) -> None:
    """Run a backward with the gradients of its group of micro-batches in ``parameter.grad``."""
    key = task.slot, last_microbatch_in_group(task.microbatch, group_size)
    parameters = list(task.stage.module.parameters())
    # Without an optimizer, .grad holds gradients of earlier steps: the first group adds to them.
    for parameter, gradient in zip(
        parameters, step.gradients.per_microbatch_grads.pop(key, ()), strict=False
    ):
        parameter.grad = gradient
    handler(step, task)
    step.gradients.per_microbatch_grads[key] = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None


def local_gradients(
    step: Step, task: PlannedTask
) -> tuple[list[list[Tensor | None]], list[list[nn.Parameter]], bool]:
    """Return the gradients of a REDUCE_GRAD and the parameters of each local copy.

    The last value is whether they are of a group of micro-batches, and not in ``parameter.grad``.
    """
    is_per_group = bool(step.graph.reduction_groups[task.stage.index])
    parameters = [reduced_parameters(step, slot, task) for slot in task.copies]
    gradients = [
        step.gradients.per_microbatch_grads.pop((slot, task.microbatch))
        if is_per_group
        else [p.grad for p in row]
        for slot, row in zip(task.copies, parameters, strict=True)
    ]
    for gradient in (x for row in gradients for x in row if x is not None):
        task.device.adopt(gradient, task.stream)  # computed on another stream
    graph = step.graph
    members = graph.collectives[int(graph.group[task.id])]
    slots = (graph.replica[members] * graph.n_stages + graph.stage[members]).tolist()
    for slot, row in zip(task.copies, gradients, strict=True):
        nbytes = sum(gradient_bytes(x) for x in row if x is not None)
        step.events.nbytes[int(members[slots.index(slot)])] = nbytes
    return gradients, parameters, is_per_group


#: Sums the gradients of a task, of each local copy, for the parameters of the first copy.
SumCopies = Callable[
    [PlannedTask, list[list[Tensor | None]], Sequence[nn.Parameter]], list[Tensor | None]
]


@torch.no_grad()
def reduce_gradients(step: Step, task: PlannedTask, sum_copies: SumCopies | None = None) -> None:
    """Sum the gradients of a REDUCE_GRAD over all replicas of its stage, in all processes.

    The sums overwrite the gradients.
    """
    gradients, parameters_by_copy, is_per_group = local_gradients(step, task)
    sums = (
        sum_gradients(gradients, parameters_by_copy[0], task.group)
        if sum_copies is None
        else sum_copies(task, gradients, parameters_by_copy[0])
    )
    for number, (slot, parameters) in enumerate(zip(task.copies, parameters_by_copy, strict=True)):
        totals = sums if number == 0 else copy_sums(sums, gradients[number], parameters)
        if is_per_group:
            earlier = step.gradients.reduced.get(slot)
            step.gradients.reduced[slot] = (
                totals if earlier is None else add_gradients(earlier, totals)
            )
            continue
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total


def copy_sums(
    sums: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
) -> list[Tensor | None]:
    """Return copies of sums for another replica; dense sums overwrite its dense gradients."""
    copies: list[Tensor | None] = []
    for total, gradient, parameter in zip(sums, gradients, parameters, strict=True):
        if (
            total is None
            or gradient is None
            or gradient is total  # the first copy has none of its own: both would be one tensor
            or gradient.layout != torch.strided
            or (total.layout != torch.strided)
        ):
            copies.append(None if total is None else total.to(parameter.device, copy=True))
        else:
            copies.append(gradient.copy_(total))
    return copies


def gradient_bytes(gradient: Tensor) -> int:
    """Return the bytes of a gradient; of a sparse one, those of its values and indices."""
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


def reduced_parameters(step: Step, slot: int, task: PlannedTask) -> list[nn.Parameter]:
    """Return the parameters of one local copy whose gradients a REDUCE_GRAD sums."""
    if task.sync is None or task.part < 0:
        return list(step.gradients.stages[slot].module.parameters())
    return _buckets(step, slot, task.sync.n_buckets)[task.part]


def _buckets(step: Step, slot: int, n: int) -> list[list[nn.Parameter]]:
    """Return the buckets of a stage; the backward, which runs first, computes them once a step."""
    if slot not in step.gradients.buckets:
        step.gradients.buckets[slot] = split_buckets(step.gradients.stages[slot].module, n)
    return step.gradients.buckets[slot]


def assign_reduced_gradients(step: Step, slot: int) -> None:
    """Assign the gradient sums of a stage's groups to ``parameter.grad``, if there are any."""
    for parameter, total in zip(
        step.gradients.stages[slot].module.parameters(),
        step.gradients.reduced.pop(slot, ()),
        strict=False,
    ):
        parameter.grad = total
