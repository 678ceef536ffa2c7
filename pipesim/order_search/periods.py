"""Periods of an order: stretches in which each device runs each of its lanes equally often.

A device holds as many bytes behind a period as before it. So a period can be left out, or
repeated, and only the times change.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search.evaluate import evaluate, fill_peaks, fill_times, receivers
from pipesim.order_search.lane_order import LaneOrder, rows_of
from pipesim.order_search.objective import Objective
from pipesim.order_search.problem import OrderProblem
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]
#: Micro-batches of the periods that are copied.
_LENGTHS = (1, 2, 3, 4, 5, 6, 8)


def periods_of(problem: OrderProblem, order: LaneOrder, length: int) -> Ints:
    """Return where periods of ``length`` micro-batches begin; shape ``(n_periods, n_devices)``.

    A period begins, on each device, at the first position at a moment or later from which the
    device runs each lane ``length`` times; or at the last such position, if all are earlier. There
    is no period if a device has no such position.
    """
    start = evaluate(problem, order).start
    begins = [_begins(problem, order, device, length) for device in range(problem.n_devices)]
    if not all(map(len, begins)):
        return np.empty((0, problem.n_devices), dtype=np.int64)
    moments = np.unique(np.concatenate([start[x] for x in begins]))
    columns = [x[np.minimum(np.searchsorted(start[x], moments), len(x) - 1)] for x in begins]
    return np.unique(np.stack(columns, axis=1), axis=0)


def _begins(problem: OrderProblem, order: LaneOrder, device: int, length: int) -> Ints:
    """Return the positions from which a device runs each of its lanes ``length`` times."""
    first, last = order.ptr[device], order.ptr[device + 1]
    own = np.flatnonzero(problem.device == device)
    n_tasks = length * len(own)
    if n_tasks > last - first:
        return np.empty(0, dtype=np.int64)
    counts = np.zeros((last - first + 1, len(own)), dtype=np.int64)
    np.cumsum(order.lanes[first:last, None] == own, axis=0, out=counts[1:])
    is_even = (counts[n_tasks:] - counts[:-n_tasks] == length).all(axis=1)
    begins: Ints = first + np.flatnonzero(is_even)
    return begins


def period_copy(
    problem: OrderProblem,
    order: LaneOrder,
    objective: Objective,
    n_pairs: int,
    random: np.random.Generator,
) -> LaneOrder | None:
    """Return the best order that leaves out a period of another order, and repeats a second one.

    A local search improves one part of the steady state at a time. A copy carries a gain to
    another part. The length of both is random. None: no order that was tried runs and keeps the
    limits.

    Parameters
    ----------
    problem, order
        Lanes, and an order of them.
    objective
        ``"makespan"`` or ``"span"``.
    n_pairs
        Pairs of periods that are tried.
    random
        Generator of the length and of the pairs.
    """
    length = int(random.choice(_LENGTHS))
    begins = periods_of(problem, order, length)
    if len(begins) < 2:
        return None
    size = length * np.bincount(problem.device, minlength=problem.n_devices)
    pairs = random.integers(len(begins), size=(n_pairs, 2))
    best = np.empty_like(order.lanes)
    value = best_copy(
        problem, order.lanes, order.ptr, receivers(problem), rows_of(problem, order.microbatches),
        begins, size, pairs, objective == "span", best,
    )  # fmt: skip
    return order._replace(lanes=best) if value < math.inf else None


def _copy(lanes: Ints, ptr: Ints, left_out: Ints, repeated: Ints, size: Ints, other: Ints) -> bool:
    """Fill an order without one period, and with another one twice; return whether it is new."""
    is_new = False
    for device in range(len(size)):
        n, first, second = size[device], left_out[device], repeated[device]
        if first > second:
            first += n
        for position in range(ptr[device], ptr[device + 1]):
            # Place in the order that repeats a period and leaves nothing out.
            place = position if position < first else position + n
            other[position] = lanes[place if place < second + n else place - n]
            is_new |= other[position] != lanes[position]
    return is_new


def _value(problem: OrderProblem, ptr: Ints, start: Floats, end: Floats, span: bool) -> float:
    """Return the objective (s), infinity for a deadlock."""
    value = 0.0
    for device in range(problem.n_devices):
        first, last = ptr[device], ptr[device + 1] - 1
        if first <= last:
            if np.isnan(end[last]):
                return math.inf
            value = max(value, end[last] + (-start[first] if span else problem.tail[device]))
    return value


@kernel(fill_times, fill_peaks, _copy, _value)
def best_copy(
    problem: OrderProblem,
    lanes: Ints,
    ptr: Ints,
    receiver: Ints,
    row: Ints,
    begins: Ints,
    size: Ints,
    pairs: Ints,
    span: bool,
    best: Ints,
) -> float:
    """Fill the best order; return its objective (s), infinity if none keeps the limits."""
    least, n_tasks = math.inf, len(lanes)
    other, done = np.empty_like(lanes), np.zeros_like(problem.count)
    first = np.cumsum(problem.count) - problem.count
    start, end, ready = np.zeros(n_tasks), np.zeros(n_tasks), np.zeros(n_tasks)
    channel_free, peak = np.zeros(problem.channel.size), np.zeros(problem.n_devices)
    for k in range(len(pairs)):
        if not _copy(lanes, ptr, begins[pairs[k, 0]], begins[pairs[k, 1]], size, other):
            continue
        end[:], done[:], ready[:], channel_free[:], peak[:] = np.nan, 0, 0.0, 0.0, 0.0
        fill_times(problem, other, ptr, receiver, row, first, start, end, done, ready, channel_free)
        value = _value(problem, ptr, start, end, span)
        if value < least:
            done[:] = first
            fill_peaks(problem, other, ptr, row, done, peak)
            if (peak <= problem.limit).all():
                least = value
                best[:] = other
    return least
