"""Assign the events of a trace's file to ranks.

torch.profiler writes one file a rank. Other programs, `pipesim.trace.save` among them, write one
file in which each process is a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE
from pipesim.trace.event_fields import RangeReader
from pipesim.trace.profiler_ranges import Range, Trace, read_trace
from pipesim.trace.spans import Span

#: Seconds by which ranges may overlap, as times are rounded.
_ROUNDED = 1e-6


def read_traces(path: Path, content: Mapping[str, Any], reader: RangeReader) -> list[Trace]:
    """Return the traces of a file, at least one: one for each rank or process, by its number.

    The header's rank holds for a file of one process. Of several processes the ranks are unknown:
    None. Events of GPUs belong to the process that launched them. ``content`` is as
    `pipesim.trace.chrome_json.load` returns it.

    Raises
    ------
    TimelineError
        For impossible events, and launches of several processes with one correlation.
    """
    whole = read_trace(path, content, reader)
    processes = sorted({item.thread[0] for item in whole.ranges}, key=_process_order)
    if len(processes) < 2:
        return [whole]
    traces = [read_trace(path, content, reader, process) for process in processes]
    launches = Counter(x for trace in traces for x in trace.correlations())
    for correlation, count in launches.items():
        if count > 1:
            raise TimelineError(
                f"{path}: processes {' and '.join(processes)} have launched kernels with the same "
                f"correlation, {correlation!r}, so that they cannot be told apart; give one file "
                "a rank"
            )
    for trace in traces:
        trace.rank = None
    return traces


def _process_order(process: str) -> tuple[bool, int, str]:
    """Return the sort key of a process: those with a number by it, then the others by name."""
    numbered = process.isdecimal() and len(process) < 20
    return not numbered, int(process) if numbered else 0, process


def check_threads(trace: Trace, times: Sequence[tuple[Range, Span]]) -> None:
    """Raise if compute actions ran at the same time on several threads of one rank.

    ``times`` has the ranges of ``trace`` in order of start, and when each worked.
    """
    compute = [pair for pair in times if pair[0].action.op in COMPUTE]
    compute.sort(key=lambda pair: pair[1].start)
    for (one, first), (other, second) in pairwise(compute):
        if one.thread == other.thread or (
            one.overlapped is not None and one.overlapped is other.overlapped
        ):
            continue
        if min(first.end, second.end) - second.start > _ROUNDED:
            raise TimelineError(
                f"{trace.path}: {one.action} and {other.action} ran at the same time on threads "
                f"{one.thread[1]} and {other.thread[1]} of one rank, which runs one action after "
                "the other; give each rank a process or a file of its own, or give the place of "
                "its number as 'rank' in fields, or choose one replica with only"
            )
