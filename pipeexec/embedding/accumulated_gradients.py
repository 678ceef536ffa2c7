"""Sum gradients of several exchanges of keys for each row, and send each sum to its owner once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pipeexec.embedding.exchange_config import ExchangeConfig
from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_gradients import SummedGradients, add_to_rows
from pipeexec.embedding.row_layout import RowLayout


class _Union(NamedTuple):
    """Distinct addresses of several exchanges.

    Attributes
    ----------
    addresses
        Distinct addresses, ascending.
    positions
        Position among them of each input address.
    n_by_rank
        Number of distinct addresses of each rank.
    """

    addresses: Tensor
    positions: Tensor
    n_by_rank: list[int]


class AccumulatedGradients:
    """Gradients of the micro-batches of a step, exchanged together.

    A process sums its gradients of each row over the micro-batches, and sends each sum once. The
    numbers of the rows are not sent. A sender knows which rows it has requested, and an owner knows
    which rows each sender has requested, micro-batch by micro-batch. Both make the same union, in
    ascending order.

    Parameters
    ----------
    weight
        Rows of this process.
    config
        Settings of the embedding.
    peers
        The processes that share the embedding.

    Attributes
    ----------
    sent
        Bytes that this process has sent to others.
    """

    def __init__(self, weight: Tensor, config: ExchangeConfig, peers: Peers) -> None:
        self._weight, self._config, self._peers = weight, config, peers
        self._parts: list[SummedGradients] = []
        self.sent = 0

    def add(self, part: SummedGradients) -> None:
        """Keep the gradients of one micro-batch."""
        self._parts.append(part)

    def clear(self) -> None:
        """Drop the gradients that were added."""
        self._parts.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds, and the gradient of the rows, to which it adds."""
        for part in self._parts:
            yield from (part.addresses, part.gradients, part.rows)
        gradient = self._weight.grad
        if gradient is not None:
            is_sparse = gradient.is_sparse
            yield from (gradient._indices(), gradient._values()) if is_sparse else (gradient,)

    @torch.no_grad()
    def exchange(self) -> None:
        """Send the sums to the owners of their rows; add the received sums to this process's rows.

        Raises
        ------
        LostConnection
            If a process has exited.
        """
        parts, self._parts = self._parts, []
        layout = self._config.layout
        own = _union(torch.cat([part.addresses for part in parts]), layout)
        grads = torch.cat([part.gradients for part in parts])
        sums = grads.new_zeros(len(own.addresses), grads.shape[1])
        sums.index_add_(0, own.positions, grads)
        senders = [
            torch.arange(layout.n_ranks, device=grads.device, dtype=part.rows.dtype)
            .repeat_interleave(torch.tensor(part.n_requested, device=grads.device))
            for part in parts
        ]  # fmt: skip
        requested = _union(
            torch.cat(senders) * layout.rows_per_rank + torch.cat([part.rows for part in parts]),
            layout,
        )
        received = sums.new_empty(len(requested.addresses), sums.shape[1])
        self.sent = self._peers.exchange(
            received, sums, requested.n_by_rank, own.n_by_rank, "accumulated gradients"
        )
        rows = requested.addresses.remainder(layout.rows_per_rank)
        add_to_rows(self._weight, rows, received, sparse=self._config.sparse)


def _union(addresses: Tensor, layout: RowLayout) -> _Union:
    """Return the distinct addresses, ``rank * rows_per_rank + row``."""
    unique, positions = torch.unique(addresses, return_inverse=True)
    ranks = torch.arange(layout.n_ranks + 1, device=addresses.device, dtype=addresses.dtype)
    ends = torch.searchsorted(unique, ranks * layout.rows_per_rank)
    return _Union(unique, positions, ends.diff().tolist())
