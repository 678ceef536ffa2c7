"""Measured seconds of tasks, by operation and stage, and of the host that issues them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeexec.distributed.processes import guard_processes
from pipeexec.executor.pipeline import Pipeline
from pipeexec.executor.sharding import Sharding
from pipeexec.stages.batches import Batch
from pipeexec.stages.microbatches import Microbatches, shapes_as_text
from pipesim.analysis.measured_costs import microbatch_values, output_bytes, stage_seconds
from pipesim.costs.costs import Costs
from pipesim.costs.rows import COMPUTED, ROWS
from pipesim.graph.copies import copy_of_replicas
from pipesim.graph.graph import TaskGraph
from pipesim.ops import EXCHANGES, PART_NAMES, Op, is_expert_exchange
from pipesim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Field of `Costs` for each operation, and for its part if it has several.
_FIELDS: dict[tuple[Op, int | None], str] = {
    (op, PART_NAMES[op].index(part) if part else None): name
    for (op, part), name in COMPUTED.items()
}


def mean_task_seconds(
    loaded: Sequence[Timeline], isolated: Sequence[Timeline], *, with_split: bool
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the fields of `Costs`, with a value per stage, and `Profile.table`.

    All stages run at the same time in ``loaded`` steps; ``isolated`` ones have one micro-batch.
    ``with_split``: whether I and W were measured.
    """
    from pipesim.utils.packages import pandas as pd

    fields: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for op, part, name in measured_fields(loaded[0].graph, with_split):
        steps = _seconds_by_step(loaded, op, part)
        seconds_of_shares = steps.mean(axis=0)
        # A STEP of a share lasts that part of the seconds of all parameters.
        shares = loaded[0].graph.optimizer_shares if op == Op.STEP else 1
        fields[name] = tuple((shares * seconds_of_shares).tolist())
        alone = _seconds_by_step(isolated, op, part).mean(axis=0).tolist()
        spread = steps.std(axis=0).tolist()
        label = op.name if part is None else f"{op}.{EXCHANGES[part]}"
        for stage, seconds in enumerate(seconds_of_shares.tolist()):
            rows.append(
                {
                    "op": label,
                    "stage": stage,
                    "loaded": seconds,
                    "spread": spread[stage] / seconds if seconds else 0.0,
                    "isolated": alone[stage] or math.nan,
                    "slow_down": seconds / alone[stage] if alone[stage] else math.nan,
                }
            )
    return fields, pd.DataFrame(rows).set_index(["op", "stage"])


def measured_fields(graph: TaskGraph, with_split: bool) -> Iterator[tuple[Op, int | None, str]]:
    """Yield the operations that a calibration runs, with their part and field of `Costs`."""
    for (op, part), name in _FIELDS.items():
        if op in (Op.I, Op.W) and not with_split:
            continue
        if op in (Op.R, Op.DISPATCH, Op.REORDER) and not (graph.op == op).any():
            continue
        yield op, part, name


def _seconds_by_step(timelines: Sequence[Timeline], op: Op, part: int | None) -> Floats:
    """Return mean seconds of an operation, shape ``(steps, stages)``; 0 without such a task."""
    return np.array(
        [np.nan_to_num(stage_seconds(timeline, op, part=part)) for timeline in timelines]
    )


# Micro-batches of equal shapes, which a calibration measures once for all of them.
#
# Replicas may have micro-batches of other shapes. Each takes turns with its own ones, and all run
# as many in a calibration step.


class ShapeClasses(NamedTuple):
    """Classes of the micro-batches of a step, and those that a calibration runs.

    Attributes
    ----------
    number
        Class of each micro-batch; shape ``(n_shares, n_microbatches)``.
    order
        Micro-batches that each replica runs one after the other in a calibration; shape
        ``(n_shares, n)``. Each class of the replica is among them.
    """

    number: Ints
    order: Ints

    @property
    def measured(self) -> Ints:
        """Class of each micro-batch in ``order``."""
        return np.take_along_axis(self.number, self.order, axis=1)

    def batches(self, batch: Batch, local: Sequence[int], columns: Sequence[int]) -> Batch:
        """Return the `Microbatches` of some columns of ``order``, for the replicas ``local``."""
        m = self.number.shape[1]
        rows = enumerate(self.order[list(local)][:, list(columns)].tolist())
        return batch.take([position * m + k for position, row in rows for k in row])

    def fields(self, timelines: Sequence[Timeline], *, with_split: bool) -> dict[str, Floats]:
        """Return the fields of `Costs` that differ between micro-batches.

        The timelines are those of calibration steps. Shape of each: ``(n_stages, n_shares *
        n_microbatches)``; 0 for stages without the operation.
        """
        return {
            **{
                name: self._seconds(timelines, op, part)
                for op, part, name in measured_fields(timelines[0].graph, with_split)
                if ROWS[name].varies
            },
            "output_bytes": self._output_bytes(timelines[-1]),
        }

    def _seconds(self, timelines: Sequence[Timeline], op: Op, part: int | None) -> Floats:
        """Return the mean seconds of an operation on each micro-batch."""
        graph = timelines[0].graph
        is_task = (graph.op == op) & (graph.microbatch >= 0)
        tasks = np.flatnonzero(is_task if part is None else is_task & (graph.part == part))
        copy = copy_of_replicas(graph.homes)[graph.replica[tasks]]
        # Calibration steps may begin with the order again, to split the other backwards.
        column = graph.microbatch[tasks] % self.order.shape[1]
        place = graph.stage[tasks], self.measured[copy, column]
        sums, counts = np.zeros((2, graph.n_stages, int(self.number.max()) + 1))
        np.add.at(sums, place, np.mean([timeline.duration[tasks] for timeline in timelines], 0))
        np.add.at(counts, place, 1)
        means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        return self._spread(means)

    def _output_bytes(self, timeline: Timeline) -> Floats:
        """Return the bytes of the messages of each micro-batch."""
        largest = output_bytes(timeline)
        values = microbatch_values(timeline, {"output_bytes": largest})["output_bytes"]
        n_shares, n = self.order.shape
        rows = values.reshape(len(values), n_shares, -1)[:, :, :n].reshape(len(values), -1)
        return self.of_measured(rows)

    def of_measured(self, values: Floats) -> Floats:
        """Return values of all micro-batches from those of ``order``, a column each."""
        means = np.zeros((len(values), int(self.number.max()) + 1))
        means[:, self.measured.ravel()] = values
        return self._spread(means)

    def most(self, values: Floats) -> Floats:
        """Return the largest value of each class, in place of those of its micro-batches."""
        largest = np.zeros((len(values), int(self.number.max()) + 1))
        np.maximum.at(largest.T, self.number.ravel(), values.T)
        return self._spread(largest)

    def _spread(self, of_class: Floats) -> Floats:
        """Return the values of all micro-batches from those of each class, a column each."""
        return of_class[:, self.number.ravel()]


def shape_classes(pipeline: Pipeline, inputs: Batch, targets: Any) -> ShapeClasses | None:
    """Return the classes of the `Microbatches` of all processes; None for another batch.

    All processes must call this.
    """
    if not isinstance(inputs, Microbatches):
        return None
    shares, m = pipeline.shares, pipeline.graph.n_microbatches
    texts = [f"{x} {y}" for x, y in zip(shapes_as_text(inputs), shapes_as_text(targets),
                                        strict=True)]  # fmt: skip
    own = {share: texts[k * m : (k + 1) * m] for k, share in enumerate(shares.local)}
    rows = [own[share] for share in sorted(own)]
    if pipeline.processes is not None:
        with guard_processes(pipeline.processes):
            by_rank = pipeline.processes.share(list(own.items()))
        texts_of = {share: texts for row in by_rank for share, texts in row}
        rows = [texts_of[share] for share in sorted(texts_of)]
    names = dict.fromkeys(text for row in rows for text in row)
    classes = {text: k for k, text in enumerate(names)}
    number = np.array([[classes[text] for text in row] for row in rows], dtype=np.int64)
    return ShapeClasses(number, _order(number, pipeline.graph.n_devices))


def _order(number: Ints, n_devices: int) -> Ints:
    """Return the first micro-batch of each class in turns, so many that all devices are busy.

    They are an odd number: of twice as many, every second one is each of them once.
    """
    firsts = [np.unique(row, return_index=True)[1] for row in number]
    most = max(map(len, firsts))
    least = min(number.shape[1], n_devices)
    n = max(most, least) + 1
    n += 1 - n % 2
    return np.array([np.resize(np.sort(row), n) for row in firsts], dtype=np.int64)


# Seconds that a host takes to issue a task: ``Costs.launch``.
#
# CPU workers: the queue of a worker takes any number of tasks. Launch is the host's time of a step
# over the number of tasks.
#
# CUDA: the queue of a stream takes about a thousand kernels. The launch of the next kernel blocks
# the host until a kernel ends, so that a step of many kernels is as long for the host as for the
# GPU. This blocked time is not launch time. Each operation of each stage therefore counts with its
# median. Its median in steps of a single micro-batch, which fill no queue, is an upper limit. Such
# steps have no I and no W: the B bounds both, as it contains them. Tasks in which the host waits
# for values of the GPU do not count: GRAD_NORM, which looks whether the norm is finite, and
# exchanges of experts, whose sizes depend on the values.

#: Operation that contains each half of a split backward.
_FULL_BACKWARD = {Op.I: Op.B, Op.W: Op.B}


class HostTimed(Protocol):
    """Host times of a step; `pipeexec.executor.StepResult` has them."""

    @property
    def timeline(self) -> Timeline:
        """Start and end of each task."""
        ...

    @property
    def host_seconds(self) -> float:
        """Seconds to issue all tasks, the sum over processes."""
        ...

    @property
    def host_times(self) -> Floats | None:
        """Seconds to issue each task; None if unknown."""
        ...


def mean_launch(steps: Sequence[HostTimed]) -> float:
    """Return the host's mean seconds per task, blocked or not."""
    return float(np.mean([step.host_seconds / len(step.timeline) for step in steps]))


def launch_seconds(steps: Sequence[HostTimed], isolated: Sequence[HostTimed] = ()) -> float:
    """Return the host's seconds per task, without those in which full queues blocked it.

    The ``isolated`` steps are those of a graph of the same stages with a single micro-batch.
    """
    mean = mean_launch(steps)
    medians, limits = _medians(steps), _medians(isolated)
    if not medians:
        return mean
    seconds = []
    for (op, stage), (median, n_tasks) in medians.items():
        limit = limits.get((op, stage)) or limits.get((_FULL_BACKWARD.get(Op(op), op), stage))
        seconds.append(n_tasks * (median if limit is None else min(median, limit[0])))
    return min(mean, sum(seconds) / sum(n_tasks for _, n_tasks in medians.values()))


def host_share(steps: Sequence[HostTimed], n_hosts: int = 1) -> float:
    """Return the share of the makespan in which a host issues tasks; mean over steps and hosts."""
    shares = [step.host_seconds / step.timeline.makespan for step in steps]
    return float(np.mean(shares)) / n_hosts


def _medians(steps: Sequence[HostTimed]) -> dict[tuple[int, int], tuple[float, int]]:
    """Return median seconds, and tasks per step, for each operation of each stage."""
    rows = [step.host_times for step in steps]
    if not rows or any(row is None for row in rows):
        return {}
    times, graph = np.array(rows, dtype=np.float64), steps[0].timeline.graph
    waits = (graph.op == Op.GRAD_NORM) | is_expert_exchange(graph.op, graph.part)
    times[:, waits] = np.nan  # the host waits until a GPU has computed a value
    medians = {}
    for op, stage in sorted(set(zip(graph.op.tolist(), graph.stage.tolist(), strict=True))):
        is_task = (graph.op == op) & (graph.stage == stage)
        seconds = times[:, is_task][~np.isnan(times[:, is_task])]
        if seconds.size:
            medians[op, stage] = float(np.median(seconds)), int(is_task.sum())
    return medians


def with_stage_bytes(costs: Costs, pipeline: Pipeline) -> Costs:
    """Return costs with the current bytes of a pipeline's parameters and optimizers."""
    stages = pipeline.modules[: pipeline.graph.n_stages]
    parameters = [float(sum(p.nbytes for p in module.parameters())) for module in stages]
    return replace(
        costs,
        parameter_bytes=tuple(pipeline.total(parameters)),
        optimizer_bytes=optimizer_bytes(pipeline),
    )


def optimizer_bytes(pipeline: Pipeline) -> tuple[float, ...]:
    """Return the bytes of the optimizer state of each stage; shares of replicas are added up."""
    n = pipeline.graph.n_stages
    own = [float(_state_bytes(o)) for o in pipeline.optimizers]
    sharding = pipeline._model.part(Sharding).kinds
    sums = [sum(own[s::n]) if sharding[s] != "none" else own[s] for s in range(n)]
    return tuple(pipeline.total(sums))


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    states = () if optimizer is None else optimizer.state.values()
    tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors)
