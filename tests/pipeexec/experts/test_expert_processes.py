"""Experts spread over processes: losses, gradients and weights of the model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_stages import N_LAYERS, WIDTH, adam, batch, build, lowered, steps, train_unsplit
from ranks import Ranks
from small_pipelines import mse
from torch import nn

import pipeexec as px
from pipeexec.distributed import Processes
from pipesim.errors import ArgumentError, ExecutionError, PeerError

pytestmark = pytest.mark.filterwarnings("ignore::pipesim.errors.OversubscriptionWarning")


def check(
    ranks: Ranks, schedule: str, n_stages: int, n_replicas: int, **lowering: Any
) -> list[dict[str, Any]]:
    """Train in ranks and in this process: losses, gradients and weights of all ranks are equal."""
    results: list[dict[str, Any]] = ranks.run(
        steps, schedule=schedule, n_stages=n_stages, n_replicas=n_replicas, **lowering
    )
    whole = train_unsplit(n_replicas, 2, n_layers=max(N_LAYERS, n_stages))
    names_here = set()
    for result in results:
        assert result["complete"]
        assert result["losses"] == pytest.approx(whole["losses"], rel=1e-12)
        assert result["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-12)
        for kind in ("gradients", "weights"):
            for name, value in result[kind].items():
                torch.testing.assert_close(value, whole[kind][name], rtol=1e-9, atol=1e-12)
        assert result["state_keys"] == sorted(result["weights"])
        names_here |= set(result["weights"])
        if lowering.get("grad_norm"):
            norm = torch.stack([g.norm() for g in whole["gradients"].values()]).norm()
            assert result["norms"][-1] == pytest.approx(norm.item(), rel=1e-6)
    assert names_here == set(whole["weights"])
    return results


@pytest.mark.parametrize(
    ("schedule", "n_stages", "n_replicas", "lowering"),
    [
        ("1f1b", 1, 2, {}),
        ("1f1b", 1, 2, {"grad_sync": "every"}),
        ("1f1b", 1, 2, {"grad_sync": "bucketed", "grad_norm": True}),
        ("zb_h1", 1, 2, {"overlap": False}),
        ("1f1b", 1, 2, {"expert_replicas": 1}),
        ("1f1b", 1, 2, {"shares": False}),
        ("dualpipev", 4, 1, {}),
    ],
)
def test_two_processes(
    two_ranks: Ranks, schedule: str, n_stages: int, n_replicas: int, lowering: dict[str, Any]
) -> None:
    check(two_ranks, schedule, n_stages, n_replicas, **lowering)


@pytest.mark.parametrize(
    ("schedule", "n_stages", "n_replicas", "lowering"),
    [
        ("1f1b", 2, 2, {}),
        ("zb_h1", 2, 2, {}),
        ("dualpipev", 4, 2, {"grad_norm": True}),
        ("dualpipe", 2, 2, {"grad_norm": True}),
        ("1f1b", 1, 4, {}),
        ("1f1b", 1, 4, {"expert_replicas": 2}),
        ("1f1b", 2, 2, {"layout": "stage_major", "shares": False}),
    ],
)
def test_four_processes(
    four_ranks: Ranks, schedule: str, n_stages: int, n_replicas: int, lowering: dict[str, Any]
) -> None:
    check(four_ranks, schedule, n_stages, n_replicas, **lowering)


def test_each_process_has_its_experts_alone(four_ranks: Ranks) -> None:
    results = check(four_ranks, "1f1b", 1, 4, expert_replicas=2)
    names = set(build().state_dict())
    for rank, result in enumerate(results):
        others = {f"1.experts.{k}.0.weight" for k in range(8) if k // 4 != rank % 2}
        assert not others & set(result["weights"])
        assert set(result["weights"]) <= names


def refused(processes: Processes, kind: str) -> str:
    """Return the error of a pipeline that cannot be made; every rank has one."""
    shares = {"swapped": [(1, 2), (0, 2)], "one": [(0, 2), (0, 1)], "wrong": [(0, 2), (0, 2)]}
    n_replicas = 4 if kind == "two a process" else 2
    graph = lowered("1f1b", 1, 1, n_replicas)
    share = shares.get(kind, [(0, 1), (0, 1)])[processes.rank]
    model = build(share)
    if kind == "weights" and processes.rank:
        model[1].experts["3"][0].weight.data += 1  # type: ignore[union-attr,index,operator]
    try:
        px.Pipeline(
            [model], graph, ["cpu"] * (n_replicas // 2), mse, processes=processes, pin_threads=False
        )
    except (ArgumentError, PeerError) as error:
        return str(error)
    return "made"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "swapped",
            "and computes experts 0 to 3, but its module has 4 to 7; give pipeexec.Experts(",
        ),
        ("one", "stage 0 has a share of its experts, but another process has all of them"),
        ("wrong", "and computes experts 4 to 7, but its module has 0 to 3"),
        (
            "two a process",
            "replicas that share the experts of stage 0 are in processes [0, 0, 1, 1]",
        ),
        ("weights", "stage 0 begins with different weights in different processes"),
    ],
)
def test_pipelines_that_cannot_be_made(two_ranks: Ranks, case: str, message: str) -> None:
    assert any(message in error for error in two_ranks.run(refused, kind=case))


def save(processes: Processes, folder: str, shares: bool) -> str:
    """Save a checkpoint of one step, and load it again; return the error, or nothing."""
    x, y = (part.tensor_split(2)[processes.rank] for part in batch(2))
    model = build((processes.rank, 2) if shares else (0, 1))
    graph = lowered("1f1b", 1, 1, 2)
    with px.Pipeline(
        [model], graph, ["cpu"], mse, adam, processes=processes, pin_threads=False
    ) as pipeline:
        pipeline.step(x, y)
        pipeline.load_state_dict(build().state_dict(), strict=False)
        try:
            px.save_checkpoint(pipeline, folder)
        except (ArgumentError, PeerError) as error:
            return str(error)
        px.load_checkpoint(pipeline, folder)
    whole = build().state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    return ""


def test_checkpoints(two_ranks: Ranks, tmp_path: Path) -> None:
    """Of all experts in each process they work; of shares they are refused, states are loaded."""
    assert two_ranks.run(save, folder=str(tmp_path / "all"), shares=False) == ["", ""]
    errors = two_ranks.run(save, folder=str(tmp_path / "shares"), shares=True)
    assert any("stage 0 has a share of its experts in this process" in error for error in errors)


def failing(processes: Processes) -> str:
    """Run a step in which an expert of rank 1 raises; return the error."""
    model = build((processes.rank, 2))
    if processes.rank:
        model[1].experts["5"] = nn.Linear(WIDTH + 1, WIDTH).double()  # type: ignore[union-attr]
    x, y = (part.tensor_split(2)[processes.rank] for part in batch(2))
    try:
        with px.Pipeline(
            [model], lowered("1f1b", 1, 1, 2), ["cpu"], mse, processes=processes, pin_threads=False
        ) as pipeline:
            pipeline.step(x, y)
    except ExecutionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_expert_that_raises_stops_all_processes(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(failing)
    assert "0F0.1" in first
    assert second.startswith("StageError")
    assert "0F0.1" in second
