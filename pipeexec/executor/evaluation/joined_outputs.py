"""Join the outputs of micro-batches to the output of a batch.

- Tensors whose first dimension is the number of samples of their micro-batch are concatenated.
- Any other value, such as a number, a tensor without dimensions or None, must be equal in all
  micro-batches. It is then the value of the whole batch.
- ``batch_dims`` takes precedence: for the path of a value, such as ``"output.logits"``, it has the
  dimension of the samples, or None for a value that is equal in all micro-batches.
- Nested values are joined value by value; see `pipeexec.nesting`.

The output of a single micro-batch is that of the batch, whatever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pipeexec.nesting import Leaf, leaves, mapped
from pipeexec.stages.sample_dims import NO_DIMS, BatchDims, dims_by_path
from pipeexec.stages.sequence_slices.cut_batch import SequenceCut, positions_of
from pipesim.errors import ArgumentError, ExecutionError

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


def joined_output(
    outputs: Sequence[Any],
    sizes: Sequence[float],
    batch_dims: BatchDims = NO_DIMS,
    default_dim: int = 0,
) -> Any:
    """Return the output of a batch; tensors are on the device of the first micro-batch's.

    Parameters
    ----------
    outputs, sizes
        Output and number of samples of each micro-batch, in the order of the batch.
    batch_dims
        Those of the pipeline.
    default_dim
        Dimension along which tensors without a path in ``batch_dims`` are concatenated.

    Raises
    ------
    ExecutionError
        If outputs are nested differently, or a value cannot be joined, naming it.
    """
    if len(outputs) == 1:
        return outputs[0]
    rows = [leaves(output, "output") for output in outputs]
    for row in rows[1:]:
        for one, other in zip_longest(rows[0], row):
            if one is None or other is None or one.path != other.path:
                raise ExecutionError(
                    "the last stage returned outputs of different nesting for micro-batches of one "
                    f"batch: {_describe(one)} and {_describe(other)}; return the same for all"
                )
    dims = _output_dims(rows[0], batch_dims)
    joined = iter([
        _joined([leaf.value for leaf in same], sizes, path, dims.get(path, default_dim))
        for same in zip(*rows, strict=True)
        for path in [same[0].path]
    ])  # fmt: skip
    return mapped(lambda _: next(joined), outputs[0])


def joined_slices(
    outputs: Sequence[Any], sizes: Sequence[float], cut: SequenceCut
) -> tuple[list[Any], list[float]]:
    """Return the output of each micro-batch, and its samples, from those of its slices.

    Parameters
    ----------
    outputs
        Output of each slice; tensors have the positions in dimension ``cut.dim``.
    sizes
        Positions of each slice, over all its samples.
    cut
        How sequences were cut.

    Raises
    ------
    ExecutionError
        As `joined_output`, and if no tensor has the dimension.
    """
    k = cut.n_slices
    if k == 1:
        return list(outputs), list(sizes)
    whole, samples = [], []
    for first in range(0, len(outputs), k):
        own = outputs[first : first + k]
        positions = [positions_of(leaves(output, "output"), cut.dim) for output in own]
        if not all(positions):
            raise ExecutionError(
                f"the output of the last stage has no tensor of positions in dimension {cut.dim} "
                "(slice_dim), along which the outputs of slices are joined; return one, or predict "
                "with a schedule without slices"
            )
        whole.append(joined_output(own, positions, default_dim=cut.dim))
        samples.append(sum(sizes[first : first + k]) // sum(positions))
    return whole, samples


def _output_dims(values: Sequence[Leaf], batch_dims: BatchDims) -> dict[str, int | None]:
    """Return the dimensions of samples that the user gave, by the paths of outputs."""
    dims = dims_by_path(values, "output", batch_dims)
    moved = [path for path, dim in batch_dims.items() if dim and path.startswith("inputs")]
    for path, value in values:
        if moved and isinstance(value, Tensor) and value.dim() > 1 and path not in dims:
            raise ArgumentError(
                f"{moved[0]} has its samples in dimension {batch_dims[moved[0]]}, and {path} of "
                f"the last stage has shape {tuple(value.shape)}: give Pipeline its dimension of "
                f"samples too, such as batch_dims={{{path!r}: {batch_dims[moved[0]]}}}"
            )
    return dims


def _describe(leaf: Any) -> str:
    return "nothing more" if leaf is None else leaf.path


def _joined(values: Sequence[Any], sizes: Sequence[float], path: str, dim: int | None) -> Any:
    """Return the value of a batch from those of its micro-batches."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensor(values, sizes, path, dim)
    if not all(isinstance(value, _PLAIN) for value in values):
        names = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
        raise ExecutionError(
            f"{path} of the last stage is {names}, which cannot be joined over micro-batches; "
            "return tensors, numbers, text or None, in tuples, lists, dicts or dataclasses, or "
            "switch it off in the model, such as a cache"
        )
    for value in values:
        if value != first and not (value != value and first != first):
            raise ExecutionError(
                f"{path} of the last stage has different values in micro-batches of one batch: "
                f"{first!r:.60} and {value!r:.60}; they cannot be joined: leave it out of the "
                "output"
            )
    return first


def _joined_tensor(
    values: Sequence[Tensor], sizes: Sequence[float], path: str, dim: int | None
) -> Tensor:
    """Return the tensor of a batch; ``dim`` is the dimension of the samples, None for none."""
    first = values[0].detach()
    rows = [x.detach().to(first.device, non_blocking=True) for x in values]
    if dim is not None and all(
        -x.dim() <= dim < x.dim() and x.shape[dim] == n for x, n in zip(rows, sizes, strict=True)
    ):
        samples = [x.movedim(dim, 0) for x in rows]
        if len({(x.shape[1:], x.dtype) for x in samples}) == 1:
            return torch.cat(rows, dim)
    if all(x.shape == first.shape and torch.equal(x, first) for x in rows):
        return first
    shapes = ", ".join(dict.fromkeys(str(tuple(x.shape)) for x in values))
    raise ExecutionError(
        f"{path} of the last stage has shapes {shapes} in micro-batches of "
        f"{', '.join(map(str, sizes))} samples, and values that differ: it has no dimension of "
        "samples along which it could be joined; make the samples its first dimension, name "
        "theirs in batch_dims of Pipeline, or leave it out of the output"
    )
