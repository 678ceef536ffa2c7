"""The sum of gradients over local copies of a stage and over processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["summed"]


@torch.no_grad()
def summed(
    gradients: Sequence[Sequence[Tensor | None]],
    like: Sequence[nn.Parameter],
    group: ProcessGroup | None = None,
) -> list[Tensor | None]:
    """Return each parameter's sum of gradients; None where nobody has one."""
    sums: list[Tensor | None] = []
    for row in zip(*gradients, strict=True):
        there = [x for x in row if x is not None]
        total = there[0].clone() if there else None
        for other in there[1:]:
            total += other.to(total.device)  # type: ignore[union-attr]
        sums.append(total)
    if group is None or not like:
        return sums
    given = [torch.zeros_like(p) if x is None else x for x, p in zip(sums, like, strict=True)]
    flags = torch.tensor([float(x is not None) for x in sums], dtype=given[0].dtype)
    flat = torch.cat([*(x.reshape(-1) for x in given), flags.to(given[0].device)])
    dist.all_reduce(flat, group=group)
    *totals, counts = flat.split([*(x.numel() for x in given), len(flags)])
    return [
        total.view_as(p) if count else None
        for total, count, p in zip(totals, counts.tolist(), like, strict=True)
    ]
