"""`ShardedEmbedding`: tables whose rows are spread over the processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeexec.devices.host_memory import check_tensors
from pipeexec.distributed.processes import Processes
from pipeexec.embedding.key_exchange import AccumulatedGradients, Exchange, ExchangeConfig
from pipeexec.embedding.peers import Peers
from pipeexec.embedding.row_layout import RowLayout, check_row_state, row_state
from pipesim.costs.keys import PLACEMENTS, Keys, checked_tables
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    PipeError,
    check_count,
    check_flag,
    check_name,
    check_type,
)
from pipesim.utils.checks import checked_names

if TYPE_CHECKING:
    import pandas as pd

#: All rows of a table.
FullTable = Tensor | nn.Embedding | nn.EmbeddingBag


def checked_rows(n_rows: int | Sequence[int]) -> list[int]:
    """Return the number of rows of each table."""
    if isinstance(n_rows, Sequence) and not isinstance(n_rows, (str, bytes)):
        if not n_rows:
            raise ArgumentError("n_rows is empty; give the rows of at least one table")
        return [check_count(f"n_rows[{i}]", rows) for i, rows in enumerate(n_rows)]
    return [check_count("n_rows", n_rows)]


def checked_loads(
    counts: Keys | ArrayLike | None, n_rows: list[int], placement: str, unique: bool
) -> list[NDArray[np.float64]] | None:
    """Return how often each row is sent, for ``"frequency"``; None for other placements."""
    if placement != "frequency":
        if counts is not None:
            raise ArgumentError(
                f'counts are for placement="frequency", but placement is {placement!r}; leave them '
                "out, or change it"
            )
        return None
    if counts is None:
        raise ArgumentError(
            'placement="frequency" needs counts: how often each row is requested, or pipesim.Keys'
        )
    if isinstance(counts, Keys):
        loads = counts.loads(unique=unique)
    else:
        loads = checked_tables("counts", counts)
    if list(map(len, loads)) != n_rows:
        raise ArgumentError(
            f"counts are of tables of {list(map(len, loads))} rows, but n_rows is {n_rows}; give "
            "one count for each row"
        )
    return loads


def check_modes(
    combiner: str | None, padding_key: int | None, gradients: str, dtype: torch.dtype
) -> None:
    """Raise `ArgumentError` for an invalid combiner, padding key, ``gradients`` or dtype."""
    if combiner is not None:
        check_name("combiner", combiner, ["sum", "mean"])
    check_name("gradients", gradients, ["sum", "mean"])
    if padding_key is not None and type(padding_key) is not int:
        raise ArgumentTypeError(f"padding_key must be an int or None, got {padding_key!r}")
    if not check_type("dtype", dtype, torch.dtype).is_floating_point:
        raise ArgumentTypeError(f"dtype must be a floating-point type, got {dtype}")


def check_device(device: object) -> None:
    """Raise `ArgumentError` unless torch can make tensors on the device."""
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]  # raises for other types
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ArgumentError(
            f"device {device!r:.60} cannot hold the rows: {str(error).splitlines()[0]}; give such "
            "as 'cpu'"
        ) from error


def table_rows(table: FullTable) -> Tensor:
    """Return the rows of a table."""
    rows = table if isinstance(table, Tensor) else getattr(table, "weight", None)
    if not isinstance(rows, Tensor):
        raise ArgumentTypeError(
            "weights must be a tensor of all rows, or a module that has them as its weight, got "
            f"{table!r:.60} ({type(table).__name__})"
        )
    if rows.dim() != 2:
        raise ArgumentError(f"a table must have shape (rows, dim), got {tuple(rows.shape)}")
    return rows.detach()


@checked_names
class ShardedEmbedding(nn.Module):
    """An embedding whose rows are spread over processes that each have a part of the batch.

    Keys are sent to the processes that own their rows, vectors come back, and gradients are sent to
    the owners. A process sends each of its keys once, however often it occurs, unless
    ``unique=False``. The design follows the sparse operation kit of HugeCTR: data parallel before
    and after the embedding, model parallel within it.

    Every process of the group must make the module, call it (without keys if it has none), and call
    ``backward`` of the output, in the same order.

    Parameters
    ----------
    n_rows
        Number of rows of the table. For several tables, whose keys go in one exchange, a sequence
        of the numbers of rows.
    dim
        Length of a vector.
    process_group
        The processes: a process group, or `Processes`. None: the default group, or this process
        alone if torch.distributed is not initialised. The backend is gloo, or NCCL for rows on
        GPUs.
    combiner
        None: one vector for each key. ``"sum"`` or ``"mean"``: the last dimension of keys is a bag,
        with one vector; a bag without keys gives zeros.
    padding_key
        The key that stands for no key: its vector is zeros, and bags leave it out.
    gradients
        ``"sum"`` over processes, for a loss over the batches of all processes. ``"mean"``: the sum
        divided by the number of processes, as in DistributedDataParallel for the rest of a model.
    sparse
        Whether the gradient is sparse, with only the rows that occur, as ``SparseAdam`` needs it.
    placement
        Rank of each row; `pipesim.costs.keys` has the formulas.

        - ``"modulo"``: rank ``key % n``, where it is row ``key // n`` of the table.
        - ``"hash"``: by a fixed hash of the key.
        - ``"frequency"``: by ``counts``, so that all ranks get about equally many requests.
    unique
        Whether a process sends each of its keys once, with the sum of its gradients, or as often as
        the key occurs. The results are the same.
    counts
        For ``"frequency"``: how often each row is sent, as an array, or a list of one array a
        table; or `pipesim.Keys`, of which `loads` is used. The same in every process.
    dtype, device
        Type and device of the rows.

    Attributes
    ----------
    weight
        The rows of this process, shape ``(rows, dim)``, table after table. A table has equally many
        places in every process; the last may be unused. One parameter has all tables, so that one
        lookup and one optimizer step serve all.

    Raises
    ------
    CapacityError
        If the rows of this process do not fit in the memory of the machine.
    PeerError
        If another process has an invalid argument, or does not make the module.

    See Also
    --------
    pipeexec.EmbeddingStage : The embedding as a stage of a pipeline.
    pipesim.Keys : Numbers of keys of an embedding, for predictions.
    torch.nn.Embedding : Embedding in one process.

    Notes
    -----
    Rows are drawn from a normal distribution, as in `torch.nn.Embedding`. They depend on the random
    state of the group's first process, not on the number of processes.

    ``state_dict`` has the rows of this process. Another process refuses it, and so does a group of
    another size; save `full_weight` for these.

    Keep the module out of DistributedDataParallel, which would treat the rows of different
    processes as copies of one parameter.

    Examples
    --------
    >>> import torch
    >>> import pipeexec as px
    >>> embedding = px.ShardedEmbedding(8, 4)
    >>> embedding(torch.tensor([1, 5])).shape, embedding.weight.shape, embedding.n_ranks
    (torch.Size([2, 4]), torch.Size([8, 4]), 1)
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
            layout = RowLayout(rows, peers.n, several=several, placement=placement, loads=loads)
            check_tensors(
                f"the share of a process of n_rows={n_rows}, dim={dim}",
                layout.rows_per_rank * dim * dtype.itemsize,
                "give fewer rows, or spread them over more processes",
                device,
            )
        except PipeError as error:
            peers.agree(error)
            raise
        seed = peers.agree({
            "n_rows": rows if several else rows[0], "dim": dim,
            "combiner": combiner, "padding_key": padding_key, "gradients": gradients,
            "sparse": bool(sparse), "dtype": str(dtype),
            "placement": placement, "unique": bool(unique), "placement by counts": layout.digest,
        })  # fmt: skip
        self._peers, self.dim = peers, dim
        self.gradients = gradients
        scale = 1 / peers.n if gradients == "mean" else 1.0
        self._config = ExchangeConfig(
            layout, combiner, padding_key, scale, bool(sparse), bool(unique)
        )
        self.weight = nn.Parameter(
            torch.empty(layout.rows_per_rank, dim, dtype=dtype, device=device)
        )
        layout.draw(self.weight.detach(), peers.rank, seed)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Number of rows of each table, over all processes."""
        return self.layout.n_rows

    @property
    def n_ranks(self) -> int:
        """Number of processes that share the rows."""
        return self._peers.n

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of these processes in torch.distributed's default group."""
        return tuple(self._peers.ranks)

    @property
    def rank(self) -> int:
        """Number of this process among those that share the rows."""
        return self._peers.rank

    @property
    def layout(self) -> RowLayout:
        """Rows of each table and rank."""
        return self._config.layout

    @property
    def combiner(self) -> str | None:
        """How the vectors of a bag are combined; None for one vector a key."""
        return self._config.combiner

    @property
    def placement(self) -> str:
        """Placement of rows on ranks: ``"modulo"``, ``"hash"`` or ``"frequency"``."""
        return self.layout.placement

    @property
    def unique(self) -> bool:
        """Whether a process sends each of its keys once."""
        return self._config.unique

    @classmethod
    def from_full(
        cls,
        weights: FullTable | Sequence[FullTable],
        process_group: dist.ProcessGroup | Processes | None = None,
        **options: Any,
    ) -> ShardedEmbedding:
        """Return an embedding with the given rows; every process keeps its part.

        Parameters
        ----------
        weights
            A tensor of all rows, or a module that has them; a list of these for several tables.
            Only the rows of a module are used: give ``combiner`` and ``padding_key`` as options.
        process_group, **options
            As for the class; ``dtype`` and ``device`` default to those of the rows.

        Returns
        -------
        ShardedEmbedding
            The embedding, with copies of the rows of this process.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> embedding = px.ShardedEmbedding.from_full(torch.eye(4))
        >>> embedding(torch.tensor([2])).tolist()
        [[0.0, 0.0, 1.0, 0.0]]
        """
        several = isinstance(weights, Sequence)
        if several and not weights:
            raise ArgumentError("weights is empty; give the rows of at least one table")
        tables = list(map(table_rows, weights if isinstance(weights, Sequence) else [weights]))
        if len({table.shape[1] for table in tables}) != 1:
            shapes = [tuple(table.shape) for table in tables]
            raise ArgumentError(f"tables must have rows of one length, got shapes {shapes}")
        first = tables[0]
        options = {"dtype": first.dtype, "device": first.device, **options}
        sizes = [len(table) for table in tables]
        embedding = cls(sizes if several else sizes[0], first.shape[1], process_group, **options)
        for table, place, keys in embedding.layout.shards(embedding.rank):
            rows = tables[table]
            embedding.weight.detach()[place] = rows[keys.to(rows.device)].to(embedding.weight)
        return embedding

    def full_weight(self) -> Tensor | list[Tensor]:
        """Return all rows of all processes; every process must call this.

        Returns
        -------
        torch.Tensor or list of torch.Tensor
            Copy of all rows, shape ``(n_rows, dim)``; a list of one a table if there are several.

        Raises
        ------
        LostConnection
            If a process has exited.
        """
        layout = self.layout
        shards = self._peers.gather(self.weight.detach(), "rows")
        tables = [shards[0].new_empty(rows, self.dim) for rows in layout.n_rows]
        for rank, rows in enumerate(shards):
            for table, place, keys in layout.shards(rank):
                tables[table][keys.to(rows.device)] = rows[place]
        return tables if layout.several else tables[0]

    def check(self, keys: Tensor) -> None:
        """Raise unless keys are rows, in a type and shape that `forward` takes.

        This is local: nothing is sent, and no process waits.

        Parameters
        ----------
        keys
            As for `forward`.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> embedding = px.ShardedEmbedding(8, 4)
        >>> embedding.check(torch.tensor([1, 9]))
        Traceback (most recent call last):
            ...
        pipesim.errors.ArgumentError: key 9 at (1,) of the keys is no row of table 0, ...
        """
        self._config.check(check_type("keys", keys, Tensor))

    def dispatch(self, keys: Tensor, *, keeps_keys: bool = False) -> Exchange:
        """Return an exchange of keys; the caller calls its phases one by one, without autograd.

        Parameters
        ----------
        keys
            As for `forward`. ``counts`` raises the error of invalid keys, after it has told the
            other processes.
        keeps_keys
            Whether the gradients of the exchange go to `accumulated_gradients`.

        Returns
        -------
        Exchange
            The exchange; its methods are called in the order ``counts``, ``keys``, ``lookup``,
            ``vectors``.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> embedding = px.ShardedEmbedding(8, 4)
        >>> exchange = embedding.dispatch(torch.tensor([1, 5]))
        >>> for phase in (exchange.counts, exchange.keys, exchange.lookup):
        ...     phase()
        >>> exchange.vectors().shape
        torch.Size([2, 4])
        """
        check_flag("keeps_keys", keeps_keys)
        return Exchange(keys, self.weight, self._config, self._peers, keeps_keys=keeps_keys)

    def explain(self, keys: Tensor, gradient: Tensor | None = None) -> pd.DataFrame:
        """Exchange keys, and return a table of what happens to each: of all processes, in each.

        Every process of the group must call this, with keys of its own. It runs the phases of a
        training step, but changes neither rows nor their gradients. Training without it keeps
        nothing for it.

        Parameters
        ----------
        keys
            As for `forward`.
        gradient
            Gradient of the result of `forward`, such as ``vectors.grad`` after a backward; its
            shape. None: columns of gradients are NaN.

        Returns
        -------
        pandas.DataFrame
            A row for each key, those of rank 0 first, in the order of the input:

            - ``rank``: the rank whose key it is, among those that share the rows.
            - ``position``: place of the key in the flattened keys of this rank.
            - ``table``, ``key``: number of the table, and the key.
            - ``owner``: rank that has the row; ``key % n_ranks`` by modulo. -1 for a padding key.
            - ``sent``: whether the key is sent to the owner, or stays with it. False for padding
              keys, and for repeated ones if ``unique``: the first one stands for all.
            - ``row``: row of the owner's ``weight``; ``key // n_ranks`` by modulo for one table. A
              message has its keys in the order of these. -1 for a padding key.
            - ``vector_norm``: L2 norm of the vector that the owner sends back.
            - ``gradient_norm``: L2 norm of the gradient that is sent for the key, summed over
              repeated keys.
            - ``row_gradient_norm``: L2 norm of the sum of the gradients that the row gets from all
              ranks.

            Norms are NaN for a padding key, and those of gradients if a rank gave none.

        Raises
        ------
        PeerError
            If another process has refused its keys or its gradient.

        See Also
        --------
        pipesim.plot.exchange : The table as a figure.

        Examples
        --------
        A process alone has all rows. The keys that it sends to each owner:

        >>> import pandas as pd
        >>> import torch
        >>> import pipeexec as px
        >>> embedding = px.ShardedEmbedding(8, 4)
        >>> table = embedding.explain(torch.tensor([5, 1, 5]))
        >>> table[["key", "owner", "sent", "row"]].values.tolist()
        [[5, 0, True, 5], [1, 0, True, 1], [5, 0, False, 5]]
        >>> sent = table[table["sent"]]
        >>> pd.crosstab(sent["rank"], sent["owner"]).values.tolist()
        [[2]]
        """
        from pipesim.utils.packages import pandas as pd

        columns = self.dispatch(keys).explain(gradient)
        position = torch.arange(keys.numel())
        bag = keys.shape[-1] if self.combiner else 1
        own = {
            "rank": torch.full_like(position, self.rank),
            "position": position,
            "table": position // max(1, bag) % len(self.n_rows),
            "key": keys.flatten(),
            **columns,
        }
        everyone = self._peers.share({name: values.tolist() for name, values in own.items()})
        names = ("rank", "position", "table", "key", "owner", "sent", "row", "vector_norm",
                 "gradient_norm", "row_gradient_norm")  # fmt: skip
        return pd.DataFrame({x: [v for own in everyone for v in own[x]] for x in names})

    def accumulated_gradients(self) -> AccumulatedGradients:
        """Return an object that sums the gradients of several exchanges, and sends the sums once.

        Returns
        -------
        AccumulatedGradients
            The object, without gradients so far.
        """
        return AccumulatedGradients(self.weight, self._config, self._peers)

    def forward(self, keys: Tensor) -> Tensor:
        """Return the vectors of keys.

        Parameters
        ----------
        keys
            int32 or int64. Shape for one table: any, or ``(..., bag)`` with a combiner. Shape for
            several tables: ``(..., n_tables)``, or ``(..., n_tables, bag)`` with a combiner.

        Returns
        -------
        Tensor
            Shape of the keys, without the dimension of bags, then ``dim``.

        Raises
        ------
        PeerError
            If another process has refused its keys.
        LostConnection
            If another process has exited.
        """
        output: Tensor = _Lookup.apply(self.weight, self.dispatch(keys))  # type: ignore[no-untyped-call]
        return output

    def get_extra_state(self) -> Tensor:
        """Return a code of the rows that this process has: ``"_extra_state"`` of ``state_dict``.

        Returns
        -------
        torch.Tensor
            Rank, number of ranks, rows of each table, and a code of the placement.
        """
        return row_state(self.layout, self.rank, self.n_ranks)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise unless a state has the rows of this process, for ``load_state_dict``.

        Parameters
        ----------
        state
            Result of `get_extra_state`.
        """
        check_type("state", state, Tensor)
        check_row_state(state, self.layout, self.rank, self.n_ranks)

    def extra_repr(self) -> str:
        """Return the rows, the dimension and the rank, for `repr`.

        Returns
        -------
        str
            The text between the parentheses of `repr`.
        """
        return f"{list(self.n_rows)}, {self.dim}, rank {self.rank} of {self.n_ranks}"


class _Lookup(torch.autograd.Function):
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
