"""A step of the executor against the unsplit model, and the cases of its tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_pipelines import (
    assert_order_respected,
    assert_same,
    call_within,
    mse,
    pipeline,
    unsplit,
)
from torch import nn

import pipesim as ps
from pipeexec.executor import StepResult

SCHEDULES = ["gpipe", "1f1b"]
RECOMPUTE = ["never", "always", "except_last"]
everywhere = pytest.mark.parametrize("recompute", RECOMPUTE)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
scheduled = pytest.mark.parametrize("schedule", SCHEDULES)


def lowered(schedule: str, p: int, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, p, m), **options)


def check(
    stages: Sequence[nn.Module],
    graph: ps.TaskGraph,
    inputs: Any,
    targets: Any,
    loss_fn: Any = mse,
    **options: Any,
) -> StepResult:
    """Run a step, and the unsplit model: everything must be equal. Return the step's result."""
    for stage in stages:
        stage.zero_grad()
    whole = copy.deepcopy(list(stages))
    loss = unsplit(
        whole, graph, inputs, targets, loss_fn, reduction=options.get("loss_reduction", "mean")
    )
    with pipeline(stages, graph, loss_fn, **options) as subject:
        result = call_within(60, lambda: subject.step(inputs, targets))
    assert torch.equal(result.loss, loss)
    assert_same(stages, whole)
    assert result.timeline.complete
    assert_order_respected(result.timeline)
    return result
