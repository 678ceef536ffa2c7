"""Encoders on the devices of their language model: before it, or nested in its 1F1B.

Each of ``p`` devices has a stage of the encoder and one of the language model: stages 0 to
``p - 1`` and ``p`` to ``2p - 1`` of a chain. The language model runs 1F1B. Forwards of the encoder
run some micro-batches ahead of it, and backwards of the encoder some behind.

Orders have no deadlock. Put F of micro-batch ``k`` on device ``i`` in slot ``k + i``, and B in slot
``k + p - 1``; those of the encoder as many slots earlier, or later, as it runs ahead or behind. A
slot has F of encoders, F, B, and B of encoders, and each B from the last device to the first. If
encoders run at least ``p - 1`` ahead, each action comes after all that it needs.
"""

from __future__ import annotations

import numpy as np

from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule

_SOURCE = "BigMac, arXiv 2605.25451"


def _idle(p: int, m: int) -> int:
    """Return the idle time of a device, in F and B of a stage."""
    return max(p - 1, 2 * p - 1 - m)


_BUBBLE = ClosedForm(
    "x/(2m+x), x = max(p-1, 2p-1-m)", lambda p, m: _idle(p, m) / (2 * m + _idle(p, m))
)


@register(
    "encoder_first",
    label="encoder first",
    summary="encoder on the devices of its language model, before and after the 1F1B of that",
    source=_SOURCE,
    n_modules=2,
    bubble=_BUBBLE,
    activations=ClosedForm("(m+min(p,m))/2", lambda p, m: (m + min(p, m)) / 2),
)
def encoder_first(n_devices: int, n_microbatches: int) -> Schedule:
    """Build 1F1B of a language model between all forwards and all backwards of its encoder.

    Two devices, three micro-batches, B as long as F; cells begin with the stage::

        device 0 | 0F0 0F1 0F2 2F0 2F1 ..  2B0 2F2 2B1 ..  2B2 0B0 0B1 0B2
        device 1 | ..  1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2 ..

    Stages ``i`` of the encoder and ``p + i`` of the language model are on device ``i``. If stages
    of a module are equal, ``m >= p`` and transfers are free, each device is idle for ``p - 1``
    times F of the slower module and B of the slower module. It holds the encoder's activations of
    all micro-batches. Costs have ``2p`` stages: `Costs.concatenate` joins those of the modules.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    """
    return _schedule("encoder_first", n_devices, n_microbatches, n_microbatches)


@register(
    "encoder_nested",
    label="encoder nested",
    summary="encoder nested in the 1F1B of its language model: little memory for any batch",
    source=_SOURCE,
    n_modules=2,
    bubble=_BUBBLE,
    activations=ClosedForm(
        "(min(3p-2,m)+min(p,m))/2", lambda p, m: (min(3 * p - 2, m) + min(p, m)) / 2
    ),
)
def encoder_nested(n_devices: int, n_microbatches: int) -> Schedule:
    """Build 1F1B of a language model with its encoder ``p - 1`` micro-batches ahead, and behind.

    Two devices, four micro-batches, B as long as F; cells begin with the stage::

        device 0 | 0F0 0F1 2F0 0F2 2F1 2B0 0F3 2F2 2B1 0B0 2F3 ..  2B2 0B1 ..  2B3 0B2 0B3
        device 1 | ..  1F0 1F1 3F0 3B0 1F2 3F1 3B1 1B0 1F3 3F2 3B2 1B1 3F3 3B3 1B2 1B3 ..

    Stages are placed as in `encoder_first`. A device runs F of the encoder, F, B, and B of the
    encoder in turn. Its idle time is that of `encoder_first`, and device ``i`` holds the encoder's
    activations of at most ``3p - 2 - i`` micro-batches, so that they do not grow with the batch.
    That is the idea of BigMac (arXiv 2605.25451), whose order may differ.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    """
    return _schedule("encoder_nested", n_devices, n_microbatches, n_devices - 1)


def _schedule(name: str, p: int, m: int, distance: int) -> Schedule:
    """Return the order with encoders this many micro-batches ahead, and as many behind."""
    check_schedule(name, 4 * p * m)
    k = np.arange(m, dtype=np.int32)
    ops = np.repeat(np.array([Op.F, Op.F, Op.B, Op.B], dtype=np.int8), m)
    chunks, microbatches = np.repeat([0, p, p, 0], m), np.tile(k, 4)
    columns = []
    for device in range(p):
        after = p - 1 - device
        turns = np.concatenate([k - distance, k, k + after, k + after + distance])
        order = np.argsort(turns, kind="stable")
        columns.append((ops[order], chunks[order] + device, microbatches[order]))
    return Schedule.from_columns(name, Placement.looped(p, 2), m, columns)
