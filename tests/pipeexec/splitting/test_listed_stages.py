"""Stages of `pipeexec.split` in a list of the user's: the pipeline still knows the split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from small_pipelines import pipeline
from split_models import WORDS, Tied
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning"),
]

MAX_NORM = 0.5


def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of all words but the first."""
    losses = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return 5 * losses[target.flatten() > 0].sum(), (target > 0).sum()


def batch(step: int = 0, n: int = 4) -> Tensor:
    return torch.randint(WORDS, (n, 5), generator=torch.Generator().manual_seed(step))


def decayed(named_parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that lets the embedding decay."""
    rows: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        rows[name == "words.weight"].append(parameter)
    groups = [{"params": row, "weight_decay": 0.5 * is_first} for is_first, row in rows.items()]
    return torch.optim.SGD(groups, lr=0.1)


def split() -> tuple[px.Stages, Tied]:
    """Return stages, and an equal model."""
    torch.manual_seed(0)
    model = Tied()
    whole = copy.deepcopy(model)
    return px.split(model, 2, sample={"words": batch()}), whole


def train_whole(model: Tied, steps: Sequence[Tensor]) -> None:
    optimizer = decayed(model.named_parameters())
    for words in steps:
        optimizer.zero_grad()
        total, count = loss_fn(model(words), words)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def lowered(stages: px.Stages, schedule: str = "1f1b") -> ps.TaskGraph:
    return ps.lower(ps.schedule(schedule, 2, 2), tied=stages.tied_stages, grad_norm=True)


def compiled(stage: nn.Module) -> nn.Module:
    return torch.compile(stage, backend="eager")


@pytest.mark.parametrize("wrap", [lambda x: x, compiled], ids=["listed", "compiled"])
def test_tied_copies_and_keyword_arguments(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """They train as the unsplit model; one of them is compiled, which takes seconds a stage."""
    stages, whole = split()
    own = [stages[0], wrap(stages[1])]
    train_whole(whole, [batch(step) for step in range(2)])
    with pipeline(own, lowered(stages), loss_fn, decayed, max_grad_norm=MAX_NORM) as p:
        for step in range(2):
            p.step({"words": batch(step)}, batch(step))
        state = p.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value)


class Around(nn.Module):
    """A module of the user's around a stage."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Tensor) -> Any:
        return self.stage(*values)


def test_lists_that_are_refused() -> None:
    """Copies of tied parameters are never left alone, and stages are in their order."""
    stages, _ = split()
    graph, plain = lowered(stages), ps.lower(ps.schedule("1f1b", 2, 2))
    for own, lower, message in (
        (list(stages), plain, r"does not add; lower the schedule with tied=\[\(0, 1\)\]"),
        ([stages[0], Around(stages[1])], plain, "stage 0 has a stage of pipeexec.split inside"),
        ([stages[1], stages[0]], graph, r"stage 0 of 2 is stage 1 of 2 of a pipeexec.split"),
        ([stages[0], split()[0][1]], graph, r"stage 1 of 2 is stage 1 of 2 of another"),
    ):
        with pytest.raises(ArgumentError, match=message):
            pipeline(own, lower, loss_fn, decayed)


def replicated(processes: Processes, schedule: str) -> None:
    """Train stages in DDP, each process with half of the batch."""
    stages, whole = split()
    groups = [dist.new_group() for _ in stages]
    own = [
        DistributedDataParallel(stage, process_group=group)
        for stage, group in zip(stages, groups, strict=True)
    ]
    train_whole(whole, [batch(step, 8) for step in range(2)])
    graph = lowered(stages, schedule)
    with pipeline(own, graph, loss_fn, decayed, max_grad_norm=MAX_NORM) as p:
        for step in range(2):
            words = batch(step, 8).chunk(2)[processes.rank]
            p.step({"words": words}, words)
        state = p.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_clipping_and_tied_copies_with_ddp(two_ranks: Ranks, schedule: str) -> None:
    """Norm, sums over copies, and counts are those of the batch of all processes."""
    two_ranks.run(replicated, schedule=schedule)
