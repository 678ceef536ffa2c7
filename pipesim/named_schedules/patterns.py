"""Patterns that orders of several families share.

- Forwards and backwards that alternate: `alternate`, and `alternating_schedule` from it.
- Orders of a device's two chunks, written as phases: `expand_phases`, and `v_shaped_columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.order_columns import DeviceOrder
from pipesim.scheduling.placement import linear
from pipesim.scheduling.schedule import Schedule

__all__ = [
    "Phase",
    "alternate",
    "alternating_schedule",
    "expand_phases",
    "number_microbatches",
    "v_shaped_columns",
]

#: Actions and how often they are repeated. ``F0`` is the F of the device's first chunk, ``F1``
#: that of its second one; ``F0&B1`` are overlapped.
Phase = tuple[str, int]


def alternate(
    n: int, warm_up: int, w_delay: int | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Return ``n`` forwards and ``n`` backwards: a warm-up, then one of each, then a cool-down.

    Parameters
    ----------
    n
        Number of forwards.
    warm_up
        Number of forwards before the steady state. Backward ``k`` comes right after forward
        ``warm_up + k``, if there is one, and else after the backward before it.
    w_delay
        Split the backwards into I and W. W number ``k`` comes right after I number
        ``k + w_delay``; W without such an I come last. None: whole backwards (B).

    Returns
    -------
    ops, k
        Operation of each action, and its number among those of its kind; shape ``(2 * n,)``, or
        ``(3 * n,)`` with split backwards.
    """
    delays = {Op.F: 0, Op.B: warm_up}
    if w_delay is not None:
        delays = {Op.F: 0, Op.I: warm_up, Op.W: warm_up + w_delay}
    ops = np.repeat(np.array(list(delays), dtype=np.int8), n)
    k = np.tile(np.arange(n, dtype=np.int32), len(delays))
    turn = k + np.repeat(np.array(list(delays.values()), dtype=np.int32), n)
    order = np.argsort(turn, kind="stable")
    return ops[order], k[order]


def alternating_schedule(
    name: str, n_devices: int, n_microbatches: int, warm_up_per_hop: int, *, split: bool = False
) -> Schedule:
    """Build a schedule of one stage a device, whose forwards and backwards alternate.

    Parameters
    ----------
    name
        Name of the schedule.
    n_devices, n_microbatches
        Any positive counts.
    warm_up_per_hop
        Forwards that each device's warm-up has more than that of the next device; the last
        device has no warm-up.
    split
        Split the backwards into I and W. Device ``i`` runs its W ``warm_up_per_hop * i`` turns
        after their I.

    Raises
    ------
    CapacityError
        If the actions of split backwards would not fit in memory.
    """
    if split:
        check_schedule(name, 3 * n_devices * n_microbatches)

    def orders() -> Iterator[DeviceOrder]:
        for device in range(n_devices):
            warm_up = warm_up_per_hop * (n_devices - 1 - device)
            w_delay = warm_up_per_hop * device if split else None
            ops, microbatches = alternate(n_microbatches, warm_up, w_delay)
            yield ops, np.full(len(ops), device), microbatches

    return Schedule.from_columns(name, linear(n_devices), n_microbatches, orders())


def number_microbatches(ops: NDArray[Any], stages: NDArray[Any]) -> NDArray[np.int32]:
    """Return the micro-batch of each action of a device whose stages take them in order.

    The forwards of a stage take the micro-batches one by one, and so do its backwards, B and I
    counted together. Its W follow its I.
    """
    microbatches = np.empty(len(ops), dtype=np.int32)
    for stage in np.unique(stages):
        in_stage = stages == stage
        for kinds in ((Op.F,), (Op.B, Op.I)):
            chosen = in_stage & np.isin(ops, kinds)
            microbatches[chosen] = np.arange(np.count_nonzero(chosen))
        microbatches[in_stage & (ops == Op.W)] = microbatches[in_stage & (ops == Op.I)]
    return microbatches


def expand_phases(phases: Iterable[Phase]) -> NDArray[np.int8]:
    """Return operation, chunk, and whether it is overlapped with the next, of each action.

    Shape ``(3, n_actions)``.

    >>> expand_phases([("F0", 2), ("F0&B1", 1)]).tolist()
    [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]
    """
    return np.concatenate([np.tile(_parse(actions), times) for actions, times in phases], axis=1)


def v_shaped_columns(
    device: int, n_devices: int, phases: Iterable[Phase]
) -> tuple[NDArray[Any], ...]:
    """Return the columns of a device that holds two stages in V shape.

    Chunk 0 is the stage on the way down, chunk 1 that on the way up.

    Returns
    -------
    ops, stages, microbatches, overlapped
        As `Schedule.from_columns` takes them.
    """
    ops, chunks, overlapped = expand_phases(phases)
    stages = np.where(chunks == 0, device, 2 * n_devices - 1 - device)
    return ops, stages, number_microbatches(ops, stages), overlapped


def _parse(actions: str) -> NDArray[np.int8]:
    """Return the columns of one repetition of a phase; shape ``(3, n_actions)``."""
    rows = [
        (Op[action[0]], int(action[1]), k < pair.count("&"))
        for pair in actions.split()
        for k, action in enumerate(pair.split("&"))
    ]
    return np.array(rows, dtype=np.int8).reshape(-1, 3).T
