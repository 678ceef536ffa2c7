"""Cut micro-batches along the sequence, and join the outputs of slices.

- A tensor with samples is cut along the dimension of its positions. Numbers of positions differ by
  one at most.
- A tensor that all micro-batches share, such as positions of shape (1, n), is cut if it has as many
  entries there as the sequence has positions. Otherwise every slice gets it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.nesting import Leaf, leaves
from pipesim.errors import ArgumentError, ArgumentTypeError


class SequenceCut(NamedTuple):
    """Number of slices of a sequence, and the dimension of its positions in each tensor."""

    n_slices: int = 1
    dim: int = 1


NO_SLICES = SequenceCut()


def check_slice_dim(slice_dim: object) -> int:
    """Return the dimension of the positions."""
    if not isinstance(slice_dim, int) or isinstance(slice_dim, bool) or slice_dim < 0:
        raise ArgumentTypeError(
            f"slice_dim must be the dimension of the sequence's positions, at least 0, got "
            f"{slice_dim!r:.80}; 1 for tensors of (batch, positions, ...)"
        )
    return slice_dim


def n_positions(
    inputs: Any, targets: Any, dims: Sequence[Sequence[int | None]], cut: SequenceCut
) -> int:
    """Return the number of positions of the sequences of a batch.

    Parameters
    ----------
    inputs, targets
        The batch; either may be None.
    dims
        Dimension of the samples in each tensor of inputs and targets; None for shared ones.
    cut
        How sequences are cut.
    """
    first: tuple[str, int] | None = None
    for name, batch, row in zip(("inputs", "targets"), (inputs, targets), dims, strict=True):
        tensors = [x for x in leaves(batch, name) if isinstance(x.value, Tensor)]
        for (path, tensor), dim in zip(tensors if batch is not None else (), row, strict=True):
            if dim is None:
                continue
            size = _size(path, tensor, dim, cut)
            if first is None:
                first = path, size
            elif size != first[1]:
                raise ArgumentError(
                    f"{path} have {size} positions in dimension {cut.dim}, and {first[0]} "
                    f"{first[1]}: slices of one sequence need as many of each; give tensors of "
                    "equal length, or name the dimension of the positions in slice_dim"
                )
    size = 0 if first is None else first[1]
    if size < cut.n_slices:
        raise ArgumentError(
            f"sequences of {size} positions cannot be cut into {cut.n_slices} slices; give longer "
            "sequences, or a schedule of fewer slices"
        )
    return size


def _size(path: str, tensor: Tensor, dim: int, cut: SequenceCut) -> int:
    """Return the number of positions of a tensor with samples."""
    if tensor.dim() <= cut.dim or dim % tensor.dim() == cut.dim:
        raise ArgumentError(
            f"{path} have shape {tuple(tensor.shape)}, samples in dimension {dim}, and no "
            f"positions in dimension {cut.dim}, along which {cut.n_slices} slices are cut; give "
            "tensors of (batch, positions, ...), name the dimension of the positions in slice_dim "
            "of Pipeline, or run a schedule without slices"
        )
    return tensor.shape[cut.dim]


def slice_sizes(size: int, n_slices: int) -> list[int]:
    """Return the number of positions of each slice, as `torch.tensor_split` cuts them."""
    least, n_larger = divmod(size, n_slices)
    return [least + (k < n_larger) for k in range(n_slices)]


def cut_parts(
    parts: Sequence[Values], dims: Sequence[int | None], size: int, cut: SequenceCut
) -> list[Values]:
    """Return the slices of micro-batches, those of the first sequence first.

    Parameters
    ----------
    parts
        Tensors of each micro-batch.
    dims
        Dimension of the samples in each tensor; None for shared ones.
    size
        Number of positions.
    cut
        How sequences are cut.
    """

    def pieces(x: Tensor | None, dim: int | None) -> Sequence[Tensor | None]:
        is_whole = x is None or x.dim() <= cut.dim or (dim is None and x.shape[cut.dim] != size)
        if x is None or is_whole:
            return [x] * cut.n_slices
        return x.tensor_split(cut.n_slices, cut.dim)

    slices: list[Values] = []
    for part in parts:
        columns = [pieces(x, dim) for x, dim in zip(part, dims, strict=True)]
        slices += list(zip(*columns, strict=True)) if columns else [()] * cut.n_slices
    return slices


def positions_of(row: Sequence[Leaf], dim: int) -> int:
    """Return the positions of the first tensor of an output that has the dimension; else 0."""
    sizes = (x.value.shape[dim] for x in row if isinstance(x.value, Tensor) and x.value.dim() > dim)
    return next(sizes, 0)
