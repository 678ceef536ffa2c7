"""`validate`: predict the steps of task graphs, run them on real devices, and compare.

Calibration steps and measured steps alternate, so that a drift of the machine's speed affects both.
Each row's prediction comes from the calibration steps alone. Repeats, each with a new calibration,
give a confidence interval of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, overload

from torch import nn
from torch.amp import GradScaler

from pipeexec.devices.device import DeviceLike
from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.gpipe.gpipe import GPipe
from pipeexec.profiling.task_seconds import with_stage_bytes
from pipeexec.run_options import OF_VALIDATION, RunOptions, run_options
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss
from pipeexec.stages.optimizers import OptimizerFactory
from pipeexec.validation.accuracy import warn_of_other_sizes
from pipeexec.validation.repeats import (
    Batches,
    make_rows,
    measure_memory,
    run_repeats,
    take_batches,
)
from pipeexec.validation.result import Validation, check_rows
from pipeexec.validation.steppable import (
    GPipeCalibration,
    GPipeSteps,
    PipelineCalibration,
    PipelineSteps,
    check_backward,
    check_models,
)
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, CostsError, PipeError, check_function, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.utils.checks import checked_names


@overload
def validate(
    stages: Sequence[nn.Module],
    graphs: Mapping[str, TaskGraph],
    devices: Sequence[DeviceLike],
    loss_fn: Loss,
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None = None,
    *,
    options: RunOptions = OF_VALIDATION,
    n_steps: int | None = None,
    warm_up: int | None = None,
    repeat: int | None = None,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
    timeout: float | None = 60.0,
    processes: Processes | None = None,
    cuda_graph: bool = False,
    loss_reduction: Literal["mean", "sum"] = "mean",
    batch_dims: Mapping[str, int | None] | None = None,
    slice_dim: int = 1,
    tied: Sequence[Sequence[tuple[int, str]]] | None = None,
    max_grad_norm: float | None = None,
    grad_scaler: GradScaler | None = None,
) -> Validation: ...


@overload
def validate(
    stages: GPipe | Mapping[str, GPipe],
    *,
    loss_fn: Loss,
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None = None,
    options: RunOptions = OF_VALIDATION,
    n_steps: int | None = None,
    warm_up: int | None = None,
    repeat: int | None = None,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
) -> Validation: ...


@checked_names
def validate(
    stages: Sequence[nn.Module] | GPipe | Mapping[str, GPipe],
    graphs: Mapping[str, TaskGraph] | None = None,
    devices: Sequence[DeviceLike] | None = None,
    loss_fn: Loss | None = None,
    batches: Iterable[tuple[Batch, Any]] = (),
    optimizer: OptimizerFactory | None = None,
    *,
    options: RunOptions = OF_VALIDATION,
    n_steps: int | None = None,
    warm_up: int | None = None,
    repeat: int | None = None,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
    timeout: float | None = 60.0,
    processes: Processes | None = None,
    cuda_graph: bool = False,
    loss_reduction: Literal["mean", "sum"] = "mean",
    batch_dims: Mapping[str, int | None] | None = None,
    slice_dim: int = 1,
    tied: Sequence[Sequence[tuple[int, str]]] | None = None,
    max_grad_norm: float | None = None,
    grad_scaler: GradScaler | None = None,
) -> Validation:
    """Profile, simulate, execute and compare.

    Parameters
    ----------
    stages, devices, loss_fn, optimizer
        As for `Pipeline`. The measured steps train the stages. In place of stages: a `GPipe`, or a
        mapping of names to `GPipe` modules with the same balance and number of micro-batches. A
        `GPipe` has its own devices and graph. Its costs come from calibration steps of the last
        module, and are used for all. Work between its forward and its backward, such as the loss,
        is no task.
    graphs
        Task graphs by name; all with the same placement and number of micro-batches.
    batches
        Yields ``(inputs, targets)``, a new batch for every round of steps. With replicas in several
        processes: the share of this process, as for ``pipeline.step``. `Microbatches` have the same
        shapes in every batch.
    options, n_steps, warm_up, repeat, costs, progress
        How many steps are measured, and the costs to predict from: a `RunOptions`, or its values.
    timeout, processes, cuda_graph, loss_reduction, batch_dims, tied, max_grad_norm, grad_scaler
        As for `Pipeline`. With several processes, each calls this and gets the whole result. All
        graphs have the operations for ``tied``, ``max_grad_norm`` and ``grad_scaler``.
    slice_dim
        As for `Pipeline`; all graphs have the same number of slices a sequence.

    Returns
    -------
    Validation
        One row a graph, with predictions and measured steps; the costs and the profile.

    Raises
    ------
    CapacityError
        If the results of so many steps do not fit in memory.
    CostsError
        If ``costs`` do not suit the graphs.

    Warns
    -----
    AccuracyWarning
        If tasks are too short or too unsteady for a good prediction. Also if ``costs`` are from
        messages of other sizes.

    Examples
    --------
    Given costs spare the calibration, which takes seconds:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graphs = {name: ps.lower(ps.schedule(name, 2, 4)) for name in ("gpipe", "1f1b")}
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> batches, costs = [(x, x)] * 2, ps.Costs(forward=1e-3, backward=2e-3, output_bytes=32)
    >>> validation = px.validate(
    ...     stages, graphs, ["cpu"] * 2, mse_loss, batches, n_steps=1, costs=costs
    ... )
    >>> validation.table["predicted"].round(3).to_dict()
    {'gpipe': 0.015, '1f1b': 0.015}
    """
    options = run_options(
        options, n_steps=n_steps, warm_up=warm_up, repeat=repeat, costs=costs, progress=progress
    )
    if optimizer is not None:
        check_function("optimizer", optimizer, "optimizer(parameters)")
    rounds = take_batches(batches, options)
    if loss_fn is None:
        raise ArgumentError("validate needs loss_fn, which takes outputs and targets")
    check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    settings: dict[str, Any] = {
        "timeout": timeout, "processes": processes, "cuda_graph": cuda_graph,
        "loss_reduction": loss_reduction, "batch_dims": batch_dims, "slice_dim": slice_dim,
        "tied": tied, "max_grad_norm": max_grad_norm, "grad_scaler": grad_scaler,
    }  # fmt: skip
    if isinstance(stages, (GPipe, Mapping)):
        _check_gpipe_settings(graphs=graphs, devices=devices, **settings)
        return _validate_gpipes(stages, loss_fn, rounds, optimizer, options)
    if graphs is None or devices is None:
        raise ArgumentError("validate needs graphs and devices; only a GPipe has its own")
    widest = _widest_graph(graphs)
    _check_costs(options.costs, graphs)
    with guard_processes(processes):
        check_results(graphs.values(), n_steps=options.n_steps, repeat=options.repeat)
    with Pipeline(stages, widest, devices, loss_fn, optimizer, **settings) as pipeline:
        return _validate_pipeline(pipeline, graphs, rounds, options)


def _validate_pipeline(
    pipeline: Pipeline, graphs: Mapping[str, TaskGraph], batches: Batches, options: RunOptions
) -> Validation:
    """Validate task graphs with the stages of a pipeline."""
    subjects = [PipelineSteps(pipeline.with_graph(graph)) for graph in graphs.values()]
    repeats = run_repeats(
        subjects, lambda batch: PipelineCalibration(pipeline, subjects, *batch), batches, options
    )
    last = repeats[-1]
    measured_bytes = with_stage_bytes(last.costs, pipeline)
    rows = make_rows(graphs, repeats, measure_memory(subjects, repeats, measured_bytes))
    processes = pipeline.processes
    if options.costs is not None and (processes is None or processes.rank == 0):
        warn_of_other_sizes(options.costs, next(iter(rows.values())).measured)
    return Validation(rows, last.costs, last.profile, pipeline.clocks(), pipeline.notes)


def _validate_gpipes(
    stages: GPipe | Mapping[str, Any],
    loss_fn: Loss,
    batches: Batches,
    optimizer: OptimizerFactory | None,
    options: RunOptions,
) -> Validation:
    """Validate `GPipe` modules; calibration steps are steps of the last one."""
    models = check_models({"gpipe": stages} if isinstance(stages, GPipe) else stages)
    check_rows(models)
    subjects = [GPipeSteps(model, loss_fn, optimizer) for model in models.values()]
    first = next(batches)
    if options.costs is not None:
        n_samples = len(first[0][0] if isinstance(first[0], tuple) else first[0])
        _check_costs(options.costs, {name: x.graph(n_samples) for name, x in models.items()})
    check_backward(models, first[0])
    repeats = run_repeats(
        subjects, lambda _: GPipeCalibration(subjects[-1]), chain([first], batches), options
    )
    last = repeats[-1]
    measured_bytes = (
        last.costs if options.costs is None else subjects[-1].with_bytes(options.costs, *last.batch)
    )
    rows = make_rows(models, repeats, measure_memory(subjects, repeats, measured_bytes))
    notes = dict.fromkeys(note for model in models.values() for note in model.notes)
    return Validation(rows, last.costs, notes=tuple(notes))


#: Values of settings that are not given, and not None.
_USUAL = {"cuda_graph": False, "loss_reduction": "mean", "slice_dim": 1}


def _check_gpipe_settings(**settings: object) -> None:
    """Raise `ArgumentError` for settings that a GPipe has itself, or does not support."""
    for name, value in settings.items():
        if value != _USUAL.get(name) and name != "timeout":
            raise ArgumentError(
                f"a GPipe has its own graph and devices, and runs in one process without a CUDA "
                f"graph: it takes no {name}, got {value!r:.60}; leave it out"
            )


def _widest_graph(graphs: Mapping[str, TaskGraph]) -> TaskGraph:
    """Return the graph with the most replicas."""
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
        if graph.n_slices != first.n_slices:
            raise ArgumentError(
                f"graph {name!r} has n_slices={graph.n_slices}, the first {first.n_slices}: costs "
                "hold for slices of one length; validate graphs of equal n_slices"
            )
    return first


def _check_costs(costs: Costs | None, graphs: Mapping[str, TaskGraph]) -> None:
    """Raise `CostsError` unless costs suit every graph, if there are costs."""
    if costs is None:
        return
    for name, graph in graphs.items():
        try:
            costs.of(graph)
        except PipeError as error:
            raise CostsError(
                f"the costs do not suit graph {name!r} of {graph.n_stages} stages on "
                f"{graph.n_devices} devices: {error}; measure them for these stages and schedules "
                "(pipeexec profile)"
            ) from error
