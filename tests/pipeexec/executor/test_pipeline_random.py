"""Random numbers of pipelines: those of a sequential run, whatever the schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from parity import RECOMPUTE, SCHEDULES, everywhere, lowered, scheduled
from small_pipelines import (
    assert_same,
    data,
    gradients,
    pipeline,
    unsplit,
)
from torch import Tensor, nn

from pipeexec.stages.module_call import OwnGenerator, task_seed
from pipesim.errors import RandomnessWarning

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


class Noise(nn.Module):
    """Draws through operations that take a generator, and through one that takes none."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.randn(x.shape) + torch.empty_like(x).normal_()


def _random_stages() -> list[nn.Module]:
    """Return stages of which the first, the second and the last draw, and the third does not."""
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(16, 16), Noise()),
        nn.Linear(16, 16),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)),
    ]


def drawing(step: int) -> Any:
    """Return a call that gives each stage and micro-batch its own random numbers."""
    seed = torch.initial_seed()

    def call(stage: int, microbatch: int, module: nn.Module, values: tuple[Tensor, ...]) -> Any:
        with OwnGenerator(task_seed(seed, step, stage, microbatch), torch.device("cpu")):
            return module(*values)

    return call


@pytest.mark.slow
@everywhere
@scheduled
def test_dropout_is_that_of_a_sequential_run(schedule: str, recompute: str) -> None:
    """The same masks in forward and in recompute, in every step anew; torch's own untouched."""
    stages = _random_stages()
    whole = copy.deepcopy(stages)
    graph = lowered(schedule, 4, 5, recompute=recompute)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    losses = []
    with pipeline(stages, graph) as subject:
        for number in range(3):
            result = subject.step(*data(13))
            loss = unsplit(whole, graph, *data(13), call=drawing(number))
            assert torch.equal(result.loss, loss)
            assert_same(stages, whole)
            losses.append(float(loss))
    assert len(set(losses)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_the_same_in_every_schedule() -> None:
    """After the same seed: same masks, though gradients are added in another order."""
    losses, results = [], []
    for schedule in SCHEDULES:
        for recompute in RECOMPUTE:
            stages = _random_stages()
            torch.manual_seed(11)
            with pipeline(stages, lowered(schedule, 4, 5, recompute=recompute)) as subject:
                losses.append(subject.step(*data(13)).loss)
            results.append(gradients(stages))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for other in results[1:]:
        for actual, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(actual, wanted)


def test_another_seed_drops_others() -> None:
    losses = []
    for seed in (1, 2, 1):
        stages = _random_stages()
        torch.manual_seed(seed)
        with pipeline(stages, lowered("1f1b", 4)) as subject:
            losses.append(float(subject.step(*data(13)).loss))
    assert losses[0] == losses[2] != losses[1]


def test_a_continued_run_draws_the_numbers_of_its_steps() -> None:
    """Random numbers depend on the number of the step, which may be set."""
    losses = []
    for first in (0, 2):
        stages = _random_stages()
        torch.manual_seed(11)
        with pipeline(stages, lowered("1f1b", 4)) as subject:
            subject.n_steps = first
            losses.append([float(subject.step(*data(13)).loss) for _ in range(3 - first)])
            assert subject.n_steps == 3
    assert losses[0][2:] == losses[1]


def test_eval_mode_draws_nothing() -> None:
    """And going back to training draws again."""
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Dropout()) for _ in range(2)]
    whole = copy.deepcopy(stages)
    graph = lowered("1f1b", 2)
    with pipeline(stages, graph) as subject:
        for number, training in enumerate([True, False, False, True]):
            for stage in (*stages, *whole):
                stage.train(training)
            loss = unsplit(whole, graph, *data(13), call=drawing(number))
            assert torch.equal(subject.step(*data(13)).loss, loss)
            assert_same(stages, whole)


class _DrawsLater(nn.Module):
    """Draws from its second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls == 1 else nn.functional.dropout(self.layer(x))


def test_randomness_that_was_not_seen_at_first_is_warned_of() -> None:
    """Once; then it is known."""
    with pipeline([_DrawsLater(), nn.Linear(16, 16)], lowered("1f1b", 2)) as subject:
        with pytest.warns(RandomnessWarning, match="did not draw in its first forward"):
            subject.step(*data(8))
        subject.step(*data(8))
