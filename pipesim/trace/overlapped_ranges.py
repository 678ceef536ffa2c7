"""Ranges of overlapped actions in traces: which halves they have, and when each half worked.

torch names such a range ``PP:(0F2;3B0)OVERLAP_F_B``. torch's own runtime runs the F and then the B
within it, and gives neither a range. Stages that annotate their calls do. Without ranges of the
halves, the B is taken to begin with the first operation of autograd. A trace without operations
gives each half half of the time; waiting for the B's message then counts as work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from pipesim.ops import Action, Op
from pipesim.trace.profiler_ranges import Range, Trace
from pipesim.trace.spans import Span

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
    """Return when each action worked, with the F of an overlapped pair before its B.

    A range that covers both is cut in the middle. If the halves ran at the same time, or the B
    first, they share the time from the first start to the last end, in proportion to what each
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
    """Return when a half worked, such that the F ends before the B starts."""
    if len(halves) < 2 or halves[Op.F].end <= halves[Op.B].start:
        return halves[op]
    forward, backward = halves[Op.F], halves[Op.B]
    start, end = min(forward.start, backward.start), max(forward.end, backward.end)
    seconds = forward.end - forward.start, backward.end - backward.start
    share = seconds[0] / sum(seconds) if sum(seconds) > 0 else 0.5
    middle = start + share * (end - start)
    on_device = forward.on_device and backward.on_device
    return Span(start, middle, on_device) if op == Op.F else Span(middle, end, on_device)
