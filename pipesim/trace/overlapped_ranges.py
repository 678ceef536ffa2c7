"""Ranges of overlapped actions in traces: which halves they have, and when each worked.

torch names such a range ``PP:(0F2;3B0)OVERLAP_F_B``. Its own runtime runs the F and then the B
within it, and gives neither a range; stages that annotate their calls do. Without them the B is
taken to begin with the first operation of autograd, and where a trace has no operations, each gets
half of the time, in which waiting for the B's message then counts as work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from pipesim.ops import Action, Op
from pipesim.trace.profiler_ranges import Range, Span, Trace

__all__ = ["halved", "with_halves"]

#: Seconds by which a range may stick out of the one that it is in, as times are rounded.
_ROUNDED = 1e-6


def with_halves(trace: Trace) -> list[Range]:
    """Put the ranges of its halves in place of one that covers an overlapped action.

    They lie within it, on any thread. Where there is one of them, the range is the other's; where
    there is none, the operations of autograd show where the B begins, or the range remains.
    """
    ranges = trace.ranges
    starts = [each.start for each in ranges]
    changed: dict[int, list[Range]] = {}
    for place, whole in enumerate(ranges):
        if not whole.whole or whole.overlapped is None:
            continue
        missing: list[Action] = list(whole.overlapped)
        for k in range(bisect_left(starts, whole.start - _ROUNDED), len(ranges)):
            half = ranges[k]
            if half.start > whole.end:
                break
            if half.end <= whole.end + _ROUNDED and not half.whole and half.action in missing:
                missing.remove(half.action)
                changed[k] = [half._replace(overlapped=whole.overlapped)]
        if len(missing) < 2:
            changed[place] = [whole._replace(action=action, whole=False) for action in missing]
        elif (turn := trace.turn(whole)) is not None:
            changed[place] = [
                whole._replace(end=turn[0], whole=False),
                whole._replace(action=missing[1], start=turn[1], whole=False),
            ]
    found = [each for k, one in enumerate(ranges) for each in changed.get(k, [one])]
    return sorted(found, key=lambda each: (each.start, -each.end))


def halved(worked: Iterable[tuple[Range, Span]]) -> list[tuple[Range, Span]]:
    """Return when each action worked, with the F of an overlapped one before its B.

    A range that covers both is cut in the middle. Halves that ran beside each other, or the B
    first, share the time from the start of the one to the end of the other, in proportion to what
    each took.
    """
    pairs: dict[int, dict[Op, Span]] = defaultdict(dict)
    found: list[tuple[Range, Span]] = []
    for each, span in worked:
        if each.overlapped is None:
            found.append((each, span))
            continue
        # Each range that was read has a pair of its own, which its halves share.
        halves = pairs[id(each.overlapped)]
        for action in each.overlapped if each.whole else (each.action,):
            found.append((each._replace(action=action, whole=False), span))
            halves[action.op] = span
    return [
        (each, span)
        if each.overlapped is None
        else (each, _in_turn(pairs[id(each.overlapped)], each.action.op))
        for each, span in found
    ]


def _in_turn(halves: dict[Op, Span], op: Op) -> Span:
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
