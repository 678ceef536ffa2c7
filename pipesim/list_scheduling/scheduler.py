"""A list scheduler: each free device starts the first of the actions that are ready and fit.

The scheduler keeps a clock, to know when actions are ready. It returns orders without times:
engines compute when actions run. Its loop is compiled, but runs as Python for a user's priority.
"""

from __future__ import annotations

import math
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.memory_admission import (
    HeldBytes,
    count_backward,
    count_forward,
    new_held_bytes,
)
from pipesim.list_scheduling.problem import WEIGHT, Problem, action_columns, operations
from pipesim.list_scheduling.queues import (
    Queues,
    Ranks,
    add,
    make_ready,
    new_queues,
    start_ready,
)
from pipesim.list_scheduling.selection import HELPERS, NONE, Progress, choose
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import available, kernel

T = TypeVar("T")
Floats = NDArray[np.float64]


def list_orders(problem: Problem, ranks: Ranks, patience: float = 0.0) -> tuple[Ints, Ints]:
    """Return the order of each device.

    A free device starts the action of lowest rank among those that are ready and fit.

    - An F fits if `is_safe` allows its bytes, and if fewer than ``in_flight`` micro-batches are
      in flight on its stage.
    - A W takes the rank of an F that needs its room. Otherwise it starts only if no F or I that is
      known to come has to wait for more than ``1 - patience`` of its seconds.

    No limit can make devices wait for each other forever: the oldest micro-batch that has not
    passed the whole pipeline always finds room, and a place in flight is reserved for it
    (`pipesim.list_scheduling.selection`).

    Returns
    -------
    actions, ptr
        Device ``d`` runs ``actions[ptr[d]:ptr[d + 1]]``.
    """
    n_copies, n_actions = len(problem.home), len(problem.lane)
    n_of_device = np.bincount(problem.home[problem.lane % n_copies], minlength=problem.n_devices)
    ptr = np.append(0, np.cumsum(n_of_device))
    progress = Progress(
        free=np.zeros(problem.n_devices),
        wake=np.full(problem.n_devices, math.inf),
        n_in_flight=np.zeros(n_copies, int),
        started=np.zeros(problem.lane_ptr[n_copies], bool),
        next_in_order=np.zeros(n_copies, int),
        end=ptr[:-1].copy(),
        order=np.zeros(n_actions, int),
    )
    queues, memory = new_queues(problem), new_held_bytes(problem)
    if isinstance(ranks.score, np.ndarray) and available():
        _run(problem, ranks, patience, progress, queues, memory)
        return progress.order, ptr
    progress = _with_lists(progress)
    _run.function(
        _with_lists(problem), _with_lists(ranks), patience, progress, _with_lists(queues),
        _with_lists(memory),
    )  # fmt: skip
    return np.array(progress.order), ptr


def scheduled(
    problem: Problem, orders: tuple[Ints, Ints], placement: Placement, name: str
) -> Schedule:
    """Return the result of `list_orders` as a schedule."""
    actions, ptr = orders
    phase, stage, microbatch = (column[actions] for column in action_columns(problem))
    return Schedule(
        name=name,
        placement=placement,
        n_microbatches=problem.n_microbatches,
        op=np.array(operations(problem), np.int8)[phase],
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
        ptr=ptr.astype(np.int64),
    )


def _with_lists(table: T) -> T:
    """Return a NamedTuple with lists in place of its arrays, for loops that run as Python."""
    assert isinstance(table, tuple)
    fields = (value.tolist() if isinstance(value, np.ndarray) else value for value in table)
    return cast(T, type(table)(*fields))


def _arrive(
    problem: Problem, ranks: Ranks, progress: Progress, queues: Queues, lane: int, number: int,
    time: float,
) -> None:  # fmt: skip
    """Add the action of a lane's micro-batch, which will be ready at ``time`` (s)."""
    add(queues, ranks, lane, problem.lane_ptr[lane] + number, time)
    device = problem.home[lane % len(problem.home)]
    progress.wake[device] = min(progress.wake[device], max(time, progress.free[device]))


def _start_forward(
    problem: Problem, progress: Progress, memory: HeldBytes, copy: int, number: int
) -> None:
    """Count a micro-batch that begins on a copy."""
    path, action = copy % problem.n_paths, problem.lane_ptr[copy] + number
    count_forward(problem, memory, problem.home[copy], path, number, problem.f_bytes[action])
    progress.n_in_flight[copy] += 1
    progress.started[action] = True
    following = progress.next_in_order[copy]
    while (
        following < problem.n_of_path[path] and progress.started[problem.lane_ptr[copy] + following]
    ):
        following += 1
    progress.next_in_order[copy] = following


def _start(
    problem: Problem, ranks: Ranks, progress: Progress, queues: Queues, memory: HeldBytes,
    action: int, now: float,
) -> None:  # fmt: skip
    """Run an action, and add the actions that it makes ready."""
    lane, n_copies, n_paths = problem.lane[action], len(problem.home), problem.n_paths
    copy, number = lane % n_copies, action - problem.lane_ptr[lane]
    device, stage = problem.home[copy], copy // n_paths
    start_ready(queues, lane, action)
    progress.order[progress.end[device]] = action
    progress.end[device] += 1
    free = now + problem.seconds[action]
    progress.free[device] = progress.wake[device] = free
    message = free + problem.delay[action]
    if lane < n_copies:
        _start_forward(problem, progress, memory, copy, number)
        if stage + 1 < problem.n_stages:
            _arrive(problem, ranks, progress, queues, lane + n_paths, number, message)
        else:
            _arrive(problem, ranks, progress, queues, lane + n_copies, number, free)
    elif lane < WEIGHT * n_copies:
        forward = problem.lane_ptr[copy] + number
        f_bytes, w_bytes = problem.f_bytes[forward], problem.w_bytes[forward]
        count_backward(problem, memory, device, copy % n_paths, number, f_bytes, w_bytes)
        progress.n_in_flight[copy] -= 1
        if problem.n_phases > WEIGHT:
            _arrive(problem, ranks, progress, queues, lane + n_copies, number, free)
        if stage > 0:
            _arrive(problem, ranks, progress, queues, lane - n_paths, number, message)
    else:
        memory.held_for_w[device] -= problem.w_bytes[problem.lane_ptr[copy] + number]


@kernel(
    *HELPERS, choose, add, make_ready, start_ready, count_forward, count_backward, _arrive,
    _start_forward, _start, allocates=False,
)  # fmt: skip
def _run(
    problem: Problem,
    ranks: Ranks,
    patience: float,
    progress: Progress,
    queues: Queues,
    memory: HeldBytes,
) -> None:
    """Fill the order: at the time of each event, its device looks for an action."""
    n_copies, wake = len(problem.home), progress.wake
    future, unknown = queues.future, queues.unknown
    for path in range(problem.n_paths):
        for number in range(problem.n_of_path[path]):
            _arrive(problem, ranks, progress, queues, path, number, 0.0)
    while True:
        device = 0
        for other in range(1, problem.n_devices):
            if wake[other] < wake[device]:
                device = other
        now = wake[device]
        if now == math.inf:
            return
        following = math.inf
        for phase in range(problem.n_phases):
            for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
                lane = phase * n_copies + problem.copies[k]
                if future[lane] < unknown[lane]:
                    make_ready(queues, ranks, lane, now)
                if future[lane] < unknown[lane]:
                    following = min(following, queues.arrival[queues.action[future[lane]]])
        action = choose(problem, ranks, patience, progress, queues, memory, device, now)
        if action == NONE:
            wake[device] = following
        else:
            _start(problem, ranks, progress, queues, memory, action, now)
