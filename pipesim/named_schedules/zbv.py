"""ZB-V: split backwards on stages in V shape (Qi et al., arXiv 2405.15362 and 2401.10241)."""

from __future__ import annotations

from dataclasses import replace

from pipesim.costs.costs import Costs
from pipesim.list_scheduling.limits import checked_costs
from pipesim.list_scheduling.problem import make_problem
from pipesim.named_schedules.costed_orders import (
    costed_orders,
    shortest_order,
    with_equal_microbatches,
)
from pipesim.named_schedules.patterns import Phase, v_shaped_columns
from pipesim.order_search import lane_order
from pipesim.scheduling.memory_checks import check_schedule
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule


def _bubble(p: int, m: int) -> float:
    idle = max(p - 1, 2 * (2 * p - 1 - m))  # in forwards of a chunk
    return idle / (6 * m + idle)


@register(
    "zbv",
    label="ZB-V",
    summary="split backwards on stages in V shape: the idle time of ZB-H2, the memory of 1F1B",
    source="arXiv 2405.15362; Zero Bubble, arXiv 2401.10241, section 6",
    bubble=ClosedForm("x/(6m+x), x = max(p-1, 2(2p-1-m))", _bubble),
    activations=ClosedForm("min(p, m)", lambda p, m: min(p, m)),
)
def zbv(n_devices: int, n_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Build the ZB-V order.

    Two devices of two chunks each, three micro-batches, I and W as long as F::

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ..
        device 1 | ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Stage ``i`` and stage ``2p - 1 - i`` are on device ``i``. The loss is thus on the device where
    micro-batches start, and its backward follows at once. For ``m >= 2p - 1`` and F, I, W of equal
    length no device idles between its first task and its last. Each device then holds ``2p``
    activations of a chunk, which are those of ``p`` micro-batches.

    Parameters
    ----------
    n_devices
        Any positive count.
    n_microbatches
        Any positive count. Fewer than ``2p - 1`` take the order of ``2p - 1``, without the
        micro-batches that do not exist.
    costs
        Seconds of F, I, W and messages, one number or one for each of the ``2p`` stages. The list
        scheduler and a short local search then look for an order that takes less time than the one
        above. It holds no more activations, counted in micro-batches. By default the order above.
        Of costs that differ between micro-batches, the averages count.
    """
    p, m = n_devices, n_microbatches
    schedule = _handmade(p, m)
    return schedule if costs is None else _ordered_for(schedule, checked_costs(costs))


def _ordered_for(schedule: Schedule, costs: Costs) -> Schedule:
    """Return an order of less makespan within the memory of the schedule, or the schedule."""
    p, m, placement = schedule.n_devices, schedule.n_microbatches, schedule.placement
    costs = with_equal_microbatches(costs, m)
    counted = replace(costs, activation_bytes=1.0, weight_grad_bytes=1.0)
    problem = make_problem(placement, m, counted, True, 2 * p, None)
    times = costed_orders(placement, m, costs)
    in_flight = [2 * p - 1 - min(s, 2 * p - 2) for s in range(2 * p)]
    first = lane_order(times.problem, schedule)
    return times.schedule(shortest_order(times, problem, [], in_flight, first), schedule.name)


def _handmade(p: int, m: int) -> Schedule:
    """Return the order for F, I and W of equal length."""
    check_schedule("zbv", 6 * p * max(m, 2 * p - 1))

    devices = v_shaped_columns([_phases(i, p, max(m, 2 * p - 1)) for i in range(p)])
    if m < 2 * p - 1:
        devices = [tuple(column[columns[2] < m] for column in columns) for columns in devices]
    return Schedule.from_columns("zbv", Placement.v_shaped(p), m, devices)


def _phases(i: int, p: int, m: int) -> list[Phase]:
    """Return the phases of device ``i``, for at least ``2p - 1`` micro-batches."""
    return [
        ("F0", 2 * (p - i) - 1),  # until the first micro-batch is back from the V's other end
        ("F1 F0", i),
        ("F1 I1 W1", p - i),
        ("F0 I0 W0 F1 I1 W1", m - (2 * p - 1 - i)),
        ("I0 W0 F1 I1 W1", p - 1 - i),
        ("I0 I1", i),  # the devices below wait for these: W can wait
        ("I0 W0", p - i),
        ("W1", i),
        ("W0", i),
    ]
