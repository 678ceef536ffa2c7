"""The layers of a sequential module one by one, on copies, cut off from their neighbours."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeexec.gpipe.skip import Key, Shelf, use_shelf
from pipeexec.stages.batches import Batch

__all__ = ["CutShelf", "ends", "one_by_one"]


class CutShelf(Shelf):
    """A shelf whose skips are cut off from what made them, as layers are run one by one."""

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Keep a skip, without the graph behind it."""
        super().put(key, None if tensor is None else _leaf(tensor))


def one_by_one(
    module: nn.Sequential, sample: Batch, device: torch.device, shelf: CutShelf | None = None
) -> Iterator[tuple[nn.Module, Batch]]:
    """Yield a copy of each layer, in training mode, and its input.

    The caller runs the layer forward, once or more, before it asks for the next one, whose input
    is the last output. Skips lie on ``shelf``.
    """
    given, shelf = _on(sample, device), CutShelf() if shelf is None else shelf
    kept: list[Batch] = []
    for layer in module:
        run = copy.deepcopy(layer).to(device).train()
        handle = run.register_forward_hook(lambda _run, _given, output: kept.append(output))
        with use_shelf(shelf):
            yield run, given
        handle.remove()
        given = _on(kept.pop(), device)


def ends(output: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a backward can begin at, and gradients of ones for them."""
    outputs = output if isinstance(output, tuple) else (output,)
    found = [x for x in outputs if x.requires_grad]
    return found, [torch.ones_like(x) for x in found]


def _on(values: Batch, device: torch.device) -> Batch:
    if isinstance(values, tuple):
        return tuple(_leaf(x.to(device)) for x in values)
    return _leaf(values.to(device))


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)
