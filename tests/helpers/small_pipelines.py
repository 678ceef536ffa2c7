"""What the tests of pipeexec share: odd modules, the unsplit model, and a watchdog."""

from __future__ import annotations

import copy
import faulthandler
import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.devices.thread_settings import one_thread
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import options_of_schedules

#: Named schedules of whole micro-batches: those of slices cut the second dimension of a batch.
NAMES_WITHOUT_SLICES = [
    name for name, options in options_of_schedules().items() if "n_slices" not in options
]

Call = Callable[[int, int, nn.Module, tuple[Tensor, ...]], Any]


def call_within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; fail, with every thread's stack, where it would hang."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"still running after {seconds} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Nap(nn.Module):
    """Passes its input on; sleeps in forward and in backward, some random time where asked."""

    def __init__(self, forward: float, backward: float, seed: int | None = None) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.draw = None if seed is None else random.Random(seed)

    def forward(self, x: Tensor) -> Tensor:
        share = 1.0 if self.draw is None else self.draw.random()
        return _Sleep.apply(x, *(share * seconds for seconds in self.seconds))


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Faulty) -> Tensor:
        ctx.owner = owner
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.owner.count("backward")
        return gradient, None


#: Calls of modules by kind; not their attributes, as a recomputed forward may change none.
_CALLS: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


class Faulty(nn.Module):
    """Passes its input on; raises ``error`` in one forward or backward, counted from 0.

    A recompute counts as a forward.
    """

    @property
    def calls(self) -> dict[str, int]:
        return _CALLS.setdefault(self, {"forward": 0, "backward": 0})

    @calls.setter
    def calls(self, calls: dict[str, int]) -> None:
        _CALLS[self] = calls

    def __init__(self, error: BaseException, **calls: int) -> None:
        super().__init__()
        self.error, self.failing_calls = error, calls

    def count(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.failing_calls.get(kind) == self.calls[kind] - 1:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.count("forward")
        return _Raise.apply(x, self)

    def repair(self) -> None:
        self.failing_calls = {}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class AddInputs(nn.Linear):
    """A first stage whose batch has two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) + y


def two_target_loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Return a loss whose targets are two tensors."""
    return mse(output, target[0]) + (output * target[1]).mean()


def data(n: int, width: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch, whose samples are 64 bytes: BLAS rounds by how its arguments are aligned."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator), torch.randn(n, width, generator=generator)


def dense(n_layers: int, width: int = 16) -> nn.Sequential:
    """Return a model of ``n_layers`` layers, each with a different result."""
    torch.manual_seed(n_layers)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n_layers))
    )


def cut(model: nn.Sequential, counts: Sequence[int]) -> list[nn.Sequential]:
    """Cut a model into stages of so many layers."""
    ends = np.cumsum([0, *counts])
    return [model[a:b] for a, b in pairwise(ends)]


def nap_stages(n_stages: int, forward: float = 5e-3, backward: float = 5e-3) -> list[nn.Sequential]:
    """Return stages that sleep, so that they take their time whatever the cores do."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), Nap(forward, backward)) for _ in range(n_stages)]


def orders(*rows: str, placement: Placement | None = None) -> ps.Schedule:
    """Return the schedule of a row of actions a device."""
    return ps.Schedule.from_orders([row.split() for row in rows], placement=placement)


def pipeline(
    stages: Sequence[nn.Module], graph: ps.TaskGraph, loss_fn: Any = mse, *args: Any, **options: Any
) -> px.Pipeline:
    """Return a pipeline on CPU workers."""
    return px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, loss_fn, *args, **options)


def gradients(stages: Sequence[nn.Module]) -> list[Tensor | None]:
    """Return the gradient of every parameter."""
    return [parameter.grad for stage in stages for parameter in stage.parameters()]


def train_whole(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    n_steps: int,
) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of steps of an unsplit model with the whole batch."""
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def unsplit(
    stages: Sequence[nn.Module],
    graph: ps.TaskGraph,
    inputs: Any,
    targets: Any,
    loss_fn: Any = mse,
    *,
    reduction: str = "mean",
    call: Call = lambda stage, microbatch, module, values: module(*values),
) -> Tensor:
    """Run the stages as one model, micro-batch by micro-batch; return the loss, set gradients.

    The gradients of the micro-batches are added in the order in which the graph runs their
    backwards, copy by copy: then the arithmetic is the pipeline's, and results must be equal to
    the last bit. Each mini-batch counts as a batch of its own.
    """
    m, of_batch = graph.n_microbatches, graph.n_microbatches // graph.n_batches
    sizes = [part.numel() for part in torch.arange(_n_samples(inputs)).tensor_split(m)]
    passes: list[dict[nn.Parameter, Tensor | None]] = []
    losses = []
    with one_thread():
        for microbatch, size in enumerate(sizes):
            start = sum(sizes[:microbatch])
            output = _part(inputs, start, size)
            for index, module in enumerate(stages):
                values = output if isinstance(output, tuple) else (output,)
                output = call(index, microbatch, module, values)
            target = _part(targets, start, size)
            batch = slice(
                microbatch // of_batch * of_batch, (microbatch // of_batch + 1) * of_batch
            )
            weight = size / sum(sizes[batch]) if reduction == "mean" else 1.0
            loss = loss_fn(output, target) * weight
            losses.append(loss.detach())
            trained = [p for module in stages for p in module.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
            passes.append(dict(zip(trained, grads, strict=True)))
        for index, module in enumerate(stages):
            for parameter in module.parameters():
                paths = [[passes[m].get(parameter) for m in order]
                         for order in _orders_of_gradients(graph, index)]  # fmt: skip
                paths[0].insert(0, parameter.grad)
                parameter.grad = _sum(map(_sum, paths))
        n_losses = graph.n_batches if reduction == "mean" else 1
        return torch.stack(losses).sum() / n_losses


def _sum(gradients: Iterable[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return functools.reduce(torch.add, present) if present else None


def _n_samples(batch: Any) -> int:
    return len(batch[0] if isinstance(batch, tuple) else batch)


def _part(batch: Any, start: int, size: int) -> Any:
    """Return a copy of some samples, with which a stage may do what it likes."""
    if isinstance(batch, tuple):
        return tuple(x[start : start + size].clone() for x in batch)
    return batch[start : start + size].clone()


def _orders_of_gradients(graph: ps.TaskGraph, stage: int) -> list[list[int]]:
    """Return the micro-batches of each copy of a stage, in the order of their backwards."""
    orders_of: dict[int, list[int]] = {home: [] for home in graph.homes[:, stage].tolist()}
    for task in map(graph.task, range(len(graph))):
        if task.stage == stage and task.op in (Op.B, Op.W):
            orders_of[task.device].append(task.microbatch or 0)
    return list(orders_of.values())


def assert_same(stages: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
    """Check that parameters, gradients and buffers are equal to the last bit."""
    for index, (stage, other) in enumerate(zip(stages, others, strict=True)):
        own, its = (dict(s.named_parameters()) for s in (stage, other))
        assert own.keys() == its.keys()
        for name, parameter in own.items():
            where = f"{name} of stage {index}"
            assert torch.equal(parameter, its[name]), where
            if its[name].grad is None:
                assert parameter.grad is None, where
            else:
                assert parameter.grad is not None, where
                assert torch.equal(parameter.grad, its[name].grad), where
        buffers = dict(other.named_buffers())
        for name, buffer in stage.named_buffers():
            assert torch.equal(buffer, buffers[name]), f"{name} of stage {index}"


def assert_close(
    stages: Sequence[nn.Module], inputs: Any, targets: Any, loss_fn: Any = mse
) -> None:
    """Check the gradients against one backward of the whole batch.

    Not to the last bit: a sum over 13 samples rounds differently from one over sums of 3 or 4.
    """
    whole = copy.deepcopy(list(stages))
    for module in whole:
        module.zero_grad()
    with one_thread():
        loss_fn(nn.Sequential(*whole)(inputs), targets).backward()
    for own, its in zip(gradients(stages), gradients(whole), strict=True):
        torch.testing.assert_close(own, its)


def assert_order_respected(
    timeline: ps.Timeline, slack: float = 0.0, *, between_processes: bool = False
) -> None:
    """Check that no task of a measured step began before what it waits for had ended.

    A message between processes is under way at both ends at once; with a rendezvous, either end
    may be the first to notice.
    """
    graph, waits = timeline.graph, timeline.graph.precedence
    ready, start = timeline.end[waits.values], timeline.start[waits.rows]
    if between_processes:
        is_message = graph.pair[waits.rows] == waits.values
        ready = np.where(is_message, timeline.start[waits.values], ready)
        if graph.rendezvous:
            start = np.where(is_message, timeline.end[waits.rows], start)
    # Buckets, and with them all members of their collective, need a part of their backward.
    partly = np.isin(waits.values, graph.partial_dependency) & (graph.group[waits.rows] >= 0)
    ready = np.where(partly, timeline.start[waits.values], ready)
    late = ready > start + slack
    wrong = [f"{graph.task(int(waits.rows[k]))} before {graph.task(int(waits.values[k]))}"
             for k in np.flatnonzero(late)]  # fmt: skip
    assert not wrong, wrong
    assert (timeline.end >= timeline.start).all()
    assert (timeline.start >= 0).all()
