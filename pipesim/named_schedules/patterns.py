"""What orders share: turns of one forward and one backward, and the numbering of micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.ops import Op

__all__ = ["in_turns", "numbered"]


def in_turns(
    n: int, warm_up: int, weights_late: int | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Return ``n`` forwards and ``n`` backwards: a warm-up, one of each in turn, a cool-down.

    Parameters
    ----------
    n
        Number of forwards.
    warm_up
        Forwards before the turn of the first backward, which has a forward of its own: backward
        ``k`` comes right after forward ``warm_up + k``, if there is one.
    weights_late
        Split the backwards: W number ``k`` comes right after I number ``k + weights_late``, and
        those left over come last.

    Returns
    -------
    ops, k
        The operation, and which of its kind it is; shape ``(2 * n,)``, or ``(3 * n,)`` if split.
    """
    kinds = {Op.F: 0, Op.B: warm_up}
    if weights_late is not None:
        kinds = {Op.F: 0, Op.I: warm_up, Op.W: warm_up + weights_late}
    ops = np.repeat(np.array(list(kinds), dtype=np.int8), n)
    k = np.tile(np.arange(n, dtype=np.int32), len(kinds))
    turn = k + np.repeat(np.array(list(kinds.values()), dtype=np.int32), n)
    order = np.argsort(turn, kind="stable")
    return ops[order], k[order]


def numbered(ops: NDArray[Any], stages: NDArray[Any]) -> NDArray[np.int32]:
    """Return the micro-batch of each action of a device whose stages take them in order.

    The forwards of a stage take them one by one, and so do its backwards, B and I counted
    together. Its W follow its I.
    """
    microbatches = np.empty(len(ops), dtype=np.int32)
    for stage in np.unique(stages):
        of_stage = stages == stage
        for some in ((Op.F,), (Op.B, Op.I)):
            mine = of_stage & np.isin(ops, some)
            microbatches[mine] = np.arange(np.count_nonzero(mine))
        microbatches[of_stage & (ops == Op.W)] = microbatches[of_stage & (ops == Op.I)]
    return microbatches
