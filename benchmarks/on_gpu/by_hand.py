"""Steps that a user would write by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from on_gpu.streams import GpuStream, joined, on_stream
from on_gpu.turns import Step
from pipeexec.demo_models.registry import cross_entropy


def accumulation(
    stages: Sequence[nn.Module], stream: GpuStream, batch: tuple[Tensor, Tensor], m: int
) -> Step:
    """Return a step that accumulates gradients of ``m`` micro-batches on one stream."""
    whole = nn.Sequential(*stages)
    parts = list(zip(*(x.tensor_split(m) for x in batch), strict=True))

    def step() -> None:
        with joined([stream]), on_stream(stream):
            losses = [cross_entropy(whole(inputs), targets) / m for inputs, targets in parts]
            for loss in reversed(losses):
                loss.backward()

    return step


def gpipe(
    stages: Sequence[nn.Module],
    streams: Sequence[GpuStream],
    batch: tuple[Tensor, Tensor],
    m: int,
) -> Step:
    """Return a step of GPipe: forwards in clock order; autograd goes back over the streams."""
    n = len(stages)
    inputs, targets = (x.tensor_split(m) for x in batch)

    def step() -> None:
        values: list[Tensor] = list(inputs)
        with joined(streams):
            for clock in range(m + n - 1):
                for s in reversed(range(max(0, clock - m + 1), min(n, clock + 1))):
                    j, stream = clock - s, streams[s]
                    if s and stream is not None:
                        stream.wait_stream(streams[s - 1])
                        values[j].record_stream(stream)
                    with on_stream(stream):
                        values[j] = stages[s](values[j])
                        if s == n - 1:
                            values[j] = cross_entropy(values[j], targets[j]) / m
            # At once: the end of a backward waits for the streams of all its leaves.
            with on_stream(streams[-1]):
                torch.autograd.backward(values)

    return step
