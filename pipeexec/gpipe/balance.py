"""How many layers each stage gets, from what the layers of a sequential module cost.

Layers are run one by one, on copies; the split is the best there is for what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from pipeexec.gpipe.layer_by_layer import ends, one_by_one
from pipeexec.stages.activation_bytes import ActivationMeter
from pipeexec.stages.batches import Batch
from pipesim.errors import ArgumentError, check_count

__all__ = ["balance_by_size", "balance_by_time", "balance_costs"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Batch,
    *,
    timeout: float = 1.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return numbers of layers such that the slowest stage is as fast as can be.

    Parameters
    ----------
    partitions
        How many stages.
    module
        Not changed; copies of its layers are run forward and backward, in training mode.
    sample
        An input: a tensor or a tuple of tensors, of any number of samples.
    timeout
        Seconds to measure for; the layers are run once more as long as they are not over.
    device
        Where to measure; by default the current GPU, or the CPU where there is none.

    Raises
    ------
    ArgumentError
        If there are fewer layers than stages, or a parameter has a gradient already.
    """
    where = _device(device)
    if any(p.grad is not None for p in module.parameters()):
        raise ArgumentError(
            "some parameter already has gradient; balance before the first backward, or call "
            "module.zero_grad(set_to_none=True)"
        )
    seconds: list[list[float]] = [[] for _ in module]
    end = time.perf_counter() + timeout
    while not seconds[0] or time.perf_counter() < end:
        for layer, (run, given) in enumerate(one_by_one(module, sample, where)):
            _wait_for(where)
            begin = time.perf_counter()
            _backward(run(given))
            _wait_for(where)
            seconds[layer].append(time.perf_counter() - begin)
    return balance_costs([float(np.median(each)) for each in seconds], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Batch,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | int | str | None = None,
) -> list[int]:
    """Return numbers of layers such that the fullest stage holds as little as can be.

    A layer's size is the bytes that its forward saves for its backward, and those of its
    parameters times ``param_scale``.

    Parameters
    ----------
    partitions
        How many stages.
    module
        Not changed; copies of its layers are run, in training mode.
    input
        A mini-batch, as it will be trained with.
    chunks
        Number of micro-batches: the first is run.
    param_scale
        Copies of the parameters that training holds: 2 with gradients, 2 to 3 with SGD, 4 to 5
        with Adam.
    device
        Where to measure; by default the current GPU, or the CPU where there is none.

    Raises
    ------
    ArgumentError
        If there are fewer layers than stages.
    """
    where, chunks = _device(device), check_count("chunks", chunks)
    first: Batch = (
        tuple(x.chunk(chunks)[0] for x in input)
        if isinstance(input, tuple)
        else input.chunk(chunks)[0]
    )
    sizes = []
    for layer, (run, given) in zip(module, one_by_one(module, first, where), strict=True):
        meter = ActivationMeter(ignored=[*run.parameters(), *run.buffers()])
        with meter.saved_tensors():
            run(given)
        parameters = sum(p.nbytes for p in layer.parameters())
        sizes.append(meter.peak + parameters * param_scale)
    return balance_costs(sizes, partitions)


def balance_costs(costs: Sequence[float], partitions: int) -> list[int]:
    """Return lengths of contiguous blocks of which the costliest costs the least.

    Of several such splits, one whose blocks differ least (least sum of squares). Exact: dynamic
    programming over where each block ends, O(partitions * len(costs)^2).

    Parameters
    ----------
    costs
        Of each layer, none below 0; any unit.
    partitions
        How many blocks; none is empty.

    Raises
    ------
    ArgumentError
        If there are fewer layers than blocks.

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
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=float))])
    blocks = sums[None, :] - sums[:, None]  # of the layers from row to column
    n = len(costs)
    lowest = _best(np.where(np.tri(n + 1, dtype=bool), np.inf, blocks), partitions, np.maximum)[0]
    allowed = blocks <= lowest * (1 + 1e-12)
    allowed &= ~np.tri(n + 1, dtype=bool)
    _, lengths = _best(np.where(allowed, blocks**2, np.inf), partitions, np.add)
    return lengths


def _best(costs: np.ndarray, partitions: int, join: np.ufunc) -> tuple[float, list[int]]:
    """Return the least joint cost of so many blocks that cover all layers, and their lengths."""
    n = len(costs) - 1
    best = np.full((partitions + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    last = np.zeros((partitions + 1, n + 1), dtype=np.int64)
    for block in range(1, partitions + 1):
        joined = join(best[block - 1][:, None], costs)
        last[block] = joined.argmin(axis=0)
        best[block] = joined.min(axis=0)
    lengths, end = list[int](), n
    for block in range(partitions, 0, -1):
        begin = int(last[block, end])
        lengths.insert(0, end - begin)
        end = begin
    return float(best[partitions, n]), lengths


def _backward(output: Batch) -> None:
    outputs, gradients = ends(output)
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _device(device: torch.device | int | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
