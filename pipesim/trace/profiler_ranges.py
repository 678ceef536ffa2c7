"""Read one rank's trace as torch.profiler writes it: ranges, operations, launches and kernels.

A range such as ``PP:1F3`` covers a call on the CPU. Its work may lie elsewhere, see
`pipesim.trace.working_times`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import TimelineError
from pipesim.ops import Action, Overlapped
from pipesim.trace.chrome_json import complete_events, read_header, row_labels, seconds
from pipesim.trace.range_names import RangeReader

# Spans of time, and arrays of many of them


class Span(NamedTuple):
    """Start and end (s). ``on_device``: whether a GPU recorded them."""

    start: float
    end: float
    on_device: bool = False


def span_rows(spans: Iterable[Span]) -> NDArray[np.float64]:
    """Return starts and ends in order, shape ``(n_spans, 2)``."""
    return np.array(sorted(span[:2] for span in spans), dtype=np.float64).reshape(-1, 2)


def starting_within(rows: NDArray[np.float64], span: Span) -> NDArray[np.float64]:
    """Return the rows whose first column is within a span; ``rows`` are sorted by that column."""
    first, last = np.searchsorted(rows[:, 0], [span.start, span.end])
    return rows[first:last]


# Communication, whatever the library that carried it out
#
# Kernels of NCCL and RCCL tell their collective by name, or not: ``ncclDevKernel_Generic`` runs
# several, and grouped calls have one kernel. Then the event's ``args``, or the call that launched
# the kernel, tell it.

ALL_REDUCE = "all_reduce"
#: Ranges and operations of torch.distributed and its backends, by the start of their names.
_CALLS = re.compile(
    r"c10d::|_?c10d_functional::|symm_mem::|record_param_comms|[a-z]*ccl:|(gloo|mpi|ucc):|nccl"
)
#: Libraries of collectives, and collectives of other libraries, anywhere in a kernel's name.
_LIBRARIES = re.compile(
    r"[nrx]ccl|mscclpp|msccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|cross_device_reduce",
    re.IGNORECASE,
)
_ALL_REDUCE = re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)
_OTHER = re.compile(
    r"broadcast|reduce_?scatter|all_?gather|all_?to_?all|send|recv|(?<![a-z])_?reduce(?![a-z])"
    r"|scatter|gather|barrier|wait",
    re.IGNORECASE,
)
#: Categories of calls that launch work: cuda_runtime, cuda_driver, hip_runtime, xpu_runtime, ...
_LAUNCHES = re.compile(r"([a-z0-9]+_)?(runtime|driver)")
_NAME = "Collective name"


def is_communication(name: str, args: object, *, on_device: bool) -> bool:
    """Return whether an event communicates, as its name or its ``args`` tell."""
    if isinstance(args, dict) and args.get(_NAME):
        return True
    return bool(_LIBRARIES.search(name) if on_device else _CALLS.match(name))


def collective(name: str, args: Mapping[str, Any]) -> str | None:
    """Return `ALL_REDUCE`, ``"other"`` for another collective, or None if nothing tells it."""
    for text in (str(args.get(_NAME) or ""), name):
        if _ALL_REDUCE.search(text):
            return ALL_REDUCE
        if _OTHER.search(text):
            return "other"
    return None


def is_launch(category: object) -> bool:
    """Return whether events of a category are calls of a driver, which launch kernels."""
    return isinstance(category, str) and _LAUNCHES.fullmatch(category) is not None


# A rank's trace

#: Categories of events that run on a GPU.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: Categories of events on a device's rows that do no work of their own, such as ``cuda_sync``.
_NO_WORK = re.compile(r"sync|event$|annotation|overhead|profiler|counter")
#: Copies of the CPU's ranges. They cover only kernels that the range's own thread launched.
_COPIES = "gpu_user_annotation"
#: Names of other ranges that are kept for messages.
_N_NAMES = 100

#: Spans of kernels, each with whether it communicates.
Kernels = list[tuple[Span, bool]]


class Range(NamedTuple):
    """A call on the CPU that carried out an action; seconds.

    ``overlapped`` is the pair of actions that the call is part of, if any. Then ``action`` is one
    half of it. With ``whole`` the call covers both halves, and ``action`` is the F.
    """

    action: Action
    start: float
    end: float
    thread: tuple[str, str]
    overlapped: Overlapped | None = None
    whole: bool = False


@dataclass(eq=False)
class Trace:
    """The events of one rank's trace that matter to a pipeline.

    - ``rank``, ``world_size``: rank and number of ranks in the file's header, or None.
    - ``origin``: time of the trace's clock that all its times count from (ns).
    - ``ranges``: in order of start. ``names``: some names of other ranges, for messages.
    - ``autograd_operations``: those of the ``operations`` on the CPU that autograd's engine runs.
    - ``communication``: calls that communicate.
    - ``kernels``: of each launch, by correlation.
    - ``launches``: time (s), thread and correlation of each.
    """

    path: Path
    rank: int | None
    world_size: int | None
    origin: int
    ranges: list[Range] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    operations: list[Span] = field(default_factory=list)
    autograd_operations: list[Span] = field(default_factory=list)
    communication: list[Span] = field(default_factory=list)
    communication_by_thread: dict[object, list[Span]] = field(
        default_factory=lambda: defaultdict(list)
    )
    kernels: dict[object, Kernels] = field(default_factory=lambda: defaultdict(list))
    launches: list[tuple[float, object, object]] = field(default_factory=list)

    def backward_start(self, whole: Range) -> tuple[float, float] | None:
        """Return when a call of a forward and a backward ends the one and starts the other (s).

        The backward starts with the first operation of autograd. The forward ends with the last
        operation before that. None if the call shows no operations of both.
        """
        operations, autograd_operations = self._operation_rows
        starts = starting_within(autograd_operations, Span(whole.start, whole.end))[:1, 0]
        if not len(starts):
            return None
        start = float(starts[0])
        ends = starting_within(operations, Span(whole.start, start))[:, 1]
        ends = ends[ends <= start]
        return (float(ends.max()), start) if len(ends) else None

    @cached_property
    def _operation_rows(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return span_rows(self.operations), span_rows(self.autograd_operations)


def read_trace(
    path: Path, content: Mapping[str, Any], reader: RangeReader, rank: str | None = None
) -> Trace:
    """Return the trace in a file; with ``rank``, the events of that rank and of all GPUs.

    ``content`` is as `pipesim.trace.chrome_json.load` returns it.
    """
    trace = Trace(path, *read_header(path, content))
    labels = row_labels(content)
    for index, event in complete_events(path, content):
        name, category, args = str(event.get("name", "")), event.get("cat"), event.get("args")
        correlation = args.get("correlation") if isinstance(args, dict) else None
        _check_plain(trace, index, name, {"category": category, "correlation": correlation})
        if category == _COPIES:
            continue
        label = labels.get(("process_labels", str(event.get("pid")), ""))  # such as "GPU 0"
        if _is_on_device(category, args, str(label or "CPU")):
            communicates = is_communication(name, args, on_device=True)
            span = Span(*seconds(path, event, index), True)
            trace.kernels[correlation].append((span, communicates))
            continue
        if not reader.is_selected(event):
            continue
        owner = reader.rank(event)
        if rank not in (None, owner):
            continue
        thread = (owner, str(event.get("tid")))
        # Any call may launch kernels, whatever its back end calls its category. Elsewhere than in
        # calls of drivers a correlation of 0 stands for none.
        if correlation is not None and (correlation or is_launch(category)):
            start, _ = seconds(path, event, index)
            trace.launches.append((start, thread, correlation))
        if (action := reader.action(event)) is not None:
            start, end = seconds(path, event, index)
            if isinstance(action, Overlapped):
                trace.ranges.append(Range(action.forward, start, end, thread, action, whole=True))
            else:
                trace.ranges.append(Range(action, start, end, thread))
        elif is_launch(category):
            pass
        elif is_communication(name, args, on_device=False):
            span = Span(*seconds(path, event, index))
            trace.communication.append(span)
            trace.communication_by_thread[thread].append(span)
        elif category == "cpu_op":
            span = Span(*seconds(path, event, index))
            trace.operations.append(span)
            if name.startswith("autograd::engine::evaluate_function"):
                trace.autograd_operations.append(span)
        elif len(trace.names) < _N_NAMES:
            trace.names[name] = None
    trace.ranges = _without_doubles(sorted(trace.ranges, key=lambda r: (r.start, -r.end)))
    _mark_launched_communication(trace)
    return trace


def _mark_launched_communication(trace: Trace) -> None:
    """Let kernels communicate that a call of communication launched, whatever their names."""
    rows = {thread: span_rows(spans) for thread, spans in trace.communication_by_thread.items()}
    reached = {thread: np.maximum.accumulate(row[:, 1]) for thread, row in rows.items()}
    for time, thread, correlation in trace.launches:
        if thread in rows and correlation in trace.kernels:
            k = int(np.searchsorted(rows[thread][:, 0], time, side="right")) - 1
            if k >= 0 and time <= reached[thread][k]:
                own = trace.kernels[correlation]
                trace.kernels[correlation] = [(span, True) for span, _ in own]


def _is_on_device(category: object, args: object, label: str) -> bool:
    """Return whether an event is work of a device.

    Back ends have categories of their own, such as ``mtia_ccp_events``. Their work has a
    correlation, and stands on a row of a device: the label of its process, or a device and a
    stream, tell that. Calls of drivers may have a stream, too, but launch the work.
    """
    if category in _ON_DEVICE:
        return True
    if not isinstance(args, dict) or not args.get("correlation") or is_launch(category):
        return False
    is_device_row = label != "CPU" or {"device", "stream"} <= args.keys()
    return is_device_row and not _NO_WORK.search(str(category))


def _check_plain(trace: Trace, index: int, name: str, values: Mapping[str, object]) -> None:
    for what, value in values.items():
        if isinstance(value, (list, dict)):
            raise TimelineError(
                f"{trace.path}: the {what} of event {index}, {name!r}, must be text or a number, "
                f"got {value!r}; export the trace again"
            )


def ranges_by_thread(ranges: Iterable[Range]) -> dict[object, list[Range]]:
    """Return the ranges of each thread, in their order."""
    threads: dict[object, list[Range]] = defaultdict(list)
    for item in ranges:
        threads[item.thread].append(item)
    return threads


def _without_doubles(ranges: list[Range]) -> list[Range]:
    """Drop ranges that contain a range of the same action; ``ranges`` are sorted."""
    outer: set[int] = set()
    for thread_ranges in ranges_by_thread(ranges).values():
        stack: list[Range] = []
        for inner in thread_ranges:
            while stack and stack[-1].end <= inner.start:
                stack.pop()
            own = inner.action, inner.whole
            outer.update(id(item) for item in stack if (item.action, item.whole) == own)
            stack.append(inner)
    return [item for item in ranges if id(item) not in outer]
