"""Gradients of rows: sums to send to the owners, and their addition to ``weight.grad``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SummedGradients(NamedTuple):
    """Summed gradients that a process is to send, and the rows that others requested from it.

    Attributes
    ----------
    addresses, gradients
        Addresses of the keys that it has sent, and their gradients; shapes ``(n,)`` and
        ``(n, dim)``.
    rows
        Rows of this process that others requested, sender after sender.
    n_requested
        Number of ``rows`` that each sender requested.
    """

    addresses: Tensor
    gradients: Tensor
    rows: Tensor
    n_requested: list[int]


def add_to_rows(weight: Tensor, rows: Tensor, grads: Tensor, *, sparse: bool) -> None:
    """Add gradients of rows to ``weight.grad``.

    With ``sparse``, a gradient that is made here is sparse.
    """
    gradient = weight.grad
    if gradient is not None and not gradient.is_sparse:
        gradient.index_add_(0, rows, grads)
        return
    new = gradient_of_rows(weight, rows, grads, sparse)
    weight.grad = new if gradient is None else gradient + new


def gradient_of_rows(weight: Tensor, rows: Tensor, grads: Tensor, sparse: bool) -> Tensor:
    """Return the gradient of ``weight`` from gradients of some rows, which may repeat."""
    if sparse:
        return torch.sparse_coo_tensor(
            rows.long()[None], grads, weight.shape, check_invariants=False, is_coalesced=False
        )
    return torch.zeros_like(weight).index_add_(0, rows, grads)
