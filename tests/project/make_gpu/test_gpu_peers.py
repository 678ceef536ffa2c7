"""Steps ``peers`` and ``gpipe`` of ``make gpu``: runtimes that are not ours, and the ablation."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_cuda import FakeGpu
from sanitizing import sanitized
from torch import nn

import pipesim as ps

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")


SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])


def torch_runtime(schedule: str, devices: list[Any]) -> Any:
    """Return torch's runtime of linear layers, a stage a device."""
    module = importlib.import_module("on_gpu.torch_runtime")
    streams = importlib.import_module("on_gpu.streams").compute_streams(devices)
    n, m = len(devices), 4
    graph = ps.lower(ps.schedule(schedule, n, m), step="none")
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8) for _ in range(n)]
    batch = torch.rand(m, 8), torch.randint(8, (m,))
    return module.TorchRuntime(graph, stages, streams, torch.device("cpu"), batch)


@SCHEDULES
def test_torchs_runtime_runs_our_schedule(gpu_script: ModuleType, schedule: str) -> None:
    """In the order that it is given, which is that of each device; other orders are found."""
    module = importlib.import_module("on_gpu.torch_runtime")
    with module.one_process():
        runtime = torch_runtime(schedule, ["cpu"] * 3)
        runtime.step()
    runtime.check_order()
    for stage, order in enumerate(ps.schedule(schedule, 3, 4).orders):
        ran = [action for action in runtime.ran if action.startswith(str(stage))]
        assert ran == [str(action) for action in order]
    runtime.order.reverse()
    with pytest.raises(RuntimeError, match="was given"):
        runtime.check_order()


def sanitized_steps(patch: pytest.MonkeyPatch, spoil: str | None, schedule: str) -> Any:
    """Run torch's runtime on the stand-in for CUDA; return what was found."""
    module = importlib.import_module("on_gpu.torch_runtime")
    if spoil is not None:
        patch.setattr(module, spoil, lambda *_: nullcontext())
    with sanitized(patch) as watch, module.one_process():
        runtime = torch_runtime(schedule, [FakeGpu(index) for index in range(3)])
        for _ in range(2):
            runtime.step()
    return watch


@SCHEDULES
def test_torchs_runtime_does_not_race(
    gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """On a stream a stage, as on slices."""
    watch = sanitized_steps(monkeypatch, None, schedule)
    assert not watch.races, watch.races
    assert not watch.freed, watch.freed
    assert watch.n_kept


@pytest.mark.parametrize("spoil", ["joined", "on_stream"])
def test_races_of_torchs_runtime_would_be_seen(
    gpu_script: ModuleType, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    assert sanitized_steps(monkeypatch, spoil, "zb_h1").races


def test_intervals_of_ratios(gpu_script: ModuleType) -> None:
    """By order statistics: of 20 values the 6th and the 15th."""
    ratio = importlib.import_module("on_gpu.turns").ratio
    assert ratio(range(1, 21), [2.0] * 20) == (5.25, 3.0, 7.5)
