"""`PlanProblem`: model, cluster and batch of a plan, and the costs and graph of any choice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.costs.rows import STAGE_ROWS
from pipesim.errors import CostsWarning, check_type
from pipesim.framework.framework import Framework, GatherParameters, GradSync
from pipesim.graph.graph import TaskGraph
from pipesim.lowering.framework_options import FrameworkOptions, framework_options
from pipesim.lowering.lower import lower
from pipesim.models.encoders import ChainCosts, Encoder, encoder_shard
from pipesim.models.gpu import GPU
from pipesim.models.layers import Layers
from pipesim.models.model_costs import Lengths, ShardCosts, costs_of_shards, microbatch_shards
from pipesim.models.parallel import Parallel
from pipesim.models.shard import Shard
from pipesim.models.stage_seconds import stage_seconds
from pipesim.models.transformer import Transformer
from pipesim.planning.choice import (
    PlanChoice,
    hides_exchanges,
    order_facts,
    placement_of,
)
from pipesim.planning.cluster import Cluster
from pipesim.scheduling.placement import Layout, replica_devices
from pipesim.scheduling.registry import schedule as named_schedule
from pipesim.scheduling.registry import schedule_info
from pipesim.scheduling.schedule import Schedule

#: Settings of the model in a plan that is given none.
_USUAL = Parallel(flash_attention=True)


@dataclass(frozen=True)
class PlanProblem:
    """Model, cluster and batch of a plan; settings are those of `pipesim.plan`.

    ``lengths``: tokens of each sequence, or of its documents; None for those of the model. Then
    ``length_totals`` are the tokens and the model FLOPs of a step.
    ``encoders``: models before this one in the pipeline, in their order.
    ``parallel``: settings of the model that no configuration changes.
    ``is_even``: whether each stage has as many layers; otherwise devices are balanced.
    ``measured_size``: sequences of the micro-batch of measured layers; None for one.
    """

    model: Transformer | Layers
    cluster: Cluster
    global_batch: int
    memory_limit: float | None = None
    parallel: Parallel = _USUAL
    layout: Layout = "stage_major"
    memory_reserve: float = 0.0
    is_even: bool = False
    measured_size: int | None = None
    grad_sync: GradSync | None = None
    gather_parameters: GatherParameters | None = None
    encoders: tuple[Encoder, ...] = ()
    lengths: Lengths | None = None
    length_totals: tuple[int, float] = (0, 0.0)

    @property
    def n_layers(self) -> int:
        """Number of layers, those of encoders included."""
        if isinstance(self.model, Layers):
            return len(self.model)
        return self.model.n_layers + self.n_encoder_layers

    @property
    def n_encoder_layers(self) -> int:
        """Number of layers of all encoders."""
        return sum(x.model.n_layers for x in self.encoders)

    @property
    def step_tokens(self) -> float:
        """Tokens of a step; NaN for measured layers."""
        if self.lengths is not None:
            return self.length_totals[0]
        return self.global_batch * getattr(self.model, "sequence_length", math.nan)

    @property
    def step_flops(self) -> float:
        """Model FLOPs of a step; NaN for measured layers."""
        if isinstance(self.model, Layers):
            return math.nan
        if self.lengths is not None:
            return self.length_totals[1]
        return self.model.step_flops(self.global_batch) + sum(
            x.model.step_flops(x.sequences * self.global_batch) for x in self.encoders
        )

    def costs(self, choice: PlanChoice) -> Costs:
        """Return the costs of the stages of a choice, each of the GPU of its device."""
        return self.joined_costs(choice, lambda kind: self._costs_on(choice, kind))

    def joined_costs(self, choice: PlanChoice, costs_on: Callable[[int], Costs]) -> Costs:
        """Return `costs` from those of stages that all run on one of ``cluster.gpus``."""
        if not self.cluster.is_mixed:
            return costs_on(0)
        gpus = self.gpus_of_devices(choice)
        kinds = sorted(set(gpus))
        placement = placement_of(choice)
        stages = [kinds.index(gpus[device]) for device in placement.paths[0]]
        return _joined([costs_on(kind) for kind in kinds], stages, mean_peak(self.cluster))

    def shard_costs(self, choice: PlanChoice, kind: int) -> Callable[[Sequence[int]], Costs]:
        """Return the costs of a transformer's stages on one of ``cluster.gpus``, for any split.

        Their workload has no settings, so that `Costs.rebuilt` cannot build them again.
        """
        gpu, network = self.cluster.gpus[kind], self.cluster.network(choice.gpus_per_device)
        reserve = self.memory_reserve
        if self.encoders:
            return self.chain_costs(choice)
        whole = self._shard(choice)
        costs = ShardCosts(whole, gpu, None, network, memory_reserve=reserve)
        slices = microbatch_shards(whole, self.lengths, choice.n_slices)
        if not slices:
            return costs
        parts = {own: ShardCosts(own, gpu, None, network) for (own,) in slices}
        return lambda sizes: costs_of_shards(costs(sizes), slices, lambda own: parts[own](sizes))

    def chain_costs(self, choice: PlanChoice, *, has_network: bool = True) -> ChainCosts:
        """Return the costs of the stages of encoders and model, for any split.

        Without the network, collectives inside a device take no time.
        """
        network = self.cluster.network(choice.gpus_per_device) if has_network else None
        return ChainCosts(
            self._shards(choice), [x.sequences for x in self.encoders], self.cluster.gpu, network,
            memory_reserve=self.memory_reserve,
        )  # fmt: skip

    def rebuilt(self, choice: PlanChoice) -> Callable[..., Costs] | None:
        """Return costs without recompute, for ``has_network=``; None if a model has them."""
        if not self.encoders:
            return None
        once = replace(choice, recompute="none")
        plain = replace(self, encoders=tuple(replace(x, recompute=None) for x in self.encoders))
        return lambda *, has_network: plain.chain_costs(once, has_network=has_network)(
            choice.layers_per_stage
        )

    def _costs_on(self, choice: PlanChoice, kind: int) -> Costs:
        """Return the costs of stages that all run on one of ``cluster.gpus``."""
        if self.encoders:
            return self.chain_costs(choice)(choice.layers_per_stage)
        network = self.cluster.network(choice.gpus_per_device)
        if isinstance(self.model, Layers):
            costs = self.model.costs(choice.layers_per_stage, network=network)
        else:
            costs = self.model.costs(
                choice.layers_per_stage,
                gpu=self.cluster.gpus[kind],
                parallel=self.parallel,
                lengths=self.lengths,
                slices=choice.n_slices,
                network=network,
                **choice.shard_options,
            )
        return replace(costs, memory_reserve=self.memory_reserve) if self.memory_reserve else costs

    def parts(self, choice: PlanChoice, gpu: GPU) -> tuple[float, float, float]:
        """Return the seconds of F and B of a layer, of the embedding, and of the head, on a GPU."""
        network = self.cluster.network(choice.gpus_per_device)
        return stage_seconds(self._shard(choice), gpu, None, network).parts

    def check_shards(self, choice: PlanChoice) -> None:
        """Raise a `PipeError` if a transformer cannot be divided as a choice says."""
        microbatch_shards(self._shard(choice), self.lengths, choice.n_slices)
        self._shards(choice)
        self.cluster.network(choice.gpus_per_device)

    def expert_replicas(self, choice: PlanChoice) -> int:
        """Return the number of replicas that together have all experts of a transformer."""
        return self._shard(choice).expert_replicas

    def _shard(self, choice: PlanChoice) -> Shard:
        model = check_type("model", self.model, Transformer)
        return model.shard(self.parallel, **choice.shard_options)

    def _shards(self, choice: PlanChoice) -> list[Shard]:
        """Return the shards of encoders and model."""
        main = self._shard(choice)
        sizes = zip(self.encoders, choice.encoder_tensor_parallel, strict=True)
        return [*(encoder_shard(encoder, main, t) for encoder, t in sizes), main]

    def gpus_of_devices(self, choice: PlanChoice) -> tuple[int, ...]:
        """Return the GPU of each device of the pipeline, as an index into ``cluster.gpus``.

        Replicas of a device on several kinds of GPUs, and a device of several, have the one that
        takes the most seconds for F and B of a layer.
        """
        if not self.cluster.is_mixed:
            return (0,) * choice.pipeline_parallel
        if isinstance(self.model, Layers):
            seconds = (0.0,) * len(self.cluster.gpus)
        else:
            seconds = tuple(self.parts(choice, gpu)[0] for gpu in self.cluster.gpus)
        return tuple(max(own, key=seconds.__getitem__) for own in self._kinds(choice))

    def _kinds(self, choice: PlanChoice) -> tuple[tuple[int, ...], ...]:
        """Return the different GPUs of each device, in all replicas."""
        return kinds_of_devices(
            self.cluster, choice.gpus_per_device, choice.pipeline_parallel, choice.data_parallel,
            self.layout,
        )  # fmt: skip

    def schedule(self, choice: PlanChoice, costs: Costs) -> Schedule:
        """Return the schedule of a choice, ordered for its costs if the schedule takes costs."""
        options = choice.options
        if choice.ordered_for_costs:
            options["costs"] = costs
        return named_schedule(
            choice.schedule, choice.pipeline_parallel, choice.n_scheduled, **options
        )

    def takes_costs(self, name: str) -> bool:
        """Return whether a schedule orders its tasks for costs."""
        return "costs" in schedule_info(name).options

    def chunks_of(self, name: str, n_devices: int, n_slices: int) -> int | None:
        """Return the number of stages of each device; None if a schedule takes any."""
        if "n_chunks" in schedule_info(name).options:
            return None
        return order_facts(name, n_devices, 1, n_slices).schedule.n_stages // n_devices

    def graph(self, choice: PlanChoice, schedule: Schedule, costs: Costs) -> TaskGraph:
        """Return the task graph of all replicas.

        If the schedule pairs F and B, exchanges of experts are tasks, which run behind the other
        half of a pair. Otherwise they are part of F, B and I.
        """
        experts: dict[str, Any] = {}
        if hides_exchanges(choice):
            experts = {
                "expert_layers": costs.expert_layers, "expert_replicas": costs.expert_replicas
            }  # fmt: skip
        return lower(
            schedule,
            n_replicas=choice.data_parallel,
            shard_optimizer=choice.shard_optimizer,
            framework=self.framework,
            layout=self.layout,
            shard_parameters=choice.shard_parameters,
            offload=choice.offload,
            offload_to=choice.offload_to,
            **self.accumulation(choice),
            **experts,
        )

    def accumulation(self, choice: PlanChoice) -> dict[str, Any]:
        """Return ``grad_sync`` of `pipesim.lower` for a device that gathers layer by layer."""
        if not choice.is_layer_by_layer:
            return {}
        return {"grad_sync": "last" if self.grad_sync == "last" else "every"}

    @cached_property
    def framework(self) -> Framework:
        """Framework, which exchanges gradients and parameters as the plan's arguments say."""
        changes: dict[str, Any] = {}
        if self.grad_sync:
            changes["grad_sync"] = self.grad_sync
        if self.gather_parameters:
            changes["gather_parameters"] = self.gather_parameters
        return replace(self.parallel.framework, **changes)

    def exchange(self, choice: PlanChoice) -> FrameworkOptions:
        """Return when replicas reduce gradients and gather parameters, as `lower` does."""
        return framework_options(
            self.framework, placement_of(choice), n_replicas=choice.data_parallel,
            shard_optimizer=choice.shard_optimizer, shard_parameters=choice.shard_parameters,
        )  # fmt: skip

    def device_limits(self, choice: PlanChoice) -> list[float]:
        """Return the most bytes of each device of the pipeline, on its smallest GPU."""
        if self.memory_limit is not None:
            return [self.memory_limit] * choice.pipeline_parallel
        if not self.cluster.is_mixed:
            return [self.cluster.memory] * choice.pipeline_parallel
        usable = [self.cluster.usable_bytes(gpu) for gpu in self.cluster.gpus]
        return [min(usable[kind] for kind in own) for own in self._kinds(choice)]

    def limits(self, choice: PlanChoice) -> list[float]:
        """Return the most bytes of each device of all replicas, for `pipesim.simulate`."""
        own = self.device_limits(choice)
        devices = replica_devices(choice.data_parallel, len(own), self.layout)
        limits = np.empty(devices.size)
        limits[devices] = own
        return [float(limit) for limit in limits]


def _joined(costs: Sequence[Costs], which: Sequence[int], peak: float | None) -> Costs:
    """Return costs whose stage s has the values of ``costs[which[s]]``, and GPUs this peak."""
    values: dict[str, Any] = {}
    for name in (*STAGE_ROWS, "segments"):
        rows = [getattr(x, name) for x in costs]
        if isinstance(rows[0], tuple):
            values[name] = tuple(rows[k][stage] for stage, k in enumerate(which))
    work = costs[0].work
    if work is not None:
        work = replace(work, peak_flops=peak, memory=None, settings=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostsWarning)
        return replace(costs[0], **values, workload=work)


@lru_cache(maxsize=4096)
def kinds_of_devices(
    cluster: Cluster, tensor_parallel: int, p: int, dp: int, layout: Layout
) -> tuple[tuple[int, ...], ...]:
    """Return, for each device of a pipeline, its different GPUs in all replicas.

    They are indices into ``cluster.gpus``.
    """
    kinds = cluster.gpu_numbers(tensor_parallel)
    devices = replica_devices(dp, p, layout)
    return tuple(
        tuple(sorted({kind for device in column for kind in kinds[device]}))
        for column in devices.T.tolist()
    )


def mean_peak(cluster: Cluster) -> float | None:
    """Return the mean peak of all GPUs (FLOP/s); None if that of one is unknown."""
    peaks = [group.gpu.peak for group in cluster.groups]
    if None in peaks:
        return None
    rows = zip(cluster.groups, peaks, strict=True)
    return math.fsum(group.n_gpus * (peak or 0.0) for group, peak in rows) / cluster.n_gpus


S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
Method = Callable[Concatenate[S, PlanChoice, P], T]


def kept(*names: str, most: int | None = None) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Keep the values of a method by these attributes of a choice, and by its other arguments.

    Each object keeps its own. With ``most`` of them, the oldest is dropped for a new one.
    """
    key_of = attrgetter(*names)

    def decorate(method: Method[S, P, T]) -> Method[S, P, T]:
        place = f"{method.__name__} values"

        @wraps(method)
        def get(self: S, choice: PlanChoice, /, *args: P.args, **named: P.kwargs) -> T:
            values: dict[object, T] = self.__dict__.setdefault(place, {})
            key = (key_of(choice), *args)
            if key not in values:
                value = method(self, choice, *args, **named)
                if most is not None and len(values) >= most:
                    del values[next(iter(values))]
                values[key] = value
            return values[key]

        return get

    return decorate
