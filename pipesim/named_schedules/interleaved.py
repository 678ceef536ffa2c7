"""Schedules of looped stages: ``v`` chunks a device, each a ``v``-th of the device's layers.

- interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2), also with F and B merged
- interleaved 1F1B with split backwards (Zero Bubble, arXiv 2401.10241)
- interleaved 1F1B in smaller groups of micro-batches: GIS, GIS-H (PipeOffload, arXiv 2503.01328)
- breadth-first (Lamy-Poirier, arXiv 2211.05953)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipesim.errors import ArgumentError, check_count
from pipesim.named_schedules.patterns import (
    Merged,
    checked_merged,
    merged_orders,
    number_microbatches,
    same_on_all_devices,
)
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, Counts, register
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints


def _round_size(p: int, m: int) -> int:
    """Return the number of micro-batches that pass a chunk before any passes the next chunk."""
    return m // max(1, m // p)


def _looped_idle(p: int, m: int, n_chunks: int) -> int:
    """Return the idle time of a device, in forwards and backwards of a chunk."""
    return max(p - 1, check_count("n_chunks", n_chunks) * (p - m) + m - 1)


def _looped_bubble(p: int, m: int, n_chunks: int = 2) -> float:
    idle = _looped_idle(p, m, n_chunks)
    return idle / (n_chunks * m + idle)


def _split_bubble(p: int, m: int, n_chunks: int = 2) -> float:
    check_count("n_chunks", n_chunks)
    idle = p - 1 + n_chunks * max(0, p - m) + (n_chunks - 1) * max(0, p - 2 * m)
    return idle / (3 * n_chunks * m + idle)


def _activations(
    p: int, m: int, n_chunks: int, of_last_chunk: int, group_size: int | None = None
) -> float:
    """Return the activations of device 0, whose warm-up is the longest.

    ``of_last_chunk``: its activations of the last chunk, once it holds a round of all others.
    """
    size = group_size or _round_size(p, m)
    return min((n_chunks - 1) * size + of_last_chunk, n_chunks * m) / n_chunks


_ROUNDS = Counts(
    "numbers of micro-batches that max(1, m // p) rounds share evenly, such as multiples of p, "
    "and any up to 2p - 1",
    lambda p, m: m % max(1, m // p) == 0,
)


def _merged_bubble(p: int, m: int, n_chunks: int = 2, merged: Merged = False) -> float:
    if checked_merged(merged) != "delayed_w":
        return _looped_bubble(p, m, n_chunks)
    idle = 2 * _looped_idle(p, m, n_chunks) - (n_chunks - 1) * max(0, min(m, p - m))
    return idle / (3 * n_chunks * m + idle)


def _takes_groups(p: int, m: int, group_size: int | None = None) -> bool:
    if group_size is None:
        return _ROUNDS.allow(p, m)
    rest = m % group_size
    return p <= group_size <= m and (rest == 0 or rest >= p)


@register(
    "interleaved_1f1b",
    label="interleaved 1F1B",
    summary="1F1B over v chunks a device: a bubble v times smaller, v times the messages",
    source="Megatron-LM, arXiv 2104.04473, section 2.2",
    bubble=ClosedForm(
        "x/(vm+x), x = max(p-1, v(p-m)+m-1); "
        "y/(3vm+y) with delayed W, y = 2x - (v-1)max(0, min(m, p-m))",
        _merged_bubble,
        assumes="a merged pair takes as long as both",
    ),
    activations=ClosedForm(
        "min((v-1)r + 2p-1, vm)/v, 2p merged, r = group size or m // max(1, m // p)",
        lambda p, m, n_chunks=2, group_size=None, merged=False: _activations(
            p, m, n_chunks, 2 * p - (not checked_merged(merged)), group_size
        ),
    ),
    counts=Counts(
        f"{_ROUNDS.text}; with group_size, from p to m, any whose remainder m % group_size is 0 or "
        "at least p",
        _takes_groups,
    ),
)
def interleaved_1f1b(
    n_devices: int, n_microbatches: int, n_chunks: int = 2, group_size: int | None = None,
    merged: Merged = False,
) -> Schedule:  # fmt: skip
    """Build the interleaved 1F1B order.

    Two devices of two chunks each, four micro-batches, B as long as F::

        device 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ..  2B2 ..  2B3 0B2 0B3
        device 1 | ..  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ..

    The micro-batches go in rounds of ``r = m // max(1, m // p)``, which is ``p`` if ``p`` divides
    ``m``. Those of a round go through a device's first chunk, then through its next one, and so
    on, before the next round. Backwards do likewise, last chunk first. Device ``i`` runs
    ``(v - 1) r + 2(p - 1 - i)`` forwards as its warm-up, then alternates one forward and one
    backward, as torch.distributed.pipelining does. It holds one activation of a chunk more than
    its warm-up has forwards. For ``m >= p`` the bubble is ``(p - 1)/(v m + p - 1)``.

    ``group_size`` sets ``r``, and the last round has the micro-batches that are left. Larger rounds
    leave messages more time to travel, and hold more activations; the bubble stays.

    ``merged`` is as for `one_f_one_b`: each F after the warm-up, which has one forward more, runs
    as one action with the backward that follows it. NVIDIA trains models with experts in this
    order: the exchanges of a chunk run behind the compute of another micro-batch. If a pair takes
    ``o`` seconds, no less than F or B, and ``m >= p``, the makespan is
    ``v m o + ((v - 1) r + 1)(f + b - o) + (p - 1)(f + b)``.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        A multiple of the number of rounds, ``max(1, m // p)``.
    n_chunks
        Stages of each device.
    group_size
        Micro-batches of a round, ``--microbatch-group-size-per-virtual-pipeline-stage`` of
        Megatron-LM, with its rules: from ``p`` to ``m``, and a last round of at least ``p``.
    merged
        ``True`` for pairs of F and B (``--overlap-moe-expert-parallel-comm``), ``"delayed_w"`` for
        pairs of F and I with W right after them (with ``--delay-wgrad-compute``, which has W of
        all layers but the last within the pair); False (the default) for none.
    """
    if group_size is not None:
        check_count("group_size", group_size)
    size = group_size or _round_size(n_devices, n_microbatches)
    orders = _Rounds(size, 2, merged=checked_merged(merged))
    return _build("interleaved_1f1b", n_devices, n_microbatches, n_chunks, orders)


@register(
    "interleaved_zb",
    label="interleaved ZB",
    summary="interleaved 1F1B whose weight gradients fill the bubble",
    source="Zero Bubble, arXiv 2401.10241; torch.distributed.pipelining, InterleavedZeroBubble",
    bubble=ClosedForm("x/(3vm+x), x = p-1 + v max(0, p-m) + (v-1)max(0, p-2m)", _split_bubble),
    activations=ClosedForm(
        "min((v-1)r + p, vm)/v, r = m // max(1, m // p)",
        lambda p, m, n_chunks=2: _activations(p, m, n_chunks, p),
    ),
    counts=_ROUNDS,
)
def interleaved_zb(n_devices: int, n_microbatches: int, n_chunks: int = 2) -> Schedule:
    """Build the interleaved zero-bubble order.

    Two devices of two chunks each, three micro-batches, I and W as long as F::

        device 0 | 0F0 0F1 0F2 2F0 2F1 ..  2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
        device 1 | ..  1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2

    Rounds are those of `interleaved_1f1b`, but the warm-up of device ``i`` is
    ``(v - 1) r + p - 1 - i``, since gradients come up the pipeline twice as fast. Its W come
    ``i`` turns after their I, which leaves work for the time when the last gradients go up. With
    one chunk a device it is ZB-H1. For ``m >= p`` and F, I, W of equal length the bubble is
    ``(p - 1)/(3 v m + p - 1)``.
    """
    orders = _Rounds(_round_size(n_devices, n_microbatches), 1, np.arange(n_devices))
    return _build("interleaved_zb", n_devices, n_microbatches, n_chunks, orders)


def _group_bubble(p: int, m: int, n_chunks: int = 2, group_size: int | None = None) -> float:
    check_count("n_chunks", n_chunks)
    idle = 2 * (p - 1) + (n_chunks - 1) * (p - (group_size or p))
    return idle / (3 * n_chunks * m + idle)


def _group_activations(p: int, m: int, n_chunks: int = 2, group_size: int | None = None) -> float:
    return min((n_chunks - 1) * (group_size or p) + p, n_chunks * m) / n_chunks


@register(
    "gis",
    label="GIS",
    summary="interleaved 1F1B with W right after I, in groups of g micro-batches",
    source="PipeOffload, arXiv 2503.01328, table 1",
    bubble=ClosedForm("x/(3vm+x), x = 2(p-1) + (v-1)(p-g)", _group_bubble),
    activations=ClosedForm("min((v-1)g + p, vm)/v", _group_activations),
    counts=Counts(
        "multiples of group_size, which is p unless it is given",
        lambda p, m, group_size=None: m % (group_size or p) == 0,
    ),
)
def gis(
    n_devices: int, n_microbatches: int, n_chunks: int = 2, group_size: int | None = None
) -> Schedule:
    """Build the generalized interleaved schedule.

    Two devices of two chunks each, two micro-batches in one group, I and W as long as F::

        device 0 | 0F0 0F1 2F0 2F1 ..  2I0 2W0 ..  2I1 2W1 0I0 0W0 0I1 0W1
        device 1 | ..  1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1 ..

    The micro-batches go in groups of ``g``: those of a group go through a device's first chunk,
    then through its next one, and so on, before the next group. Backwards do likewise, last chunk
    first. Device ``i`` runs ``(v - 1) g + p - 1 - i`` forwards as its warm-up, then a forward, an I
    and a W in turn. It holds one activation of a chunk more than its warm-up has forwards: with
    smaller groups fewer, but then it waits between the chunks of a group.

    For F, I and W of ``f``, ``b`` and ``w`` seconds a chunk, the paper's idle time is
    ``(p - 1)(f + b) + (v - 1)(p - g)(f + b - w)``. With groups of all devices it is exact; with
    smaller ones for W as long as I, and F of at most twice that.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        A multiple of ``group_size``.
    n_chunks
        Stages of each device.
    group_size
        Micro-batches of a group: at least half of the devices, and at most all (the default).
        ``--interleave-group-size`` of the authors' code; `gis_h` has the smallest.
    """
    return _in_groups("gis", n_devices, n_microbatches, n_chunks, group_size or n_devices)


@register(
    "gis_h",
    label="GIS-H",
    summary="GIS in groups of p/2 micro-batches: about half of the activations of 1F1B",
    source="PipeOffload, arXiv 2503.01328, table 1",
    bubble=ClosedForm(
        "x/(3vm+x), x = 2(p-1) + (v-1)(p//2)",
        lambda p, m, n_chunks=2: _group_bubble(p, m, n_chunks, _least_group(p)),
    ),
    activations=ClosedForm(
        "min((v-1)g + p, vm)/v, g = (p+1)//2",
        lambda p, m, n_chunks=2: _group_activations(p, m, n_chunks, _least_group(p)),
    ),
    counts=Counts("multiples of (p+1)//2", lambda p, m: m % _least_group(p) == 0),
)
def gis_h(n_devices: int, n_microbatches: int, n_chunks: int = 2) -> Schedule:
    """Build the generalized interleaved schedule in the smallest groups, ``(p + 1) // 2``.

    Two devices of two chunks each, two micro-batches in groups of one, I and W as long as F::

        device 0 | 0F0 ..  2F0 0F1 ..  2I0 2W0 2F1 0I0 0W0 ..  2I1 2W1 0I1 0W1
        device 1 | ..  1F0 ..  3F0 3I0 3W0 1F1 1I0 1W0 3F1 3I1 3W1 1I1 1W1 ..

    It is `gis` with this ``group_size``. For even ``p`` the fullest device holds ``(v + 1)/(2 v)``
    of the activations of 1F1B.

    Parameters
    ----------
    n_devices, n_chunks
        As for `gis`.
    n_microbatches
        A multiple of ``(p + 1) // 2``.
    """
    n_devices = check_count("n_devices", n_devices)
    return _in_groups("gis_h", n_devices, n_microbatches, n_chunks, _least_group(n_devices))


def _least_group(p: int) -> int:
    """Return the smallest group with which devices never wait for each other forever."""
    return (p + 1) // 2


def _in_groups(name: str, p: int, m: int, n_chunks: int, group_size: int) -> Schedule:
    """Build interleaved 1F1B in groups, with W right after I."""
    least = _least_group(p)
    if not least <= check_count("group_size", group_size) <= p:
        raise ArgumentError(
            f"group_size must be {least}..{p} for {p} devices, got {group_size}; with smaller "
            "groups devices may wait for each other forever, larger ones only take memory"
        )
    orders = _Rounds(group_size, 1, np.zeros(p, dtype=np.int64))
    return _build(name, p, m, n_chunks, orders)


@register(
    "looped_bfs",
    label="looped BFS",
    summary="GPipe over v chunks a device: all micro-batches through one, then the next",
    source="Breadth-first pipeline parallelism, arXiv 2211.05953",
    bubble=ClosedForm("x/(vm+x), x = max(p-1, v(p-m)+m-1)", _looped_bubble),
    activations=ClosedForm("m", lambda p, m: m),
)
def looped_bfs(n_devices: int, n_microbatches: int, n_chunks: int = 2) -> Schedule:
    """Build the looped breadth-first order.

    Two devices of two chunks each, three micro-batches, B as long as F::

        device 0 | 0F0 0F1 0F2 2F0 2F1 2F2 ..  ..  2B2 2B1 2B0 0B2 0B1 0B0
        device 1 | ..  1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0 ..

    All micro-batches go through a device's first chunk, then through its next one. Backwards take
    the opposite order. The weights of a chunk are thus needed in one stretch each way, and its
    gradients can be reduced while the other chunks compute. Every device holds the activations of
    all ``m`` micro-batches, and for ``m >= p`` the bubble is ``(p - 1)/(v m + p - 1)``.

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
    chunks, microbatches = (np.concatenate([x, x[::-1]]) for x in (chunk, microbatch))
    return same_on_all_devices(
        "looped_bfs", n_devices, n_microbatches, n_chunks, ops, chunks, microbatches
    )


class _Rounds(NamedTuple):
    """How interleaved 1F1B orders the micro-batches.

    ``size`` of them pass a chunk before any passes the next chunk. ``per_hop`` is the number of
    forwards that a device's warm-up has more than that of the next device. ``w_delay`` is, of each
    device, the number of I after an I before its W; None for whole backwards. ``merged`` orders
    have no ``w_delay``.
    """

    size: int
    per_hop: int
    w_delay: Ints | None = None
    merged: Merged = False


def _build(name: str, p: int, m: int, n_chunks: int, rounds: _Rounds) -> Schedule:
    n = check_count("n_chunks", n_chunks) * m
    splits = rounds.w_delay is not None or rounds.merged == "delayed_w"
    check_schedule(name, (3 if splits else 2) * p * n)
    rest = m % rounds.size
    whole = np.arange(n - n_chunks * rest) // rounds.size % n_chunks
    chunk = np.concatenate([whole, np.repeat(np.arange(n_chunks), rest)]).astype(np.int32)

    placement, device = Placement.looped(p, n_chunks), np.arange(p, dtype=np.int32)
    warm_up = np.minimum((n_chunks - 1) * rounds.size + rounds.per_hop * (p - 1 - device), n)
    ops, k, *pairs = merged_orders(n, warm_up, rounds.merged, rounds.w_delay)
    stages = np.where(ops == Op.F, chunk[k], n_chunks - 1 - chunk[k]) * p + device[:, None]
    del k  # large
    microbatches = number_microbatches(ops.ravel(), stages.ravel()).reshape(ops.shape)
    columns = zip(ops, stages, microbatches, *pairs, strict=True)
    return Schedule.from_columns(name, placement, m, columns)
