"""Exchange rows of tokens between the replicas that together have all experts.

Member ``k`` sends ``numbers[k].sent[m]`` rows to member ``m``, in order of members, and receives
rows of all members in the same order. Numbers of rows differ, so that a dispatch exchanges counts
first: the host waits for them once, for all members of its process. The other exchanges of the
layer have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class RowNumbers(NamedTuple):
    """Numbers of rows of one member, on the host.

    Attributes
    ----------
    sent, received
        Number of rows for, and from, each member.
    per_expert
        Number of rows that each expert of the member gets in the dispatch.
    """

    sent: list[int]
    received: list[int]
    per_expert: list[int]

    def reversed(self) -> RowNumbers:
        """Return the numbers of an exchange that sends rows back."""
        return RowNumbers(self.received, self.sent, self.per_expert)


class Rows(tuple[Tensor, ...]):
    """Rows of one member, before or after an exchange.

    Parameters
    ----------
    tensors
        Rows for all members, or from all of them, in their order. In a dispatch also the number of
        rows for, or from, each member and expert, shape ``(n_members, n)``.
    numbers
        Numbers of rows of the exchange; None before a dispatch.
    """

    numbers: RowNumbers | None

    def __new__(cls, tensors: Iterable[Tensor], numbers: RowNumbers | None = None) -> Self:
        """Return a tuple of the tensors, with the numbers."""
        rows = super().__new__(cls, tensors)
        rows.numbers = numbers
        return rows

    def others_bytes(self, own: int) -> int:
        """Return the bytes that member ``own``, which has received these, sent to other members."""
        assert self.numbers is not None
        sent = self.numbers.sent
        rows, *counts = self
        n_rows = sum(sent) - sent[own]
        nbytes = n_rows * rows.shape[1:].numel() * rows.itemsize
        return nbytes + sum(x.nbytes - x[own].nbytes for x in counts)


@torch.no_grad()
def exchange_rows(members: Sequence[Rows], group: ProcessGroup | None = None) -> list[Rows]:
    """Return the rows that each member receives.

    Parameters
    ----------
    members
        All members in their order; or, with a group, the one of this process.
    group
        Process group with one member a process, in order of ranks; None if all are here.
    """
    rows, *counts = (list(tensors) for tensors in zip(*members, strict=True))
    numbers = [member.numbers for member in members if member.numbers is not None]
    if counts:
        counts[0], numbers = _exchange_counts(counts[0], group)
    sent, received = [own.sent for own in numbers], [own.received for own in numbers]
    tensors = zip(_exchange(rows, sent, received, group), *counts, strict=True)
    return [Rows(own, n) for own, n in zip(tensors, numbers, strict=True)]


def _exchange_counts(
    sent: list[Tensor], group: ProcessGroup | None
) -> tuple[list[Tensor], list[RowNumbers]]:
    """Return the counts that each member receives, and its numbers of rows."""
    ones = [[1] * len(own) for own in sent]
    received = _exchange(sent, ones, ones, group)
    on_host = torch.stack([x.to(sent[0].device) for x in (*sent, *received)]).tolist()
    numbers = [
        RowNumbers(
            [sum(row) for row in own],
            [sum(row) for row in others],
            [sum(column) for column in zip(*others, strict=True)],
        )
        for own, others in zip(on_host[: len(sent)], on_host[len(sent) :], strict=True)
    ]
    return received, numbers


def _exchange(
    members: list[Tensor],
    sent: list[list[int]],
    received: list[list[int]],
    group: ProcessGroup | None,
) -> list[Tensor]:
    """Return the rows that each member receives, joined."""
    if group is not None:
        (own,) = members
        rows = own.new_empty(sum(received[0]), *own.shape[1:])
        dist.all_to_all_single(rows, own.contiguous(), received[0], sent[0], group=group)
        return [rows]
    parts = [own.split(sizes) for own, sizes in zip(members, sent, strict=True)]
    joined = []
    for k, own in enumerate(members):
        pieces = [part[k].to(own.device) for part in parts]
        joined.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return joined
