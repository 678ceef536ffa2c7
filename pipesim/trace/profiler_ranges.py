"""Read a rank's trace as torch.profiler writes it, and say when each of its ranges really worked.

A range such as ``PP:1F3`` covers a call on the CPU. What it did may lie elsewhere: kernels run
later on a GPU, and the autograd engine launches those of a backward from a thread of its own. The
call may also begin with waiting for a message. `Trace.worked` sorts that out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import TimelineError
from pipesim.ops import COMPUTE, TRANSFERS, Action, Overlapped
from pipesim.trace.chrome_json import head, seconds

__all__ = ["Range", "Span", "Trace", "read_trace"]

#: Categories of what runs on a GPU, and of the calls that launch it.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
#: A copy of the CPU's ranges, over those kernels alone that their own thread launched.
_COPIES = "gpu_user_annotation"
_DIFFERENTIATES = "autograd::engine::evaluate_function"
_COMMUNICATES = ("c10d::", "gloo:", "nccl", "mpi:", "ucc:", "record_param_comms")


class Span(NamedTuple):
    """Seconds, and whether they are a GPU's own."""

    start: float
    end: float
    on_device: bool = False


class Range(NamedTuple):
    """A call that carried out an action, on the CPU; seconds.

    Of an overlapped action, ``action`` is a half; or its F, if the call is ``whole``: of both.
    """

    action: Action
    start: float
    end: float
    thread: tuple[str, str]
    overlapped: Overlapped | None = None
    whole: bool = False


@dataclass(eq=False)
class Trace:
    """What a rank's trace tells of a pipeline.

    Attributes
    ----------
    path, rank, world_size
        The file; what it says of itself, or None.
    origin
        Nanoseconds that its times count from, by its clock.
    ranges
        In order of start.
    names
        Some names of other ranges, for messages.
    """

    path: Path
    rank: int | None
    world_size: int | None
    origin: int
    ranges: list[Range] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _works: list[Span] = field(default_factory=list)
    _backwards: list[Span] = field(default_factory=list)
    _communicates: list[Span] = field(default_factory=list)
    _kernels: dict[object, list[tuple[Span, bool]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _launches: list[tuple[float, object, object]] = field(default_factory=list)

    def correlations(self) -> set[object]:
        """Return the numbers of the launches that have kernels."""
        return {number for _, _, number in self._launches if number in self._kernels}

    def turn(self, whole: Range) -> tuple[float, float] | None:
        """Return when a call that goes forward and then back ends the one and begins the other.

        The end of the operations before autograd's first, and the start of that; None where the
        call shows no operations of both.
        """
        works, backwards = self._sorted
        begun = _between(backwards, Span(whole.start, whole.end))[:1, 0]
        if not len(begun):
            return None
        ends = _between(works, Span(whole.start, float(begun[0])))[:, 1]
        ends = ends[ends <= begun[0]]
        return (float(ends.max()), float(begun[0])) if len(ends) else None

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return _rows(self._works), _rows(self._backwards)

    def worked(self) -> list[tuple[Range, Span]]:
        """Return when each range worked.

        A range that launched kernels, from whichever thread, lasted from the first of them to the
        last: those of communication for a transfer, all others for the rest. Any other range lasted
        as long as its call, but for what it waited for before its first operation and sent after
        its last; one without operations only waited. Where ranges nest, each has what no inner one
        covers: launches, and the longest part of its call. An action whose range lies
        within one of the same action has that alone.
        """
        pieces = {thread: _pieces(ranges) for thread, ranges in _by_thread(self.ranges).items()}
        kernels: dict[int, list[tuple[Span, bool]]] = defaultdict(list)
        for time, thread, correlation in self._launches:
            found = _innermost(pieces, time, thread)
            if found is not None:
                kernels[id(found)] += self._kernels.get(correlation, ())
        own = {id(r): Span(r.start, r.end) for r in self.ranges if r.start == r.end}
        for start, end, piece in (x for of in pieces.values() for x in of):
            if piece is not None and (
                id(piece) not in own or end - start > own[id(piece)].end - own[id(piece)].start
            ):
                own[id(piece)] = Span(start, end)
        trimmed = _Trimmer(self._works, self._communicates)
        worked = []
        for each in self.ranges:
            if id(each) not in own:  # all of it is another's
                continue
            transfers = each.action.op in TRANSFERS
            spans = [span for span, talks in kernels[id(each)] if talks == transfers]
            if spans:
                span = Span(min(s.start for s in spans), max(s.end for s in spans), True)
            else:
                span = own[id(each)]
                if each.action.op in COMPUTE:
                    span = trimmed(span)
            worked.append((each, span))
        return worked


def read_trace(
    path: Path,
    content: Mapping[str, Any],
    action_of: Callable[[str], Action | Overlapped | None],
    process: str | None = None,
) -> Trace:
    """Sort what a file holds, or what is of one process and what runs on GPUs.

    ``content`` is as `pipesim.trace.chrome_json.load` returns it; ``action_of`` tells which action
    a range's name stands for, if any.

    Raises
    ------
    TimelineError
        For events whose time or duration is no number, or negative, or whose kind is none.
    """
    trace = Trace(path, *head(path, content))
    names: dict[str, None] = {}
    for index, event in enumerate(content["traceEvents"]):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        if process in (None, str(event.get("pid"))) or event.get("cat") in _ON_DEVICE:
            _sort(trace, event, index, names, action_of)
    trace.ranges = _without_doubles(sorted(trace.ranges, key=lambda r: (r.start, -r.end)))
    trace.names = list(names)
    return trace


def _sort(
    trace: Trace,
    event: Mapping[str, Any],
    index: int,
    names: dict[str, None],
    action_of: Callable[[str], Action | Overlapped | None],
) -> None:
    """Note a complete event where it belongs."""
    name, category = str(event.get("name", "")), event.get("cat")
    args = event.get("args")
    correlation = args.get("correlation") if isinstance(args, dict) else None
    thread = (str(event.get("pid")), str(event.get("tid")))
    for what, value in (("category", category), ("correlation", correlation)):
        if isinstance(value, (list, dict)):
            raise TimelineError(
                f"{trace.path}: the {what} of event {index}, {name!r}, must be text or a number, "
                f"got {value!r}; export the trace again"
            )
    if category == _COPIES:
        return
    talks = name.startswith(_COMMUNICATES)
    if category in _ON_DEVICE:
        trace._kernels[correlation].append((Span(*seconds(trace.path, event, index), True), talks))
    elif category in _LAUNCHES:
        if correlation is not None:
            start, _ = seconds(trace.path, event, index)
            trace._launches.append((start, thread, correlation))
    elif talks:
        trace._communicates.append(Span(*seconds(trace.path, event, index)))
    elif (action := action_of(name)) is not None:
        start, end = seconds(trace.path, event, index)
        if isinstance(action, Overlapped):
            trace.ranges.append(Range(action.forward, start, end, thread, action, whole=True))
        else:
            trace.ranges.append(Range(action, start, end, thread))
    elif category == "cpu_op":
        span = Span(*seconds(trace.path, event, index))
        trace._works.append(span)
        if name.startswith(_DIFFERENTIATES):
            trace._backwards.append(span)
    elif len(names) < 100:
        names[name] = None


def _by_thread(ranges: Iterable[Range]) -> dict[object, list[Range]]:
    threads: dict[object, list[Range]] = defaultdict(list)
    for each in ranges:
        threads[each.thread].append(each)
    return threads


def _without_doubles(ranges: list[Range]) -> list[Range]:
    """Drop ranges that have one of the same action within them; ``ranges`` are sorted."""
    outer: set[int] = set()
    for of in _by_thread(ranges).values():
        stack: list[Range] = []
        for each in of:
            while stack and stack[-1].end <= each.start:
                stack.pop()
            outer.update(id(up) for up in stack if _doubles(up, each))
            stack.append(each)
    return [each for each in ranges if id(each) not in outer]


def _doubles(one: Range, other: Range) -> bool:
    return (one.action, one.whole) == (other.action, other.whole)


Piece = tuple[float, float, Range | None]


def _pieces(ranges: Iterable[Range]) -> list[Piece]:
    """Cut a thread's time wherever a range begins or ends; return each piece's innermost range."""
    stack: list[Range] = []
    pieces: list[Piece] = []
    now = -math.inf

    def until(time: float) -> None:
        nonlocal now
        if time > now:
            pieces.append((now, time, stack[-1] if stack else None))
            now = time

    for each in ranges:
        while stack and stack[-1].end <= each.start:
            until(stack[-1].end)
            stack.pop()
        until(each.start)
        stack.append(each)
    while stack:
        until(stack[-1].end)
        stack.pop()
    return pieces


def _innermost(pieces: Mapping[object, list[Piece]], time: float, thread: object) -> Range | None:
    """Return the innermost range at a time: of a thread, or else of any other."""
    for of in (thread, *(t for t in pieces if t != thread)):
        if of in pieces:
            k = bisect_right(pieces[of], time, key=lambda piece: piece[0]) - 1
            if k >= 0 and time <= pieces[of][k][1] and pieces[of][k][2] is not None:
                return pieces[of][k][2]
    return None


class _Trimmer:
    """Takes away what a call waits for before its first operation, and sends after its last."""

    def __init__(self, works: list[Span], communicates: list[Span]) -> None:
        self.works, self.begins = _rows(works), _rows(communicates)
        self.ends = _rows([Span(span.end, span.start) for span in communicates])

    def __call__(self, span: Span) -> Span:
        works = _between(self.works, span)
        if not len(self.works):
            return span
        # Stage 0 has nothing to do in torch's I, but waits for the gradient.
        first, last = (works[0, 0], works[:, 1].max()) if len(works) else (span.end, span.end)
        waits = _between(self.ends, Span(span.start, first))[:, 0]
        sends = _between(self.begins, Span(last, span.end))[:, 0]
        return Span(float(waits.max(initial=span.start)), float(sends.min(initial=span.end)))


def _rows(spans: Iterable[Span]) -> NDArray[np.float64]:
    """Return starts and ends in order, shape ``(n_spans, 2)``."""
    return np.array(sorted(span[:2] for span in spans), dtype=np.float64).reshape(-1, 2)


def _between(rows: NDArray[np.float64], span: Span) -> NDArray[np.float64]:
    """Return the rows, sorted by their first column, whose first is within a span."""
    first, last = np.searchsorted(rows[:, 0], [span.start, span.end])
    return rows[first:last]
