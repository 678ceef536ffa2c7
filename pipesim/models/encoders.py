"""`Encoder`: a model before the language model of a pipeline; costs of the chain that they make.

Layers of all modules are one chain: those of the first encoder, of further ones, and of the
language model. A stage has consecutive layers of it, of one module or of several, so that an
encoder is on devices of its own or shares one with the language model. Encoders that feed the
language model side by side are one after another in the chain: messages of a later encoder have
the outputs of earlier ones, too.

A device of the pipeline has the G = tc GPUs of a tensor- and context-parallel group of the
language model. An encoder whose layers are shared by u of them computes G/u sequences, such as
images, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.cost_fields import Workload
from pipesim.costs.costs import Costs
from pipesim.costs.layer_split import balanced_split
from pipesim.costs.rows import STAGE_ROWS
from pipesim.errors import ArgumentError, check_list
from pipesim.models.gpu import GPU
from pipesim.models.model_costs import ShardCosts, shard_workload
from pipesim.models.model_sizes import Size, check_size
from pipesim.models.parallel import LayerRecompute, Parallel
from pipesim.models.shard import Shard
from pipesim.models.transformer import Transformer
from pipesim.network.network import Network
from pipesim.utils.checks import checked

Floats = NDArray[np.float64]


@checked
@dataclass(frozen=True)
class Encoder:
    """A model before the language model of `pipesim.plan`, such as a vision encoder.

    Attributes
    ----------
    model
        The encoder. Its ``sequence_length`` are the tokens of one image, before they are merged.
        Give ``bidirectional=True`` if tokens attend to all of their image, and
        ``vocabulary_size=1`` if it has no table. Its embedding and its head stand for the first
        and the last norms; the maps from pixels, and to the language model, are not counted.
    sequences
        Sequences of the encoder, such as images, for each sequence of the language model.
    tensor_parallel
        GPUs that share each layer of the encoder, one number or a list of those to search. They
        divide the GPUs of a device, whose other groups compute other sequences at the same time;
        with fewer sequences some are idle. None (the default): all that divide the heads, too.
    recompute
        Recompute of the encoder's layers, as in `Parallel`. None (the default): that of the
        language model.

    Examples
    --------
    >>> import pipesim as ps
    >>> vit = ps.Transformer(
    ...     hidden_size=1280, n_layers=32, n_heads=16, sequence_length=1024, vocabulary_size=1,
    ...     learned_positions=False, tied_embeddings=False, dropout=False, bidirectional=True)
    >>> model = [ps.Encoder(vit, sequences=4), ps.Transformer.preset("llama3_8b")]
    >>> plans = ps.plan(model, ps.Cluster("dgx_h100", n_gpus=16), global_batch=32,
    ...                 tensor_parallel=2, pipeline_parallel=4, microbatch_size=1,
    ...                 schedules="1f1b", recompute="none", progress=False)
    >>> plans.best.choice.encoder_tensor_parallel
    (1,)
    """

    model: Transformer
    sequences: Size = 1
    tensor_parallel: int | Sequence[int] | None = None
    recompute: LayerRecompute | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel is not None:
            sizes: Any = self.tensor_parallel
            listed = check_list(
                "tensor_parallel", sizes if hasattr(sizes, "__len__") else [sizes],
                "one number of GPUs or a list",
            )  # fmt: skip
            if not listed:
                raise ArgumentError("tensor_parallel is empty; give a number, or None for all")
            checked = tuple(dict.fromkeys(check_size("tensor_parallel", x) for x in listed))
            object.__setattr__(self, "tensor_parallel", checked)


#: Settings of a language model that its encoders do not have.
_LANGUAGE_MODEL_ONLY = (
    "context_parallel", "expert_parallel", "expert_tensor_parallel", "routing", "expert_exchange",
    "dispatch_element_bytes",
)  # fmt: skip


def encoder_shard(encoder: Encoder, main: Shard, tensor_parallel: int) -> Shard:
    """Return one GPU's share of an encoder on the devices of ``main``, the language model.

    It has the sequences of its group, its own recompute if it is given, and the other settings of
    ``main``, such as kernels and format.
    Sequence parallelism applies if ``tensor_parallel`` divides the encoder's sequence.
    """
    if main.n_gpus % tensor_parallel:
        raise ArgumentError(
            f"tensor_parallel={tensor_parallel} of an encoder does not divide the "
            f"{main.n_gpus} GPU{'s' * (main.n_gpus > 1)} of a device; give a divisor"
        )
    groups, length = main.n_gpus // tensor_parallel, encoder.model.sequence_length
    splits_sequence = main.sequence_parallel and tensor_parallel > 1
    settings = {
        **main.settings,
        **{x: getattr(Parallel, x) for x in _LANGUAGE_MODEL_ONLY},
        "tensor_parallel": tensor_parallel,
        "recompute": encoder.recompute or main.recompute,
        "microbatch_size": -(-encoder.sequences * main.microbatch_size // groups),
        "sequence_parallel": splits_sequence and length % tensor_parallel == 0,
    }
    return Shard(model=encoder.model, context_groups=groups, **settings)


def split_chain(counts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield first stage, and layers of each stage from it, of modules with ``counts`` of layers.

    The first stage has the beginning of the first module, and the last stage the end of the last.

    >>> list(split_chain([2, 4], [3, 2, 1]))
    [(0, [2]), (0, [1, 2, 1])]
    >>> list(split_chain([2, 4], [2, 4, 0]))
    [(0, [2]), (1, [4, 0])]
    """
    ends = list(accumulate(sizes, initial=0))
    for k, (low, high) in enumerate(pairwise(accumulate(counts, initial=0))):
        own = [max(0, min(b, high) - max(a, low)) for a, b in pairwise(ends)]
        used = [stage for stage, n in enumerate(own) if n]
        first = 0 if k == 0 else used[0]
        last = len(sizes) - 1 if k == len(counts) - 1 else used[-1]
        yield first, own[first : last + 1]


class ChainCosts:
    """Costs of the stages of several modules, called with the layers of each stage.

    ``shards`` are those of the encoders and, last, of the language model. ``sequences`` are those
    of each encoder for one of the language model. Costs have no ``segments``, and cannot be built
    again by `Costs.rebuilt`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        sequences: Sequence[int],
        gpu: GPU,
        network: Network | None,
        *,
        memory_reserve: float = 0.0,
    ) -> None:
        self._shards = shards
        self._modules = [
            ShardCosts(shard, gpu, None, network, memory_reserve=memory_reserve) for shard in shards
        ]
        self._kept: dict[tuple[int, tuple[int, ...]], Costs] = {}
        main = shards[-1]
        flops = main.step_flops + sum(
            shard.model.step_flops(n * main.microbatch_size)
            for shard, n in zip(shards, sequences, strict=False)
        )
        work = shard_workload([(main,)], gpu, None, network)
        self._work: Workload = replace(work, flops=flops)

    def balanced(self, n_stages: int, n_encoder_stages: int = 0) -> tuple[int, ...]:
        """Return the layers of each stage whose slowest stage takes as little time as possible.

        With ``n_encoder_stages``, encoders have these first stages, and the language model the
        others. Each then needs a layer a stage.
        """
        items: list[float] = []
        for module in self._modules:
            own = list(module.seconds.layers)
            _, embedding, head = module.seconds.parts
            own[0] += embedding
            own[-1] += head * (module is not self._modules[-1])
            items += own
        n = len(items) - self._shards[-1].model.n_layers if n_encoder_stages else 0
        first = balanced_split(items[:n], n_encoder_stages) if n_encoder_stages else []
        *sizes, last = balanced_split([*items[n:], head], n_stages - n_encoder_stages)
        return (*first, *sizes, last - 1)  # the head may be alone

    def __call__(self, sizes: Sequence[int]) -> Costs:
        """Return the costs of stages with these many layers of the chain."""
        n, parts = len(sizes), []
        counts = [shard.model.n_layers for shard in self._shards]
        for k, (first, own) in enumerate(split_chain(counts, sizes)):
            key = k, tuple(own)
            if key not in self._kept:
                self._kept[key] = self._modules[k](own)
            parts.append((self._kept[key], first, len(own)))

        def table(name: str) -> Floats:
            return np.array([_padded(costs, name, first, m, n) for costs, first, m in parts])

        values: dict[str, Any] = {}
        for name, row in STAGE_ROWS.items():
            if all(getattr(costs, name) == row.default for costs, _, _ in parts):
                continue
            rows = table(name)
            if name == "output_bytes":
                column = _sent_bytes(rows, parts)
            elif name == "output_seconds":
                column = rows.max(axis=0)
            elif name.endswith("_workspace_bytes"):
                kept = table("activation_bytes")
                later = kept[::-1].cumsum(axis=0)[::-1] - kept
                column = (rows - later).max(axis=0)
            elif name == "reduced_share":
                weights = table("parameter_bytes") - table("expert_parameter_bytes")
                column = (rows * weights).sum(axis=0) / weights.sum(axis=0)
            else:
                column = rows.sum(axis=0)
            values[name] = tuple(column.tolist())
        main, first, _ = parts[-1]
        tied = [(first, n - 1)] if main.tied_bytes else ()
        return replace(main, **values, segments=None, tied=tied, workload=self._work)


def _padded(costs: Costs, name: str, first: int, n_own: int, n: int) -> Floats:
    """Return a field of a module's stages in all ``n`` stages of the chain, 0 beside its own."""
    column = np.zeros(n)
    if getattr(costs, name) is not None or STAGE_ROWS[name].substitutes:
        column[first : first + n_own] = costs.per_stage(name, n_own)
    return column


def _sent_bytes(own: Floats, parts: Sequence[tuple[Costs, int, int]]) -> Floats:
    """Return the bytes of each stage's output: those of all encoders, before the language model."""
    sent: Floats = own.sum(axis=0)
    main = parts[-1][1]
    sent[main:] = own[-1, main:]
    for row, (_, first, n_own) in zip(own, parts[:-1], strict=False):
        last = first + n_own - 1
        sent[last + 1 : main] += row[last]
    return sent
