"""`sync_report`: all-reduces of gradients that are of no use, found in a trace or a timeline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeexec.data_parallel.sync_lint.rules import (
    CLEAR,
    STEP,
    Call,
    Finding,
    MicroStep,
    SyncReport,
    judge,
)
from pipesim.errors import ArgumentTypeError, TimelineError, number
from pipesim.ops import COMPUTE, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import load, seconds
from pipesim.utils.atomic_write import check_path

__all__ = ["sync_report"]

Span = tuple[float, float]
_FORWARD, _ACCUMULATE, _CALL = (
    "DistributedDataParallel.forward",
    "torch::autograd::AccumulateGrad",
    "c10d::allreduce_",
)
#: The node within whose evaluation DDP's reducer calls.
_NODE = f"autograd::engine::evaluate_function: {_ACCUMULATE}"
_COMMS = "record_param_comms"
#: Bytes of an element, as traces name its type.
_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8}


def sync_report(source: str | Path | Timeline) -> SyncReport:
    """Return the report of `pipeexec.watch_sync` on a recorded trace or a timeline.

    Parameters
    ----------
    source
        A trace of one rank, as `torch.profiler.profile` exports it, of a loop over
        DistributedDataParallel; or a timeline, measured or simulated, of a graph with REDUCE_GRADs.

    Returns
    -------
    SyncReport
        In a trace, a micro-step is the backward between two forwards of DDP. A trace does not
        record ``no_sync()``: ``"forward_outside_no_sync"`` is reported as ``"added_to"``, and
        ``"forward_inside_no_sync"`` as ``"unsynchronized_step"``. It records bytes with NCCL alone.
        All-reduces outside DDP are not judged. In a timeline, each stage of each replica is a
        model, and a micro-step is a micro-batch. Replicas with equal findings share one. A graph
        without STEP counts as stepped at its end. A stage without another replica, or sharded
        (``graph.sharded``), has nothing to synchronize; a note names it.

    Raises
    ------
    TimelineError
        For a file that cannot be read, is no trace, or has no forward of DDP; and for a timeline
        that is partial, or has no backward.
    ArgumentError
        For text that cannot be a path.
    ArgumentTypeError
        For a source that is neither a path nor a timeline.
    CapacityError
        For a file that is too large for memory.
    """
    if isinstance(source, Timeline):
        return _of_timeline(source)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(
            f"source must be the path of a trace, or a pipesim.Timeline, got {source!r:.60}"
        )
    return _of_trace(check_path("source", source))


# Of a trace


def _of_trace(path: Path) -> SyncReport:
    events = _Events(path)
    history: list[MicroStep | Literal["step", "clear"]] = []
    step: MicroStep | None = None
    computed = -math.inf  # end of the last gradient of each micro-step
    ends: dict[int, float] = {}
    calls: list[tuple[MicroStep, int]] = []
    n_steps = 0
    for kind, index, span in events.in_order():
        if kind == _ACCUMULATE:
            if step is None:
                step = MicroStep(n_steps)
                n_steps += 1
                history.append(step)
            ends[step.number] = computed = span[1]
        elif kind == _CALL:
            last = step or next((x for x in reversed(history) if isinstance(x, MicroStep)), None)
            if last is not None and events.is_reducers(span):
                calls.append((last, index))
        else:
            step = None
            if kind != _FORWARD:
                history.append(STEP if kind == STEP else CLEAR)
    for of, index in calls:
        of.calls.append(events.call(index, ends.get(of.number, computed)))
    notes = ["a trace does not tell where no_sync() was", *events.notes]
    return judge({"DistributedDataParallel": history}, notes)


class _Events:
    """Events of a trace that concern the synchronization of gradients; times in seconds."""

    def __init__(self, path: Path) -> None:
        self.found: dict[str, list[Span]] = {
            name: [] for name in (_FORWARD, _ACCUMULATE, _CALL, _NODE, STEP, CLEAR, "gloo", "nccl")
        }
        self._computes: list[Span] = []  # kernels that are no communication
        self._nbytes: list[float] = []
        for index, event in enumerate(load(path)["traceEvents"]):
            if isinstance(event, dict) and event.get("ph") == "X":
                self._sort(path, index, event)
        if not self.found[_FORWARD]:
            raise TimelineError(
                f"{path} has no range {_FORWARD!r}; give a trace of a loop over "
                "DistributedDataParallel, or watch the loop itself with px.watch_sync()"
            )
        for spans in (*self.found.values(), self._computes):
            spans.sort()
        self.found[_CALL] = list(_outermost(self.found[_CALL]))
        n_calls = len(self.found[_CALL])
        self._ran = next((x for x in ("nccl", "gloo") if len(self.found[x]) == n_calls), None)
        self.notes = []
        if self._ran is None:
            self.notes.append(
                "the trace does not tell when all-reduces ended; their seconds are those of the "
                "calls that issue them"
            )
        if len(self._nbytes) != n_calls:
            self._nbytes = [math.nan] * n_calls

    def _sort(self, path: Path, index: int, event: Mapping[str, Any]) -> None:
        name, category = str(event.get("name", "")), event.get("cat")
        kind: str | None = name if name in self.found else None
        if name.startswith("Optimizer.step#"):
            kind = STEP
        elif name.startswith("Optimizer.zero_grad#"):
            kind = CLEAR
        elif name == "gloo:all_reduce":
            kind = "gloo"
        elif name == _COMMS:
            self._count(event.get("args"))
        elif category == "kernel":
            kind = "nccl" if name.startswith("nccl") and "AllReduce" in name else None
            if not name.startswith("nccl"):
                self._computes.append(seconds(path, event, index))
        if kind is not None and category != "gpu_user_annotation":
            self.found[kind].append(seconds(path, event, index))

    def _count(self, args: object) -> None:
        """Note the bytes of a call, if the event records them."""
        if isinstance(args, dict) and "allreduce" in str(args.get("Collective name")).lower():
            n = number(args.get("In msg nelems"))
            self._nbytes.append(
                math.nan if n is None else n * _BYTES.get(str(args.get("dtype")), math.nan)
            )

    def in_order(self) -> Iterator[tuple[str, int, Span]]:
        """Yield kinds, places among their kind, and spans, in order of time.

        Steps and calls are ordered by their start, gradients by their end.
        """
        rows = [
            (span[kind == _ACCUMULATE], kind, index, span)
            for kind in (_FORWARD, _ACCUMULATE, _CALL, STEP, CLEAR)
            for index, span in enumerate(self.found[kind])
        ]
        for _, kind, index, span in sorted(rows):
            yield kind, index, span

    def is_reducers(self, call: Span) -> bool:
        """Whether a call lies within the evaluation of a node that accumulates a gradient."""
        nodes = self.found[_NODE]
        k = bisect_right(nodes, call[0], key=lambda span: span[0]) - 1
        return k >= 0 and call[0] <= nodes[k][1]

    def call(self, index: int, computed: float) -> Call:
        """Return a call; on a CPU nothing is computed after ``computed``, the last gradient."""
        issued = self.found[_CALL][index]
        if self._ran == "nccl":
            span = self.found["nccl"][index]
            return Call(self._nbytes[index], span, tuple(_without(span, self._computes)))
        end = issued[1] if self._ran is None else max(self.found["gloo"][index][1], issued[1])
        exposed = max(issued[0], computed), end
        return Call(
            self._nbytes[index], (issued[0], end), (exposed,) if exposed[0] < exposed[1] else ()
        )


def _outermost(calls: Iterable[Span]) -> Iterator[Span]:
    """Yield the calls that are not within another, such as the dispatcher's, in order."""
    end = -math.inf
    for call in calls:
        if call[1] > end:
            yield call
            end = call[1]


# Of a timeline


def _of_timeline(timeline: Timeline) -> SyncReport:
    graph = timeline.graph
    timeline.check_complete("sync_report needs")
    if not graph.is_op(frozenset((Op.B, Op.W))).any():
        raise TimelineError(f"timeline {timeline.name!r} has no backward; its graph is {graph!r}")
    has_steps = bool((graph.op == Op.STEP).any())
    computes = [
        sorted(_spans(timeline, np.flatnonzero(graph.is_op(COMPUTE) & (graph.device == device))))
        for device in range(graph.n_devices)
    ]
    histories = {}
    stages: dict[str, int] = {}
    for stage, replica in np.unique(np.stack([graph.stage, graph.replica], 1), axis=0).tolist():
        tasks = np.flatnonzero((graph.replica == replica) & (graph.stage == stage))
        name = f"stage {stage} of replica {replica}"
        histories[name], stages[name] = _history(timeline, tasks, computes), stage
    notes = [] if has_steps else ["the graph has no STEP: the optimizer steps at its end"]
    if graph.n_replicas == 1:
        notes.append("the graph has one replica: nothing to synchronize")
    notes += [
        f"stage {stage} is sharded: each row has one owner, and ALL_TO_ALL exchanges its gradients"
        for stage in graph.sharded
        if graph.n_replicas > 1
    ]
    n_replicas = Counter(stages.values())
    alone = [name for name, x in stages.items() if n_replicas[x] == 1 or x in graph.sharded]
    report = judge(histories, notes, without_replicas=alone)
    return replace(report, findings=tuple(_joined(report.findings, stages)))


def _joined(findings: Iterable[Finding], stages: Mapping[str, int]) -> Iterator[Finding]:
    """Yield the findings on stages, one for all replicas of a stage for which they are equal."""
    models: dict[tuple[int, Finding], list[str]] = {}
    for finding in findings:
        key = stages[finding.model], replace(finding, model="", is_of_graph=True)
        models.setdefault(key, []).append(finding.model)
    for (stage, finding), names in models.items():
        several = f"stage {stage} of {len(names)} replicas"
        yield replace(finding, model=names[0] if len(names) == 1 else several)


def _history(
    timeline: Timeline, tasks: Any, computes: Sequence[Sequence[Span]]
) -> list[MicroStep | Literal["step", "clear"]]:
    """Return what happened to the gradients of one stage, in order of the ends of its tasks."""
    graph = timeline.graph
    size = graph.n_microbatches // graph.n_batches
    ordered = tasks[np.lexsort((tasks, timeline.end[tasks]))].tolist()
    history: list[MicroStep | Literal["step", "clear"]] = []
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
    each = len({int(graph.microbatch[task]) for task in sums}) > graph.n_batches
    for task in sums:  # a bucket may end before the last backward
        microbatch = int(graph.microbatch[task]) % graph.n_microbatches  # -1: of the last
        span = float(timeline.start[task]), float(timeline.end[task])
        exposed = tuple(_without(span, computes[graph.device[task]]))
        call = Call(float(timeline.nbytes[task]), span, exposed)
        (steps[microbatch] if each else last[microbatch // size]).calls.append(call)
    if STEP not in history:
        history.append(STEP)
    return history


def _spans(timeline: Timeline, tasks: Iterable[int]) -> Iterator[Span]:
    for task in tasks:
        yield float(timeline.start[task]), float(timeline.end[task])


def _without(span: Span, others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a span that no other covers; the others are sorted."""
    begin, end = span
    for start, stop in others:
        if stop <= begin:
            continue
        if start >= end:
            break
        if start > begin:
            yield begin, start
        begin = stop
        if begin >= end:
            return
    if begin < end:
        yield begin, end
