"""ZB-1p and ZB-2p: automatic zero-bubble schedules (arXiv 2401.10241, section 3).

A list scheduler orders F, I and W for the given costs, F before I before W. It has two free
parameters: the number of micro-batches in flight on each device, which shapes the warm-up, and the
smallest gap that a W may fill. As in the paper, several values are tried and simulated, and the
order whose slowest device needs the least time is kept. The order for F, I and W of equal length
is tried too, and taken if its makespan is less, so that costs never make an order worse.

The paper calls the gradient of the input B; here it is I, as in torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from pipesim.costs.costs import Costs
from pipesim.list_scheduling.argument_checks import (
    check_weight_bytes,
    checked_costs,
    checked_limits,
)
from pipesim.list_scheduling.order_by import list_schedule
from pipesim.named_schedules.shortest import shortest, simulate_order
from pipesim.ops import SCHEDULED
from pipesim.scheduling.placement import linear
from pipesim.scheduling.registry import ClosedForm, register
from pipesim.scheduling.schedule import Schedule

__all__ = ["zb_1p", "zb_2p"]

_SOURCE = "Zero Bubble, arXiv 2401.10241"
#: Forwards in flight on a device for each device after it: 1 in ZB-H1, 2 in ZB-H2.
_SLOPES = (2.0, 1.0, 2.25, 2.5, 1.5)
#: Least gap before the next F or I that a W may start in, as a share of the seconds of W.
_PATIENCE = (0.0, 0.75, 0.3, 0.5, 1.0)
#: Micro-batches a device on which variants are compared; with more, orders only repeat themselves.
_COMPARED = 4
_ROUNDING = 1e-9

Limit = float | Sequence[float]


class _Variant(TypedDict):
    in_flight: list[int]
    patience: float


@dataclass(frozen=True)
class _OrderInputs:
    """Name, devices and costs of an order; ``limits`` are bytes, one a device."""

    name: str
    n_devices: int
    costs: Costs
    limits: list[float]

    def order(self, n_microbatches: int, variant: _Variant) -> Schedule:
        return list_schedule(
            linear(self.n_devices),
            n_microbatches,
            self.costs,
            priority="forward_first",
            memory_limit=self.limits,
            name=self.name,
            **variant,
        )


def _automatic_schedule(
    name: str, p: int, m: int, costs: Costs | None, memory_limit: Limit | None, factor: int
) -> Schedule:
    """Return the best order within the limit; by default that of ``factor * p`` micro-batches."""
    check_weight_bytes(checked_costs(costs), p)
    counted = _with_bytes(checked_costs(costs), p)
    held = counted.per_stage("activation_bytes", p)
    with np.errstate(over="ignore", invalid="ignore"):  # `list_schedule` refuses infinite sums
        user_limit = factor * p * held if memory_limit is None else memory_limit
        limits = checked_limits(user_limit, linear(p), held)
        places = np.divide(limits, held, out=np.full(p, math.inf), where=held > 0)
        by_costs = _best_order(_OrderInputs(name, p, counted, limits), m)
    if costs is None:
        return by_costs
    equal = _with_bytes(checked_costs(None), p)
    return shortest(
        [by_costs, _best_order(_OrderInputs(name, p, equal, places.tolist()), m)], counted
    )


def _best_order(inputs: _OrderInputs, m: int) -> Schedule:
    """Return the order of the best variant."""
    compared = min(m, _COMPARED * inputs.n_devices)
    variant, schedule = _best_variant(inputs, compared)
    return schedule if compared == m else inputs.order(m, variant)


def _best_variant(inputs: _OrderInputs, m: int) -> tuple[_Variant, Schedule]:
    """Return the variant of the shortest span, and its order; the first one among equals."""
    goal = _least_span(inputs, m) * (1 + _ROUNDING)
    scores: dict[bytes, tuple[float, float]] = {}
    least, best = (math.inf, math.inf), None
    for variant in _variants(inputs, m):
        schedule = inputs.order(m, variant)
        columns = schedule.op.tobytes() + schedule.microbatch.tobytes()
        if columns in scores:
            continue
        scores[columns] = _score(schedule, inputs.costs)
        if best is None or scores[columns] < least:
            least, best = scores[columns], (variant, schedule)
        if least[0] <= goal:
            break
    assert best is not None  # there is a first variant
    return best


def _with_bytes(costs: Costs, p: int) -> Costs:
    """Return the costs; without any bytes of activations, bytes that count micro-batches.

    If W holds more bytes than F takes, the bytes of W count from the start, as in `order_by`.
    """
    held, kept = (costs.per_stage(f"{name}_bytes", p) for name in ("activation", "weight_grad"))
    if held.any():
        return replace(costs, activation_bytes=tuple(np.maximum(held, kept).tolist()))
    return replace(costs, activation_bytes=1.0, weight_grad_bytes=1.0)


def _variants(inputs: _OrderInputs, m: int) -> Iterator[_Variant]:
    """Yield the values to try: micro-batches in flight on each device, and patience of W."""
    costs, p = inputs.costs, inputs.n_devices
    forward, backward = (costs.per_stage(name, p).mean() for name in ("forward", "input_grad"))
    after = np.arange(p)[::-1]
    slopes = list(_SLOPES)
    if forward > 0:  # as many as the device can run until its first I is ready
        slopes.insert(0, (forward + backward) / forward)
    tried = set()
    for slope, patience in itertools.product(slopes, _PATIENCE):
        places = np.minimum(1 + np.floor(slope * after + _ROUNDING), m).astype(int).tolist()
        if (key := (*places, patience)) not in tried:
            tried.add(key)
            yield {"in_flight": places, "patience": patience}


def _score(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """Return the longest span of a device, first start to last end, and the makespan (s)."""
    timeline = simulate_order(schedule, costs)
    first, last = np.full(schedule.n_devices, math.inf), np.zeros(schedule.n_devices)
    compute = timeline.graph.is_op(SCHEDULED)
    np.minimum.at(first, timeline.graph.device[compute], timeline.start[compute])
    np.maximum.at(last, timeline.graph.device[compute], timeline.end[compute])
    return float((last - first).max()), timeline.makespan


def _least_span(inputs: _OrderInputs, m: int) -> float:
    """Return a lower bound on the longest span: work, and the wait for the first I (s).

    The wait begins when the device's memory is full.
    """
    p = inputs.n_devices
    forward, backward, weight, held = (
        inputs.costs.per_stage(name, p)
        for name in ("forward", "input_grad", "weight_grad", "activation_bytes")
    )
    places = np.full(p, m)
    holds = held > 0
    places[holds] = np.minimum(m, np.array(inputs.limits)[holds] / held[holds] + _ROUNDING)
    first = np.cumsum((forward + backward)[::-1])[::-1] - backward
    wait = np.maximum(0, first - places * forward)
    return float((m * (forward + backward + weight) + wait).max())


def _bubble(p: int, m: int) -> float:
    """Return the idle share of the makespan for F, I and W of equal length."""
    makespan = max(3 * m + p - 1, 2 * m + 2 * p - 1)
    return (makespan - 3 * m) / makespan


_BUBBLE = ClosedForm("1 - 3m/max(3m+p-1, 2m+2p-1)", _bubble)


@register(
    "zb_1p",
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
        W holds no bytes. By default F, I and W take equally long, and messages no time.
    memory_limit
        Bytes of activations that a device may hold, one number or one a device; by default those
        of ``n_devices`` micro-batches. If the costs have no ``activation_bytes``, the unit is
        micro-batches, from F to W.

    Raises
    ------
    ArgumentError
        If a device's limit is too small for one micro-batch.

    Warns
    -----
    CostsWarning
        If the costs have ``activation_bytes`` and no ``weight_grad_bytes``.
    """
    return _automatic_schedule("zb_1p", n_devices, n_microbatches, costs, memory_limit, 1)


@register(
    "zb_2p",
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
    n_devices, n_microbatches, costs, memory_limit
        As for `zb_1p`, but the limit is by default that of ``2 * n_devices`` micro-batches.

    Raises
    ------
    ArgumentError
        If a device's limit is too small for one micro-batch.

    Warns
    -----
    CostsWarning
        As for `zb_1p`.
    """
    return _automatic_schedule("zb_2p", n_devices, n_microbatches, costs, memory_limit, 2)
