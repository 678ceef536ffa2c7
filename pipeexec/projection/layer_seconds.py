"""Measure the seconds of layers, in steps of a pipeline that has them all on one device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pipeexec.executor.pipeline import Pipeline
from pipeexec.profiling.calibration import Calibration
from pipeexec.profiling.host_times import launch_seconds, mean_launch
from pipeexec.profiling.task_seconds import mean_task_seconds
from pipeexec.projection.busy_workers import busy_workers
from pipeexec.projection.layer_modules import dummy_loss
from pipeexec.stages.optimizers import OptimizerFactory
from pipesim.errors import BatchNormWarning
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd


#: Micro-batches of a measured step. Half of their backwards are split, if any are.
_MICROBATCHES = 4


class LayerSeconds(NamedTuple):
    """Measured seconds of some modules, one value each.

    Attributes
    ----------
    columns
        Fields of `pipesim.Costs`.
    spread
        Largest standard deviation of an operation's mean from step to step, over the mean.
    optimizer_bytes
        Bytes of the optimizer state.
    launch
        Seconds of the host to issue a task.
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
        return LayerSeconds(columns, _spreads(table), list(calibration.optimizer_bytes), launch)


def _graph(n_stages: int, n_microbatches: int, split: int) -> TaskGraph:
    return lower(depth_first(n_stages, n_microbatches, split))


def _spreads(table: pd.DataFrame) -> list[float]:
    """Return the largest spread of the operations of each stage but STEP."""
    rows = table[table.index.get_level_values("op") != "STEP"]
    largest: list[float] = rows["spread"].groupby(level="stage").max().tolist()
    return largest
