"""1F1B with vocabulary parallelism: embedding and LM head are divided over all devices.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288,
algorithm 1. Each device has a slice of the vocabulary. Its stages are the rows of that slice in the
embedding, layers, and that slice of the LM head. F of a head slice is the paper's pass S: logits of
its tokens, and each row's largest logit and sum of exponentials. A last stage, the loss, joins
these statistics, and its B sends back what each slice's gradient needs. B of a head slice is the
pass T. The embedding's slices are the paper's input layers.
"""

from __future__ import annotations

import math
from itertools import accumulate

from pipesim.costs.costs import Costs
from pipesim.lowering.lower import lower
from pipesim.ops import Op
from pipesim.scheduling.memory_checks import check_schedule, check_stages
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.simulation.simulate import predict_timeline

#: Micro-batches that a device holds more than in 1F1B: one for each of the two times that all
#: devices wait for each other, before and after T.
_EXTRA_IN_FLIGHT = 2
#: Seconds of F and B without costs.
_FORWARD, _BACKWARD = 1.0, 2.0
_ROUNDING = 1e-9


def vocabulary_placement(n_devices: int) -> Placement:
    """Return the stages of a vocabulary that is divided over ``p`` devices.

    Stages 0 to p-1 are slices of the embedding, p to 2p-1 have the layers, 2p to 3p-1 are slices of
    the LM head, one a device each. Stage 3p, the loss, is on the last device.
    """
    p = n_devices
    check_stages(3 * p + 1)
    slices = range(p)
    edges = [(k, p) for k in slices]
    edges += [(p + k, p + k + 1) for k in slices[:-1]]
    edges += [(2 * p - 1, 2 * p + k) for k in slices]
    edges += [(2 * p + k, 3 * p) for k in slices]
    return Placement([*slices, *slices, *slices, p - 1], edges=edges)


def vocabulary_parallel_1f1b(p: int, m: int, costs: Costs | None = None) -> Schedule:
    """Build 1F1B with vocabulary parallelism; `one_f_one_b` has the order in words.

    Each period of the steady state has F, B, S and T of one micro-batch on each device. F and B
    move along the devices as in 1F1B. S and T of a micro-batch run at one time on all devices, so
    that seconds decide between which F and B of a device they are: after B of a micro-batch on the
    last device, those of devices before it come later by the seconds of B, counted in periods of F
    and B. If messages are slow, periods that have S and T too may be better: the two orders are
    simulated, and the shorter one is returned.

    Without costs, B takes twice as long as F, and the vocabulary no time.
    """
    check_schedule("1f1b", (6 * p + 2) * m)
    placement = vocabulary_placement(p)
    forward, backward, periods = [_FORWARD] * p, [_BACKWARD] * p, [_FORWARD + _BACKWARD]
    mean = None if costs is None else costs.averaged()
    if mean is not None:
        n = placement.n_stages
        both = [mean.per_stage(name, n).tolist() for name in ("forward", "backward")]
        forward, backward = (seconds[p : 2 * p] for seconds in both)
        busy = [0.0] * p
        for stage, device in enumerate(placement.device_of):
            busy[device] += both[0][stage] + both[1][stage]
        periods = [max(map(sum, zip(forward, backward, strict=True))), max(busy)]
    # Seconds from B on the last device to B on each device.
    later = list(accumulate(reversed(backward[1:]), initial=0.0))[::-1]
    # T before the first B of each device: those that begin by then, and one that would wait for
    # longer behind B than the F that the last device runs meanwhile.
    schedules = {}
    for period in periods:
        first_t = [
            2 + math.floor((seconds - forward[-1]) / period + _ROUNDING) if period else 2
            for seconds in later[:-1]
        ] + [1]
        orders = [_device_order(device, p, m, first_t) for device in range(p)]
        schedules[tuple(first_t)] = Schedule.from_columns("1f1b", placement, m, orders)
    first, *others = schedules.values()
    if mean is None or not others:
        return first
    return min(
        (first, *others), key=lambda own: predict_timeline(lower(own, step="none"), mean).makespan
    )


def _device_order(
    device: int, p: int, m: int, first_t: list[int]
) -> tuple[list[Op], list[int], list[int]]:
    """Return operations, stages and micro-batches of a device; those beyond ``m`` are left out.

    ``first_t`` is the number of T before the first B, one a device.
    """
    embedding, layers, head, loss = device, p + device, 2 * p + device, 3 * p
    ops: list[Op] = []
    stages: list[int] = []
    microbatches: list[int] = []
    done: dict[tuple[Op, int], int] = {}

    def run(op: Op, stage: int, last: int) -> None:
        """List an operation of micro-batches up to ``last``."""
        first = done.get((op, stage), 0)
        count = min(last + 1, m) - first
        if count > 0:
            ops.extend([op] * count)
            stages.extend([stage] * count)
            microbatches.extend(range(first, first + count))
            done[op, stage] = first + count

    def vocabulary(k: int) -> None:
        """List T of micro-batch ``k`` and S of the next, with the embedding of one each way."""
        run(Op.B, head, k)
        run(Op.F, head, k + 1)
        run(Op.F, embedding, k - first_t[0] + p + _EXTRA_IN_FLIGHT + 1)
        run(Op.B, embedding, k - first_t[0] - 1)

    def join(k: int) -> None:
        """List the loss, if the device has it."""
        if device == p - 1:
            run(Op.F, loss, k)
            run(Op.B, loss, k)

    in_flight = p - device + _EXTRA_IN_FLIGHT
    for k in range(in_flight):  # warm-up
        run(Op.F, embedding, k + device + 1)
        if k == in_flight - 2:
            run(Op.F, head, 0)
        elif k == in_flight - 1:
            vocabulary(0)
        run(Op.F, layers, k)
        join(k - in_flight + _EXTRA_IN_FLIGHT)
    for k in range(1, first_t[device]):
        vocabulary(k)
    for k in range(m):
        run(Op.B, layers, k)
        vocabulary(k + first_t[device])
        run(Op.F, layers, k + in_flight)
        join(k + 2)
    run(Op.B, embedding, m - 1)
    return ops, stages, microbatches
