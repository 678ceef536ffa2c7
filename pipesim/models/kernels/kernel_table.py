"""`kernel_table`: the kernels of a shard with their seconds on a GPU, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipesim.models.gpu import GPU, as_gpu
from pipesim.models.kernels.kernel import Kernel
from pipesim.models.kernels.kernel_sizes import OperationKernels
from pipesim.models.kernels.layer_kernels import embedding_kernels, head_kernels, layer_kernels

if TYPE_CHECKING:
    import pandas as pd

    from pipesim.models.tensor_parallel import Shard


#: Operation of each field of `OperationKernels`.
_OPS = {"forward": "F", "recompute": "R", "input_grad": "I", "weight_grad": "W"}


def kernel_table(shard: Shard, gpu: GPU | Mapping[str, Any] | str) -> pd.DataFrame:
    """Return the kernels of a shard; see `pipesim.Transformer.kernels` for its columns."""
    from pipesim.utils.packages import pandas as pd

    rates = as_gpu(gpu)
    rows = [
        (part, op, kernel.name, kernel.n_kernels, kernel.flops, kernel.nbytes,
         rates.kernel_seconds(kernel), _bound(kernel, rates))
        for part, kernels in _parts(shard).items()
        for field, op in _OPS.items()
        for kernel in getattr(kernels, field)
    ]  # fmt: skip
    columns = ["part", "op", "kernel", "n_kernels", "flops", "bytes", "seconds", "bound"]
    return pd.DataFrame(rows, columns=columns)


def _bound(kernel: Kernel, gpu: GPU) -> str:
    """Return the longest share of a kernel's seconds."""
    shares = gpu.kernel_shares(kernel)
    return max(shares, key=shares.__getitem__)


def _parts(shard: Shard) -> dict[str, OperationKernels]:
    """Return the kernels of each part of a model that it has."""
    n_experts = shard.model.n_expert_layers
    parts = {}
    if n_experts < shard.model.n_layers:
        parts["layer"] = layer_kernels(shard)
    if n_experts:
        parts["expert layer"] = layer_kernels(shard, experts=True)
    return {**parts, "embedding": embedding_kernels(shard), "head": head_kernels(shard)}
