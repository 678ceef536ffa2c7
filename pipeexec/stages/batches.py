"""Split a batch of any nesting into micro-batches, and move these to devices.

These rules tell what a micro-batch has of each value of the batch:

- The batch size is the first dimension of the first tensor of the inputs for which it is not 1. If
  there is none, it is 1. Targets have as many samples as inputs.
- A tensor whose first dimension is the batch size is split along it.
- A tensor of first dimension 1 or without dimensions is given whole to every micro-batch, as are
  numbers, text and None.
- Tensors of another first dimension are refused, as are other objects, and lists of one number or
  text for each sample.
- ``batch_dims`` takes precedence: for the path of a value, such as ``"inputs['mask']"``, it has the
  dimension of the samples, or None for values that every micro-batch gets whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.nesting import Leaf, leaves, tensors_in, with_tensors
from pipeexec.stages.microbatches import Microbatches, are_microbatches, batch_facts
from pipeexec.stages.sequence_slices import (
    NO_SLICES,
    SequenceCut,
    cut_parts,
    n_positions,
)
from pipesim.errors import ArgumentError, ArgumentTypeError, BatchWarning, suggestion
from pipesim.utils.caller_warnings import warn_caller

#: Dimension of the samples by path; None for values that are not split.
BatchDims = Mapping[str, int | None]

NO_DIMS: BatchDims = {}
_PLAIN = (str, bytes, int, float, complex, Enum, torch.dtype, torch.device, torch.Size, slice)


class SampleDims(NamedTuple):
    """Number of samples of a batch, and their dimension in each tensor; None: it is not split."""

    n_samples: int
    inputs: tuple[int | None, ...]
    targets: tuple[int | None, ...]


def check_batch_dims(batch_dims: object) -> BatchDims:
    """Return the dimensions of samples by path; raise `ArgumentTypeError` for anything else."""
    dims = {} if batch_dims is None else batch_dims
    if not isinstance(dims, Mapping) or not all(
        isinstance(path, str) and (x is None or (isinstance(x, int) and not isinstance(x, bool)))
        for path, x in dims.items()
    ):
        raise ArgumentTypeError(
            f"batch_dims={batch_dims!r:.80} must be a dict of paths and dimensions, such as "
            "{\"inputs['mask']\": None, 'targets': 1}"
        )
    for path in dims:
        if not path.startswith(("inputs", "targets", "output")):
            raise ArgumentError(
                f"batch_dims has {path!r}, but paths begin with inputs, targets or output, such as "
                "\"inputs['mask']\""
            )
    return dict(dims)


def sample_dims(inputs: Any, targets: Any, batch_dims: BatchDims = NO_DIMS) -> SampleDims:
    """Return the dimension of the samples in each tensor, by the rules of this file."""
    are_tensors = type(inputs) is Tensor and type(targets) is Tensor and not batch_dims
    if are_tensors and inputs.dim() > 0 < targets.dim() and len(inputs) == len(targets):
        return SampleDims(len(inputs), (0,), (0,))  # needs no further look
    sizes: dict[str, int] = {}
    rows: dict[str, tuple[int | None, ...]] = {"inputs": (), "targets": ()}
    for name, batch in (("inputs", inputs), ("targets", targets)):
        if batch is None:
            continue
        values = leaves(batch, name)
        options = dims_by_path(values, name, batch_dims)
        dims = [_dim(leaf, options) for leaf in values if isinstance(leaf.value, Tensor)]
        tensors = [leaf for leaf in values if isinstance(leaf.value, Tensor)]
        size = _n_samples(tensors, dims, options)
        if size is None:
            raise ArgumentError(
                f"{name} must be a tensor of samples or hold one, got {_outline(batch, values)}; "
                "give a torch tensor whose first dimension is that of the samples, alone or nested "
                "in tuples, lists, mappings and dataclasses"
            )
        sizes[name], first = size, sizes.get("inputs")
        if first is not None and size != first:
            raise ArgumentError(
                f"inputs have {first} samples, targets {size}; give as many, or name tensors that "
                f"are no samples in batch_dims of Pipeline, such as {{{tensors[0].path!r}: None}}"
            )
        _check_plain(values, options, size)
        rows[name] = tuple(
            _checked_dim(leaf, dim, size, name, leaf.path in options)
            for leaf, dim in zip(tensors, dims, strict=True)
        )
    return SampleDims(next(iter(sizes.values()), 0), rows["inputs"], rows["targets"])


def warn_of_squares(inputs: Any, batch_dims: BatchDims) -> None:
    """Warn of tensors that are split, but may be masks of sequences as long as the batch is large.

    They are square matrices of that size, behind another tensor.
    """
    dims = sample_dims(inputs, None, batch_dims)
    values = leaves(inputs, "inputs")
    tensors = [leaf for leaf in values if isinstance(leaf.value, Tensor)]
    options = dims_by_path(values, "inputs", batch_dims)
    for path, tensor in (
        leaf for leaf, dim in zip(tensors[1:], dims.inputs[1:], strict=True) if dim is not None
    ):
        if tensor.shape == (dims.n_samples, dims.n_samples) and path not in options:
            warn_caller(
                f"{path} has shape {tuple(tensor.shape)}, and the batch {dims.n_samples} samples: "
                "it is split along its first dimension. If it is a mask of the sequence, which "
                f"every micro-batch needs whole, give Pipeline batch_dims={{{path!r}: None}}; if "
                f"its rows are samples, {{{path!r}: 0}}",
                BatchWarning,
            )


def dims_by_path(values: Sequence[Leaf], name: str, batch_dims: BatchDims) -> dict[str, int | None]:
    """Return the dimensions that ``batch_dims`` has for the values of a batch, by their paths."""
    options: dict[str, int | None] = {}
    for key, dim in batch_dims.items():
        if not key.startswith(name):
            continue
        inside = [
            path for path, _ in values if path == key or path.startswith((f"{key}[", f"{key}."))
        ]
        if not inside:
            paths = [path for path, _ in values]
            raise ArgumentError(
                f"batch_dims has {key!r}, but {name} has {', '.join(paths[:12])}"
                f"{suggestion(key, paths)}"
            )
        options.update(dict.fromkeys(inside, dim))
    return options


def _dim(leaf: Leaf, options: Mapping[str, int | None]) -> int | None:
    """Return the dimension of a tensor's samples, if it has samples; None if it is not split."""
    path, tensor = leaf
    if path not in options:
        return 0 if tensor.dim() else None
    dim = options[path]
    if dim is not None and not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(
            f"batch_dims has dimension {dim} for {path}, whose shape is {tuple(tensor.shape)}"
        )
    return dim


def _n_samples(
    tensors: Sequence[Leaf], dims: Sequence[int | None], options: Mapping[str, int | None]
) -> int | None:
    """Return the number of samples of inputs or of targets; None if they have no samples."""
    sizes = [
        (leaf.value.shape[dim], leaf.path in options)
        for leaf, dim in zip(tensors, dims, strict=True)
        if dim is not None
    ]
    if not sizes:
        return None
    return next((size for size, is_named in sizes if size != 1 or is_named), 1)


def _checked_dim(
    leaf: Leaf, dim: int | None, n_samples: int, name: str, is_named: bool
) -> int | None:
    """Return the dimension along which a tensor is split; None if it is not."""
    path, tensor = leaf
    if dim is None or tensor.shape[dim] == n_samples:
        return dim
    if tensor.shape[dim] == 1 and not is_named:
        return None
    raise ArgumentError(
        f"{path} has shape {tuple(tensor.shape)}, the batch {n_samples} samples; give {name} with "
        f"as many, or give Pipeline batch_dims={{{path!r}: None}} if every micro-batch needs all "
        "of it, or the dimension of its samples in place of None"
    )


def _check_plain(values: Sequence[Leaf], options: Mapping[str, int | None], n_samples: int) -> None:
    """Raise `ArgumentError` for values that may have samples, but are no tensors."""
    lists: dict[str, list[bool]] = {}
    for path, value in values:
        is_plain = isinstance(value, _PLAIN) and path not in options
        if path.endswith("]") and path[:-1].rpartition("[")[2].isdecimal():
            lists.setdefault(path.rpartition("[")[0], []).append(is_plain)
        if not (is_plain or isinstance(value, Tensor) or value is None or path in options):
            raise ArgumentError(
                f"{path} is a {type(value).__name__}, which cannot be split into micro-batches; "
                f"give tensors, or give Pipeline batch_dims={{{path!r}: None}} if every "
                "micro-batch needs all of it"
            )
    for path, row in lists.items():
        if len(row) == n_samples != 1 and all(row):
            raise ArgumentError(
                f"{path} has {len(row)} values that are no tensors, and the batch as many samples; "
                f"give a tensor of them, or give Pipeline batch_dims={{{path!r}: None}} if every "
                "micro-batch needs all of them"
            )


def _outline(batch: object, values: Sequence[Leaf]) -> str:
    """Return the type of a batch, and those of its first values."""
    if len(values) == 1 and values[0].value is batch:
        return _describe(batch)
    kinds = ", ".join(_describe(x) for _, x in values[:8])
    return f"{type(batch).__name__} of {kinds or 'no values'}"


def _describe(value: object) -> str:
    return f"{value.dim()}-d tensor" if isinstance(value, Tensor) else type(value).__name__


#: Tensors, nested in any way.
Batch = Any


class SplitBatch(NamedTuple):
    """Tensors of each micro-batch, and its samples; inputs or targets of None have none.

    The size of a slice is the number of positions of all its samples.
    """

    inputs: list[Values]
    targets: list[Values]
    sizes: list[int]


def check_batch(inputs: Batch, targets: Batch) -> None:
    """Raise unless the tensors of inputs and targets are dense data; either may be None."""
    for name, batch in (("inputs", inputs), ("targets", targets)):
        for path, tensor in leaves(batch, name):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.requires_grad:
                raise ArgumentError(
                    f"{path} require gradients, which a step of a Pipeline does not compute; give "
                    f"{path}.detach(), or use pipeexec.GPipe, whose backward does"
                )
            check_dense(path, tensor)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ArgumentError` for tensors that torch cannot split into micro-batches."""
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"{name} have the layout {tensor.layout}, which cannot be split into micro-batches; "
            "give dense tensors, and make them sparse in the first stage"
        )


def split_batches(
    inputs: Batch,
    targets: Batch,
    n_microbatches: int,
    n_shares: int = 1,
    batch_dims: BatchDims = NO_DIMS,
    cut: SequenceCut = NO_SLICES,
) -> SplitBatch:
    """Return the tensors of each micro-batch, whose numbers of samples differ by one at most.

    Inputs or targets may be None, and then have no micro-batches. Each of ``n_shares`` replicas has
    ``n_microbatches`` of them. If ``cut`` has several slices, they are slices of sequences.
    `Microbatches` are returned as they were given, those of each slice if ``cut`` has several.
    """
    n_parts = n_shares * n_microbatches // cut.n_slices
    if inputs is None and targets is None:
        return SplitBatch([], [], [1] * n_parts * cut.n_slices)
    if are_microbatches(inputs, targets):
        _check_number(inputs, targets, n_microbatches, n_shares)
        batch_facts(inputs, targets)  # raises for weights that differ
        return SplitBatch(
            [] if inputs is None else [tensors_in(x) for x in inputs],
            [] if targets is None else [tensors_in(x) for x in targets],
            _microbatch_sizes(inputs, targets, batch_dims, cut),
        )
    dims = sample_dims(inputs, targets, batch_dims)
    if dims.n_samples < n_parts:
        n_microbatches //= cut.n_slices
        suffix = f", {n_microbatches} of each of {n_shares} replicas" if n_shares > 1 else ""
        raise ArgumentError(
            f"{'targets' if inputs is None else 'inputs'} have {dims.n_samples} samples, too few "
            f"for {n_parts} micro-batches{suffix}; "
            "give a larger batch, or lower a schedule of fewer micro-batches"
        )
    least, n_larger = divmod(dims.n_samples, n_parts)
    split = SplitBatch(
        [] if inputs is None else _parts(tensors_in(inputs), dims.inputs, n_parts),
        [] if targets is None else _parts(tensors_in(targets), dims.targets, n_parts),
        [least + (k < n_larger) for k in range(n_parts)],
    )
    if cut.n_slices == 1:
        return split
    size = n_positions(inputs, targets, dims[1:], cut)
    return SplitBatch(
        cut_parts(split.inputs, dims.inputs, size, cut),
        cut_parts(split.targets, dims.targets, size, cut),
        [n * k for n in split.sizes for k in cut.positions(size)],
    )


def _check_number(inputs: Batch, targets: Batch, n_microbatches: int, n_shares: int) -> None:
    """Raise `ArgumentError` unless inputs and targets have one value a micro-batch."""
    suffix = f", {n_microbatches} of each of {n_shares} replicas" if n_shares > 1 else ""
    for name, batch in (("inputs", inputs), ("targets", targets)):
        if batch is not None and not isinstance(batch, Microbatches):
            other = "targets" if name == "inputs" else "inputs"
            raise ArgumentError(
                f"{other} are Microbatches, but {name} are {type(batch).__name__}; give "
                f"px.Microbatches of both, or of neither"
            )
        if batch is not None and len(batch) != n_microbatches * n_shares:
            raise ArgumentError(
                f"{name} have {len(batch)} Microbatches, but a step has "
                f"{n_microbatches * n_shares}{suffix}; give as many, or lower a schedule of "
                "another number of micro-batches"
            )


def _microbatch_sizes(
    inputs: Batch, targets: Batch, batch_dims: BatchDims, cut: SequenceCut
) -> list[int]:
    """Return the samples of each of the `Microbatches`, or the positions of all its samples."""
    sizes = []
    own = SequenceCut(dim=cut.dim)  # each of the Microbatches is one slice
    n = len(targets if inputs is None else inputs)
    for number in range(n):
        x, y = (None if batch is None else batch[number] for batch in (inputs, targets))
        try:
            dims = sample_dims(x, y, batch_dims)
            size = dims.n_samples
            if cut.n_slices > 1:
                size *= n_positions(x, y, dims[1:], own)
        except ArgumentError as error:
            raise ArgumentError(f"micro-batch {number}: {error}") from error
        if not size:
            raise ArgumentError(
                f"micro-batch {number} has no samples; leave it out, and lower a schedule of fewer "
                "micro-batches"
            )
        sizes.append(size)
    return sizes


def repeated_samples(
    inputs: Batch, targets: Batch, n_samples: int, batch_dims: BatchDims = NO_DIMS
) -> tuple[Batch, Batch]:
    """Return the first ``n_samples`` samples of a batch, repeating it if it has fewer."""
    n, *rows = sample_dims(inputs, targets, batch_dims)
    numbers = torch.arange(n_samples) % n
    repeated = []
    for batch, dims in zip((inputs, targets), rows, strict=True):
        tensors = [
            x if dim is None else x.index_select(dim, numbers.to(x.device))
            for x, dim in zip(tensors_in(batch), dims, strict=True)
        ]
        repeated.append(with_tensors(batch, tensors))
    return repeated[0], repeated[1]


def to_devices(parts: Sequence[Values], devices: Sequence[torch.device]) -> list[Values]:
    """Return each micro-batch on its device; empty for a device of another process.

    Micro-batches share a tensor that is not split, and its copy on a device.
    """
    if not parts:
        return [()] * len(devices)
    copies: dict[tuple[int, torch.device], Tensor] = {}

    def on_device(tensor: Tensor, device: torch.device) -> Tensor:
        key = id(tensor), device
        if key not in copies:
            copies[key] = tensor.to(device, non_blocking=True)
        return copies[key]

    return [
        () if device.type == "meta"
        else tuple(None if x is None else on_device(x, device) for x in part)
        for part, device in zip(parts, devices, strict=True)
    ]  # fmt: skip


def _parts(tensors: Sequence[Tensor], dims: Sequence[int | None], n_parts: int) -> list[Values]:
    """Return the tensors of each micro-batch; all have the same ones that are not split."""
    columns = [
        (x,) * n_parts if dim is None else x.tensor_split(n_parts, dim)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    return list(zip(*columns, strict=True)) if columns else [()] * n_parts
