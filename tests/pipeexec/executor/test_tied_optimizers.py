"""Copies of tied parameters are trained alike, in the groups of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipeexec as px
import pipesim as ps
from pipesim.errors import ArgumentError, CheckpointError, StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


class Tied(nn.Module):
    """Three layers; the last one has the matrix of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def decay_first(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer that lets the parameters of the first layer decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[name.startswith("first")].append(parameter)
    return torch.optim.SGD(
        [{"params": row, "weight_decay": 0.9 * is_first} for is_first, row in groups.items()],
        lr=0.1,
    )


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


@pytest.mark.slow
def test_copies_are_in_the_group_of_the_first_name() -> None:
    """A factory is given the first name for each copy, as unsplit models give it."""
    torch.manual_seed(0)
    model, whole = Tied(), Tied()
    whole.load_state_dict(model.state_dict())
    optimizer = decay_first(whole.named_parameters())
    inputs, targets = torch.randn(4, 4), torch.randn(4, 4)
    stages = px.split(model, 2, sample=inputs)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), tied=stages.tied_stages)
    with px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, decay_first) as pipeline:
        for _ in range(3):
            pipeline.step(inputs, targets)
            optimizer.zero_grad()
            loss_fn(whole(inputs), targets).backward()
            optimizer.step()
        state = pipeline.state_dict()
    assert torch.equal(state["first.weight"], state["last.weight"])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_copy_that_is_frozen_later_is_refused(frozen: int) -> None:
    """The gradient of the other one would train it; with all of them frozen, none is trained."""
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages[1].weight.data.copy_(stages[0].weight.data)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), tied=[(0, 1)])
    batch = torch.ones(2, 4), torch.ones(2, 4)
    with px.Pipeline(
        stages, graph, ["cpu"] * 2, loss_fn, lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        tied=[[(0, "weight"), (1, "weight")]],
    ) as pipeline:  # fmt: skip
        pipeline.step(*batch)
        stages[frozen].weight.requires_grad_(False)
        start = stages[0].weight.detach().clone()
        message = f"stage {frozen} has a copy of a tied .* while that of stage {1 - frozen} is trai"
        with pytest.raises(StageError, match=message):
            pipeline.step(*batch)
        stages[1 - frozen].weight.requires_grad_(False)
        pipeline.step(*batch)
        assert all(torch.equal(stage.weight, start) for stage in stages)


def test_states_of_untied_models_are_refused(tmp_path: Path) -> None:
    """Copies would get different values; half a state is refused for the same reason."""
    stages = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4)]
    stages[1].weight.data.copy_(stages[0].weight.data)
    schedule, devices = ps.schedule("1f1b", 2, 2), ["cpu"] * 2
    names = [[(0, "weight"), (1, "weight")]]
    start = stages[0].weight.detach().clone()
    with px.Pipeline(copy.deepcopy(stages), ps.lower(schedule), devices, loss_fn) as untied:
        untied.modules[1].weight.data.add_(1)
        px.save_checkpoint(untied, tmp_path / "x")
        state = untied.state_dict()
    with px.Pipeline(
        stages, ps.lower(schedule, tied=[(0, 1)]), devices, loss_fn, tied=names
    ) as pipeline:
        message = r"are tied, but the state has different values .*'0.weight' and '1.weight'"
        with pytest.raises(ArgumentError, match=message):
            pipeline.load_state_dict(state)
        with pytest.raises(ArgumentError, match=r"different values for them \('1.weight'\)"):
            pipeline.load_state_dict({"1.weight": state["1.weight"]}, strict=False)
        with pytest.raises(CheckpointError, match="are tied, but the checkpoint has different"):
            px.load_checkpoint(pipeline, tmp_path / "x")
        assert all(torch.equal(stage.weight, start) for stage in stages)
        pipeline.load_state_dict({**state, "1.weight": state["0.weight"]})


def by_shape(
    make: Callable[..., torch.optim.Optimizer], **options: Any
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a factory that takes ``options`` for stages with a bias."""
    return lambda parameters: make(
        (rows := list(parameters)), lr=0.1, **(options if len(rows) > 1 else {})
    )


def leave_out(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the last parameter of a stage."""
    return torch.optim.SGD(list(parameters)[-1:], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (by_shape(torch.optim.SGD, weight_decay=0.1), "weight_decay=0.1.*weight_decay=0[,)]"),
        (by_shape(torch.optim.SGD, momentum=0.5), "momentum=0.5.*momentum=0,"),
        (leave_out, r"no optimizer, and SGD\("),
    ],
)
def test_copies_that_are_trained_differently_are_refused(factory: Any, message: str) -> None:
    """They would not stay equal."""
    stages = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    stages[1].weight.data.copy_(stages[0].weight.data)
    graph = ps.lower(ps.schedule("1f1b", 2, 2), tied=[(0, 1)])
    names = [[(0, "weight"), (1, "weight")]]
    with pytest.raises(ArgumentError, match=rf"are tied, but trained differently.*{message}"):
        px.Pipeline(stages, graph, ["cpu"] * 2, loss_fn, factory, tied=names)
