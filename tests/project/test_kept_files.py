"""Files that an earlier commit wrote load, and give what they gave (tests/data/README.md)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from same_timelines import same
from torch import Tensor, nn

import pipeexec as px
import pipesim as ps
from pipeexec.projection import Projection
from pipeexec.training import TrainingRun

ARCHIVE = Path(__file__).parents[1] / "data" / "kept_files.tar.gz"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the folder of the files."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def then(kept: Path) -> Any:
    """Return the values that the earlier commit computed."""
    return json.loads((kept / "expected.json").read_text())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=draws), torch.randn(8, 2, generator=draws)


def pipeline(seed: int = 1) -> px.Pipeline:
    """Return the pipeline that wrote the checkpoints; a checkpoint replaces its parameters."""
    torch.manual_seed(seed)
    return px.Pipeline(
        [nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)],
        ps.lower(ps.schedule("1f1b", 2, 4), grad_norm=True),
        ["cpu", "cpu"],
        lambda output, target: ((output - target) ** 2).mean(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_grad_norm=1.0,
    )


def test_costs_and_timelines(kept: Path, then: Any) -> None:
    """Table, Parquet and trace are the same step, which both engines predict again."""
    costs = ps.Costs.load(kept / "costs.json")
    timelines = [
        ps.Timeline.load(kept / f"timeline.{kind}", costs=costs) for kind in ("csv", "parquet")
    ]
    for timeline in (*timelines, ps.Timeline.from_chrome(kept / "trace.json.gz")):
        assert same(timeline, timelines[0])
        assert (timeline.makespan, len(timeline.graph)) == (then["makespan"], then["tasks"])
    for engine in ("simpy", "compiled"):
        again = ps.simulate(timelines[0].graph, costs, engine=engine)
        assert again.makespan == then["makespan"]
        assert list(again.memory.peak) == then["peak"]


def test_schedules(kept: Path, then: Any) -> None:
    """A schedule has its order, and torch's form of a graph is written as it was."""
    assert [str(a) for a in ps.Schedule.load(kept / "schedule.csv").orders[0]] == then["orders"]
    ps.lower(ps.schedule("zb_h1", 2, 4)).save_torch_csv(kept / "again.csv")
    assert (kept / "again.csv").read_text() == then["torch_csv"]


def test_checkpoint(kept: Path, then: Any) -> None:
    """The next step has the loss and the norm that it had."""
    with pipeline() as model:
        assert px.load_checkpoint(model, kept / "checkpoint")["note"] == 3
        result = model.step(*batch(1))
    assert float(result.loss) == pytest.approx(then["loss_after"], rel=1e-6)
    assert float(result.grad_norm) == pytest.approx(then["norm_after"], rel=1e-6)


def test_training(kept: Path, then: Any) -> None:
    """A training goes on from its checkpoint, with the losses of one that never stopped."""
    assert list(TrainingRun.load(kept / "training").losses) == then["losses"][:4]
    with pipeline() as model:
        run = px.train(
            model,
            [batch(i) for i in range(6)],
            n_steps=6,
            directory=kept / "training",
            progress=False,
        )
    assert list(run.losses) == pytest.approx(then["losses"], rel=1e-6)


def test_runs_and_projections(kept: Path, then: Any) -> None:
    """Tables of a run are as they were, and a projection predicts the same step."""
    table = px.load_run(kept / "run").table
    assert json.loads(table.to_json(orient="split")) == then["table"]
    assert ps.Costs.load(kept / "profile_costs.json").forward
    projection = Projection.load(kept / "projection")
    step = projection.predict("1f1b", n_devices=2, n_microbatches=4)
    assert step.makespan == then["projected"]
