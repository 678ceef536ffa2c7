"""`model_costs`: costs of the stages of a transformer, and the workload that they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pipesim.costs.costs import Costs, PerStage
from pipesim.costs.layer_split import LayerPartition, Split
from pipesim.models.experts.model_sizes import SIZES_OF_SOME
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.microbatch_shards import (
    Lengths,
    Slices,
    costs_of_shards,
    microbatch_shards,
)
from pipesim.models.shard_costs import ShardCosts, shard_workload
from pipesim.models.splits.placed_split import Placed, placed_sizes
from pipesim.models.splits.split_problem import LayerModel
from pipesim.models.splits.stage_sizes import stage_sizes
from pipesim.models.tensor_parallel import Shard
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.utils.units import Bytes

#: Arguments of a shard that settings always have.
_ALWAYS = (
    "microbatch_size", "tensor_parallel", "sequence_parallel", "recompute", "flash_attention",
    "scatter_gather", "fused_loss",
)  # fmt: skip


def model_costs(
    shard: Shard,
    layers_per_stage: Split,
    *,
    gpu: GPU | Mapping[str, Any] | str | None,
    flops_per_second: float | None,
    partition: LayerPartition | None,
    placement: Placed | None,
    memory_limit: Bytes | Sequence[Bytes] | None,
    optimizer_step: PerStage | None,
    launch: PerStage,
    network: Network | None,
    lengths: Lengths | None = None,
    slices: Slices = 1,
) -> Costs:
    """Return the costs of stages; see `Transformer.costs` for arguments, errors and warnings."""
    rates = None if gpu is None else as_gpu(gpu)
    shards = microbatch_shards(shard, lengths, slices)

    def costs_of(own: Shard) -> ShardCosts:
        """Return the costs of the stages of a shard, for many splits."""
        return ShardCosts(
            own, rates, flops_per_second, network, launch=launch, optimizer_step=optimizer_step
        )

    stage_costs = costs_of(shard)
    seconds = stage_costs.seconds

    def least_costs(sizes: Sequence[int]) -> Costs:
        """Return the seconds of the same stages without launches, as costs."""
        values: dict[str, Any] = {**seconds.without_launches.stages(sizes)}
        return Costs(**values)

    model = LayerModel(shard.model.n_layers, stage_costs, True, least_costs)
    sizes = placed_sizes(model, layers_per_stage, "layers_per_stage", partition=partition,
                         placement=placement, memory_limit=memory_limit)  # fmt: skip
    if sizes is None:
        _, *ends = seconds.parts
        sizes = stage_sizes(layers_per_stage, partition, model.n_layers, seconds.layers, *ends)
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
    if shards:
        costs = costs_of_shards(costs, shards, lambda own: costs_of(own)(sizes))
        settings |= {
            "lengths": None if lengths is None else _lists(lengths),
            "slices": _lists(slices),
        }
    workload = replace(
        shard_workload(shards or [shard], rates, settings, network),
        n_slices=max(len(shards), 1) // (1 if lengths is None else len(lengths)),
        n_microbatches=None if lengths is None else len(shards),
    )
    return replace(costs, workload=workload)


def _lists(value: Any) -> Any:
    """Return lengths or slices as values of JSON."""
    return [_lists(x) for x in value] if hasattr(value, "__len__") else int(value)


def _run_settings(shard: Shard, gpu: GPU | None, flops_per_second: float | None) -> dict[str, Any]:
    """Return the arguments of `Costs.transformer` that give model, shard and rates again."""
    model = {k: v for k, v in _plain(shard.model).items() if k not in SIZES_OF_SOME or v}
    settings = {**model, **_shard_settings(shard)}
    if gpu is None:
        return {**settings, "flops_per_second": flops_per_second}
    return {**settings, "gpu": {k: v for k, v in _plain(gpu).items() if v is not None}}


def _shard_settings(shard: Shard) -> dict[str, Any]:
    """Return the arguments of a shard; those of context and expert parallelism if it has them."""
    values = {f.name: getattr(shard, f.name) for f in fields(shard) if f.name != "model"}
    defaults = {f.name: f.default for f in fields(shard)}
    values = {
        name: value for name, value in values.items() if name in _ALWAYS or value != defaults[name]
    }
    if "routing" in values:
        values["routing"] = shard.routing.to_dict()
    return values


def _plain(record: GPU | Transformer) -> dict[str, Any]:
    """Return the fields of a record of plain values."""
    return {f.name: getattr(record, f.name) for f in fields(record)}
