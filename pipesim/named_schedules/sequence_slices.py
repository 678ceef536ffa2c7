"""Schedules of sequence slices: a sequence goes through the pipeline in ``k`` slices.

- Seq1F1B (arXiv 2406.03488)
- SlimPipe (arXiv 2504.14519)

Slice ``j`` of sequence ``s`` has the number ``s * k + j``, as `pipesim.Schedule.n_slices` says.
"""

from __future__ import annotations

import numpy as np

from pipesim.errors import check_count
from pipesim.named_schedules.patterns import alternate
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule


def _slices(p: int, n_slices: int | None) -> int:
    """Return the slices of a sequence for `slimpipe`: by default one for each device."""
    return p if n_slices is None else check_count("n_slices", n_slices)


def _is_whole_and_deep(p: int, m: int, n_slices: int | None = None) -> bool:
    n_slices = _slices(p, n_slices)
    return m % n_slices == 0 and n_slices >= p


@register(
    "seq1f1b",
    label="Seq1F1B",
    summary="1F1B over slices of sequences (n_slices): less bubble and memory for long sequences",
    source="Seq1F1B, arXiv 2406.03488",
    bubble=ClosedForm("(p-1)/(m+p-1)", lambda p, m: (p - 1) / (m + p - 1), "slices of equal cost"),
    activations=ClosedForm(
        "min(p+k-1, m), k = n_slices", lambda p, m, n_slices=2: min(p + n_slices - 1, m)
    ),
    counts=Counts(
        "slices of whole sequences: multiples of n_slices",
        lambda p, m, n_slices=2: m % check_count("n_slices", n_slices) == 0,
    ),
)
def seq1f1b(n_devices: int, n_microbatches: int, n_slices: int = 2) -> Schedule:
    """Build the order of Seq1F1B: 1F1B over slices, whose backwards begin with the last slice.

    Three devices, two sequences in two slices each (0 and 1, 2 and 3), B as long as F::

        device 0 | F0 F1 F2 F3 .. .. B1 .. B0 .. B3 B2
        device 1 | .. F0 F1 F2 .. B1 F3 B0 .. B3 B2 ..
        device 2 | .. .. F0 F1 B1 F2 B0 F3 B3 B2 .. ..

    A slice attends to the earlier slices of its sequence, so that the first backward is that of the
    last slice. Device ``i`` runs ``min(p - 1 - i + k - 1, m)`` forwards as its warm-up, then
    alternates one forward and one backward (section 3.2). Backwards take the sequences in order,
    and in each sequence the slices from last to first: the paper's partially ordered queue. For
    slices of equal cost and free transfers: makespan ``(m + p - 1)(f + b)``, bubble
    ``(p - 1)/(m + p - 1)``. Device ``i`` holds the activations of at most ``min(p - i + k - 1, m)``
    slices. The same sequences in whole have ``m / k`` micro-batches, k times as long: a larger
    bubble, and the activations of ``p`` sequences.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        Number of slices of all sequences: a multiple of ``n_slices``.
    n_slices
        Slices of a sequence.
    """
    return _build("seq1f1b", n_devices, n_microbatches, check_count("n_slices", n_slices), 1)


@register(
    "slimpipe",
    label="SlimPipe",
    summary="slices of sequences over v chunks a device: activations of about one sequence",
    source="SlimPipe, arXiv 2504.14519",
    bubble=ClosedForm(
        "(p-1)/(vm+p-1)",
        lambda p, m, n_chunks=2: (p - 1) / (n_chunks * m + p - 1),
        "slices of equal cost",
    ),
    activations=ClosedForm(
        "min(vk + p-1, vm)/v, k = n_slices",
        lambda p, m, n_slices=None, n_chunks=2: (
            min(n_chunks * _slices(p, n_slices) + p - 1, n_chunks * m) / n_chunks
        ),
    ),
    counts=Counts(
        "slices of whole sequences, of at least as many slices as there are devices (n_slices)",
        _is_whole_and_deep,
    ),
)
def slimpipe(
    n_devices: int, n_microbatches: int, n_slices: int | None = None, n_chunks: int = 2
) -> Schedule:
    """Build an order of SlimPipe: slices of sequences over looped stages, one sequence in flight.

    Two devices of two chunks each, one sequence in two slices, B as long as F::

        device 0 | 0F0 0F1 2F0 2F1 ..  ..  2B1 2B0 0B1 0B0
        device 1 | ..  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 ..

    The slices of a sequence go through a device's first chunk, then through its next one, before
    those of the next sequence. Backwards do likewise, last chunk and last slice first. Device
    ``i`` runs ``v k - 1 + p - 1 - i`` forwards as its warm-up, then alternates one forward and one
    backward. This is the shortest warm-up that leaves no gap in the steady state: all ``v k``
    forwards of a sequence come before its first backward.

    For slices of equal cost and free transfers, the bubble is ``(p - 1)/(v m + p - 1)``, and device
    ``i`` holds the activations of ``v k + p - 1 - i`` slices of a chunk: about one sequence through
    ``1 / p`` of the model, where 1F1B holds ``p`` of them. With one chunk it is Seq1F1B. SlimPipe
    also moves attention between devices, to even out slices of unequal cost. That is not part of
    the order.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        Number of slices of all sequences: a multiple of ``n_slices``.
    n_slices
        Slices of a sequence, at least ``n_devices``, which is the default.
    n_chunks
        Stages of each device.
    """
    n_slices = _slices(n_devices, n_slices)
    n_chunks = check_count("n_chunks", n_chunks)
    return _build("slimpipe", n_devices, n_microbatches, n_slices, n_chunks)


def _build(name: str, p: int, m: int, n_slices: int, n_chunks: int) -> Schedule:
    """Build 1F1B over slices and chunks; the last device starts after one whole sequence."""
    n = n_chunks * m
    check_schedule(name, 2 * p * n)
    device = np.arange(p)
    warm_up = np.minimum(n_chunks * n_slices - 1 + p - 1 - device, n)
    ops, k = alternate(n, warm_up)
    sequence, place = np.divmod(k, n_chunks * n_slices)
    is_forward = ops == Op.F
    chunk, piece = np.divmod(np.where(is_forward, place, n_chunks * n_slices - 1 - place), n_slices)
    stages = chunk * p + device[:, None]
    columns = zip(ops, stages, sequence * n_slices + piece, strict=True)
    schedule = Schedule.from_columns(name, Placement.looped(p, n_chunks), m, columns)
    return schedule.with_slices(n_slices)
