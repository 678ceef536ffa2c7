"""Eager 1F1B: forwards ahead of time, so that messages travel while devices compute."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipesim.named_schedules.patterns import in_turns
from pipesim.scheduling.placement import linear
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import DeviceOrder, Schedule


@register(
    "eager_1f1b",
    summary="1F1B with twice the warm-up: hides communication, at the price of memory",
    source="Zhuang et al., arXiv 2211.05322; DAPPLE, arXiv 2007.01045, policy B",
    bubble=ClosedForm("(p-1)/(m+p-1)", lambda p, m: (p - 1) / (m + p - 1)),
    activations=ClosedForm("min(2p-1, m)", lambda p, m: min(2 * p - 1, m)),
)
def eager_1f1b(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the eager 1F1B order.

    Three devices, four micro-batches, B as long as F::

        device 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
        device 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
        device 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Device ``i`` runs ``2(p - 1 - i) + 1`` forwards before its first backward, where 1F1B runs
    ``p - i``; then one backward and one forward in turn. A message then has a turn to travel
    before the next device needs it. With free transfers the times are those of 1F1B: makespan
    ``(m + p - 1)(f + b)``. Device ``i`` holds ``min(2(p - 1 - i) + 1, m)`` micro-batches.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    """

    def orders() -> Iterator[DeviceOrder]:
        for device in range(n_devices):
            ops, microbatches = in_turns(n_microbatches, 2 * (n_devices - 1 - device))
            yield ops, np.full(len(ops), device), microbatches

    return Schedule.from_columns("eager_1f1b", linear(n_devices), n_microbatches, orders())
