"""`Evaluator`: bounds, memory and exact step of configurations, with what they share in caches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import balanced_split
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.lower import lower_replica
from pipesim.models.layers import Layers
from pipesim.ops import Op
from pipesim.planning.choice import (
    Evaluation,
    Floats,
    PlanChoice,
    hides_exchanges,
    order_facts,
    placement_of,
    with_settings,
)
from pipesim.planning.plan_bounds import (
    Bounds,
    Reductions,
    Sharing,
    device_work,
    least_end,
    least_memory,
    reductions,
)
from pipesim.planning.problem import Cache, PlanProblem
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.equal_replicas import OneOfReplicas, SharedRoutes, replica_memory_graph
from pipesim.simulation.simulate import predict_timeline
from pipesim.timeline.memory import OrderBytes, order_bytes
from pipesim.timeline.memory_limit import reserved_memory
from pipesim.utils.csr import Ints
from pipesim.utils.texts import format_bytes

#: Graphs that an evaluator keeps at most.
_MOST_GRAPHS = 512


@dataclass(eq=False)
class Evaluator:
    """Evaluate configurations of one problem.

    Configurations share graphs (by schedule and counts), links and engine columns (by sizes of
    parallelism), and costs (by micro-batch, recompute and split).
    """

    problem: PlanProblem
    _cache: Cache = field(default_factory=Cache)
    _graphs: Cache = field(default_factory=lambda: Cache(_MOST_GRAPHS))

    def with_split(self, choice: PlanChoice) -> PlanChoice | None:
        """Return a configuration with its balanced split; None if there are too few layers."""
        gpus = self.problem.gpus_of_devices(choice)
        key = ("split", self._layer_key(choice), *_place(choice), gpus)
        sizes = self._cache.get(
            key,
            lambda: stages_of(
                self.problem, choice, lambda: [self._parts(choice, gpu) for gpu in gpus]
            ),
        )
        return None if sizes is None else with_settings(choice, layers_per_stage=sizes)

    def costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of a configuration, which `Costs.rebuilt` cannot build again."""
        return self._priced(choice).costs

    def bounds(self, choice: PlanChoice) -> Bounds:
        """Return lower bounds on step and memory; see `pipesim.planning.plan_bounds`."""
        priced = self._priced(choice)
        costs, place = priced.costs, _place(choice)
        facts = order_facts(*place)
        devices, splits = facts.devices, facts.splits_backward
        sharing = Sharing(choice.optimizer_shares, choice.shards_parameters)
        offloads = choice.offload != "none"
        work = priced.values.get(
            ("work", place),
            lambda: device_work(
                costs,
                devices,
                splits_backward=splits,
                hides_exchanges=hides_exchanges(choice),
                n_slices=choice.n_slices,
            ),
        )
        end = priced.values.get(
            ("end", place, choice.data_parallel, sharing),
            lambda: least_end(costs, devices, sharing, *self._reductions(choice, costs)),
        )
        memory = priced.values.get(
            ("memory", place, sharing, offloads),
            lambda: least_memory(
                costs,
                devices,
                sharing,
                splits_backward=splits,
                offloads=offloads,
                n_slices=choice.n_slices,
            ),
        )
        return Bounds(work.least_step(choice.n_microbatches, end, int(devices.device[0])), memory)

    def memory(self, choice: PlanChoice) -> Floats | None:
        """Return the bytes of each device, the allocator's reserve included.

        They follow from the order of the schedule alone, without a simulation. None if they do not:
        if the order of few micro-batches lacks an operation of that of all, and for activations or
        parameters that are not always on their device.
        """
        if choice.ordered_for_costs or self._needs_all(choice):
            return None
        order = self._order(choice)
        if order is None:
            return None
        peak = self._bytes(choice).peak(order)
        return peak + self.problem.memory_reserve * peak

    def evaluate(self, choice: PlanChoice, bounds: Bounds, memory: Floats | None) -> Evaluation:
        """Return the exact step of a configuration.

        ``memory`` is the result of `memory`, and fits. If it is None, the result may be by how much
        the configuration does not fit.
        """
        times = None
        if memory is not None and (replica := self.replica(choice)) is not None:
            times = replica.run(self.costs(choice))
        if memory is None or times is None:
            return self._whole(choice, self.costs(choice), bounds)
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
        key = ("limits", choice.gpus_per_device, choice.pipeline_parallel, choice.data_parallel)
        limits = self._cache.get(key, lambda: np.array(self.problem.device_limits(choice)))
        needed = bounds.memory if memory is None else memory
        if (needed <= limits).all():
            return None
        return _too_full(choice, bounds, needed, limits, " in any order" * (memory is None))

    def replica(self, choice: PlanChoice) -> OneOfReplicas | None:
        """Return a replica, ordered for equal costs, that stands for all; None if they differ."""
        if self._needs_all(choice):
            return None
        replicated = choice.data_parallel > 1
        key: tuple[Hashable, ...] = (
            _place(choice), choice.n_microbatches, replicated,
            replicated and choice.shard_optimizer,
        )  # fmt: skip

        def build() -> OneOfReplicas | None:
            costs = self.costs(choice)
            graph = self._graphs.get(key, lambda: lower_replica(
                self._schedule(choice, costs),
                replicated=replicated, shard_optimizer=choice.shard_optimizer,
            ))  # fmt: skip
            shared = self._cache.get(
                ("routes", *sizes, choice.pipeline_parallel),
                lambda: SharedRoutes(choice.data_parallel, self.problem.layout, costs.network),
            )
            return OneOfReplicas.make(graph, shared, costs.all_reduce)

        sizes = (choice.gpus_per_device, choice.data_parallel)
        return self._graphs.get(("replica", key, sizes), build)

    def _needs_all(self, choice: PlanChoice) -> bool:
        """Return whether a choice is simulated with the tasks of all replicas in any case."""
        if choice.offload != "none" or choice.shards_parameters or choice.n_slices > 1:
            return True
        if choice.expert_parallel == 1:
            return False
        return hides_exchanges(choice) or self.costs(choice).exchange_dispatch is None

    def _priced(self, choice: PlanChoice) -> _Priced:
        return self._cache.get(
            self._costs_key(choice), lambda: _Priced(self._stage_costs(choice), Cache())
        )

    def _stage_costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of a configuration; splits of a transformer's layers share parts."""
        problem, key = self.problem, self._layer_key(choice)
        if isinstance(problem.model, Layers):
            return problem.costs(choice)

        def costs_on(kind: int) -> Costs:
            make = self._cache.get(("shard", key, kind), lambda: problem.shard_costs(choice, kind))
            return make(choice.layers_per_stage)

        return problem.joined_costs(choice, costs_on)

    def _order(self, choice: PlanChoice) -> Ints | None:
        """Return, for each action of the schedule, its kind in `_small_graph`."""

        def build() -> Ints | None:
            schedule = self._schedule(choice, self.costs(choice))
            kinds, n = self._small_graph(choice).kinds, schedule.n_stages
            number = np.full(len(Op) * n, -1)
            number[kinds.op * n + kinds.stage] = np.arange(len(kinds))
            own: Ints = number[schedule.op.astype(np.int64) * n + schedule.stage]
            return None if (own < 0).any() else own

        return self._graphs.get(("order", _place(choice), choice.n_microbatches), build)

    def _bytes(self, choice: PlanChoice) -> OrderBytes:
        """Return the bytes of the kinds of tasks of a configuration."""
        shares = choice.optimizer_shares
        priced, place = self._priced(choice), _place(choice)

        def build() -> OrderBytes:
            small = self._small_graph(choice)
            graph = self._cache.get(
                ("small", place, shares),
                lambda: replace(small, options=replace(small.options, n_equal=shares)),
            )
            return order_bytes(graph, priced.costs)

        return priced.values.get(("bytes", place, shares), build)

    def _small_graph(self, choice: PlanChoice) -> TaskGraph:
        """Return the graph of few micro-batches of the schedule of a choice, without messages.

        A replica gathers parameters; one that shares them with no other has them all.
        """
        place = _place(choice)
        return self._cache.get(
            ("few", place), lambda: replica_memory_graph(order_facts(*place).schedule)
        )

    def _schedule(self, choice: PlanChoice, costs: Costs) -> Schedule:
        key: tuple[Hashable, ...] = ("schedule", _place(choice), choice.n_microbatches)
        if choice.ordered_for_costs:
            key = (*key, self._costs_key(choice))
        return self._graphs.get(key, lambda: self.problem.schedule(choice, costs))

    def _whole(self, choice: PlanChoice, costs: Costs, bounds: Bounds) -> Evaluation:
        """Return the evaluation of a configuration by the tasks of all replicas."""
        schedule = self._schedule(choice, costs)
        timeline = predict_timeline(self.problem.graph(choice, schedule, costs), costs)
        needed, most = reserved_memory(timeline), np.array(self.problem.limits(choice))
        if (needed > most).any():
            return _too_full(choice, bounds, needed, most)
        return Evaluation(
            choice, timeline.makespan, bounds.step, float(needed.max()), timeline.bubble_fraction,
            "simulated",
        )  # fmt: skip

    def _reductions(
        self, choice: PlanChoice, costs: Costs
    ) -> tuple[Reductions | None, Reductions | None]:
        """Return bounds on the reductions of each device: over all replicas, and of experts.

        Those of experts are over the replicas that have the same ones; None if all have them.
        """
        dp, p = choice.data_parallel, choice.pipeline_parallel
        algorithm = "ring" if choice.optimizer_shares > 1 else costs.all_reduce

        def over(step: int) -> Reductions | None:
            return self._cache.get(
                ("reductions", choice.gpus_per_device, p, dp, algorithm, step),
                lambda: reductions(costs.network, dp, p, self.problem.layout, algorithm, step),
            )

        return over(1), None if costs.expert_replicas == 1 else over(costs.expert_replicas)

    def _parts(self, choice: PlanChoice, gpu: int) -> DeviceSeconds:
        """Return the seconds of a layer, of the embedding and of the head on one GPU."""
        return self._cache.get(
            ("parts", self._layer_key(choice), gpu),
            lambda: DeviceSeconds(*self.problem.parts(choice, self.problem.cluster.gpus[gpu])),
        )

    def _layer_key(self, choice: PlanChoice) -> tuple[Hashable, ...]:
        """Return the values that the costs of layers depend on."""
        return (choice.tensor_parallel, choice.microbatch_size, choice.recompute,
                choice.sequence_parallel, choice.context_parallel, choice.expert_parallel,
                choice.n_slices)  # fmt: skip

    def _costs_key(self, choice: PlanChoice) -> tuple[Hashable, ...]:
        """Return the values that costs depend on."""
        key = ("costs", self._layer_key(choice), choice.layers_per_stage)
        if not self.problem.cluster.is_mixed:
            return key
        place = (choice.schedule, choice.n_chunks, choice.n_slices)
        return (*key, place, self.problem.gpus_of_devices(choice))


class _Priced(NamedTuple):
    """Costs of a configuration, and values that follow from them."""

    costs: Costs
    values: Cache


def _place(choice: PlanChoice) -> tuple[str, int, int, int]:
    """Return the values that the placement of a choice depends on."""
    return choice.schedule, choice.pipeline_parallel, choice.n_chunks, choice.n_slices


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
    if problem.is_even:
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
