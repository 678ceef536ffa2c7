"""Measure the costs that the simulator takes, on the devices themselves and under load.

Stages share memory bandwidth, and threads of one process an interpreter: durations measured one
stage at a time are too short. So costs are means over the steps of one calibration schedule, in
which all stages run at once: breadth first, every activation recomputed, with one micro-batch more
than the pipeline has. It is none that anyone predicts with these costs. Where backwards are split,
every other micro-batch's is, so that B is measured as well as I and W.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeexec.devices.cuda import CudaDevice
from pipeexec.devices.host_memory import check_results
from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline, StepResult
from pipeexec.profiling.collectives import (
    base_placement,
    check_exchanges,
    collective_seconds,
    lowered_like,
    measured_buckets,
    n_buckets,
)
from pipeexec.profiling.files import (
    load_profile,
    plot_transfers,
    read_shares,
    save_profile,
    shares_of,
)
from pipeexec.profiling.host_times import host_share, launch_seconds, mean_launch
from pipeexec.profiling.link_fit import fits, network_of, with_fits
from pipeexec.profiling.link_speed import measure_transfers, pairs_of
from pipeexec.run_directory import checked_record, command, read_record, write_directory
from pipeexec.stages.batches import Batch, split_batches
from pipesim.analysis.measured_costs import output_bytes, stage_seconds
from pipesim.costs.collective_costs import Buckets
from pipesim.costs.costs import Costs
from pipesim.costs.pricing import DURATION_OF
from pipesim.errors import AccuracyWarning, ArgumentError, check_count, check_list, check_type
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.atomic_write import check_path

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["Calibration", "Profile", "breadth_first", "measure", "profile", "with_stage_bytes"]

#: Tasks shorter than this many seconds are predicted poorly on CPU: hand-over takes as long.
SHORTEST = 1e-3
#: Standard deviation of a step's mean duration over itself beyond which the machine is too busy.
UNSTEADY = 0.2
#: The field of `Costs` of an operation, and where it has several, of its part.
_MEASURED: dict[tuple[Op, int | None], str] = {
    **{(op, None): DURATION_OF[op] for op in (Op.F, Op.B, Op.R, Op.STEP, Op.I, Op.W, Op.DISPATCH)},
    (Op.REORDER, EXCHANGES.index("vectors")): "reorder",
    (Op.REORDER, EXCHANGES.index("gradients")): "reorder_gradients",
}


def profile(
    pipeline: Pipeline, inputs: Batch, targets: Any, *, n_steps: int = 7, warm_up: int = 2
) -> Costs:
    """Return the costs of a pipeline's stages on its devices; `measure` says more.

    Parameters
    ----------
    inputs, targets
        A batch as for ``pipeline.step``. Parameters, buffers and optimizers end as they began.
    n_steps, warm_up
        Steps that count, and steps before them that do not.

    Warns
    -----
    AccuracyWarning
        If tasks are shorter than 1 ms, or their mean moves a lot from step to step.
    """
    return measure(pipeline, inputs, targets, n_steps=n_steps, warm_up=warm_up).costs


@dataclass(frozen=True, eq=False)
class Profile:
    """What was measured.

    Attributes
    ----------
    costs
        For the simulator.
    table
        One row an operation and stage, durations in seconds: ``loaded`` (mean over the tasks of
        all steps), ``spread`` (standard deviation of the steps' means over ``loaded``),
        ``isolated`` (mean with all other devices idle; NaN for I and W, which two stages may run
        at once), ``slow_down`` (loaded over isolated).
    transfers
        Seconds that messages take, one row a pair of devices (``source``, ``target``) and size
        (``nbytes``): median between ``idle`` devices, and ``loaded``, while the others compute;
        ``idle_fit`` and ``loaded_fit`` are what the fit of that pair says.
    fits
        ``latency`` (s), ``bandwidth`` (bytes/s), ``residual`` (mean relative deviation) and ``r2``
        of each pair in each state, indexed by ``source``, ``target`` and ``state``; -1 and -1 are
        all pairs together.
    host_share
        Seconds in which the host issued the tasks of a loaded step, over its makespan; mean over
        the steps, and over the hosts of several processes. NaN of older runs.
    launch_share
        The same without the seconds in which the full queues of GPUs blocked the host: ``launch``
        of all tasks over the makespan. Close to 1, the host was the bottleneck.
    """

    costs: Costs
    table: pd.DataFrame
    transfers: pd.DataFrame
    fits: pd.DataFrame
    host_share: float = math.nan
    launch_share: float = math.nan

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the seconds of messages by size, idle and loaded, and what was fitted."""
        return plot_transfers(self.transfers, ax=ax)

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a run directory, whole or not at all.

        ``run.json``, ``costs.json``, ``profile.csv`` (`table`), ``transfers.csv``, ``links.csv``
        (`fits`), and where there are transfers ``transfers.png``.

        Raises
        ------
        RunDirectoryError
            If it cannot be written, or something else is there.
        """
        with write_directory(
            check_path("path", path, "write"),
            {"command": command(), **checked_record(record), **shares_of(self)},
        ) as folder:
            self.costs.save(folder / "costs.json")
            save_profile(folder, self.table, self.transfers, self.fits)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a run directory that `save` wrote, or a validation's that has a profile.

        Raises
        ------
        RunDirectoryError
            If a file is missing, truncated or edited, or the run has no profile.
        """
        path = check_path("path", path)
        record = read_record(path)
        return cls(Costs.load(path / "costs.json"), *load_profile(path), **read_shares(record))


def breadth_first(placement: Placement, n_microbatches: int, split: int = 0) -> Schedule:
    """Return all forwards stage by stage, then all backwards stage by stage.

    With ``split``, the backward of each micro-batch whose number is one less than a multiple of it
    is an I and a W.
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


class Calibration:
    """Runs calibration steps of a pipeline, one at a time, and sums them up.

    Parameters
    ----------
    pipeline
        Whose stages and devices are measured.
    inputs, targets
        A batch as for ``pipeline.step``.
    graphs
        Those that the costs are for; the pipeline's own where None.
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
            if batch is None:  # as `Pipeline.step` takes it: here each process needs its shapes
                raise ArgumentError(
                    f"{name} must be a tensor of samples or a tuple of them, got None"
                )
        self.pipeline = pipeline
        graphs = _checked_graphs(graphs) or [graph]
        check_exchanges(graph, graphs)
        self.splits = any(bool((g.op == Op.W).any()) for g in graphs)
        self.keeps_versions = any(g.n_batches > 1 for g in graphs)
        n_microbatches, n_here = graph.n_microbatches + 1, len(pipeline.shares.local)
        *_, sizes = split_batches(inputs, targets, graph.n_microbatches, n_here)
        self.size = min(sizes)
        self.batch, self.one = (
            tuple(_repeated(x, n_here * n * self.size) for x in (inputs, targets))
            for n in (n_microbatches, 1)
        )
        self.loaded, self.isolated = (
            self._with_graph(self._schedule(n, 2), recompute="always") for n in (n_microbatches, 1)
        )
        self.n_buckets = n_buckets(graphs)
        self.bucketed = self.n_buckets and self._with_graph(
            self._schedule(1, 0), grad_sync="bucketed", n_buckets=self.n_buckets
        )
        self.steps: list[StepResult] = []
        self.alone: list[StepResult] = []
        self.filled: list[tuple[StepResult, StepResult]] = []  # of bucketed gradients; own, whole
        self.optimizer_bytes: tuple[float, ...] = ()

    def _run(self, pipeline: Pipeline, batch: tuple[Batch, ...]) -> StepResult:
        """Run a step, and return what was measured in all processes."""
        pipeline.align()
        return pipeline.gather(pipeline.step(*batch))

    def warm_up(self, n_steps: int) -> None:
        """Run steps that do not count."""
        with self.pipeline.preserved():
            for _ in range(n_steps):
                self.loaded.step(*self.batch)
                self.isolated.step(*self.one)
                if self.bucketed:
                    self.bucketed.step(*self.one)

    def step(self) -> None:
        """Run and keep one step under load, and one micro-batch alone."""
        with self.pipeline.preserved():
            self.steps.append(self._run(self.loaded, self.batch))
            self.alone.append(self._run(self.isolated, self.one))
            if self.bucketed:
                self.pipeline.align()
                own = self.bucketed.step(*self.one)
                self.filled.append((own, self.bucketed.gather(own)))
            # Now, since optimizers have no state before their first step.
            self.optimizer_bytes = _optimizer_bytes(self.pipeline)

    def _with_graph(
        self, schedule: Schedule, known: Pipeline | None = None, **options: Any
    ) -> Pipeline:
        """Return a pipeline that runs a schedule on all replicas, and knows what another does."""
        pipeline = self.pipeline
        graph = lowered_like(pipeline.graph, schedule, pipeline.shares, **options)
        return (known or pipeline).with_graph(graph)

    def _schedule(self, n_microbatches: int, split: int) -> Schedule:
        placement = base_placement(self.pipeline.graph)
        schedule = breadth_first(placement, n_microbatches, split if self.splits else 0)
        # A step after each micro-batch, then, as its time includes that of keeping the weights.
        many = self.keeps_versions and n_microbatches > 1
        return schedule.with_updates(n_microbatches, "stashed") if many else schedule

    @cached_property
    def held_bytes(self) -> list[int]:
        """Bytes of activations that each stage holds for one micro-batch."""
        schedule = breadth_first(base_placement(self.pipeline.graph), 1)
        # Not of `pipeline`, which may not have run yet: a first forward is given copies.
        once = self._with_graph(schedule, self.loaded)
        return once.held_bytes(*self.one)[: once.graph.n_stages]

    @cached_property
    def left_bytes(self) -> list[int]:
        """Bytes that each stage holds for one micro-batch between I and W; 0 without them."""
        if not self.splits:
            return [0] * self.pipeline.graph.n_stages
        once = self._with_graph(self._schedule(1, 1), self.loaded)
        return once.left_bytes(*self.one)[: once.graph.n_stages]

    def _buckets(self, costs: Costs) -> Buckets | None:
        if not self.filled:
            return None
        own, whole = zip(*self.filled, strict=True)
        seconds = costs.per_stage("reduce_grad", whole[0].timeline.graph.n_stages).tolist()
        return measured_buckets(self.pipeline, own, whole, seconds, costs.network, self.n_buckets)

    def result(self) -> Profile:
        """Return the costs that the steps so far show."""
        import pandas as pd

        graph = self.loaded.graph
        transfers = measure_transfers(self.pipeline, pairs_of(self.pipeline.graph))
        fitted = fits(transfers)
        rows: list[dict[str, Any]] = []
        values: dict[str, Any] = {}
        for (op, part), name in _MEASURED.items():
            if op in (Op.I, Op.W) and not self.splits:
                continue
            if op in (Op.DISPATCH, Op.REORDER) and not (graph.op == op).any():
                continue
            loaded, isolated = (
                np.array(
                    [np.nan_to_num(stage_seconds(run.timeline, op, part=part)) for run in runs]
                )
                for runs in (self.steps, self.alone)
            )
            values[name] = tuple(loaded.mean(axis=0).tolist())
            for stage in range(graph.n_stages):
                seconds, alone = values[name][stage], float(isolated[:, stage].mean())
                rows.append(
                    {
                        "op": op.name if part is None else f"{op}.{EXCHANGES[part]}",
                        "stage": stage,
                        "loaded": seconds,
                        "spread": float(loaded[:, stage].std() / seconds) if seconds else 0.0,
                        "isolated": alone or math.nan,
                        "slow_down": seconds / alone if alone else math.nan,
                    }
                )
        launch = self._launch()
        costs = Costs(
            **values,
            launch=launch,
            activation_bytes=tuple(map(float, self.held_bytes)),
            weight_grad_bytes=tuple(map(float, self.left_bytes)),
            network=network_of(transfers, fitted, (run.timeline for run in self.steps)),
            output_bytes=tuple(output_bytes(self.steps[-1].timeline).tolist()),
            **collective_seconds([run.timeline for run in self.steps]),
        )
        costs = replace(
            with_stage_bytes(costs, self.pipeline),
            optimizer_bytes=self.optimizer_bytes,
            buckets=self._buckets(costs),
        )
        table = pd.DataFrame(rows).set_index(["op", "stage"])
        _warn_of_poor_accuracy(table)
        processes = self.pipeline.processes
        n_hosts = int(graph.host.max()) + 1 if processes is None else processes.n_ranks
        share = host_share(self.steps, n_hosts)
        of_all = sum(run.host_seconds for run in self.steps) / len(self.steps) / len(graph)
        return Profile(
            costs,
            table,
            *with_fits(transfers, fitted),
            host_share=share,
            launch_share=share * launch / of_all if of_all else 0.0,
        )

    def _launch(self) -> float:
        """Return the host's seconds a task; see `pipeexec.profiling.host_times`."""
        if self.pipeline.cuda_graph:
            return 0.0
        if any(isinstance(device, CudaDevice) for device in self.pipeline.devices):
            return launch_seconds(self.steps, self.alone)
        return mean_launch(self.steps)


def with_stage_bytes(costs: Costs, pipeline: Pipeline) -> Costs:
    """Return costs with the bytes of a pipeline's parameters and optimizers, as they are now."""
    stages = pipeline.modules[: pipeline.graph.n_stages]
    parameters = [float(sum(p.nbytes for p in module.parameters())) for module in stages]
    return replace(
        costs,
        parameter_bytes=tuple(pipeline.total(parameters)),
        optimizer_bytes=_optimizer_bytes(pipeline),
    )


def _optimizer_bytes(pipeline: Pipeline) -> tuple[float, ...]:
    own = pipeline.optimizers[: pipeline.graph.n_stages]
    return tuple(pipeline.total([float(_state_bytes(o)) for o in own]))


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = () if optimizer is None else optimizer.state.values()
    tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors)


def measure(
    pipeline: Pipeline,
    inputs: Batch,
    targets: Any,
    *,
    n_steps: int = 7,
    warm_up: int = 2,
    graphs: Iterable[TaskGraph] | None = None,
) -> Profile:
    """Measure every cost of a pipeline's stages; see `profile` for the arguments.

    ``graphs`` are those that the costs are for: with a split backward, I and W are measured. The
    pipeline's own where None.

    Raises
    ------
    ArgumentError
        For arguments of another type, and batches that ``pipeline.step`` does not take.
    """
    check_type("pipeline", pipeline, Pipeline)
    n_steps, warm_up = check_count("n_steps", n_steps), check_count("warm_up", warm_up, 0)
    with guard_processes(pipeline.processes):
        check_results([pipeline.graph], n_steps=n_steps)
    calibration = Calibration(pipeline, inputs, targets, graphs)
    calibration.warm_up(warm_up)
    for _ in range(n_steps):
        calibration.step()
    return calibration.result()


def _checked_graphs(graphs: object) -> list[TaskGraph]:
    """Return graphs as a list, which is empty for None."""
    given = () if graphs is None else check_list("graphs", graphs, "such as [pipeline.graph]")
    return [check_type("graphs: each", graph, TaskGraph) for graph in given]


def _repeated(batch: Batch, n_samples: int) -> Batch:
    """Return the first ``n_samples`` samples, beginning again where there are too few."""
    if isinstance(batch, tuple):
        return tuple(x[torch.arange(n_samples) % len(x)] for x in batch)
    return batch[torch.arange(n_samples) % len(batch)]


def _warn_of_poor_accuracy(table: pd.DataFrame) -> None:
    tasks = table[(table["loaded"] > 0) & (table.index.get_level_values("op") != "STEP")]
    for name, row in tasks[tasks["loaded"] < SHORTEST].nsmallest(1, "loaded").iterrows():
        warnings.warn(
            f"{_label(name)} takes {row['loaded'] * 1e3:.3f} ms: below {SHORTEST * 1e3:g} ms a "
            "task the prediction will be poor (hand-over and interpreter take as long); use "
            "larger micro-batches or stages",
            AccuracyWarning,
            stacklevel=4,
        )
    for name, row in tasks[tasks["spread"] > UNSTEADY].nlargest(1, "spread").iterrows():
        warnings.warn(
            f"the mean of {_label(name)} moves by {row['spread']:.0%} from step to step: the "
            "machine is busy, and predictions are no better than that",
            AccuracyWarning,
            stacklevel=4,
        )


def _label(name: object) -> str:
    assert isinstance(name, tuple)
    return f"{name[0]} of stage {name[1]}"
