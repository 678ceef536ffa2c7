"""Patterns that orders of several families share.

- Forwards and backwards that alternate: `alternate`, and `alternating_schedule` from it; or that
  run as one action: `merged_orders`.
- One order of chunks, micro-batches and operations for all devices: `same_on_all_devices`.
- Orders of a device's two chunks, written as phases: `expand_phases`, and `v_shaped_columns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ArgumentError
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import CSR, Ints

#: Actions and how often they are repeated. ``F0`` is the F of the device's first chunk, ``F1``
#: that of its second one; ``F0&B1`` are overlapped.
Phase = tuple[str, int]
#: Whether each F of the steady state runs as one action with a backward: ``True`` with a B, and
#: ``"delayed_w"`` with an I, whose W comes right after the pair.
Merged = bool | Literal["delayed_w"]
#: Of F, B, I, W: operations with equal numbers take the micro-batches of a stage together.
_TURNS = np.array([0, 1, 1, 2], dtype=np.int8)


def alternate(
    n: int, warm_up: ArrayLike, w_delay: ArrayLike | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Return ``n`` forwards and ``n`` backwards: a warm-up, then one of each, then a cool-down.

    Backward ``k`` comes right after forward ``warm_up + k``, if there is one, and else after the
    backward before it. With ``w_delay``, backwards are split: W number ``k`` comes right after I
    number ``k + w_delay``, and W without such an I come last. Both may have one number a device.

    Returns
    -------
    ops, k
        Operation of each action, and its number among those of its kind; shape ``(2 * n,)``, or
        ``(3 * n,)`` with split backwards. With several devices, one row each.
    """
    first = np.asarray(warm_up, dtype=np.int32)
    delays = {Op.F: np.zeros_like(first), Op.B: first}
    if w_delay is not None:
        last = first + np.asarray(w_delay, dtype=np.int32)
        delays = {Op.F: np.zeros_like(first), Op.I: first, Op.W: last}
    ops = np.repeat(np.array(list(delays), dtype=np.int8), n)
    k = np.tile(np.arange(n, dtype=np.int32), len(delays))
    turn = k + np.repeat(np.stack(list(delays.values()), axis=-1), n, axis=-1)
    order = np.argsort(turn, axis=-1, kind="stable")
    return ops[order], k[order]


def checked_merged(merged: object) -> Merged:
    """Return ``merged`` as an option of a schedule."""
    if isinstance(merged, bool | np.bool_):
        return bool(merged)
    if merged == "delayed_w":
        return "delayed_w"
    raise ArgumentError(
        f'merged must be False, True, or "delayed_w" for W after merged F and I, got {merged!r:.60}'
    )


def merged_orders(
    n: int, warm_up: Ints, merged: Merged, w_delay: Ints | None = None
) -> tuple[NDArray[Any], ...]:
    """Return orders as `alternate` does, and which F run as one action with the backward after it.

    The warm-up has one forward more, so that no pair needs its own forward: ``warm_up`` is that of
    devices without pairs, one number a device. Without ``merged`` there are orders alone.
    """
    if not merged:
        return alternate(n, warm_up, w_delay)
    later = np.minimum(warm_up + 1, n)
    ops, k = alternate(n, later, np.zeros_like(later) if merged == "delayed_w" else None)
    return ops, k, (ops == Op.F) & (k >= later[:, None])


def alternating_schedule(
    name: str, n_devices: int, n_microbatches: int, warm_up_per_hop: int, *, split: bool = False,
    merged: Merged = False,
) -> Schedule:  # fmt: skip
    """Build a schedule of one stage a device, whose forwards and backwards alternate.

    The warm-up of each device has ``warm_up_per_hop`` forwards more than that of the next device;
    the last one has none. With ``split``, backwards are I and W, and device ``i`` runs its W
    ``warm_up_per_hop * i`` turns after their I. With ``merged``, orders are `merged_orders`.
    """
    if split or merged == "delayed_w":
        check_schedule(name, 3 * n_devices * n_microbatches)

    placement, devices = Placement.linear(n_devices), np.arange(n_devices, dtype=np.int32)
    delays = warm_up_per_hop * devices
    ops, microbatches, *pairs = merged_orders(
        n_microbatches, delays[::-1], merged, delays if split else None
    )
    stages = np.broadcast_to(devices[:, None], ops.shape)
    columns = zip(ops, stages, microbatches, *pairs, strict=True)
    return Schedule.from_columns(name, placement, n_microbatches, columns)


def same_on_all_devices(
    name: str, n_devices: int, n_microbatches: int, n_chunks: int, ops: NDArray[Any],
    chunks: NDArray[Any], microbatches: NDArray[Any],
) -> Schedule:  # fmt: skip
    """Build a schedule of looped chunks, of which each device runs the same order of its own."""
    return Schedule.from_columns(
        name,
        Placement.looped(n_devices, n_chunks),
        n_microbatches,
        ((ops, chunks * n_devices + device, microbatches) for device in range(n_devices)),
    )


def number_microbatches(ops: NDArray[Any], stages: NDArray[Any]) -> NDArray[np.int32]:
    """Return the micro-batch of each action of devices whose stages take them in order.

    The forwards of a stage take the micro-batches one by one, and so do its backwards, B and I
    counted together. Its W follow its I. The actions of one stage are in their order.
    """
    n_turns = 3 * (int(stages.max(initial=-1)) + 1)
    of_turn = CSR.group(3 * stages.astype(np.int32, copy=False) + _TURNS[ops], n_turns)
    number = np.arange(len(ops), dtype=np.int32)
    number -= np.repeat(of_turn.ptr[:-1], np.diff(of_turn.ptr))
    op = ops[of_turn.values]
    number[op == Op.W] = number[op == Op.I]
    microbatches = np.empty_like(number)
    microbatches[of_turn.values] = number
    return microbatches


def expand_phases(phases: Iterable[Phase]) -> NDArray[np.int8]:
    """Return operation, chunk, and whether it is overlapped with the next, of each action.

    Shape ``(3, n_actions)``.

    >>> expand_phases([("F0", 2), ("F0&B1", 1)]).tolist()
    [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 0]]
    """
    codes = np.frombuffer(b"".join(_codes(actions) * times for actions, times in phases), np.int8)
    return np.stack([codes >> 2, codes >> 1 & 1, codes & 1])


def v_shaped_columns(phases: Sequence[Iterable[Phase]]) -> list[tuple[NDArray[Any], ...]]:
    """Return the columns of devices that hold two stages each in V shape, given their phases.

    Chunk 0 is the stage on the way down, chunk 1 that on the way up. The columns of each device are
    ops, stages, microbatches and overlapped, as `Schedule.from_columns` takes them.
    """
    devices = [expand_phases(rows) for rows in phases]
    ends = np.cumsum([columns.shape[1] for columns in devices])
    ops, chunks, overlapped = np.concatenate(devices, axis=1)
    device = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))
    stages = np.where(chunks == 0, device, 2 * len(ends) - 1 - device)
    del device
    columns = ops, stages, number_microbatches(ops, stages), overlapped
    return list(zip(*(np.split(column, ends[:-1]) for column in columns), strict=True))


@lru_cache(maxsize=256)
def _codes(actions: str) -> bytes:
    """Return one repetition of a phase, a byte an action.

    Its bits are those of the operation, then one for the chunk, and one for whether the action is
    overlapped with the next.
    """
    return bytes(
        Op[action[0]] << 2 | int(action[1]) << 1 | (k < pair.count("&"))
        for pair in actions.split()
        for k, action in enumerate(pair.split("&"))
    )
