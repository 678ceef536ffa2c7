"""Report on the all-reduces in a trace of `torch.profiler`."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeexec.data_parallel.sync_lint.findings import SyncReport
from pipeexec.data_parallel.sync_lint.sync_rules import (
    CLEAR,
    STEP,
    AllReduceCall,
    HistoryEvent,
    MicroStep,
    apply_rules,
)
from pipeexec.data_parallel.sync_lint.time_spans import TimeSpan, uncovered
from pipeexec.data_parallel.sync_lint.trace_calls import (
    CallFinder,
    DeviceWork,
    HostCall,
    Launch,
    outermost,
    work_of_calls,
)
from pipesim.errors import TimelineError, number
from pipesim.trace.chrome_json import complete_events, load, seconds
from pipesim.trace.communication import ALL_REDUCE, collective, is_communication, is_launch

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


def trace_report(path: Path) -> SyncReport:
    """Return the report on a trace file; see `sync_report`.

    Raises
    ------
    TimelineError
        If the file cannot be read, is no trace, or has no forward of DDP.
    CapacityError
        If the file is too large for memory.
    """
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
        self._all_reduces: list[HostCall] = []
        self._others: list[HostCall] = []  # calls of other collectives
        self._records: list[tuple[HostCall, float]] = []  # calls with their bytes
        self._works: list[TimeSpan] = []  # spans in which a CPU's backend worked
        self._launches: dict[object, Launch] = {}  # by correlation
        self._operations: dict[object, Launch] = {}  # by external id
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
        self._calls = outermost(self._all_reduces)
        communication = self._communication(on_device)
        for spans in (*self.spans.values(), self._kernels, self._works):
            spans.sort()
        self.spans[_CALL] = [call.span for call in self._calls]
        self._work = work_of_calls(self._calls, self._others, communication)
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
            self._launches[str(correlation)] = Launch(span[0], thread)
        elif external is not None:
            self._operations[external] = Launch(span[0], thread)
        if not communicates:
            return
        call_name = collective(name, args)
        if _WORKS.match(name):
            if call_name == ALL_REDUCE:
                self._works.append(span)
        elif call_name == ALL_REDUCE:
            self._all_reduces.append(HostCall(span, thread))
            nbytes = _bytes(args)
            if nbytes is not None:
                self._records.append((self._all_reduces[-1], nbytes))
        elif call_name == "other":
            self._others.append(HostCall(span, thread))

    def _communication(
        self, on_device: Iterable[tuple[str, TimeSpan, Mapping[str, Any], bool]]
    ) -> list[DeviceWork]:
        """Return communication on devices; keep the spans of other kernels."""
        calls = CallFinder([*self._calls, *outermost(self._others)])
        items = []
        for name, span, args, is_copy in on_device:
            launch = self._launches.get(str(args.get("correlation")))
            if launch is None or is_copy:
                launch = self._operations.get(_external(args))
            if is_copy:
                if collective(name, args) == ALL_REDUCE and is_communication(
                    name, args, on_device=False
                ):
                    items.append(DeviceWork(name, span, ALL_REDUCE, launch, True))
            elif is_communication(name, args, on_device=True) or (
                launch is not None and calls.index_of(launch) is not None
            ):
                nbytes = _bytes(args)
                items.append(
                    DeviceWork(
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
        owners = CallFinder(self._calls)
        values = dict(self._records)
        for record in outermost(values):
            index = owners.index_of(Launch(record.span[0], record.thread))
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
