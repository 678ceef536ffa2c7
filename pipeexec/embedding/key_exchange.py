"""`Exchange`: send keys to the owners of their rows, vectors back, and gradients to the owners.

One exchange, phase by phase (after the sparse operation kit of HugeCTR), for rank 0 of two::

    keys           3  0  1  3  5           keys of this rank's input
    dispatch       0 | 1  3  5             each key once, grouped by owner, order remembered
    counts         1 | 3                   number of keys for each owner, which then makes room
    keys           0, 4 6                  requests of other ranks, as rows 0, 2 3
    lookup         v0, v4 v6               from this rank's rows
    vectors        v0 | v1 v3 v5           back to the rank that requested them
    combine        v3 v0 v1 v3 v5          in the input's order
    sum            g0 | g1 g3+g3 g5        reverse: gradients summed for each key
    gradients      g0, ...                 sent to the owners
    accumulate     row 0 += g0, ...        the owner adds up the gradients of all ranks

This file is independent of autograd. Several exchanges may be in flight, as long as all processes
run their phases in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_layout import RowLayout
from pipesim.errors import ArgumentError, ExecutionError, PeerError, PipeError


class ExchangeConfig(NamedTuple):
    """Settings that all exchanges of an embedding share; see `pipeexec.ShardedEmbedding`."""

    layout: RowLayout
    combiner: str | None
    padding_key: int | None
    scale: float  # of all gradients
    sparse: bool
    unique: bool = True

    @property
    def bags(self) -> bool:
        """Whether the last dimension of keys is a bag."""
        return self.combiner is not None

    def check(self, keys: Tensor) -> None:
        """Raise `ArgumentError` unless keys, on any device, are rows of their tables."""
        layout, bags = self.layout, self.bags
        layout.check_form(keys, keys.device, bags=bags)
        bad = layout.outside(keys, bags=bags)
        if self.padding_key is not None:
            bad &= keys != self.padding_key
        if bad.any():
            raise layout.explain(keys, bad, bags=bags)


class SummedGradients(NamedTuple):
    """Summed gradients that a process is to send, and the rows that others requested from it."""

    addresses: Tensor  # of the keys that it has sent, shape (n,)
    gradients: Tensor  # shape (n, dim)
    rows: Tensor  # of this process, sender after sender
    n_requested: list[int]  # ``rows`` of each sender


def add_to_rows(weight: Tensor, rows: Tensor, grads: Tensor, *, sparse: bool) -> None:
    """Add gradients of rows to ``weight.grad``; one that is made here is sparse if ``sparse``."""
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


_PHASES = ("counts", "keys", "lookup", "vectors", "combine", "sum", "gradients", "accumulate")
#: The count that a process sends if its keys are invalid.
_REFUSED = -1


class Exchange:
    """The exchange of one set of keys; made by `ShardedEmbedding.dispatch`.

    All processes must call the same phases, in this order: `counts`, `keys`, `lookup`, `vectors`,
    and with gradients also `gradients` and `accumulate` (or `gradient`).

    - `vectors` is `receive`, then `combine`.
    - `gradients` is `sum_gradients`, then `send_gradients`.
    - After `sum_gradients`, `summed` may replace the remaining phases.

    Memory that later phases do not need is freed at once. Keys and weight are those of this
    process. ``keeps_keys`` keeps the keys that are sent, which `summed` needs. ``sent`` has the
    bytes that this process has sent to others, by phase.
    """

    def __init__(
        self,
        keys: Tensor,
        weight: Tensor,
        config: ExchangeConfig,
        peers: Peers,
        *,
        keeps_keys: bool = False,
    ) -> None:
        self.sent: dict[str, int] = {}
        self._keeps_keys = keeps_keys
        self._weight, self._config, self._peers = weight, config, peers
        self._n_done = 0
        self._error: PipeError | None = None
        try:
            config.layout.check_form(keys, weight.device, bags=config.bags)
        except PipeError as error:  # raised in `counts`, after the others were told
            self._error = error
            return
        with torch.no_grad():
            self._keys = keys
            self._shape = keys.shape[: keys.dim() - config.bags]
            self._bag = keys.shape[-1] if config.bags else 1
            self._group()

    def _group(self) -> None:
        """Group keys by owner, each key once if unique; never wait for the device."""
        config, keys = self._config, self._keys
        layout = config.layout
        addresses = layout.addresses(keys, bags=config.bags)
        self._bad = layout.outside(keys, bags=config.bags)
        if config.padding_key is not None:
            padding = keys == config.padding_key
            addresses = addresses.masked_fill(padding, layout.n_addresses)
            self._bad &= ~padding
            if config.combiner == "mean":
                self._n_in_bag = (~padding).sum(-1).clamp_(min=1).view(-1, 1)
        self._addresses, self._order = addresses.reshape(-1).sort(stable=True)
        self._is_first = torch.ones_like(self._addresses, dtype=torch.bool)
        torch.ne(self._addresses[1:], self._addresses[:-1], out=self._is_first[1:])
        if not config.unique:  # all padding stays one key
            self._is_first[1:] |= self._addresses[1:] != layout.n_addresses
        n_before = functional.pad(self._is_first.cumsum(0), (1, 0))
        # For each key of the input, the position of its vector among those that come back.
        self._slots = torch.empty_like(self._order).scatter_(0, self._order, n_before[1:] - 1)
        owners = torch.arange(layout.n_ranks + 1, device=keys.device, dtype=layout.dtype)
        ends = torch.searchsorted(self._addresses, owners * layout.rows_per_rank)
        self._n_kept = ends[-1:]
        self._counts = n_before[ends].diff()

    def __repr__(self) -> str:
        """Return the rank, the next phase and the bytes that were sent."""
        rank = f"rank {self._peers.rank} of {self._peers.n}"
        due = _PHASES[self._n_done] if self._n_done < len(_PHASES) else "none"
        return f"<Exchange of {rank}: next phase {due}, bytes sent {self.sent}>"

    @property
    def n_received(self) -> int:
        """Number of keys that all processes, this one too, request here; known after `counts`."""
        return sum(self._n_requested)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the exchange holds between two phases."""
        return (value for value in vars(self).values() if isinstance(value, Tensor))

    def _begin(self, phase: str, name: str | None = None) -> None:
        """Begin a phase; raise unless it is next. ``name`` is the called method, for the error."""
        if _PHASES[self._n_done : self._n_done + 1] != (phase,):
            n = self._n_done
            due = "nothing: it is done" if n == len(_PHASES) else _PHASES[n]
            raise ExecutionError(
                f"an exchange of keys was asked for {name or phase}, and next comes {due}; run "
                f"its phases once each, in order: {', '.join(_PHASES)}"
            )
        self._n_done += 1

    @torch.no_grad()
    def counts(self) -> None:
        """Send each owner the number of keys that will come; receive the numbers from all ranks.

        Raises `PeerError` if another process has refused its keys.
        """
        self._begin("counts")
        n, device = self._peers.n, self._weight.device
        if self._error is None:
            own = torch.where(self._bad.any(), _REFUSED, self._counts)
        else:
            own = torch.full((n,), _REFUSED, device=device)
        others = torch.empty_like(own)
        self.sent["counts"] = self._peers.exchange(others, own, [1] * n, [1] * n, "counts")
        if self._error is not None:
            raise self._error
        numbers = torch.cat([own, others, self._n_kept]).tolist()  # one copy to the host
        self._n_sent, self._n_requested, self._n_sorted = numbers[:n], numbers[n:-1], numbers[-1]
        if _REFUSED in self._n_sent:
            raise self._config.layout.explain(self._keys, self._bad, bags=self._config.bags)
        if _REFUSED in self._n_requested:
            rank = self._peers.ranks[self._n_requested.index(_REFUSED)]
            raise PeerError(
                f"rank {rank} refused its keys, see the error of that rank; no key was sent"
            )
        del self._bad, self._counts, self._n_kept, self._keys

    @torch.no_grad()
    def keys(self) -> None:
        """Send each owner its keys, as addresses; receive the requests for this process's rows."""
        self._begin("keys")
        n_sent = sum(self._n_sent)
        # Padding comes last, and is sent to no owner.
        self._starts = self._is_first.nonzero_static(size=n_sent).view(-1)
        addresses = self._addresses.index_select(0, self._starts)
        del self._is_first, self._addresses
        if self._keeps_keys:
            self._sent_addresses = addresses
        requests = addresses.new_empty(sum(self._n_requested))
        self.sent["keys"] = self._peers.exchange(
            requests, addresses, self._n_requested, self._n_sent, "keys"
        )
        self._rows = requests.sub_(self._peers.rank * self._config.layout.rows_per_rank)

    @torch.no_grad()
    def lookup(self) -> None:
        """Copy the requested rows of this process."""
        self._begin("lookup")
        self._looked_up = self._weight.index_select(0, self._rows)

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """Run `receive`, then `combine`."""
        self.receive()
        return self.combine()

    @torch.no_grad()
    def receive(self) -> None:
        """Send the vectors back, and receive those that this process has requested."""
        self._begin("vectors")
        n_sent = sum(self._n_sent)
        padded = self._config.padding_key is not None
        self._received = self._weight.new_empty(n_sent + padded, self._weight.shape[1])
        self._received[n_sent:] = 0
        self.sent["vectors"] = self._peers.exchange(
            self._received[:n_sent], self._looked_up, self._n_sent, self._n_requested, "vectors"
        )
        del self._looked_up

    @torch.no_grad()
    def combine(self) -> Tensor:
        """Return the combined vectors of the input's keys, in order."""
        self._begin("combine")
        padding = sum(self._n_sent) if self._config.padding_key is not None else None
        output = self._combine(self._received, padding)
        del self._slots, self._received
        return output.view(*self._shape, self._weight.shape[1])

    def _combine(self, vectors: Tensor, padding: int | None) -> Tensor:
        """Return the vector of each key, or of each bag."""
        if self._config.combiner is None:
            return vectors.index_select(0, self._slots)
        if not self._slots.numel():  # no bag, or empty bags only
            return vectors.new_zeros(self._shape.numel(), vectors.shape[1])
        bags = self._slots.view(-1, self._bag)
        mode = self._config.combiner
        return functional.embedding_bag(bags, vectors, mode=mode, padding_idx=padding)

    @torch.no_grad()
    def gradients(self, grad_output: Tensor) -> None:
        """Run `sum_gradients`, then `send_gradients`.

        ``grad_output`` is the gradient of the tensor that `vectors` returned.
        """
        self.sum_gradients(grad_output, "gradients")
        self.send_gradients()

    @torch.no_grad()
    def sum_gradients(self, grad_output: Tensor, name: str = "sum") -> None:
        """Sum the gradients of each key that was sent; errors name the phase ``name``."""
        self._begin("sum", name)
        self._sums = self._sums_by_key(grad_output.reshape(-1, self._weight.shape[1]))
        del self._order, self._starts

    def summed(self) -> SummedGradients:
        """Return the sums and their rows instead of sending them; the last phase."""
        self._begin("gradients", "summed")
        self._n_done = len(_PHASES)
        return SummedGradients(self._sent_addresses, self._sums, self._rows, self._n_requested)

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Send the sums to the owners of the keys."""
        self._begin("gradients")
        sums = self._sums
        del self._sums
        self._grads = sums.new_empty(sum(self._n_requested), sums.shape[1])
        self.sent["gradients"] = self._peers.exchange(
            self._grads, sums, self._n_requested, self._n_sent, "gradients"
        )

    def _sums_by_key(self, grad: Tensor) -> Tensor:
        """Return the summed gradient of each key that was sent, in the order sent."""
        config = self._config
        if not len(self._starts):
            return grad.new_empty(0, grad.shape[1])
        if config.combiner == "mean":
            grad = grad / (self._bag if config.padding_key is None else self._n_in_bag)
        if config.scale != 1:
            grad = grad * config.scale
        sources = self._order[: self._n_sorted]
        if config.bags:
            sources = sources.div(self._bag, rounding_mode="floor")
        return functional.embedding_bag(sources, grad, self._starts, mode="sum")

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients to ``weight.grad`` of this process's rows."""
        self._begin("accumulate")
        add_to_rows(self._weight, self._rows, self._grads, sparse=self._config.sparse)
        del self._rows, self._grads

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the gradient of this process's rows; replaces `accumulate`."""
        self._begin("accumulate")
        rows, grads = self._rows, self._grads
        del self._rows, self._grads
        return gradient_of_rows(self._weight, rows, grads, self._config.sparse)

    @torch.no_grad()
    def explain(self, gradient: Tensor | None) -> dict[str, Tensor]:
        """Run all phases but `accumulate`; return columns with a number for each key of the input.

        `ShardedEmbedding.explain` describes the columns. All processes must call this. A gradient
        of another shape than the output is refused as invalid keys are.
        """
        if self._error is None and gradient is not None:
            wanted = (*self._shape, self._weight.shape[1])
            got = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            if got != wanted:
                self._error = ArgumentError(
                    f"gradient must be that of the vectors, of shape {wanted}, got {got}; no key "
                    "was sent"
                )
        self.counts()
        slots, is_sent = self._slots, torch.zeros_like(self._slots, dtype=torch.bool)
        self.keys()
        is_sent[self._order[self._starts]] = True
        self.lookup()
        self.receive()
        n_sent = sum(self._n_sent)
        vector_norms = self._received[:n_sent].norm(dim=1)
        output = self.combine()
        self.sum_gradients(torch.full_like(output, math.nan) if gradient is None
                           else gradient.to(output))  # fmt: skip
        gradient_norms = self._sums.norm(dim=1)
        self.send_gradients()
        rows, index = self._rows.unique(return_inverse=True)
        sums = self._grads.new_zeros(len(rows), output.shape[-1]).index_add_(0, index, self._grads)
        requested = torch.stack([self._rows.double(), sums.norm(dim=1).double()[index]], 1)
        replies = requested.new_empty(n_sent, 2)
        self._peers.exchange(replies, requested, self._n_sent, self._n_requested, "explanations")
        ranks = torch.arange(self._peers.n, device=slots.device)
        counts = torch.tensor(self._n_sent, device=slots.device)
        of_sent = {
            "owner": ranks.repeat_interleave(counts), "row": replies[:, 0].long(),
            "vector_norm": vector_norms, "gradient_norm": gradient_norms,
            "row_gradient_norm": replies[:, 1],
        }  # fmt: skip
        columns = {"sent": is_sent}
        for name, values in of_sent.items():  # the last one is that of padding, which is not sent
            none = math.nan if values.is_floating_point() else -1
            columns[name] = functional.pad(values, (0, 1), value=none)[slots]
        return columns


class _Union(NamedTuple):
    """Distinct addresses of several exchanges, ascending."""

    addresses: Tensor
    positions: Tensor  # of each input address among them
    n_by_rank: list[int]


class AccumulatedGradients:
    """Gradients of the micro-batches of a step, exchanged together.

    A process sums its gradients of each row over the micro-batches, and sends each sum once. The
    numbers of the rows are not sent. A sender knows which rows it has requested, and an owner knows
    which rows each sender has requested, micro-batch by micro-batch. Both make the same union, in
    ascending order. ``sent`` has the bytes that this process has sent to others.
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
        """Send the sums to the owners of their rows; add the received sums to the own rows."""
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
