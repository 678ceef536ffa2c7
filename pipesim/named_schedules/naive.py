"""Naive model parallelism: one micro-batch after the other, one device at work at a time."""

from __future__ import annotations

import numpy as np

from pipesim.errors import check_count
from pipesim.named_schedules.patterns import same_on_all_devices
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule


@register(
    "naive",
    label="naive",
    summary="one micro-batch after the other: one device works at a time",
    source="GPipe, arXiv 1811.06965, figure 2b",
    bubble=ClosedForm("(p-1)/p", lambda p, m: (p - 1) / p),
    activations=ClosedForm("1", lambda p, m: 1),
)
def naive(n_devices: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """Build the order of naive model parallelism.

    Three devices, two micro-batches, B as long as F::

        device 0 | F0 .. .. .. .. B0 F1 .. .. .. .. B1
        device 1 | .. F0 .. .. B0 .. .. F1 .. .. B1 ..
        device 2 | .. .. F0 B0 .. .. .. .. F1 B1 .. ..

    A micro-batch goes forward through all stages and back before the next one starts. The makespan
    is ``m p (f + b)``, and every device holds the activations of one micro-batch.

    One device of three chunks accumulates the gradients of a micro-batch after the other, as a loop
    of torch does. If each chunk is a layer, ``lower(shard_parameters="every")`` is FSDP::

        0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    n_chunks
        Stages of each device.
    """
    n_chunks = check_count("n_chunks", n_chunks)
    check_schedule("naive", 2 * n_devices * n_microbatches * n_chunks)
    ops = np.tile(np.repeat([Op.F, Op.B], n_chunks), n_microbatches)
    forward = np.arange(n_chunks)
    chunks = np.tile(np.concatenate([forward, forward[::-1]]), n_microbatches)
    microbatches = np.repeat(np.arange(n_microbatches), 2 * n_chunks)
    return same_on_all_devices(
        "naive", n_devices, n_microbatches, n_chunks, ops, chunks, microbatches
    )
