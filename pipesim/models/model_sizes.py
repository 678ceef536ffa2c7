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
from typing import TYPE_CHECKING, Annotated

from pipesim.errors import ArgumentError, check_count, number, value_text
from pipesim.utils.checks import LARGEST_AMOUNT, Range

if TYPE_CHECKING:
    from pipesim.models.transformer import Transformer


#: Sizes that only models with experts have, and that only models with latent attention have.
_OF_EXPERTS = (
    "experts_per_token", "shared_experts", "expert_ffn_size", "n_dense_layers", "expert_groups",
    "groups_per_token",
)  # fmt: skip
_OF_LATENT = ("query_rank", "rope_head_size", "value_head_size")
#: Sizes that only some models have; 0 for others.
SIZES_OF_SOME = ("n_experts", *_OF_EXPERTS, "kv_rank", *_OF_LATENT, "mtp_layers", "bidirectional")


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


def mtp_matrix(model: Transformer) -> int:
    """Return the parameters of the map before the layer of one of ``mtp_layers``: 2hh."""
    return 2 * model.hidden_size**2


def end_flops(model: Transformer, microbatch_size: int) -> int:
    """Return the FLOPs behind the last layer, forward: LM heads, and maps of ``mtp_layers``."""
    head = model.head_flops(microbatch_size)
    return head + model.mtp_layers * (head + mtp_flops(model, microbatch_size))


def mtp_flops(model: Transformer, microbatch_size: int) -> int:
    """Return the FLOPs of the map before the layer of one of ``mtp_layers``, forward."""
    return 2 * microbatch_size * model.sequence_length * mtp_matrix(model)


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


#: Sizes up to which no product in a formula overflows.
_LARGEST = 10**15
#: A size of at least 1; and one that may be 0.
Size = Annotated[int, Range(1, _LARGEST)]
OptionalSize = Annotated[int, Range(0, _LARGEST)]


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``, small enough that no formula overflows."""
    size = check_count(name, value, minimum)
    if size > _LARGEST:
        raise ArgumentError(f"{name} must be at most {_LARGEST:g}, got {value_text(size)}")
    return size


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
        raise ArgumentError(f"{name} must be finite {unit} {least}, got {value_text(value)}")
    if result > LARGEST_AMOUNT:
        raise ArgumentError(
            f"{name} must be at most {LARGEST_AMOUNT:g} {unit}, got {value_text(value)}"
        )
    return result
