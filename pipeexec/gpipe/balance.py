"""Split the layers of a sequential module over stages, by measured time or size.

Layers are run one by one, on copies, detached from their neighbours. The split is optimal for the
measured costs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pipeexec.gpipe.skip import Key, Shelf, use_shelf
from pipeexec.stages.activations import ActivationMeter
from pipeexec.stages.batches import Batch
from pipesim.costs.layer_split import balanced_split
from pipesim.errors import ArgumentError, check_count


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


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Batch,
    *,
    timeout: float = 1.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return the number of layers of each stage that makes the slowest stage fastest.

    Parameters
    ----------
    partitions
        Number of stages.
    module
        The layers. Copies of them are run forward and backward, in training mode.
    sample
        An input: a tensor or a tuple of tensors, of any number of samples.
    timeout
        Time to measure for (s). Layers are run once, and again until the time is over.
    device
        Device to measure on; by default the current GPU, or the CPU if there is no GPU.
    """
    place = _device(device)
    if any(p.grad is not None for p in module.parameters()):
        raise ArgumentError(
            "some parameter already has gradient; balance before the first backward, or call "
            "module.zero_grad(set_to_none=True)"
        )
    seconds: list[list[float]] = [[] for _ in module]
    end = time.perf_counter() + timeout
    while not seconds[0] or time.perf_counter() < end:
        for k, (layer, inputs) in enumerate(isolated_layers(module, sample, place)):
            _wait_for(place)
            begin = time.perf_counter()
            _backward(layer(inputs))
            _wait_for(place)
            seconds[k].append(time.perf_counter() - begin)
    return balance_costs([float(np.median(times)) for times in seconds], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Batch,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return the number of layers of each stage that makes the fullest stage smallest.

    The size of a layer is the bytes that its forward saves for its backward, plus the bytes of its
    parameters times ``param_scale``.

    Parameters
    ----------
    partitions
        Number of stages.
    module
        The layers. Copies of them are run, in training mode.
    input
        A mini-batch, as in training.
    chunks
        Number of micro-batches; the first one is run.
    param_scale
        Copies of the parameters that training holds: 2 with gradients, 2 to 3 with SGD, 4 to 5
        with Adam.
    device
        Device to measure on; by default the current GPU, or the CPU if there is no GPU.
    """
    place, chunks = _device(device), check_count("chunks", chunks)
    first: Batch = (
        tuple(x.chunk(chunks)[0] for x in input)
        if isinstance(input, tuple)
        else input.chunk(chunks)[0]
    )
    sizes = []
    for layer, (run, inputs) in zip(module, isolated_layers(module, first, place), strict=True):
        meter = ActivationMeter(ignored=[*run.parameters(), *run.buffers()])
        with meter.saved_tensors():
            run(inputs)
        parameters = sum(p.nbytes for p in layer.parameters())
        sizes.append(meter.peak + parameters * param_scale)
    return balance_costs(sizes, partitions)


def balance_costs(costs: Sequence[float], partitions: int) -> list[int]:
    """Return the lengths of contiguous blocks that minimize the cost of the costliest block.

    Ties are broken as by `pipesim.balanced_split`.

    Parameters
    ----------
    costs
        Cost of each layer, at least 0; any unit.
    partitions
        Number of blocks; none is empty.

    Examples
    --------
    >>> balance_costs([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    """
    partitions = check_count("partitions", partitions)
    if len(costs) < partitions:
        raise ArgumentError(
            f"{len(costs)} layers cannot be split into {partitions} partitions: sequence is "
            "shorter than intended partitions; ask for fewer"
        )
    return list(balanced_split(costs, partitions))


def _backward(output: Batch) -> None:
    outputs, gradients = backward_roots(output)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _device(device: torch.device | int | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
