"""`Kernel`: the work of one kernel, or of several alike."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Kernel"]


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
    """

    name: str
    flops: float = 0.0
    nbytes: float = 0.0
    depth: float = 0.0
    n_kernels: float = 1
