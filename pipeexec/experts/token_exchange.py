"""Exchange rows of tokens between the replicas that together have all experts.

Member ``k`` sends ``sizes[k][m]`` rows to member ``m``, in order of members, and gets what others
send it, in the same order. Numbers of rows differ, so that a dispatch sends the counts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["Rows", "exchange_rows"]


class Rows(NamedTuple):
    """Rows of one member, before or after an exchange.

    Attributes
    ----------
    rows
        Rows for all members, or from all of them, in their order.
    counts
        Number of rows for, or from, each member and expert; shape ``(n_members, n)``.
    expected
        Number of rows that each member will send, shape ``(n_members, n)``; None if it is not
        known: counts are then exchanged first.
    """

    rows: Tensor
    counts: Tensor
    expected: Tensor | None = None

    @property
    def sizes(self) -> list[int]:
        """Number of rows for, or from, each member."""
        sizes: list[int] = self.counts.sum(1).tolist()
        return sizes

    def others_bytes(self, own: int) -> int:
        """Return the bytes of the rows, and of the counts, for other members than ``own``."""
        n_rows = sum(self.sizes) - self.sizes[own]
        nbytes = n_rows * self.rows[:1].numel() * self.rows.itemsize
        if self.expected is None:
            nbytes += self.counts.nbytes - self.counts[own].nbytes
        return nbytes


@torch.no_grad()
def exchange_rows(members: Sequence[Rows], group: ProcessGroup | None = None) -> list[Rows]:
    """Return what each member receives.

    Parameters
    ----------
    members
        All members in their order; or, with a group, the one of this process.
    group
        Process group with one member a process, in order of ranks; None if all are here.
    """
    if group is not None:
        (own,) = members
        return [_exchange_between_processes(own, group)]
    parts = [member.rows.split(member.sizes) for member in members]
    received = []
    for k, own in enumerate(members):
        counts = torch.stack([member.counts[k].to(own.counts.device) for member in members])
        rows = [part[k].to(own.rows.device) for part in parts]
        received.append(Rows(rows[0] if len(rows) == 1 else torch.cat(rows), counts))
    return received


def _exchange_between_processes(own: Rows, group: ProcessGroup) -> Rows:
    counts = own.expected
    if counts is None:
        counts = torch.empty_like(own.counts)
        dist.all_to_all_single(counts, own.counts.contiguous(), group=group)
    received = Rows(own.rows, counts)
    rows = own.rows.new_empty(sum(received.sizes), *own.rows.shape[1:])
    dist.all_to_all_single(rows, own.rows.contiguous(), received.sizes, own.sizes, group=group)
    return Rows(rows, counts)
