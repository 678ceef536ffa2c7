"""The small simulator and executor of a page, against the packages, task by task."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import torch
from places import ROOT
from torch.nn.functional import mse_loss

import pipeexec as px
import pipesim as ps

PAGE = ROOT / "docs" / "explanation" / "the_idea_in_200_lines.md"
SCHEDULES = [("gpipe", "gpipe"), ("one_f_one_b", "1f1b")]


@pytest.fixture(scope="module")
def idea(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names that the page defines."""
    cells = re.findall(r"```{code-cell}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join(cells)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 200
    program = tmp_path_factory.mktemp("idea") / "idea.py"
    program.write_text(code)
    return runpy.run_path(str(program))


@pytest.mark.parametrize(("own", "name"), SCHEDULES)
@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(1, 1), (2, 3), (4, 2), (4, 9)])
def test_graph_and_times(
    idea: dict[str, Any], own: str, name: str, n_stages: int, n_microbatches: int
) -> None:
    """Equal orders, dependencies, and times to the last digit; stages take different times."""
    small = idea["lower"](idea[own], n_stages, n_microbatches)
    graph = ps.lower(ps.schedule(name, n_stages, n_microbatches), recompute="never")
    labels = [str(graph.task(k)) for k in range(len(graph))]
    is_receive = graph.is_op(frozenset({ps.Op.RECV_F, ps.Op.RECV_B}))
    assert {str(task): {str(x) for x in needed} for task, needed in small.needs.items()} == {
        label: {labels[j] for j in (*graph.dependencies[k], *graph.pair[k : k + is_receive[k]])}
        for k, label in enumerate(labels)
    }
    queues = {tuple(labels[k] for k in graph.queues[x]) for x in range(len(graph.streams))}
    assert {tuple(map(str, queue)) for queue in small.streams.values()} == queues

    seconds = {"F": [1 + s / 4 for s in range(n_stages)], "B": [2 + s / 2 for s in range(n_stages)]}
    costs = ps.Costs(seconds["F"], seconds["B"], network=ps.Network(latency=0.125))
    timeline = ps.simulate(graph, costs, engine="simpy")
    times = {str(task): span for task, span in idea["simulate"](small, seconds, 0.125).items()}
    assert times == {label: (timeline.start[k], timeline.end[k]) for k, label in enumerate(labels)}
    assert idea["makespan"](times) == timeline.makespan


@pytest.mark.parametrize(("own", "name"), SCHEDULES)
def test_step(idea: dict[str, Any], own: str, name: str) -> None:
    """Loss and parameters after a step are those of `pipeexec.Pipeline`; no task is early."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 5), torch.randn(12, 5)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append([torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in "12"])
    small = idea["lower"](idea[own], 2, 4)
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.5) for stage in models[0]]
    times, loss = idea["execute"](small, models[0], inputs, targets, mse_loss, optimizers)
    for task, needed in small.needs.items():
        assert all(times[before][1] <= times[task][0] for before in needed)

    graph = ps.lower(ps.schedule(name, 2, 4), recompute="never")
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    with px.Pipeline(models[1], graph, ["cpu"] * 2, mse_loss, optimizer) as pipeline:
        result = pipeline.step(inputs, targets)
    assert float(loss) == pytest.approx(float(result.loss), rel=1e-6)
    for stage, other in zip(*models, strict=True):
        for one, two in zip(stage.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        idea["execute"](small, models[0], inputs[:, :3], targets, mse_loss, optimizers)
