"""Gradients of a step and of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from on_gpu.bench import Bench, counted_replays, lowered
from pipeexec.demo_models.registry import cross_entropy

#: Relative to the largest element of a parameter's gradient: kernels and numbers are those of the
#: unsplit model in float32, but micro-batches are summed in the schedule's order.
GRADIENTS = 1e-4


def unsplit_gradients(
    stages: Sequence[nn.Module], batch: tuple[Tensor, Tensor], m: int, device: torch.device
) -> list[Tensor]:
    """Return the gradients of the whole model, micro-batch by micro-batch on one stream."""
    whole = nn.Sequential(*copy.deepcopy(list(stages))).to(device)
    parts = zip(*(x.to(device).tensor_split(m) for x in batch), strict=True)
    for inputs, targets in parts:
        (cross_entropy(whole(inputs), targets) / m).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def gradient_error(bench: Bench, name: str, n: int, cuda_graph: bool, **options: Any) -> float:
    """Return how far the gradients of a step are from the unsplit model's, relative to the largest.

    The last of four steps, which a CUDA graph replays; its optimizer changes nothing.
    """
    m = 2 * n
    graph = lowered(name, n, m, **options)
    stages = bench.stages(graph.n_stages, 2 * n)
    batch = bench.batch(m)
    wanted = unsplit_gradients(stages, batch, m, bench.gpu)

    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    with (
        counted_replays() as replays,
        bench.pipeline(graph, stages, cuda_graph=cuda_graph, optimizer=still) as subject,
    ):
        for _ in range(4):
            subject.step(*batch)
        if bench.captures(cuda_graph) and not replays():
            raise RuntimeError(f"no step of {name} ran as a CUDA graph")
    return largest_error([p.grad for stage in stages for p in stage.parameters()], wanted)


def largest_error(actual: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> float:
    """Return how far gradients are from those wanted, relative to the largest of a parameter.

    NaN if any is NaN.
    """
    present = [gradient for gradient in actual if gradient is not None]
    errors = [
        (a - b).abs().max() / b.abs().max().clamp_min(1e-12)
        for a, b in zip(present, wanted, strict=True)
    ]
    return float(torch.stack(errors).max())
