"""The arrays of a local search: lanes with offsets to their needs, and the current order.

The tasks of a lane have consecutive numbers: task ``first[lane] + k`` is of its k-th micro-batch.
So a task finds the tasks that it needs, and those that need it, by the offsets of its lane.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.order_search.evaluate import receivers
from pipesim.order_search.lane_order import LaneOrder, occurrences, rows_of
from pipesim.order_search.problem import OrderProblem, has_equal_microbatches
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]


class Lanes(NamedTuple):
    """Lanes, and the limits of their devices.

    Attributes
    ----------
    device
        As in `OrderProblem`; shape ``(n_lanes,)``.
    seconds, allocated, workspace
        As in `OrderProblem`; shape ``(n_rows,)``.
    source, receiver, own
        Offset from a task to the task whose data it needs, to the task that needs its data, and to
        the F or I of its stage that it needs; 0 for none. Shape ``(n_lanes,)``.
    latency
        Seconds of the latency of the message from ``source``, of each row.
    hold, channel
        Message to the ``receiver``: seconds for which it holds its channel, of each row, and the
        channel of each lane; -1 for none.
    net
        Bytes allocated less bytes released, of each row.
    lane, row
        Lane and row of each task; shape ``(n_tasks,)``.
    ptr
        Positions ``ptr[d]`` to ``ptr[d + 1]`` are device ``d``'s.
    sender
        Device that sends on each channel; empty if no message holds its channel.
    limit, tail
        As in `OrderProblem`; shape ``(n_devices,)``.
    """

    device: Ints
    seconds: Floats
    allocated: Floats
    workspace: Floats
    source: Ints
    receiver: Ints
    own: Ints
    latency: Floats
    hold: Floats
    channel: Ints
    net: Floats
    lane: Ints
    row: Ints
    ptr: Ints
    sender: Ints
    limit: Floats
    tail: Floats


class State(NamedTuple):
    """The current order, its times, and what a kernel needs to change it and to undo a change.

    Attributes
    ----------
    task, position
        Task at each position, and position of each task; shape ``(n_tasks,)``.
    start, sent
        Start of each task, and when its message has left its channel; without message its end (s).
    held, rest
        Bytes that the device holds before each position, and seconds of its tasks from there on.
    sequence, rank
        All tasks in an order in which times can be computed, and the place of each task there.
    changed, old_start, old_sent
        Tasks whose times were computed by the last change, in that order, and their times before.
    next, free, channel_free
        Next position of each device, when the device is free, and when the channel is (s).
    stack, is_stacked
        Devices that may go on.
    critical
        Tasks of a longest path.
    best
        Task at each position of the best order.
    counts
        Length of ``critical``, state of the random numbers, evaluations, accepted changes.
    values
        Current value of the objective, that of the best order, first and last temperature.
    """

    task: Ints
    position: Ints
    start: Floats
    sent: Floats
    held: Floats
    rest: Floats
    sequence: Ints
    rank: Ints
    changed: Ints
    old_start: Floats
    old_sent: Floats
    next: Ints
    free: Floats
    channel_free: Floats
    stack: Ints
    is_stacked: Ints
    critical: Ints
    best: Ints
    counts: Ints
    values: Floats


def first_tasks(problem: OrderProblem) -> Ints:
    """Return the first task of each lane; shape ``(n_lanes,)``."""
    first: Ints = np.cumsum(problem.count) - problem.count
    return first


def lanes_of(problem: OrderProblem, order: LaneOrder) -> Lanes:
    """Return the lanes of a problem, with offsets between their tasks, and rows for an order."""
    n_lanes, first = len(problem.count), first_tasks(problem)
    source, own = problem.needs.T
    receiving = np.flatnonzero(source >= 0)
    hold, channel = np.zeros((len(problem.hold) // n_lanes, n_lanes)), np.full(n_lanes, -1)
    hold[:, source[receiving]] = problem.hold[:, 0].reshape(hold.shape)[:, receiving]
    channel[source[receiving]] = problem.channel[receiving, 0]
    sender = np.zeros(int(channel.max(initial=-1)) + 1 if hold.any() else 0, dtype=np.int64)
    if len(sender):
        sender[channel[channel >= 0]] = problem.device[channel >= 0]

    lane = np.repeat(np.arange(n_lanes), problem.count)

    def offset(lanes: Ints) -> Ints:
        return np.where(lanes >= 0, first[lanes] - first, 0)

    return Lanes(
        device=problem.device,
        seconds=problem.seconds,
        allocated=problem.allocated,
        workspace=problem.workspace,
        source=offset(source),
        receiver=offset(receivers(problem)),
        own=offset(own),
        latency=problem.latency[:, 0].copy(),
        hold=hold.ravel(),
        channel=channel if len(sender) else np.full_like(channel, -1),
        net=problem.allocated - problem.released,
        lane=lane,
        row=lane if has_equal_microbatches(problem) else rows_of(problem, order.microbatches),
        ptr=order.ptr,
        sender=sender,
        limit=problem.limit,
        tail=problem.tail,
    )


def new_state(problem: OrderProblem, order: LaneOrder, seed: int) -> State:
    """Return the state of an order, without times."""
    n, n_devices = len(order.lanes), problem.n_devices
    n_channels = int(problem.channel.max(initial=-1)) + 1
    task = first_tasks(problem)[order.lanes] + occurrences(order.lanes)
    position = np.empty(n, dtype=np.int64)
    position[task] = np.arange(n)

    def ints(size: int) -> Ints:
        return np.zeros(size, dtype=np.int64)

    return State(
        task=task,
        position=position,
        start=np.zeros(n),
        sent=np.zeros(n),
        held=np.zeros(n),
        rest=np.zeros(n),
        sequence=ints(n),
        rank=ints(n),
        changed=ints(n),
        old_start=np.zeros(n),
        old_sent=np.zeros(n),
        next=ints(n_devices),
        free=np.zeros(n_devices),
        channel_free=np.zeros(n_channels),
        stack=ints(n_devices),
        is_stacked=ints(n_devices),
        critical=ints(n),
        best=task.copy(),
        counts=np.array([0, 1 + (seed * 2654435761 + 12345) % (2**32 - 1), 0, 0]),
        values=np.zeros(4),
    )


def order_of_state(
    problem: OrderProblem, task: Ints, ptr: Ints, microbatches: Ints | None = None
) -> LaneOrder:
    """Return an order of tasks as one of lanes."""
    lane = np.repeat(np.arange(len(problem.count)), problem.count)
    return LaneOrder(lane[task], ptr, microbatches)
