"""Parameters of attention and experts of a transformer, and checks of sizes and parallelism.

Letters are those of `pipesim.models.transformer`. Latent attention (MLA) has a heads with d
elements without positions, r with rotary positions and w of values. It makes queries from a latent
vector of c elements, and keys and values from one of l elements (DeepSeek-AI, "DeepSeek-V2",
arXiv 2405.04434, section 2.1; parameters in its appendix B):

=============  ==================================================
map            parameters
=============  ==================================================
query down     hc
query up       ca(d + r); without a latent vector ha(d + r)
kv down        h(l + r)
kv up          la(d + w)
projection     awh
=============  ==================================================
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal, get_args

from pipesim.errors import ArgumentError, check_count, check_flag, check_name, number

if TYPE_CHECKING:
    from pipesim.models.shard import Shard
    from pipesim.models.transformer import Transformer


#: Sizes that only models with experts have, and that only models with latent attention have.
_OF_EXPERTS = (
    "experts_per_token", "shared_experts", "expert_ffn_size", "n_dense_layers", "expert_groups",
    "groups_per_token",
)  # fmt: skip
_OF_LATENT = ("query_rank", "rope_head_size", "value_head_size")
#: Sizes that only some models have; 0 for others.
SIZES_OF_SOME = ("n_experts", *_OF_EXPERTS, "kv_rank", *_OF_LATENT)


def attention_matrices(model: Transformer) -> int:
    """Return the parameters of attention's linear maps: h(q + 2k) + qh, or those of MLA above."""
    h, q = model.hidden_size, model.query_size
    if not model.kv_rank:
        return h * (2 * q + 2 * model.kv_size)
    rank, kv_rank, rope = model.query_rank, model.kv_rank, model.rope_head_size
    queries = rank * (h + q) if rank else h * q
    key_size = model.n_heads * model.head_size
    keys = h * (kv_rank + rope) + kv_rank * (key_size + model.value_size)
    return queries + keys + model.value_size * h


def attention_biases(model: Transformer) -> int:
    """Return the parameters of biases of attention: h + q + 2k, or none with latent attention."""
    if model.kv_rank:
        return 0
    return (model.hidden_size + model.query_size + 2 * model.kv_size) * model.biases


def latent_norms(model: Transformer) -> int:
    """Return the parameters of the norms of latent vectors: c + l; 0 without."""
    return model.query_rank + model.kv_rank


def expert_matrix(model: Transformer) -> int:
    """Return the parameters of an expert's linear maps: (g + 1)hu."""
    return (model.mlp_inputs + 1) * model.hidden_size * model.expert_ffn_size


def active_matrices(model: Transformer) -> int:
    """Return the parameters of linear maps that a token uses in a layer with experts."""
    experts = (model.experts_per_token + model.shared_experts) * expert_matrix(model)
    return attention_matrices(model) + model.hidden_size * model.n_experts + experts


def check_experts(model: Transformer) -> None:
    """Check that sizes of experts suit each other."""
    n, k = model.n_experts, model.experts_per_token
    if not n:
        for name in _OF_EXPERTS:
            if getattr(model, name):
                raise ArgumentError(
                    f"{name}={getattr(model, name)}, but n_experts=0: the model has no experts; "
                    f"give n_experts, or leave {name} out"
                )
        return
    if not 1 <= k <= n:
        raise ArgumentError(
            f"experts_per_token must be 1 to n_experts={n}, got {k}: each token goes to as many "
            "different experts"
        )
    if model.n_dense_layers > model.n_layers:
        raise ArgumentError(
            f"n_dense_layers={model.n_dense_layers} must be at most n_layers={model.n_layers}"
        )
    _check_groups(model)


def _check_groups(model: Transformer) -> None:
    n, k = model.n_experts, model.experts_per_token
    groups, picked = model.expert_groups, model.groups_per_token
    if (groups == 0) != (picked == 0):
        raise ArgumentError(
            f"expert_groups={groups} with groups_per_token={picked}; give both, such as 8 groups, "
            "of which a token goes to experts of 4, or leave both out"
        )
    if not groups:
        return
    if n % groups:
        raise ArgumentError(f"expert_groups={groups} does not divide n_experts={n}")
    if picked > groups:
        raise ArgumentError(f"groups_per_token={picked} must be at most expert_groups={groups}")
    if k > picked * (n // groups):
        raise ArgumentError(
            f"experts_per_token={k} exceeds the {picked * (n // groups)} experts of "
            f"groups_per_token={picked} groups; give more groups or fewer experts a token"
        )


def check_latent_attention(model: Transformer) -> None:
    """Check that sizes of latent attention suit each other."""
    if not model.kv_rank:
        for name in _OF_LATENT:
            if getattr(model, name):
                raise ArgumentError(
                    f"{name}={getattr(model, name)}, but kv_rank=0: the model has no latent "
                    f"attention; give kv_rank, or leave {name} out"
                )
        return
    if not model.head_size:
        raise ArgumentError(
            "head_size is missing; latent attention (kv_rank) needs the elements of a head "
            "without positions, such as head_size=128"
        )
    if model.n_kv_heads != model.n_heads:
        raise ArgumentError(
            f"n_kv_heads={model.n_kv_heads} with kv_rank={model.kv_rank}: latent attention has as "
            f"many heads of keys as of queries, {model.n_heads}; leave n_kv_heads out"
        )
    if model.learned_positions and model.rope_head_size:
        raise ArgumentError(
            f"rope_head_size={model.rope_head_size}, but learned_positions=True; give "
            "learned_positions=False"
        )


#: Sizes, and bytes or FLOP/s, up to which no product in a formula overflows.
_LARGEST, _LARGEST_VALUE = 10**15, 1e100


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``, small enough that no formula overflows."""
    size = check_count(name, value, minimum)
    if size > _LARGEST:
        raise ArgumentError(f"{name} must be at most {_LARGEST:g}, got {_shortened(size)}")
    return size


def _shortened(value: int) -> str:
    return f"{value}" if abs(value) < 10**30 else "a number of more than 30 digits"


def _text(value: object) -> str:
    return _shortened(value) if isinstance(value, int) else f"{value!r:.60}"


def checked_documents(shard: Shard) -> tuple[int, ...]:
    """Return the tokens of each document packed into the one sequence of a shard, if any."""
    documents, length = shard.documents, shard.model.sequence_length
    if isinstance(documents, tuple) and not documents:
        return ()
    if not isinstance(documents, (tuple, list)):
        raise ArgumentError(
            f"documents must be the tokens of each document, such as (512, 1536), got "
            f"{documents!r:.60}"
        )
    sizes = tuple(check_size(f"documents[{k}]", size) for k, size in enumerate(documents))
    if sum(sizes) != length or shard.microbatch_size != 1:
        raise ArgumentError(
            f"documents have {sum(sizes)} tokens, but a micro-batch is {shard.microbatch_size} "
            f"sequences of {length}; pack one sequence, with as many tokens"
        )
    return sizes


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Check that ``value`` divides ``whole``."""
    if whole % value:
        raise ArgumentError(
            f"{name}={value} does not divide {whole_name}={whole}; choose {name} such that it does"
        )


def checked_value(name: str, value: object, unit: str, *, above_zero: bool = False) -> float:
    """Return ``value`` as a float, checked to be finite and >= 0, or > 0 if ``above_zero``."""
    result = number(value)
    if result is None or not 0 <= result < inf or (result == 0 and above_zero):
        least = "> 0" if above_zero else ">= 0"
        raise ArgumentError(f"{name} must be finite {unit} {least}, got {_text(value)}")
    if result > _LARGEST_VALUE:
        raise ArgumentError(f"{name} must be at most {_LARGEST_VALUE:g} {unit}, got {_text(value)}")
    return result


ContextExchange = Literal["ring", "all_gather", "all_to_all"]


def check_context(shard: Shard) -> None:
    """Check that context parallelism suits the sizes that it splits."""
    c, length = shard.context_parallel, shard.model.sequence_length
    check_name("context_exchange", shard.context_exchange, get_args(ContextExchange))
    check_flag("context_balance", shard.context_balance)
    check_flag("context_shards_optimizer", shard.context_shards_optimizer)
    if c == 1:
        return
    splits_heads = shard.context_exchange == "all_to_all"
    if length % c or (shard.context_balance and not splits_heads and length % (2 * c)):
        parts = f"{c} parts" if length % c else f"{2 * c} parts, two a GPU (context_balance=True)"
        raise ArgumentError(
            f"context_parallel={c} splits a sequence into {parts}, which do not divide "
            f"sequence_length={length}; choose context_parallel such that they do"
            + ("" if length % c else ", or give context_balance=False")
        )
    if shard.sequence_parallel:
        check_divides(
            "tensor_parallel", shard.tensor_parallel, "sequence_length / context_parallel",
            length // c,
        )  # fmt: skip
    if not splits_heads:
        return
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(shard.model, name)
        if heads % shard.n_gpus:
            raise ArgumentError(
                f'context_exchange="all_to_all" splits heads among the {shard.n_gpus} GPUs of a '
                f"device (tensor_parallel x context_parallel), which do not divide {name}={heads}; "
                'give fewer, or context_exchange="ring"'
            )


ExpertExchange = Literal["direct", "hierarchical"]


def check_expert_parallel(shard: Shard) -> None:
    """Check that expert parallelism suits the sizes that it splits."""
    model, x, t = shard.model, shard.expert_parallel, shard.tensor_parallel
    parts = check_size("expert_tensor_parallel", shard.expert_tensor_parallel, 0)
    object.__setattr__(shard, "expert_tensor_parallel", parts)
    check_name("expert_exchange", shard.expert_exchange, get_args(ExpertExchange))
    nbytes = checked_value("dispatch_element_bytes", shard.dispatch_element_bytes, "bytes")
    object.__setattr__(shard, "dispatch_element_bytes", nbytes)
    if not model.n_experts:
        _check_unused(shard)
        return
    if x > model.n_experts:
        raise ArgumentError(
            f"expert_parallel={x} exceeds n_experts={model.n_experts}: each GPU has at least one "
            f"expert; give at most {model.n_experts}"
        )
    check_divides("expert_parallel", x, "n_experts", model.n_experts)
    if parts:
        check_divides("expert_tensor_parallel", parts, "tensor_parallel", t)
    check_divides(
        "expert_tensor_parallel" if parts else "tensor_parallel", parts or t, "expert_ffn_size",
        model.expert_ffn_size,
    )  # fmt: skip
    if model.shared_experts:
        size = model.shared_experts * model.expert_ffn_size
        check_divides("tensor_parallel", t, "shared_experts x expert_ffn_size", size)
    if parts not in (0, t) and not shard.sequence_parallel:
        raise ArgumentError(
            f"expert_tensor_parallel={parts} with tensor_parallel={t} needs "
            "sequence_parallel=True: otherwise several GPUs would send the same tokens to experts"
        )
    used, n_gpus = x * (parts or t), shard.n_gpus
    if used % n_gpus and n_gpus % used:
        raise ArgumentError(
            f"expert_parallel={x} and the {n_gpus} GPUs of a device (tensor_parallel x "
            "context_parallel) must be multiples of each other, so that groups of experts fill "
            "whole replicas; choose another expert_parallel"
        )
    shard.routing.shares(model.n_experts, model.experts_per_token)  # refuses other counts


def _check_unused(shard: Shard) -> None:
    arguments = {
        "expert_parallel": (shard.expert_parallel, 1),
        "expert_tensor_parallel": (shard.expert_tensor_parallel, 0),
        "routing": (shard.routing.to_dict(), {"distribution": "uniform"}),
        "expert_exchange": (shard.expert_exchange, "direct"),
        "dispatch_element_bytes": (shard.dispatch_element_bytes, 0),
    }
    for name, (value, default) in arguments.items():
        if value != default:
            raise ArgumentError(
                f"{name}={value}, but the model has no experts; give n_experts, or leave {name} out"
            )
