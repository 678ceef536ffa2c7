"""Find the work on devices of each all-reduce that a trace shows.

The name of a kernel may not tell its collective, and grouped calls share one kernel. So a kernel is
of the call that launched it. Where the trace does not tell the launch, kernels and calls are
counted off in order. Kernels that remain are named in a note.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeexec.data_parallel.sync_lint.time_spans import TimeSpan, covered_seconds
from pipesim.trace.communication import ALL_REDUCE


class HostCall(NamedTuple):
    """A call on the CPU: its span (s) and thread."""

    span: TimeSpan
    thread: object


class Launch(NamedTuple):
    """When (s) and on which thread work was launched."""

    time: float
    thread: object


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """A kernel that communicates, or the copy of a range on a device.

    Attributes
    ----------
    name, span
        Name, start and end (s).
    collective
        As `pipesim.trace.communication.collective` returns it.
    launch
        None if the trace does not tell it.
    is_copy
        Whether it is the copy of a range, which lasts as long as the range's kernels.
    nbytes
        Bytes that it says; NaN if none.
    """

    name: str
    span: TimeSpan
    collective: str | None
    launch: Launch | None
    is_copy: bool = False
    nbytes: float = math.nan


@dataclass(eq=False)
class CallWork:
    """Spans of work of each call, in order, and what is to be noted."""

    spans: list[list[TimeSpan]]
    nbytes: list[float]
    notes: list[str] = field(default_factory=list)


def outermost(calls: Iterable[HostCall]) -> list[HostCall]:
    """Return the calls that do not start within another one of their thread, in order."""
    ends: dict[object, float] = {}
    kept = []
    for call in sorted(calls, key=lambda call: (call.span[0], -call.span[1])):
        if call.span[0] >= ends.get(call.thread, -math.inf):
            ends[call.thread] = call.span[1]
            kept.append(call)
    return kept


def work_of_calls(
    calls: Sequence[HostCall], others: Iterable[HostCall], work: Iterable[DeviceWork]
) -> CallWork:
    """Return the work of each all-reduce.

    Parameters
    ----------
    calls
        The all-reduces, in order, of which none is within another.
    others
        Calls of other collectives.
    work
        All communication on devices.
    """
    result = CallWork([[] for _ in calls], [math.nan] * len(calls))
    owners, strangers = CallFinder(calls), CallFinder(outermost(others))
    kernels: list[DeviceWork] = []  # of no known call
    copies: list[DeviceWork] = []
    by_call: dict[int, list[DeviceWork]] = defaultdict(list)
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
    result: CallWork, calls: Sequence[HostCall], rest: Sequence[int], kernels: list[DeviceWork]
) -> list[DeviceWork]:
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


def _shares(span: TimeSpan, indices: Sequence[int], result: CallWork) -> Iterator[TimeSpan]:
    """Yield the part of a span that each of several calls has."""
    start, end = span
    total = math.fsum(result.nbytes[k] for k in indices)
    for index in indices:
        share = result.nbytes[index] / total if total > 0 else 1 / len(indices)
        yield start, start + share * (end - span[0])
        start += share * (end - span[0])


def _kernels(n: int) -> str:
    return f"{n} kernel{'' if n == 1 else 's'}"


class CallFinder:
    """Find the call in which a launch lies."""

    def __init__(self, calls: Sequence[HostCall]) -> None:
        rows: Mapping[object, list[tuple[float, float, int]]] = defaultdict(list)
        for index, (span, thread) in enumerate(calls):
            rows[thread].append((*span, index))
        self._rows = {thread: sorted(row) for thread, row in rows.items()}

    def index_of(self, launch: Launch) -> int | None:
        """Return the index of the call, or None."""
        row = self._rows.get(launch.thread, [])
        k = bisect_right(row, launch.time, key=lambda item: item[0]) - 1
        return row[k][2] if k >= 0 and launch.time <= row[k][1] else None
