"""Checks of the arguments of `pipeexec.validate`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipeexec.distributed.processes import Processes
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss
from pipeexec.stages.optimizers import OptimizerFactory
from pipeexec.validation.result_row import Row
from pipeexec.validation.run_files import check_rows
from pipesim.analysis.measured_costs import output_bytes
from pipesim.costs.costs import Costs
from pipesim.errors import (
    AccuracyWarning,
    ArgumentError,
    CostsError,
    PipeError,
    check_count,
    check_flag,
    check_function,
    check_type,
)
from pipesim.graph.graph import TaskGraph

__all__ = [
    "RunOptions",
    "check_costs",
    "check_gpipe_options",
    "check_loss",
    "check_options",
    "warn_of_other_sizes",
    "widest_graph",
]


class RunOptions(NamedTuple):
    """Checked options of `validate` that pipelines and `GPipe` modules share.

    Attributes
    ----------
    batches
        Yields ``repeat * (n_steps + 1)`` batches ``(inputs, targets)``, or raises `ArgumentError`.
    n_steps, warm_up, repeat
        Measured steps, steps before them, and number of repeats.
    optimizer, costs, progress
        As for `validate`.
    """

    batches: Iterator[tuple[Batch, Any]]
    n_steps: int
    warm_up: int
    repeat: int
    optimizer: OptimizerFactory | None
    costs: Costs | None
    progress: Callable[[str], None] | None


def check_options(
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None,
    *,
    n_steps: int,
    warm_up: int,
    repeat: int,
    costs: Costs | None,
    progress: Callable[[str], None] | None,
    processes: Processes | None,
    cuda_graph: bool,
) -> RunOptions:
    """Return the options that every validation has.

    Raises
    ------
    ArgumentError
        If an option has a wrong type or value. `check_costs` checks ``costs``.
    """
    n_steps = check_count("n_steps", n_steps)
    warm_up = check_count("warm_up", warm_up, 0)
    repeat = check_count("repeat", repeat)
    check_flag("cuda_graph", cuda_graph)
    if processes is not None:
        check_type("processes", processes, Processes, "give the result of pipeexec.join")
    if progress is not None:
        check_function("progress", progress, "progress(line)")
    if optimizer is not None:
        check_function("optimizer", optimizer, "optimizer(parameters)")
    if not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches must yield (inputs, targets), got {batches!r:.60} "
            f"({type(batches).__name__}); give a generator or a list of batches"
        )
    source = _take_batches(batches, repeat * (n_steps + 1))
    return RunOptions(source, n_steps, warm_up, repeat, optimizer, costs, progress)


def _take_batches(
    batches: Iterable[tuple[Batch, Any]], n_batches: int
) -> Iterator[tuple[Batch, Any]]:
    """Yield ``n_batches`` batches; raise `ArgumentError` if there are fewer."""
    source = iter(batches)
    for number in range(n_batches):
        try:
            yield next(source)
        except StopIteration:
            raise ArgumentError(
                f"got {number} batches, but {n_batches} are needed: one to warm up with, and one "
                "a step"
            ) from None


def check_loss(loss_fn: Loss | None) -> Loss:
    """Return the loss function; raise `ArgumentError` if there is none."""
    if loss_fn is None:
        raise ArgumentError("validate needs loss_fn, which takes outputs and targets")
    check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    return loss_fn


def check_gpipe_options(
    graphs: object, devices: object, processes: object, cuda_graph: bool
) -> None:
    """Raise `ArgumentError` for arguments that a GPipe sets itself, or does not support."""
    if graphs is not None or devices is not None:
        raise ArgumentError("a GPipe has its own graph and devices; leave out graphs and devices")
    if processes is not None or cuda_graph:
        raise ArgumentError(
            "a GPipe runs in one process, without a CUDA graph; leave out processes and cuda_graph"
        )


def widest_graph(graphs: Mapping[str, TaskGraph]) -> TaskGraph:
    """Return the graph with the most replicas.

    Raises
    ------
    ArgumentError
        If there are no graphs, or a name or graph has the wrong type. Also if graphs differ in
        their number of micro-batches.
    """
    if not isinstance(graphs, Mapping):
        raise ArgumentError(
            f"graphs must be a mapping of names to graphs, got {graphs!r:.60} "
            f"({type(graphs).__name__}); give for example {{'1f1b': ps.lower(schedule)}}"
        )
    for name, graph in graphs.items():
        check_type(f"graphs: {name!r}", graph, TaskGraph, "lower the schedule first")
    if not graphs:
        raise ArgumentError("validate needs at least one graph")
    check_rows(graphs)
    first = max(graphs.values(), key=lambda graph: graph.n_replicas)
    for name, graph in graphs.items():
        if graph.n_microbatches != first.n_microbatches:
            raise ArgumentError(
                f"graph {name!r} has {graph.n_microbatches} micro-batches, the first "
                f"{first.n_microbatches}: costs hold for one size of micro-batch; validate graphs "
                "with the same number of micro-batches"
            )
    return first


def check_costs(costs: object, graphs: Mapping[str, TaskGraph]) -> None:
    """Raise unless given costs suit every graph.

    Raises
    ------
    ArgumentError
        If ``costs`` are no `Costs`.
    CostsError
        If they do not suit a graph.
    """
    if not isinstance(costs, Costs):
        raise ArgumentError(f"costs must be a pipesim.Costs, got {type(costs).__name__}")
    for name, graph in graphs.items():
        try:
            costs.of(graph)
        except PipeError as error:
            raise CostsError(
                f"the costs do not suit graph {name!r} of {graph.n_stages} stages on "
                f"{graph.n_devices} devices: {error}; measure them for these stages and schedules "
                "(pipeexec profile)"
            ) from error


def warn_of_other_sizes(costs: Costs, rows: Mapping[str, Row]) -> None:
    """Warn if the messages of a step are not as large as in the given costs.

    Warns
    -----
    AccuracyWarning
        If the bytes of a stage's messages differ by more than 1 %.
    """
    timeline = next(iter(rows.values())).measured
    expected = costs.per_stage("output_bytes", timeline.graph.n_stages)
    measured = output_bytes(timeline)
    differs = (measured > 0) & (np.abs(expected - measured) > 0.01 * measured)
    for stage in np.flatnonzero(differs)[:1]:
        warnings.warn(
            f"the costs have {expected[stage]:.0f} output bytes a micro-batch for stage {stage}, "
            f"but a step sent {measured[stage]:.0f}: they are of another model or size of "
            "micro-batch; profile this one",
            AccuracyWarning,
            stacklevel=3,
        )
