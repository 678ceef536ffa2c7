"""The dimension of the samples in each tensor of a batch of any nesting.

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

import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeexec.nesting import Leaf, leaves
from pipesim.errors import ArgumentError, ArgumentTypeError, BatchWarning, suggestion

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
    if _is_usual(inputs, targets) and not batch_dims:
        return SampleDims(len(inputs), (0,), (0,))
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
            raise _unlike_targets(first, size, tensors)
        _check_plain(values, options, size)
        rows[name] = tuple(
            _checked_dim(leaf, dim, size, name, leaf.path in options)
            for leaf, dim in zip(tensors, dims, strict=True)
        )
    return SampleDims(next(iter(sizes.values()), 0), rows["inputs"], rows["targets"])


def _is_usual(inputs: object, targets: object) -> bool:
    """Return whether a batch is two tensors of as many samples, which need no further look."""
    return (
        type(inputs) is Tensor
        and type(targets) is Tensor
        and inputs.dim() > 0 < targets.dim()
        and len(inputs) == len(targets)
    )


def warn_of_squares(inputs: Any, batch_dims: BatchDims) -> None:
    """Warn of tensors that are split, but may be masks of sequences as long as the batch is large.

    They are matrices with as many rows and columns as there are samples, behind another tensor.
    """
    dims = sample_dims(inputs, None, batch_dims)
    values = leaves(inputs, "inputs")
    tensors = [leaf for leaf in values if isinstance(leaf.value, Tensor)]
    options = dims_by_path(values, "inputs", batch_dims)
    for path, tensor in (
        leaf for leaf, dim in zip(tensors[1:], dims.inputs[1:], strict=True) if dim is not None
    ):
        if tensor.shape == (dims.n_samples, dims.n_samples) and path not in options:
            warnings.warn(
                f"{path} has shape {tuple(tensor.shape)}, and the batch {dims.n_samples} samples: "
                "it is split along its first dimension. If it is a mask of the sequence, which "
                f"every micro-batch needs whole, give Pipeline batch_dims={{{path!r}: None}}; if "
                f"its rows are samples, {{{path!r}: 0}}",
                BatchWarning,
                stacklevel=6,
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


def _unlike_targets(n_inputs: int, n_targets: int, tensors: Sequence[Leaf]) -> ArgumentError:
    paths = [path for path, _ in tensors]
    return ArgumentError(
        f"inputs have {n_inputs} samples, targets {n_targets}; give as many, or name tensors that "
        f"are no samples in batch_dims of Pipeline, such as {{{paths[0]!r}: None}}"
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
