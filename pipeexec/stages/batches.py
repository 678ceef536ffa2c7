"""Check a batch, split it into micro-batches, and move these to devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeexec.devices.device import Values
from pipesim.errors import ArgumentError

__all__ = ["Batch", "check_batch", "check_dense", "split_batch", "split_batches", "to_devices"]

Batch = Tensor | tuple[Tensor, ...]


def to_devices(parts: Sequence[Values], devices: Sequence[torch.device]) -> list[Values]:
    """Return each micro-batch on its device; empty for a device of another process."""
    if not parts:
        return [()] * len(devices)
    return [
        () if device.type == "meta"
        else tuple(None if x is None else x.to(device, non_blocking=True) for x in part)
        for part, device in zip(parts, devices, strict=True)
    ]  # fmt: skip


def check_batch(inputs: object, targets: object) -> None:
    """Raise unless inputs and targets are dense tensors of data; either may be None.

    Raises
    ------
    ArgumentError
        For an object that is no tensor of samples, tensors that require gradients, which a step
        would not compute, and sparse tensors.
    """
    for name, batch in (("inputs", inputs), ("targets", targets)):
        for tensor in () if batch is None else _tensors(batch, name):
            if tensor.requires_grad:
                raise ArgumentError(
                    f"{name} require gradients, which a step of a Pipeline does not compute; give "
                    f"{name}.detach(), or use pipeexec.GPipe, whose backward does"
                )
            check_dense(name, tensor)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ArgumentError` for tensors that torch cannot split into micro-batches."""
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"{name} have the layout {tensor.layout}, which cannot be split into micro-batches; "
            "give dense tensors, and make them sparse in the first stage"
        )


def split_batches(
    inputs: Batch | None, targets: Batch | None, n_microbatches: int, n_shares: int = 1
) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of inputs and of targets, and their sizes; see `split_batch`.

    Either may be None, which has no micro-batches. Each of ``n_shares`` replicas has
    ``n_microbatches`` of them.

    Raises
    ------
    ArgumentError
        If there are not as many targets as inputs.
    """
    parts: list[tuple[Tensor, ...]] = []
    sizes: list[int] = []
    if inputs is not None:
        parts, sizes = split_batch(inputs, n_microbatches, "inputs", n_shares)
    if targets is None:
        return parts, [], sizes or [1] * (n_microbatches * n_shares)
    labels, label_sizes = split_batch(targets, n_microbatches, "targets", n_shares)
    if inputs is None:
        return [], labels, label_sizes
    if label_sizes != sizes:
        raise ArgumentError(
            f"inputs have {sum(sizes)} samples, targets {sum(label_sizes)}; give as many"
        )
    return parts, labels, sizes


def split_batch(
    batch: Batch, n_microbatches: int, name: str, n_shares: int = 1
) -> tuple[list[tuple[Tensor, ...]], list[int]]:
    """Return the micro-batches of a batch, whose sizes differ by one at most, and the sizes.

    Raises
    ------
    ArgumentError
        If it holds no tensors, tensors of different length, or too few samples.
    """
    tensors = _tensors(batch, name)
    lengths = {len(x) for x in tensors}
    if len(lengths) > 1:
        raise ArgumentError(f"the tensors of {name} have {sorted(lengths)} samples; give as many")
    n_parts = n_shares * n_microbatches
    if min(lengths) < n_parts:
        suffix = f", {n_microbatches} of each of {n_shares} replicas" if n_shares > 1 else ""
        raise ArgumentError(
            f"{name} have {min(lengths)} samples, too few for {n_parts} micro-batches{suffix}; "
            "give a larger batch, or lower a schedule of fewer micro-batches"
        )
    parts = list(zip(*(x.tensor_split(n_parts) for x in tensors), strict=True))
    return parts, [len(part[0]) for part in parts]


def _tensors(batch: object, name: str) -> tuple[Tensor, ...]:
    """Return the tensors of a batch; raise `ArgumentError` for anything else."""
    tensors = batch if isinstance(batch, tuple) else (batch,)
    if not tensors or not all(isinstance(x, Tensor) and x.dim() > 0 for x in tensors):
        raise ArgumentError(
            f"{name} must be a tensor of samples or a tuple of them, got "
            f"{type(batch).__name__}"
            + (f" of {', '.join(map(_describe, batch))}" if isinstance(batch, tuple) else "")
        )
    return tensors


def _describe(value: object) -> str:
    return f"{value.dim()}-d tensor" if isinstance(value, Tensor) else type(value).__name__
