"""Deferred batch norm: statistics of the mini-batch from its micro-batches."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from case_choice import covering
from torch import Tensor, nn

from pipeexec.gpipe.batchnorm import DeferredBatchNorm
from pipeexec.gpipe.checkpoint import checkpointing, is_checkpointing, is_recomputing, recomputing
from pipeexec.gpipe.gpipe import GPipe
from pipesim.errors import BatchNormWarning

convert = DeferredBatchNorm.convert_deferred_batch_norm


def in_chunks(norm: nn.Module, batch: Tensor, chunks: int) -> Tensor:
    return torch.cat([norm(part) for part in batch.chunk(chunks)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "shape", "momentum"),
    covering(
        product([1, 4, 5], [(24, 3), (24, 3, 5), (24, 3, 4, 5), (24, 3, 2, 2, 2)],
                [0.1, None, 0.5]),
        2,
    ),
)  # fmt: skip
def test_statistics_are_those_of_the_whole_batch(
    chunks: int, shape: tuple[int, ...], momentum: Any
) -> None:
    """After several mini-batches, also where they do not divide evenly."""
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    plain = kind(3, momentum=momentum)
    deferred = convert(kind(3, momentum=momentum), chunks)
    for _ in range(3):
        batch = torch.randn(shape) * 2 + 1
        plain(batch)
        in_chunks(deferred, batch, chunks)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(deferred, name), getattr(plain, name))


def test_each_micro_batch_is_normalized_by_itself() -> None:
    batch = torch.randn(8, 3)
    deferred = convert(nn.BatchNorm1d(3), 2)
    expected = torch.cat([nn.BatchNorm1d(3)(part) for part in batch.chunk(2)])
    assert torch.equal(in_chunks(deferred, batch, 2), expected)


def test_gradients_are_those_of_a_batch_norm() -> None:
    batch = torch.randn(8, 3)
    plain = nn.BatchNorm1d(3)
    deferred = convert(nn.BatchNorm1d(3), 2)
    for norm in (plain, deferred):
        in_chunks(norm, batch, 2).square().mean().backward()
    for one, other in zip(plain.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_evaluation_takes_the_statistics() -> None:
    batch = torch.randn(8, 3)
    plain, deferred = nn.BatchNorm1d(3), convert(nn.BatchNorm1d(3), 1)
    plain(batch)
    deferred(batch)
    torch.testing.assert_close(deferred.eval()(batch), plain.eval()(batch))
    before = deferred.running_mean.clone()  # type: ignore[union-attr, operator]
    deferred(batch)
    assert torch.equal(deferred.running_mean, before)  # type: ignore[arg-type]


def test_a_recompute_is_not_counted() -> None:
    deferred = convert(nn.BatchNorm1d(3), 2)
    assert isinstance(deferred, DeferredBatchNorm)
    deferred(torch.randn(4, 3))
    with recomputing():
        assert is_recomputing()
        deferred(torch.randn(4, 3))
    assert not is_recomputing()
    assert (deferred.tracked, deferred.counter) == (1, 4)


def test_who_is_checkpointing() -> None:
    assert not is_checkpointing()
    with checkpointing():
        assert is_checkpointing()
    assert not is_checkpointing()


def test_all_batch_norms_of_a_module_are_converted() -> None:
    """Their parameters and buffers stay the same objects; those without statistics stay."""
    inner = nn.BatchNorm2d(2)
    own = nn.BatchNorm2d(2, track_running_stats=False)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(2, 2, 1), inner), own)
    converted = convert(model, 3)
    norm = converted[0][1]  # type: ignore[index]
    assert isinstance(norm, DeferredBatchNorm)
    assert norm.chunks == 3
    assert norm.weight is inner.weight
    assert norm.running_var is inner.running_var
    assert converted[1] is own  # type: ignore[index]
    assert convert(norm, 3) is norm
    assert set(norm.state_dict()) == {*inner.state_dict(), "sum", "sum_squares"}


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_stays_in_its_mode(training: bool) -> None:
    """One that is frozen, as in fine-tuning, gathers no statistics."""
    norm = convert(nn.BatchNorm1d(3).train(training), 2)
    assert norm.training == training
    for _ in range(2):
        norm(torch.ones(4, 3))
    assert bool((norm.running_mean != 0).any()) == training  # type: ignore[operator]


def test_one_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        DeferredBatchNorm(3)(torch.zeros(3))


def test_a_warning_names_the_line_of_the_call() -> None:
    """Lines of torch, which calls the forward, are between this file and the warning."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = GPipe(module, balance=[1, 1], devices=["cpu"] * 2, chunks=2)
    with pytest.warns(BatchNormWarning) as caught:
        model(torch.ones(4, 4))
    assert caught[0].filename == __file__
