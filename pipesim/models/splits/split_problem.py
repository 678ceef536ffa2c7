"""The values of layers, and loads and memory of devices, from which splits are searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.device_split import Floats, Ints, SplitProblem
from pipesim.costs.expert_pricing import exchange_seconds
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.graph.graph import TaskGraph
from pipesim.ops import COMPUTE, Op
from pipesim.scheduling.placement import Placement
from pipesim.timeline.task_bytes import dropped_activations, weight_versions

#: Costs of stages with these many layers.
StageCosts = Callable[[Sequence[int]], Costs]

#: Fields of `Costs` with the seconds of operations that layers take.
_SECONDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_grad",
    Op.W: "weight_grad",
    Op.R: "recompute",
}


@dataclass(frozen=True)
class LayerModel:
    """A model to split: how many layers it has, and the costs of any split.

    Attributes
    ----------
    n_layers
        Number of layers.
    stage_costs
        Costs of stages with these many layers. The search takes sums over layers for those of a
        stage, which are estimates: a GPU waits for its host in some layers, but not in the sum.
    has_ends
        Whether the first and the last stage have modules beside layers, and so may have no layer.
    least_costs
        Costs of stages with at most the seconds of ``stage_costs``. Those of F, B, I, W and R are
        sums over layers. None if those of ``stage_costs`` are.
    """

    n_layers: int
    stage_costs: StageCosts
    has_ends: bool
    least_costs: StageCosts | None = None

    @property
    def finest_sizes(self) -> list[int]:
        """One layer a stage, with modules beside layers in stages of their own."""
        ends = [0] * self.has_ends
        return [*ends, *[1] * self.n_layers, *ends]

    def least(self, n_stages: int) -> NDArray[np.int64]:
        """Return the fewest layers of each stage."""
        least = np.ones(n_stages, dtype=np.int64)
        least[[0, -1]] -= self.has_ends and n_stages > 1
        return least


class _Work(NamedTuple):
    """Work of devices.

    Attributes
    ----------
    load
        Share of micro-batches of each stage; shape ``(n_devices, n_stages)``.
    ops
        Mean number of each operation, for one F.
    least_ops
        Least number of each operation on any device, for one F of a stage.
    """

    load: Floats
    ops: dict[Op, float]
    least_ops: dict[Op, float]


def split_problem(
    model: LayerModel, target: Placement | TaskGraph, limits: Floats | None = None
) -> SplitProblem:
    """Return the problem of splitting a model over the devices of a placement or of a graph.

    The seconds of a layer are those of its operations for one micro-batch. They are F and B in a
    placement, and the operations of a graph. ``limits`` are the most bytes of each device.
    """
    if isinstance(target, TaskGraph):
        work = _graph_work(target)
    else:
        ops = {Op.F: 1.0, Op.B: 1.0}
        work = _Work(_placement_load(target), ops, ops)
    finest, n_stages = model.stage_costs(model.finest_sizes), work.load.shape[1]
    n = len(model.finest_sizes)
    rows = _values(finest, n, work.ops, target, limits is not None)
    columns = slice(model.has_ends, model.has_ends + model.n_layers)
    ends = rows[:, [0, -1]] if model.has_ends else np.zeros((len(rows), 2))
    output = finest.per_stage("output_bytes", n)
    held, holder = np.zeros((0, 4 * n_stages)), np.zeros(0, dtype=np.int64)
    if limits is not None and isinstance(target, TaskGraph):
        held, holder = _held(target)
    return SplitProblem(
        sums=np.concatenate([np.zeros((len(rows), 1)), rows[:, columns].cumsum(axis=1)], axis=1),
        ends=ends,
        inputs=np.concatenate([[0.0], output[columns]]),
        least=model.least(n_stages),
        load=work.load,
        other_load=np.zeros(len(work.load)),
        held=held,
        holder=holder,
        limit=np.zeros(0) if limits is None else limits[holder],
        least_seconds=_least_seconds(model, work, target),
    )


def first_borders(problem: SplitProblem) -> Ints:
    """Return the borders of a split with balanced stages, to begin a search with."""
    seconds = np.diff(problem.sums[0])
    if not problem.least[0]:
        seconds = np.concatenate([problem.ends[0, :1], seconds, problem.ends[0, 1:]])
    sizes = np.array(balanced_split(seconds, problem.n_stages))
    sizes[[0, -1]] -= problem.least[0] == 0
    return np.concatenate([[0], sizes.cumsum()])


def _placement_load(placement: Placement) -> Floats:
    """Return the share of micro-batches of each stage that each device computes."""
    load = np.zeros((placement.n_devices, placement.n_stages))
    for path in placement.paths:
        load[path, np.arange(placement.n_stages)] += 1 / placement.n_paths
    return load


def _graph_work(graph: TaskGraph) -> _Work:
    """Return the work of the devices of a graph."""
    op, stage, device = graph.kinds.op[graph.kind], graph.stage, graph.device
    forwards = op == Op.F
    load = np.zeros((graph.n_devices, graph.n_stages))
    np.add.at(load, (device[forwards], stage[forwards]), 1 / graph.n_microbatches)
    place = device * graph.n_stages + stage
    counts = {x: np.bincount(place[op == x], minlength=load.size) for x in _SECONDS}
    has_forwards = counts[Op.F] > 0
    n_forwards = counts[Op.F][has_forwards]
    n_all = max(1, int(forwards.sum()))
    return _Work(
        load,
        {x: float(count.sum() / n_all) for x, count in counts.items()},
        {
            x: float((count[has_forwards] / n_forwards).min(initial=1.0))
            for x, count in counts.items()
        },
    )


def _least_seconds(model: LayerModel, work: _Work, target: Placement | TaskGraph) -> Floats:
    """Return `SplitProblem.least_seconds`, which are 0 if operations may overlap."""
    n = len(model.finest_sizes)
    seconds = np.zeros(n)
    if isinstance(target, TaskGraph) and not target.kinds.overlapped.any():
        costs = (model.least_costs or model.stage_costs)(model.finest_sizes)
        seconds = target.n_microbatches * _seconds(costs, n, work.least_ops)
    return seconds if model.has_ends else np.pad(seconds, 1)


def _seconds(costs: Costs, n: int, ops: dict[Op, float]) -> Floats:
    """Return the seconds of each of ``n`` stages for one micro-batch."""
    seconds = np.zeros(n)
    for op, times in ops.items():
        if times:
            seconds += times * costs.per_stage(_SECONDS[op], n)
            if costs.expert_layers and op != Op.W:
                seconds += times * exchange_seconds(costs, n)
    return seconds


def _values(
    costs: Costs, n: int, ops: dict[Op, float], target: Placement | TaskGraph, with_bytes: bool
) -> Floats:
    """Return seconds, and bytes if needed, of each of the ``n`` finest stages.

    Bytes are those of parameters, gradients and optimizer; of activations; and between I and W.
    """
    seconds = _seconds(costs, n, ops)
    if not with_bytes or not isinstance(target, TaskGraph):
        return seconds[None]
    optimizer = costs.per_stage("optimizer_bytes", n)
    experts = costs.per_stage("expert_optimizer_bytes", n)
    shares = int(target.optimizer_shares.max())
    of_experts = max(1, shares // costs.expert_replicas)
    optimizer = (optimizer - experts) / shares + experts / of_experts
    static = costs.per_stage("parameter_bytes", n) * weight_versions(target).max()
    static = static + costs.per_stage("gradient_bytes", n) + optimizer
    others = [costs.per_stage(name, n) for name in ("activation_bytes", "weight_grad_bytes")]
    return np.array([seconds, static, *others])


def _held(graph: TaskGraph) -> tuple[Floats, Ints]:
    """Return `SplitProblem.held` and `SplitProblem.holder`, for moments that may be the fullest.

    The four values of a stage are:

    - 1 if the device has the stage, else 0.
    - Micro-batches between F and B (or I).
    - Micro-batches between I and W.
    - Inputs of micro-batches whose activations R recomputes.

    Bytes depend on the order of a device alone (rule 10), not on times.
    """
    computes = graph.is_op(COMPUTE)
    rows = [_held_of_device(graph, np.flatnonzero(computes & (graph.device == device)), device)
            for device in range(graph.n_devices)]  # fmt: skip
    holder = np.repeat(np.arange(graph.n_devices), [len(table) for table in rows])
    return np.concatenate(rows), holder


def _held_of_device(graph: TaskGraph, tasks: NDArray[np.int64], device: int) -> Floats:
    """Return `SplitProblem.held` of one device, during each task and after each I."""
    n = graph.n_stages
    op, stage = graph.kinds.op[graph.kind[tasks]], graph.stage[tasks]
    dropped = dropped_activations(graph)
    keeps_input = np.zeros(len(tasks), dtype=bool)
    if len(dropped):
        where = (graph.replica[tasks], stage, np.maximum(graph.microbatch[tasks], 0))
        keeps_input = dropped[where] & (op == Op.F)
    at_start, at_end = (np.zeros((len(tasks), 4 * n)) for _ in range(2))
    row = np.arange(len(tasks))

    def change(table: Floats, marked: NDArray[np.bool_], value: int, step: int) -> None:
        """Add to one value of the stages of marked tasks."""
        table[row[marked], value * n + stage[marked]] += step

    change(at_start, (op == Op.F) & ~keeps_input, 1, 1)
    change(at_start, keeps_input, 3, 1)
    change(at_start, op == Op.R, 1, 1)
    change(at_start, op == Op.R, 3, -1)
    change(at_end, (op == Op.B) | (op == Op.I), 1, -1)
    change(at_end, op == Op.I, 2, 1)
    change(at_end, op == Op.W, 2, -1)
    ended = at_end.cumsum(axis=0)
    during = at_start.cumsum(axis=0) + ended - at_end
    # During I the activations are held, or what W needs if that is more.
    held = np.concatenate([during, during[op == Op.I] + at_end[op == Op.I]])
    held[:, :n] = (graph.homes == device).any(axis=0)
    return _largest(np.unique(held, axis=0))


def _largest(rows: Floats) -> Floats:
    """Return the rows that no other row exceeds in all columns; rows must differ."""
    used = rows[:, rows.any(axis=0)]
    kept: list[int] = []
    for index in np.argsort(-used.sum(axis=1), kind="stable"):
        if not any((used[other] >= used[index]).all() for other in kept):
            kept.append(int(index))
    return rows[kept]
