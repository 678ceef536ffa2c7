"""Micro-batches of different shapes for a small language model, and the unsplit model's step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from small_pipelines import cut
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pipeexec as px
from pipeexec.demo_models.gpt import gpt

#: Samples and tokens of each micro-batch; two are alike.
SHAPES = [(2, 6), (1, 9), (3, 4), (2, 6)]


def language_stages(n_stages: int) -> list[nn.Sequential]:
    """Return the stages of a model of two blocks, embedding and head, with equal weights always.

    Processes run stages without data to learn shapes, which takes torch milliseconds a block.
    """
    model = gpt(n_layers=2, d_model=8, n_heads=2, sequence=16, vocabulary=16)
    sizes = [len(part) for part in torch.arange(4).tensor_split(n_stages)]
    return cut(model, sizes)


def tokens(shapes: Sequence[Sequence[int]] = SHAPES, seed: int = 0) -> tuple[Any, Any]:
    """Return the `Microbatches` of inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(16, tuple(shape), generator=generator) for shape in shapes]
    return px.Microbatches(inputs), px.Microbatches([x.roll(-1, 1) for x in inputs])


def token_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the losses of tokens, and their number."""
    total = cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens."""
    return cross_entropy(output.flatten(0, 1), targets.flatten())


def whole_step(stages: Sequence[nn.Module], inputs: Any, targets: Any) -> tuple[Tensor, Any]:
    """Return the unsplit model's mean loss over all tokens, and its modules with gradients."""
    modules = copy.deepcopy(nn.Sequential(*stages))
    modules.zero_grad()
    pairs = [token_loss(modules(x), y) for x, y in zip(inputs, targets, strict=True)]
    loss = torch.stack([total for total, _ in pairs]).sum() / sum(n for _, n in pairs)
    loss.backward()
    return loss.detach(), modules


def assert_like_whole(loss: Tensor, stages: Sequence[nn.Module], inputs: Any, targets: Any) -> None:
    """Check that loss and gradients are those of the unsplit model, up to rounding."""
    expected, whole = whole_step(stages, inputs, targets)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(nn.Sequential(*stages).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
