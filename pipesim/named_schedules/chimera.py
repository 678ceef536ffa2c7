"""Chimera: two pipelines in opposite directions (Li and Hoefler, arXiv 2107.06925, section 3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipesim.ops import Op
from pipesim.scheduling.orders import DeviceOrder
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule


def _bubble(p: int, m: int) -> float:
    units = -(-m // p)
    idle = 2 * units * (p - 1) + p - 2 - m - (units > 1 and m % p > 0)
    return idle / (3 * m + idle)


@register(
    "chimera",
    label="Chimera",
    summary="two 1F1B pipelines in opposite directions, each in the other's bubbles",
    source="Chimera, arXiv 2107.06925",
    bubble=ClosedForm(
        "x/(3m+x), x = 2u(p-1)+p-2-m, u = ceil(m/p); x-1 for x where m > p is no multiple of p",
        _bubble,
    ),
    activations=ClosedForm("min(p, m)", lambda p, m: min(p, m)),
    parameters=ClosedForm("2", lambda p, m: 2),
    counts=Counts(
        "an even number of devices and an even number of micro-batches",
        lambda p, m: p % 2 == 0 and m % 2 == 0,
    ),
)
def chimera(n_devices: int, n_microbatches: int) -> Schedule:
    """Build Chimera's order.

    Four devices, four micro-batches (0 and 1 go down, 2 and 3 up), B as long as F::

        device 0 | F0 F1 .. F2 B2 F3 B3 B0 .. B1
        device 1 | .. F0 F2 F1 F3 B2 B0 B3 B1 ..
        device 2 | .. F2 F0 F3 F1 B0 B2 B1 B3 ..
        device 3 | F2 F3 .. F0 B0 F1 B1 B2 .. B3

    Every device holds a stage of each direction. Each direction runs 1F1B with half of the
    micro-batches, ``p / 2`` of them in a unit. Units follow each other without a pause: the first
    forwards of a unit fill bubbles at the end of the previous one.

    For stages of equal cost and free transfers, ``b >= f`` and ``m <= p`` (one unit), the makespan
    is ``p f + (m + p - 2) b``; with ``u`` whole units, ``m = u p``, it is
    ``m (f + b) + (p - 2)(u b - (u - 1) f)``. The paper's bubble, ``(p - 2)/(2 m + p - 2)``, is
    that of ``b = f`` and whole units. With ``b = 2 f`` one unit has ``(p - 2)/(1.5 m + p - 2)``,
    and each further one adds ``(p - 2) f`` to the idle time of every device.

    Parameters
    ----------
    n_devices, n_microbatches
        Even. Fewer micro-batches than devices, and units that are not full, have larger bubbles.
    """
    half = n_microbatches // 2
    unit, position = np.divmod(np.arange(half), n_devices // 2)
    # Slots of one F or B, as if both took equally long. F of stage s begins in slot s and B in
    # slot 2p - 1 - s. Micro-batches of a direction are 2 slots apart, and its units 2p slots. No
    # two actions then need a device in the same slot: the F of its two directions take even and
    # odd slots, and F of one direction alternates with B of the other every p slots.
    slot = 2 * (n_devices * unit + position)

    def orders() -> Iterator[DeviceOrder]:
        for device in range(n_devices):
            other = n_devices - 1 - device
            first = device, n_devices + other, other, n_devices + device
            order = np.argsort(np.concatenate([slot + start for start in first]))
            microbatches = np.arange(n_microbatches).reshape(2, half)
            yield (
                np.repeat([Op.F, Op.B, Op.F, Op.B], half)[order],
                np.repeat([device, other], 2 * half)[order],
                microbatches[[0, 0, 1, 1]].ravel()[order],
            )

    placement = Placement.bidirectional(n_devices)
    return Schedule.from_columns("chimera", placement, n_microbatches, orders())
