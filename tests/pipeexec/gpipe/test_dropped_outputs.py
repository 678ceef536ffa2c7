"""An output of GPipe that is dropped does not make the host wait for a GPU.

On the stand-in for CUDA, whose events pass 0.3 s after they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeGpu
from small_pipelines import Faulty, data, dense
from torch import nn

import pipeexec as px

SECONDS = 0.3


@pytest.fixture
def event_delay() -> float:
    """Let events pass late."""
    return SECONDS


def _model(*layers: nn.Module) -> px.GPipe:
    module = nn.Sequential(*(layers or dense(4)))
    devices = [FakeGpu(0), FakeGpu(1)]
    return px.GPipe(module, [len(module) - 2, 2], devices=devices, chunks=4)


def _kept(model: px.GPipe) -> Any:
    return model(data(8)[0])


def _dropped(model: px.GPipe) -> None:
    model(data(8)[0])


def _deleted(model: px.GPipe) -> None:
    output = model(data(8)[0])
    loss = output.square().mean()
    del output
    del loss


def _evaluated(model: px.GPipe) -> None:
    """Run an evaluation loop that keeps the graph's ends for a moment."""
    model.eval()
    for _ in range(3):
        model(data(8)[0]).argmax(dim=1)


def _evaluated_without_gradients(model: px.GPipe) -> None:
    with torch.no_grad():
        for _ in range(3):
            model(data(8)[0])


def _raised(model: px.GPipe) -> None:
    with pytest.raises(ZeroDivisionError):
        _fail(model(data(8)[0]))


def _fail(output: Any) -> None:
    raise ZeroDivisionError(output.shape)


def _trained(model: px.GPipe) -> None:
    model(data(8)[0]).square().mean().backward()


@pytest.mark.measures_time
@pytest.mark.parametrize(
    "use",
    [_kept, _dropped, _deleted, _evaluated, _evaluated_without_gradients, _raised, _trained],
)
def test_the_host_goes_on(cuda: FakeCuda, use: Callable[[px.GPipe], Any]) -> None:
    model = _model()
    _kept(model)
    start = perf_counter()
    output = use(model)
    assert perf_counter() - start < SECONDS
    assert not cuda.calls("synchronize")
    del output


@pytest.mark.measures_time
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_host_goes_on_after_a_failure(cuda: FakeCuda, where: str) -> None:
    """The exception of a partition is raised before the GPU is through; nothing is left behind."""
    faulty = Faulty(ValueError("no"), **{where: 2})
    model = _model(*dense(3), faulty)
    start = perf_counter()
    with pytest.raises(ValueError, match="no"):
        _trained(model)
    assert perf_counter() - start < SECONDS
    assert not cuda.calls("synchronize")
    faulty.repair()
    assert model._runtime is not None
    assert not any(stage._activations or stage._inputs for stage in model._runtime.stages)
    _trained(model)


@pytest.mark.measures_time
@pytest.mark.usefixtures("cuda")
def test_measured_times_are_waited_for() -> None:
    """The one place where the host asks a GPU: a timeline has times of tasks that have run."""
    model = _model()
    _trained(model)
    start = perf_counter()
    assert model.timeline().complete
    assert perf_counter() - start < 2 * SECONDS + 0.2
