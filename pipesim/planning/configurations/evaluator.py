"""`Evaluator`: bounds, memory and exact step of configurations, with what they share in caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.collective_routes import GroupRoutes
from pipesim.costs.costs import Costs
from pipesim.costs.partition.balanced_split import balanced_split
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower_replica import lower_replica
from pipesim.models.layers import Layers
from pipesim.ops import Op
from pipesim.planning.configurations.bounds import (
    Bounds,
    DeviceWork,
    Reductions,
    device_work,
    least_end,
    least_memory,
    reductions,
)
from pipesim.planning.configurations.choice import Evaluation, PlanChoice
from pipesim.planning.configurations.problem import PlanProblem, order_facts, placement_of
from pipesim.planning.configurations.stage_splits import DeviceSeconds, uniform_split
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.one_of_replicas import OneOfReplicas, replica_memory_graph
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import OrderBytes, order_bytes
from pipesim.timeline.memory_limit import reserved_memory
from pipesim.utils.csr import Ints
from pipesim.utils.units import format_bytes

__all__ = ["Evaluator", "too_full"]

Floats = NDArray[np.float64]
T = TypeVar("T")
#: Graphs that an evaluator keeps at most.
_MOST_GRAPHS = 512


@dataclass(eq=False)
class Evaluator:
    """Evaluate configurations of one problem.

    Configurations share graphs (by schedule and counts), links and engine columns (by sizes of
    parallelism), and costs (by micro-batch, recompute and split).

    Attributes
    ----------
    problem
        Model, cluster and batch.
    """

    problem: PlanProblem
    _cache: dict[Hashable, object] = field(default_factory=dict)
    _graphs: dict[Hashable, object] = field(default_factory=dict)

    def with_split(self, choice: PlanChoice) -> PlanChoice | None:
        """Return a configuration with its balanced split; None if there are too few layers."""
        gpus = self.problem.gpus_of_devices(choice)
        key = ("split", self._layer_key(choice), choice.schedule, choice.pipeline_parallel,
               choice.n_chunks, gpus)  # fmt: skip
        sizes = self._get(key, lambda: self._split(choice, gpus))
        return None if sizes is None else replace(choice, layers_per_stage=sizes)

    def costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of a configuration."""
        return self._get(self._costs_key(choice), lambda: self._stage_costs(choice))

    def _stage_costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of a configuration; splits of a transformer's layers share parts."""
        problem, key = self.problem, self._layer_key(choice)
        if isinstance(problem.model, Layers):
            return problem.costs(choice)

        def costs_on(kind: int) -> Costs:
            make = self._get(("shard", key, kind), lambda: problem.shard_costs(choice, kind))
            return make(choice.layers_per_stage)

        return problem.joined_costs(choice, costs_on)

    def bounds(self, choice: PlanChoice) -> Bounds:
        """Return lower bounds on step and memory; see `pipesim.planning.configurations.bounds`."""
        costs, key, p = self.costs(choice), self._costs_key(choice), choice.pipeline_parallel
        place = (choice.schedule, p, choice.n_chunks)
        facts = order_facts(*place)
        placement = facts.placement
        work: DeviceWork = self._get(
            ("work", key, place),
            lambda: device_work(costs, placement, splits_backward=facts.splits_backward),
        )
        dp, shares = choice.data_parallel, choice.data_parallel if choice.shard_optimizer else 1
        end: Floats = self._get(
            ("end", key, place, dp, shares),
            lambda: least_end(costs, placement, shares, self._reductions(choice, costs)),
        )
        memory: Floats = self._get(
            ("memory", key, place, shares), lambda: least_memory(costs, placement, shares)
        )
        return Bounds(work.least_step(choice.n_microbatches, end, placement.paths[0][0]), memory)

    def memory(self, choice: PlanChoice) -> Floats | None:
        """Return the bytes of each device, the allocator's reserve included.

        They follow from the order of the schedule alone, without a simulation. None if the order of
        few micro-batches lacks an operation of that of all.
        """
        if choice.ordered_for_costs:
            return None
        order = self._order(choice)
        if order is None:
            return None
        peak = self._bytes(choice).peak(order)
        return peak + self.problem.memory_reserve * peak

    def evaluate(self, choice: PlanChoice, bounds: Bounds, memory: Floats | None) -> Evaluation:
        """Return the exact step of a configuration, or by how much it does not fit.

        ``memory`` is the result of `memory`.
        """
        costs, limits = self.costs(choice), self.problem.device_limits(choice)
        replica = None if memory is None else self._replica(choice, costs)
        if replica is None or memory is None:
            return self._whole(choice, costs, bounds)
        if (memory > np.array(limits)).any():
            return too_full(choice, bounds, memory, limits)
        times = replica.run(costs)
        if times is None:
            return self._whole(choice, costs, bounds)
        step = float(times.end.max())
        idle = 1 - times.busy / (choice.pipeline_parallel * step) if step else 1.0
        return Evaluation(
            choice, step, bounds.step, float(memory.max()), max(0.0, idle), "simulated"
        )

    def unfit(self, choice: PlanChoice, bounds: Bounds) -> Evaluation | None:
        """Return why a configuration cannot fit in any order; None if it may fit."""
        limits = self.problem.device_limits(choice)
        if (bounds.memory <= np.array(limits)).all():
            return None
        return too_full(choice, bounds, bounds.memory, limits, " in any order")

    def _order(self, choice: PlanChoice) -> Ints | None:
        """Return the kinds of the tasks of a schedule in `_small_graph`, those of each device."""
        place = (choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_microbatches)

        def build() -> Ints | None:
            schedule = self._schedule(choice, self.costs(choice))
            kinds, n = self._small_graph(choice).kinds, schedule.n_stages
            number = np.full(len(Op) * n, -1)
            number[kinds.op * n + kinds.stage] = np.arange(len(kinds))
            own: Ints = number[schedule.op.astype(np.int64) * n + schedule.stage]
            return None if (own < 0).any() else own

        return _kept(self._graphs, ("order", place), build)

    def _bytes(self, choice: PlanChoice) -> OrderBytes:
        """Return the bytes of the kinds of tasks of a configuration."""
        shares = choice.data_parallel if choice.shard_optimizer else 1
        place = (choice.schedule, choice.pipeline_parallel, choice.n_chunks)

        def build() -> OrderBytes:
            graph = self._get(("small", place, shares), lambda: self._with_shares(choice, shares))
            return order_bytes(graph, self.costs(choice))

        return self._get(("bytes", self._costs_key(choice), place, shares), build)

    def _with_shares(self, choice: PlanChoice, shares: int) -> TaskGraph:
        """Return `_small_graph` of replicas that share the optimizer."""
        graph = self._small_graph(choice)
        return replace(graph, options=replace(graph.options, n_equal=shares))

    def _small_graph(self, choice: PlanChoice) -> TaskGraph:
        """Return the graph of few micro-batches of the schedule of a choice, without messages.

        A replica gathers parameters; one that shares them with no other has them all.
        """
        place = (choice.schedule, choice.pipeline_parallel, choice.n_chunks)
        return self._get(("few", place), lambda: replica_memory_graph(order_facts(*place).schedule))

    def _schedule(self, choice: PlanChoice, costs: Costs) -> Schedule:
        """Return the schedule of a choice."""
        place = (choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_microbatches)
        key: tuple[Hashable, ...] = ("schedule", *place)
        if choice.ordered_for_costs:
            key = (*key, self._costs_key(choice))
        return _kept(self._graphs, key, lambda: self.problem.schedule(choice, costs))

    def _whole(self, choice: PlanChoice, costs: Costs, bounds: Bounds) -> Evaluation:
        """Return the evaluation of a configuration by the tasks of all replicas."""
        schedule = self._schedule(choice, costs)
        limits = self.problem.limits(choice)
        timeline = predict_timeline(
            self.problem.graph(choice, schedule), costs, memory_limit=limits
        )
        needed = reserved_memory(timeline)
        if (needed > np.array(limits)).any():
            return too_full(choice, bounds, needed, limits)
        return Evaluation(
            choice, timeline.makespan, bounds.step, float(needed.max()), timeline.bubble_fraction,
            "simulated",
        )  # fmt: skip

    def _replica(self, choice: PlanChoice, costs: Costs) -> OneOfReplicas | None:
        """Return the replica that stands for all; None if replicas differ."""
        place = (choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_microbatches)
        replicated = choice.data_parallel > 1
        key: tuple[Hashable, ...] = (*place, replicated, replicated and choice.shard_optimizer)
        if choice.ordered_for_costs:
            key = (*key, self._costs_key(choice))

        def build() -> OneOfReplicas | None:
            graph = _kept(self._graphs, key, lambda: lower_replica(
                self._schedule(choice, costs),
                replicated=replicated, shard_optimizer=choice.shard_optimizer,
            ))  # fmt: skip
            return OneOfReplicas.make(
                graph, choice.data_parallel, self.problem.layout, costs.network, costs.all_reduce,
                self._get(("groups", *sizes, choice.pipeline_parallel), GroupRoutes),
            )  # fmt: skip

        sizes = (choice.tensor_parallel, choice.data_parallel)
        return _kept(self._graphs, ("replica", key, sizes), build)

    def _reductions(self, choice: PlanChoice, costs: Costs) -> Reductions | None:
        """Return bounds on the reductions of each device."""
        dp, p = choice.data_parallel, choice.pipeline_parallel
        algorithm = "ring" if choice.shard_optimizer and dp > 1 else costs.all_reduce
        return self._get(
            ("reductions", choice.tensor_parallel, p, dp, algorithm),
            lambda: reductions(costs.network, dp, p, self.problem.layout, algorithm),
        )

    def _split(self, choice: PlanChoice, gpus: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the layers of each stage."""
        n_layers, model = self.problem.n_layers, self.problem.model
        placement = placement_of(choice.schedule, choice.pipeline_parallel, choice.n_chunks)
        if self.problem.is_even:
            n_each, rest = divmod(n_layers, placement.n_stages)
            return None if rest else (n_each,) * placement.n_stages
        if isinstance(model, Layers):
            if placement.n_stages > n_layers:
                return None
            seconds = [sum(x) for x in zip(*_layer_seconds(model), strict=True)]
            return tuple(balanced_split(seconds, placement.n_stages))
        parts = [self._parts(choice, gpu) for gpu in gpus]
        return uniform_split(placement.paths[0], parts, n_layers)

    def _parts(self, choice: PlanChoice, gpu: int) -> DeviceSeconds:
        """Return the seconds of a layer, of the embedding and of the head on one GPU."""
        return self._get(
            ("parts", self._layer_key(choice), gpu),
            lambda: DeviceSeconds(*self.problem.parts(choice, self.problem.cluster.gpus[gpu])),
        )

    def _layer_key(self, choice: PlanChoice) -> tuple[Hashable, ...]:
        """Return the values that the costs of layers depend on."""
        return (choice.tensor_parallel, choice.microbatch_size, choice.recompute,
                choice.sequence_parallel)  # fmt: skip

    def _costs_key(self, choice: PlanChoice) -> tuple[Hashable, ...]:
        """Return the values that costs depend on."""
        key = ("costs", self._layer_key(choice), choice.layers_per_stage)
        if not self.problem.cluster.is_mixed:
            return key
        place = (choice.schedule, choice.n_chunks)
        return (*key, place, self.problem.gpus_of_devices(choice))

    def _get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a value of the cache, made at its first use."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]  # of this key


def _kept(cache: dict[Hashable, object], key: Hashable, make: Callable[[], T]) -> T:
    """Return a value of a cache of limited size, made at its first use."""
    if key not in cache:
        while len(cache) >= _MOST_GRAPHS:
            del cache[next(iter(cache))]
        cache[key] = make()
    return cache[key]  # type: ignore[return-value]  # of this key


def _layer_seconds(model: Layers) -> list[tuple[float, ...]]:
    """Return the seconds of the operations of each measured layer."""
    names = ("forward", "backward") if "backward" in model.columns else (
        "forward", "input_grad", "weight_grad"
    )  # fmt: skip
    return [tuple(model.columns[name]) for name in names]


def too_full(
    choice: PlanChoice, bounds: Bounds, needed: Floats, limits: list[float], where: str = ""
) -> Evaluation:
    """Return the evaluation of a configuration that does not fit."""
    device = int((needed - np.array(limits)).argmax())
    reason = (
        f"device {device} needs {format_bytes(float(needed[device]))} of "
        f"{format_bytes(limits[device])}{where}, "
        f"{format_bytes(float(needed[device]) - limits[device])} too much"
    )
    return Evaluation(
        choice, math.nan, bounds.step, float(needed.max()), math.nan, "does not fit", reason
    )
