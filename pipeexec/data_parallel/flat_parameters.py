"""Flat parameters: those of one stage and type as one tensor, of which each process has a share.

Flat tensors are padded to a multiple of the processes::

    flat      | weight 0 1 2 3 4 5 | bias 6 7 |        two processes: shares of four elements
    rank 0    | weight 0 1 2 3     |                   its pieces: part of the weight,
    rank 1              | weight 4 5 | bias 6 7 |      part of the weight, and the bias
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(eq=False)
class Flat:
    """Parameters of one type as one tensor.

    Attributes
    ----------
    parameters, starts
        Parameters, and the first element of each in the flat tensor.
    whole, share, gradient
        The flat tensor, the share of this process, and the gradient of the share.
    views
        Part of the flat tensor for each parameter, in its shape.
    pieces
        Part of the share for each parameter, as a parameter of its own; None where it has none.
    """

    parameters: list[nn.Parameter]
    starts: list[int]
    whole: Tensor
    share: Tensor
    gradient: Tensor
    views: list[Tensor]
    pieces: list[nn.Parameter | None]

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """Return the first and the last element + 1 of a piece in the share; may be empty."""
        size, offset = len(self.share), rank * len(self.share)
        start = self.starts[index]
        end = start + self.parameters[index].numel()
        low, high = max(start, offset) - offset, min(end, offset + size) - offset
        return low, max(low, high)


@torch.no_grad()
def flatten(parameters: list[nn.Parameter], rank: int, n_ranks: int, *, frees: bool) -> Flat:
    """Make parameters views of one tensor, and pieces of the share of this process."""
    starts, n = [], 0
    for parameter in parameters:
        starts.append(n)
        n += parameter.numel()
    size = -(-n // n_ranks)
    whole = parameters[0].new_zeros(size * n_ranks)
    views = []
    for parameter, start in zip(parameters, starts, strict=True):
        view = whole[start : start + parameter.numel()].view(parameter.shape)
        view.copy_(parameter)
        parameter.data = view
        views.append(view)
    share = whole[rank * size : (rank + 1) * size]
    share = share.clone() if frees else share
    flat = Flat(parameters, starts, whole, share, torch.zeros_like(share), views, [])
    for index, parameter in enumerate(parameters):
        low, high = flat.bounds(index, rank)
        is_empty = high <= low
        piece = None if is_empty else nn.Parameter(share[low:high], parameter.requires_grad)
        flat.pieces.append(piece)
    return flat


def all_gather(whole: Tensor, share: Tensor, group: ProcessGroup) -> None:
    """Gather the shares of all processes; older torch has another name for this."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(whole, share, group=group)


def reduce_scatter(share: Tensor, whole: Tensor, group: ProcessGroup) -> None:
    """Sum tensors of all processes; each gets its share. Older torch has another name for this."""
    name = "reduce_scatter_single"
    name = name if hasattr(dist, name) else "reduce_scatter_tensor"
    getattr(dist, name)(share, whole, group=group)
