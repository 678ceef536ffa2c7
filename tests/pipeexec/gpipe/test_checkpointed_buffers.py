"""Recomputes of a `pipeexec.GPipe` whose layers depend on buffers that they change."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from case_choice import covering
from gpipe_models import step
from stateful_layers import BUFFER_LAYERS, stateful_stages
from torch import Tensor, nn

import pipeexec as px

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.BatchNormWarning")
CPUS = ["cpu", "cpu"]


def batch() -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def models(layers: nn.Sequential, chunks: int, checkpoint: Any) -> tuple[px.GPipe, nn.Sequential]:
    same = copy.deepcopy(layers)
    return px.GPipe(layers, [1, 1], devices=CPUS, chunks=chunks, checkpoint=checkpoint), same


def plain_step(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """Run the micro-batches one by one: each is done when the next one changes buffers."""
    outputs = []
    for part in x.chunk(chunks):
        output = module(part)
        (output.square().sum() / x.numel()).backward()
        outputs.append(output.detach())
    return torch.cat(outputs)


def check_same(model: nn.Module, same: nn.Module) -> None:
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(model.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "checkpoint", "chunks"),
    covering(product(BUFFER_LAYERS, ["always", "except_last", "never"], [1, 4])),
)
def test_equal_to_the_module_itself(name: str, checkpoint: str, chunks: int) -> None:
    model, same = models(nn.Sequential(*stateful_stages(name)), chunks, checkpoint)
    for _ in range(3):
        model.zero_grad()
        same.zero_grad()
        output = step(model, batch())
        torch.testing.assert_close(output, plain_step(same, batch(), chunks), rtol=1e-12, atol=0)
        check_same(model, same)


@pytest.mark.parametrize("name", ["spectral_norm", "n += 1", "n = n + 1", "codebook"])
def test_two_forwards_in_one_backward(name: str) -> None:
    """The second forward changes buffers that recomputes of the first need."""
    model, same = models(nn.Sequential(*stateful_stages(name)), 2, "always")
    first, second = model(batch()), model(batch() * 2)
    (first.square().sum() + second.square().sum()).backward()
    for x in (*batch().chunk(2), *(2 * batch()).chunk(2)):
        same(x).square().sum().backward()
    check_same(model, same)


@pytest.mark.parametrize("name", ["n += 1", "n = n + 1"])
def test_an_evaluation_before_the_backward(name: str) -> None:
    model, same = models(nn.Sequential(*stateful_stages(name)), 2, "always")
    output = model(batch())
    with torch.no_grad():
        model(batch())
    output.square().mean().backward()
    plain_step(same, batch(), 2)
    with torch.no_grad():
        for part in batch().chunk(2):
            same(part)
    check_same(model, same)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["n += 1", "n = n + 1", "parametrized", "batch norm"])
def test_a_forward_that_is_run_again(name: str, frozen: bool) -> None:
    """A partition begins to draw: the forward runs again, and buffers change once."""
    dropout = nn.Dropout(0.0)
    stages = stateful_stages(name)
    layers = nn.Sequential(stages[0], nn.Sequential(stages[1], dropout))
    layers[0].requires_grad_(not frozen)
    model, same = models(layers, 4, "always")
    numbers: list[Tensor] = []
    dropout.register_forward_hook(lambda _, x, y: numbers.append(y.detach()))
    for p in (0.0, 1e-9, 1e-9):  # draws numbers, and drops nothing
        dropout.p = p
        model.zero_grad()
        same.zero_grad()
        numbers.clear()
        step(model, batch())
        plain_step(same, batch(), 4)
        for one, other in zip(model.buffers(), same.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        if not frozen:
            for a, b in zip(model.parameters(), same.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-12)
    assert len(numbers) == 8
