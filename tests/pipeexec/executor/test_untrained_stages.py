"""Stages whose parameters get no gradient: named once, after the first step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small_pipelines import mse
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import LossWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
    pytest.mark.filterwarnings("ignore::pipesim.errors.BatchWarning"),
]


class Untracked(nn.Linear):
    """A layer that runs under `torch.no_grad`."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def warnings_of(stages: list[nn.Module], n_steps: int = 2, **lowering: Any) -> list[str]:
    """Return the warnings of losses in steps."""
    graph = ps.lower(ps.schedule("1f1b", len(stages), 2), **lowering)
    n_samples = 4 * graph.n_replicas
    x, y = torch.randn(n_samples, 4), torch.randn(n_samples, 4)
    with (
        warnings.catch_warnings(record=True) as caught,
        px.Pipeline(stages, graph, ["cpu"] * graph.n_devices, mse) as pipeline,
    ):
        warnings.simplefilter("always")
        for _ in range(n_steps):
            pipeline.step(x, y)
    return [str(x.message) for x in caught if issubclass(x.category, LossWarning)]


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize("lowering", [{}, {"n_replicas": 2}])
def test_a_stage_under_no_grad_is_named_once(lowering: dict[str, Any]) -> None:
    (message,) = warnings_of([Untracked(4, 4), frozen()], **lowering)
    assert message.startswith("the parameters of stage 0 require gradients, and got none")


def test_stages_before_one_that_detaches_are_named() -> None:
    (message,) = warnings_of([nn.Linear(4, 4), Untracked(4, 4), nn.Linear(4, 4)])
    assert message.startswith("the parameters of stages 0, 1 require gradients")


@pytest.mark.parametrize(
    "stages",
    [
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        [nn.Linear(4, 4), frozen()],
        [frozen(), nn.Linear(4, 4)],
        [nn.Tanh(), nn.Linear(4, 4)],
    ],
)
def test_other_stages_are_not(stages: list[nn.Module]) -> None:
    assert warnings_of(stages) == []
