"""When replicas sum their gradients: once, after every micro-batch, or in buckets that overlap.

*Every*: a backward hands over what it added, so that the next one may add while that is summed; the
sums are the gradients from STEP on. *Buckets*: a backward marks when it has made the gradients of a
bucket, which are then summed while it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipeexec.earlier_gradients import added
from pipeexec.reduction import summed
from pipeexec.run import Planned, Run
from pipesim.errors import ExecutionError

__all__ = [
    "Work",
    "buckets",
    "handing_over",
    "marking",
    "reduce_gradients",
    "settle",
]

Work = Callable[[Run, Planned], None]


def buckets(module: nn.Module, n: int) -> list[list[nn.Parameter]]:
    """Return a module's parameters in buckets of about equal bytes, those used last first.

    As backwards make their gradients, if the parameters are registered as they are used.
    """
    parameters = list(module.parameters())[::-1]
    total = sum(p.nbytes for p in parameters)
    found: list[list[nn.Parameter]] = [[] for _ in range(n)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.nbytes / 2
        found[min(n - 1, int(middle * n / total)) if total else 0].append(parameter)
        before += parameter.nbytes
    return found


def marking(work: Work) -> Work:
    """Return a backward that marks when each bucket of its stage has its gradients."""
    return partial(_mark, work)


def _mark(work: Work, run: Run, task: Planned) -> None:
    reach = [run.milestones[task.id, bucket][1] for bucket in range(task.marks)]
    pending = task.stage.pending(task.microbatch)
    of_buckets = [
        [p for p in bucket if p.requires_grad and (pending is None or id(p) in pending)]
        for bucket in _buckets(run, task.slot, task.marks)
    ]
    with _watched(of_buckets, reach):
        work(run, task)


@contextmanager
def _watched(
    found: Sequence[Sequence[nn.Parameter]], reach: Sequence[Callable[[], object]]
) -> Iterator[None]:
    """Reach each bucket as soon as all its parameters have gradients; at the latest at the end."""
    left = [len(bucket) for bucket in found]
    reached = {number for number, bucket in enumerate(found) if not bucket}
    for number in reached:
        reach[number]()

    seen: set[int] = set()

    def note(bucket: int, parameter: Tensor) -> None:
        if id(parameter) in seen:
            raise ExecutionError(
                f"a backward made the gradient of a parameter of shape {tuple(parameter.shape)} "
                "more than once, as torch.utils.checkpoint(use_reentrant=True) does, so that "
                "nobody can tell when its bucket is complete; give use_reentrant=False, or lower "
                'with grad_sync="last"'
            )
        seen.add(id(parameter))
        left[bucket] -= 1
        if not left[bucket]:
            reached.add(bucket)
            reach[bucket]()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, number))
        for number, bucket in enumerate(found)
        for parameter in bucket
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for number in sorted({*range(len(found))} - reached):
            reach[number]()


def handing_over(work: Work) -> Work:
    """Return a backward that then hands over the gradients that are there."""
    return partial(_hand_over, work)


def _hand_over(work: Work, run: Run, task: Planned) -> None:
    work(run, task)
    parameters = list(task.stage.module.parameters())
    run.handed[task.slot, task.microbatch] = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None


def _gradients(
    run: Run, task: Planned
) -> tuple[list[list[nn.Parameter]], list[list[Tensor | None]]]:
    """Return parameters and gradients of the local copies that a REDUCE_GRAD is for."""
    lists = [_parameters(run, slot, task) for slot in task.copies]
    if run.graph.grad_sync == "every":
        return lists, [run.handed[slot, task.microbatch] for slot in task.copies]
    return lists, [[parameter.grad for parameter in parameters] for parameters in lists]


@torch.no_grad()
def reduce_gradients(run: Run, task: Planned) -> None:
    """Sum the gradients of a REDUCE_GRAD over all replicas of its stage, here and elsewhere."""
    each = run.graph.grad_sync == "every"
    lists, gradients = _gradients(run, task)
    for slot in task.copies if each else ():
        del run.handed[slot, task.microbatch]
    for gradient in (x for row in gradients for x in row if x is not None):
        task.device.adopt(gradient, task.stream)  # made on another stream
    _note_bytes(run, task, gradients)
    sums = summed(gradients, lists[0], task.members)
    for number, (slot, parameters) in enumerate(zip(task.copies, lists, strict=True)):
        totals = [
            None if x is None else x.to(p.device, copy=number > 0)
            for x, p in zip(sums, parameters, strict=True)
        ]
        if each:
            before = run.reduced.get(slot)
            run.reduced[slot] = totals if before is None else added(before, totals)
            continue
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total


def _note_bytes(run: Run, task: Planned, gradients: list[list[Tensor | None]]) -> None:
    """Note the bytes that each local copy brings; of sparse gradients, of their rows."""
    graph = run.graph
    members = graph.collectives[int(graph.group[task.id])]
    slots = (graph.replica[members] * graph.n_stages + graph.stage[members]).tolist()
    for slot, row in zip(task.copies, gradients, strict=True):
        member = int(members[slots.index(slot)])
        run.nbytes[member] = sum(_size(x) for x in row if x is not None)


def _size(gradient: Tensor) -> int:
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


def _parameters(run: Run, slot: int, task: Planned) -> list[nn.Parameter]:
    if task.part < 0:
        return list(run.modules[slot].parameters())
    return _buckets(run, slot, task.n_parts)[task.part]


def _buckets(run: Run, slot: int, n: int) -> list[list[nn.Parameter]]:
    """Return the buckets of a stage, found once a step: by the backward, which comes first."""
    if slot not in run.buckets:
        run.buckets[slot] = buckets(run.modules[slot], n)
    return run.buckets[slot]


def settle(run: Run, slot: int) -> None:
    """Give a stage the sums of what it has handed over, if there are any."""
    for parameter, total in zip(
        run.modules[slot].parameters(), run.reduced.pop(slot, ()), strict=False
    ):
        parameter.grad = total
