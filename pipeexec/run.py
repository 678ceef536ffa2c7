"""One step under way: the plan of each task, and the walk of the host through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeexec import transfer
from pipeexec.devices import Device
from pipeexec.paths import reduce_gradients
from pipeexec.randomness import task_seed
from pipeexec.stage import Stage, Values
from pipeexec.streams import Event, Stream
from pipesim.errors import ArgumentError, StageError
from pipesim.graph import TaskGraph
from pipesim.ops import RECVS, Op
from pipesim.timeline import Timeline

__all__ = ["WORK", "Batch", "Planned", "Run", "plan", "split_batch", "split_batches"]

Batch = Tensor | tuple[Tensor, ...]
#: Whose result a task of the key takes, and how many stages on that is; a RECV takes its SEND's.
_SOURCES: Mapping[Op, Mapping[Op, int]] = {
    Op.F: {Op.F: -1, Op.RECV_F: 0},
    Op.B: {Op.B: 1, Op.I: 1, Op.RECV_B: 0},
    Op.I: {Op.B: 1, Op.I: 1, Op.RECV_B: 0},
    Op.SEND_F: {Op.F: 0},
    Op.SEND_B: {Op.B: 0, Op.I: 0},
}


class Planned(NamedTuple):
    """What the host needs to know to issue one task."""

    id: int
    work: Callable[[Run, Planned], None]
    stream: Stream
    device: Device
    stage: Stage
    microbatch: int
    waits: tuple[int, ...]
    source: int
    recomputed: bool
    split: bool
    slot: int
    copies: tuple[int, ...]


class Run:
    """One step under way: what tasks hand to each other, their events, and the first failure."""

    def __init__(
        self,
        graph: TaskGraph,
        path: NDArray[np.int64],
        devices: Sequence[Device],
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer | None],
        inputs: Batch,
        targets: Batch,
        *,
        is_mean: bool,
        number: int,
    ) -> None:
        m = graph.n_microbatches
        self.graph, self.devices = graph, devices
        self.modules, self.optimizers = modules, optimizers
        self.number = number
        parts, labels, sizes = split_batches(inputs, targets, m)
        first, last = (
            [devices[d].torch_device for d in graph.homes[path, stage]] for stage in (0, -1)
        )
        self.inputs: list[Values] = [
            tuple(x.to(device, non_blocking=True) for x in part)
            for part, device in zip(parts, first, strict=True)
        ]
        moved = [
            tuple(x.to(device, non_blocking=True) for x in part)
            for part, device in zip(labels, last, strict=True)
        ]
        self.targets: list[Any] = (
            moved if isinstance(targets, tuple) else [part[0] for part in moved]
        )
        batches = [sizes[k : k + m // graph.n_batches] for k in range(0, m, m // graph.n_batches)]
        self.weights = [
            size / sum(batch) if is_mean else 1.0 for batch in batches for size in batch
        ]
        self.n_losses = len(batches) if is_mean else 1
        self.losses: list[Tensor | None] = [None] * m
        self.values: list[Values | None] = [None] * len(graph)
        self.zeros: list[Event] = []
        self.began: list[Event] = []
        self.ended: list[Event] = []
        self.ran = np.zeros(len(graph), dtype=bool)
        self.nbytes = np.zeros(len(graph))
        self.failure: tuple[int, BaseException] | None = None
        self.seed = torch.initial_seed()
        self.host_seconds = 0.0

    def walk(self, tasks: Sequence[Planned]) -> None:
        """Issue every task, then wait for the devices."""
        began, ended = self.began, self.ended
        first: dict[torch.device, Event] = {}  # devices with one clock count from one moment
        self.zeros = [
            first.setdefault(device.torch_device, device.mark()) for device in self.devices
        ]
        start = perf_counter()
        try:
            for task in tasks:
                stream = task.stream
                for needed in task.waits:
                    stream.wait_event(ended[needed])
                began.append(stream.record())
                stream.submit(partial(self._guarded, task))
                ended.append(stream.record())
            self.host_seconds = perf_counter() - start
            for device in self.devices:
                device.synchronize()
        except BaseException as error:
            self.failure = self.failure or (-1, error)
            for device in self.devices:
                device.synchronize()
            raise

    def _guarded(self, task: Planned) -> None:
        """Run a task, unless another has failed; what fails first stops all."""
        if self.failure is not None:
            return
        try:
            task.work(self, task)
        except BaseException as error:
            if self.failure is None:
                self.failure = task.id, error
        else:
            self.ran[task.id] = True

    def take(self, task: int) -> Values:
        """Return what ``task`` produced, and let go of it."""
        values, self.values[task] = self.values[task], None
        return values or ()

    def seed_of(self, task: Planned) -> int:
        """Return the seed of a task's random numbers."""
        if not task.stage.is_random.get(task.stage.module.training, True):
            return 0
        return task_seed(self.seed, self.number, task.stage.index, task.microbatch)

    def timeline(self) -> Timeline:
        """Return when each task ran; NaN for those that did not."""
        graph = self.graph
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        for task in np.flatnonzero(self.ran).tolist():
            zero = self.zeros[graph.device[task]]
            start[task] = self.began[task].seconds_since(zero)
            end[task] = self.ended[task].seconds_since(zero)
        return Timeline(graph, start, end, self.nbytes)

    def error(self) -> StageError:
        """Return the error of the task that failed, naming it."""
        assert self.failure is not None
        index, cause = self.failure
        task = self.graph.task(index)
        where = f"device {task.device}, stage {task.stage}, micro-batch {task.microbatch}"
        error = StageError(
            f"{task} failed ({where}): {type(cause).__name__}: {cause}; all other work was "
            "stopped, and .timeline holds what ran before"
        )
        error.timeline = self.timeline()
        error.__cause__ = cause
        return error


def _forward(run: Run, task: Planned) -> None:
    values = run.inputs[task.microbatch] if task.source < 0 else run.take(task.source)
    values = task.stage.forward(
        task.microbatch, values, run.seed_of(task), task.recomputed, task.split
    )
    if task.stage.finish is None:
        run.values[task.id] = values


def _recompute(run: Run, task: Planned) -> None:
    task.stage.recompute(task.microbatch, run.seed_of(task), task.split)


def _backward(run: Run, task: Planned) -> None:
    gradients = () if task.source < 0 else run.take(task.source)
    run.values[task.id] = task.stage.backward(task.microbatch, gradients)


def _input_grad(run: Run, task: Planned) -> None:
    gradients = () if task.source < 0 else run.take(task.source)
    run.values[task.id] = task.stage.input_grad(task.microbatch, gradients)


def _weight_grad(run: Run, task: Planned) -> None:
    task.stage.weight_grad(task.microbatch)


def _send(run: Run, task: Planned) -> None:
    values = run.take(task.source)
    graph = run.graph
    recv = int(graph.pair[task.id])
    target = run.devices[graph.device[recv]]
    run.values[task.id] = transfer.send(values, task.device, task.stream, target)
    run.nbytes[[task.id, recv]] = transfer.nbytes(values)


def _receive(run: Run, task: Planned) -> None:
    consumer = task.device.stream("compute")
    run.values[task.id] = transfer.receive(run.take(task.source), task.device, consumer)


def _reduce(run: Run, task: Planned) -> None:
    if task.copies:
        reduce_gradients([run.modules[slot] for slot in task.copies])


def _step(run: Run, task: Planned) -> None:
    optimizer = run.optimizers[task.slot]
    if optimizer is not None:
        optimizer.step()
    task.stage.stepped(zero_grad=optimizer is not None)


#: How each operation is run; `ALL_TO_ALL` needs many processes.
WORK: Mapping[Op, Callable[[Run, Planned], None]] = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _input_grad,
    Op.W: _weight_grad,
    Op.R: _recompute,
    Op.SEND_F: _send,
    Op.RECV_F: _receive,
    Op.SEND_B: _send,
    Op.RECV_B: _receive,
    Op.REDUCE_GRAD: _reduce,
    Op.STEP: _step,
}


def plan(graph: TaskGraph, stages: Sequence[Stage], devices: Sequence[Device]) -> list[Planned]:
    """Look up everything about each task that does not change from step to step.

    ``stages`` are those of the first path, then of the next.
    """
    for index in np.flatnonzero(~graph.is_op(frozenset(WORK)))[:1].tolist():
        task = graph.task(index)
        raise ArgumentError(f"{task} cannot be run in one process; lower without {task.op}")
    recomputed, split = (
        {(int(graph.stage[t]), int(graph.microbatch[t])) for t in np.flatnonzero(graph.op == op)}
        for op in (Op.R, Op.W)
    )
    planned = []
    for index in range(len(graph)):
        task = graph.task(index)
        needed = {t for t in graph.precedence[index].tolist()
                  if graph.stream[t] != graph.stream[index]}  # fmt: skip
        members = graph.collectives[graph.group[index]] if graph.group[index] >= 0 else ()
        others = [int(t) for t in members if t < index]  # the first one reduces for all
        slot = task.replica * graph.n_stages + task.stage
        planned.append(
            Planned(
                id=index,
                work=WORK[task.op],
                stream=devices[task.device].stream(task.stream),
                device=devices[task.device],
                stage=stages[slot],
                microbatch=-1 if task.microbatch is None else task.microbatch,
                waits=tuple(needed.union(others)),
                source=_source(graph, index),
                recomputed=(task.stage, task.microbatch) in recomputed,
                split=(task.stage, task.microbatch) in split,
                slot=slot,
                copies=() if others else tuple(
                    int(graph.replica[t]) * graph.n_stages + task.stage for t in members
                ),
            )
        )  # fmt: skip
    return planned


def _source(graph: TaskGraph, index: int) -> int:
    """Return the task whose result a task takes; -1 for none, as for what takes the batch."""
    op, stage = Op(graph.op[index]), int(graph.stage[index])
    if op in RECVS:
        return int(graph.pair[index])
    for needed in graph.dependencies[index].tolist():
        found = Op(graph.op[needed])
        offset = _SOURCES.get(op, {}).get(found)
        same = graph.microbatch[needed] == graph.microbatch[index]
        if offset is not None and same and graph.stage[needed] == stage + offset:
            return int(needed)
    return -1


def split_batches(
    inputs: Batch, targets: Batch, n_microbatches: int
) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of inputs and of targets, and their sizes; see `split_batch`.

    Raises
    ------
    ArgumentError
        If there are not as many targets as inputs.
    """
    parts, sizes = split_batch(inputs, n_microbatches, "inputs")
    labels, label_sizes = split_batch(targets, n_microbatches, "targets")
    if label_sizes != sizes:
        raise ArgumentError(
            f"inputs have {sum(sizes)} samples, targets {sum(label_sizes)}; give as many"
        )
    return parts, labels, sizes


def split_batch(
    batch: Batch, n_microbatches: int, name: str
) -> tuple[list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of a batch, whose sizes differ by one at most, and the sizes.

    Raises
    ------
    ArgumentError
        If it holds no tensors, tensors of different length, or too few samples.
    """
    tensors = batch if isinstance(batch, tuple) else (batch,)
    if not tensors or not all(isinstance(x, Tensor) and x.dim() > 0 for x in tensors):
        raise ArgumentError(
            f"{name} must be a tensor of samples or a tuple of them, got "
            f"{type(batch).__name__}"
            + (f" of {', '.join(map(_described, batch))}" if isinstance(batch, tuple) else "")
        )
    lengths = {len(x) for x in tensors}
    if len(lengths) > 1:
        raise ArgumentError(f"the tensors of {name} have {sorted(lengths)} samples; give as many")
    if min(lengths) < n_microbatches:
        raise ArgumentError(
            f"{name} have {min(lengths)} samples, too few for {n_microbatches} micro-batches; "
            "give a larger batch, or lower a schedule of fewer micro-batches"
        )
    parts = list(zip(*(x.tensor_split(n_microbatches) for x in tensors), strict=True))
    return parts, [len(part[0]) for part in parts]


def _described(value: object) -> str:
    return f"{value.dim()}-d tensor" if isinstance(value, Tensor) else type(value).__name__
