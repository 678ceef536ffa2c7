"""Sizes of a shard and of its stages on which kernels, bytes and collectives agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pipesim.costs.layer_split import StageModules

if TYPE_CHECKING:
    from pipesim.models.shard import Shard
    from pipesim.models.transformer import Transformer


#: Bytes of a number in 32 bits: a logit of the loss (arXiv 2205.05198, section 4), a row's sum of
#: exponentials (arXiv 2307.08691, section 3.1).
FP32_BYTES = 4
#: Bytes of an element of a dropout mask (arXiv 2205.05198, section 4).
MASK_BYTES = 1


#: Elements of 16 bytes in 16 bits, of which sizes of products must be multiples for tensor cores
#: (NVIDIA, "Matrix Multiplication Background User's Guide").
ALIGNED = 8


class Matrix(NamedTuple):
    """Elements a token that a linear map takes and gives, on one GPU."""

    inputs: float  # columns of its weight
    outputs: float  # rows of its weight


def layer_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of a dense layer in order; ``"up"`` has the gate of a gated MLP."""
    model = shard.model
    f = model.ffn_size / shard.tensor_parallel
    mlp = {
        "up": Matrix(model.hidden_size, model.mlp_inputs * f),
        "down": Matrix(f, model.hidden_size),
    }
    return {**attention_matrices(shard), **mlp}


def recomputes(shard: Shard, module: str) -> bool:
    """Return whether a shard's selective recompute has a module of `Framework`."""
    return shard.recompute == "selective" and module in shard.framework.recompute_modules


def attention_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of attention in order.

    With latent attention, each GPU has whole maps to latent vectors, and its heads of the others
    (`pipesim.models.model_sizes`).
    """
    model, t = shard.model, shard.tensor_parallel
    h, q = model.hidden_size, model.query_size / t
    if not model.kv_rank:
        return {
            "qkv": Matrix(h, (model.query_size + 2 * model.kv_size) / t),
            "projection": Matrix(q, h),
        }
    rank, kv_rank = model.query_rank, model.kv_rank
    queries = {"queries": Matrix(h, q)}
    if rank:
        queries = {"query down": Matrix(h, rank), "query up": Matrix(rank, q)}
    keys = model.n_heads * model.head_size + model.value_size
    return {
        **queries,
        "kv down": Matrix(h, kv_rank + model.rope_head_size),
        "kv up": Matrix(kv_rank, keys / t),
        "projection": Matrix(model.value_size / t, h),
    }


def kv_bytes(shard: Shard) -> float:
    """Return the bytes of a layer's keys and values of the tokens and heads of one GPU."""
    model = shard.model
    width = (model.kv_size + model.value_size) / shard.tensor_parallel
    return model.bytes_per_activation * width * shard.tokens


def routed_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of one expert on one GPU."""
    model, parts = shard.model, shard.expert_tensor_size
    h, u = model.hidden_size, model.expert_ffn_size / parts
    return {"experts up": Matrix(h, model.mlp_inputs * u), "experts down": Matrix(u, h)}


def shared_matrices(shard: Shard) -> dict[str, Matrix]:
    """Return the linear maps of all shared experts, which are one MLP; none without."""
    model, t = shard.model, shard.tensor_parallel
    h, u = model.hidden_size, model.shared_experts * model.expert_ffn_size / t
    if not u:
        return {}
    return {"shared up": Matrix(h, model.mlp_inputs * u), "shared down": Matrix(u, h)}


def linear_elements(shard: Shard) -> tuple[float, float]:
    """Return the parameters of linear maps of a layer without experts, and with, on one GPU.

    Biases and the router are not among them.
    """

    def total(maps: Mapping[str, Matrix], n: int = 1) -> float:
        return n * sum(matrix.inputs * matrix.outputs for matrix in maps.values())

    experts = total({**attention_matrices(shard), **shared_matrices(shard)})
    return total(layer_matrices(shard)), experts + total(
        routed_matrices(shard), shard.local_experts
    )


def fuses_weight_grads(shard: Shard) -> bool:
    """Return whether products of weight gradients add to main gradients.

    That is ``gradient_accumulation_fusion`` of Megatron-LM. Otherwise a product writes a gradient
    of its own, and another kernel adds it to the sum.
    """
    model, fused = shard.model, shard.framework.fused_sums
    is_wider = model.bytes_per_gradient > model.bytes_per_parameter
    return fused == "all" or (fused == "wider" and is_wider)


class StageKey(NamedTuple):
    """Modules of a stage on which its values depend."""

    n_dense: int  # layers without experts, those of MTP included
    n_experts: int  # layers with experts, those of MTP included
    is_first: bool  # has the embedding
    losses: int  # each with an LM head, whose matrix they share
    mtp: int = 0  # layers of multi-token prediction
    outputs: int = 1  # hidden states of its output

    def total(
        self,
        layer: float,
        first: float = 0.0,
        loss: float = 0.0,
        experts: float = 0.0,
        mtp: float = 0.0,
    ) -> float:
        """Return the sum over the modules, of which each has the given value.

        ``mtp`` is the value of what comes before the layer of one of ``mtp_layers``.
        """
        total = self.n_dense * layer + first * self.is_first + loss * self.losses
        if self.mtp:
            total += mtp * self.mtp
        return total + self.n_experts * experts if self.n_experts else total


def stage_modules(shard: Shard, n_stages: int) -> tuple[StageModules, ...]:
    """Return the modules behind the layers of each stage: of the layout, or all on the last."""
    mtp = shard.model.mtp_layers
    last = StageModules(mtp, 1 + mtp)
    return shard.modules or (*(StageModules(0, 0),) * (n_stages - 1), last)


def stage_keys(shard: Shard, sizes: Sequence[int]) -> tuple[StageKey, ...]:
    """Return the modules of each stage, given its layers; the model's first ones are dense."""
    model = shard.model
    modules = stage_modules(shard, len(sizes))
    return _stage_keys(tuple(sizes), modules, model.n_layers, model.n_expert_layers)


@lru_cache(maxsize=256)
def _stage_keys(
    sizes: tuple[int, ...], modules: tuple[StageModules, ...], n_layers: int, n_expert_layers: int
) -> tuple[StageKey, ...]:
    keys, dense = list[StageKey](), n_layers - n_expert_layers
    for stage, (n, (mtp, losses, outputs)) in enumerate(zip(sizes, modules, strict=True)):
        n_dense = min(n, dense)
        dense -= n_dense
        n_experts = n - n_dense
        if mtp:
            n_dense += mtp * (n_expert_layers == 0)
            n_experts += mtp * (n_expert_layers > 0)
        keys.append(StageKey(n_dense, n_experts, stage == 0, losses, mtp, outputs))
    return tuple(keys)


def sent_states(shard: Shard, sizes: Sequence[int]) -> list[int]:
    """Return the number of hidden states in the output of each stage."""
    return [stage.outputs for stage in stage_modules(shard, len(sizes))]


def per_stage(
    shard: Shard,
    sizes: Sequence[int],
    layer: float,
    first: float = 0.0,
    loss: float = 0.0,
    *,
    experts: float = 0.0,
    mtp: float = 0.0,
) -> tuple[float, ...]:
    """Return the value of each stage: the sum over its modules; see `StageKey.total`.

    ``layer`` is the value of a dense layer, and ``experts`` that of a layer with experts.
    """
    return tuple(key.total(layer, first, loss, experts, mtp) for key in stage_keys(shard, sizes))


def each_layer(model: Transformer, layer: float, experts: float) -> list[float]:
    """Return the value of each layer of a model, those with experts last."""
    n_dense = model.n_layers - model.n_expert_layers
    return [layer] * n_dense + [experts] * model.n_expert_layers


def mean_layer(model: Transformer, layer: float, experts: float) -> float:
    """Return the mean of a value over the layers of a model."""
    if not model.n_expert_layers:
        return layer
    n_dense = model.n_layers - model.n_expert_layers
    return (n_dense * layer + model.n_expert_layers * experts) / model.n_layers


# Bytes of experts, and shares of gradients that a GPU reduces, as fields of `pipesim.Costs`.
#
# The c context-parallel groups of a device have copies of its parameters, and sum their gradients:
# first within the device, after which each GPU has the sum of a c-th, and then over the replicas.
# A ring over all GPUs takes as long: with n replicas ``2(c-1)/c + 2(n-1)/(nc) = 2(nc-1)/(nc)``
# times bytes over bandwidth.
#
# Experts are spread over x GPUs, those of g = x/c replicas (with experts that t GPUs share). Their
# gradients are summed over every g-th replica only ("expert data parallel" of Megatron-Core). If x
# divides c, each device has all experts, and c/x copies of them.


def vocabulary_parameters(shard: Shard) -> float:
    """Return the parameters on one GPU of the matrix of the embedding, or of the LM head."""
    return shard.model.vocabulary_size * shard.model.hidden_size / shard.tensor_parallel


def dense_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of each stage on one GPU without those of experts.

    Losses of a stage share its LM head. Beside the first stage, one with MTP has a copy of the
    embedding, and so has one with a tied head.
    """
    model, head = shard.model, shard.head_parameters
    matrix = vocabulary_parameters(shard)
    parts = (
        shard.layer_parameters, shard.embedding_parameters, 0.0, shard.expert_layer_parameters,
        shard.mtp_input_parameters if model.mtp_layers else 0.0,
    )  # fmt: skip

    def total(key: StageKey) -> float:
        uses = key.mtp or (key.losses and model.tied_embeddings)
        copied = matrix if uses and not key.is_first else 0.0
        return key.total(*parts) + head * (key.losses > 0) + copied

    return tuple(map(total, stage_keys(shard, sizes)))


def routed_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of the experts of each stage on one GPU."""
    return per_stage(shard, sizes, 0.0, experts=shard.routed_parameters)


def stage_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters of each stage on one GPU."""
    dense, routed = dense_parameters(shard, sizes), routed_parameters(shard, sizes)
    return tuple(a + b for a, b in zip(dense, routed, strict=True))


def optimizer_parameters(shard: Shard, sizes: Sequence[int]) -> tuple[float, ...]:
    """Return the parameters that one GPU steps of each stage, if replicas do not share them.

    Those that it has, unless ``context_shards_optimizer`` divides copies among GPUs.
    """
    if shard.n_copies == 1 or not shard.context_shards_optimizer:
        return stage_parameters(shard, sizes)
    dense, routed = dense_parameters(shard, sizes), routed_parameters(shard, sizes)
    c, copies = shard.n_copies, max(1.0, shard.expert_copies)
    return tuple(a / c + b / copies for a, b in zip(dense, routed, strict=True))


def optimizer_bytes(shard: Shard) -> float:
    """Return the bytes of the optimizer's state a parameter, with the framework's copy of it."""
    model = shard.model
    spared = FP32_BYTES - shard.framework.master_bytes
    if model.bytes_per_parameter >= FP32_BYTES:
        spared = 0.0
    return max(0.0, model.optimizer_bytes_per_parameter - spared)


def exchanged_gradients(shard: Shard) -> dict[str, Any]:
    """Return the fields of `pipesim.Costs` about exchanges between replicas; none by default."""
    framework, fields = shard.framework, dict[str, Any]()
    if framework.exchange_element_bytes:
        ratio = framework.exchange_element_bytes / shard.model.bytes_per_gradient
        fields["exchanged_gradients"] = ratio
    if framework.gradient_exchange != "reduce_scatter":
        fields["gradient_exchange"] = framework.gradient_exchange
    if framework.overlap_cost:
        fields["overlap_cost"] = framework.overlap_cost
    return fields


def copied_bytes(shard: Shard, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `pipesim.Costs` about copies of parameters; none if there are none."""
    model, c, g = shard.model, shard.n_copies, shard.expert_replicas
    fields: dict[str, Any] = {}
    routed = routed_parameters(shard, sizes)
    if g > 1:
        # With g > 1 a device has no two copies of an expert, so that all of its bytes are stepped.
        for name, nbytes in (
            ("parameter", model.bytes_per_parameter),
            ("gradient", model.bytes_per_gradient),
            ("optimizer", optimizer_bytes(shard)),
        ):
            fields[f"expert_{name}_bytes"] = tuple(n * nbytes for n in routed)
    if c > 1:
        dense, copies = dense_parameters(shard, sizes), shard.expert_copies
        if g > 1:
            fields["reduced_share"] = (1 / c,) * len(sizes)
        else:
            fields["reduced_share"] = tuple(
                (a / c + b / copies) / (a + b) if a + b else 1 / c
                for a, b in zip(dense, routed, strict=True)
            )
    return fields
