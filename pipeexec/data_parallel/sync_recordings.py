"""`sync_report`: find useless and missing all-reduces of gradients in a trace or a timeline.

In a trace, the name of a kernel may not tell its collective, and grouped calls share one kernel. So
a kernel is of the call that launched it. Where the trace does not tell the launch, kernels and
calls are counted off in order. Kernels that remain are named in a note.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeexec.data_parallel.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    Finding,
    History,
    HistoryEvent,
    MicroStep,
    SyncReport,
    TimeSpan,
    apply_rules,
    covered_seconds,
    uncovered,
)
from pipesim.errors import ArgumentTypeError, TimelineError, number
from pipesim.ops import COMPUTE, WEIGHT_GRADS, Op
from pipesim.timeline.timeline import Timeline
from pipesim.trace.chrome_json import complete_events, load, seconds
from pipesim.trace.profiler_ranges import ALL_REDUCE, collective, is_communication, is_launch
from pipesim.utils.files import check_path


def sync_report(source: str | Path | Timeline) -> SyncReport:
    """Return the report of `pipeexec.watch_sync` on a recorded trace or a timeline.

    In a trace:

    - A micro-step is the backward between two forwards of DDP.
    - ``no_sync()`` is not recorded: ``"forward_outside_no_sync"`` is reported as ``"added_to"``,
      and ``"forward_inside_no_sync"`` as ``"unsynchronized_step"``.
    - Bytes are recorded only with NCCL.
    - All-reduces outside DDP are not judged.

    In a timeline:

    - Each stage of each replica is a model, and a micro-step is a micro-batch.
    - Replicas with equal findings share one.
    - A graph without STEP counts as stepped at its end.
    - A stage without another replica, or sharded (``graph.sharded``), has nothing to synchronize; a
      note names it.

    Parameters
    ----------
    source
        A trace of one rank, as `torch.profiler.profile` exports it, of a loop over
        DistributedDataParallel; or a timeline, measured or simulated, of a graph with REDUCE_GRADs.

    Returns
    -------
    SyncReport
        Counts, findings and notes; ``print`` shows it as text.

    See Also
    --------
    pipeexec.watch_sync : Watch a loop while it runs.
    pipesim.lower : Its ``grad_sync`` chooses the micro-batches that reduce.

    Examples
    --------
    Four micro-batches reduce gradients each, where one reduction a step would do:

    >>> import pipesim as ps
    >>> from pipeexec.data_parallel import sync_report
    >>> graph = ps.lower(ps.schedule("1f1b", 2, 4), n_replicas=2, grad_sync="every")
    >>> report = sync_report(ps.simulate(graph, ps.Costs(forward=1e-3, backward=2e-3)))
    >>> report.n_calls, [(finding.kind, finding.n_calls) for finding in report.findings]
    (16, [('added_to', 3), ('added_to', 3)])
    """
    if isinstance(source, Timeline):
        return _timeline_report(source)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(
            f"source must be the path of a trace, or a pipesim.Timeline, got {source!r:.60}"
        )
    return _trace_report(check_path("source", source))


# Timelines


def _timeline_report(timeline: Timeline) -> SyncReport:
    """Return the report on a timeline; see `sync_report`."""
    graph = timeline.graph
    timeline.check_complete("sync_report needs")
    if not graph.is_op(WEIGHT_GRADS).any():
        raise TimelineError(f"timeline {timeline.name!r} has no backward; its graph is {graph!r}")
    has_steps = bool((graph.op == Op.STEP).any())
    compute_spans = [
        sorted(
            (float(timeline.start[task]), float(timeline.end[task]))
            for task in np.flatnonzero(graph.is_op(COMPUTE) & (graph.device == device))
        )
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

    ``compute_spans`` are the sorted spans of the compute tasks of each device.
    """
    graph = timeline.graph
    size = graph.n_microbatches // graph.n_batches
    ordered = tasks[np.lexsort((tasks, timeline.end[tasks]))].tolist()
    history: list[HistoryEvent] = []
    steps: dict[int, MicroStep] = {}
    last: dict[int, MicroStep] = {}  # of each mini-batch
    for task in ordered:
        op, microbatch = Op(graph.op[task]), int(graph.microbatch[task])
        if op in WEIGHT_GRADS:
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


# Traces of `torch.profiler`

_FORWARD, _ACCUMULATE, _CALL = (
    "DistributedDataParallel.forward",
    "torch::autograd::AccumulateGrad",
    "all-reduce",
)
#: The autograd node during which DDP's reducer issues its calls.
_NODE = f"autograd::engine::evaluate_function: {_ACCUMULATE}"
#: Ranges of backends of the CPU last as long as their work.
_WORKS = re.compile("(gloo|mpi|ucc):")
#: Bytes of an element, by the name of its type in traces.
_BYTES = {
    "ComplexDouble": 16, "ComplexFloat": 8, "Double": 8, "Long": 8, "Float": 4, "Int": 4,
    "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1,
    "Float8_e5m2": 1, "Float8_e4m3fnuz": 1, "Float8_e5m2fnuz": 1,
}  # fmt: skip


def _trace_report(path: Path) -> SyncReport:
    """Return the report on a trace file; see `sync_report`."""
    events = _TraceEvents(path)
    history: list[HistoryEvent] = []
    step: MicroStep | None = None
    computed = -math.inf  # end of the last gradient so far
    ends: dict[int, float] = {}  # end of the last gradient, by number of the micro-step
    calls: list[tuple[MicroStep, int]] = []
    outside: list[AllReduceCall] = []  # not within the accumulation of a gradient
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
            if last is not None and events.is_by_reducer(span):
                calls.append((last, index))
            else:
                outside.append(events.call(index, computed))
        else:
            step = None
            if kind != _FORWARD:
                history.append(STEP if kind == STEP else CLEAR)
    for step, index in calls:
        step.calls.append(events.call(index, ends.get(step.number, computed)))
    notes = ["a trace does not tell where no_sync() was", *events.notes]
    if outside:
        total = math.fsum(end - start for x in outside for start, end in x.parts or (x.span,))
        count = (
            "1 further all-reduce" if len(outside) == 1 else f"{len(outside)} further all-reduces"
        )
        notes.append(
            f"{count} of {total * 1e3:.3g} ms in all, such as of metrics, did not run while a "
            "gradient was accumulated, and are not judged"
        )
    report = apply_rules({"DistributedDataParallel": history}, notes)
    if any(finding.kind == "unsynchronized_step" for finding in report.findings):
        note = (
            "a trace does not tell unused parameters either: where the last micro-step is outside "
            "no_sync(), make DistributedDataParallel with find_unused_parameters=True"
        )
        report = replace(report, notes=(*report.notes, note))
    return report


class _TraceEvents:
    """Events of a trace that concern the synchronization of gradients; times in seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.spans: dict[str, list[TimeSpan]] = {
            name: [] for name in (_FORWARD, _ACCUMULATE, _NODE, STEP, CLEAR)
        }
        self._kernels: list[TimeSpan] = []  # without those of communication
        self._all_reduces: list[_HostCall] = []
        self._others: list[_HostCall] = []  # calls of other collectives
        self._records: list[tuple[_HostCall, float]] = []  # calls with their bytes
        self._works: list[TimeSpan] = []  # spans in which a CPU's backend worked
        self._launches: dict[object, _Launch] = {}  # by correlation
        self._operations: dict[object, _Launch] = {}  # by external id
        on_device: list[tuple[str, TimeSpan, Mapping[str, Any], bool]] = []
        for index, event in complete_events(path, load(path)):
            category = event.get("cat")
            if category in ("kernel", "gpu_user_annotation"):
                args = event.get("args")
                span = seconds(path, event, index)
                args = args if isinstance(args, dict) else {}
                on_device.append((str(event.get("name", "")), span, args, category != "kernel"))
            else:
                self._sort(index, event)
        if not self.spans[_FORWARD]:
            raise TimelineError(
                f"{path} has no range {_FORWARD!r}; give a trace of a loop over "
                "DistributedDataParallel, or watch the loop itself with px.watch_sync()"
            )
        self._calls = _outermost(self._all_reduces)
        communication = self._communication(on_device)
        for spans in (*self.spans.values(), self._kernels, self._works):
            spans.sort()
        self.spans[_CALL] = [call.span for call in self._calls]
        self._work = _work_of_calls(self._calls, self._others, communication)
        self._nbytes = self._bytes_of_calls()
        self.notes = self._work.notes
        n_untold = sum(not spans for spans in self._work.spans)
        if n_untold and len(self._works) != len(self._calls):
            subject = "all-reduces" if n_untold == len(self._calls) else f"{n_untold} all-reduces"
            self.notes.append(
                f"the trace does not tell when {subject} ended; their seconds are those of the "
                "calls that issue them"
            )

    def _sort(self, index: int, event: Mapping[str, Any]) -> None:
        """Add an event of the CPU to the lists that it belongs to."""
        name, args = str(event.get("name", "")), event.get("args")
        args = args if isinstance(args, dict) else {}
        kind: str | None = name if name in self.spans else None
        if name.startswith("Optimizer.step#"):
            kind = STEP
        elif name.startswith("Optimizer.zero_grad#"):
            kind = CLEAR
        communicates = is_communication(name, args, on_device=False)
        correlation = args.get("correlation") if is_launch(event.get("cat")) else None
        external = _external(args)
        if kind is None and not communicates and correlation is None and external is None:
            return
        span = seconds(self._path, event, index)
        thread = str(event.get("pid")), str(event.get("tid"))
        if kind is not None:
            self.spans[kind].append(span)
        if correlation is not None:
            self._launches[str(correlation)] = _Launch(span[0], thread)
        elif external is not None:
            self._operations[external] = _Launch(span[0], thread)
        if not communicates:
            return
        call_name = collective(name, args)
        if _WORKS.match(name):
            if call_name == ALL_REDUCE:
                self._works.append(span)
        elif call_name == ALL_REDUCE:
            self._all_reduces.append(_HostCall(span, thread))
            nbytes = _bytes(args)
            if nbytes is not None:
                self._records.append((self._all_reduces[-1], nbytes))
        elif call_name == "other":
            self._others.append(_HostCall(span, thread))

    def _communication(
        self, on_device: Iterable[tuple[str, TimeSpan, Mapping[str, Any], bool]]
    ) -> list[_DeviceWork]:
        """Return communication on devices; keep the spans of other kernels."""
        calls = _CallFinder([*self._calls, *_outermost(self._others)])
        items = []
        for name, span, args, is_copy in on_device:
            launch = self._launches.get(str(args.get("correlation")))
            if launch is None or is_copy:
                launch = self._operations.get(_external(args))
            if is_copy:
                if collective(name, args) == ALL_REDUCE and is_communication(
                    name, args, on_device=False
                ):
                    items.append(_DeviceWork(name, span, ALL_REDUCE, launch, True))
            elif is_communication(name, args, on_device=True) or (
                launch is not None and calls.index_of(launch) is not None
            ):
                nbytes = _bytes(args)
                items.append(
                    _DeviceWork(
                        name,
                        span,
                        collective(name, args),
                        launch,
                        nbytes=math.nan if nbytes is None else nbytes,
                    )
                )
            else:
                self._kernels.append(span)
        return items

    def _bytes_of_calls(self) -> list[float]:
        """Return the bytes of each call: as the CPU recorded them, or its kernels."""
        nbytes: list[list[float]] = [[] for _ in self._calls]
        owners = _CallFinder(self._calls)
        values = dict(self._records)
        for record in _outermost(values):
            index = owners.index_of(_Launch(record.span[0], record.thread))
            if index is not None:
                nbytes[index].append(values[record])
        return [
            math.fsum(own) if own else on_device
            for own, on_device in zip(nbytes, self._work.nbytes, strict=True)
        ]

    def in_order(self) -> Iterator[tuple[str, int, TimeSpan]]:
        """Yield the kind of each event, its index within the kind, and its span, in order of time.

        Gradients are ordered by their end, other events by their start.
        """
        rows = [
            (span[kind == _ACCUMULATE], kind, index, span)
            for kind in (_FORWARD, _ACCUMULATE, _CALL, STEP, CLEAR)
            for index, span in enumerate(self.spans[kind])
        ]
        for _, kind, index, span in sorted(rows):
            yield kind, index, span

    def is_by_reducer(self, call: TimeSpan) -> bool:
        """Return whether a call lies within a node that accumulates a gradient."""
        nodes = self.spans[_NODE]
        k = bisect_right(nodes, call[0], key=lambda span: span[0]) - 1
        return k >= 0 and call[0] <= nodes[k][1]

    def call(self, index: int, computed: float) -> AllReduceCall:
        """Return a call; on a CPU nothing is computed after the last gradient, at ``computed``."""
        nbytes, spans = self._nbytes[index], self._work.spans[index]
        if spans:
            whole = min(start for start, _ in spans), max(end for _, end in spans)
            exposed = [part for span in spans for part in uncovered(span, self._kernels)]
            return AllReduceCall(nbytes, whole, tuple(exposed), tuple(spans))
        issued = self.spans[_CALL][index]
        end = issued[1]
        if len(self._works) == len(self._calls):
            end = max(self._works[index][1], end)
        rest = max(issued[0], computed), end
        return AllReduceCall(nbytes, (issued[0], end), (rest,) if rest[0] < rest[1] else ())


def _external(args: Mapping[str, Any]) -> str | None:
    """Return the identity of the operation that an event belongs to, if any."""
    value = args.get("External id", args.get("external id"))
    return None if value in (None, 0, "0") else str(value)


def _bytes(args: Mapping[str, Any]) -> float | None:
    """Return the bytes of a collective, NaN for an unknown type, or None if nothing tells them."""
    n = number(args.get("In msg nelems"))
    return None if n is None else n * _BYTES.get(str(args.get("dtype")), math.nan)


# The work on devices of each all-reduce of a trace


class _HostCall(NamedTuple):
    """A call on the CPU: its span (s) and thread."""

    span: TimeSpan
    thread: object


class _Launch(NamedTuple):
    """When (s) and on which thread work was launched."""

    time: float
    thread: object


@dataclass(frozen=True, eq=False)
class _DeviceWork:
    """A kernel that communicates, or the copy of a range on a device."""

    name: str
    span: TimeSpan
    collective: str | None  # as `pipesim.trace.profiler_ranges.collective` returns it
    launch: _Launch | None  # None if the trace does not tell it
    is_copy: bool = False  # of a range; it lasts as long as the range's kernels
    nbytes: float = math.nan


@dataclass(eq=False)
class _CallWork:
    """Spans of work of each call, in order, and what is to be noted."""

    spans: list[list[TimeSpan]]
    nbytes: list[float]
    notes: list[str] = field(default_factory=list)


def _outermost(calls: Iterable[_HostCall]) -> list[_HostCall]:
    """Return the calls that do not start within another one of their thread, in order."""
    ends: dict[object, float] = {}
    kept = []
    for call in sorted(calls, key=lambda call: (call.span[0], -call.span[1])):
        if call.span[0] >= ends.get(call.thread, -math.inf):
            ends[call.thread] = call.span[1]
            kept.append(call)
    return kept


def _work_of_calls(
    calls: Sequence[_HostCall], others: Iterable[_HostCall], work: Iterable[_DeviceWork]
) -> _CallWork:
    """Return the work of each all-reduce.

    ``calls`` are the all-reduces, in order, of which none is within another, ``others`` the calls
    of other collectives, and ``work`` is all communication on devices.
    """
    result = _CallWork([[] for _ in calls], [math.nan] * len(calls))
    owners, strangers = _CallFinder(calls), _CallFinder(_outermost(others))
    kernels: list[_DeviceWork] = []  # of no known call
    copies: list[_DeviceWork] = []
    by_call: dict[int, list[_DeviceWork]] = defaultdict(list)
    for item in sorted(work, key=lambda item: item.span):
        owner = None if item.launch is None else owners.index_of(item.launch)
        if owner is not None:
            by_call[owner].append(item)
        elif item.collective != "other" and not (
            item.collective is None and item.launch and strangers.index_of(item.launch) is not None
        ):
            (copies if item.is_copy else kernels).append(item)
    for index, items in by_call.items():
        own = [x for x in items if not x.is_copy] or items
        result.spans[index] = [x.span for x in own]
        result.nbytes[index] = math.fsum(x.nbytes for x in own)
    rest = [k for k, spans in enumerate(result.spans) if not spans]
    if rest and kernels:
        kernels = _counted_off(result, calls, rest, kernels)
    elif rest and len(copies) == len(rest):
        for index, copy in zip(rest, copies, strict=True):
            result.spans[index] = [copy.span]
    if kernels:
        names = sorted({item.name for item in kernels})
        result.notes.append(
            f"{_kernels(len(kernels))} of communication, "
            f"{covered_seconds(x.span for x in kernels) * 1e3:.3g} ms in all, "
            "belong to no call that the trace shows, such as calls from before it began; "
            f"they are not counted: {', '.join(f'{x:.60}' for x in names[:3])}"
            + (", ..." if len(names) > 3 else "")
        )
    return result


def _counted_off(
    result: _CallWork, calls: Sequence[_HostCall], rest: Sequence[int], kernels: list[_DeviceWork]
) -> list[_DeviceWork]:
    """Give the calls ``rest`` kernels whose launch lies in no call, in order; return the others.

    Kernels of grouped calls are launched after the last of them. Calls that share a kernel share
    its span in proportion to their bytes.
    """
    named = [x for x in kernels if x.collective == ALL_REDUCE]
    chosen = named if len(named) == len(rest) else kernels
    first = calls[rest[0]].span[0]
    usable = [x for x in chosen if (x.launch.time if x.launch else x.span[0]) >= first]
    shared: dict[int, list[int]] = defaultdict(list)  # calls of each kernel
    if len(usable) != len(rest) and usable and all(x.launch for x in usable):
        usable.sort(key=lambda x: x.launch.time if x.launch else 0.0)
        times = [x.launch.time for x in usable if x.launch]
        for index in rest:
            k = bisect_right(times, calls[index].span[0])
            shared[min(k, len(usable) - 1)].append(index)
    elif usable:
        n = max(len(usable), len(rest))
        for k in range(n):
            shared[k * len(usable) // n].append(rest[k * len(rest) // n])
        if len(usable) != len(rest):
            result.notes.append(
                f"{_kernels(len(usable))} of communication are of {len(rest)} all-reduces, and the "
                "trace does not tell which of which: they are shared out in order"
            )
    for k, indices in shared.items():
        for index, span in zip(indices, _shares(usable[k].span, indices, result), strict=True):
            result.spans[index].append(span)
    used = {id(usable[k]) for k in shared}
    return [x for x in kernels if id(x) not in used]


def _shares(span: TimeSpan, indices: Sequence[int], result: _CallWork) -> Iterator[TimeSpan]:
    """Yield the part of a span that each of several calls has."""
    start, end = span
    total = math.fsum(result.nbytes[k] for k in indices)
    for index in indices:
        share = result.nbytes[index] / total if total > 0 else 1 / len(indices)
        yield start, start + share * (end - span[0])
        start += share * (end - span[0])


def _kernels(n: int) -> str:
    return f"{n} kernel{'' if n == 1 else 's'}"


class _CallFinder:
    """Find the call in which a launch lies."""

    def __init__(self, calls: Sequence[_HostCall]) -> None:
        rows: Mapping[object, list[tuple[float, float, int]]] = defaultdict(list)
        for index, (span, thread) in enumerate(calls):
            rows[thread].append((*span, index))
        self._rows = {thread: sorted(row) for thread, row in rows.items()}

    def index_of(self, launch: _Launch) -> int | None:
        """Return the index of the call, or None."""
        row = self._rows.get(launch.thread, [])
        k = bisect_right(row, launch.time, key=lambda item: item[0]) - 1
        return row[k][2] if k >= 0 and launch.time <= row[k][1] else None
