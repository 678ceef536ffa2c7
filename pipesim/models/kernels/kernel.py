"""`Kernel`: the work of one kernel, or of several alike."""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """Work of one kernel on one GPU, or of ``n_kernels`` together.

    Attributes
    ----------
    name
        Name of the computation.
    flops
        Floating-point operations of matrix products, two per multiply-add. Other operations are
        bound by memory, and count as none.
    nbytes
        Bytes read and written, each tensor once.
    depth
        Size that the matrix products sum over; 0 for other kernels.
    n_kernels
        Number of kernels.
    is_attention
        Whether it is a fused attention core.
    share
        Share of the GPU's FLOP/s and bandwidth that kernels of this kind reach.
    tiles
        Number of tiles of queries of a causal attention core; 0 for many, or for other kernels.
    is_grouped
        Whether it is a group of small products, such as one for each expert of a GPU.
    """

    name: str
    flops: float = 0.0
    nbytes: float = 0.0
    depth: float = 0.0
    n_kernels: float = 1
    is_attention: bool = False
    share: float = 1.0
    tiles: float = 0.0
    is_grouped: bool = False
