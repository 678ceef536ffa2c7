"""Record the kernels of PyTorch operations: floating-point operations and bytes of each.

On the meta device nothing is computed: its tensors have only shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipesim.errors import ArgumentError, number
from pipesim.models.kernels.kernel import Kernel

#: Operations that allocate memory without reading or writing it.
_ALLOCATIONS = frozenset({
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
})  # fmt: skip
#: Position of the left operand of matrix products; they sum over its last dimension.
_LEFT_OPERANDS = {
    torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1, torch.ops.aten.baddbmm: 1,
}  # fmt: skip


class KernelRecorder(TorchDispatchMode):
    """Context that records each operation that runs a kernel.

    FLOPs are those of `torch.utils.flop_counter`. A kernel reads each operand once and writes each
    result once, which is a lower bound. Views move nothing. Matrix products have a depth;
    convolutions have none, since it depends on their algorithm.

    Parameters
    ----------
    winograd
        Counted operations over executed ones, for a 3 x 3 convolution with stride 1 and for its
        backward: 2.25 for Winograd's algorithm F(2 x 2, 3 x 3), 4 for F(4 x 4, 3 x 3) (Lavin and
        Gray, arXiv 1509.09308). By default, 1, convolutions are computed directly.

    Attributes
    ----------
    kernels
        Recorded kernels, in order, with the names of PyTorch's operations.
    """

    def __init__(self, winograd: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        factor = number(winograd)
        if factor is None or not 1 <= factor < inf:
            raise ArgumentError(f"winograd must be finite and at least 1, got {winograd!r}")
        self._winograd = factor
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record its kernel."""
        keywords = dict(kwargs or {})
        out = func(*args, **keywords)
        packet = func._overloadpacket
        if not func.is_view and packet not in _ALLOCATIONS:
            count = flop_registry.get(packet)
            flops = 0.0 if count is None else float(count(*args, **keywords, out_val=out))
            if _is_3x3(packet, args):
                flops /= self._winograd
            nbytes = _nbytes((args, keywords)) + _nbytes(out)
            self.kernels.append(Kernel(packet.__name__, flops, nbytes, _depth(packet, args)))
        return out


def _depth(operation: torch._ops.OpOverloadPacket, args: Sequence[Any]) -> float:
    """Return the size that a matrix product sums over, or 0 for other operations."""
    left = _LEFT_OPERANDS.get(operation)
    return 0.0 if left is None else float(args[left].shape[-1])


def _is_3x3(operation: torch._ops.OpOverloadPacket, args: Sequence[Any]) -> bool:
    """Return whether an operation is a 3 x 3 convolution with stride 1, or its backward."""
    if operation is torch.ops.aten.convolution:
        _, weight, _, stride = args[:4]
    elif operation is torch.ops.aten.convolution_backward:
        _, _, weight, _, stride = args[:5]
    else:
        return False
    return tuple(weight.shape[2:]) == (3, 3) and set(stride) == {1}


def _nbytes(values: object) -> float:
    """Return the bytes of the tensors in values: each once, and without expanded elements."""
    tensors = {id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}
    return float(sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors.values()))
