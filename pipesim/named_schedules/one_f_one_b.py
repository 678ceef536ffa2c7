"""1F1B with a flush, and eager 1F1B, which runs forwards ahead of time.

1F1B: PipeDream-flush, arXiv 2006.09503, section 2.2; Megatron-LM, arXiv 2104.04473.
"""

from __future__ import annotations

import math

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, wrong_type
from pipesim.named_schedules.patterns import Merged, alternating_schedule, checked_merged
from pipesim.named_schedules.vocabulary_parallel import vocabulary_parallel_1f1b
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule

_BUBBLE = ClosedForm("(p-1)/(m+p-1)", lambda p, m: (p - 1) / (m + p - 1))


def _own_bubble(
    p: int, m: int, merged: Merged = False, vocabulary_parallel: bool | Costs = False
) -> float:
    if vocabulary_parallel:
        return math.nan
    idle = (p - 1) * (2 if checked_merged(merged) == "delayed_w" else 3)
    return idle / (3 * m + idle)


@register(
    "1f1b",
    label="1F1B",
    summary="one forward, one backward: as few activations as the depth needs",
    source="PipeDream-flush, arXiv 2006.09503",
    bubble=ClosedForm(
        "(p-1)/(m+p-1); 2(p-1)/(3m+2(p-1)) with delayed W",
        _own_bubble,
        assumes="a merged pair takes as long as both",
    ),
    activations=ClosedForm(
        "min(p, m); min(2p, m) merged; min(p+2, m) with vocabulary parallelism",
        lambda p, m, merged=False, vocabulary_parallel=False: min(
            2 * p if checked_merged(merged) else p + 2 * bool(vocabulary_parallel), m
        ),
    ),
)
def one_f_one_b(
    n_devices: int,
    n_microbatches: int,
    merged: Merged = False,
    vocabulary_parallel: bool | Costs = False,
) -> Schedule:
    """Build the 1F1B order.

    Three devices, four micro-batches, B as long as F::

        device 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        device 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        device 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Device ``i`` runs ``min(p - 1 - i, m)`` forwards as its warm-up, then alternates one forward
    and one backward, then runs the backwards that are left. For stages of equal cost and free
    transfers: makespan ``(m + p - 1)(f + b)``, bubble ``(p - 1)/(m + p - 1)``, and device ``i``
    holds the activations of at most ``min(p - i, m)`` micro-batches.

    With ``merged=True``, each F after the warm-up runs as one action with the B that follows it, so
    that exchanges of experts of one run behind the compute of the other. The two must not need each
    other, and the gradient of a pair comes at its end: device ``i`` runs ``2(p - 1 - i) + 1``
    forwards as its warm-up, and holds the activations of ``min(2(p - i), m)`` micro-batches. If a
    pair takes ``o`` seconds, no less than F or B, the makespan is ``(m - 1) o + p (f + b)``. Orders
    are those of "1F1B with overlap" of github.com/Victarry/PP-Schedule-Visualization, and on one
    device those of Megatron-LM's ``--overlap-moe-expert-parallel-comm``. With ``"delayed_w"``, the
    pair is F and I, and W comes right after it (``--delay-wgrad-compute``).

    With ``vocabulary_parallel``, embedding and LM head are divided over all devices (Yeung et al.,
    arXiv 2411.05288, algorithm 1). Stages are a graph: 0 to ``p - 1`` are slices of the embedding,
    ``p`` to ``2p - 1`` have the layers, ``2p`` to ``3p - 1`` are slices of the head, one a device
    each, and ``3p`` on the last device joins their statistics to the loss. Between F and B of the
    last layers come F and B of all head slices, the paper's S and T. Each runs one period after
    what it needs, so that messages hide: device ``i`` holds ``p - i + 2`` micro-batches. With equal
    devices, free transfers and these costs, the idle time of a device is that of 1F1B, ``(p - 1)(f
    + b)``, exactly on two devices if B is no shorter than F, and at most about one period of F, B,
    S and T more on others, for any number of micro-batches.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    merged
        ``True`` for pairs of F and B, ``"delayed_w"`` for pairs of F and I; False (the default) for
        none.
    vocabulary_parallel
        Costs of the ``3p + 1`` stages, whose seconds decide where S and T stand between F and B, as
        in the paper (two orders are simulated, for fast and for slow messages); or ``True``, for B
        of twice F and a vocabulary that takes no time. False (the default) for a chain of stages.
    """
    merged = checked_merged(merged)
    if not isinstance(vocabulary_parallel, bool | np.bool_ | Costs):
        raise wrong_type(
            "vocabulary_parallel", "True, False or a pipesim.Costs", vocabulary_parallel
        )
    if vocabulary_parallel:
        if merged:
            raise ArgumentError(
                "merged actions are for 1F1B without vocabulary_parallel; leave one of the two out"
            )
        costs = vocabulary_parallel if isinstance(vocabulary_parallel, Costs) else None
        return vocabulary_parallel_1f1b(n_devices, n_microbatches, costs)
    warm_up_per_hop = 2 if merged else 1
    return alternating_schedule(
        "1f1b", n_devices, n_microbatches, warm_up_per_hop=warm_up_per_hop, merged=merged
    )


@register(
    "eager_1f1b",
    label="eager 1F1B",
    summary="1F1B with twice the warm-up: hides communication, at the price of memory",
    source="Zhuang et al., arXiv 2211.05322; DAPPLE, arXiv 2007.01045, policy B",
    bubble=_BUBBLE,
    activations=ClosedForm("min(2p-1, m)", lambda p, m: min(2 * p - 1, m)),
)
def eager_1f1b(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the eager 1F1B order: messages travel while devices compute.

    Three devices, four micro-batches, B as long as F::

        device 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
        device 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
        device 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    Device ``i`` runs ``2(p - 1 - i) + 1`` forwards before its first backward, where 1F1B runs
    ``p - i``. Then it alternates one backward and one forward. A message thus has the time of one
    action to travel before the next device needs it. With free transfers the times are those of
    1F1B: makespan ``(m + p - 1)(f + b)``. Device ``i`` holds ``min(2(p - 1 - i) + 1, m)``
    micro-batches.
    """
    return alternating_schedule("eager_1f1b", n_devices, n_microbatches, warm_up_per_hop=2)
