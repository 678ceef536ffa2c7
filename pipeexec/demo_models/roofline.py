"""Record the kernels of PyTorch operations: floating-point operations and bytes of each.

On the meta device nothing is computed: its tensors have only shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pipesim.errors import ArgumentError, number

__all__ = ["KernelCost", "KernelRecorder", "Roofline"]

#: Operations that allocate memory without reading or writing it.
_ALLOCATIONS = frozenset({
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
})  # fmt: skip


class KernelCost(NamedTuple):
    """Work of one kernel.

    Attributes
    ----------
    flops
        Operations of matrix products and convolutions, two per multiply-add, as
        `torch.utils.flop_counter` counts them. Other kernels are bound by memory and have 0.
    nbytes
        Bytes read and written.
    is_3x3
        Whether it is a convolution of 3 x 3 with stride 1, or the backward of one.
    """

    flops: float
    nbytes: float
    is_3x3: bool = False


class KernelRecorder(TorchDispatchMode):
    """Context that records each operation that runs a kernel.

    A kernel reads each operand once and writes each result once, which is a lower bound. Views
    move nothing.

    Attributes
    ----------
    kernels
        Recorded kernels, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.kernels: list[KernelCost] = []

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
            nbytes = _nbytes((args, keywords)) + _nbytes(out)
            self.kernels.append(KernelCost(flops, nbytes, _is_3x3(packet, args)))
        return out


@dataclass(frozen=True)
class Roofline:
    """Sustained rates of a device.

    Williams et al., "Roofline", Communications of the ACM 52(4), 2009.

    Attributes
    ----------
    flops
        Floating-point operations per second.
    bandwidth
        Bytes per second of the device's own memory.
    launch
        Seconds of the shortest kernel, from its launch to that of the next.
    fewer
        Counted operations over executed ones, for a 3 x 3 convolution with stride 1: 2.25 for
        Winograd's algorithm F(2 x 2, 3 x 3), 4 for F(4 x 4, 3 x 3) (Lavin and Gray, arXiv
        1509.09308).

    Raises
    ------
    ArgumentError
        For a rate that is not positive, a negative launch, ``fewer`` below 1, and any value that
        is not finite.

    Examples
    --------
    >>> Roofline(flops=1e12, bandwidth=1e11).seconds([KernelCost(2e9, 1e6), KernelCost(0, 1e8)])
    0.003
    """

    flops: float
    bandwidth: float
    launch: float = 0.0
    fewer: float = 1.0

    def __post_init__(self) -> None:
        for name, lowest, allowed in (
            ("flops", nextafter(0, 1), "a finite rate above 0"),
            ("bandwidth", nextafter(0, 1), "a finite rate above 0"),
            ("launch", 0, "finite seconds >= 0"),
            ("fewer", 1, "finite and at least 1"),
        ):
            got = number(getattr(self, name))
            if got is None or not lowest <= got < inf:
                raise ArgumentError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    def seconds(self, kernels: Sequence[KernelCost]) -> float:
        """Return the seconds of kernels in sequence; each takes the largest of its bounds."""
        rate = self.flops, self.flops * self.fewer
        return sum(
            max(flops / rate[is_3x3], nbytes / self.bandwidth, self.launch)
            for flops, nbytes, is_3x3 in kernels
        )

    def scaled(self, part: float) -> Roofline:
        """Return the roofline with both rates times ``part`` and the same ``launch``."""
        return replace(self, flops=self.flops * part, bandwidth=self.bandwidth * part)


def _is_3x3(operation: torch._ops.OpOverloadPacket, args: Sequence[Any]) -> bool:
    """Return whether an operation is a 3 x 3 convolution; see `KernelCost.is_3x3`."""
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
