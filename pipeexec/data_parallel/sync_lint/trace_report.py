"""Report on the all-reduces in a trace of `torch.profiler`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
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
from pipesim.errors import TimelineError, number
from pipesim.trace.chrome_json import load, seconds

__all__ = ["trace_report"]

_FORWARD, _ACCUMULATE, _CALL = (
    "DistributedDataParallel.forward",
    "torch::autograd::AccumulateGrad",
    "c10d::allreduce_",
)
#: The autograd node during which DDP's reducer issues its calls.
_NODE = f"autograd::engine::evaluate_function: {_ACCUMULATE}"
_COMMS = "record_param_comms"
#: Bytes of an element, by the name of its type in traces.
_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8}


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
            step = None
            if kind != _FORWARD:
                history.append(STEP if kind == STEP else CLEAR)
    for step, index in calls:
        step.calls.append(events.call(index, ends.get(step.number, computed)))
    notes = ["a trace does not tell where no_sync() was", *events.notes]
    return apply_rules({"DistributedDataParallel": history}, notes)


class _TraceEvents:
    """Events of a trace that concern the synchronization of gradients; times in seconds."""

    def __init__(self, path: Path) -> None:
        self.spans: dict[str, list[TimeSpan]] = {
            name: [] for name in (_FORWARD, _ACCUMULATE, _CALL, _NODE, STEP, CLEAR, "gloo", "nccl")
        }
        self._kernels: list[TimeSpan] = []  # without those of communication
        self._nbytes: list[float] = []
        for index, event in enumerate(load(path)["traceEvents"]):
            if isinstance(event, dict) and event.get("ph") == "X":
                self._sort(path, index, event)
        if not self.spans[_FORWARD]:
            raise TimelineError(
                f"{path} has no range {_FORWARD!r}; give a trace of a loop over "
                "DistributedDataParallel, or watch the loop itself with px.watch_sync()"
            )
        for spans in (*self.spans.values(), self._kernels):
            spans.sort()
        self.spans[_CALL] = list(_outermost(self.spans[_CALL]))
        n_calls = len(self.spans[_CALL])
        self._backend = next((x for x in ("nccl", "gloo") if len(self.spans[x]) == n_calls), None)
        self.notes = []
        if self._backend is None:
            self.notes.append(
                "the trace does not tell when all-reduces ended; their seconds are those of the "
                "calls that issue them"
            )
        if len(self._nbytes) != n_calls:
            self._nbytes = [math.nan] * n_calls

    def _sort(self, path: Path, index: int, event: Mapping[str, Any]) -> None:
        name, category = str(event.get("name", "")), event.get("cat")
        kind: str | None = name if name in self.spans else None
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
                self._kernels.append(seconds(path, event, index))
        if kind is not None and category != "gpu_user_annotation":
            self.spans[kind].append(seconds(path, event, index))

    def _count(self, args: object) -> None:
        """Add the bytes of a call, if the event records them."""
        if isinstance(args, dict) and "allreduce" in str(args.get("Collective name")).lower():
            n = number(args.get("In msg nelems"))
            self._nbytes.append(
                math.nan if n is None else n * _BYTES.get(str(args.get("dtype")), math.nan)
            )

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
        issued = self.spans[_CALL][index]
        if self._backend == "nccl":
            span = self.spans["nccl"][index]
            return AllReduceCall(self._nbytes[index], span, tuple(uncovered(span, self._kernels)))
        end = issued[1] if self._backend is None else max(self.spans["gloo"][index][1], issued[1])
        exposed = max(issued[0], computed), end
        return AllReduceCall(
            self._nbytes[index], (issued[0], end), (exposed,) if exposed[0] < exposed[1] else ()
        )


def _outermost(calls: Iterable[TimeSpan]) -> Iterator[TimeSpan]:
    """Yield the calls that are not within another one, such as the dispatcher's, in order."""
    end = -math.inf
    for call in calls:
        if call[1] > end:
            yield call
            end = call[1]
