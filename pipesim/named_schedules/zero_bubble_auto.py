"""ZB-1p and ZB-2p: automatic zero-bubble schedules (arXiv 2401.10241, section 3).

A list scheduler orders F, I and W for the given costs, F before I before W. It has two free
parameters: the number of micro-batches in flight on each device, which shapes the warm-up, and the
smallest gap that a W may fill. As in the paper, several values are tried and simulated, and the
order whose slowest device needs the least time is kept. The order for F, I and W of equal length
is tried too. It is taken if all others have a longer span or makespan, so that costs never make an
order worse.

The paper calls the gradient of the input B; here it is I, as in torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.errors import CostsWarning
from pipesim.list_scheduling.limits import check_weight_bytes, checked_costs
from pipesim.list_scheduling.order_by import PRIORITIES
from pipesim.list_scheduling.problem import (
    Problem,
    first_values,
    make_problem,
    with_equal_lengths,
    with_microbatches,
)
from pipesim.named_schedules.costed_orders import (
    CostedOrders,
    Score,
    costed_orders,
    list_lanes,
    with_equal_microbatches,
)
from pipesim.order_search import LaneOrder, meets
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.caller_warnings import warn_caller
from pipesim.utils.texts import Bytes

# Variants: numbers of micro-batches in flight, and patience of W

#: Forwards in flight on a device for each device after it: 1 in ZB-H1, 2 in ZB-H2.
_SLOPES = (2.0, 1.0, 2.25, 2.5, 1.5)
#: Least gap before the next F or I that a W may start in, as a share of the seconds of W.
_PATIENCE = (0.0, 0.75, 0.3, 0.5, 1.0)
#: Micro-batches a device on which variants are compared; with more, orders only repeat themselves.
_COMPARED = 4
#: Number of variants that are compared with all micro-batches, if a score is not to be exceeded.
_FINALISTS = 4
_ROUNDING = 1e-9

#: Micro-batches in flight on each device, and patience of W.
_Variant = tuple[tuple[float, ...], float]


def best_variant(
    problem: Problem, times: CostedOrders, longest: Score | None = None
) -> LaneOrder | None:
    """Return the order with the shortest span; None if all are worse than ``longest``.

    Variants are compared by ``times`` of the same costs. The order may exceed neither span nor
    makespan of ``longest``.
    """
    m = problem.n_microbatches
    compared = min(m, _COMPARED * problem.n_devices)
    fewer = with_microbatches(problem, compared)
    ranked = _ranked(fewer, times.with_microbatches(compared), longest)
    make_order = _order_maker(problem)
    if longest is None:
        return make_order(ranked[0])
    orders = sorted(map(make_order, ranked[:_FINALISTS]), key=times.quick_score)
    return next((x for x in orders if times.score(x).is_no_worse(longest)), None)


def _ranked(problem: Problem, times: CostedOrders, longest: Score | None) -> list[_Variant]:
    """Return variants with different orders, the best first; the first one among equals."""
    make_order = _order_maker(problem)
    goal = _least_span(problem)
    scores: dict[bytes, tuple[Score, int, _Variant]] = {}
    for number, variant in enumerate(_variants(problem)):
        order = make_order(variant)
        if (key := order.lanes.tobytes()) in scores:
            continue
        score = times.quick_score(order)
        scores[key] = score, number, variant
        if meets(score.span, goal) and (longest is None or score.is_no_worse(longest)):
            break
    return [variant for _, _, variant in sorted(scores.values(), key=lambda row: row[:2])]


def _order_maker(problem: Problem) -> Callable[[_Variant], LaneOrder]:
    ranks = PRIORITIES["forward_first"](problem)
    return lambda variant: list_lanes(problem, ranks, *variant)


def _variants(problem: Problem) -> Iterator[_Variant]:
    seconds = first_values(problem, problem.seconds).reshape(3, -1)
    forward, backward, _ = seconds.mean(axis=1).tolist()
    after = np.arange(problem.n_devices)[::-1]
    slopes = list(_SLOPES)
    if forward > 0:  # as many as the device can run until its first I is ready
        slopes.insert(0, (forward + backward) / forward)
    tried = set()
    for slope, patience in itertools.product(slopes, _PATIENCE):
        most = np.minimum(1 + np.floor(slope * after + _ROUNDING), problem.n_microbatches)
        places = tuple(most.tolist())
        if (places, patience) not in tried:
            tried.add((places, patience))
            yield places, patience


def _least_span(problem: Problem) -> float:
    """Return a lower bound on the longest span: work, and the wait for the first I (s).

    The wait begins when the device's memory is full.
    """
    m, held = problem.n_microbatches, first_values(problem, problem.f_bytes)
    forward, backward, weight = first_values(problem, problem.seconds).reshape(3, -1)
    places = np.full(problem.n_devices, m)
    holds = held > 0
    places[holds] = np.minimum(m, problem.limits[holds] / held[holds] + _ROUNDING)
    first = np.cumsum((forward + backward)[::-1])[::-1] - backward
    wait = np.maximum(0, first - places * forward)
    return float((m * (forward + backward + weight) + wait).max())


# The schedules

_SOURCE = "Zero Bubble, arXiv 2401.10241"

Limit = Bytes | Sequence[Bytes]


def _automatic_schedule(
    name: str,
    p: int,
    m: int,
    costs: Costs | None,
    memory_limit: Limit | None,
    activation_limit: Limit | None,
    factor: int,
) -> Schedule:
    """Return the best order within the limits; by default that of ``factor * p`` micro-batches."""
    equal_costs = with_equal_microbatches(checked_costs(costs), m)
    check_weight_bytes(equal_costs, p)
    counted = _with_bytes(equal_costs, p)
    held = counted.per_stage("activation_bytes", p)
    if memory_limit is not None and not np.any(equal_costs.activation_bytes):
        if activation_limit is None and not _has_static_bytes(equal_costs):
            activation_limit, memory_limit = memory_limit, None
            warn_caller(
                "memory_limit counts micro-batches here, as the costs have no bytes; give "
                "activation_limit, which means the same: in the next release memory_limit is bytes",
                FutureWarning,
            )
        else:
            warn_caller(
                "memory_limit limits no activations: the costs have no activation_bytes; give "
                "them, or activation_limit as a number of micro-batches",
                CostsWarning,
            )
    is_free = activation_limit is None and (
        memory_limit is None or not np.any(equal_costs.activation_bytes)
    )
    with np.errstate(over="ignore", invalid="ignore"):  # `make_problem` refuses infinite sums
        limits = factor * p * held if is_free else activation_limit
        if is_free and memory_limit is not None:  # of parameters alone
            make_problem(Placement.linear(p), m, equal_costs, True, None, None, memory_limit)
            memory_limit = None
        problem = make_problem(Placement.linear(p), m, counted, True, limits, None, memory_limit)
    times = costed_orders(Placement.linear(p), m, counted)
    # The order for F, I and W of equal length, which costs must not make worse.
    places = np.divide(problem.limits, held, out=np.full(p, math.inf), where=held > 0)
    equal = with_equal_lengths(problem)._replace(limits=places)
    order = best_variant(equal, times.with_equal_lengths())
    assert order is not None  # as there is no longest score
    if costs is not None:
        order = best_variant(problem, times, times.score(order)) or order
    return times.schedule(order, name)


def _has_static_bytes(costs: Costs) -> bool:
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    return any(np.any(getattr(costs, name) or 0.0) for name in names)


def _with_bytes(costs: Costs, p: int) -> Costs:
    """Return the costs; without any bytes of activations, bytes that count micro-batches.

    If W holds more bytes than F takes, the bytes of W count from the start, as in `order_by`.
    """
    held, kept = (costs.per_stage(f"{name}_bytes", p) for name in ("activation", "weight_grad"))
    if held.any():
        return replace(costs, activation_bytes=tuple(np.maximum(held, kept).tolist()))
    return replace(costs, activation_bytes=1.0, weight_grad_bytes=1.0)


def _bubble(p: int, m: int) -> float:
    """Return the idle share of the makespan for F, I and W of equal length."""
    makespan = max(3 * m + p - 1, 2 * m + 2 * p - 1)
    return (makespan - 3 * m) / makespan


_BUBBLE = ClosedForm("1 - 3m/max(3m+p-1, 2m+2p-1)", _bubble)


@register(
    "zb_1p",
    label="ZB-1p",
    summary="automatic zero-bubble schedule in the memory of 1F1B",
    source=_SOURCE,
    bubble=_BUBBLE,
    activations=ClosedForm("min(p, m)", lambda p, m: min(p, m)),
)
def zb_1p(
    n_devices: int,
    n_microbatches: int,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    activation_limit: Limit | None = None,
) -> Schedule:
    """Build ZB-1p: as few bubbles as the memory of 1F1B allows.

    Three devices, six micro-batches, F, I and W of equal length::

        device 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
        device 1 | .. F0 F1 F2 I0 W0 I1 W1 F3 I2 W2 F4 I3 W3 F5 I4 W4 I5 W5 ..
        device 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5

    For these costs and ``m >= p`` a device is idle for ``p - 1`` of them in all.

    Variants are compared as in the paper: by the time of the slowest device, from the start of its
    first F to the end of its last W. Devices that begin one after the other may thus also end one
    after the other. Equal variants are compared by the makespan.

    Parameters
    ----------
    n_devices, n_microbatches
        Any positive counts; fewer micro-batches than devices are allowed.
    costs
        Seconds of F, I, W and messages, and bytes of activations. Without ``weight_grad_bytes``
        W holds no bytes. By default F, I and W take equally long, and messages no time. Of costs
        that differ between micro-batches, averages of seconds and the largest bytes count;
        `Schedule.with_microbatch_order` gives the order of micro-batches.
    memory_limit
        All bytes that a device may hold, as in `pipesim.order_by`; None (the default) for the
        limit of activations alone.
    activation_limit
        Bytes of activations that a device may hold, one number or one a device; by default those
        of ``n_devices`` micro-batches, unless there is a ``memory_limit``. If the costs have no
        ``activation_bytes``, the unit is micro-batches, from F to W.

    Warns
    -----
    CostsWarning
        If the costs have ``activation_bytes`` and no ``weight_grad_bytes``, or no bytes of
        activations that a ``memory_limit`` could limit.
    FutureWarning
        For a ``memory_limit`` of costs without bytes, which still counts micro-batches.
    """
    return _automatic_schedule(
        "zb_1p", n_devices, n_microbatches, costs, memory_limit, activation_limit, 1
    )


@register(
    "zb_2p",
    label="ZB-2p",
    summary="automatic zero-bubble schedule in twice the memory of 1F1B",
    source=_SOURCE,
    bubble=_BUBBLE,
    activations=ClosedForm("min(2p, m)", lambda p, m: min(2 * p, m)),
)
def zb_2p(
    n_devices: int,
    n_microbatches: int,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    activation_limit: Limit | None = None,
) -> Schedule:
    """Build ZB-2p: twice the memory of 1F1B, and hardly a bubble.

    Three devices, six micro-batches, F, I and W of equal length::

        device 0 | F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
        device 1 | .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
        device 2 | .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5

    For these costs and ``m >= 2p - 1`` no device is idle between its first F and its last W. The
    makespan still has a bubble, since devices begin one after the other.

    Parameters
    ----------
    n_devices, n_microbatches, costs, memory_limit, activation_limit
        As for `zb_1p`, but the limit is by default that of ``2 * n_devices`` micro-batches.
    """
    return _automatic_schedule(
        "zb_2p", n_devices, n_microbatches, costs, memory_limit, activation_limit, 2
    )
