"""Hanayo: waves down and up the devices (Liu et al., SC '23, arXiv 2308.15762)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import check_count
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

#: Plain numbers: compiled code does not take enumerations.
_F, _B = int(Op.F), int(Op.B)


def _bubble(p: int, m: int, n_waves: int = 1) -> float:
    # A lower bound on the idle time of a device, in forwards of a chunk; exact for one wave.
    idle = max(3 * (p - 1), 6 * n_waves * (p - 1) - (6 * n_waves - 4) * (m - 1))
    return idle / (6 * n_waves * m + idle)


@register(
    "hanayo",
    label="Hanayo",
    summary="1F1B in w waves down and up the devices: small bubbles, and one set of weights",
    source="Hanayo, arXiv 2308.15762",
    bubble=ClosedForm(
        "x/(6wm+x), x = max(3(p-1), 6w(p-1) - (6w-4)(m-1))",
        _bubble,
        assumes="one wave; a lower bound for more",
        exact=False,
    ),
    activations=ClosedForm(
        "min(m, (3p-1)/2)",
        lambda p, m: min(m, (3 * p - 1) / 2),
        assumes="one wave; about so much for more",
        exact=False,
    ),
)
def hanayo(n_devices: int, n_microbatches: int, n_waves: int = 1) -> Schedule:
    """Build Hanayo's order.

    Two devices, one wave (two chunks a device), three micro-batches, B as long as F::

        device 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 ..  3F2 3B2 0B0 0B1 ..  0B2
        device 1 | ..  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2 ..

    A micro-batch goes down the devices and up again, ``n_waves`` times. A device runs ready
    actions. If both a forward and a backward are ready, it alternates them; of several forwards or
    backwards it takes the one that is furthest along its path. These choices are this project's,
    for any ``m``. The order is that of a run in which B lasts as long as two F.

    With one wave and ``m = p``, the bubble is ``(2p - 2)/(5p - 2)``, that of Chimera with ``2p``
    stages and micro-batches. For ``m >= 3p/2`` it is ``(p - 1)/(2m + p - 1)``, the least possible
    in a V: device ``p - 1`` waits for its first input, and ends before its last gradient has
    passed the other devices.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    n_waves
        Number of times down and up; each has two stages a device.
    """
    n_waves = check_count("n_waves", n_waves)
    check_schedule("hanayo", 4 * n_devices * n_microbatches * n_waves)
    placement = Placement.waves(n_devices, n_waves)
    stages = np.array([placement.stages_of(device) for device in range(n_devices)], dtype=np.int32)
    shape = n_devices, 2 * stages.shape[1] * n_microbatches
    op = np.empty(shape, dtype=np.int8)
    stage, microbatch = np.empty((2, *shape), dtype=np.int32)
    _run(stages, n_microbatches, op, stage, microbatch)
    return Schedule.from_columns(
        "hanayo", placement, n_microbatches, zip(op, stage, microbatch, strict=True)
    )


def _forward(own_stages: Ints, done: Ints) -> int:
    """Return the furthest stage of a device whose next forward is ready, or -1."""
    for k in range(len(own_stages) - 1, -1, -1):
        if done[_F, own_stages[k] + 1] < done[_F, own_stages[k]]:
            return int(own_stages[k])
    return -1


def _backward(own_stages: Ints, done: Ints) -> int:
    """Return the first stage of a device whose next backward is ready, or -1."""
    for stage in own_stages:
        if done[_B, stage] < min(done[_F, stage + 1], done[_B, stage + 1]):
            return int(stage)
    return -1


@kernel(_forward, _backward)
def _run(
    stages: Ints, n_microbatches: int, op: NDArray[np.int8], stage: Ints, microbatch: Ints
) -> None:
    """Fill ``op``, ``stage`` and ``microbatch`` in the order of a run in which B lasts two F.

    ``done[F, s + 1]`` and ``done[B, s]`` count the F and B that have ended at stage ``s``. The
    entries before the first stage and after the last count all micro-batches.
    """
    n_devices, n_actions = op.shape
    n_stages = stages.size
    done = np.zeros((2, n_stages + 1), dtype=np.int32)
    done[_F, 0] = done[_B, n_stages] = n_microbatches
    position = np.zeros(n_devices, dtype=np.int64)
    busy_until = np.zeros(n_devices, dtype=np.int64)
    left = n_devices * n_actions
    time = 0
    while left > 0:
        for device in range(n_devices):
            k = position[device] - 1
            if k >= 0 and busy_until[device] == time:
                done[op[device, k], stage[device, k] + (1 if op[device, k] == _F else 0)] += 1
        for device in range(n_devices):
            k = position[device]
            if busy_until[device] > time or k == n_actions:
                continue
            forward = _forward(stages[device], done)
            backward = _backward(stages[device], done)
            if forward < 0 and backward < 0:
                continue
            if backward < 0 or (forward >= 0 and k > 0 and op[device, k - 1] == _B):
                op[device, k], stage[device, k] = _F, forward
                microbatch[device, k] = done[_F, forward + 1]
            else:
                op[device, k], stage[device, k] = _B, backward
                microbatch[device, k] = done[_B, backward]
            busy_until[device] = time + 1 + (1 if op[device, k] == _B else 0)
            position[device] += 1
            left -= 1
        time += 1
