"""Micro-batches of a step: `Microbatches` are given one by one, `BatchShares` shares them out.

`Microbatches` may have different shapes. `BatchShares` assigns the parts of a batch to the
data-parallel replicas of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipeexec.devices.device import Device, RemoteDevice
from pipeexec.distributed.processes import Processes
from pipeexec.nesting import leaves, tensors_in, with_tensors
from pipesim.errors import (
    ArgumentError,
    ArgumentTypeError,
    check_count,
    check_function,
    check_list,
    check_numbers,
)
from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op
from pipesim.utils.checks import checked_names


class BatchFacts(NamedTuple):
    """Facts of each of the `Microbatches` that processes tell each other, before a step."""

    inputs: list[str]  # `shapes_as_text`
    targets: list[str]  # `shapes_beyond_samples`, as text
    weights: list[float] | None  # None if samples count


@checked_names
class Microbatches:
    """Micro-batches of a step, in place of a batch that is split evenly.

    Their tensors may have different shapes: numbers of samples, lengths of sequences.

    Parameters
    ----------
    microbatches
        One value a micro-batch, each nested as a batch of `Pipeline.step` may be. All have the same
        nesting. With data-parallel replicas, those of replica 0 come first. If the schedule has
        slices of sequences, one value a slice, those of the first sequence first; slices of a
        sequence may have different lengths too.
    weights
        Weight of each micro-batch in a mean, such as its number of tokens. By default, the number
        of its samples, or that of the positions of a slice. A loss that returns ``(sum, count)``
        needs no weights.

    See Also
    --------
    pipeexec.Pipeline.step : Run a step on them.
    pipesim.Costs : Costs with a value a micro-batch.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 2))
    >>> stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    >>> batch = px.Microbatches([torch.ones(3, 4), torch.ones(5, 4)])
    >>> with px.Pipeline(stages, graph, ["cpu"] * 2, mse_loss) as pipeline:
    ...     len(pipeline.step(batch, batch).losses)
    2
    """

    def __init__(
        self, microbatches: Sequence[Any], *, weights: Sequence[float] | None = None
    ) -> None:
        if isinstance(microbatches, Tensor):
            raise ArgumentTypeError(
                "microbatches must be a list, got one tensor; give [x0, x1, ...], or cut a tensor "
                "with Microbatches.split(tensor, lengths)"
            )
        values = check_list("microbatches", microbatches, "one value a micro-batch: [x0, x1, ...]")
        _check_values(values)
        self._values = tuple(values)
        self.weights: tuple[float, ...] | None = None
        if weights is not None:
            row = check_numbers("weights", weights)
            if len(row) != len(values) or not all(0 < x < math.inf for x in row):
                raise ArgumentError(
                    f"weights must be {len(values)} finite numbers above 0, one a micro-batch, got "
                    f"{row!r:.80}"
                )
            self.weights = tuple(row)

    @classmethod
    def split(cls, batch: Any, lengths: Sequence[int], *, dim: int = 0) -> Microbatches:
        """Cut the tensors of a batch into micro-batches of given lengths along a dimension.

        Parameters
        ----------
        batch
            Tensors nested in any way. Tensors without dimensions, and those of length 1 in ``dim``,
            are given whole to every micro-batch.
        lengths
            Length of each micro-batch in ``dim``: a number of samples, or of packed tokens.
        dim
            Dimension that is cut.

        Returns
        -------
        Microbatches
            One micro-batch a length, without weights. Tensors are views.

        Examples
        --------
        >>> import torch
        >>> import pipeexec as px
        >>> px.Microbatches.split(torch.ones(8, 4), [3, 5])
        <2 Microbatches: (3, 4); (5, 4)>
        """
        row = check_list("lengths", lengths, "one whole number a micro-batch")
        if not row or not all(type(n) is int and n > 0 for n in row):
            raise ArgumentError(
                f"lengths must be whole numbers of at least 1, one a micro-batch, got {row!r:.80}; "
                "leave empty micro-batches out"
            )
        if type(dim) is not int:
            raise ArgumentTypeError(f"dim must be a whole number, got {dim!r:.60}")
        columns = [
            _cut(path, x, row, dim) for path, x in leaves(batch, "batch") if isinstance(x, Tensor)
        ]
        if not columns:
            raise ArgumentError(f"batch must hold a tensor, got {type(batch).__name__}")
        if all(x is column[0] for column in columns for x in column) and len(row) > 1:
            raise ArgumentError(
                f"lengths add up to {sum(row)}, but no tensor of the batch has more than one "
                f"element in dimension {dim}; give another dim"
            )
        return cls([with_tensors(batch, part) for part in zip(*columns, strict=True)])

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __repr__(self) -> str:
        shapes = [", ".join(str(tuple(x.shape)) for x in tensors_in(v)[:2]) for v in self._values]
        more = ", ..." if len(shapes) > 6 else ""
        return f"<{len(self)} Microbatches: {'; '.join(shapes[:6])}{more}>"

    def take(self, numbers: Sequence[int]) -> Microbatches:
        """Return the micro-batches of some numbers, in this order, with their weights.

        Parameters
        ----------
        numbers
            Numbers of micro-batches, from 0; at least one.

        Returns
        -------
        Microbatches
            The chosen micro-batches.
        """
        row = check_list("numbers", numbers, "numbers of micro-batches, such as [1, 0]")
        for k in row:
            if check_count("numbers: each", k, 0) >= len(self):
                raise ArgumentError(f"numbers has {k}, but there are {len(self)} micro-batches")
        weights = None if self.weights is None else [self.weights[k] for k in row]
        return Microbatches([self._values[k] for k in row], weights=weights)

    def map(self, function: Callable[[Any], Any]) -> Microbatches:
        """Return the result of a function for each micro-batch, with the same weights.

        Parameters
        ----------
        function
            Function of a micro-batch; returns a tensor or nested tensors.

        Returns
        -------
        Microbatches
            As many micro-batches, in the same order.
        """
        check_function("function", function, "function(microbatch)")
        return Microbatches([function(value) for value in self._values], weights=self.weights)

    def pin_memory(self) -> Microbatches:
        """Return micro-batches in pinned memory.

        A DataLoader with ``pin_memory=True`` calls it.

        Returns
        -------
        Microbatches
            Copies of all tensors, with the same weights.
        """
        return self.map(lambda x: with_tensors(x, [t.pin_memory() for t in tensors_in(x)]))


def are_microbatches(*batches: object) -> bool:
    """Return whether inputs or targets are `Microbatches`."""
    return any(isinstance(batch, Microbatches) for batch in batches)


def batch_facts(inputs: Any, targets: Any) -> BatchFacts | None:
    """Return the facts of a step's `Microbatches`; None for another batch."""
    if not are_microbatches(inputs, targets):
        return None
    rows = [batch.weights for batch in (inputs, targets) if isinstance(batch, Microbatches)]
    weights = next((row for row in rows if row is not None), None)
    if any(row not in (None, weights) for row in rows):
        raise ArgumentError("inputs and targets have different weights; give them with the targets")
    return BatchFacts(
        [] if inputs is None else shapes_as_text(inputs),
        [] if targets is None else [str(shapes_beyond_samples(x)) for x in targets],
        None if weights is None else list(weights),
    )


def shapes_beyond_samples(value: object) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors of a value, without their first dimension."""
    return tuple(tuple(x.shape[1:]) for x in tensors_in(value))


def shapes_as_text(microbatches: Microbatches) -> list[str]:
    """Return shapes and types of the tensors of each micro-batch, and its other values."""
    return [
        ", ".join(
            f"{path} {x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"{path} {x!r:.100}"
            for path, x in leaves(value)
        )
        for value in microbatches
    ]


def _check_values(values: Sequence[Any]) -> None:
    """Raise `ArgumentError` unless values can be the micro-batches of one step."""
    if not values:
        raise ArgumentError("microbatches is empty; give one value a micro-batch")
    rows = [leaves(value, "") for value in values]
    first = [(path, isinstance(x, Tensor)) for path, x in rows[0]]
    if not any(is_tensor for _, is_tensor in first):
        raise ArgumentError(
            f"microbatches[0] is {type(values[0]).__name__} without a tensor; give tensors of "
            "samples, alone or nested"
        )
    for number, row in enumerate(rows):
        form = [(path, isinstance(x, Tensor)) for path, x in row]
        if form != first:
            raise ArgumentError(
                f"microbatches[{number}] has {_outline(form)}, microbatches[0] {_outline(first)}; "
                "nest all micro-batches alike"
            )
    for position, (path, is_tensor) in enumerate(first):
        sizes = [row[position].value.numel() for row in rows] if is_tensor else [1]
        if 0 in sizes and any(sizes):
            number = sizes.index(0)
            raise ArgumentError(
                f"microbatches[{number}]{path} is empty: its shape is "
                f"{tuple(rows[number][position].value.shape)}; give each micro-batch a sample, or "
                "leave it out and lower a schedule of fewer micro-batches"
            )


def _outline(form: Sequence[tuple[str, bool]]) -> str:
    """Return the paths of tensors and other values, as text."""
    return ", ".join(f"{'tensor' if x else 'value'} {path or 'alone'}" for path, x in form[:6])


def _cut(path: str, tensor: Tensor, lengths: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Return the part of a tensor for each micro-batch."""
    if not tensor.dim():
        return (tensor,) * len(lengths)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"dim={dim} is no dimension of {path}, of shape {tuple(tensor.shape)}")
    size, total = tensor.shape[dim], sum(lengths)
    if size == total:
        return torch.split(tensor, list(lengths), dim)
    if size == 1:
        return (tensor,) * len(lengths)
    raise ArgumentError(
        f"lengths add up to {total}, but {path} has shape {tuple(tensor.shape)}: {size} in "
        f"dimension {dim}; give lengths that add up to {size}, or another dim"
    )


def _unflatten(values: Any, weights: Any) -> Microbatches:
    result: Microbatches = object.__new__(Microbatches)
    result._values, result.weights = tuple(values), weights
    return result


# So that `pipeexec.nesting`, a loader that is continued, and torch find their tensors.
pytree.register_pytree_node(
    Microbatches,
    lambda value: (list(value), value.weights),
    _unflatten,
    serialized_type_name="pipeexec.Microbatches",
)


class BatchShares:
    """Assigns the parts of a batch to the replicas of a graph.

    A *share* is the part of a batch that one data-parallel replica takes. It belongs to one graph
    replica, or in a bidirectional pipeline to one replica for each path. Micro-batches are numbered
    over all shares, share after share.

    Attributes
    ----------
    n_microbatches, batch_size
        Micro-batches of each share, in a step and in a mini-batch.
    replica
        The graph's replica that takes each micro-batch, shape ``(n_shares, n_microbatches)``.
    n_paths
        Graph replicas of each share.
    local
        Shares of which this process has a stage.
    shapes
        Those of the `Microbatches` of the last step, of all processes; None if there were none.
    """

    def __init__(self, graph: TaskGraph, devices: Sequence[Device]) -> None:
        is_first = (graph.op == Op.F) & (graph.stage == 0) & (graph.part <= 0)
        first = np.flatnonzero(is_first)
        self.n_microbatches = graph.n_microbatches
        self.batch_size = graph.n_microbatches // graph.n_batches
        self.n_shares = len(first) // graph.n_microbatches
        self.n_paths = graph.n_replicas // self.n_shares
        self.replica = np.zeros((self.n_shares, self.n_microbatches), dtype=np.int64)
        replica = graph.replica[first]
        self.replica[replica // self.n_paths, graph.microbatch[first]] = replica
        is_local = np.array([not isinstance(device, RemoteDevice) for device in devices])
        local_replicas = np.flatnonzero(is_local[graph.homes].any(axis=1))
        self.local = tuple(np.unique(local_replicas // self.n_paths).tolist())
        self._agreed: list[float] | None = None
        self.shapes: list[BatchFacts | None] | None = None
        self._varies = False

    def number(self, replica: int, microbatch: int) -> int:
        """Return the number, over all shares, of a micro-batch of a graph replica."""
        return replica // self.n_paths * self.n_microbatches + microbatch

    def local_numbers(self) -> list[int]:
        """Return the numbers of the micro-batches of which this process has a stage."""
        m = self.n_microbatches
        return [share * m + k for share in self.local for k in range(m)]

    def agree(
        self,
        inputs: Sequence[int],
        targets: Sequence[int],
        processes: Processes | None,
        facts: BatchFacts | None = None,
    ) -> list[float]:
        """Return the samples of every micro-batch of all shares, or their weights if it has any.

        Processes exchange them once, before the first step. If one of them gives `Microbatches`
        there, they exchange samples and shapes before every step.

        ``inputs`` and ``targets`` are the samples of each micro-batch of this process's shares;
        empty if it does not give them.
        """
        own: list[float] = [*(inputs or targets)]
        if processes is None:
            self.shapes = None if facts is None else [facts]
            if facts is not None and facts.weights is not None:
                return facts.weights
            return own
        if self._agreed is None or self._varies:
            rows = processes.share([self.local, inputs, targets, facts and [*facts]])
            by_rank = [None if row[3] is None else BatchFacts(*row[3]) for row in rows]
            self.shapes = by_rank if any(by_rank) else None
            self._varies = self._varies or self.shapes is not None
            weights = [] if self.shapes is None else self._merge_weights(rows)
            self._agreed = weights or self._merge_sizes([row[:3] for row in rows])
            if self._varies:
                return self._agreed
        if facts is not None:
            raise ArgumentError(
                "this step has Microbatches, but the first step split its batches evenly: other "
                "processes do not expect them; give Microbatches in every step, or make another "
                "pipeline with `with_graph` for these steps"
            )
        if self.n_shares == 1:
            return own or self._agreed
        agreed = [self._agreed[number] for number in self.local_numbers()]
        if own and own != agreed:
            raise ArgumentError(
                f"this process gives {sum(own)} samples, but {sum(agreed)} were agreed on before "
                "the first step, with which losses of replicas are weighted; give batches of one "
                "size (drop a smaller last one)"
            )
        return self._agreed

    def input_shapes(self) -> str | None:
        """Return the shapes of all inputs of the last step's `Microbatches`; None without any."""
        if self.shapes is None:
            return None
        return repr([x and x.inputs for x in self.shapes])

    def target_shapes(self) -> list[str]:
        """Return the different shapes of targets of the last step's `Microbatches`."""
        rows = [x.targets for x in self.shapes or () if x is not None]
        return list(dict.fromkeys(shape for row in rows for shape in row))

    @property
    def has_weights(self) -> bool:
        """Whether the last step's `Microbatches` have weights."""
        return any(x is not None and x.weights for x in self.shapes or ())

    def forget_sizes(self) -> None:
        """Let the next batch have other sizes than those that processes agreed on."""
        self._agreed, self._varies = None, False

    def _merge_weights(self, by_rank: Sequence[Sequence[Any]]) -> list[float]:
        """Return the weight of every micro-batch; empty if no process gives weights."""
        m = self.n_microbatches
        merged: dict[int, list[float]] = {}
        for local, _, _, words in by_rank:
            weights = None if words is None else BatchFacts(*words).weights
            for k, share in enumerate(local if weights else ()):
                row = list((weights or ())[k * m : (k + 1) * m])
                if merged.setdefault(share, row) != row:
                    raise ArgumentError(
                        "processes give Microbatches with different weights; give the same"
                    )
        if merged and len(merged) < self.n_shares:
            raise ArgumentError(
                "Microbatches of some replicas have weights, those of others none; give weights "
                "with the targets of all"
            )
        return [x for share in sorted(merged) for x in merged[share]]

    def _merge_sizes(
        self, by_rank: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> list[float]:
        """Return the samples of every micro-batch, from the shares and sizes of each rank."""
        merged: dict[int, tuple[str, list[int]]] = {}
        for share, name, sizes in self._sizes_by_name(by_rank):
            first_name, first = merged.setdefault(share, (name, sizes))
            if first != sizes:
                suffix = f" of replica {share}" if self.n_shares > 1 else ""
                raise ArgumentError(
                    f"{first_name} have {sum(first)} samples{suffix}, {name} {sum(sizes)}; give "
                    "every process of a replica the same batch, or None where it is not needed"
                )
        return [size for share in range(self.n_shares) for size in merged[share][1]]

    def _sizes_by_name(
        self, by_rank: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]
    ) -> Iterator[tuple[int, str, list[int]]]:
        """Yield each share that a rank gives, the name of its batch, and its samples."""
        m = self.n_microbatches
        for rank, (local, *lengths) in enumerate(by_rank):
            for name, sizes in zip(("inputs", "targets"), lengths, strict=True):
                for k, share in enumerate(local if sizes else ()):
                    yield share, f"{name} of rank {rank}", list(sizes[k * m : (k + 1) * m])
