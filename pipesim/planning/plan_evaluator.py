"""`Evaluator`: bounds, memory and exact step of configurations, with what they share in caches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import balanced_split
from pipesim.costs.microbatch_costs import averaged
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower_replica
from pipesim.models.device_split import SplitProblem
from pipesim.models.encoders import ChainCosts
from pipesim.models.layers import Layers
from pipesim.models.parallel import SEARCHED
from pipesim.models.placed_split import LayerModel, split_problem
from pipesim.ops import Op
from pipesim.planning.choice import (
    ENCODER_SCHEDULES,
    Evaluation,
    Floats,
    PlanChoice,
    choice_facts,
    hides_exchanges,
    placement_of,
    with_settings,
)
from pipesim.planning.plan_bounds import (
    Bounds,
    DeviceWork,
    Reductions,
    Sharing,
    device_work,
    least_end,
    least_memory,
    reductions,
)
from pipesim.planning.problem import PlanProblem, kept
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.equal_replicas import OneOfReplicas, SharedRoutes, replica_memory_graph
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import OrderBytes, order_bytes, reserved_memory
from pipesim.timeline.timeline import Timeline
from pipesim.utils.csr import Ints
from pipesim.utils.texts import format_bytes

#: Schedules, orders, graphs and replicas that an evaluator keeps at most.
_MOST_GRAPHS = 256
#: Fields of a choice on which its placement, its order for equal costs, and the costs of its layers
#: depend.
_PLACE = ("schedule", "pipeline_parallel", "n_chunks", "n_slices", "merged")
_ORDER = (*_PLACE, "n_microbatches", "group_size")
_LAYERS = (*SEARCHED, "n_slices", "encoder_tensor_parallel")


@dataclass(eq=False)
class Evaluator:
    """Evaluate configurations of one problem.

    Configurations share graphs (by schedule and counts), links and engine columns (by sizes of
    parallelism), and costs (by micro-batch, recompute and split).
    """

    problem: PlanProblem

    def with_split(self, choice: PlanChoice) -> PlanChoice | None:
        """Return a configuration with its balanced split; None if there are too few layers."""
        sizes = self._split(choice, self.problem.gpus_of_devices(choice))
        return None if sizes is None else with_settings(choice, layers_per_stage=sizes)

    def split_problem(self, choice: PlanChoice) -> SplitProblem:
        """Return the problem of splitting the layers of a configuration."""
        problem, model = self.problem, self.problem.model
        stage_costs = model.costs if isinstance(model, Layers) else self._shard_costs(choice, 0)
        if problem.lengths is not None:
            varying = stage_costs

            def mean_costs(sizes: Sequence[int]) -> Costs:
                return averaged(varying(sizes))

            stage_costs = mean_costs
        layers = LayerModel(problem.n_layers, stage_costs, has_ends=not isinstance(model, Layers))
        splits = split_problem(layers, placement_of(choice))
        if not problem.cluster.is_mixed:
            return splits
        gpus = 0, *problem.gpus_of_devices(choice)
        first, *seconds = (self._parts(choice, gpu).layer for gpu in gpus)
        return replace(splits, load=splits.load * np.array(seconds)[:, None] / first)

    def costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of a configuration, which `Costs.rebuilt` cannot build again."""
        return self._priced(choice).costs

    def bounds(self, choice: PlanChoice) -> Bounds:
        """Return lower bounds on step and memory; see `pipesim.planning.plan_bounds`."""
        priced, first = self._priced(choice), int(choice_facts(choice).devices.device[0])
        end = priced.least_end(choice)
        step = priced.work(choice).least_step(choice.n_microbatches, end, first)
        return Bounds(step, priced.least_memory(choice, choice.offload != "none"))

    def memory(self, choice: PlanChoice) -> Floats | None:
        """Return the bytes of each device, the allocator's reserve included.

        They follow from the order of the schedule alone, without a simulation. None if they do not:
        if the order of few micro-batches lacks an operation of that of all, and for activations or
        parameters that are not always on their device.
        """
        if choice.ordered_for_costs or choice.shards_parameters or self._needs_all(choice):
            return None
        order = self._order(choice)
        if order is None:
            return None
        peak = self._priced(choice).order_bytes(choice).peak(order)
        return peak + self.problem.memory_reserve * peak

    def evaluate(self, choice: PlanChoice, bounds: Bounds, memory: Floats | None) -> Evaluation:
        """Return the exact step of a configuration.

        ``memory`` is the result of `memory`, and fits. If it is None, the result may be by how much
        the configuration does not fit.
        """
        costs, times = self.costs(choice), None
        replica = None if choice.ordered_for_costs else self.replica(choice)
        if replica is not None and (memory is not None or choice.shards_parameters):
            times = replica.run(costs)
        if replica is None or times is None:
            return self._whole(choice, costs, bounds)
        if memory is None:
            timeline = Timeline(replica.graph, times.start, times.end, None, costs)
            memory = reserved_memory(timeline)
            if (unfit := self.unfit(choice, bounds, memory)) is not None:
                return unfit
        step = float(times.end.max())
        idle = 1 - times.busy / (choice.pipeline_parallel * step) if step else 1.0
        return Evaluation(
            choice, step, bounds.step, float(memory.max()), max(0.0, idle), "simulated"
        )

    def unfit(
        self, choice: PlanChoice, bounds: Bounds, memory: Floats | None = None
    ) -> Evaluation | None:
        """Return why a configuration does not fit; None if it fits.

        ``memory`` is the result of `memory`; by default the bound, which holds in any order.
        """
        limits = self._limits(choice)
        needed = bounds.memory if memory is None else memory
        if (needed <= limits).all():
            return None
        return _too_full(choice, bounds, needed, limits, " in any order" * (memory is None))

    def replica(self, choice: PlanChoice) -> OneOfReplicas | None:
        """Return a replica, ordered for equal costs, that stands for all; None if they differ."""
        return None if self._needs_all(choice) else self._replica(choice)

    def _needs_all(self, choice: PlanChoice) -> bool:
        """Return whether a choice is simulated with the tasks of all replicas in any case."""
        if choice.offload != "none" or choice.n_slices > 1 or self.problem.lengths is not None:
            return True
        if choice.expert_parallel == 1:
            return False
        return hides_exchanges(choice) or self.costs(choice).exchange_dispatch is None

    def _priced(self, choice: PlanChoice) -> Priced:
        """Return the costs of a configuration; where GPUs differ, those of its placement."""
        if not self.problem.cluster.is_mixed:
            return self._priced_at(choice, ())
        place = tuple(getattr(choice, name) for name in _PLACE)
        return self._priced_at(choice, (*place, self.problem.gpus_of_devices(choice)))

    def _schedule(self, choice: PlanChoice) -> Schedule:
        priced = self._priced(choice)
        return self._ordered(choice, priced if choice.ordered_for_costs else None)

    def _whole(self, choice: PlanChoice, costs: Costs, bounds: Bounds) -> Evaluation:
        """Return the evaluation of a configuration by the tasks of all replicas."""
        schedule = self._schedule(choice)
        timeline = predict_timeline(self.problem.graph(choice, schedule, costs), costs)
        needed, most = reserved_memory(timeline), np.array(self.problem.limits(choice))
        if (needed > most).any():
            return _too_full(choice, bounds, needed, most)
        return Evaluation(
            choice, timeline.makespan, bounds.step, float(needed.max()), timeline.bubble_fraction,
            "simulated",
        )  # fmt: skip

    # Values that several configurations share.

    @kept(*_LAYERS, *_PLACE)
    def _split(self, choice: PlanChoice, gpus: tuple[int, ...]) -> tuple[int, ...] | None:
        problem, p = self.problem, choice.pipeline_parallel
        shares_devices = choice.schedule in ENCODER_SCHEDULES
        if problem.encoders and not problem.is_even:
            chain = self._shard_costs(choice, 0)
            assert isinstance(chain, ChainCosts)  # for mypy
            return chain.balanced(choice.n_stages, p if shares_devices else 0)
        if shares_devices:
            counts = problem.n_encoder_layers, problem.n_layers - problem.n_encoder_layers
            even = tuple(n // p for n in counts for _ in range(p))
            return even if sum(even) == problem.n_layers else None
        return stages_of(problem, choice, lambda: [self._parts(choice, gpu) for gpu in gpus])

    @kept(*_LAYERS)
    def _parts(self, choice: PlanChoice, gpu: int) -> DeviceSeconds:
        """Return the seconds of a layer, of the embedding and of the head on one GPU."""
        return DeviceSeconds(*self.problem.parts(choice, self.problem.cluster.gpus[gpu]))

    @kept(*_LAYERS, "layers_per_stage")
    def _priced_at(self, choice: PlanChoice, _place: tuple[object, ...]) -> Priced:
        """Return the costs of a configuration; splits of a transformer's layers share parts."""
        problem = self.problem
        if isinstance(problem.model, Layers):
            return Priced(self, problem.costs(choice))
        return Priced(self, problem.joined_costs(
            choice, lambda kind: self._shard_costs(choice, kind)(choice.layers_per_stage)
        ))  # fmt: skip

    @kept(*_LAYERS)
    def _shard_costs(self, choice: PlanChoice, kind: int) -> Callable[[Sequence[int]], Costs]:
        return self.problem.shard_costs(choice, kind)

    @kept("gpus_per_device", "pipeline_parallel", "data_parallel")
    def _limits(self, choice: PlanChoice) -> Floats:
        return np.array(self.problem.device_limits(choice))

    @kept("gpus_per_device", "pipeline_parallel", "data_parallel")
    def _routes(self, choice: PlanChoice) -> SharedRoutes:
        network = self.costs(choice).network
        return SharedRoutes(choice.data_parallel, self.problem.layout, network)

    @kept("gpus_per_device", "pipeline_parallel", "data_parallel")
    def reductions(self, choice: PlanChoice, algorithm: str, step: int) -> Reductions | None:
        """Return bounds on all-reduces over every ``step``-th replica of each device."""
        network, layout = self.costs(choice).network, self.problem.layout
        n_replicas, n_devices = choice.data_parallel, choice.pipeline_parallel
        return reductions(network, n_replicas, n_devices, layout, algorithm, step)

    @kept(*_ORDER, most=_MOST_GRAPHS)
    def _ordered(self, choice: PlanChoice, priced: Priced | None) -> Schedule:
        """Return the schedule of a configuration, for equal costs if there are none."""
        return self.problem.schedule(choice, (priced or self._priced(choice)).costs)

    @kept(
        *_ORDER, "shard_optimizer", "shard_parameters", "gpus_per_device", "data_parallel",
        most=_MOST_GRAPHS,
    )  # fmt: skip
    def _replica(self, choice: PlanChoice) -> OneOfReplicas | None:
        replicated = choice.data_parallel > 1
        graph = self._replica_graph(choice, replicated, replicated and choice.shard_optimizer)
        return OneOfReplicas.make(graph, self._routes(choice), self.costs(choice).all_reduce)

    @kept(*_ORDER, "shard_parameters", most=_MOST_GRAPHS)
    def _replica_graph(self, choice: PlanChoice, replicated: bool, shards: bool) -> TaskGraph:
        return lower_replica(
            self._schedule(choice),
            replicated=replicated,
            shard_optimizer=shards,
            framework=self.problem.framework,
            shard_parameters=choice.shard_parameters,
            **self.problem.accumulation(choice),
        )

    @kept(*_ORDER, most=_MOST_GRAPHS)
    def _order(self, choice: PlanChoice) -> Ints | None:
        """Return, for each action of the schedule, its kind in `small_graph`; None if it lacks."""
        schedule = self._schedule(choice)
        kinds, n = self.small_graph(choice).kinds, schedule.n_stages
        number = np.full(len(Op) * n, -1)
        number[kinds.op * n + kinds.stage] = np.arange(len(kinds))
        own: Ints = number[schedule.op.astype(np.int64) * n + schedule.stage]
        return None if (own < 0).any() else own

    @kept(*_PLACE)
    def small_graph(self, choice: PlanChoice) -> TaskGraph:
        """Return the graph of few micro-batches of the schedule of a choice, without messages.

        A replica gathers parameters; one that shares them with no other has them all.
        """
        return replica_memory_graph(choice_facts(choice).schedule)

    @kept(*_PLACE, "optimizer_shares")
    def shared_graph(self, choice: PlanChoice) -> TaskGraph:
        """Return the graph of few micro-batches with the replicas that share the optimizer."""
        small = self.small_graph(choice)
        return replace(small, options=replace(small.options, n_equal=choice.optimizer_shares))


@dataclass(eq=False)
class Priced:
    """Costs of configurations, and values that follow from them."""

    evaluator: Evaluator
    costs: Costs

    @kept(*_PLACE)
    def work(self, choice: PlanChoice) -> DeviceWork:
        """Return the work of each device for a micro-batch."""
        facts = choice_facts(choice)
        return device_work(
            self.costs,
            facts.devices,
            splits_backward=facts.splits_backward,
            hides_exchanges=hides_exchanges(choice),
            n_slices=choice.n_slices,
        )

    @kept(*_PLACE, "data_parallel", "optimizer_shares", "shards_parameters")
    def least_end(self, choice: PlanChoice) -> Floats:
        """Return the least seconds from the last backward of each device to the end of the step."""
        costs, shares = self.costs, choice.optimizer_shares
        algorithm = "ring" if shares > 1 else costs.all_reduce
        over = partial(self.evaluator.reductions, choice, algorithm)
        of_experts = None if costs.expert_replicas == 1 else over(costs.expert_replicas)
        exchange = self.evaluator.problem.exchange(choice)
        is_early = exchange.gather_parameters == "before_forward"
        sharing = Sharing(shares, choice.shards_parameters or is_early)
        hides = exchange.grad_sync == "bucketed"  # all but the last bucket, of any size
        reductions = (None, None) if hides else (over(1), of_experts)
        return least_end(costs, choice_facts(choice).devices, sharing, *reductions)

    @kept(*_PLACE, "optimizer_shares", "shards_parameters")
    def least_memory(self, choice: PlanChoice, offloads: bool) -> Floats:
        """Return the least bytes of each device, the allocator's reserve included."""
        facts = choice_facts(choice)
        return least_memory(
            self.costs,
            facts.devices,
            Sharing(choice.optimizer_shares, choice.shards_parameters),
            splits_backward=facts.splits_backward,
            offloads=offloads,
            n_slices=choice.n_slices,
        )

    @kept(*_PLACE, "optimizer_shares")
    def order_bytes(self, choice: PlanChoice) -> OrderBytes:
        """Return the bytes of the kinds of tasks of a configuration."""
        return order_bytes(self.evaluator.shared_graph(choice), self.costs)


def _too_full(
    choice: PlanChoice, bounds: Bounds, needed: Floats, limits: Floats, where: str = ""
) -> Evaluation:
    device = int((needed - limits).argmax())
    most, limit = float(needed[device]), float(limits[device])
    reason = (
        f"device {device} needs {format_bytes(most)} of {format_bytes(limit)}{where}, "
        f"{format_bytes(most - limit)} too much"
    )
    return Evaluation(
        choice, math.nan, bounds.step, float(needed.max()), math.nan, "does not fit", reason
    )


# Layers of each stage: even, or balanced over the devices of a placement.


class DeviceSeconds(NamedTuple):
    """Seconds of one micro-batch on one device: of a layer, of the embedding, and of the head."""

    layer: float
    embedding: float
    head: float


def stages_of(
    problem: PlanProblem, choice: PlanChoice, seconds: Callable[[], Sequence[DeviceSeconds]]
) -> tuple[int, ...] | None:
    """Return the layers of each stage of a choice; None if there are too few.

    ``seconds`` returns those of each device, for the layers of a transformer.
    """
    n_layers, model = problem.n_layers, problem.model
    placement = placement_of(choice)
    if problem.is_even and (placement.n_devices > 1 or placement.n_stages <= n_layers):
        n_each, rest = divmod(n_layers, placement.n_stages)
        return None if rest else (n_each,) * placement.n_stages
    if isinstance(model, Layers):
        if placement.n_stages > n_layers:
            return None
        names = ("forward", "backward") if "backward" in model.columns else (
            "forward", "input_grad", "weight_grad"
        )  # fmt: skip
        columns = (model.columns[name] for name in names)
        layers = [sum(x) for x in zip(*columns, strict=True)]
        return tuple(balanced_split(layers, placement.n_stages))
    return uniform_split(placement.paths[0], seconds(), n_layers)


def uniform_split(
    device_of: Sequence[int], seconds: Sequence[DeviceSeconds], n_layers: int
) -> tuple[int, ...] | None:
    """Return the layers of each stage, such that the busiest device is as fast as possible.

    Layers go one by one to the device that then has the least to do, which is optimal for equal
    layers. On a device they go to the stage that then has the least to do. At equal seconds the
    later device gets the layer: in 1F1B it holds fewer micro-batches. The first and the last stage
    of several may have no layer. The result is None if there are fewer layers than stages need.

    Examples
    --------
    >>> uniform_split([0, 1, 2, 3], [DeviceSeconds(1.0, 0.0, 2.0)] * 4, 14)
    (4, 4, 4, 2)
    >>> uniform_split([0, 1, 1, 0], [DeviceSeconds(1.0, 0.0, 2.0)] * 2, 10)
    (3, 3, 3, 1)
    """
    n, last = len(device_of), len(device_of) - 1
    sizes = [0 if n > 1 and stage in (0, last) else 1 for stage in range(n)]
    if sum(sizes) > n_layers:
        return None
    ends = [seconds[device_of[0]].embedding] + [0.0] * last
    ends[last] += seconds[device_of[last]].head
    stages: list[list[int]] = [[] for _ in seconds]
    for stage, device in enumerate(device_of):
        stages[device].append(stage)
    loads = []
    for device, own in enumerate(stages):
        layers = sum(sizes[stage] for stage in own)
        load = sum(ends[stage] for stage in own) + layers * seconds[device].layer
        loads.append((load + seconds[device].layer, -device))
    heapq.heapify(loads)
    for _ in range(n_layers - sum(sizes)):
        load, minus = loads[0]
        layer = seconds[-minus].layer
        heapq.heapreplace(loads, (load + layer, minus))
        own = stages[-minus]
        if len(own) > 1:
            own = [min(own, key=lambda k: (sizes[k] * layer + ends[k], -k))]
        sizes[own[0]] += 1
    return tuple(sizes)
