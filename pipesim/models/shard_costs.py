"""`ShardCosts`: costs of the stages of a shard, for many splits of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipesim.costs.costs import Costs, PerStage, replace_stages
from pipesim.costs.workload import Workload
from pipesim.models.gpu import GPU
from pipesim.models.stage_layers import StageKey, stage_keys
from pipesim.models.stage_seconds import GpuSeconds, stage_seconds
from pipesim.models.tensor_parallel import Shard
from pipesim.network.network import Network


class ShardCosts:
    """Costs of the stages of a shard on its devices, called with the layers of each stage.

    A stage's values depend on its layers, and on whether it is the first or the last one. They are
    computed once.

    Parameters
    ----------
    shard
        One GPU's share of a transformer.
    gpu, flops_per_second, network
        As in `pipesim.models.stage_seconds.stage_seconds`, with its errors and warnings.
    launch, optimizer_step
        As in `pipesim.Transformer.costs`.
    memory_reserve
        As in `pipesim.Costs`.

    Attributes
    ----------
    seconds
        Seconds of the stages.
    """

    def __init__(
        self,
        shard: Shard,
        gpu: GPU | None,
        flops_per_second: float | None,
        network: Network | None,
        *,
        launch: PerStage = 0.0,
        optimizer_step: PerStage | None = None,
        memory_reserve: float = 0.0,
    ) -> None:
        self.seconds = stage_seconds(shard, gpu, flops_per_second, network)
        self._shard = shard
        self._fixed: dict[str, Any] = {
            "launch": launch,
            "all_reduce": "ring" if gpu is None else "fastest",
            "workload": shard_workload([shard], gpu, None, network),
            "network": Network() if network is None else network,
            "memory_reserve": memory_reserve,
            "expert_replicas": shard.expert_replicas,
        }
        self._tied_bytes = 0.0
        if optimizer_step is not None:
            self._fixed["optimizer_step"] = optimizer_step
        elif gpu is not None:
            self._tied_bytes = shard.copied_parameters * shard.model.bytes_per_gradient
        self._stages: dict[StageKey, tuple[float, ...]] = {}
        self._several: Costs | None = None
        self._names: tuple[str, ...] = ()

    def __call__(self, sizes: Sequence[int]) -> Costs:
        """Return the costs of stages with these many layers."""
        end, stages = len(sizes) - 1, self._stages
        keys = stage_keys(self._shard.model, sizes)
        is_kept = stages.keys() >= {*keys} and sum(sizes) == self._shard.model.n_layers
        if not is_kept or self._several is None:
            values: dict[str, Any] = {
                **self.seconds.stages(sizes),
                **self._shard.stage_bytes(sizes),
            }
            values = {name: x for name, x in values.items() if name not in self._fixed}
            if end == 0:
                return self._with_segments(Costs(**values, **self._fixed), sizes)
            if self._several is None:
                self._names = tuple(values)
                self._several = Costs(**values, **self._fixed, tied_bytes=self._tied_bytes)
            for key, *row in zip(keys, *values.values(), strict=True):
                stages[key] = tuple(map(float, row))
        costs = replace_stages(self._several, self._names, [stages[key] for key in keys])
        return self._with_segments(costs, sizes)

    def _with_segments(self, costs: Costs, sizes: Sequence[int]) -> Costs:
        """Return costs with the shares of operations between exchanges of experts, if any."""
        if not isinstance(self.seconds, GpuSeconds):
            return costs
        segments = self.seconds.segments(sizes)
        return costs if segments is None else replace(costs, segments=segments)


def shard_workload(
    shards: Sequence[Shard],
    gpu: GPU | None,
    settings: Mapping[str, Any] | None,
    network: Network | None,
) -> Workload:
    """Return tokens, FLOPs and GPUs of the costs that ``settings`` and ``network`` give.

    Tokens and FLOPs are averages over the micro-batches, of which ``shards`` has one each.
    """
    shard = shards[0]
    tokens = [x.microbatch_size * x.model.sequence_length for x in shards]
    flops = [x.step_flops for x in shards]
    has_collectives = gpu is not None and shard.n_gpus * shard.expert_parallel > 1
    return Workload(
        tokens=tokens[0] if len(shards) == 1 else sum(tokens) / len(tokens),
        flops=flops[0] if len(shards) == 1 else sum(flops) / len(flops),
        gpus_per_device=shard.n_gpus,
        peak_flops=None if gpu is None else gpu.peak,
        memory=None if gpu is None else gpu.memory,
        settings=settings,
        nodes=network.nodes if has_collectives and network is not None else None,
    )
