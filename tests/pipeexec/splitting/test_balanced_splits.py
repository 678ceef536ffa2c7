"""Balanced stages: by parameters, measured time, FLOPs and bytes, and within a limit of bytes."""

from __future__ import annotations

import re
import time

import pytest
import torch
from split_models import WIDTH, Language, Residual
from torch import nn

import pipeexec as px
from pipesim.errors import ArgumentError, ExecutionError

SAMPLE = torch.ones(2, WIDTH)


class Sleeping(nn.Linear):
    """A layer whose forward takes some milliseconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


class Wide(nn.Sequential):
    """A block with a hidden layer of some width."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH))


def counts(stages: px.Stages) -> list[int]:
    return [len(part) for part in stages.modules]


def test_balance_by_time():
    """A slow block is a stage of its own; a layer counts with its forward and its backward."""
    model = nn.Sequential(*(Sleeping(x) for x in (0.001, 0.001, 0.001, 0.012, 0.001)))
    assert counts(px.split(model, 3, sample=SAMPLE, balance="time")) == [3, 1, 1]


def test_balance_by_flops():
    """Models without data are not measured."""

    def make() -> nn.Module:
        return nn.Sequential(*(Wide(x) for x in (64, 8, 8, 8, 8)))

    assert counts(px.split(make, 2, sample=SAMPLE, balance="time")) == [1, 4]
    assert counts(px.split(make, 2, sample=SAMPLE)) == [3, 2]


def test_balance_by_memory():
    """Parameters of the first block, or activations of the others, with more samples."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Tanh()] * 20) for _ in range(4)),
    )
    model[0].register_parameter("large", nn.Parameter(torch.zeros(10_000)))
    few, many = torch.ones(1, WIDTH), torch.ones(2000, WIDTH)
    assert counts(px.split(model, 2, sample=few, balance="memory")) == [1, 4]
    assert counts(px.split(model, 2, sample=many, balance="memory")) == [3, 2]


def test_a_limit_of_memory():
    """The limit moves cuts; the least one of the message is enough, and one byte less is not."""
    model = nn.Sequential(Sleeping(0.008), *(Sleeping(0) for _ in range(3)))
    assert counts(px.split(model, 2, sample=SAMPLE, balance="time")) == [1, 3]
    with pytest.raises(ArgumentError, match=r"stage \d of 2, '\d' to '\d', needs") as error:
        px.split(model, 2, sample=SAMPLE, balance="time", memory_limit=1)
    least = int(re.search(r"needs (\d+) bytes", str(error.value))[1])
    limited = px.split(model, 2, sample=SAMPLE, balance="time", memory_limit=least)
    assert counts(limited) == [2, 2]
    with pytest.raises(ArgumentError, match="no other cuts need less"):
        px.split(model, 2, sample=SAMPLE, memory_limit=least - 1)
    with pytest.raises(ArgumentError, match="the least limit for these cuts"):
        px.split(model, [1, 3], sample=SAMPLE, memory_limit=least)
    without_state = px.split(model, [1, 3], sample=SAMPLE, memory_limit=least, optimizer_bytes=0.0)
    assert counts(without_state) == [1, 3]


def test_bytes_of_a_stage():
    """Parameters, gradients, two states of Adam, and the input that autograd saves."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    least = (WIDTH + 1) * WIDTH * 4 * 4 + SAMPLE.nbytes
    px.split(model, 2, sample=SAMPLE.clone().requires_grad_(False), memory_limit=least)
    with pytest.raises(ArgumentError, match=f"needs {least} bytes"):
        px.split(model, 2, sample=SAMPLE, memory_limit=least - 1)


@pytest.mark.parametrize("balance", ["blocks", "time", "memory"])
def test_a_split_leaves_the_model_as_it_was(balance):
    """Running statistics, random numbers and gradients stay."""
    model = Residual()
    model.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    px.split(model, 2, sample=torch.rand(2, 3, 8, 8, generator=torch.Generator()), balance=balance)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Forward(nn.Linear):
    """A layer whose backward fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 1 / 0)
        return y


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "layers"}, "unknown balance 'layers'"),
        ({"memory_limit": "8 cows"}, "memory_limit must be bytes such as 80e9 or 80GiB"),
        ({"memory_limit": float("inf")}, "memory_limit must be bytes, a number of 0"),
        ({"optimizer_bytes": -1}, "optimizer_bytes must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        px.split(Language(), 2, sample=torch.zeros(2, 3, dtype=torch.long), **options)


def test_a_backward_that_fails():
    """Only a balance by time runs it."""
    model = nn.Sequential(Forward(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    px.split(model, 2, sample=SAMPLE)
    with pytest.raises(ExecutionError, match="fails on the sample: ZeroDivisionError"):
        px.split(model, 2, sample=SAMPLE, balance="time")
