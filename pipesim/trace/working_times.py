"""`working_times`: when each range of a trace really worked.

A range covers a call on the CPU. Its work may lie elsewhere: kernels run later on a GPU, and the
autograd engine launches the kernels of a backward from its own thread. The call may also
begin with waiting for a message.

A range of an overlapped action is split into its halves. torch names such a range
``PP:(0F2;3B0)OVERLAP_F_B``. torch's own runtime runs the F and then the B within it, and gives
neither a range. Stages that annotate their calls do. Without ranges of the halves, the B is taken
to begin with the first operation of autograd. A trace without operations gives each half half of
the time; waiting for the B's message then counts as work.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from pipesim.ops import COLLECTIVES, COMPUTE, TRANSFERS, Action, Op
from pipesim.trace.profiler_ranges import (
    Kernels,
    Range,
    Span,
    Trace,
    ranges_by_thread,
    span_rows,
    starting_within,
)

# Halves of overlapped actions

#: Seconds by which a range may stick out of the range around it, since times are rounded.
_ROUNDED = 1e-6


def replace_by_halves(trace: Trace) -> list[Range]:
    """Return the ranges of a trace, with ranges of two halves in place of each overlapped one.

    The ranges of the halves lie within the overlapped one, on any thread:

    - with ranges of both halves, they stand for it;
    - with a range of one half, the overlapped range becomes that of the other half;
    - with neither, the operations of autograd show where the B begins;
    - without such operations, the overlapped range remains.
    """
    ranges = trace.ranges
    replaced: dict[int, list[Range]] = {}
    starts = [item.start for item in ranges]
    for index, whole in enumerate(ranges):
        if not whole.whole or whole.overlapped is None:
            continue
        missing: list[Action] = list(whole.overlapped)
        for k in range(bisect_left(starts, whole.start - _ROUNDED), len(ranges)):
            half = ranges[k]
            if half.start > whole.end:
                break
            if half.end <= whole.end + _ROUNDED and not half.whole and half.action in missing:
                missing.remove(half.action)
                replaced[k] = [half._replace(overlapped=whole.overlapped)]
        if len(missing) < 2:
            replaced[index] = [whole._replace(action=action, whole=False) for action in missing]
        elif (border := trace.backward_start(whole)) is not None:
            replaced[index] = [
                whole._replace(end=border[0], whole=False),
                whole._replace(action=missing[1], start=border[1], whole=False),
            ]
    halves = [item for k, one in enumerate(ranges) for item in replaced.get(k, [one])]
    return sorted(halves, key=lambda item: (item.start, -item.end))


def split_overlapped(times: Iterable[tuple[Range, Span]]) -> list[tuple[Range, Span]]:
    """Return when each action worked, with the F of an overlapped pair before its B or I.

    A range that covers both is cut in the middle. If the halves ran at the same time, or the F
    last, they share the time from the first start to the last end, in proportion to what each
    took.
    """
    pairs: dict[int, dict[Op, Span]] = defaultdict(dict)
    actions: list[tuple[Range, Span]] = []
    for item, span in times:
        if item.overlapped is None:
            actions.append((item, span))
            continue
        # Each range of the file has a pair object of its own, which its halves share.
        halves = pairs[id(item.overlapped)]
        for action in item.overlapped if item.whole else (item.action,):
            actions.append((item._replace(action=action, whole=False), span))
            halves[action.op] = span
    return [
        (item, span)
        if item.overlapped is None
        else (item, _disjoint_span(pairs[id(item.overlapped)], item.action.op))
        for item, span in actions
    ]


def _disjoint_span(halves: dict[Op, Span], op: Op) -> Span:
    """Return when a half worked, such that the F ends before the other half starts."""
    if len(halves) < 2:
        return halves[op]
    forward, backward = (halves[x] for x in sorted(halves))
    if forward.end <= backward.start:
        return halves[op]
    start, end = min(forward.start, backward.start), max(forward.end, backward.end)
    seconds = forward.end - forward.start, backward.end - backward.start
    share = seconds[0] / sum(seconds) if sum(seconds) > 0 else 0.5
    middle = start + share * (end - start)
    on_device = forward.on_device and backward.on_device
    return Span(start, middle, on_device) if op == Op.F else Span(middle, end, on_device)


# Times of all ranges

#: Operations that communicate and do nothing else.
_MOVES = TRANSFERS | COLLECTIVES - {Op.GRAD_NORM}


def working_times(trace: Trace) -> list[tuple[Range, Span]]:
    """Return when each range worked.

    - A range that launched kernels, from any thread, lasts from the first of them to the last. A
      transfer or collective counts kernels of communication, or all if none tells that it is one.
      Any other range counts all other kernels.
    - Any other range lasts as long as its call. Waiting before its first operation and sending
      after its last one are taken off. A call without operations only waited.
    - Where ranges nest, each has what no inner one covers: launches, and the longest part of its
      call. A range that inner ones cover wholly is left out.
    - Of a range within one of the same action, the inner one counts.
    """
    pieces = {thread: _pieces(ranges) for thread, ranges in ranges_by_thread(trace.ranges).items()}
    kernels = _kernels_by_range(trace, pieces)
    longest = _longest_pieces(trace, pieces)
    trimmer = _Trimmer(trace.operations, trace.communication)
    times = []
    for item in trace.ranges:
        if id(item) not in longest:  # inner ranges cover all of it
            continue
        launched = kernels[id(item)]
        moves = item.action.op in _MOVES
        spans = [span for span, communicates in launched if communicates == moves]
        if moves and not spans:
            spans = [span for span, _ in launched]
        if spans:
            span = Span(min(s.start for s in spans), max(s.end for s in spans), True)
        else:
            span = longest[id(item)]
            if item.action.op in COMPUTE:
                span = trimmer.trim(span)
        times.append((item, span))
    return times


#: Start and end of a part of a thread's time (s), and the innermost range that covers it.
_TimePiece = tuple[float, float, Range | None]
_PiecesByThread = Mapping[object, list[_TimePiece]]


def _pieces(ranges: Iterable[Range]) -> list[_TimePiece]:
    """Cut a thread's time wherever a range begins or ends; return each piece's innermost range."""
    stack: list[Range] = []
    pieces: list[_TimePiece] = []
    cut = -math.inf

    def advance(time: float) -> None:
        nonlocal cut
        if time > cut:
            pieces.append((cut, time, stack[-1] if stack else None))
            cut = time

    for item in ranges:
        while stack and stack[-1].end <= item.start:
            advance(stack[-1].end)
            stack.pop()
        advance(item.start)
        stack.append(item)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return pieces


def _kernels_by_range(trace: Trace, pieces: _PiecesByThread) -> dict[int, Kernels]:
    """Return the kernels that each range launched, by the range's identity."""
    kernels: dict[int, Kernels] = defaultdict(list)
    for time, thread, correlation in trace.launches:
        launcher = _innermost(pieces, time, thread)
        if launcher is not None:
            kernels[id(launcher)] += trace.kernels.get(correlation, ())
    return kernels


def _innermost(pieces: _PiecesByThread, time: float, thread: object) -> Range | None:
    """Return the innermost range at a time: of a thread, or else of any other."""
    for candidate in (thread, *(t for t in pieces if t != thread)):
        if candidate in pieces:
            row = pieces[candidate]
            k = bisect_right(row, time, key=lambda piece: piece[0]) - 1
            if k >= 0 and time <= row[k][1] and row[k][2] is not None:
                return row[k][2]
    return None


def _longest_pieces(trace: Trace, pieces: _PiecesByThread) -> dict[int, Span]:
    """Return the longest piece of each range, by the range's identity."""
    longest = {id(r): Span(r.start, r.end) for r in trace.ranges if r.start == r.end}
    for row in pieces.values():
        for start, end, item in row:
            if item is None:
                continue
            best = longest.get(id(item))
            if best is None or end - start > best.end - best.start:
                longest[id(item)] = Span(start, end)
    return longest


class _Trimmer:
    """Take off what a call waits for before its first operation, and sends after its last one."""

    def __init__(self, operations: list[Span], communication: list[Span]) -> None:
        self.operations, self.begins = span_rows(operations), span_rows(communication)
        self.ends = span_rows([Span(span.end, span.start) for span in communication])

    def trim(self, span: Span) -> Span:
        """Return the part of a call's span in which it worked."""
        operations = starting_within(self.operations, span)
        if not len(self.operations):
            return span
        # Stage 0 has no operation in torch's I, but waits for the gradient.
        first, last = (
            (operations[0, 0], operations[:, 1].max()) if len(operations) else (span.end, span.end)
        )
        waits = starting_within(self.ends, Span(span.start, first))[:, 0]
        sends = starting_within(self.begins, Span(last, span.end))[:, 0]
        return Span(float(waits.max(initial=span.start)), float(sends.min(initial=span.end)))
