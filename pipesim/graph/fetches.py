"""Fetches: RELOAD and UNSHARD bring data that a compute task needs, and start shortly before it.

A fetch with ``prefetch=k`` needs the compute task that comes k + 1 places before its consumer on
the consumer's device. So it runs while the k tasks before the consumer run::

    prefetch=1   compute | 0B2  1B0  0B3 |      0RELOAD3 needs 0B2,
                 reload  |      0RELOAD3 |      and runs while 1B0 runs

A fetch without such a task starts as soon as its stream and its other dependencies allow. An
UNSHARD also needs the RESHARD of its stage before it, which frees the memory that it gathers into.
"""

from __future__ import annotations

import numpy as np

from pipesim.graph.tasks import Kinds
from pipesim.ops import FETCHES, LISTED, Op
from pipesim.utils.csr import CSR, Ints


def with_fetches(needs: CSR, kinds: Kinds, kind: Ints, prefetch: int) -> CSR:
    """Add to each fetch the compute task that its start waits for.

    Parameters
    ----------
    needs
        Dependencies by the rules. The consumer of a fetch is the first task that needs it.
    kinds, kind
        Kinds, and the kind of each task; tasks of a device's compute stream are in its order.
    prefetch
        Number of compute tasks (F, B, I, W, R) of the device that a fetch may run beside.
    """
    if kinds.ops.isdisjoint(FETCHES):
        return needs
    is_fetch = kinds.is_op(FETCHES)[kind]
    tasks = np.flatnonzero(kinds.is_op(LISTED)[kind])
    tasks = tasks[np.argsort(kinds.device[kind[tasks]], kind="stable")]
    # The halves of an overlapped action share a place: that of its F, which comes first.
    own = kind[tasks]
    is_first = (kinds.overlapped[own] == 0) | (kinds.op[own] == Op.F)
    place = np.full(len(kind), -1, dtype=np.int64)
    place[tasks] = np.cumsum(is_first) - 1
    tasks = tasks[is_first]
    device = kinds.device[kind[tasks]]
    used = np.flatnonzero(is_fetch[needs.values] & (place[needs.rows] >= 0))
    consumer = np.full(len(kind), len(tasks), dtype=np.int64)
    np.minimum.at(consumer, needs.values[used], place[needs.rows[used]])
    rows = np.flatnonzero(consumer < len(tasks))
    before = consumer[rows] - 1 - min(prefetch, len(kind))
    same = before >= np.searchsorted(device, device[consumer[rows]])
    rows, before = rows[same], tasks[before[same]]
    gathers, frees = _freed_before(kinds, kind)
    return CSR.from_pairs(
        np.concatenate([needs.rows, rows, gathers]),
        np.concatenate([needs.values, before, frees]),
        len(kind),
    )


def _freed_before(kinds: Kinds, kind: Ints) -> tuple[Ints, Ints]:
    """Return the UNSHARDs that come after a RESHARD of their stage and replica, and the latter."""
    is_part = kinds.part >= 0
    gathers = (kinds.op == Op.UNSHARD) & is_part
    tasks = np.flatnonzero((gathers | (kinds.op == Op.RESHARD))[kind])
    own = kind[tasks]
    cell = kinds.replica[own] * (int(kinds.stage.max(initial=0)) + 1) + kinds.stage[own]
    order = np.argsort(cell, kind="stable")
    tasks, cell, own = tasks[order], cell[order], own[order]
    pairs = np.flatnonzero(gathers[own[1:]] & ~gathers[own[:-1]] & (cell[1:] == cell[:-1]))
    return tasks[pairs + 1], tasks[pairs]
