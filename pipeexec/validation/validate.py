"""Predict steps, run them, and compare: the validation of a simulation.

Calibration steps and measured steps take turns, so that a machine whose speed drifts drifts for
both. Each row's prediction comes from the calibration steps alone. All of it may be repeated, with
a new calibration each time, to say how sure the error is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pipeexec.devices.device import DeviceLike
from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import Processes, guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.gpipe.gpipe import GPipe
from pipeexec.profiling.profile import Profile
from pipeexec.profiling.stage_bytes import with_stage_bytes
from pipeexec.stages.batches import Batch
from pipeexec.stages.loss_function import Loss
from pipeexec.stages.optimizers import OptimizerFactory
from pipeexec.validation.accuracy import MeasuredStep, Repeat, op_errors, parts_of_steps
from pipeexec.validation.gpipe_steps import (
    GPipeCalibration,
    GPipeSteps,
    check_backward,
    check_models,
)
from pipeexec.validation.result import Row, Validation, check_rows
from pipeexec.validation.steppable import (
    PipelineCalibration,
    PipelineSteps,
    StepCalibration,
    Steppable,
)
from pipesim.analysis.measured_costs import output_bytes
from pipesim.analysis.replay import replay
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
from pipesim.simulation.simulate import simulate

__all__ = ["validate"]


@overload
def validate(
    stages: Sequence[nn.Module],
    graphs: Mapping[str, TaskGraph],
    devices: Sequence[DeviceLike],
    loss_fn: Loss,
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None = None,
    *,
    n_steps: int = 9,
    warm_up: int = 2,
    repeat: int = 1,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
    timeout: float | None = 60.0,
    processes: Processes | None = None,
    cuda_graph: bool = False,
) -> Validation: ...


@overload
def validate(
    stages: GPipe | Mapping[str, GPipe],
    *,
    loss_fn: Loss,
    batches: Iterable[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None = None,
    n_steps: int = 9,
    warm_up: int = 2,
    repeat: int = 1,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
) -> Validation: ...


def validate(
    stages: Sequence[nn.Module] | GPipe | Mapping[str, GPipe],
    graphs: Mapping[str, TaskGraph] | None = None,
    devices: Sequence[DeviceLike] | None = None,
    loss_fn: Loss | None = None,
    batches: Iterable[tuple[Batch, Any]] = (),
    optimizer: OptimizerFactory | None = None,
    *,
    n_steps: int = 9,
    warm_up: int = 2,
    repeat: int = 1,
    costs: Costs | None = None,
    progress: Callable[[str], None] | None = None,
    timeout: float | None = 60.0,
    processes: Processes | None = None,
    cuda_graph: bool = False,
) -> Validation:
    """Profile, simulate, execute and compare.

    Parameters
    ----------
    stages, devices, loss_fn, optimizer
        As for `Pipeline`. The stages are trained by the measured steps. In place of stages a
        `GPipe`, or several by name that are cut alike, which have their devices and graphs: costs
        then come from calibration steps of the last one, and hold for all; what lies between its
        forward and its backward, such as the loss, is no task.
    graphs
        By name; all with the same placement and number of micro-batches.
    batches
        Yields ``(inputs, targets)``; a new batch for every round of steps. With replicas in several
        processes, the share of this one, as for ``pipeline.step``.
    n_steps, warm_up
        Measured steps of each graph, and steps before them that do not count; in each repeat.
    repeat
        How often to calibrate and measure. Two and more say how sure the mean error is.
    timeout, processes, cuda_graph
        As for `Pipeline`. With several processes, each runs this, and each gets all of it.
    costs
        Predict from these, without any calibration; from `px.profile` or `Costs.load`.
    progress
        Called with a line of text now and then.

    Raises
    ------
    ArgumentError
        If there are no graphs, graphs that differ in placement or number of micro-batches, or too
        few batches.
    CapacityError
        If the results of so many steps do not fit in memory.
    CostsError
        If ``costs`` do not suit the graphs.

    Warns
    -----
    AccuracyWarning
        If tasks are too short or too unsteady to be predicted well, or ``costs`` are of messages of
        other sizes.
    """
    n_steps = check_count("n_steps", n_steps)
    warm_up = check_count("warm_up", warm_up, 0)
    repeat = check_count("repeat", repeat)
    check_flag("cuda_graph", cuda_graph)
    if processes is not None:
        check_type("processes", processes, Processes, "give what pipeexec.join returned")
    if progress is not None:
        check_function("progress", progress, "progress(line)")
    if optimizer is not None:
        check_function("optimizer", optimizer, "optimizer(parameters)")
    if not isinstance(batches, Iterable):
        raise ArgumentError(
            f"batches must yield (inputs, targets), got {batches!r:.60} "
            f"({type(batches).__name__}); give a generator or a list of batches"
        )
    if isinstance(stages, (GPipe, Mapping)):
        models = check_models({"gpipe": stages} if isinstance(stages, GPipe) else stages)
        check_rows(models)
        check_results([], n_steps=n_steps, repeat=repeat)
        _check_gpipe_options(graphs, devices, processes, cuda_graph)
        source = _next_batches(batches, repeat * (n_steps + 1))
        counts = n_steps, warm_up, repeat
        return _validate_gpipes(
            models, _checked_loss(loss_fn), source, optimizer, counts, costs, progress
        )
    if graphs is None or devices is None:
        raise ArgumentError("validate needs graphs and devices, but for a GPipe, which has its own")
    loss_fn = _checked_loss(loss_fn)
    first = _widest(graphs)
    if costs is not None:
        _check_costs(costs, graphs)
    source = _next_batches(batches, repeat * (n_steps + 1))
    with guard_processes(processes):
        check_results(graphs.values(), n_steps=n_steps, repeat=repeat)
    with Pipeline(
        stages,
        first,
        devices,
        loss_fn,
        optimizer,
        timeout=timeout,
        processes=processes,
        cuda_graph=cuda_graph,
    ) as pipeline:
        subjects = [PipelineSteps(pipeline.with_graph(graph)) for graph in graphs.values()]
        repeats = _run_repeats(
            subjects,
            lambda batch: PipelineCalibration(pipeline, subjects, *batch),
            source,
            (n_steps, warm_up, repeat),
            costs,
            progress,
        )
        real = with_stage_bytes(repeats[-1].costs, pipeline)
        rows = _rows(graphs, subjects, repeats, real)
        clocks, notes = pipeline.clocks(), pipeline.notes
    if costs is not None:
        _warn_of_other_sizes(costs, rows)
    return Validation(rows, repeats[-1].costs, repeats[-1].profile, clocks, notes)


def _checked_loss(loss_fn: Loss | None) -> Loss:
    """Return the loss function, or raise if there is none."""
    if loss_fn is None:
        raise ArgumentError("validate needs loss_fn, which takes outputs and targets")
    check_function("loss_fn", loss_fn, "loss_fn(output, targets)")
    return loss_fn


def _check_gpipe_options(
    graphs: object, devices: object, processes: object, cuda_graph: bool
) -> None:
    """Raise for arguments that a GPipe has itself, or cannot have."""
    if graphs is not None or devices is not None:
        raise ArgumentError("a GPipe has its own graph and devices; leave out graphs and devices")
    if processes is not None or cuda_graph:
        raise ArgumentError("a GPipe runs in one process, and in no CUDA graph; leave both out")


def _validate_gpipes(
    models: Mapping[str, GPipe],
    loss_fn: Loss,
    source: Iterator[tuple[Batch, Any]],
    optimizer: OptimizerFactory | None,
    counts: tuple[int, int, int],
    costs: Costs | None,
    progress: Callable[[str], None] | None,
) -> Validation:
    """Validate modules; calibration steps are those of the last one."""
    subjects = [GPipeSteps(model, loss_fn, optimizer) for model in models.values()]
    first = next(source)
    if costs is not None:
        n_samples = len(first[0][0] if isinstance(first[0], tuple) else first[0])
        _check_costs(costs, {name: model.graph(n_samples) for name, model in models.items()})
    check_backward(models, first[0])
    repeats = _run_repeats(
        subjects,
        lambda _: GPipeCalibration(subjects[-1]),
        chain([first], source),
        counts,
        costs,
        progress,
    )
    last = repeats[-1]
    real = last.costs if costs is None else subjects[-1].with_bytes(costs, *last.batch)
    rows = _rows(models, subjects, repeats, real)
    notes = dict.fromkeys(note for model in models.values() for note in model.notes)
    return Validation(rows, last.costs, notes=tuple(notes))


def _widest(graphs: Mapping[str, TaskGraph]) -> TaskGraph:
    """Return the graph that has the paths of all, once all have as many micro-batches."""
    if not isinstance(graphs, Mapping):
        raise ArgumentError(
            f"graphs must be a mapping of names to graphs, got {graphs!r:.60} "
            f"({type(graphs).__name__}); give such as {{'1f1b': ps.lower(schedule)}}"
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
                "of as many micro-batches"
            )
    return first


def _check_costs(costs: object, graphs: Mapping[str, TaskGraph]) -> None:
    """Raise unless costs that were given suit every graph."""
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


def _warn_of_other_sizes(costs: Costs, rows: Mapping[str, Row]) -> None:
    """Warn where messages were not as large as costs that were given say."""
    timeline = next(iter(rows.values())).measured
    said = costs.per_stage("output_bytes", timeline.graph.n_stages)
    seen = output_bytes(timeline)
    for stage in np.flatnonzero((seen > 0) & (np.abs(said - seen) > 0.01 * seen))[:1]:
        warnings.warn(
            f"the costs say that stage {stage} sends {said[stage]:.0f} bytes a micro-batch, and it "
            f"sent {seen[stage]:.0f}: they are of another model or size of micro-batch; profile "
            "this one",
            AccuracyWarning,
            stacklevel=3,
        )


class _Measured(NamedTuple):
    """One repeat: its costs, the steps of each subject, and the last batch."""

    costs: Costs
    profile: Profile | None
    results: list[list[MeasuredStep]]
    batch: tuple[Batch, Any]


def _run_repeats(
    subjects: Sequence[Steppable],
    new_calibration: Callable[[tuple[Batch, Any]], StepCalibration],
    source: Iterator[tuple[Batch, Any]],
    counts: tuple[int, int, int],
    costs: Costs | None,
    progress: Callable[[str], None] | None,
) -> list[_Measured]:
    """Run all repeats: calibration steps, unless there are costs, alternate with measured ones.

    ``counts`` are the measured steps, the steps before them, and the repeats.
    """
    n_steps, warm_up, repeat = counts
    repeats = []
    for number in range(repeat):
        report = _prefixed(progress, f"repeat {number + 1} of {repeat}, " if repeat > 1 else "")
        batch = next(source)
        calibration = new_calibration(batch) if costs is None else None
        report(f"warming up: {warm_up} rounds")
        for _ in range(warm_up):
            if calibration is not None:
                calibration.warm_up()
            for subject in subjects:
                subject.step(*batch)
        results: list[list[MeasuredStep]] = [[] for _ in subjects]
        for turn in range(n_steps):
            batch = next(source)
            if calibration is not None:
                calibration.calibrate(*batch)
            for subject, steps in zip(subjects, results, strict=True):
                steps.append(subject.measure(*batch))
            report(f"round {turn + 1} of {n_steps}: loss {float(results[-1][-1].loss):.4f}")
        profile: Profile | None = None
        repeat_costs = costs
        if calibration is not None:
            repeat_costs, profile = calibration.result(*batch)
        assert repeat_costs is not None
        repeats.append(_Measured(repeat_costs, profile, results, batch))
    return repeats


def _rows(
    names: Iterable[str],
    subjects: Sequence[Steppable],
    repeats: Sequence[_Measured],
    real: Costs,
) -> dict[str, Row]:
    """Return the row of each subject; ``real`` are costs with the bytes that were measured."""
    rows = {}
    for index, (name, subject) in enumerate(zip(names, subjects, strict=True)):
        graph = repeats[-1].results[index][-1].timeline.graph
        compared = [Repeat(simulate(graph, x.costs), x.results[index]) for x in repeats]
        middle = _middle(compared)
        held = subject.held_bytes(real, *repeats[-1].batch, middle.timeline)
        rows[name] = _row(name, compared, middle, held)
    return rows


def _prefixed(progress: Callable[[str], None] | None, prefix: str) -> Callable[[str], None]:
    """Return a function that tells a line with something before it, if anyone listens."""
    return lambda line: progress(prefix + line) if progress is not None else None


def _next_batches(
    batches: Iterable[tuple[Batch, Any]], n_batches: int
) -> Iterator[tuple[Batch, Any]]:
    """Yield ``n_batches`` batches, or raise."""
    source = iter(batches)
    for number in range(n_batches):
        try:
            yield next(source)
        except StopIteration:
            raise ArgumentError(
                f"got {number} batches, but {n_batches} are needed: one to warm up with, and one "
                "a step"
            ) from None


def _middle(repeats: Sequence[Repeat]) -> MeasuredStep:
    """Return the step whose makespan is the median."""
    results = [result for repeat in repeats for result in repeat.results]
    return sorted(results, key=lambda result: result.timeline.makespan)[len(results) // 2]


def _row(
    name: str,
    repeats: Sequence[Repeat],
    middle: MeasuredStep,
    peak_memory: NDArray[np.float64],
) -> Row:
    """Put the steps of a graph beside its predictions."""
    results = [result for repeat in repeats for result in repeat.results]
    said = tuple(repeat.predicted.makespan for repeat in repeats)
    return Row(
        predicted=repeats[-1].predicted.with_name(name),
        measured=middle.timeline.with_name(name),
        makespans=tuple(result.timeline.makespan for result in results),
        replayed=tuple(replay(result.timeline).makespan for result in results),
        peak_memory=tuple(peak_memory.tolist()),
        losses=tuple(float(result.loss) for result in results),
        predictions=said if len(said) > 1 else (),
        host_seconds=tuple(filter(None, (result.host_seconds for result in results))),
        parts=parts_of_steps(repeats),
        ops=op_errors(repeats),
    )
