"""Kernels of a mixture of experts on one GPU: router, permutation, grouped products, sum.

Letters are those of `pipesim.models.transformer`, with e bytes an element. A GPU has T tokens
before the exchange (T/t with sequence parallelism), and R tokens for its E/x experts after it,
where x is the expert-parallel size: R = Tk on average, times the imbalance of the busiest GPU.
Transformer Engine runs one product for each expert, several at a time. Kernels are those of
Megatron-LM with it (``--moe-grouped-gemm --moe-permute-fusion``,
``megatron/core/transformer/moe``):

===============  =================================================================
kernel           work
===============  =================================================================
router           product of T, E, h
top-k            reads and writes of T times E scores in 32 bits
permutation      reads the tokens once, and writes a copy for each expert of a token
expert sort      tokens of each sender, by expert; and back
experts up       grouped product of R, gu, h, with the weights of all E/x experts
experts down     grouped product of R, h, u
unpermutation    reads the results of all experts of a token, and writes their sum
shared up, down  products of an MLP of inner size mu
===============  =================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipesim.models.kernels.kernel import Kernel
from pipesim.models.kernels.kernel_sizes import KernelSizes, OperationKernels
from pipesim.models.shard_sizes import FP32_BYTES, Matrix, routed_matrices, shared_matrices

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


#: Kernels that read and write the scores, forward and backward: softmax, selection of groups and of
#: experts, masks, capacity, normalization, auxiliary loss; about as many as in ``moe_utils.py``.
_SCORE_KERNELS = (30, 15)
#: Share of the bandwidth of element-wise kernels that copies of tokens in another order reach, each
#: row in a place of its own: 0.54 of nominal on B200 for Transformer Engine's permutation (and 0.2
#: on A100), SimuMax, see `pipesim.models.data_sheets`; 0.85 is that of element-wise kernels.
_PERMUTATION_SHARE = 0.64


class ExpertKernels(NamedTuple):
    """Kernels before the exchange of tokens, between both exchanges, and after."""

    before: OperationKernels
    experts: OperationKernels
    after: OperationKernels


def expert_kernels(sizes: KernelSizes) -> ExpertKernels:
    """Return the kernels of a layer's second half, from its norm to the sum with the residual."""
    shared = _shared(sizes)
    router = _router(sizes)
    before = OperationKernels(
        router.forward + shared.forward,
        shared.input_grad + router.input_grad,
        shared.weight_grad + router.weight_grad,
    )
    return ExpertKernels(
        before, _experts(sizes), _combination(sizes, has_shared=bool(shared.forward))
    )


def _router(sizes: KernelSizes) -> OperationKernels:
    """Return router and permutation."""
    shard, model = sizes.shard, sizes.shard.model
    tokens, h, e = shard.expert_tokens, model.hidden_size, model.bytes_per_activation
    matrix = Matrix(h, model.n_experts)
    scores = 2 * FP32_BYTES * tokens * model.n_experts
    top_k, top_k_back = (Kernel("top-k", nbytes=n * scores, n_kernels=n) for n in _SCORE_KERNELS)
    moved = e * h * tokens * (1 + model.experts_per_token)
    permutation = Kernel("permutation", nbytes=moved, share=_PERMUTATION_SHARE)
    branches = 1 + (model.shared_experts > 0)
    added = Kernel("router residual", nbytes=3 * e * h * tokens * branches, n_kernels=branches)
    return OperationKernels(
        (sizes.forward_product("router", matrix, tokens), top_k, permutation),
        (permutation, top_k_back, sizes.input_grad("router", matrix, tokens), added),
        sizes.weight_grad("router", matrix, bias=False, rows=tokens),
    )


def _shared(sizes: KernelSizes) -> OperationKernels:
    """Return the shared experts, which are one MLP."""
    maps = shared_matrices(sizes.shard)
    if not maps:
        return OperationKernels((), (), ())
    up, down = maps.values()
    e, width, u = sizes.shard.model.bytes_per_activation, up.outputs, down.inputs
    return OperationKernels(
        (
            sizes.forward_product("shared up", up),
            Kernel("shared activation", nbytes=e * (width + u) * sizes.tokens),
            sizes.forward_product("shared down", down),
        ),
        (
            sizes.input_grad("shared down", down),
            Kernel("shared activation", nbytes=e * (2 * width + u) * sizes.tokens),
            sizes.input_grad("shared up", up),
        ),
        (*sizes.weight_grad("shared down", down), *sizes.weight_grad("shared up", up)),
    )


def _experts(sizes: KernelSizes) -> OperationKernels:
    """Return the experts of a GPU, with the order of their tokens."""
    shard, model = sizes.shard, sizes.shard.model
    tokens, n = shard.routed_tokens, shard.local_experts
    up, down = routed_matrices(shard).values()
    e, width, u = model.bytes_per_activation, up.outputs, down.inputs
    sort = _sort(shard, tokens)
    back = [
        sizes.grouped(f"{name} input", Matrix(matrix.outputs, matrix.inputs), tokens, n)
        for name, matrix in (("experts down", down), ("experts up", up))
    ]
    return OperationKernels(
        (
            *sort,
            sizes.grouped("experts up", up, tokens, n),
            Kernel("experts activation", nbytes=e * (width + u) * tokens),
            sizes.grouped("experts down", down, tokens, n),
            *sort,
        ),
        (
            *sort,
            back[0],
            Kernel("experts activation", nbytes=e * (2 * width + u) * tokens),
            back[1],
            *sort,
        ),
        (
            *sizes.grouped_weight_grad("experts down", down, tokens, n),
            *sizes.grouped_weight_grad("experts up", up, tokens, n),
        ),
    )


def _sort(shard: Shard, tokens: float) -> tuple[Kernel, ...]:
    """Return the kernel that orders received tokens by expert; none if there is one sender."""
    if shard.local_experts == 1 or shard.expert_parallel * shard.expert_tensor_size == 1:
        return ()
    nbytes = 2 * shard.model.bytes_per_activation * shard.model.hidden_size * tokens
    return (Kernel("expert sort", nbytes=nbytes, share=_PERMUTATION_SHARE),)


def _combination(sizes: KernelSizes, *, has_shared: bool) -> OperationKernels:
    """Return the sum over the experts of a token, and that with the shared experts."""
    shard, model = sizes.shard, sizes.shard.model
    width = model.bytes_per_activation * model.hidden_size * shard.expert_tokens
    nbytes = width * (1 + model.experts_per_token)
    unpermutation = Kernel("unpermutation", nbytes=nbytes, share=_PERMUTATION_SHARE)
    added = (Kernel("shared sum", nbytes=3 * width),) if has_shared else ()
    return OperationKernels((unpermutation, *added), (unpermutation,), ())
