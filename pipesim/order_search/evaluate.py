"""Start and end of each task of an order, whether the order keeps the memory limits; objectives."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search.lane_order import LaneOrder, first_tasks, rows_of
from pipesim.order_search.problem import OrderProblem
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

Floats = NDArray[np.float64]


class Times(NamedTuple):
    """Times of an order's tasks (s), in the order of ``LaneOrder.lanes``.

    In a deadlock, they are NaN for tasks that never start, and makespan and span are infinity.
    """

    start: Floats
    end: Floats
    makespan: float  # end of the last device, its STEPs included
    span: float  # longest time of a device from its first start to its last end, without STEPs


def evaluate(problem: OrderProblem, order: LaneOrder) -> Times:
    """Return when the tasks of an order run: rules 1 to 4 of docs/time.md.

    They are the times of `pipesim.simulate` if no link is shared by several channels, and
    launches take no time.
    """
    lanes, ptr, _ = order
    start, end = np.full(len(lanes), np.nan), np.full(len(lanes), np.nan)
    done = np.zeros(len(problem.count), dtype=np.int64)
    first = first_tasks(problem)
    ready = np.zeros(len(lanes))
    channel_free = np.zeros(int(problem.channel.max(initial=-1)) + 1)
    receiver, row = receivers(problem), rows_of(problem, order.microbatches)
    _evaluate(problem, lanes, ptr, receiver, row, first, start, end, done, ready, channel_free)
    if np.isnan(end).any():
        return Times(start, end, np.inf, np.inf)
    full = np.diff(ptr) > 0
    begin, finish = start[ptr[:-1][full]], end[ptr[1:][full] - 1]
    makespan = float((finish + problem.tail[full]).max(initial=0.0))
    return Times(start, end, makespan, float((finish - begin).max(initial=0.0)))


def receivers(problem: OrderProblem) -> Ints:
    """Return the lane of another stage that needs each lane's data, -1 for none."""
    receiver = np.full(len(problem.count), -1, dtype=np.int64)
    lanes = np.flatnonzero(problem.needs[:, 0] >= 0)
    receiver[problem.needs[lanes, 0]] = lanes
    return receiver


def fill_times(
    problem: OrderProblem,
    lanes: Ints,
    ptr: Ints,
    receiver: Ints,
    row: Ints,
    first: Ints,
    start: Floats,
    end: Floats,
    done: Ints,
    ready: Floats,
    channel_free: Floats,
) -> None:
    """Fill start and end; tasks of a deadlock keep theirs.

    ``first`` numbers the first task of each lane, and ``row`` has the row of each. ``done`` counts
    the tasks of each lane that have ended. ``ready[first[lane] + k]`` is when the data of a task
    arrives.
    """
    seconds, needs, latency, hold, channel = (
        problem.seconds, problem.needs, problem.latency, problem.hold, problem.channel,
    )  # fmt: skip
    position, free = ptr[:-1].copy(), np.zeros(problem.n_devices)
    progress = True
    while progress:
        progress = False
        for device in range(problem.n_devices):
            for task in range(position[device], ptr[device + 1]):
                lane = lanes[task]
                number = done[lane]
                data, own = needs[lane, 0], needs[lane, 1]
                if (data >= 0 and done[data] <= number) or (own >= 0 and done[own] <= number):
                    break
                begin = max(free[device], ready[first[lane] + number])
                finish = begin + seconds[row[first[lane] + number]]
                start[task], end[task], free[device] = begin, finish, finish
                done[lane] = number + 1
                to = receiver[lane]
                if to >= 0:
                    arrival, other = finish, first[to] + number
                    c = channel[to, 0]
                    if c >= 0:
                        channel_free[c] = max(channel_free[c], finish) + hold[row[other], 0]
                        arrival = channel_free[c] + latency[row[other], 0]
                    ready[other] = arrival
                position[device] = task + 1
                progress = True


_evaluate = kernel()(fill_times)


def keeps_limit(problem: OrderProblem, order: LaneOrder) -> bool:
    """Return whether each device holds at most the bytes of its limit.

    It depends on the order of each device alone, and not on times.
    """
    return bool((peak_bytes(problem, order) <= problem.limit).all())


def peak_bytes(problem: OrderProblem, order: LaneOrder) -> Floats:
    """Return the most bytes that the tasks of each device hold; shape ``(n_devices,)``.

    The sum is that of `Timeline.memory.peak`, number by number.
    """
    peak, row = np.zeros(problem.n_devices), rows_of(problem, order.microbatches)
    _peak_bytes(problem, order.lanes, order.ptr, row, first_tasks(problem), peak)
    return peak


def fill_peaks(
    problem: OrderProblem, lanes: Ints, ptr: Ints, row: Ints, following: Ints, peak: Floats
) -> None:
    """Fill the most bytes of each device; ``following`` is the first task of each lane."""
    for device in range(problem.n_devices):
        held = 0.0
        for task in range(ptr[device], ptr[device + 1]):
            lane = lanes[task]
            own = row[following[lane]]
            following[lane] += 1
            during = held + problem.allocated[own]
            peak[device] = max(peak[device], during + problem.workspace[own])
            held = during - problem.released[own]


_peak_bytes = kernel()(fill_peaks)


# Comparison of orders: the objectives, and when a time meets a lower bound.

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")

#: Relative error of sums of seconds: times that differ by less are equal.
ROUNDING = 1e-9


def meets(value: float, bound: float) -> bool:
    """Return whether a time is at most another (s), such as a lower bound, up to rounding."""
    return value <= bound * (1.0 + ROUNDING)


def checked_bound(bound: float, value: float, source: str) -> float:
    """Return a lower bound that is at most a time that an order reaches (s).

    A bound that is above the time by more than rounding is false, and proves nothing: raise
    `AssertionError`. ``source`` says where it is from.
    """
    if bound > value * (1.0 + ROUNDING):
        raise AssertionError(
            f"the lower bound of {source} is {bound!r} s, but an order takes {value!r} s. This is "
            "an error in pipesim; please report it with the placement, costs and arguments"
        )
    return min(bound, value)
