"""Looped breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953)."""

from __future__ import annotations

import numpy as np

from pipesim.errors import check_count
from pipesim.named_schedules.interleaved import LOOPED_BUBBLE
from pipesim.ops import Op
from pipesim.scheduling.placement import looped
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.host_memory import check_schedule


@register(
    "looped_bfs",
    summary="GPipe over v chunks a device: all micro-batches through one, then the next",
    source="Breadth-first pipeline parallelism, arXiv 2211.05953",
    bubble=LOOPED_BUBBLE,
    activations=ClosedForm("m", lambda p, m: m),
)
def looped_bfs(n_devices: int, n_microbatches: int, n_chunks: int = 2) -> Schedule:
    """Build the looped breadth-first order.

    Two devices of two chunks each, three micro-batches, B as long as F::

        device 0 | 0F0 0F1 0F2 2F0 2F1 2F2 ..  ..  2B2 2B1 2B0 0B2 0B1 0B0
        device 1 | ..  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 ..

    All micro-batches go through a device's first chunk, then through its next one; back the same
    way. The weights of a chunk are then needed in one stretch each way, and its gradients can be
    reduced while the other chunks compute. Every device holds the activations of all ``m``
    micro-batches, and for ``m >= p`` the bubble is ``(p - 1)/(v m + p - 1)``.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    n_chunks
        Stages of each device.
    """
    n_chunks = check_count("n_chunks", n_chunks)
    check_schedule("looped_bfs", 2 * n_devices * n_microbatches * n_chunks)
    ops = np.repeat([Op.F, Op.B], n_chunks * n_microbatches)
    chunk = np.repeat(np.arange(n_chunks), n_microbatches)
    microbatch = np.tile(np.arange(n_microbatches), n_chunks)
    chunks, microbatches = (np.concatenate([one, one[::-1]]) for one in (chunk, microbatch))
    return Schedule.from_columns(
        "looped_bfs",
        looped(n_devices, n_chunks),
        n_microbatches,
        ((ops, chunks * n_devices + device, microbatches) for device in range(n_devices)),
    )
