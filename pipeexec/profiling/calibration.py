"""Measure the costs that the simulator takes, on the devices themselves and under load.

Stages share memory bandwidth, and threads of one process share an interpreter. Durations measured
one stage at a time are therefore too short. Costs are means over the steps of one calibration
schedule, in which all stages run at the same time:

- breadth first, with every activation recomputed;
- one micro-batch more than the pipeline has, so that it is no schedule that costs are used for;
- if backwards are split, every other micro-batch has I and W, so that B is measured as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from pipeexec.devices.cuda import CudaDevice
from pipeexec.executor.pipeline import Pipeline, StepResult
from pipeexec.profiling.accuracy_warnings import warn_of_poor_accuracy
from pipeexec.profiling.collectives import (
    base_placement,
    check_exchanges,
    collective_seconds,
    lower_for_replicas,
    max_buckets,
    measured_buckets,
    norm_seconds,
)
from pipeexec.profiling.host_times import host_share, launch_seconds, mean_launch
from pipeexec.profiling.link_fit import fits, network_of, with_fits
from pipeexec.profiling.link_speed import measure_transfers, pairs_of
from pipeexec.profiling.profile import Profile
from pipeexec.profiling.stage_bytes import optimizer_bytes, with_stage_bytes
from pipeexec.profiling.task_seconds import mean_task_seconds
from pipeexec.stages.batches import Batch, repeated_samples, split_batches
from pipesim.analysis.measured_costs import output_bytes
from pipesim.costs.collective_costs import Buckets
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, check_list, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule

__all__ = ["Calibration", "breadth_first"]


class Calibration:
    """Run calibration steps of a pipeline, one at a time, and compute its costs from them.

    Parameters
    ----------
    pipeline
        Pipeline whose stages and devices are measured.
    inputs, targets
        A batch as for ``pipeline.step``.
    graphs
        Graphs that the costs are for; None stands for the pipeline's own graph.
    """

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
        graphs = _checked_graphs(graphs) or [graph]
        check_exchanges(graph, graphs)
        #: Whether backwards are split into I and W.
        self.splits = any(bool((g.op == Op.W).any()) for g in graphs)
        self.keeps_versions = any(g.n_batches > 1 for g in graphs)
        n_microbatches, n_here = graph.n_microbatches + 1, len(pipeline.shares.local)
        dims = pipeline.batch_dims
        *_, sizes = split_batches(inputs, targets, graph.n_microbatches, n_here, dims)
        self.microbatch_size = min(sizes)
        self.batch, self.one_microbatch = (
            repeated_samples(inputs, targets, n_here * n * self.microbatch_size, dims)
            for n in (n_microbatches, 1)
        )
        self.loaded, self.isolated = (
            self._with_graph(self._schedule(n, 2), recompute="always") for n in (n_microbatches, 1)
        )
        self.n_buckets = max_buckets(graphs)
        self.bucketed = self.n_buckets and self._with_graph(
            self._schedule(1, 0), grad_sync="bucketed", n_buckets=self.n_buckets
        )
        self.loaded_steps: list[StepResult] = []
        self.isolated_steps: list[StepResult] = []
        #: Steps with bucketed gradients: the result of this process, and that of all processes.
        self.bucket_steps: list[tuple[StepResult, StepResult]] = []
        self.optimizer_bytes: tuple[float, ...] = ()

    def _run(self, pipeline: Pipeline, batch: tuple[Batch, ...]) -> StepResult:
        """Run a step and return the measurements of all processes."""
        pipeline.align()
        return pipeline.gather(pipeline.step(*batch))

    def warm_up(self, n_steps: int) -> None:
        """Run steps that are not measured."""
        with self.pipeline.preserved():
            for _ in range(n_steps):
                self.loaded.step(*self.batch)
                self.isolated.step(*self.one_microbatch)
                if self.bucketed:
                    self.bucketed.step(*self.one_microbatch)

    def step(self) -> None:
        """Measure one step under load, and one of a single micro-batch."""
        with self.pipeline.preserved():
            self.loaded_steps.append(self._run(self.loaded, self.batch))
            self.isolated_steps.append(self._run(self.isolated, self.one_microbatch))
            if self.bucketed:
                self.pipeline.align()
                own = self.bucketed.step(*self.one_microbatch)
                self.bucket_steps.append((own, self.bucketed.gather(own)))
            # Optimizers have no state before their first step: their bytes are counted here.
            self.optimizer_bytes = optimizer_bytes(self.pipeline)

    def _with_graph(
        self, schedule: Schedule, source: Pipeline | None = None, **options: Any
    ) -> Pipeline:
        """Return a pipeline that runs a schedule on all replicas; ``source`` knows its shapes."""
        pipeline = self.pipeline
        graph = lower_for_replicas(pipeline.graph, schedule, pipeline.shares, **options)
        return (source or pipeline).with_graph(graph)

    def _schedule(self, n_microbatches: int, split: int) -> Schedule:
        placement = base_placement(self.pipeline.graph)
        schedule = breadth_first(placement, n_microbatches, split if self.splits else 0)
        # The time of a STEP includes that of keeping the weights: step after each micro-batch.
        many = self.keeps_versions and n_microbatches > 1
        return schedule.with_updates(n_microbatches, "stashed") if many else schedule

    @cached_property
    def held_bytes(self) -> list[int]:
        """Bytes of activations that each stage holds for one micro-batch."""
        schedule = breadth_first(base_placement(self.pipeline.graph), 1)
        # From `loaded`, as `pipeline` may not have run yet: a first forward gets copies.
        probe = self._with_graph(schedule, self.loaded)
        return probe.held_bytes(*self.one_microbatch)[: probe.graph.n_stages]

    @cached_property
    def left_bytes(self) -> list[int]:
        """Bytes that each stage holds for one micro-batch between I and W; 0 without a split."""
        if not self.splits:
            return [0] * self.pipeline.graph.n_stages
        probe = self._with_graph(self._schedule(1, 1), self.loaded)
        return probe.left_bytes(*self.one_microbatch)[: probe.graph.n_stages]

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
        costs = Costs(
            **values,
            launch=launch,
            activation_bytes=tuple(map(float, self.held_bytes)),
            weight_grad_bytes=tuple(map(float, self.left_bytes)),
            network=network,
            output_bytes=tuple(output_bytes(timelines[-1]).tolist()),
            **collective_seconds(timelines),
            **norm_seconds(timelines, network),
        )
        costs = replace(
            with_stage_bytes(costs, self.pipeline),
            optimizer_bytes=self.optimizer_bytes,
            buckets=self._buckets(costs),
        )
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
        """Return the host's seconds per task; see `pipeexec.profiling.host_times`."""
        if self.pipeline.cuda_graph:
            return 0.0
        if any(isinstance(device, CudaDevice) for device in self.pipeline.devices):
            return launch_seconds(self.loaded_steps, self.isolated_steps)
        return mean_launch(self.loaded_steps)


def breadth_first(placement: Placement, n_microbatches: int, split: int = 0) -> Schedule:
    """Return all forwards stage by stage, then all backwards stage by stage.

    With ``split``, every ``split``-th micro-batch has I and W in place of B: micro-batch ``j``
    where ``j + 1`` is a multiple of ``split``.
    """
    counts = range(n_microbatches)
    backward = [("I", "W") if split and (j + 1) % split == 0 else ("B",) for j in counts]
    orders = [
        [f"{s}F{j}" for s in placement.stages_of(d) for j in counts]
        + [f"{s}{op}{j}" for s in reversed(placement.stages_of(d)) for j in counts
           for op in backward[j]]
        for d in range(placement.n_devices)
    ]  # fmt: skip
    return Schedule.from_orders(
        orders, placement=placement, n_microbatches=n_microbatches, name="calibration"
    )


def _checked_graphs(graphs: object) -> list[TaskGraph]:
    """Return graphs as a list; an empty one for None."""
    listed = () if graphs is None else check_list("graphs", graphs, "such as [pipeline.graph]")
    return [check_type("graphs: each", graph, TaskGraph) for graph in listed]
