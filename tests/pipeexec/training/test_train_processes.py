"""`px.train` over processes: all end after the same step, and save one checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_pipelines import mse
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.training import TrainingRun

if TYPE_CHECKING:
    from ranks import Ranks


def _train(
    processes: Processes, folder: str, rank: int, event: str, n_steps: int
) -> dict[str, Any]:
    """Train two stages, one a process; something ends it in one process alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    stages = px.split(model, 2, sample=torch.ones(2, 4))
    graph = ps.lower(ps.schedule("1f1b", 2, 2), hosts="per_device")
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 4, generator=draw), torch.ones(4, 1)) for _ in range(10)]

    def act(run: TrainingRun, _: object) -> None:
        if run.n_steps == 3 and processes.rank == rank:
            run.stop() if event == "stop" else signal.raise_signal(signal.SIGTERM)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 1e-2)

    with px.Pipeline(stages, graph, ["cpu"], mse, adam, processes=processes) as pipeline:
        run = px.train(
            pipeline, batches, n_steps=n_steps, directory=folder, on_step=act if event else None,
            evaluation=batches[:2], checkpoint_every=2,
        )  # fmt: skip
    return {"end": run.end, "n": run.n_steps, "losses": run.losses,
            "evaluations": run.evaluations["loss"].tolist()}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "rank", "end", "n"),
    [("stop", 1, "stopped", 3), ("signal", 0, "interrupted", 4), ("signal", 1, "interrupted", 4)],
)
def test_end_and_continue(
    two_ranks: Ranks, tmp_path: Path, event: str, rank: int, end: str, n: int
) -> None:
    """All processes know of the signal that one of them got; the rest has the same losses."""
    whole = two_ranks.run(_train, folder=str(tmp_path / "whole"), rank=0, event="", n_steps=6)
    first = two_ranks.run(_train, folder=str(tmp_path / "run"), rank=rank, event=event, n_steps=6)
    assert [(x["end"], x["n"]) for x in first] == [(end, n)] * 2
    second = two_ranks.run(_train, folder=str(tmp_path / "run"), rank=0, event="", n_steps=6)
    assert second[0]["losses"] == second[1]["losses"] == whole[0]["losses"]
    assert second[0]["evaluations"][-1] == whole[0]["evaluations"][-1]
