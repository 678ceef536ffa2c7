"""ZB-H1 and ZB-H2: split backwards, in orders made by hand (arXiv 2401.10241, section 2).

That paper writes B for the gradient of the input alone, which is I here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipesim.named_schedules.patterns import in_turns
from pipesim.scheduling.placement import linear
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import DeviceOrder, Schedule
from pipesim.utils.host_memory import check_schedule


def _h1_bubble(p: int, m: int) -> float:
    idle = max(p - 1, 2 * p - 1 - m)
    return idle / (3 * m + idle)


def _h2_bubble(p: int, m: int) -> float:
    idle = max(p - 1, 2 * (p - 1) - m // 2)
    return idle / (3 * m + idle)


@register(
    "zb_h1",
    summary="1F1B with split backwards: a third of its bubble, in its memory",
    source="Zero Bubble, arXiv 2401.10241, section 2.1",
    bubble=ClosedForm("x/(3m+x), x = max(p-1, 2p-1-m)", _h1_bubble),
    activations=ClosedForm("min(p, m)", lambda p, m: min(p, m)),
)
def zb_h1(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the ZB-H1 order.

    Three devices, four micro-batches, I and W as long as F::

        device 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        device 1 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        device 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    1F1B whose backwards wait for the gradient of the input alone. Device ``i`` keeps ``i`` of its
    W back, to run them while the last gradients go up the pipeline. A device idles for
    ``(p - 1)(f + i - w)``, and device ``i`` holds ``p - i`` micro-batches of activations, and what
    is kept from I to W of ``i`` more.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    """
    return _build("zb_h1", n_devices, n_microbatches, 1)


@register(
    "zb_h2",
    summary="ZB-H1 with twice the warm-up: devices idle only before and after their work",
    source="Zero Bubble, arXiv 2401.10241, section 2.2",
    bubble=ClosedForm("x/(3m+x), x = max(p-1, 2(p-1) - m // 2)", _h2_bubble),
    activations=ClosedForm("min(2p-1, m)", lambda p, m: min(2 * p - 1, m)),
)
def zb_h2(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the ZB-H2 order.

    Three devices, five micro-batches, I and W as long as F::

        device 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
        device 1 | .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        device 2 | .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    Device ``i`` runs ``2(p - 1 - i)`` forwards as its warm-up and keeps ``2 i`` of its W back, so
    that its work is a parallelogram: for ``m >= 2p - 1`` and F, I, W of equal length no device
    idles between its first task and its last. By the span of a device the idle time is
    ``(p - 1)(f + i - 2 w)``; the bubble here counts from the step's start to its end, as always.
    Device ``i`` holds ``2(p - 1 - i) + 1`` micro-batches of activations, and what is kept from I
    to W of ``2 i`` more.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    """
    return _build("zb_h2", n_devices, n_microbatches, 2)


def _build(name: str, p: int, m: int, per_hop: int) -> Schedule:
    """Build either; ``per_hop`` forwards are added to the warm-up a device up the pipeline."""
    check_schedule(name, 3 * p * m)

    def orders() -> Iterator[DeviceOrder]:
        for device in range(p):
            ops, microbatches = in_turns(m, per_hop * (p - 1 - device), per_hop * device)
            yield ops, np.full(len(ops), device), microbatches

    return Schedule.from_columns(name, linear(p), m, orders())
