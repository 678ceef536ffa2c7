"""`ShardedEmbedding`: tables whose rows are spread over the processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeexec.devices.host_memory import check_tensors
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.accumulated_gradients import AccumulatedGradients
from pipeexec.embedding.arguments import (
    Whole,
    check_device,
    check_modes,
    checked_loads,
    checked_rows,
    rows_of,
)
from pipeexec.embedding.key_exchange import Exchange, Terms
from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_layout import Layout
from pipesim.costs.keys import Keys
from pipesim.costs.row_placement import PLACEMENTS
from pipesim.errors import (
    ArgumentError,
    PipeError,
    check_count,
    check_flag,
    check_name,
    check_type,
)

__all__ = ["ShardedEmbedding"]


class ShardedEmbedding(nn.Module):
    """An embedding whose rows are spread over processes that each have a part of the batch.

    Keys go to the processes that own their rows, vectors come back, and gradients go the same way;
    each key of a process is sent once, however often it occurs there, unless ``unique=False``.
    After the sparse operation kit of HugeCTR: data parallel before and after, model parallel
    within. Every process of the group must make the module, call it (with no keys if it has none),
    and call ``backward`` of what it returned, in the same order.

    Parameters
    ----------
    n_rows
        Rows of the table; or a sequence of the rows of each of several tables, whose keys go in one
        exchange.
    dim
        Length of a vector.
    process_group
        The processes: a process group, or `Processes`. None: the default group, or this process
        alone where torch.distributed is not initialised. gloo, or NCCL for rows on GPUs.
    combiner
        None: a vector for each key. ``"sum"`` or ``"mean"``: the last dimension of keys is a bag,
        with one vector; zeros where it has no key.
    padding_key
        The key that stands for no key: zeros, or left out of its bag.
    gradients
        ``"sum"`` over processes, right where the loss is that of all of them; ``"mean"``: divided
        by their number, as DistributedDataParallel does with those of the rest of a model.
    sparse
        Whether the gradient is sparse, of the rows that occur alone, as ``SparseAdam`` needs it.
    placement
        Which rank has a row: ``"modulo"``, rank ``key % n``, where it is number ``key // n`` of the
        table; ``"hash"``, by a fixed mixing of the key; ``"frequency"``, dealt by ``counts`` such
        that ranks are asked for about as many rows. `pipesim.costs.row_placement` has the formulas.
    unique
        Whether a process sends each of its keys once, with the sum of its gradients; or as often as
        it occurs. Results are the same.
    counts
        For ``"frequency"``: how often each row is sent, an array or a list of one a table; or
        `pipesim.Keys`, whose `loads` are taken. The same in every process.
    dtype, device
        Of the rows.

    Attributes
    ----------
    weight
        The rows that this process has, of shape ``(rows, dim)``: of the first table, then of the
        next. A table takes equally many on every process, though the last may be no row. One
        parameter for all tables, so that one lookup and one step of an optimizer serve all.

    Raises
    ------
    ArgumentError
        For a wrong argument, one that differs between processes, and other processes in the group
        of another.
    CapacityError
        If the rows of this process do not fit in the memory of the machine.
    PeerError
        If another process has a wrong argument, or does not come.

    Notes
    -----
    Rows are normal, as those of `torch.nn.Embedding`, and do not depend on the number of processes:
    only on the random state of the group's first. ``state_dict`` has this process's rows, and is
    refused by another process, or another number of them: keep `full_weight` for those.
    DistributedDataParallel would take the rows of different processes for copies of one parameter;
    keep the module out of it.
    """

    def __init__(
        self,
        n_rows: int | Sequence[int],
        dim: int,
        process_group: dist.ProcessGroup | Processes | None = None,
        *,
        combiner: str | None = None,
        padding_key: int | None = None,
        gradients: str = "sum",
        sparse: bool = False,
        placement: str = "modulo",
        unique: bool = True,
        counts: Keys | ArrayLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        peers, several = Peers(process_group), isinstance(n_rows, Sequence)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        try:
            rows = checked_rows(n_rows)
            dim = check_count("dim", dim)
            check_modes(combiner, padding_key, gradients, dtype)
            check_flag("sparse", sparse)
            check_device(device)
            check_flag("unique", unique)
            check_name("placement", placement, PLACEMENTS)
            loads = checked_loads(counts, rows, placement, bool(unique))
            layout = Layout(rows, peers.n, several=several, placement=placement, loads=loads)
            check_tensors(
                f"the share of a process of n_rows={n_rows}, dim={dim}",
                layout.rows_per_rank * dim * dtype.itemsize,
                "give fewer rows, or spread them over more processes",
                device,
            )
        except PipeError as error:
            peers.meet(error)
            raise
        seed = peers.meet({
            "n_rows": rows if several else rows[0], "dim": dim,
            "combiner": combiner, "padding_key": padding_key, "gradients": gradients,
            "sparse": bool(sparse), "dtype": str(dtype),
            "placement": placement, "unique": bool(unique), "placement by counts": layout.digest,
        })  # fmt: skip
        self._peers, self.dim = peers, dim
        self.gradients = gradients
        scale = 1 / peers.n if gradients == "mean" else 1.0
        self._terms = Terms(layout, combiner, padding_key, scale, bool(sparse), bool(unique))
        self.weight = nn.Parameter(
            torch.empty(layout.rows_per_rank, dim, dtype=dtype, device=device)
        )
        layout.draw(self.weight.detach(), peers.rank, seed)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of each table, over all processes."""
        return self._terms.layout.n_rows

    @property
    def n_ranks(self) -> int:
        """Number of processes that the rows are spread over."""
        return self._peers.n

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of these processes in torch.distributed's default group."""
        return tuple(self._peers.ranks)

    @property
    def combiner(self) -> str | None:
        """How the vectors of a bag are combined; None where each key has its own."""
        return self._terms.combiner

    @property
    def placement(self) -> str:
        """Which rank has a row: ``"modulo"``, ``"hash"`` or ``"frequency"``."""
        return self._terms.layout.placement

    @property
    def unique(self) -> bool:
        """Whether a process sends each of its keys once."""
        return self._terms.unique

    @classmethod
    def from_full(
        cls,
        weights: Whole | Sequence[Whole],
        process_group: dist.ProcessGroup | Processes | None = None,
        **options: Any,
    ) -> ShardedEmbedding:
        """Return an embedding of given rows, of which every process keeps its own.

        Parameters
        ----------
        weights
            A tensor of all rows, or a module that has them; a list of these for several tables.
            Of a module its rows alone are taken: give ``combiner`` and ``padding_key`` as options.
        process_group, **options
            As for the class; ``dtype`` and ``device`` are those of the rows unless given.

        Raises
        ------
        ArgumentError
            For rows of unlike length, and as for the class.
        """
        several = isinstance(weights, Sequence)
        if several and not weights:
            raise ArgumentError("weights is empty; give the rows of at least one table")
        tables = list(map(rows_of, weights if isinstance(weights, Sequence) else [weights]))
        if len({table.shape[1] for table in tables}) != 1:
            shapes = [tuple(table.shape) for table in tables]
            raise ArgumentError(f"tables must have rows of one length, got shapes {shapes}")
        first = tables[0]
        options = {"dtype": first.dtype, "device": first.device, **options}
        sizes = [len(table) for table in tables]
        made = cls(sizes if several else sizes[0], first.shape[1], process_group, **options)
        for table, place, keys in made._terms.layout.shards(made._peers.rank):
            made.weight.detach()[place] = tables[table][keys.to(tables[table].device)].to(
                made.weight
            )
        return made

    def full_weight(self) -> Tensor | list[Tensor]:
        """Return all rows: a tensor, or one a table; every process must call this.

        Raises
        ------
        LostConnection
            If a process is gone.
        """
        layout = self._terms.layout
        found = self._peers.gather(self.weight.detach(), "rows")
        tables = [found[0].new_empty(rows, self.dim) for rows in layout.n_rows]
        for rank, rows in enumerate(found):
            for table, place, keys in layout.shards(rank):
                tables[table][keys.to(rows.device)] = rows[place]
        return tables if layout.several else tables[0]

    def check(self, keys: Tensor) -> None:
        """Raise `ArgumentError` unless keys are rows, of the type and shape of `forward`'s.

        Of this process alone: nothing is sent, and nobody waits.
        """
        self._terms.check(check_type("keys", keys, Tensor))

    def dispatch(self, keys: Tensor, *, keeps_keys: bool = False) -> Exchange:
        """Return an exchange of keys, whose phases are to be called one by one, without autograd.

        Parameters
        ----------
        keys
            As for `forward`. What is wrong with them is raised by ``counts``, once the other
            processes know.
        keeps_keys
            Whether its gradients go to `accumulated_gradients`.
        """
        check_flag("keeps_keys", keeps_keys)
        return Exchange(keys, self.weight, self._terms, self._peers, keeps_keys=keeps_keys)

    def accumulated_gradients(self) -> AccumulatedGradients:
        """Return what gradients of several exchanges are added to, and exchanged by, together."""
        return AccumulatedGradients(self.weight, self._terms, self._peers)

    def forward(self, keys: Tensor) -> Tensor:
        """Return the vectors of keys.

        Parameters
        ----------
        keys
            int32 or int64. Of one table: any shape; with a combiner ``(..., bag)``. Of several:
            ``(..., n_tables)``, or ``(..., n_tables, bag)``.

        Returns
        -------
        Tensor
            Of the shape of the keys, without that of bags, and ``dim``.

        Raises
        ------
        ArgumentError
            If keys are of another type or shape, or one is no row of its table. Nothing is sent.
        PeerError
            If another process refused its keys.
        LostConnection
            If another process is gone.
        """
        output: Tensor = _Looked.apply(self.weight, self.dispatch(keys))  # type: ignore[no-untyped-call]
        return output

    def get_extra_state(self) -> Tensor:
        """Return which rows these are."""
        layout = self._terms.layout
        code = {"modulo": [], "hash": [-1], "frequency": [-2, layout.digest]}[layout.placement]
        return torch.tensor([self._peers.rank, self._peers.n, *self.n_rows, *code])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise unless a state is of the rows that this process has."""
        check_type("state", state, Tensor)
        if state.tolist() != self.get_extra_state().tolist():
            rank, n, *rows = state.tolist()
            coded = next((i for i, x in enumerate(rows) if x < 0), len(rows))
            placed = {0: "modulo", -1: "hash", -2: "frequency"}.get(sum(rows[coded:][:1]), "?")
            raise ArgumentError(
                f"a state of rank {rank} of {n}, tables of {rows[:coded]} rows"
                f"{f' placed by {placed}' if rows[coded:] or self.placement != 'modulo' else ''}, "
                f"cannot be loaded into rank {self._peers.rank} of {self._peers.n}, tables of "
                f"{list(self.n_rows)} rows placed by {self.placement}; keep full_weight() instead, "
                "and load it by from_full"
            )

    def extra_repr(self) -> str:
        """Return what `repr` says of the module."""
        return f"{list(self.n_rows)}, {self.dim}, rank {self._peers.rank} of {self._peers.n}"


class _Looked(torch.autograd.Function):
    """The phases of an exchange, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, exchange: Exchange) -> Tensor:
        """Return the vectors."""
        ctx.exchange = exchange
        exchange.counts()
        exchange.keys()
        exchange.lookup()
        return exchange.vectors()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this process's rows."""
        ctx.exchange.gradients(grad_output)
        return ctx.exchange.gradient(), None
