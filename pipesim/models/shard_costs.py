"""`ShardCosts`: costs of the stages of a shard, for many splits of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipesim.costs.costs import Costs, PerStage, replace_stages
from pipesim.costs.workload import Workload
from pipesim.models.gpu import GPU
from pipesim.models.stage_seconds import stage_seconds
from pipesim.models.tensor_parallel import Shard
from pipesim.network.network import Network

__all__ = ["ShardCosts", "shard_workload"]


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
            "workload": shard_workload(shard, gpu, None, network),
            "network": Network() if network is None else network,
            "memory_reserve": memory_reserve,
        }
        self._tied_bytes = 0.0
        if optimizer_step is not None:
            self._fixed["optimizer_step"] = optimizer_step
        elif gpu is not None:
            self._tied_bytes = shard.copied_parameters * shard.model.bytes_per_gradient
        self._stages: dict[tuple[int, bool, bool], tuple[float, ...]] = {}
        self._several: Costs | None = None
        self._names: tuple[str, ...] = ()

    def __call__(self, sizes: Sequence[int]) -> Costs:
        """Return the costs of stages with these many layers.

        Raises
        ------
        ArgumentError
            For layers that do not sum to the model's.
        """
        end, stages = len(sizes) - 1, self._stages
        keys = [(n, stage == 0, stage == end) for stage, n in enumerate(sizes)]
        is_kept = stages.keys() >= {*keys} and sum(sizes) == self._shard.model.n_layers
        if not is_kept or self._several is None:
            values: dict[str, Any] = {
                **self.seconds.stages(sizes),
                **self._shard.stage_bytes(sizes),
            }
            values = {name: x for name, x in values.items() if name not in self._fixed}
            if end == 0:
                return Costs(**values, **self._fixed)
            if self._several is None:
                self._names = tuple(values)
                self._several = Costs(**values, **self._fixed, tied_bytes=self._tied_bytes)
            for key, *row in zip(keys, *values.values(), strict=True):
                stages[key] = tuple(map(float, row))
        return replace_stages(self._several, self._names, [stages[key] for key in keys])


def shard_workload(
    shard: Shard, gpu: GPU | None, settings: Mapping[str, Any] | None, network: Network | None
) -> Workload:
    """Return tokens, FLOPs and GPUs of the costs that ``settings`` and ``network`` give."""
    has_collectives = gpu is not None and shard.tensor_parallel > 1
    return Workload(
        tokens=shard.microbatch_size * shard.model.sequence_length,
        flops=shard.model.step_flops(shard.microbatch_size),
        gpus_per_device=shard.tensor_parallel,
        peak_flops=None if gpu is None else gpu.peak,
        memory=None if gpu is None else gpu.memory,
        settings=settings,
        nodes=network.nodes if has_collectives and network is not None else None,
    )
