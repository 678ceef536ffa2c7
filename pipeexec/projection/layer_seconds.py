"""Measure the seconds of layers, in steps of a pipeline that has them all on one device."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeexec.devices.thread_settings import ContextFactory, thread_settings
from pipeexec.executor.pipeline import Pipeline
from pipeexec.nesting import tensors_in
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.task_seconds import launch_seconds, mean_launch, mean_task_seconds
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.errors import BatchNormWarning, ExecutionError
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

#: Micro-batches of a measured step. Half of their backwards are split, if any are.
_MICROBATCHES = 4


class LayerSeconds(NamedTuple):
    """Measured seconds of some modules, one value each.

    ``columns`` are fields of `pipesim.Costs`. ``spread`` is the largest standard deviation of an
    operation's mean from step to step, over the mean. ``launch`` are the host's seconds to issue a
    task.
    """

    columns: dict[str, list[float]]
    spread: list[float]
    optimizer_bytes: list[float]
    launch: float


class _DepthFirst(Calibration):
    """Measures steps in which each micro-batch passes through all layers, one after the other.

    So caches have the layer before, as in a stage of several layers.
    """

    def _schedule(self, n_microbatches: int, split: int) -> Schedule:
        return depth_first(self.pipeline.graph.n_stages, n_microbatches, split * self.splits)


def depth_first(n_stages: int, n_microbatches: int, split: int = 0) -> Schedule:
    """Return all forwards of a device, micro-batch by micro-batch, and then all backwards.

    ``split`` is that of `pipeexec.profiling.calibration.breadth_first`.
    """
    order = [f"{s}F{j}" for j in range(n_microbatches) for s in range(n_stages)]
    for j in range(n_microbatches):
        ops = ("I", "W") if split and (j + 1) % split == 0 else ("B",)
        order += [f"{s}{op}{j}" for s in reversed(range(n_stages)) for op in ops]
    return Schedule.from_orders(
        [order], placement=Placement([0] * n_stages), n_microbatches=n_microbatches, name="layers"
    )


def measure_layers(
    modules: Sequence[nn.Module],
    device: str,
    optimizer: OptimizerFactory | None,
    *,
    split: bool,
    n_steps: int,
    warm_up: int,
    n_busy: int,
) -> LayerSeconds:
    """Return the seconds of modules that pass values on to each other, on one device.

    The first one takes a dummy tensor; the last one returns a loss. Meanwhile ``n_busy`` more CPU
    workers run copies of them.
    """
    graph = _graph(len(modules), _MICROBATCHES - 1, 0)
    graphs = [_graph(len(modules), 2, 2)] if split else None
    dummies = torch.zeros(_MICROBATCHES - 1, 1), torch.zeros(_MICROBATCHES - 1, 1)
    load = lower(depth_first(len(modules), _MICROBATCHES, 2 * split), recompute="always")
    with (
        busy_workers(modules, load, optimizer, n_busy),
        Pipeline(
            modules, graph, [device], dummy_loss, optimizer, loss_reduction="sum",
            pin_threads=not n_busy, tied=(),  # a copy takes as long as any parameter
        ) as pipeline,
    ):  # fmt: skip
        calibration = _DepthFirst(pipeline, *dummies, graphs)
        with warnings.catch_warnings():  # micro-batches are those of the user
            warnings.simplefilter("ignore", BatchNormWarning)
            calibration.warm_up(warm_up)
            for _ in range(n_steps):
                calibration.step()
        loaded, isolated = calibration.loaded_steps, calibration.isolated_steps
        values, table = mean_task_seconds(
            [step.timeline for step in loaded], [step.timeline for step in isolated],
            with_split=split,
        )  # fmt: skip
        is_gpu = pipeline.devices[0].torch_device.type == "cuda"
        launch = launch_seconds(loaded, isolated) if is_gpu else mean_launch(loaded)
        columns = {name: list(column) for name, column in values.items()}
        rows = table[table.index.get_level_values("op") != "STEP"]
        spread: list[float] = rows["spread"].groupby(level="stage").max().tolist()
        return LayerSeconds(columns, spread, list(calibration.optimizer_bytes), launch)


def _graph(n_stages: int, n_microbatches: int, split: int) -> TaskGraph:
    return lower(depth_first(n_stages, n_microbatches, split))


class _Worker(threading.Thread):
    """Runs steps of a pipeline, one after the other, until it is stopped."""

    def __init__(self, pipeline: Pipeline, settings: ContextFactory) -> None:
        super().__init__(name="busy worker", daemon=True)
        self.pipeline, self.settings = pipeline, settings
        self.is_busy, self.is_stopped = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Run steps; the first one makes the worker busy."""
        n = self.pipeline.graph.n_microbatches
        try:
            with self.settings():
                while not self.is_stopped.is_set():
                    self.pipeline.step(torch.zeros(n, 1), torch.zeros(n, 1))
                    self.is_busy.set()
        except Exception as error:  # of the user's code, raised by `busy_workers`
            self.error = error
        finally:
            self.is_busy.set()


@contextmanager
def busy_workers(
    modules: Sequence[nn.Module], graph: TaskGraph, optimizer: OptimizerFactory | None, n: int
) -> Iterator[None]:
    """Let ``n`` more CPU workers run steps of copies of modules in a block."""
    workers: list[_Worker] = []
    with ExitStack() as stack:
        for _ in range(n):
            pipeline = stack.enter_context(
                Pipeline(
                    copy.deepcopy(list(modules)), graph, ["cpu"], dummy_loss, optimizer,
                    loss_reduction="sum", pin_threads=False, tied=(),
                )
            )  # fmt: skip
            workers.append(_Worker(pipeline, thread_settings()))
            workers[-1].start()
        try:
            for worker in workers:
                worker.is_busy.wait()
            yield
        finally:
            for worker in workers:
                worker.is_stopped.set()
            for worker in workers:
                worker.join()
    for worker in workers:
        if worker.error is not None:
            raise ExecutionError(
                f"a busy worker failed in a step of copies of the layers: {worker.error!s:.300}"
            ) from worker.error


# Modules around layers that run without the layers before or after them.
#
# A pipeline of some layers takes a dummy batch. Its first module returns the values that the
# layers before have passed on, and the last one returns a loss. So values of any form pass, and
# each micro-batch is the profiled one.

#: Loss of the output of the last layer.
LayerLoss = Callable[[Any], Tensor]


class FirstLayer(nn.Module):
    """Calls the first layer with the tensors of the sample, on its device."""

    def __init__(self, layer: nn.Module, sample: Sequence[Tensor]) -> None:
        super().__init__()
        self.layer, self._sample = layer, tuple(sample)

    def forward(self, _: Tensor) -> Any:
        """Return the output of the layer."""
        return self.layer(*self._sample)


class Values(nn.Module):
    """Returns the values that the layers before have passed on, on the device of the layers."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self._values = tuple(values)

    def forward(self, _: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        return self._values


class LastLayer(nn.Module):
    """Calls the last layer, and then the loss."""

    def __init__(self, layer: nn.Module, loss: LayerLoss) -> None:
        super().__init__()
        self.layer, self._loss = layer, loss

    def forward(self, *values: Tensor) -> Tensor:
        """Return the loss, as a tensor of shape ``(1,)``."""
        return self._loss(self.layer(*values)).reshape(1)


class SquareSum(nn.Module):
    """Takes the place of the layers after some others, so that these get gradients."""

    def forward(self, *values: Tensor) -> Tensor:
        """Return the sum of the squares of all floating-point values, of shape ``(1,)``."""
        return square_sum(values).reshape(1)


def square_sum(output: Any) -> Tensor:
    """Return the sum of the squares of all floating-point values of an output."""
    values = [x for x in tensors_in(output) if x.is_floating_point()]
    if not values:
        raise ExecutionError(
            f"the output, {type(output).__name__}, has no tensor of floating-point numbers, of "
            "which a loss could be the sum of squares; give loss_fn="
        )
    return torch.stack([x.float().square().sum() for x in values]).sum()


def layer_loss(loss_fn: Callable[[Any, Any], Any] | None, targets: Any) -> LayerLoss:
    """Return the loss of the last layer's output."""
    if loss_fn is None:
        return square_sum

    def loss(output: Any) -> Tensor:
        value = loss_fn(output, targets)
        value = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ExecutionError(
                "loss_fn must return a tensor of one element, or a tuple that begins with it, got "
                f"{value!r:.60}"
            )
        return value

    return loss


def dummy_loss(losses: Tensor, _: Tensor) -> Tensor:
    """Return the sum of the losses that a pipeline of layers returns."""
    return losses.sum()
