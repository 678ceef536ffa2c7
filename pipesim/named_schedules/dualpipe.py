"""DualPipe: both directions at once, F overlapped with B (DeepSeek-V3, arXiv 2412.19437, 3.2.1)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipesim.ops import Op
from pipesim.scheduling.placement import bidirectional
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import DeviceOrder, Schedule

#: ``(op, direction, overlapped with the next)``; direction 0 comes from the nearer end.
_Step = tuple[int, int, bool]


@register(
    "dualpipe",
    summary="two directions at once, F overlapped with B, weight gradients where bubbles would be",
    source="DeepSeek-V3, arXiv 2412.19437",
    bubble=ClosedForm(
        "(p-2)/(3m+p-2)",
        lambda p, m: (p - 2) / (3 * m + p - 2),
        "F overlapped with B takes as long as both",
    ),
    activations=ClosedForm("p+1", lambda p, m: p + 1),
    parameters=ClosedForm("2", lambda p, m: 2),
    counts=Counts(
        "an even number of devices and an even number of micro-batches, at least two a device",
        lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    ),
)
def dualpipe(n_devices: int, n_microbatches: int) -> Schedule:
    """Build DualPipe's order.

    Four devices, eight micro-batches (0 to 3 go down, 4 to 7 up), I, W and B as long as F::

        device 0 | F0 F1 F2 F4 I4 W4 F5 F3 B5 F6 B0 B6 .. F7 B1 B7 I2 W2 I3 W3
        device 1 | .. F0 F4 F1 F5 F2 B4 F6 B0 F3 B5 F7 B1 B6 B2 .. I7 I3 W7 W3
        device 2 | .. F4 F0 F5 F1 F6 B0 F2 B4 F7 B1 F3 B5 B2 B6 .. I3 I7 W3 W7
        device 3 | F4 F5 F6 F0 I0 W0 F1 F7 B1 F2 B4 B2 .. F3 B5 B3 I6 W6 I7 W7

    Every device holds a stage of each direction: a near one, whose micro-batches start at the
    nearer end of the devices, and a far one. The device ``k`` away from the nearer end runs, where
    ``&`` is overlapped,

    1. near F, ``p - 2 k - 2`` times;
    2. near F, far F, ``k + 1`` times;
    3. far I, its W, far F, ``p / 2 - k - 1`` times;
    4. near F & far B, far F & near B, ``m / 2 - p + k + 1`` times, but the two devices in the
       middle do not overlap the very first pair;
    5. far B, far F & near B, ``p / 2 - k - 1`` times;
    6. far B, near B, ``k + 1`` times, of which the later half are only I;
    7. W, near I, ``p / 2 - k - 1`` times, where W is of the oldest I without one;
    8. W, ``k + 1`` times.

    For stages of equal cost and free transfers, F as long as I and no shorter than W, and ``o``
    seconds for F and B overlapped, no shorter than B: the two devices in the middle idle for
    ``(p / 2 - 1)(o + b - 3 w)``, as published, and the makespan is that plus
    ``m (f + b) - (m - p - 1)(f + b - o)``. Every device holds the activations of ``p + 1``
    micro-batches at most.

    Parameters
    ----------
    n_devices
        Even.
    n_microbatches
        Even, and at least twice the number of devices.
    """
    half = n_microbatches // 2

    def orders() -> Iterator[DeviceOrder]:
        for device in range(n_devices):
            other = n_devices - 1 - device
            steps = _steps(min(device, other), n_devices, half)
            op, direction, overlapped = np.array(steps).T
            path = direction ^ (device > other)
            number = _numbers(op, path)
            yield op, np.where(path == 0, device, other), path * half + number, overlapped

    return Schedule.from_columns("dualpipe", bidirectional(n_devices), n_microbatches, orders())


def _steps(depth: int, n_devices: int, half: int) -> list[_Step]:
    """Return what the devices ``depth`` away from either end do; W's direction is not known yet."""
    f0, f1, b0, b1, i0, i1 = ((op, of, False) for op in (Op.F, Op.B, Op.I) for of in (0, 1))
    w: _Step = (Op.W, 0, False)
    f0b1, f1b0 = [(Op.F, 0, True), b1], [(Op.F, 1, True), b0]
    inner, outer = depth + 1, n_devices // 2 - 1 - depth
    return [
        *[f0] * (2 * outer),
        *[f0, f1] * inner,
        *[i1, w, f1] * outer,
        *(f0b1 if outer else [f0, b1]),  # the innermost send the F on before they begin the B
        *f1b0,
        *[*f0b1, *f1b0] * (half - n_devices + depth),
        *[b1, *f1b0] * outer,
        *([b1, b0] * inner)[:inner],
        *([i1, i0] * inner)[inner:],
        *[w, i0] * outer,
        *[w] * inner,
    ]


def _numbers(op: NDArray[np.int64], path: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number each path's forwards and backwards in turn; each W is of the oldest I without one."""
    number = np.empty_like(op)
    for of in (0, 1):
        for ops in ((Op.F,), (Op.B, Op.I)):
            those = np.flatnonzero(np.isin(op, ops) & (path == of))
            number[those] = np.arange(len(those))
    path[op == Op.W], number[op == Op.W] = path[op == Op.I], number[op == Op.I]
    return number
