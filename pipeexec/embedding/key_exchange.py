"""`Exchange`: keys to the processes that own their rows, vectors back, and gradients to the rows.

Once there and back, phase by phase (after the sparse operation kit of HugeCTR), for rank 0 of two::

    keys           3  0  1  3  5           what this rank asks for
    dispatch       0 | 1  3  5             each key once, grouped by owner, order remembered
    counts         1 | 3                   how many go to each owner, so that it can make room
    keys           0, 4 6                  what others ask of this rank, as rows 0, 2 3
    lookup         v0, v4 v6               from this rank's shard
    vectors        v0 | v1 v3 v5           back to who asked
    combine        v3 v0 v1 v3 v5          in the input's order
    sum            g0 | g1 g3+g3 g5        the other way: summed here for each key
    gradients      g0, ...                 and sent to the owners
    accumulate     row 0 += g0, ...        and there, over all who asked

Nothing here knows of autograd. Several exchanges may be under way, as long as all processes run
their phases in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_layout import Layout
from pipesim.errors import ExecutionError, PeerError, PipeError

__all__ = ["Exchange", "Summed", "Terms", "add_to_rows"]

_PHASES = ("counts", "keys", "lookup", "vectors", "combine", "sum", "gradients", "accumulate")
#: The count that says that a process has refused its keys.
_REFUSED = -1


class Terms(NamedTuple):
    """What all exchanges of an embedding have in common.

    Attributes
    ----------
    layout
        Where rows lie.
    combiner
        ``"sum"`` or ``"mean"`` of the vectors of a bag; None where each key has its own.
    padding_key
        The key that stands for no key.
    scale
        By which gradients are multiplied.
    sparse
        Whether gradients of rows are sparse.
    unique
        Whether each key is sent once, or as often as it occurs.
    """

    layout: Layout
    combiner: str | None
    padding_key: int | None
    scale: float
    sparse: bool
    unique: bool = True

    @property
    def bags(self) -> bool:
        """Whether the last dimension of keys is that of bags."""
        return self.combiner is not None

    def check(self, keys: Tensor) -> None:
        """Raise `ArgumentError` unless keys, on whatever device, are rows."""
        layout, bags = self.layout, self.bags
        layout.check_form(keys, keys.device, bags=bags)
        bad = layout.outside(keys, bags=bags)
        if self.padding_key is not None:
            bad &= keys != self.padding_key
        if bad.any():
            raise layout.explain(keys, bad, bags=bags)


class Summed(NamedTuple):
    """Gradients that a process is to send, and which rows it was asked for.

    Attributes
    ----------
    addresses, gradients
        Of the keys that it has sent; shape ``(n,)`` and ``(n, dim)``.
    rows
        Of its own rows, those that others have asked for, one sender after the other.
    wanted
        How many of ``rows`` each has asked for.
    """

    addresses: Tensor
    gradients: Tensor
    rows: Tensor
    wanted: list[int]


class Exchange:
    """One set of keys on its way; made by `ShardedEmbedding.dispatch`.

    All processes must call the same phases, in this order: `counts`, `keys`, `lookup`, `vectors`,
    and where there are gradients `gradients` and `accumulate` (or `gradient`). `vectors` is
    `receive` and then `combine`, `gradients` is `sum_gradients` and then `send_gradients`; after
    `sum_gradients`, `summed` may take the place of the rest. Memory that later phases do not need
    is given back at once.

    Parameters
    ----------
    keys
        This process's.
    weight
        This process's rows.
    terms
        Those of the embedding.
    peers
        The processes that share it.
    keeps_keys
        Whether it keeps the keys that it sends, which `summed` needs.

    Attributes
    ----------
    sent
        Bytes that this process has sent to others, by phase.
    """

    def __init__(
        self, keys: Tensor, weight: Tensor, terms: Terms, peers: Peers, *, keeps_keys: bool = False
    ) -> None:
        self.sent: dict[str, int] = {}
        self._keeps_keys = keeps_keys
        self._weight, self._terms, self._peers = weight, terms, peers
        self._n_done = 0
        self._error: PipeError | None = None
        try:
            terms.layout.check_form(keys, weight.device, bags=terms.bags)
        except PipeError as error:  # raised once the others know
            self._error = error
            return
        with torch.no_grad():
            self._keys = keys
            self._shape = keys.shape[: keys.dim() - terms.bags]
            self._bag = keys.shape[-1] if terms.bags else 1
            self._group()

    def _group(self) -> None:
        """Group keys by owner, each once if unique; nothing here waits for the device."""
        terms, keys = self._terms, self._keys
        layout = terms.layout
        addresses = layout.addresses(keys, bags=terms.bags)
        self._bad = layout.outside(keys, bags=terms.bags)
        if terms.padding_key is not None:
            padding = keys == terms.padding_key
            addresses = addresses.masked_fill(padding, layout.beyond)
            self._bad &= ~padding
            if terms.combiner == "mean":
                self._n_in_bag = (~padding).sum(-1).clamp_(min=1).view(-1, 1)
        self._addresses, self._order = addresses.reshape(-1).sort(stable=True)
        self._is_first = torch.ones_like(self._addresses, dtype=torch.bool)
        torch.ne(self._addresses[1:], self._addresses[:-1], out=self._is_first[1:])
        if not terms.unique:  # all of padding stays one key
            self._is_first[1:] |= self._addresses[1:] != layout.beyond
        n_before = functional.pad(self._is_first.cumsum(0), (1, 0))
        # Where each vector comes back to.
        self._slots = torch.empty_like(self._order).scatter_(0, self._order, n_before[1:] - 1)
        owners = torch.arange(layout.n_ranks + 1, device=keys.device, dtype=layout.dtype)
        ends = torch.searchsorted(self._addresses, owners * layout.rows_per_rank)
        self._n_kept = ends[-1:]
        self._counts = n_before[ends].diff()

    @property
    def n_received(self) -> int:
        """Number of keys that this process was asked for, by itself too; known after `counts`."""
        return sum(self._wanted)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds between two phases."""
        return (value for value in vars(self).values() if isinstance(value, Tensor))

    def _begin(self, phase: str, name: str | None = None) -> None:
        """Raise unless it is this phase's turn; its name is that of the method that was called."""
        if _PHASES[self._n_done : self._n_done + 1] != (phase,):
            turn = "nothing: it is done" if self._n_done == len(_PHASES) else _PHASES[self._n_done]
            raise ExecutionError(
                f"an exchange of keys was asked for {name or phase}, and next comes {turn}; run "
                f"its phases once each, in order: {', '.join(_PHASES)}"
            )
        self._n_done += 1

    @torch.no_grad()
    def counts(self) -> None:
        """Tell each owner how many keys will come, and learn how many will come here.

        Raises
        ------
        ArgumentError
            If a key is no row, or keys are of the wrong type or shape; the others are told.
        PeerError
            If another process refused its keys.
        LostConnection
            If a process is gone.
        """
        self._begin("counts")
        n, device = self._peers.n, self._weight.device
        if self._error is None:
            given = torch.where(self._bad.any(), _REFUSED, self._counts)
        else:
            given = torch.full((n,), _REFUSED, device=device)
        found = torch.empty_like(given)
        self.sent["counts"] = self._peers.exchange(found, given, [1] * n, [1] * n, "counts")
        if self._error is not None:
            raise self._error
        numbers = torch.cat([given, found, self._n_kept]).tolist()  # to the host, all at once
        self._asked, self._wanted, self._n_sorted = numbers[:n], numbers[n:-1], numbers[-1]
        self._check()
        del self._bad, self._counts, self._n_kept, self._keys

    def _check(self) -> None:
        """Raise if this process, or another, has refused its keys."""
        if _REFUSED in self._asked:
            raise self._terms.layout.explain(self._keys, self._bad, bags=self._terms.bags)
        if _REFUSED in self._wanted:
            rank = self._peers.ranks[self._wanted.index(_REFUSED)]
            raise PeerError(f"rank {rank} refused its keys, as its own error says; none was sent")

    @torch.no_grad()
    def keys(self) -> None:
        """Send each owner the keys, as addresses, and receive those of this process's rows."""
        self._begin("keys")
        n_asked = sum(self._asked)
        # Padding comes last, and is asked of nobody.
        self._starts = self._is_first.nonzero_static(size=n_asked).view(-1)
        given = self._addresses.index_select(0, self._starts)
        del self._is_first, self._addresses
        if self._keeps_keys:
            self._given = given
        found = given.new_empty(sum(self._wanted))
        self.sent["keys"] = self._peers.exchange(found, given, self._wanted, self._asked, "keys")
        self._rows = found.sub_(self._peers.rank * self._terms.layout.rows_per_rank)

    @torch.no_grad()
    def lookup(self) -> None:
        """Take from this process's rows what others, and this process, asked for."""
        self._begin("lookup")
        self._found = self._weight.index_select(0, self._rows)

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """Send the vectors back; return those of the input's keys, in order, combined."""
        self.receive()
        return self.combine()

    @torch.no_grad()
    def receive(self) -> None:
        """Send the vectors back, and receive those that this process has asked for."""
        self._begin("vectors")
        n_asked = sum(self._asked)
        padded = self._terms.padding_key is not None
        self._received = self._weight.new_empty(n_asked + padded, self._weight.shape[1])
        self._received[n_asked:] = 0
        self.sent["vectors"] = self._peers.exchange(
            self._received[:n_asked], self._found, self._asked, self._wanted, "vectors"
        )
        del self._found

    @torch.no_grad()
    def combine(self) -> Tensor:
        """Return the vectors of the input's keys, in order, combined."""
        self._begin("combine")
        padding = sum(self._asked) if self._terms.padding_key is not None else None
        output = self._combine(self._received, padding)
        del self._slots, self._received
        return output.view(*self._shape, self._weight.shape[1])

    def _combine(self, vectors: Tensor, padding: int | None) -> Tensor:
        """Return the vector of each key, or of each bag."""
        if self._terms.combiner is None:
            return vectors.index_select(0, self._slots)
        if not self._slots.numel():  # no bag, or empty ones
            return vectors.new_zeros(self._shape.numel(), vectors.shape[1])
        bags = self._slots.view(-1, self._bag)
        mode = self._terms.combiner
        return functional.embedding_bag(bags, vectors, mode=mode, padding_idx=padding)

    @torch.no_grad()
    def gradients(self, grad_output: Tensor) -> None:
        """Sum the gradients of each key that was sent, and send them to its owner.

        Parameters
        ----------
        grad_output
            Of what `vectors` returned.
        """
        self.sum_gradients(grad_output, "gradients")
        self.send_gradients()

    @torch.no_grad()
    def sum_gradients(self, grad_output: Tensor, name: str = "sum") -> None:
        """Sum the gradients of each key that was sent; ``name`` is what an error calls the call."""
        self._begin("sum", name)
        self._sums = self._summed(grad_output.reshape(-1, self._weight.shape[1]))
        del self._order, self._starts

    def summed(self) -> Summed:
        """Return the sums and their rows, in place of sending them; the last phase."""
        self._begin("gradients", "summed")
        found = Summed(self._given, self._sums, self._rows, self._wanted)
        self._n_done = len(_PHASES)
        return found

    @torch.no_grad()
    def send_gradients(self) -> None:
        """Send the sums to the owners of the keys."""
        self._begin("gradients")
        given = self._sums
        del self._sums
        self._grads = given.new_empty(sum(self._wanted), given.shape[1])
        self.sent["gradients"] = self._peers.exchange(
            self._grads, given, self._wanted, self._asked, "gradients"
        )

    def _summed(self, grad: Tensor) -> Tensor:
        """Return the sum of the gradients of each key that was sent, in the order sent."""
        terms = self._terms
        if not len(self._starts):
            return grad.new_empty(0, grad.shape[1])
        if terms.combiner == "mean":
            grad = grad / (self._bag if terms.padding_key is None else self._n_in_bag)
        if terms.scale != 1:
            grad = grad * terms.scale
        sources = self._order[: self._n_sorted]
        if terms.bags:
            sources = sources.div(self._bag, rounding_mode="floor")
        return functional.embedding_bag(sources, grad, self._starts, mode="sum")

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients to ``weight.grad`` of this process's rows."""
        self._begin("accumulate")
        add_to_rows(self._weight, self._rows, self._grads, sparse=self._terms.sparse)
        del self._rows, self._grads

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """Return the gradient of this process's rows; in place of `accumulate`."""
        self._begin("accumulate")
        rows, grads = self._rows, self._grads
        del self._rows, self._grads
        return _gradient(self._weight, rows, grads, self._terms.sparse)


def add_to_rows(weight: Tensor, rows: Tensor, grads: Tensor, *, sparse: bool) -> None:
    """Add gradients of rows to ``weight.grad``, a sparse one where there is none and ``sparse``."""
    gradient = weight.grad
    if gradient is not None and not gradient.is_sparse:
        gradient.index_add_(0, rows, grads)
        return
    new = _gradient(weight, rows, grads, sparse)
    weight.grad = new if gradient is None else gradient + new


def _gradient(weight: Tensor, rows: Tensor, grads: Tensor, sparse: bool) -> Tensor:
    """Return the gradient of all rows."""
    if sparse:
        return torch.sparse_coo_tensor(
            rows.long()[None], grads, weight.shape, check_invariants=False, is_coalesced=False
        )
    return torch.zeros_like(weight).index_add_(0, rows, grads)
