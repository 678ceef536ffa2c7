"""When replicas sum their gradients: once, after every k micro-batches, or in buckets that overlap.

*Every k*: the backwards of k micro-batches add to gradients of their own, so that those of the next
k may add while these are summed; the sums are the gradients from STEP on. *Buckets*: a backward
marks when it has made the gradients of a bucket, which are then summed while it goes on.
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
from pipeexec.stages.earlier_gradients import add_gradients
from pipesim.errors import ExecutionError

__all__ = [
    "add_per_group",
    "buckets",
    "group_of",
    "mark_buckets",
    "parameters_of",
    "reduce_gradients",
    "settle",
]


def buckets(module: nn.Module, n: int) -> list[list[nn.Parameter]]:
    """Return a module's parameters in buckets of about equal bytes, those used last first.

    As backwards make their gradients, if the parameters are registered as they are used.
    """
    parameters = list(module.parameters())[::-1]
    total = sum(p.nbytes for p in parameters)
    split: list[list[nn.Parameter]] = [[] for _ in range(n)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.nbytes / 2
        split[min(n - 1, int(middle * n / total)) if total else 0].append(parameter)
        before += parameter.nbytes
    return split


def mark_buckets(handler: Handler) -> Handler:
    """Return a backward that marks when each bucket of its stage has its gradients."""
    return partial(_mark, handler)


def _mark(handler: Handler, step: Step, task: PlannedTask) -> None:
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
    """Set the event of each bucket once all its parameters have gradients, or at the end."""
    n_missing = [len(parameters) for parameters in bucket_parameters]
    ready = {number for number, n in enumerate(n_missing) if not n}
    for number in ready:
        setters[number]()

    with_gradient: set[int] = set()

    def note(bucket: int, parameter: Tensor) -> None:
        if id(parameter) in with_gradient:
            raise ExecutionError(
                f"a backward made the gradient of a parameter of shape {tuple(parameter.shape)} "
                "more than once, as torch.utils.checkpoint(use_reentrant=True) does, so that "
                "nobody can tell when its bucket is complete; give use_reentrant=False, or lower "
                'with grad_sync="last"'
            )
        with_gradient.add(id(parameter))
        n_missing[bucket] -= 1
        if not n_missing[bucket]:
            ready.add(bucket)
            setters[bucket]()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, number))
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


def add_per_group(handler: Handler, group: int) -> Handler:
    """Return a backward that adds to the gradients of its ``group`` of micro-batches alone."""
    return partial(_add_to_group, handler, group)


def group_of(microbatch: int, group: int) -> int:
    """Return the number of the REDUCE_GRAD of a micro-batch: the last micro-batch of its group."""
    return (microbatch // group + 1) * group - 1


def _add_to_group(handler: Handler, group: int, step: Step, task: PlannedTask) -> None:
    key = task.slot, group_of(task.microbatch, group)
    parameters = list(task.stage.module.parameters())
    # Without an optimizer, gradients of earlier steps are there, for the first group to take.
    for parameter, gradient in zip(
        parameters, step.gradients.per_microbatch_grads.pop(key, ()), strict=False
    ):
        parameter.grad = gradient
    handler(step, task)
    step.gradients.per_microbatch_grads[key] = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None


@torch.no_grad()
def reduce_gradients(step: Step, task: PlannedTask) -> None:
    """Sum the gradients of a REDUCE_GRAD over all replicas of its stage, here and elsewhere.

    The sums take the memory of the gradients.
    """
    is_per_group = bool(step.graph.reduction_groups[task.stage.index])
    lists = [parameters_of(step, slot, task) for slot in task.copies]
    gradients = [
        step.gradients.per_microbatch_grads.pop((slot, task.microbatch))
        if is_per_group
        else [p.grad for p in parameters]
        for slot, parameters in zip(task.copies, lists, strict=True)
    ]
    for gradient in (x for row in gradients for x in row if x is not None):
        task.device.adopt(gradient, task.stream)  # made on another stream
    _note_bytes(step, task, gradients)
    sums = sum_gradients(gradients, lists[0], task.group)
    for number, (slot, parameters) in enumerate(zip(task.copies, lists, strict=True)):
        totals = sums if number == 0 else _copied(sums, gradients[number], parameters)
        if is_per_group:
            before = step.gradients.reduced.get(slot)
            step.gradients.reduced[slot] = (
                totals if before is None else add_gradients(before, totals)
            )
            continue
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total


def _copied(
    sums: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
) -> list[Tensor | None]:
    """Return copies of sums for another replica, in the memory of its gradients where they fit."""
    copies: list[Tensor | None] = []
    for total, gradient, parameter in zip(sums, gradients, parameters, strict=True):
        if (
            total is None
            or gradient is None
            or gradient.layout != torch.strided
            or (total.layout != torch.strided)
        ):
            copies.append(None if total is None else total.to(parameter.device, copy=True))
        else:
            copies.append(gradient.copy_(total))
    return copies


def _note_bytes(step: Step, task: PlannedTask, gradients: list[list[Tensor | None]]) -> None:
    """Note the bytes that each local copy brings; of sparse gradients, of their rows."""
    graph = step.graph
    members = graph.collectives[int(graph.group[task.id])]
    slots = (graph.replica[members] * graph.n_stages + graph.stage[members]).tolist()
    for slot, row in zip(task.copies, gradients, strict=True):
        member = int(members[slots.index(slot)])
        step.events.nbytes[member] = sum(_size(x) for x in row if x is not None)


def _size(gradient: Tensor) -> int:
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


def parameters_of(step: Step, slot: int, task: PlannedTask) -> list[nn.Parameter]:
    """Return the parameters whose gradients a REDUCE_GRAD sums, of one local copy."""
    if task.sync is None or task.part < 0:
        return list(step.gradients.stages[slot].module.parameters())
    return _buckets(step, slot, task.sync.n_buckets)[task.part]


def _buckets(step: Step, slot: int, n: int) -> list[list[nn.Parameter]]:
    """Return the buckets of a stage, found once a step: by the backward, which comes first."""
    if slot not in step.gradients.buckets:
        step.gradients.buckets[slot] = buckets(step.gradients.stages[slot].module, n)
    return step.gradients.buckets[slot]


def settle(step: Step, slot: int) -> None:
    """Give a stage the sums of what it has handed over, if there are any."""
    for parameter, total in zip(
        step.gradients.stages[slot].module.parameters(),
        step.gradients.reduced.pop(slot, ()),
        strict=False,
    ):
        parameter.grad = total
