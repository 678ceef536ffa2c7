"""Run the layers of a sequential module one by one, on copies, detached from their neighbours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeexec.gpipe.skip import Key, Shelf, use_shelf
from pipeexec.stages.batches import Batch


class DetachingShelf(Shelf):
    """A shelf that detaches skips from the graph of the layer that stashed them."""

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Keep a skip, without the graph behind it."""
        super().put(key, None if tensor is None else _leaf(tensor))


def isolated_layers(
    module: nn.Sequential, sample: Batch, device: torch.device, shelf: DetachingShelf | None = None
) -> Iterator[tuple[nn.Module, Batch]]:
    """Yield a copy of each layer, in training mode, and its input.

    The caller runs the layer forward, once or more, before it takes the next one. The input of the
    next layer is the last output. ``shelf`` keeps the skips.
    """
    inputs, shelf = _leaves(sample, device), DetachingShelf() if shelf is None else shelf
    kept: list[Batch] = []
    for layer in module:
        run = copy.deepcopy(layer).to(device).train()
        handle = run.register_forward_hook(lambda _run, _input, output: kept.append(output))
        with use_shelf(shelf):
            yield run, inputs
        handle.remove()
        inputs = _leaves(kept.pop(), device)


def backward_roots(output: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors from which a backward can start, and gradients of ones for them."""
    outputs = output if isinstance(output, tuple) else (output,)
    roots = [x for x in outputs if x.requires_grad]
    return roots, [torch.ones_like(x) for x in roots]


def _leaves(values: Batch, device: torch.device) -> Batch:
    if isinstance(values, tuple):
        return tuple(_leaf(x.to(device)) for x in values)
    return _leaf(values.to(device))


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)
