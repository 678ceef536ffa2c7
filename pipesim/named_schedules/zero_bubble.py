"""ZB-H1 and ZB-H2: handcrafted orders with split backwards (arXiv 2401.10241, section 2).

The paper writes B for the gradient of the input alone, which is I here.
"""

from __future__ import annotations

from pipesim.named_schedules.patterns import alternating_schedule
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule


def _h1_bubble(p: int, m: int) -> float:
    idle = max(p - 1, 2 * p - 1 - m)
    return idle / (3 * m + idle)


def _h2_bubble(p: int, m: int) -> float:
    idle = max(p - 1, 2 * (p - 1) - m // 2)
    return idle / (3 * m + idle)


@register(
    "zb_h1",
    label="ZB-H1",
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

    The order is 1F1B with split backwards: the previous stage waits for I alone, not for W.
    Device ``i`` delays ``i`` of its W, to run them while the last gradients go up the pipeline.
    A device idles for ``(p - 1)(f + i - w)``. Device ``i`` holds ``p - i`` micro-batches of
    activations, and the bytes that are held from I to W of ``i`` more.
    """
    return alternating_schedule("zb_h1", n_devices, n_microbatches, 1, split=True)


@register(
    "zb_h2",
    label="ZB-H2",
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

    Device ``i`` runs ``2(p - 1 - i)`` forwards as its warm-up and delays ``2 i`` of its W. The
    chart of the step is then a parallelogram: for ``m >= 2p - 1`` and F, I, W of equal length no
    device idles between its first task and its last. Within the span of a device the idle time is
    ``(p - 1)(f + i - 2 w)``; the bubble in the registry counts from the start of the step to its
    end, as for all schedules. Device ``i`` holds ``2(p - 1 - i) + 1`` micro-batches of
    activations, and the bytes that are held from I to W of ``2 i`` more.
    """
    return alternating_schedule("zb_h2", n_devices, n_microbatches, 2, split=True)
