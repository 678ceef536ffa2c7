"""Number formats of the linear products of layers: bytes of their operands, and of casts to them.

In a format below 16 bits, products of linear maps of layers and of experts read operands of it,
and write results in 16 bits. All else stays in 16 bits: attention cores, LM head, router,
element-wise kernels, messages, exchanges of keys and values, and sums over a tensor-parallel group.
Assumed, as Transformer Engine does without ``fp8_param_gather``:

- Each tensor is cast in a kernel that writes a copy and its transpose, for the product with the
  other operand. Inputs of ``qkv`` and ``up``, and of the maps from latent vectors, are written so
  by the norm before them.
- Sequence parallelism casts a tensor before it gathers it.
- Parameters stay in 16 bits, which the optimizer steps and replicas gather. Copies of those of
  linear maps, and their transposes, are cast once a step and held between steps. Gradients and the
  optimizer's state are as without.
- An operation keeps the copy in this format for the gradient of its weight; a fused attention core
  also keeps its own output. Other workspace is that of 16 bits.

=========  ============  ============  ============================================================
precision  operand, B    cast, B       source
=========  ============  ============  ============================================================
fp8        1             4             one scale a tensor; a read of 2, and two writes
mxfp8      1 + 1/32      4 + 1/16      a scale for 32 elements (OCP Microscaling Formats 1.0)
nvfp4      1/2 + 1/16    6             a scale for 16 elements (NVIDIA, arXiv 2509.25149). Its
                                       casts and Hadamard transforms take 1.48 times as long as the
                                       casts of MXFP8 on B300
=========  ============  ============  ============================================================

The last is the difference between products with and without casts that Transformer Engine's
``docs/examples/gemm_profiling/gemm_profiling.rst`` lists for B300: 2.69 and 1.82 ms a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


class Format(NamedTuple):
    """Bytes of an element."""

    operand: float  # scales included
    cast: float  # that a cast reads and writes


#: Formats below 16 bits.
FORMATS: Mapping[str, Format] = {
    "fp8": Format(1.0, 4.0),
    "mxfp8": Format(1 + 1 / 32, 4 + 1 / 16),
    "nvfp4": Format(1 / 2 + 1 / 16, 6.0),
}
