"""Kernels of attention between its linear maps: rotary positions, and the attention core.

Letters are those of `pipesim.models.kernels.layer_kernels`. A GPU of a context-parallel group
computes the scores of its own tokens, with keys of the whole sequence of s tokens; or, with
``"all_to_all"``, those of all tokens and its part of the heads, which are as many.

The core has 2 products forward, of depth d and s, and 4 backward. Fused (FlashAttention) it is one
kernel of depth d, which computes the half of the scores that the causal mask leaves, and 5 products
backward, since it computes the scores again (Dao, arXiv 2307.08691, section 4.1): 2.5 times as many
FLOPs. With latent attention, 3 of the 5 have the depth of queries and 2 that of values. Unfused,
scores are written and read by softmax and dropout, and none are left out.

Latent attention rotates a part of each query in place, and one kernel makes keys and values of the
output of ``kv up`` (``apply_rope_fusion`` of Megatron-LM, ``fused_mla_yarn_rope_apply.py``).

A fused core has a tile for each head and `_TILE` queries. The causal mask makes the last tile twice
as long as the mean; see `pipesim.GPU`. In a ring one step of each GPU has the mask.
"""

from __future__ import annotations

from pipesim.models.kernels.kernel import Kernel
from pipesim.models.kernels.kernel_sizes import KernelSizes, OperationKernels
from pipesim.models.shard_sizes import MASK_BYTES

#: Queries of a tile of a fused core, as in FlashAttention.
_TILE = 128
#: Share of the rate that fused cores reach whose queries are deeper than values, as in latent
#: attention: those of 192 and 128 elements, on A100 (0.82) and on B200 (0.80); SimuMax, see
#: `pipesim.models.data_sheets`.
_LATENT_SHARE = 0.8


def rotary_kernels(sizes: KernelSizes) -> list[Kernel]:
    """Return the kernels that rotate queries and keys, or their gradients, if positions do."""
    model, t = sizes.shard.model, sizes.shard.tensor_parallel
    if model.kv_rank:
        return _latent_rotary(sizes)
    if model.learned_positions:
        return []
    rotated = (model.query_size + model.kv_size) / t
    nbytes = 2 * model.bytes_per_activation * rotated * sizes.tokens
    return [Kernel("rotary positions", nbytes=nbytes, n_kernels=2)]


def _latent_rotary(sizes: KernelSizes) -> list[Kernel]:
    """Return the kernels that rotate a part of the queries, and make keys and values."""
    model, t = sizes.shard.model, sizes.shard.tensor_parallel
    e, kernels = model.bytes_per_activation, []
    if model.rope_head_size:
        rotated = model.rope_head_size * model.n_heads / t
        kernels.append(Kernel("rotary positions", nbytes=2 * e * rotated * sizes.tokens))
    width = (model.n_heads * model.head_size + model.value_size) / t
    moved = width + model.rope_head_size + (model.kv_size + model.value_size) / t
    return [*kernels, Kernel("keys and values", nbytes=e * moved * sizes.tokens)]


def latent_norms(sizes: KernelSizes, passes: int) -> list[Kernel]:
    """Return the norms of latent vectors, with reads and writes of ``passes`` tensors each."""
    model = sizes.shard.model
    width = model.query_rank + model.kv_rank
    if not width:
        return []
    n_norms = 1 + (model.query_rank > 0)
    nbytes = passes * model.bytes_per_activation * width * sizes.tokens
    return [Kernel("latent norm", nbytes=nbytes, n_kernels=n_norms)]


def attention_core(sizes: KernelSizes) -> OperationKernels:
    """Return the kernels of the attention core, which has no weights."""
    shard, tokens = sizes.shard, sizes.tokens
    model, t = shard.model, shard.tensor_parallel
    q, k = model.query_size, model.kv_size
    s = model.sequence_length * shard.attended_columns
    e, head = model.bytes_per_activation, q / model.n_heads
    if shard.flash_attention:
        return _fused_core(sizes)
    out, value_head = model.core_output_size, model.core_output_size / model.n_heads
    scores = model.n_heads / t * s * tokens
    flops, context_flops = 2 * scores * head, 2 * scores * value_head
    # Each of the two products reads or writes the scores, and two tensors of the tokens.
    query_key = Kernel("scores", flops, e * (scores + (q + k) / t * tokens), head)
    values_moved = e * (scores + (out + model.value_size) / t * tokens)
    context = Kernel("context", context_flops, values_moved, s)
    softmax = Kernel("softmax", nbytes=2 * e * scores)
    softmax_back = Kernel("softmax", nbytes=3 * e * scores)
    dropout = [Kernel("dropout of scores", nbytes=(2 * e + MASK_BYTES) * scores)] * model.dropout
    gradients = query_key._replace(name="scores input", n_kernels=2, flops=2 * flops, depth=s)
    # Gradients of the probabilities sum over a head, those of the values over the tokens.
    probabilities, values = (
        context._replace(name=f"context {name}", depth=depth)
        for name, depth in (("probabilities", value_head), ("values", s))
    )
    return OperationKernels(
        (query_key, softmax, *dropout, context),
        (
            probabilities, values, *dropout, softmax_back,
            gradients._replace(nbytes=2 * gradients.nbytes),
        ),
        (),
    )  # fmt: skip


def _fused_core(sizes: KernelSizes) -> OperationKernels:
    """Return the two fused kernels of the core, with one kernel for each step of a ring."""
    shard, tokens = sizes.shard, sizes.tokens
    model, t = shard.model, shard.tensor_parallel
    q, k, out, w = model.query_size, model.kv_size, model.core_output_size, model.value_size
    steps = shard.context_steps
    flops = tokens * model.sequence_length * (q + out) / t * shard.causal_share
    flops *= shard.attended
    # Queries, keys, values, output; a ring reads the keys and values of each GPU.
    read = (k + w) * steps * shard.attended_columns
    ends = model.bytes_per_activation * (q + out + read) / t * tokens
    depth = (q + out) / (2 * model.n_heads)
    ratio = (3 * q + 2 * out) / (q + out)
    share = 1.0 if q == out else _LATENT_SHARE
    tiles = model.n_heads / t * tokens / _TILE * steps * max(1.0, shard.attended)
    forward = Kernel(
        "attention", flops, ends, depth, steps, is_attention=True, share=share, tiles=tiles
    )
    backward = forward._replace(flops=ratio * flops, nbytes=2 * ends, n_kernels=2 * steps)
    return OperationKernels((forward,), (backward,), ())
