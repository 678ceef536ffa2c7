"""The race detector agrees with `pipesim.audit` about which waits are needed."""

from __future__ import annotations

from typing import Any

import pytest
from case_choice import EVERY_CASE
from sanitizing import pipeline_on_slices, sanitized
from small_pipelines import data

import pipesim as ps
from pipeexec.executor import step_runner
from pipesim.analysis.audit_graphs import WaitKind, kinds_of_waits, without


def races(graph: ps.TaskGraph, kind: WaitKind) -> list[str]:
    """Run a step on the stand-in for CUDA without a kind of wait; return its races."""
    with pytest.MonkeyPatch.context() as patch, sanitized(patch) as watch:
        if kind.sort == "queue":
            subject = pipeline_on_slices(without(graph, kind))
        else:
            removed = set(zip(*(column.tolist() for column in kind.edges), strict=True))
            inner = step_runner.plan

            def plan(*args: Any, **options: Any) -> list[Any]:
                return [
                    task._replace(
                        waits=tuple(t for t in task.waits if (t, task.id) not in removed),
                        sync=task.sync
                        and task.sync._replace(
                            milestones=tuple(
                                x for x in task.sync.milestones if (x[0], task.id) not in removed
                            )
                        ),
                    )
                    for task in inner(*args, **options)
                ]

            patch.setattr(step_runner, "plan", plan)
            subject = pipeline_on_slices(graph)
        batch = data(16)
        for stream in list(watch.cuda.streams):
            watch.synchronized(stream)
        subject.step(*batch)
        # What the caller's stream did before the step, compute streams alone wait for.
        return [race for race in watch.races if " on 0," not in race]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpipe", {"recompute": "always"}),
        ("zb_h1", {"streams": "per_microbatch"}),
        ("1f1b", {"n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 2}),
        ("gpipe", {"n_replicas": 2, "grad_sync": "every"}),
    ][slice(None) if EVERY_CASE else slice(1, 3)],
    ids=str,
)
def test_the_race_detector_agrees(name: str, options: dict[str, Any]) -> None:
    """Of each kind of wait, whether a step of the executor without it has a race."""
    n = 1 if "n_replicas" in options else 2
    graph = ps.lower(ps.schedule(name, n, 2), **options)
    table = ps.audit(graph, ps.Costs(1, 2, input_grad=1, weight_grad=1))
    kinds = [kind for kind in kinds_of_waits(graph) if kind.sort in ("data", "message", "queue")]
    needed = {kind.name: bool(table.loc[kind.name, "needed"]) for kind in kinds}
    assert {kind.name: bool(races(graph, kind)) for kind in kinds} == needed
    assert len(set(needed.values())) == 2
