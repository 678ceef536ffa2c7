"""DualPipe and DualPipeV: F overlapped with B (DeepSeek-V3, arXiv 2412.19437, 3.2.1).

DualPipeV is DualPipe folded in the middle (github.com/deepseek-ai/DualPipe). Its device ``i`` of
``p`` runs the actions of device ``i`` of ``2p`` in DualPipe, on its two stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipesim.named_schedules.patterns import (
    Phase,
    expand_phases,
    number_microbatches,
    v_shaped_columns,
)
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.orders import DeviceOrder
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule


@register(
    "dualpipe",
    label="DualPipe",
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
    nearer end of the devices, and a far one. A device that is ``k`` devices from the nearer end
    runs these phases, where ``&`` joins an overlapped pair:

    1. near F, ``p - 2 k - 2`` times;
    2. near F, far F, ``k + 1`` times;
    3. far I, its W, far F, ``p / 2 - k - 1`` times;
    4. near F & far B, far F & near B, ``m / 2 - p + k + 1`` times, but the two devices in the
       middle do not overlap the very first pair;
    5. far B, far F & near B, ``p / 2 - k - 1`` times;
    6. far B, near B, ``k + 1`` times; the later half of these backwards are only I;
    7. W, near I, ``p / 2 - k - 1`` times; W belongs to the oldest I without a W;
    8. W, ``k + 1`` times.

    Let stages have equal cost, transfers be free, F last as long as I and no shorter than W, and
    F overlapped with B last ``o`` seconds, no shorter than B. Then the two devices in the middle
    idle for ``(p / 2 - 1)(o + b - 3 w)``, as published. The makespan is that plus
    ``m (f + b) - (m - p - 1)(f + b - o)``. Every device holds the activations of at most
    ``p + 1`` micro-batches.

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
            phases = _phases(min(device, other), n_devices // 2, half)
            ops, chunks, overlapped = expand_phases(phases)
            path = chunks.astype(np.int32) ^ (device > other)  # chunk 0 is the near stage
            microbatches = path * half + number_microbatches(ops, path)
            yield ops, np.where(path == 0, device, other), microbatches, overlapped

    placement = Placement.bidirectional(n_devices)
    return Schedule.from_columns("dualpipe", placement, n_microbatches, orders())


@register(
    "dualpipev",
    label="DualPipeV",
    summary="DualPipe folded into a V: F and B of two micro-batches hide each other's messages",
    source="github.com/deepseek-ai/DualPipe; DualPipe: DeepSeek-V3, arXiv 2412.19437, 3.2.1",
    bubble=ClosedForm(
        "(p-1)/(3m+p-1)",
        lambda p, m: (p - 1) / (3 * m + p - 1),
        assumes="an overlapped F and B last as long as both",
    ),
    activations=ClosedForm("p + 1/2", lambda p, m: p + 0.5),
    counts=Counts("at least 2p micro-batches", lambda p, m: m >= 2 * p),
)
def dualpipev(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the DualPipeV order.

    Two devices of two chunks each, four micro-batches, B, I and W as long as F, and an overlapped
    F and B (written one after the other) as long as both::

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 ..  3F3 0B1 3B3 0I2 0W2 0I3 0W3
        device 1 | ..  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 ..  2I3 1I3 2W3 1W3

    In the steady state a device runs a forward of one chunk and a backward of the other as one
    action, so that the messages of each travel while the other computes. Backwards are split
    right before and right after the steady state. The phases are those of `dualpipe`, whose near
    stage is chunk 0 here. If F and I of a chunk last ``f``, W ``w <= f``, B ``b = f + w`` and an
    overlapped pair ``f&b``, each device idles for ``(p - 1)(f&b + b - 3 w)``. It holds ``2p + 1``
    activations of a chunk.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        At least one for each of the ``2p`` stages.
    """
    p, m = n_devices, n_microbatches
    check_schedule("dualpipev", 4 * p * m)
    devices = v_shaped_columns([_phases(i, p, m) for i in range(p)])
    return Schedule.from_columns("dualpipev", Placement.v_shaped(p), m, devices)


def _phases(i: int, p: int, m: int) -> list[Phase]:
    """Return the phases of device ``i``, counted from the end where micro-batches enter.

    The list has the eight phases of `dualpipe`. Chunk 0 is the near stage, and chunk 1 the far
    one. W are listed in the order of their I.

    Parameters
    ----------
    i
        Devices between this one and the nearer end, below ``p``.
    p
        Devices from an end to the middle of DualPipe, or all devices of DualPipeV.
    m
        Micro-batches of each direction of DualPipe, or all micro-batches of DualPipeV.
    """
    pairs = ["1", "0"] * (i + 1)
    ending = " ".join(f"{'B' if k <= i else 'I'}{chunk}" for k, chunk in enumerate(pairs))
    weights = [f"W{chunk}" for chunk in pairs[i + 1 :]] + ["W0"] * (p - 1 - i)
    # The innermost device sends the first F before it begins the B: no message to hide yet.
    innermost = i == p - 1
    return [
        ("F0", 2 * (p - 1 - i)),
        ("F0 F1", i + 1),
        ("I1 W1 F1", p - 1 - i),
        ("F0 B1 F1&B0", int(innermost)),
        ("F0&B1 F1&B0", m - (2 * p - 1 - i) - innermost),
        ("B1 F1&B0", p - 1 - i),
        (ending, 1),
        *((f"{weight} I0", 1) for weight in weights[: p - 1 - i]),
        (" ".join(weights[p - 1 - i :]), 1),
    ]
