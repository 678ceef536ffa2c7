"""`measure` and `profile`: the costs of a pipeline, from steps on its own devices under load.

Stages share memory bandwidth, and threads of one process share an interpreter. Durations measured
one stage at a time are therefore too short. Costs are means over the steps of one calibration
schedule, in which all stages run at the same time:

- breadth first, with every activation recomputed, unless a stage has layers with experts;
- one micro-batch more than the pipeline has, so that it is no schedule that costs are used for;
- if backwards are split, every other micro-batch has I and W, so that B is measured as well.

Slices of sequences have one cost a stage, their mean. The steps have one sequence more, and every
other sequence has I and W.

Of `Microbatches`, one of each class of equal shapes is measured, in turns (`ShapeClasses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.step_result import StepResult
from pipeexec.nesting import with_tensors
from pipeexec.profiling.collectives import (
    base_placement,
    check_exchanges,
    collective_seconds,
    expert_values,
    lower_for_replicas,
    max_buckets,
    measured_buckets,
    norm_seconds,
)
from pipeexec.profiling.link_speed import (
    check_microbatches,
    check_shares,
    fits,
    graphs_that_offload,
    host_link,
    measure_transfers,
    network_of,
    offload_bytes,
    pairs_of,
    with_fits,
)
from pipeexec.profiling.profile import Profile
from pipeexec.profiling.task_seconds import (
    host_share,
    launch_seconds,
    mean_launch,
    mean_task_seconds,
    optimizer_bytes,
    shape_classes,
    with_stage_bytes,
)
from pipeexec.run_options import OF_PROFILE, RunOptions, run_options
from pipeexec.stages.batches import Batch, repeated_samples, split_batches
from pipeexec.stages.microbatches import are_microbatches
from pipeexec.stages.stage import Stage
from pipesim.analysis.measured_costs import output_bytes
from pipesim.costs.cost_fields import Buckets
from pipesim.costs.costs import Costs
from pipesim.errors import AccuracyWarning, ArgumentError, check_list, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    import pandas as pd


@checked_names
def profile(
    pipeline: Pipeline,
    inputs: Batch,
    targets: Any,
    *,
    options: RunOptions = OF_PROFILE,
    n_steps: int | None = None,
    warm_up: int | None = None,
) -> Costs:
    """Return the costs of a pipeline's stages on its devices; `measure` returns tables too.

    Parameters
    ----------
    pipeline
        Pipeline whose stages and devices are measured; it stays open.
    inputs, targets
        A batch as for ``pipeline.step``. Parameters, buffers and optimizers are unchanged after. Of
        `Microbatches`, costs have a value a stage and micro-batch; equal shapes are measured once.
    options, n_steps, warm_up
        Number of measured steps (7), and of steps before them that are not measured (2): a
        `RunOptions`, which has no other values, or its values.

    Returns
    -------
    Costs
        Seconds and bytes of each operation and stage, with measured links between the devices.

    Warns
    -----
    AccuracyWarning
        If tasks are shorter than 1 ms, or their mean varies by more than 20 % between steps.

    Examples
    --------
    One worker, which sends no messages, takes some milliseconds. Tasks this short cause an
    `AccuracyWarning`:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 1, 4))
    >>> x = torch.ones(8, 4)
    >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
    ...     costs = px.profile(pipeline, x, x, n_steps=1)
    >>> len(costs.forward), ps.simulate(graph, costs).makespan > 0
    (1, True)
    """
    return measure(
        pipeline, inputs, targets, options=options, n_steps=n_steps, warm_up=warm_up
    ).costs


@checked_names
def measure(
    pipeline: Pipeline,
    inputs: Batch,
    targets: Any,
    *,
    options: RunOptions = OF_PROFILE,
    n_steps: int | None = None,
    warm_up: int | None = None,
    graphs: Iterable[TaskGraph] | None = None,
) -> Profile:
    """Measure every cost of a pipeline's stages, and return the tables of the measurement, too.

    Parameters
    ----------
    pipeline, inputs, targets, options, n_steps, warm_up
        As for `profile`.
    graphs
        Graphs that the costs are for. If one of them has a split backward, I and W are measured.
        None stands for the pipeline's own graph.

    Returns
    -------
    Profile
        Costs, and tables of durations (s), messages (s, bytes) and fitted links.
    """
    check_type("pipeline", pipeline, Pipeline)
    options = run_options(options, n_steps=n_steps, warm_up=warm_up)
    with guard_processes(pipeline.processes):
        check_results([pipeline.graph], n_steps=options.n_steps)
    calibration = Calibration(pipeline, inputs, targets, graphs)
    calibration.warm_up(options.warm_up)
    for _ in range(options.n_steps):
        calibration.step()
    return calibration.result()


#: A value a stage, or an array with one a stage and micro-batch.
Values = tuple[float, ...] | NDArray[np.float64]


class Calibration:
    """Run calibration steps of a pipeline, one at a time, and compute its costs from them."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Batch,
        targets: Any,
        graphs: Iterable[TaskGraph] | None = None,
    ) -> None:
        check_type("pipeline", pipeline, Pipeline)
        pipeline.check_batch(inputs, targets)
        graph = pipeline.graph
        for name, batch in (("inputs", inputs), ("targets", targets)):
            if batch is None:  # `Pipeline.step` accepts it; here each process needs the shapes
                raise ArgumentError(f"{name} must be a tensor of samples or hold one, got None")
        self.pipeline = pipeline
        listed = () if graphs is None else check_list("graphs", graphs, "such as [pipeline.graph]")
        graphs = [check_type("graphs: each", g, TaskGraph) for g in listed] or [graph]
        check_exchanges(graph, graphs)
        _check_slices(graph, graphs)
        check_shares(graphs)
        self._offloading = graphs_that_offload(graphs)
        #: Whether backwards are split into I and W.
        self.splits = any(bool((g.op == Op.W).any()) for g in graphs)
        self.keeps_versions = any(g.n_batches > 1 for g in graphs)
        self.cut = pipeline._model.cut(graph)
        if self.cut.n_slices > 1 and are_microbatches(inputs, targets):
            raise ArgumentError(
                f"inputs or targets are Microbatches, and the graph has n_slices="
                f"{self.cut.n_slices} slices a sequence: slices of one length are measured; give a "
                "tensor or nested tensors, padded to one length"
            )
        #: Classes of equal shapes of `Microbatches`; None for a batch that is split evenly.
        self.classes = shape_classes(pipeline, inputs, targets)
        self._step_batch = inputs, targets
        #: Batch of a loaded step, and batches of one micro-batch for isolated steps.
        self.batch, self.singles = self._batches(inputs, targets)
        n_sequences = graph.n_microbatches // graph.n_slices + 1
        if self.classes is not None:  # with a split, each class with B, and with I and W
            n_sequences = self.classes.order.shape[1] * (1 + self.splits)
        self.loaded, self.isolated = (
            self._with_graph(self._schedule(n, 2), recompute="always") for n in (n_sequences, 1)
        )
        self.n_buckets = max_buckets(graphs)
        self.bucketed = self.n_buckets and self._with_graph(
            self._schedule(1, 0), grad_sync="bucketed", n_buckets=self.n_buckets
        )
        self.loaded_steps: list[StepResult] = []
        self.isolated_steps: list[StepResult] = []
        #: Steps with bucketed gradients: the result of this process, and that of all processes.
        self.bucket_steps: list[tuple[StepResult, StepResult]] = []
        self.offload_steps: list[StepResult] = []
        self.optimizer_bytes: tuple[float, ...] = ()

    def _batches(
        self, inputs: Batch, targets: Any
    ) -> tuple[tuple[Batch, Any], list[tuple[Batch, Any]]]:
        """Return the batch of a loaded step, and batches of a single micro-batch."""
        graph, local = self.pipeline.graph, self.pipeline.shares.local
        if self.classes is None:
            n_samples = self._n_samples(inputs, targets)
            whole, single = (
                repeated_samples(inputs, targets, n * n_samples, self.pipeline.batch_dims)
                for n in (graph.n_microbatches // graph.n_slices + 1, 1)
            )
            return whole, [single]
        check_microbatches(graph, self._offloading)
        n = self.classes.order.shape[1]
        columns = [list(range(n)) * (1 + self.splits), *([k] for k in range(n))]
        whole, *singles = (
            (self.classes.batches(inputs, local, k), self.classes.batches(targets, local, k))
            for k in columns
        )
        return whole, singles

    def _run(self, pipeline: Pipeline, batch: tuple[Batch, ...]) -> StepResult:
        """Run a step and return the measurements of all processes."""
        pipeline.align()
        return pipeline.gather(pipeline.step(*batch))

    def warm_up(self, n_steps: int) -> None:
        """Run steps that are not measured."""
        with self.pipeline.preserved():
            for _ in range(n_steps):
                self.loaded.step(*self.batch)
                for batch in self.singles:
                    self.isolated.step(*batch)
                for pipeline, batch in self._offloads:
                    pipeline.step(*batch)
                if self.bucketed:
                    self.bucketed.step(*self.singles[0])

    def step(self) -> None:
        """Measure one step under load, and one of a single micro-batch."""
        with self.pipeline.preserved():
            self.loaded_steps.append(self._run(self.loaded, self.batch))
            self.isolated_steps += [self._run(self.isolated, batch) for batch in self.singles]
            self.offload_steps += [self._run(*offload) for offload in self._offloads]
            if self.bucketed:
                self.pipeline.align()
                own = self.bucketed.step(*self.singles[0])
                self.bucket_steps.append((own, self.bucketed.gather(own)))
            # Optimizers have no state before their first step: their bytes are counted here.
            self.optimizer_bytes = optimizer_bytes(self.pipeline)

    def _with_graph(
        self, schedule: Schedule, source: Pipeline | None = None, **options: Any
    ) -> Pipeline:
        """Return a pipeline that runs a schedule on all replicas; ``source`` knows its shapes."""
        pipeline = self.pipeline
        graph = lower_for_replicas(pipeline.graph, schedule, pipeline.shares, **options)
        calibrated = (source or pipeline).with_graph(graph)
        for stage in calibrated._runner.stages:
            if isinstance(stage, Stage):
                stage.must_be_repeatable = False  # its gradients are not used
        return calibrated

    def _schedule(self, n_sequences: int, split: int) -> Schedule:
        """Return the schedule of so many sequences; they are micro-batches without slices."""
        placement = base_placement(self.pipeline.graph)
        n_slices, split = self.cut.n_slices, split if self.splits else 0
        schedule = breadth_first(placement, n_sequences * n_slices, split, n_slices)
        # The time of a STEP includes that of keeping the weights: step after each micro-batch.
        many = self.keeps_versions and n_sequences > 1
        return schedule.with_updates(n_sequences, "stashed") if many else schedule

    @cached_property
    def _offloads(self) -> list[tuple[Pipeline, tuple[Batch, Any]]]:
        """Pipelines of the graphs that offload, and their batches.

        They are made after a first step, which knows the stages: a first forward gets copies.
        """
        return [
            (self.loaded.with_graph(graph), self._offloaded_batch(graph))
            for graph in self._offloading
        ]

    def _offloaded_batch(self, graph: TaskGraph) -> tuple[Batch, Any]:
        """Return the batch of a graph that offloads; micro-batches are as large as in others."""
        if self.classes is not None:
            return self._step_batch
        n_samples = self._n_samples(*self._step_batch) * graph.n_microbatches
        return repeated_samples(*self._step_batch, n_samples, self.pipeline.batch_dims)

    def _n_samples(self, inputs: Batch, targets: Any) -> int:
        """Return the samples of one micro-batch of calibration steps, over all replicas here."""
        graph, n_here = self.pipeline.graph, len(self.pipeline.shares.local)
        n_sequences = graph.n_microbatches // graph.n_slices
        *_, sizes = split_batches(inputs, targets, n_sequences, n_here, self.pipeline.batch_dims)
        return n_here * min(sizes)

    @cached_property
    def held_bytes(self) -> Values:
        """Bytes of activations that each stage holds for one micro-batch; the mean of slices."""
        n_slices = self.cut.n_slices
        schedule = breadth_first(base_placement(self.pipeline.graph), n_slices, n_slices=n_slices)
        # From `loaded`, as `pipeline` may not have run yet: a first forward gets copies.
        probe = self._with_graph(schedule, self.loaded)
        held = [probe.held_bytes(*batch) for batch in self.singles]
        return self._of_singles([[nbytes / n_slices for nbytes in row] for row in held])

    @cached_property
    def left_bytes(self) -> Values:
        """Bytes that each stage holds for one micro-batch between I and W; 0 without a split."""
        if not self.splits:
            return (0.0,) * self.pipeline.graph.n_stages
        probe = self._with_graph(
            breadth_first(base_placement(self.pipeline.graph), 1, 1), self.loaded
        )
        firsts = self.singles if self.cut.n_slices == 1 else [self._first_slice()]
        return self._of_singles([probe.left_bytes(*batch) for batch in firsts])

    def _first_slice(self) -> tuple[Batch, ...]:
        """Return the batch of the first slice of one micro-batch, as a sequence of its own.

        What W needs does not depend on the earlier slices.
        """
        [single] = self.singles
        slices = split_batches(*single, self.cut.n_slices, 1, self.pipeline.batch_dims, self.cut)
        firsts = slices.inputs[0], slices.targets[0]
        return tuple(map(with_tensors, single, firsts))

    def _of_singles(self, rows: Sequence[Sequence[float]]) -> Values:
        """Return a field of costs from bytes of isolated steps, by replica and stage."""
        n_stages = self.pipeline.graph.n_stages
        if self.classes is None:
            return tuple(map(float, rows[0][:n_stages]))
        n_shares = len(self.classes.order)
        table = np.array(rows, dtype=np.float64).reshape(len(rows), n_shares, n_stages)
        return self.classes.of_measured(table.transpose(2, 1, 0).reshape(n_stages, -1))

    def _buckets(self, costs: Costs) -> Buckets | None:
        if not self.bucket_steps:
            return None
        own, merged = zip(*self.bucket_steps, strict=True)
        seconds = costs.per_stage("reduce_grad", merged[0].timeline.graph.n_stages).tolist()
        return measured_buckets(self.pipeline, own, merged, seconds, costs.network, self.n_buckets)

    def result(self) -> Profile:
        """Return the costs of the steps so far."""
        transfers = measure_transfers(self.pipeline, pairs_of(self.pipeline.graph))
        fitted = fits(transfers)
        timelines = [step.timeline for step in self.loaded_steps]
        values, table = mean_task_seconds(
            timelines, [step.timeline for step in self.isolated_steps], with_split=self.splits
        )
        launch = self._launch()
        network = network_of(transfers, fitted, timelines)
        copied = [step.timeline for step in self.offload_steps]
        network = replace(network, host=host_link(copied))
        values |= {
            "output_bytes": tuple(output_bytes(timelines[-1]).tolist()),
            "activation_bytes": self.held_bytes,
            "weight_grad_bytes": self.left_bytes,
            **(self.classes.fields(timelines, with_split=self.splits) if self.classes else {}),
            **offload_bytes(copied, self.pipeline.graph.n_stages, self.classes),
        }
        costs = Costs(
            **values,
            **self._imposed_launches(launch),
            network=network,
            **collective_seconds(timelines),
            **norm_seconds(timelines, network),
            **expert_values(timelines),
        )
        costs = replace(
            with_stage_bytes(costs, self.pipeline),
            optimizer_bytes=self.optimizer_bytes,
            buckets=self._buckets(costs),
        )
        processes = self.pipeline.processes
        if processes is None or processes.rank == 0:  # all processes have the whole table
            warn_of_poor_accuracy(table)
        share, launch_share = self._host_shares(launch)
        return Profile(
            costs,
            table,
            *with_fits(transfers, fitted),
            host_share=share,
            launch_share=launch_share,
        )

    def _host_shares(self, launch: float) -> tuple[float, float]:
        """Return `Profile.host_share`, and `Profile.launch_share` of launches of such seconds."""
        graph, processes = self.loaded.graph, self.pipeline.processes
        n_hosts = int(graph.host.max()) + 1 if processes is None else processes.n_ranks
        share = host_share(self.loaded_steps, n_hosts)
        mean = sum(step.host_seconds for step in self.loaded_steps) / len(self.loaded_steps)
        per_task = mean / len(graph)
        return share, share * launch / per_task if per_task else 0.0

    def _launch(self) -> float:
        if self.pipeline.cuda_graph:
            return 0.0
        if any(isinstance(device, CudaDevice) for device in self.pipeline.devices):
            return launch_seconds(self.loaded_steps, self.isolated_steps)
        return mean_launch(self.loaded_steps)

    def _imposed_launches(self, launch: float) -> dict[str, Any]:
        """Return launches of costs: apart for operations that workers impose other launches on."""
        ops = {op for device in self.pipeline.devices for op in device.launch_by_op}
        times = [step.host_times for step in self.loaded_steps]
        if not ops or any(x is None for x in times):
            return {"launch": launch}
        seconds = np.mean(np.array(times, dtype=np.float64), axis=0)
        op, is_apart = self.loaded.graph.op, np.isin(self.loaded.graph.op, [*ops])
        others = seconds[~is_apart]
        return {
            "launch": float(np.nanmean(others)) if len(others) else launch,
            "launch_by_op": {
                one: float(np.nanmean(seconds[op == one])) for one in ops if (op == one).any()
            },
        }


def breadth_first(
    placement: Placement, n_microbatches: int, split: int = 0, n_slices: int = 1
) -> Schedule:
    """Return all forwards stage by stage, then all backwards stage by stage.

    With ``split``, every ``split``-th sequence has I and W in place of B: sequence ``j`` where
    ``j + 1`` is a multiple of ``split``. Without slices, a micro-batch is one sequence.
    """
    counts = range(n_microbatches)
    last_first = [j + n_slices - 1 - 2 * (j % n_slices) for j in counts]
    backward = [
        ("I", "W") if split and (j // n_slices + 1) % split == 0 else ("B",) for j in counts
    ]
    orders = [
        [f"{s}F{j}" for s in placement.stages_of(d) for j in counts]
        + [f"{s}{op}{j}" for s in reversed(placement.stages_of(d)) for j in last_first
           for op in backward[j]]
        for d in range(placement.n_devices)
    ]  # fmt: skip
    return Schedule.from_orders(
        orders, placement=placement, n_microbatches=n_microbatches, name="calibration"
    ).with_slices(n_slices)


def _check_slices(graph: TaskGraph, graphs: Iterable[TaskGraph]) -> None:
    for other in graphs:
        if other.n_slices != graph.n_slices:
            raise ArgumentError(
                f"graph {other.name!r} has n_slices={other.n_slices}, that of the pipeline "
                f"n_slices={graph.n_slices}: costs hold for slices of one length; measure each "
                "with its own pipeline"
            )


#: Predictions of shorter tasks (s) are poor on CPU: passing a task to its worker takes as long.
SHORTEST = 1e-3
#: Spread of the steps' mean durations, over their mean, above which the machine is too busy.
UNSTEADY = 0.2


def warn_of_poor_accuracy(table: pd.DataFrame) -> None:
    """Warn of the shortest task below 1 ms, and of the operation that varies most between steps.

    ``table`` is `Profile.table`. Warnings are on behalf of the caller of `measure`, three calls up.
    """
    tasks = table[(table["loaded"] > 0) & (table.index.get_level_values("op") != "STEP")]
    for name, row in tasks[tasks["loaded"] < SHORTEST].nsmallest(1, "loaded").iterrows():
        warn_caller(
            short_task_text(_label(name), row["loaded"]),
            AccuracyWarning,
        )
    for name, row in tasks[tasks["spread"] > UNSTEADY].nlargest(1, "spread").iterrows():
        warn_caller(
            f"the mean of {_label(name)} moves by {row['spread']:.0%} from step to step: the "
            "machine is busy, and predictions are no better than that",
            AccuracyWarning,
        )


def short_task_text(task: str, seconds: float) -> str:
    """Return the warning of a task that is shorter than `SHORTEST`."""
    return (
        f"{task} takes {seconds * 1e3:.3f} ms: below {SHORTEST * 1e3:g} ms a task the prediction "
        "will be poor (hand-over and interpreter take as long); use larger micro-batches or stages"
    )


def _label(name: object) -> str:
    assert isinstance(name, tuple)
    return f"{name[0]} of stage {name[1]}"
