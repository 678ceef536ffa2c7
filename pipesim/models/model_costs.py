"""Costs of the stages of a transformer, for all of its micro-batches and for many splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from inspect import signature
from itertools import accumulate, chain
from numbers import Integral
from typing import Any, cast

import numpy as np

from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs, replace_stages
from pipesim.costs.layer_split import (
    LayerPartition,
    Split,
    checked_counts,
    checked_split,
    copied_stages,
    layout_stages,
)
from pipesim.costs.microbatch_costs import joined_microbatches, most_costs
from pipesim.costs.rows import PerStage
from pipesim.errors import ArgumentError, check_flag, check_name
from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.model_sizes import SIZES_OF_SOME, check_divides, check_size
from pipesim.models.parallel import PARALLEL, Parallel
from pipesim.models.placed_split import LayerModel, Placed, is_word, placed_sizes, stage_sizes
from pipesim.models.shard import Shard, with_layout
from pipesim.models.shard_sizes import (
    StageKey,
    exchanged_gradients,
    stage_keys,
    stage_modules,
    vocabulary_parameters,
)
from pipesim.models.stage_seconds import GpuSeconds, stage_seconds, warn_of_misaligned_heads
from pipesim.models.transformer import Transformer
from pipesim.models.vocabulary_parallel import check_vocabulary_parallel, vocabulary_costs
from pipesim.network.network import Network
from pipesim.utils.texts import Bytes


def costs_from_sizes(layers_per_stage: Split, **settings: Any) -> Costs:
    """Return the costs of a transformer's stages, from its sizes.

    Parameters
    ----------
    layers_per_stage
        Layers of each stage, or a number of stages. A number of stages get as many layers
        each, unless ``partition="balanced"`` is among the settings.
    **settings
        The fields of `pipesim.Transformer` (``hidden_size``, ``n_heads``, ...) and the
        arguments of its ``costs`` (``microbatch_size``, ``gpu``,
        ``tensor_parallel``, ...). ``n_layers`` may be left out if the layers of each stage are
        given.

    Returns
    -------
    Costs
        One value a stage: seconds and bytes of one GPU, and the ``workload``.

    Examples
    --------
    >>> import pipesim as ps
    >>> costs = ps.Costs.transformer(
    ...     [3, 3, 3, 2], hidden_size=1024, n_heads=16, sequence_length=1024,
    ...     vocabulary_size=50304, microbatch_size=4, gpu="a100_80gb")
    >>> costs.layout
    'Et*3|(t*3|)*2t*2L'
    """
    sizes = {field.name: field.default for field in fields(Transformer)}
    options = signature(Transformer.costs).parameters
    named = {name: p for name, p in options.items() if p.kind == p.KEYWORD_ONLY}
    del named["parallel"]  # whose fields stand beside it
    for name in settings:
        check_name("setting of a transformer", name, (*sizes, *named))
    is_counted = isinstance(layers_per_stage, Integral) or is_word(layers_per_stage)
    if "n_layers" not in settings and not is_counted:
        counts = checked_counts(layers_per_stage, "layers_per_stage", ends_may_be_empty=True)
        settings = {**settings, "n_layers": sum(counts)}
        if isinstance(layers_per_stage, str) and "mtp_layers" not in settings:
            stages = layout_stages(layers_per_stage, "layers_per_stage", has_mtp=True)
            settings["mtp_layers"] = sum(stage.modules.mtp for stage in stages)
    needed = [name for name, default in sizes.items() if default is MISSING]
    needed += [name for name, p in named.items() if p.default is p.empty]
    missing = [name for name in needed if name not in settings]
    if missing:
        raise ArgumentError(f"{missing[0]} is missing; a transformer needs {', '.join(needed)}")
    model = Transformer(**{name: value for name, value in settings.items() if name in sizes})
    return model.costs(layers_per_stage, **{k: v for k, v in settings.items() if k in named})


#: Settings that the workload of costs always has.
_ALWAYS = PARALLEL[: PARALLEL.index("fused_loss") + 1]


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
    last_logits: bool = False,
    context: Sequence[tuple[int, ...]] = (),
    vocabulary_parallel: bool = False,
) -> Costs:
    """Return the costs of stages; see `Transformer.costs` for arguments, errors and warnings.

    ``context`` are the groups of `context_sizes`, and ``shard`` has its size of a device.
    """
    rates = None if gpu is None else as_gpu(gpu)
    if rates is not None:
        warn_of_misaligned_heads(shard, rates)
    if check_flag("vocabulary_parallel", vocabulary_parallel):
        check_vocabulary_parallel(
            shard, layers_per_stage, partition=partition, placement=placement,
            memory_limit=memory_limit, launch=launch, optimizer_step=optimizer_step,
        )  # fmt: skip
    if isinstance(layers_per_stage, str) and not is_word(layers_per_stage):
        shard = with_layout(shard, layers_per_stage)
    if check_flag("last_logits", last_logits):
        if vocabulary_parallel:
            raise ArgumentError(
                "vocabulary_parallel divides the LM head and the loss of a training, and "
                "last_logits=True are costs of a server without a loss; leave one of the two out"
            )
        shard = replace(shard, last_logits=True)
    shards = microbatch_shards(shard, lengths, slices, context)
    n_wholes = len(context) if lengths is None else len(lengths)

    def costs_of(own: Shard) -> ShardCosts:
        return ShardCosts(
            own, rates, flops_per_second, network, launch=launch, optimizer_step=optimizer_step
        )

    if vocabulary_parallel:
        sizes = checked_split(layers_per_stage, shard.model.n_layers, "layers_per_stage")

        def stages_of(own: Shard) -> Costs:
            return vocabulary_costs(own, sizes, costs_of, rates)

        costs = stages_of(shard)
    else:
        stage_costs = costs_of(shard)
        sizes = _sizes(stage_costs, shard, layers_per_stage, partition=partition,
                       placement=placement, memory_limit=memory_limit)  # fmt: skip

        def stages_of(own: Shard) -> Costs:
            return costs_of(own)(sizes)

        costs = stage_costs(sizes)
        for name in ("optimizer_step", "launch"):
            costs.per_stage(name, len(sizes))  # refuses values of another number of stages
    settings = {
        "layers_per_stage": layers_per_stage if shard.modules else list(sizes),
        "launch": costs.launch,
        **_run_settings(shard, rates, flops_per_second),
    }
    if optimizer_step is not None:
        settings["optimizer_step"] = costs.optimizer_step
    if vocabulary_parallel:
        settings["vocabulary_parallel"] = True
    if last_logits:
        settings["last_logits"] = True
    if shards:
        costs = costs_of_shards(costs, shards, stages_of)
        settings |= {
            "lengths": None if lengths is None else _lists(lengths),
            "slices": _lists(slices),
        }
        if context:
            settings["context_parallel"] = _lists(context)
    workload = replace(
        shard_workload(shards or [(shard,)], rates, settings, network),
        n_slices=max(len(shards), 1) // max(n_wholes, 1),
        n_microbatches=len(shards) if n_wholes else None,
    )
    return replace(costs, workload=workload, last_logits=last_logits)


def _sizes(
    stage_costs: ShardCosts, shard: Shard, layers_per_stage: Split, *,
    partition: LayerPartition | None, placement: Placed | None,
    memory_limit: Bytes | Sequence[Bytes] | None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the layers of each stage of a chain."""
    seconds, n_layers = stage_costs.seconds, shard.model.n_layers

    def least_costs(sizes: Sequence[int]) -> Costs:
        values: dict[str, Any] = {**seconds.without_launches.stages(sizes)}
        return Costs(**values)

    model = LayerModel(n_layers, stage_costs, True, least_costs, not shard.last_logits)
    sizes = placed_sizes(model, layers_per_stage, "layers_per_stage", partition=partition,
                         placement=placement, memory_limit=memory_limit)  # fmt: skip
    if sizes is None:
        _, *ends = seconds.parts
        sizes = stage_sizes(layers_per_stage, partition, n_layers, seconds.layers, *ends)
    return sizes


def _lists(value: Any) -> Any:
    return [_lists(x) for x in value] if hasattr(value, "__len__") else int(value)


def _run_settings(shard: Shard, gpu: GPU | None, flops_per_second: float | None) -> dict[str, Any]:
    """Return the arguments of `Costs.transformer` that give model, shard and rates again."""
    model = {k: v for k, v in _plain(shard.model).items() if k not in SIZES_OF_SOME or v}
    own = {k: v for k, v in shard.settings.items() if k in _ALWAYS or v != getattr(Parallel, k)}
    if "routing" in own:
        own["routing"] = shard.routing.to_dict()
    if "framework" in own:
        own["framework"] = shard.framework.to_dict()
    settings = {**model, **own}
    if gpu is None:
        return {**settings, "flops_per_second": flops_per_second}
    return {**settings, "gpu": {k: v for k, v in _plain(gpu).items() if v is not None}}


def _plain(record: GPU | Transformer) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


# Micro-batches of other lengths: padded or packed sequences, and slices of sequences

#: For each micro-batch, the tokens of its sequences, or of each document packed into one, or these
#: for each group of GPUs that shares a sequence.
Lengths = Sequence[int | Sequence[int] | Sequence[Sequence[int]]]
#: Shards of the sequences that the groups of a device compute at the same time.
Groups = tuple[Shard, ...]
#: Number of equal slices of a sequence, or the tokens of each slice, or these of each micro-batch.
Slices = int | Sequence[int] | Sequence[Sequence[int]]


def context_sizes(sizes: Any) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """Return ``context_parallel`` of a device, and that of its groups in each micro-batch.

    That of the device is the largest sum of a micro-batch. One value for all micro-batches is
    returned as it is, with no groups.
    """
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__len__"):
        return sizes, ()
    if not len(sizes):
        raise ArgumentError(
            "context_parallel is empty; give a number, or a list of one number a micro-batch"
        )
    name = "context_parallel"
    rows = [
        tuple(check_size(f"{name}[{k}][{i}]", x) for i, x in enumerate(value))
        if isinstance(value, (list, tuple)) and value
        else check_size(f"{name}[{k}]", value)
        for k, value in enumerate(sizes)
    ]
    groups = [(row,) if isinstance(row, int) else row for row in rows]
    most = max(map(sum, groups))
    for k, row in enumerate(groups):
        for size in row:
            check_divides(f"{name}[{k}]", size, "the GPUs of a device", most)
    return most, tuple((x,) * (most // x) if isinstance(x, int) else x for x in rows)


def microbatch_shards(
    shard: Shard,
    lengths: Lengths | None,
    slices: Slices,
    context: Sequence[tuple[int, ...]] = (),
) -> list[Groups]:
    """Return the shards of each micro-batch, or of each slice; see `Transformer.costs`.

    Empty if all micro-batches are those of ``shard``.
    """
    if lengths is not None:
        if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__len__") or not len(lengths):
            raise ArgumentError(
                "lengths must be, for each micro-batch, the tokens of its sequences, or a list of "
                f"the tokens of each document packed into one; got {lengths!r:.60}"
            )
        lengths = list(lengths)
        if context and len(context) != len(lengths):
            raise ArgumentError(
                f"context_parallel has {len(context)} values, but lengths {len(lengths)}; give one "
                "each a micro-batch"
            )
    n = len(context) if lengths is None else len(lengths)
    wholes = [
        _of_microbatch(
            shard, k, shard.model.sequence_length if lengths is None else lengths[k],
            context[k] if context else (shard.context_parallel,),
        )
        for k in range(n)
    ] or [(shard,)]  # fmt: skip
    is_sliced = not (isinstance(slices, Integral) and not isinstance(slices, bool) and slices == 1)
    if not is_sliced:
        return wholes if n else []
    return [
        parts
        for whole, own in zip(wholes, _slices_of_each(slices, len(wholes)), strict=True)
        for parts in zip(*(_of_slices(one, own) for one in whole), strict=True)
    ]


def _slices_of_each(slices: Any, n: int) -> list[Any]:
    """Return the slices of each of ``n`` micro-batches."""
    is_listed = hasattr(slices, "__len__") and not isinstance(slices, (str, bytes))
    if not (is_listed and len(slices) and all(hasattr(own, "__len__") for own in slices)):
        return [slices] * n
    counts = [len(own) for own in slices]
    if len(counts) != n or len({*counts}) > 1:
        raise ArgumentError(
            f"slices have lists of {', '.join(map(str, counts))} slices for {n} micro-batches; "
            "give one list each, of as many slices"
        )
    return list(slices)


def _of_microbatch(shard: Shard, k: int, value: Any, sizes: tuple[int, ...]) -> Groups:
    """Return the shards of micro-batch ``k``, one a group of these sizes."""
    name, c = f"lengths[{k}]", shard.context_parallel
    # Lengths of other micro-batches may not be divided as that of the model: one change.
    changes = [{"context_parallel": size, "context_groups": c // size} for size in sizes]
    is_nested = hasattr(value, "__len__") and any(hasattr(x, "__len__") for x in value)
    if not is_nested or isinstance(value, (str, bytes)):
        of_size = {x["context_parallel"]: _of_length(shard, name, value, x) for x in changes}
        return tuple(of_size[size] for size in sizes)
    if len(value) > len(sizes):
        raise ArgumentError(
            f"{name} has documents of {len(value)} groups of GPUs, but the device has groups of "
            f"{', '.join(map(str, sizes))} (context_parallel) in this micro-batch; give one list "
            "of documents a group"
        )
    return tuple(
        _of_length(shard, f"{name}[{i}]", own if hasattr(own, "__len__") else [own], change)
        for i, (own, change) in enumerate(zip(value, changes, strict=False))
    )


def _of_length(shard: Shard, name: str, value: Any, change: Mapping[str, Any]) -> Shard:
    """Return the changed shard of sequences of a length, or of packed documents."""
    if not hasattr(value, "__len__"):
        return replace(shard, model=_with_length(shard, check_size(name, value)), **change)
    if isinstance(value, (str, bytes)) or not len(value):
        raise ArgumentError(f"{name} must be tokens, or those of each document; got {value!r:.60}")
    if shard.microbatch_size > 1:
        raise ArgumentError(
            f"{name} packs documents into one micro-batch, but microbatch_size is "
            f"{shard.microbatch_size}; give microbatch_size=1, and all documents of a micro-batch"
        )
    documents = tuple(check_size(f"{name}[{k}]", tokens) for k, tokens in enumerate(value))
    model = _with_length(shard, sum(documents))
    return replace(shard, model=model, documents=documents, **change)


def _of_slices(shard: Shard, slices: Slices) -> list[Shard]:
    """Return the shard of each slice of a micro-batch, in the order of the sequence."""
    length = shard.model.sequence_length
    if shard.documents:
        raise ArgumentError(
            "slices are of one sequence, but lengths pack several documents into a micro-batch; "
            "leave one of the two out"
        )
    if not hasattr(slices, "__len__"):
        n = check_size("slices", slices)
        check_divides("slices", n, "sequence_length", length)
        sizes = [length // n] * n
    else:
        if isinstance(slices, (str, bytes)):
            raise ArgumentError(f"slices must be a count, or tokens of each, got {slices!r:.60}")
        parts = cast(Sequence[int], slices)
        sizes = [check_size(f"slices[{k}]", tokens) for k, tokens in enumerate(parts)]
        if sum(sizes) != length:
            raise ArgumentError(
                f"slices have {sum(sizes)} tokens, but a sequence has {length}; give tokens that "
                "sum to it, or a number of equal slices"
            )
    starts = accumulate(sizes, initial=0)
    return [
        replace(shard, model=_with_length(shard, size), prefix=start)
        for size, start in zip(sizes, starts, strict=False)
    ]


def _with_length(shard: Shard, length: int) -> Any:
    return replace(shard.model, sequence_length=length)


def costs_of_shards(
    costs: Costs, shards: Sequence[Groups], costs_of: Callable[[Shard], Costs]
) -> Costs:
    """Return ``costs`` with the fields of one micro-batch from ``costs_of`` each of ``shards``.

    A task of a device ends when its slowest group ends, and each field is the largest of all.
    """
    own = {shard: costs_of(shard) for shard in dict.fromkeys(chain.from_iterable(shards))}
    sets = [frozenset(groups) for groups in shards]
    distinct = {groups: k for k, groups in enumerate(dict.fromkeys(sets))}
    of_groups = ([own[shard] for shard in groups] for groups in distinct)
    parts = [most_costs(costs, x) if len(x) > 1 else x[0] for x in of_groups]
    column = [distinct[groups] for groups in sets]
    return joined_microbatches(costs, parts, np.array(column))


class ShardCosts:
    """Costs of the stages of a shard on its devices, called with the layers of each stage.

    A stage's values depend on its `StageKey`, and are computed once for each. Arguments are those
    of `stage_seconds`, `pipesim.Transformer.costs` and `pipesim.Costs`.
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
            "workload": shard_workload([(shard,)], gpu, None, network),
            "network": Network() if network is None else network,
            "memory_reserve": memory_reserve,
            "expert_replicas": shard.expert_replicas,
            **exchanged_gradients(shard),
        }
        self._tied_bytes = 0.0
        if optimizer_step is not None:
            self._fixed["optimizer_step"] = optimizer_step
        elif gpu is not None:
            model = shard.model
            if copied_stages(stage_modules(shard, 2), is_tied=model.tied_embeddings):
                self._tied_bytes = vocabulary_parameters(shard) * model.bytes_per_gradient
        self._stages: dict[StageKey, tuple[float, ...]] = {}
        self._several: Costs | None = None
        self._names: tuple[str, ...] = ()

    def __call__(self, sizes: Sequence[int]) -> Costs:
        """Return the costs of stages with these many layers."""
        end, stages = len(sizes) - 1, self._stages
        keys = stage_keys(self._shard, sizes)
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
    shards: Sequence[Groups],
    gpu: GPU | None,
    settings: Mapping[str, Any] | None,
    network: Network | None,
) -> Workload:
    """Return tokens, FLOPs and GPUs of the costs that ``settings`` and ``network`` give.

    Tokens and FLOPs are averages over the micro-batches, of which ``shards`` has the groups each.
    """
    shard = shards[0][0]
    tokens = [sum(x.microbatch_size * x.model.sequence_length for x in own) for own in shards]
    flops = [sum(x.step_flops for x in own) for own in shards]
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
