"""Naive model parallelism: one micro-batch after the other, one device at work at a time."""

from __future__ import annotations

from pipesim.named_schedules.patterns import alternating_schedule
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule


@register(
    "naive",
    summary="one micro-batch after the other: one device works at a time",
    source="GPipe, arXiv 1811.06965, figure 2b",
    bubble=ClosedForm("(p-1)/p", lambda p, m: (p - 1) / p),
    activations=ClosedForm("1", lambda p, m: 1),
)
def naive(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the order of naive model parallelism.

    Three devices, two micro-batches, B as long as F::

        device 0 | F0 .. .. .. .. B0 F1 .. .. .. .. B1
        device 1 | .. F0 .. .. B0 .. .. F1 .. .. B1 ..
        device 2 | .. .. F0 B0 .. .. .. .. F1 B1 .. ..

    A micro-batch goes forward through all stages and back before the next one starts. The makespan
    is ``m p (f + b)``, and every device holds the activations of one micro-batch.
    """
    return alternating_schedule("naive", n_devices, n_microbatches, warm_up_per_hop=0)
