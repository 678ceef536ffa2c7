"""Report on the REDUCE_GRADs of a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeexec.data_parallel.sync_lint.findings import Finding, SyncReport
from pipeexec.data_parallel.sync_lint.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    History,
    HistoryEvent,
    MicroStep,
    apply_rules,
)
from pipeexec.data_parallel.sync_lint.time_spans import TimeSpan, uncovered
from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE, Op
from pipesim.timeline.timeline import Timeline


def timeline_report(timeline: Timeline) -> SyncReport:
    """Return the report on a timeline; see `sync_report`.

    Each stage of each replica is a model, and each micro-batch a micro-step.

    Raises
    ------
    TimelineError
        If the timeline is partial, or has no backward.
    """
    graph = timeline.graph
    timeline.check_complete("sync_report needs")
    if not graph.is_op(frozenset((Op.B, Op.W))).any():
        raise TimelineError(f"timeline {timeline.name!r} has no backward; its graph is {graph!r}")
    has_steps = bool((graph.op == Op.STEP).any())
    compute_spans = [
        sorted(_spans(timeline, np.flatnonzero(graph.is_op(COMPUTE) & (graph.device == device))))
        for device in range(graph.n_devices)
    ]
    histories: dict[str, History] = {}
    stages: dict[str, int] = {}
    for stage, replica in np.unique(np.stack([graph.stage, graph.replica], 1), axis=0).tolist():
        tasks = np.flatnonzero((graph.replica == replica) & (graph.stage == stage))
        name = f"stage {stage} of replica {replica}"
        histories[name], stages[name] = _history(timeline, tasks, compute_spans), stage
    notes = [] if has_steps else ["the graph has no STEP: the optimizer steps at its end"]
    if graph.n_replicas == 1:
        notes.append("the graph has one replica: nothing to synchronize")
    notes += [
        f"stage {stage} is sharded: each row has one owner, and ALL_TO_ALL exchanges its gradients"
        for stage in graph.sharded
        if graph.n_replicas > 1
    ]
    n_replicas = Counter(stages.values())
    unreplicated = [name for name, x in stages.items() if n_replicas[x] == 1 or x in graph.sharded]
    report = apply_rules(histories, notes, without_replicas=unreplicated)
    return replace(report, findings=tuple(_merge_replicas(report.findings, stages)))


def _merge_replicas(findings: Iterable[Finding], stages: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the findings on stages; replicas of a stage with equal findings share one."""
    models: dict[tuple[int, Finding], list[str]] = {}
    for finding in findings:
        key = stages[finding.model], replace(finding, model="", is_of_graph=True)
        models.setdefault(key, []).append(finding.model)
    for (stage, finding), names in models.items():
        several = f"stage {stage} of {len(names)} replicas"
        yield replace(finding, model=names[0] if len(names) == 1 else several)


def _history(
    timeline: Timeline, tasks: NDArray[np.int64], compute_spans: Sequence[Sequence[TimeSpan]]
) -> History:
    """Return the history of the gradients of one stage, in order of the ends of its tasks.

    Parameters
    ----------
    timeline
        All tasks.
    tasks
        Ids of the stage's tasks.
    compute_spans
        Sorted spans of the compute tasks of each device.
    """
    graph = timeline.graph
    size = graph.n_microbatches // graph.n_batches
    ordered = tasks[np.lexsort((tasks, timeline.end[tasks]))].tolist()
    history: list[HistoryEvent] = []
    steps: dict[int, MicroStep] = {}
    last: dict[int, MicroStep] = {}  # of each mini-batch
    for task in ordered:
        op, microbatch = Op(graph.op[task]), int(graph.microbatch[task])
        if op in (Op.B, Op.W):
            steps[microbatch] = last[microbatch // size] = MicroStep(microbatch)
            history.append(steps[microbatch])
        elif op == Op.STEP:
            history += [STEP, CLEAR]
    sums = [task for task in ordered if graph.op[task] == Op.REDUCE_GRAD]
    every_microbatch = len({int(graph.microbatch[task]) for task in sums}) > graph.n_batches
    for task in sums:  # a bucket may end before the last backward
        microbatch = int(graph.microbatch[task]) % graph.n_microbatches  # -1: of the last
        span = float(timeline.start[task]), float(timeline.end[task])
        exposed = tuple(uncovered(span, compute_spans[graph.device[task]]))
        call = AllReduceCall(float(timeline.nbytes[task]), span, exposed)
        step = steps[microbatch] if every_microbatch else last[microbatch // size]
        step.calls.append(call)
    if STEP not in history:
        history.append(STEP)
    return history


def _spans(timeline: Timeline, tasks: Iterable[int]) -> Iterator[TimeSpan]:
    for task in tasks:
        yield float(timeline.start[task]), float(timeline.end[task])
