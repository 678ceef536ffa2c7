"""The core of the executor names no feature; it calls the hooks of parts, in a fixed order."""

from __future__ import annotations

import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from small_pipelines import mse, sgd
from torch import nn

import pipeexec as px
import pipesim as ps
from pipeexec.distributed import Processes
from pipeexec.executor import pipeline as pipeline_file
from pipeexec.executor.placed_model import PlacedModel
from pipeexec.executor.step_part import StepPart
from pipesim.errors import StageError

FOLDER = Path(pipeline_file.__file__).parent

#: Files that run tasks, whatever features these belong to.
CORE = [
    "gradient_sync", "host_threads", "op_handlers", "placed_model", "plan",
    "planned_task", "remote_messages", "step", "step_gradients", "step_inputs", "step_part",
    "step_reports", "step_runner",
]  # fmt: skip
WORDS = [
    "grad_norm", "clip", "scaler", "scaling", "tied", "accumul", "shard", "embedding", "expert",
    "offload", "captur", "cuda_graph",
]  # fmt: skip
#: Names of torch.
OTHERS = {"register_post_accumulate_grad_hook"}

HOOKS = [name for name in vars(StepPart) if not name.startswith("_")]


@pytest.mark.parametrize("name", CORE)
def test_the_core_names_no_feature(name: str) -> None:
    """Names in code; messages may advise to leave a feature out."""
    with (FOLDER / f"{name}.py").open("rb") as file:
        names = {x.string for x in tokenize.tokenize(file.readline) if x.type == tokenize.NAME}
    features = [x for x in names - OTHERS if any(word in x.lower() for word in WORDS)]
    assert features == []


def _recording(hook: str, default: Callable[..., Any]) -> Callable[..., Any]:
    def call(part: Recorder, *args: Any, **options: Any) -> Any:
        part.calls.append(f"{part.name}.{hook}")
        return default(part, *args, **options)

    return call


class Recorder(StepPart):
    """A part that does nothing, and records the calls of its hooks."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook, getattr(StepPart, _hook)))


class Linear(nn.Linear):
    """A layer that fails when it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.fails
        return super().forward(x)


def recorded(
    monkeypatch: pytest.MonkeyPatch, n_stages: int, **options: Any
) -> tuple[px.Pipeline, list[str]]:
    """Return a pipeline with two more parts, and the list of their calls."""
    calls: list[str] = []

    def placed(*args: Any, parts: tuple[StepPart, ...], **others: Any) -> PlacedModel:
        parts = (*parts, Recorder("a", calls), Recorder("b", calls))
        return PlacedModel(*args, parts=parts, **others)

    monkeypatch.setattr(pipeline_file, "PlacedModel", placed)
    torch.manual_seed(0)
    stages = [Linear(2, 2) for _ in range(n_stages)]
    graph = ps.lower(ps.schedule("1f1b", n_stages, 2), hosts="one")
    devices = ["cpu"] * (1 if options else n_stages)
    return px.Pipeline(stages, graph, devices, mse, sgd, **options), calls


def both(*hooks: str) -> list[str]:
    return [f"{name}.{hook}" for hook in hooks for name in "ab"]


def emptied(calls: list[str], *left_out: str) -> list[str]:
    """Empty a list of calls; return them without some hooks."""
    own = [call for call in calls if call.partition(".")[2] not in left_out]
    calls.clear()
    return own


def test_hooks_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hook is called once, but `stage_handler` for each task."""
    pipeline, calls = recorded(monkeypatch, 2)
    n_tasks = len(pipeline.graph)
    planned = "make_stages", "handlers"
    assert calls.count("a.stage_handler") == n_tasks
    placement = both("check", "place", *planned, "prepare")
    assert emptied(calls, "stage_handler") == placement
    other = pipeline.with_graph(ps.lower(ps.schedule("gpipe", 2, 2)))
    assert emptied(calls, "stage_handler") == both("check", *planned, "prepare")
    with other.preserved():
        assert emptied(calls) == both("preserved")
    other.close()
    assert emptied(calls) == both("close")


def test_hooks_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 2)
    pipeline, calls = recorded(monkeypatch, 2)
    emptied(calls)
    backwards = ["b.after", "a.after"]
    trained = [*both("sync", "before"), *both("before_optimizer") * 2, *backwards, *both("result")]
    with pipeline:
        pipeline.step(x, x)
        assert emptied(calls) == trained
        pipeline.stages[1].module.fails = True  # type: ignore[assignment]
        with pytest.raises(StageError):
            pipeline.step(x, x)
        assert emptied(calls) == [*both("sync", "before"), "b.restore", "a.restore"]
        pipeline.stages[1].module.fails = False  # type: ignore[assignment]
        pipeline.evaluate(x, x)
        forward = emptied(calls, "stage_handler")
        assert forward == both("make_stages", "handlers", "prepare", "sync")
        pipeline.evaluate(x, x)
        assert emptied(calls) == both("sync")
        pipeline.step(x, x)
        assert emptied(calls) == trained


def _calls_in_a_rank(processes: Processes) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        pipeline, calls = recorded(patch, 2, processes=processes)
        with pipeline:
            return emptied(calls, "stage_handler")


def test_processes_agree_before_parts_are_placed(two_ranks: Ranks) -> None:
    placement = both("check", "agree", "place", "make_stages", "handlers", "prepare")
    assert two_ranks.run(_calls_in_a_rank) == [placement, placement]


def test_optimizers_wait_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage steps if one part says so; the others change its gradients all the same."""
    pipeline, calls = recorded(monkeypatch, 1)
    part = next(part for part in pipeline._model.parts if isinstance(part, Recorder))
    monkeypatch.setattr(part, "before_optimizer", lambda *_: False)
    with pipeline:
        before = [p.clone() for p in pipeline.modules[0].parameters()]
        emptied(calls)
        pipeline.step(torch.ones(2, 2), torch.zeros(2, 2))
        assert "b.before_optimizer" in calls
        after = list(pipeline.modules[0].parameters())
    assert all(map(partial(torch.equal), before, after))
