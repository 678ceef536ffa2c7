"""Training on real images is the same through `px.GPipe` as without, to the last bit.

A U-Net with long skips learns the noise of photographs, and a ResNet with batch norms to read
handwritten digits. What is equal, and why: a partition calls the same layers on the same
micro-batches, and its gradients add up from the last micro-batch to the first, which is also the
order in which autograd goes back through the module run on one micro-batch after another. On one
thread, sums have one order too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_choice import covering
from images import digits, noisy_patches
from torch import Tensor, nn

import pipeexec as px
from pipeexec.demo_models.image_models import resnet, unet
from pipeexec.gpipe.batchnorm import DeferredBatchNorm

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.usefixtures("one_torch_thread"),
]

STEPS = 8
MODES = ("always", "except_last", "never")
CPUS = ["cpu"] * 4

Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer; the loss falls to ``falls_to`` of its first value."""

    model: Callable[[], nn.Sequential]
    images: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    falls_to: float


@cache
def noise() -> tuple[Tensor, Tensor]:
    """Return noisy patches and their noise."""
    noisy, clean = noisy_patches(8 * STEPS, 24)
    return noisy, noisy - clean


def denoising(dropout: float) -> Task:
    return Task(
        lambda: unet(2, 1, 16, output_channels=3, dropout=dropout), noise, F.mse_loss,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01), 0.25,
    )  # fmt: skip


TASKS = {
    "unet": denoising(0.0),
    "unet that drops": denoising(0.1),
    "resnet": Task(
        lambda: resnet([1, 1, 1], 10, 16, 1), cache(lambda: digits(48 * STEPS)), F.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9), 0.5,
    ),
}  # fmt: skip


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return TASKS[name].model()


def piped(module: nn.Sequential, n: int, **options: Any) -> px.GPipe:
    """Return a module in so many partitions, as even as can be."""
    ends = [len(module) * k // n for k in range(n + 1)]
    balance = [b - a for a, b in pairwise(ends)]
    return px.GPipe(module, balance, devices=CPUS, **options)


def train(name: str, module: nn.Module, run: Run) -> list[float]:
    """Return the loss of each step; every step has different images."""
    task = TASKS[name]
    optimizer = task.optimizer(module.parameters())
    losses = []
    torch.manual_seed(1)  # of what is dropped
    for x, y in zip(*(tensors.chunk(STEPS) for tensors in task.images()), strict=True):
        optimizer.zero_grad()
        loss = task.loss(run(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < task.falls_to * losses[0]
    return losses


def in_turn(module: nn.Module, chunks: int) -> Run:
    """Run the module itself on one micro-batch after another."""
    return lambda x: torch.cat([module(part) for part in x.chunk(chunks)])


@cache
def without(name: str, chunks: int) -> tuple[list[float], nn.Sequential]:
    """Return the losses without a pipeline, and the module that was trained."""
    plain = build(name)
    return train(name, plain, in_turn(plain, chunks)), plain


def check_same_training(name: str, n: int, chunks: int, **options: Any) -> None:
    """Check losses, and parameters and running statistics after."""
    losses, plain = without(name, chunks)
    model = piped(build(name), n, chunks=chunks, **options)
    assert train(name, model, model) == losses
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpoint"), covering(product(["unet that drops", "resnet"], MODES))
)
def test_one_micro_batch(name: str, checkpoint: Any) -> None:
    """Also what is dropped: of one micro-batch, it is what the module itself would drop."""
    check_same_training(name, 3, 1, checkpoint=checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpoint", "n"),
    covering((name, *row) for name in ("unet", "resnet")
             for row in (("except_last", 2), ("always", 4), ("never", 4))),
)  # fmt: skip
def test_several_micro_batches(name: str, checkpoint: Any, n: int) -> None:
    """Gradients add up; batch norms normalise a micro-batch, and count it once if recomputed."""
    check_same_training(name, n, n, checkpoint=checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "resnet"])
def test_skips_through_every_partition_between(name: str) -> None:
    """Without portals the same tensors go a longer way."""
    check_same_training(name, 4, 4, portals=False)


@pytest.mark.slow
def test_what_is_dropped_does_not_depend_on_the_mode() -> None:
    """Several micro-batches drop other channels than the module does, and learn as well."""
    name = "unet that drops"
    models = [piped(build(name), 3, chunks=4, checkpoint=mode) for mode in ("always", "never")]
    recomputed, kept = [train(name, model, model) for model in models]
    assert recomputed == kept


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_deferred_batch_norm(checkpoint: Any) -> None:
    """Learns as without, as it normalises the same; its statistics are those of mini-batches."""
    converted = DeferredBatchNorm.convert_deferred_batch_norm(build("resnet"), 4)
    losses = train("resnet", converted, in_turn(converted, 4))
    model = piped(build("resnet"), 3, chunks=4, checkpoint=checkpoint, deferred_batch_norm=True)
    assert train("resnet", model, model) == losses == without("resnet", 4)[0]
    for one, other in zip(model.buffers(), converted.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_deferred_statistics_are_those_of_the_whole_mini_batch() -> None:
    """Of the first batch norm, whose input does not depend on how others cut; up to rounding."""
    plain = build("resnet")
    model = piped(copy.deepcopy(plain), 3, chunks=4, deferred_batch_norm=True)
    images = digits(48)[0]
    for module in (plain, model):
        module(images).sum().backward()
    for statistic in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model[1], statistic), getattr(plain[1], statistic))


@pytest.mark.slow
def test_images_not_seen() -> None:
    """In evaluation, nothing depends on who else is in the batch: chunks change nothing."""
    _, plain = without("resnet", 1)
    plain = copy.deepcopy(plain).eval()
    model = piped(copy.deepcopy(plain), 3, chunks=4).eval()
    images = digits(100, first=48 * STEPS)[0]
    with torch.no_grad():
        assert torch.equal(model(images), in_turn(plain, 4)(images))
        torch.testing.assert_close(model(images), plain(images))
