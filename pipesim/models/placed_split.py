"""Layers of each stage of a model: even, balanced by stage or by device, or by simulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    balanced_split,
    check_partition,
    checked_split,
)
from pipesim.costs.pricing import exchange_seconds
from pipesim.costs.rows import LAYER_SECONDS
from pipesim.errors import ArgumentError, ArgumentTypeError, CostsError, CostsWarning, check_count
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower
from pipesim.models.device_split import (
    Floats,
    Ints,
    SplitProblem,
    balanced_borders,
    fastest_borders,
    layer_counts,
)
from pipesim.ops import COMPUTE, Op
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import reserved_memory
from pipesim.timeline.memory_limit import checked_memory_limit
from pipesim.timeline.task_bytes import dropped_activations, weight_versions
from pipesim.timeline.timeline import Timeline
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.texts import Bytes, format_bytes

#: Seconds of each layer, of the embedding and of the LM head.
_Seconds = tuple[Sequence[float], float, float]


def stage_sizes(
    layers_per_stage: Split,
    partition: LayerPartition | None,
    n_layers: int,
    layers: Sequence[float],
    embedding: float,
    head: float,
) -> tuple[int, ...]:
    """Return the layers of each stage; see `Transformer.costs` for arguments, errors and warnings.

    ``layers``, ``embedding`` and ``head`` are the seconds of each layer, of the embedding and of
    the LM head, forward and backward.
    """
    seconds = (layers, embedding, head)
    is_number = check_partition(partition, layers_per_stage, "layers_per_stage")
    if is_number and partition == "balanced":
        return _balanced_sizes(layers_per_stage, n_layers, seconds)
    sizes = checked_split(layers_per_stage, n_layers, "layers_per_stage", ends_may_be_empty=True)
    if is_number and partition is None:
        balanced = _balanced_sizes(layers_per_stage, n_layers, seconds)
        slowest, least = _slowest(sizes, seconds), _slowest(balanced, seconds)
        if slowest > 1.05 * least:
            warn_caller(
                f"layers_per_stage={layers_per_stage} has as many layers on each stage; with "
                f"the LM head, the last takes {slowest / least:.2f} times as long as the slowest "
                'of a balanced split would; give partition="balanced", or "even" if that is meant',
                CostsWarning,
            )
    return sizes


def _balanced_sizes(n_stages: object, n_layers: int, seconds: _Seconds) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest; the last stage may have the head alone."""
    count = check_count("layers_per_stage", n_stages)
    if count > n_layers + 1:
        raise ArgumentError(
            f"layers_per_stage={count}: {n_layers} layers and the LM head cannot "
            f"be split into {count} stages; give at most {n_layers + 1}"
        )
    layers, embedding, head = seconds
    first = [embedding + layers[0], *layers[1:]]
    *sizes, last = balanced_split([*first, head], count)
    return (*sizes, last - 1)


def _slowest(sizes: tuple[int, ...], seconds: _Seconds) -> float:
    layers, embedding, head = seconds
    borders = [0, *itertools.accumulate(sizes)]
    stages = [_sum(layers[a:b]) for a, b in itertools.pairwise(borders)]
    stages[0] += embedding
    stages[-1] += head
    return max(stages)


def _sum(seconds: Sequence[float]) -> float:
    """Return a sum; of equal values their product with their number."""
    if not seconds:
        return 0.0
    is_equal = seconds[0] == seconds[-1]
    return seconds[0] * len(seconds) if is_equal else sum(seconds)


# The values of layers, and loads and memory of devices, from which splits are searched

#: Costs of stages with these many layers.
StageCosts = Callable[[Sequence[int]], Costs]


@dataclass(frozen=True)
class LayerModel:
    """A model to split: how many layers it has, and the costs of any split.

    Attributes
    ----------
    stage_costs
        Costs of stages with these many layers. The search takes sums over layers for those of a
        stage, which are estimates: a GPU waits for its host in some layers, but not in the sum.
    has_ends
        Whether the first and the last stage have modules beside layers, and so may have no layer.
    least_costs
        Costs of stages with at most the seconds of ``stage_costs``. Those of F, B, I, W and R are
        sums over layers. None if those of ``stage_costs`` are.
    trains
        Whether costs are of a training step: else the splits for a placement, or a schedule, are
        those of forwards alone.
    """

    n_layers: int
    stage_costs: StageCosts
    has_ends: bool
    least_costs: StageCosts | None = None
    trains: bool = True

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
    """Work of devices."""

    load: Floats  # share of micro-batches of each stage; shape (n_devices, n_stages)
    ops: dict[Op, float]  # mean number of each operation, for one F
    least_ops: dict[Op, float]  # least number on any device, for one F of a stage


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
        load = np.zeros((target.n_devices, target.n_stages))
        ops = {Op.F: 1.0, Op.B: 1.0} if model.trains else {Op.F: 1.0}
        for path in target.paths:
            load[path, np.arange(target.n_stages)] += 1 / target.n_paths
        work = _Work(load, ops, ops)
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


def _graph_work(graph: TaskGraph) -> _Work:
    op, stage, device = graph.kinds.op[graph.kind], graph.stage, graph.device
    forwards = op == Op.F
    load = np.zeros((graph.n_devices, graph.n_stages))
    np.add.at(load, (device[forwards], stage[forwards]), 1 / graph.n_microbatches)
    place = device * graph.n_stages + stage
    counts = {x: np.bincount(place[op == x], minlength=load.size) for x in LAYER_SECONDS}
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
            seconds += times * costs.per_stage(LAYER_SECONDS[op], n)
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


# Splits with which a graph takes the least time and fits in memory, by simulation

#: Most simulations of a search, and most tasks in all of them.
_SIMULATIONS, _TASKS = 1000, 600_000


def fastest_split(model: LayerModel, graph: TaskGraph, limits: Floats | None) -> tuple[int, ...]:
    """Return the layers of each stage with which a graph takes the least time.

    ``limits`` are the most bytes of each device; an error says that no split was found that fits.
    Without them the memory of the GPU counts, if the costs know it: then that is a warning.
    """
    simulations = _Simulations(model, graph, limits)
    first = first_borders(split_problem(model, graph))
    timeline = simulations.timeline(first)
    problem = _problem(simulations, first, timeline.memory.limit)
    best = _search(simulations, problem, first)
    if simulations.makespan(best) < np.inf:
        return layer_counts(best)
    if limits is not None:
        nearest = min([best, first], key=lambda x: _excess(simulations.timeline(x)).max())
        text = _excess_text(simulations.timeline(nearest), layer_counts(nearest), "memory_limit=")
        raise CostsError(text)
    problem = _problem(simulations, first, None)
    best = _search(replace(simulations, is_limited=False), problem, first)
    text = _excess_text(simulations.timeline(best), layer_counts(best), "the GPU has ")
    warn_caller(f"{text}. The split is the fastest without a limit", CostsWarning)
    return layer_counts(best)


def _excess(timeline: Timeline) -> Floats:
    needed, limits = reserved_memory(timeline), timeline.memory.limit
    return needed if limits is None else needed - limits


def _excess_text(timeline: Timeline, sizes: tuple[int, ...], limit: str) -> str:
    """Return by how much a split does not fit, and what to change; ``limit`` names the limit."""
    excess = _excess(timeline)
    device = int(excess.argmax())
    needed = reserved_memory(timeline)[device]
    text = (
        f"{limit}{format_bytes(needed - excess[device])}: no split of {sum(sizes)} layers "
        f"was found that fits; {list(sizes)} needs {format_bytes(needed)} on device {device}, "
        f"{format_bytes(excess[device])} too much. Give smaller micro-batches, recompute, more "
        "devices, or another schedule"
    )
    if timeline.graph.n_replicas > 1:
        return text
    return (
        f"{text}; this is a step of one replica: if several share the optimizer's state, give "
        "placement=pipesim.lower(schedule, n_replicas=..., shard_optimizer=True)"
    )


@dataclass(frozen=True)
class _Simulations:
    """Simulations of the splits of a model, within the ``limits`` of `fastest_split`."""

    model: LayerModel
    graph: TaskGraph
    limits: Floats | None
    is_limited: bool = True

    def timeline(self, borders: Ints) -> Timeline:
        costs = self.model.stage_costs(layer_counts(borders))
        limits = None if self.limits is None else self.limits.tolist()
        return predict_timeline(self.graph, costs, memory_limit=limits)

    def makespan(self, borders: Ints) -> float:
        timeline = self.timeline(borders)
        if self.is_limited and timeline.memory.fits is False:
            return np.inf
        return float(timeline.makespan)


def _search(simulations: _Simulations, problem: SplitProblem, first: Ints) -> Ints:
    starts = [balanced_borders(problem, [first]), first]
    most = min(_SIMULATIONS, _TASKS // max(1, len(simulations.graph)))
    return fastest_borders(problem, starts, simulations.makespan, most)


def _problem(simulations: _Simulations, first: Ints, limits: Floats | None) -> SplitProblem:
    """Return the problem of a graph, with seconds and bytes that are no sums over layers.

    Examples are messages that block, launches and workspaces. They are those of one split.
    """
    model, graph = simulations.model, simulations.graph
    costs = model.stage_costs(layer_counts(first))
    if limits is not None:
        limits = limits / (1 + costs.memory_reserve)
    problem = split_problem(model, graph, limits)
    on_compute, seconds = graph.on_compute, costs.of(graph).duration
    busy = np.bincount(graph.device[on_compute], seconds[on_compute], graph.n_devices)
    other_load = busy / graph.n_microbatches - problem.loads(first[None])[0]
    problem = replace(problem, other_load=other_load)
    if limits is None:
        return problem
    near = balanced_borders(problem, [first])
    others = simulations.timeline(near).memory.peak - problem.peak_bytes(near)
    return replace(problem, limit=problem.limit - others[problem.holder])


# Splits for a placement, a schedule or a graph

#: Argument ``placement``: devices of stages, without or with the order of tasks.
Placed = Placement | Schedule | TaskGraph
#: Most layers of a model whose split is searched.
_MOST_LAYERS = 4096
_NO_ORDER = (
    "memory_limit needs to know how many micro-batches a device holds; give the schedule as "
    "placement=, or its graph"
)


def is_word(split: object) -> bool:
    """Return whether a split is ``"even"`` or ``"balanced"``."""
    return isinstance(split, str) and split in get_args(LayerPartition)


def placed_sizes(
    model: LayerModel,
    split: Split,
    name: str,
    *,
    partition: LayerPartition | None,
    placement: Placed | None,
    memory_limit: Bytes | Sequence[Bytes] | None,
) -> tuple[int, ...] | None:
    """Return the layers of each stage, or None for a split without placement.

    ``name`` is the name of the argument ``split``. `Layers.costs` has the arguments and errors.
    """
    if placement is None:
        if is_word(split):
            raise ArgumentError(
                f"{name}={split!r} needs the number of stages: give placement=, such as "
                f"schedule.placement, or {name}=4 with partition={split!r}"
            )
        if memory_limit is not None:
            raise ArgumentError(_NO_ORDER)
        return None
    if not isinstance(placement, Placed):
        raise ArgumentTypeError(
            "placement must be a pipesim.Placement, a Schedule or a TaskGraph, got "
            f"{placement!r:.60} ({type(placement).__name__})"
        )
    target = placement.placement if isinstance(placement, Schedule) else placement
    word = _word(split, name, partition, target.n_stages)
    limits = None
    if memory_limit is not None:
        limits = checked_memory_limit(memory_limit, target.n_devices)
    if word == "balanced":
        _check_stages(model, target.n_stages, name)
        return _balanced(model, placement, limits)
    if limits is not None:
        raise ArgumentError(
            f'memory_limit chooses among the splits of "balanced"; it has no effect on {name}='
            f"{split!r:.60}"
        )
    if word == "even":
        split = target.n_stages
    sizes = checked_split(split, model.n_layers, name, ends_may_be_empty=model.has_ends)
    if len(sizes) != target.n_stages:
        raise ArgumentError(
            f"{name} has {len(sizes)} stages, but the placement has {target.n_stages}"
        )
    return sizes


def _word(split: object, name: str, partition: str | None, n_stages: int) -> str | None:
    if is_word(split):
        if partition not in (None, split):
            raise ArgumentError(f"{name}={split!r}, but partition={partition!r}; give one of them")
        return str(split)
    if not check_partition(partition, split, name):
        return None
    if isinstance(split, Integral) and check_count(name, split) != n_stages:
        raise ArgumentError(
            f'{name}={split}, but the placement has {n_stages} stages; give "balanced" or "even"'
        )
    return partition or "balanced"


def _balanced(model: LayerModel, placement: Placed, limits: Floats | None) -> tuple[int, ...]:
    if not isinstance(placement, Placement):
        if isinstance(placement, Schedule):
            placement = lower(placement, forward_only=not model.trains)
        return fastest_split(model, placement, limits)
    if limits is not None:
        raise ArgumentError(_NO_ORDER)
    problem = split_problem(model, placement)
    first = first_borders(problem)
    if placement.n_paths == 1 and placement.n_stages == placement.n_devices:
        return layer_counts(first)  # devices are stages, and this split is exact
    return layer_counts(balanced_borders(problem, [first]))


def _check_stages(model: LayerModel, n_stages: int, name: str) -> None:
    needed = int(model.least(n_stages).sum())
    if needed > model.n_layers:
        raise ArgumentError(
            f"{name}: {model.n_layers} layers cannot be split into the placement's {n_stages} "
            f"stages, which need at least {needed}"
        )
    if model.n_layers > _MOST_LAYERS:
        raise ArgumentError(
            f"{name}: a balanced split of {model.n_layers} layers would take too long to find; "
            f"give the layers of each stage, or at most {_MOST_LAYERS} layers"
        )
