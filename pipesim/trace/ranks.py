"""Which events of a trace's file are of which rank: of all in it, or of each process in it.

torch.profiler writes one file a rank. Other programs, `pipesim.trace.save` among them, write one
file in which each rank is a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE, Action, Overlapped
from pipesim.trace.chrome_json import load
from pipesim.trace.profiler_ranges import Range, Span, Trace, read_trace

__all__ = ["check_threads", "read_traces"]

#: Seconds by which ranges may overlap, as times are rounded.
_ROUNDED = 1e-6


def read_traces(path: Path, action_of: Callable[[str], Action | Overlapped | None]) -> list[Trace]:
    """Read the traces of a file: one a process that has ranges, by its number; at least one.

    The ranks of several are not known: what the file says is of one. What runs on GPUs belongs to
    the process that launched it.

    Raises
    ------
    TimelineError
        For a file that cannot be read or was cut, naming the place, one that is no Chrome trace,
        impossible events, and launches of several processes that cannot be told apart.
    """
    content = load(path)
    whole = read_trace(path, content, action_of)
    processes = sorted({process for process, _ in (each.thread for each in whole.ranges)}, key=_key)
    if len(processes) < 2:
        return [whole]
    traces = [read_trace(path, content, action_of, process) for process in processes]
    launched = Counter(x for trace in traces for x in trace.correlations())
    for correlation, count in launched.items():
        if count > 1:
            raise TimelineError(
                f"{path}: processes {' and '.join(processes)} have launched kernels with the same "
                f"correlation, {correlation!r}, so that nobody knows whose they are; give one file "
                "a rank"
            )
    for trace in traces:
        trace.rank = None
    return traces


def _key(process: str) -> tuple[bool, int, str]:
    """Order processes by number, then those that are none by name."""
    numbered = process.isdecimal() and len(process) < 20
    return not numbered, int(process) if numbered else 0, process


def check_threads(trace: Trace, worked: Sequence[tuple[Range, Span]]) -> None:
    """Raise if compute actions ran beside each other on several threads; both in order of start."""
    computed = [pair for pair in worked if pair[0].action.op in COMPUTE]
    computed.sort(key=lambda pair: pair[1].start)
    for (one, before), (other, after) in pairwise(computed):
        if one.thread == other.thread or (
            one.overlapped is not None and one.overlapped is other.overlapped
        ):
            continue
        if min(before.end, after.end) - after.start > _ROUNDED:
            raise TimelineError(
                f"{trace.path}: {one.action} and {other.action} ran at the same time on threads "
                f"{one.thread[1]} and {other.thread[1]} of one rank, which runs one action after "
                "the other; give each rank a process or a file of its own"
            )
