"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.2)."""

from __future__ import annotations

import numpy as np

from pipesim.errors import check_count, check_name
from pipesim.ops import Op
from pipesim.scheduling.autograd_engine import engine_order
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule


@register(
    "gpipe",
    label="GPipe",
    summary="all forwards, then all backwards",
    source="GPipe, arXiv 1811.06965",
    bubble=ClosedForm("(p-1)/(m+p-1)", lambda p, m: (p - 1) / (m + p - 1)),
    activations=ClosedForm("m", lambda p, m: m),
)
def gpipe(
    n_devices: int, n_microbatches: int, backward_order: str = "reverse", seed: int = 0
) -> Schedule:
    """Build GPipe's order.

    Three devices, four micro-batches, B as long as F::

        device 0 | F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
        device 1 | .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 ..
        device 2 | .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. ..

    For stages of equal cost and free transfers: makespan ``(m + p - 1)(f + b)``, bubble
    ``(p - 1)/(m + p - 1)``, and every device holds the activations of all ``m`` micro-batches.

    With ``backward_order="autograd"``, B and R as long as F::

        0 | F0 F1 F2 F3 R3 R2 .. .. .. .. B3 R1 B2 R0 B1 B0
        1 | .. F0 F1 F2 F3 R3 R2 R1 R0 B3 B2 B1 B0 .. .. ..

    With ``backward_order="random"`` and ``seed=0``. A device waits for gradients that the next one
    computes in another order, so that the makespan is longer::

        0 | F0 F1 F2 F3 .. .. .. .. .. .. .. B2 .. B0 B1 B3
        1 | .. F0 F1 F2 F3 .. .. .. B3 .. B2 B1 B0 .. .. ..
        2 | .. .. F0 F1 F2 F3 B1 B3 B0 B2 .. .. .. .. .. ..

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts.
    backward_order
        Order of the backwards on each device. No order deadlocks, since the next device sends its
        gradients in any case.

        - ``"reverse"``: last micro-batch first, as in the paper and in torchgpipe.
        - ``"forward"``: first micro-batch first, as in torch.distributed.pipelining.
        - ``"random"``: each device has another order, as if no rule defined it.
        - ``"autograd"``: the order in which torch's engine runs the graph of torchgpipe without
          its dependencies on CPUs. B have the order of ``"reverse"``, and the schedule lists R: on
          the last device all R before the first B, elsewhere each R before the B of the
          micro-batch before it. ``recompute`` of `pipesim.lower` selects the R that are run; by
          default, all. On GPUs the engine has a thread a device, so that the order of R is a race:
          `pipesim.autograd_orders`.
    seed
        Seed of the random orders, a whole number from 0.
    """
    check_name("backward_order", backward_order, ("reverse", "forward", "random", "autograd"))
    if backward_order == "autograd":
        return _autograd_schedule(n_devices, n_microbatches)
    random = np.random.default_rng(check_count("seed", seed, minimum=0))
    forward = np.arange(n_microbatches)
    if backward_order == "random":
        backwards = [random.permutation(n_microbatches) for _ in range(n_devices)]
    else:
        backwards = [forward[::-1] if backward_order == "reverse" else forward] * n_devices
    ops = np.repeat([Op.F, Op.B], n_microbatches)
    return Schedule.from_columns(
        "gpipe",
        Placement.linear(n_devices),
        n_microbatches,
        (
            (ops, np.full(len(ops), device), np.concatenate([forward, backward]))
            for device, backward in enumerate(backwards)
        ),
    )


def _autograd_schedule(n_devices: int, n_microbatches: int) -> Schedule:
    """Build the order of torch's engine, with R of each micro-batch."""
    forward = np.arange(n_microbatches)
    listed: list[list[tuple[int, int]]] = [[] for _ in range(n_devices)]
    for action in engine_order(n_devices, n_microbatches, n_microbatches):
        listed[action.stage].append((action.op, action.microbatch or 0))
    backward = [np.array(actions).T for actions in listed]
    return Schedule.from_columns(
        "gpipe",
        Placement.linear(n_devices),
        n_microbatches,
        (
            (
                np.concatenate([np.full_like(forward, Op.F), ops]),
                np.full(3 * n_microbatches, device),
                np.concatenate([forward, microbatches]),
            )
            for device, (ops, microbatches) in enumerate(backward)
        ),
    )
