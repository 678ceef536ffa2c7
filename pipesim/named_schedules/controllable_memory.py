"""V-Min and V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362).

Each device has two stages, one on the way down the devices and one on the way up. The longer a
device holds the activations of one stage, the shorter it holds those of the other, so that all
devices hold equally many.

A building block gives the times at which F and I of one micro-batch run. It is repeated every 6
units, which are the F, I and W of two stages. The spans from F to I bound the activations held.
The repeated block is then squeezed by list scheduling:

- each device runs the next F or I of the block as soon as it is ready;
- W runs when nothing else is ready;
- F runs before its turn if memory and the block's number of micro-batches in flight allow it.

The paper calls the gradient of the input B; here it is I, as in torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.list_scheduling.limits import checked_costs
from pipesim.list_scheduling.problem import (
    FORWARD,
    WEIGHT,
    action_columns,
    make_problem,
    with_equal_lengths,
)
from pipesim.list_scheduling.scheduler import Ranks, list_orders, scheduled
from pipesim.named_schedules.costed_orders import (
    costed_orders,
    list_lanes,
    shortest_order,
    with_equal_microbatches,
)
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule

#: Units from one micro-batch to the next in the steady state: F, I and W of two stages.
_INTERVAL = 6
_SOURCE = "Controllable Memory, arXiv 2405.15362"


class _BuildingBlock(NamedTuple):
    """Times at which F and I of micro-batch 0 begin on each stage, in units."""

    forward: list[int]
    input_grad: list[int]


def _v_min_block(p: int) -> _BuildingBlock:
    """Return the block in which a micro-batch passes one stage a unit: down, up, and back.

    The gap keeps F and I of a device apart when the block is repeated. Without it the F of one
    stage and the I of the other would be 2p units apart, which is a multiple of 6.
    """
    gap = 2 if p % 3 == 0 else 0
    stages = range(2 * p)
    return _BuildingBlock(list(stages), [4 * p - 1 + gap - s for s in stages])


def _v_half_block(p: int) -> _BuildingBlock:
    """Return the block with two units a stage down the devices and one up, for F and for I.

    The gap is as in `_v_min_block`.
    """
    gap = 3 if p % 2 == 0 else 0
    down, up = range(p), range(p, 2 * p)
    forward = [*(2 * s for s in down), *(p - 1 + s for s in up)]
    last = 3 * p - 1 + gap
    backward = [last + 2 * (2 * p - 1 - s) for s in up]
    return _BuildingBlock(forward, [*(6 * p - 2 + gap - s for s in down), *backward])


def _block_schedule(
    name: str, n_microbatches: int, block: _BuildingBlock, most: int, costs: Costs | None
) -> Schedule:
    """Return the repeated and squeezed block, with at most ``most`` micro-batches on a device.

    It is squeezed for F, I and W of equal length and, given costs, for these in several ways. The
    order that takes least time is returned.
    """
    placement = Placement.v_shaped(len(block.forward) // 2)
    # Micro-batches of the repeated block that are between F and I.
    in_flight = [-(-(end - start) // _INTERVAL) for start, end in zip(*block, strict=True)]

    equal_costs = with_equal_microbatches(checked_costs(costs), n_microbatches)
    counted = replace(equal_costs, activation_bytes=1.0, weight_grad_bytes=1.0)
    problem = make_problem(placement, n_microbatches, counted, True, 2 * most, None)
    equal = with_equal_lengths(problem)
    # F and I at the times of the repeated block, W after all others.
    phase, stage, microbatch = action_columns(problem)
    start = np.where(phase == FORWARD, *(np.array(starts)[stage] for starts in block))
    start = start + _INTERVAL * microbatch
    ranks = Ranks((phase == WEIGHT).astype(float), start, by_arrival=False)
    if costs is None:
        limited = equal._replace(in_flight=np.array(in_flight, float))
        return scheduled(limited, list_orders(limited, ranks), placement, name)
    times = costed_orders(placement, n_microbatches, counted)
    order = list_lanes(equal, ranks, in_flight)
    return times.schedule(shortest_order(times, problem, [ranks], in_flight, order), name)


def _share(idle: int, m: int) -> float:
    """Return the bubble of devices that are idle for ``idle`` units."""
    return idle / (_INTERVAL * m + idle)


def _v_half_idle(p: int, m: int) -> int:
    """Return the units in which a device of V-Half is idle; found by simulation."""
    if p == 1:
        return 0
    if p % 2:
        return max(3 * p - 4, 4 * p - 3 - 2 * m)
    return max(3 * p - 7, 1, 4 * p - 5 - (2 * m if m > 1 else 0))


@register(
    "v_min",
    label="V-Min",
    summary="V-shaped; a third of 1F1B's activations",
    source=_SOURCE,
    bubble=ClosedForm(
        "i/(6m+i), i = 4p-5, or 4p-7 if 3 | p and m > 1; 0 if p = 1",
        lambda p, m: _share(max(0, 4 * p - 5 - (2 if p % 3 == 0 and m > 1 else 0)), m),
    ),
    activations=ClosedForm("min(m, floor((p+4)/3))", lambda p, m: min(m, (p + 4) // 3)),
)
def v_min(n_devices: int, n_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Build V-Min: the fewest activations that V-shaped building blocks allow.

    Three devices, two micro-batches, F, I and W of equal length; cells begin with the stage::

        device 0 | 0F0 0F1 ..  ..  ..  5F0 5I0 5W0 ..  5F1 5I1 0I0 0W0 5W1 ..  0I1 0W1
        device 1 | ..  1F0 1F1 ..  4F0 ..  ..  4I0 4F1 4W0 1I0 4I1 1W0 4W1 1I1 1W1 ..
        device 2 | ..  ..  2F0 3F0 2F1 3F1 ..  ..  3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1 ..

    A device holds at most ``floor((p + 4) / 3)`` micro-batches, counted until W. For F, I and W of
    equal length and free transfers it is idle for ``4p - 5`` of them, or ``4p - 7``, of stages of
    ``1 / 2p`` of the model: about ``2p / 3m`` of its work.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    costs
        Seconds of F, I, W and messages, one number or one for each of the ``2p`` stages. The
        block is then squeezed for these seconds with several priorities and numbers of
        micro-batches in flight, and the shortest order is returned. It takes no more time than
        that for equal F, I and W, and no more memory, counted in micro-batches. Of costs that
        differ between micro-batches, the averages count.
    """
    block = _v_min_block(n_devices)
    return _block_schedule("v_min", n_microbatches, block, (n_devices + 4) // 3, costs)


@register(
    "v_half",
    label="V-Half",
    summary="V-shaped; half of 1F1B's activations",
    source=_SOURCE,
    bubble=ClosedForm(
        "i/(6m+i), i = 3p-4, or max(1, 3p-7) if 2 | p; more if m < p/2; 0 if p = 1",
        lambda p, m: _share(_v_half_idle(p, m), m),
    ),
    activations=ClosedForm("min(m, floor((p+2)/2))", lambda p, m: min(m, (p + 2) // 2)),
)
def v_half(n_devices: int, n_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Build V-Half: half of the activations of 1F1B, and a smaller bubble than `v_min`'s.

    Two devices, three micro-batches, F, I and W of equal length; cells begin with the stage::

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 0W1 0I2 3W2 0W2 ..
        device 1 | ..  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    A device holds at most ``floor((p + 2) / 2)`` micro-batches, counted until W. For F, I and W of
    equal length, free transfers and enough micro-batches it is idle for ``3p - 4`` of them, or
    ``3p - 7`` for an even ``p > 2``, of stages of ``1 / 2p`` of the model: about ``p / 2m`` of its
    work.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    costs
        As for `v_min`.
    """
    block = _v_half_block(n_devices)
    return _block_schedule("v_half", n_microbatches, block, (n_devices + 2) // 2, costs)
