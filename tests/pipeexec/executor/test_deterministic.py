"""Deterministic mode: errors of operations without it, and steps that are equal to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity import lowered
from ranks import Ranks
from small_pipelines import cut, data, mse, pipeline
from torch import Tensor, nn

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import StageError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.PipeWarning")


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Unpool(nn.Module):
    """An operation that has no deterministic implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, places = nn.functional.max_pool1d(self.layer(x)[:, None], 2, return_indices=True)
        return nn.functional.max_unpool1d(y, places, 2)[:, 0]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_operation_without_a_deterministic_form_is_named(stage: int) -> None:
    """With the stage; the next step of other stages is not affected."""
    stages: list[nn.Module] = [nn.Linear(16, 16), nn.Linear(16, 16)]
    stages[stage] = Unpool()
    with (
        pipeline(stages, lowered("1f1b", 2, 2)) as subject,
        pytest.raises(StageError, match=f"{stage}F0 failed.*max_unpooling.*deterministic"),
    ):
        subject.step(*data(8))


def trained(subject: px.Pipeline) -> list[float]:
    return [subject.gather(subject.step(*data(12, seed=k))).loss.item() for k in range(4)]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)
    ))  # fmt: skip


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize("hosts", ["one", "per_device"])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("zb_h1", {}),
        ("1f1b", {"recompute": "always"}),
        ("1f1b", {"n_replicas": 2, "grad_sync": "bucketed"}),
    ],
)
def test_two_runs_are_equal_to_the_last_bit(
    schedule: str, options: dict[str, Any], hosts: Any
) -> None:
    """Dropout included; whatever the threads do."""
    runs = []
    for _ in range(2):
        stages = cut(model(), [2, 2])
        graph = lowered(schedule, 2, 3, hosts=hosts, **options)
        with pipeline(stages, graph, mse, adam) as subject:
            losses = trained(subject)
        runs.append((losses, [p for stage in stages for p in stage.parameters()]))
    (losses, weights), (again, same) = runs
    assert losses == again
    assert all(map(torch.equal, weights, same))


def test_recompute_and_schedule_change_no_random_number() -> None:
    """1F1B and its recompute add gradients in one order, so that even these are equal."""
    results = []
    for recompute in ("never", "always"):
        with pipeline(
            cut(model(), [2, 2]), lowered("1f1b", 2, 3, recompute=recompute), mse, adam
        ) as subject:
            results.append(trained(subject))
    assert results[0] == results[1]


def _in_process(processes: Processes) -> list[list[float]]:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            stages = cut(model(), [2, 2])
            own: list[nn.Module | None] = list(stages)
            own[1 - processes.rank] = None
            graph = lowered("1f1b", 2, 3)
            with px.Pipeline(own, graph, ["cpu"], mse, adam, processes=processes) as subject:
                runs.append(trained(subject))
        return runs
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_processes_are_equal_to_threads(two_ranks: Ranks) -> None:
    with pipeline(cut(model(), [2, 2]), lowered("1f1b", 2, 3), mse, adam) as subject:
        expected = trained(subject)
    for runs in two_ranks.run(_in_process):
        assert runs == [expected, expected]
