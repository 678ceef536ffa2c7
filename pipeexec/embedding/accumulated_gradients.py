"""Gradients of several exchanges of keys, summed for each row and sent to its owner once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeexec.embedding.key_exchange import Summed, Terms, add_to_rows
from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_layout import Layout

__all__ = ["AccumulatedGradients"]


class _Union(NamedTuple):
    """Different numbers, ascending; which of them each given one is; how many a rank has."""

    numbers: Tensor
    which: Tensor
    of_rank: list[int]


class AccumulatedGradients:
    """Gradients of the micro-batches of a step, exchanged together.

    A process sums its gradients of each row over the micro-batches, and sends each sum once. Nobody
    has to say which rows these are: a sender knows which it has asked for, and an owner which it
    was asked for by each sender, micro-batch by micro-batch. Both make the same union of them, in
    ascending order.

    Parameters
    ----------
    weight
        This process's rows.
    terms
        Those of the embedding.
    peers
        The processes that share it.

    Attributes
    ----------
    sent
        Bytes that this process has sent to others.
    """

    def __init__(self, weight: Tensor, terms: Terms, peers: Peers) -> None:
        self._weight, self._terms, self._peers = weight, terms, peers
        self._parts: list[Summed] = []
        self.sent = 0

    def add(self, part: Summed) -> None:
        """Keep the gradients of one micro-batch."""
        self._parts.append(part)

    def clear(self) -> None:
        """Forget what was added."""
        self._parts.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds, and the rows' gradient, which it adds to."""
        for part in self._parts:
            yield from (part.addresses, part.gradients, part.rows)
        gradient = self._weight.grad
        if gradient is not None:
            is_sparse = gradient.is_sparse
            yield from (gradient._indices(), gradient._values()) if is_sparse else (gradient,)

    @torch.no_grad()
    def exchange(self) -> None:
        """Send the sums to the owners of their rows, and add up those of this process's rows.

        Raises
        ------
        LostConnection
            If a process is gone.
        """
        parts, self._parts = self._parts, []
        layout = self._terms.layout
        own = _union(torch.cat([part.addresses for part in parts]), layout)
        given = torch.cat([part.gradients for part in parts])
        sums = given.new_zeros(len(own.numbers), given.shape[1]).index_add_(0, own.which, given)
        senders = [
            torch.arange(layout.n_ranks, device=given.device, dtype=part.rows.dtype)
            .repeat_interleave(torch.tensor(part.wanted, device=given.device))
            for part in parts
        ]  # fmt: skip
        asked = _union(
            torch.cat(senders) * layout.rows_per_rank + torch.cat([part.rows for part in parts]),
            layout,
        )
        found = sums.new_empty(len(asked.numbers), sums.shape[1])
        self.sent = self._peers.exchange(
            found, sums, asked.of_rank, own.of_rank, "accumulated gradients"
        )
        rows = asked.numbers.remainder(layout.rows_per_rank)
        add_to_rows(self._weight, rows, found, sparse=self._terms.sparse)


def _union(numbers: Tensor, layout: Layout) -> _Union:
    """Return the different ones among ``rank * rows_per_rank + row``."""
    unique, which = torch.unique(numbers, return_inverse=True)
    ranks = torch.arange(layout.n_ranks + 1, device=numbers.device, dtype=numbers.dtype)
    ends = torch.searchsorted(unique, ranks * layout.rows_per_rank)
    return _Union(unique, which, ends.diff().tolist())
