"""1F1B with a flush (PipeDream-flush, arXiv 2006.09503, section 2.2; Megatron-LM, 2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipesim.ops import Op
from pipesim.scheduling.placement import linear
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import DeviceOrder, Schedule


@register(
    "1f1b",
    summary="one forward, one backward: as few activations as the depth needs",
    source="PipeDream-flush, arXiv 2006.09503",
    bubble=ClosedForm("(p-1)/(m+p-1)", lambda p, m: (p - 1) / (m + p - 1)),
    activations=ClosedForm("min(p, m)", lambda p, m: min(p, m)),
)
def one_f_one_b(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the 1F1B order.

    Three devices, four micro-batches, B as long as F::

        device 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        device 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        device 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Device ``i`` runs ``min(p - 1 - i, m)`` forwards as its warm-up, then one forward and one
    backward in turn, then the backwards that are left. For stages of equal cost and free
    transfers: makespan ``(m + p - 1)(f + b)``, bubble ``(p - 1)/(m + p - 1)``, and device ``i``
    holds the activations of at most ``min(p - i, m)`` micro-batches.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    """

    def orders() -> Iterator[DeviceOrder]:
        for device in range(n_devices):
            warm_up = min(n_devices - 1 - device, n_microbatches)
            pairs = n_microbatches - warm_up
            ops = np.repeat([Op.F, Op.B, Op.B], [warm_up, 2 * pairs, warm_up])
            ops[warm_up : warm_up + 2 * pairs : 2] = Op.F
            microbatches = np.empty(2 * n_microbatches, dtype=np.int32)
            microbatches[ops == Op.F] = np.arange(n_microbatches)
            microbatches[ops == Op.B] = np.arange(n_microbatches)
            yield ops, np.full(len(ops), device), microbatches

    return Schedule.from_columns("1f1b", linear(n_devices), n_microbatches, orders())
