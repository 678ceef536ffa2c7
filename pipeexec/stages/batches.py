"""Split a batch of any nesting into micro-batches, and move these to devices.

`pipeexec.stages.sample_dims` has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeexec.devices.device import Values
from pipeexec.nesting import leaves, tensors_in, with_tensors
from pipeexec.stages.microbatches import (
    Microbatches,
    are_microbatches,
    batch_facts,
    check_uncut,
)
from pipeexec.stages.sample_dims import NO_DIMS, BatchDims, sample_dims
from pipeexec.stages.sequence_slices.cut_batch import (
    NO_SLICES,
    SequenceCut,
    cut_parts,
    n_positions,
    slice_sizes,
)
from pipesim.errors import ArgumentError

#: Tensors, nested in any way.
Batch = Any


class SplitBatch(NamedTuple):
    """Tensors of each micro-batch, and its samples; inputs or targets of None have none.

    Attributes
    ----------
    inputs, targets
        Tensors of each micro-batch.
    sizes
        Samples of each micro-batch; of a slice, positions of all its samples.
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
    `Microbatches` are returned as they were given.
    """
    n_parts = n_shares * n_microbatches // cut.n_slices
    if inputs is None and targets is None:
        return SplitBatch([], [], [1] * n_parts * cut.n_slices)
    if are_microbatches(inputs, targets):
        check_uncut(cut.n_slices)
        _check_number(inputs, targets, n_microbatches, n_shares)
        batch_facts(inputs, targets)  # raises for weights that differ
        return SplitBatch(
            [] if inputs is None else [tensors_in(x) for x in inputs],
            [] if targets is None else [tensors_in(x) for x in targets],
            _microbatch_sizes(inputs, targets, batch_dims),
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
        [n * k for n in split.sizes for k in slice_sizes(size, cut.n_slices)],
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


def _microbatch_sizes(inputs: Batch, targets: Batch, batch_dims: BatchDims) -> list[int]:
    """Return the samples of each of the `Microbatches`."""
    sizes = []
    n = len(targets if inputs is None else inputs)
    for number in range(n):
        x, y = (None if batch is None else batch[number] for batch in (inputs, targets))
        try:
            size = sample_dims(x, y, batch_dims).n_samples
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
