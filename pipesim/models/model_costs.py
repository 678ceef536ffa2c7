"""`model_costs`: costs of the stages of a transformer, and the workload that they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pipesim.costs.costs import Costs, PerStage
from pipesim.costs.layer_split import LayerPartition, Split
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.shard_costs import ShardCosts, shard_workload
from pipesim.models.splits.placed_split import Placed, placed_sizes
from pipesim.models.splits.split_problem import LayerModel
from pipesim.models.splits.stage_sizes import stage_sizes
from pipesim.models.tensor_parallel import Shard
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network

__all__ = ["model_costs"]


def model_costs(
    shard: Shard,
    layers_per_stage: Split,
    *,
    gpu: GPU | Mapping[str, Any] | str | None,
    flops_per_second: float | None,
    partition: LayerPartition | None,
    placement: Placed | None,
    memory_limit: float | Sequence[float] | None,
    optimizer_step: PerStage | None,
    launch: PerStage,
    network: Network | None,
) -> Costs:
    """Return the costs of stages; see `Transformer.costs` for arguments, errors and warnings."""
    rates = None if gpu is None else as_gpu(gpu)
    stage_costs = ShardCosts(
        shard, rates, flops_per_second, network, launch=launch, optimizer_step=optimizer_step
    )
    seconds = stage_costs.seconds

    def least_costs(sizes: Sequence[int]) -> Costs:
        """Return the seconds of the same stages without launches, as costs."""
        values: dict[str, Any] = {**seconds.without_launches.stages(sizes)}
        return Costs(**values)

    model = LayerModel(shard.model.n_layers, stage_costs, True, least_costs)
    sizes = placed_sizes(model, layers_per_stage, "layers_per_stage", partition=partition,
                         placement=placement, memory_limit=memory_limit)  # fmt: skip
    if sizes is None:
        sizes = stage_sizes(layers_per_stage, partition, model.n_layers, *seconds.parts)
    costs = stage_costs(sizes)
    for name in ("optimizer_step", "launch"):
        costs.per_stage(name, len(sizes))  # refuses values of another number of stages
    settings = {
        "layers_per_stage": list(sizes),
        "launch": costs.launch,
        **_run_settings(shard, rates, flops_per_second),
    }
    if optimizer_step is not None:
        settings["optimizer_step"] = costs.optimizer_step
    return replace(costs, workload=shard_workload(shard, rates, settings, network))


def _run_settings(shard: Shard, gpu: GPU | None, flops_per_second: float | None) -> dict[str, Any]:
    """Return the arguments of `Costs.transformer` that give model, shard and rates again."""
    settings = {
        **_plain(shard.model),
        **{f.name: getattr(shard, f.name) for f in fields(shard) if f.name != "model"},
    }
    if gpu is None:
        return {**settings, "flops_per_second": flops_per_second}
    return {**settings, "gpu": {k: v for k, v in _plain(gpu).items() if v is not None}}


def _plain(record: GPU | Transformer) -> dict[str, Any]:
    """Return the fields of a record of plain values."""
    return {f.name: getattr(record, f.name) for f in fields(record)}
