"""A list scheduler: each free device starts the first of the actions that are ready and fit.

The scheduler keeps a clock, to know when actions are ready. It returns orders without times:
engines compute when actions run. Its loop is compiled, but runs as Python for a user's priority.

Devices that wait for each other's room could wait forever. So a device takes bytes only if it
could then still finish its micro-batches one after the other, in their order, each with all bytes
that it needs here (the banker's algorithm: Dijkstra, EWD 108). Thus the oldest micro-batch that has
not passed the whole pipeline finds room on every device.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pipesim.list_scheduling.problem import BACKWARD, WEIGHT, Problem, action_columns, operations
from pipesim.scheduling.placement import Placement
from pipesim.scheduling.schedule import Schedule
from pipesim.utils.csr import Ints
from pipesim.utils.jit import available, kernel

# Queues of the actions that are yet to start, one for each lane of `Problem`.

Floats = NDArray[np.float64]


class Ranks(NamedTuple):
    """Ranks of actions: the lowest ``score`` goes first, then the lowest ``tie``.

    If the score of an action depends on its arrival, the time at which it is ready (s), the
    scheduler assigns this time to ``score[action]`` as soon as it is known.
    """

    score: Floats  # of each action; of a user's priority: tuples of numbers
    tie: Ints
    by_arrival: bool


class Queues(NamedTuple):
    """Actions of each lane, from ``lane_ptr[lane]`` on in ``action``, in three parts.

    - Up to ``ready[lane]``: started, in the order of their starts.
    - Up to ``future[lane]``: ready, the lowest rank first.
    - Up to ``unknown[lane]``: ready at a known time, the earliest first, then the lowest rank.
    """

    action: Ints
    arrival: Floats  # time at which each action is ready (s)
    ready: Ints
    future: Ints
    unknown: Ints


def new_queues(problem: Problem) -> Queues:
    """Return empty queues."""
    first, n_actions = problem.lane_ptr[:-1], int(problem.lane_ptr[-1])
    return Queues(
        np.full(n_actions, -1), np.zeros(n_actions), first.copy(), first.copy(), first.copy()
    )


def ranks_below(ranks: Ranks, action: int, other: int) -> bool:
    """Return whether an action ranks lower than another."""
    if ranks.score[action] == ranks.score[other]:
        return bool(ranks.tie[action] < ranks.tie[other])
    return bool(ranks.score[action] < ranks.score[other])


def goes_before(ranks: Ranks, action: int, other: int) -> bool:
    """Return whether an action ranks lower than another or, at the same rank, has less number."""
    if ranks.score[action] == ranks.score[other] and ranks.tie[action] == ranks.tie[other]:
        return action < other
    return ranks_below(ranks, action, other)


def add(queues: Queues, ranks: Ranks, lane: int, action: int, time: float) -> None:
    """Add an action that is ready at ``time`` (s)."""
    queues.arrival[action] = time
    if ranks.by_arrival:
        ranks.score[action] = time
    position = queues.unknown[lane]
    queues.unknown[lane] = position + 1
    while position > queues.future[lane]:
        other = queues.action[position - 1]
        if queues.arrival[other] < time or (
            queues.arrival[other] == time and goes_before(ranks, other, action)
        ):
            break
        queues.action[position] = other
        position -= 1
    queues.action[position] = action


def make_ready(queues: Queues, ranks: Ranks, lane: int, now: float) -> None:
    """Move the actions whose time has come to those that are ready."""
    while queues.future[lane] < queues.unknown[lane]:
        position = queues.future[lane]
        action = queues.action[position]
        if queues.arrival[action] > now:
            break
        queues.future[lane] = position + 1
        while position > queues.ready[lane]:
            other = queues.action[position - 1]
            if goes_before(ranks, other, action):
                break
            queues.action[position] = other
            position -= 1
        queues.action[position] = action


def start_ready(queues: Queues, lane: int, action: int) -> None:
    """Move a ready action to those that have started."""
    position = first = queues.ready[lane]
    while queues.action[position] != action:
        position += 1
    for k in range(position, first, -1):
        queues.action[k] = queues.action[k - 1]
    queues.action[first] = action
    queues.ready[lane] = first + 1


# Bytes: how many more a device may take, so that no micro-batch gets stuck.

#: Share of a limit by which sums of bytes may exceed it, since sums of floats are rounded.
_ROUNDING = 1e-9


class HeldBytes(NamedTuple):
    """Bytes that devices hold.

    A row is a micro-batch on a device: ``device * n + microbatch``. An entry is a path on a device:
    ``device * n_paths + path``.
    """

    limit: Floats  # of each device
    n_chunks: Ints  # number of stages of each entry
    most_needed: Floats  # that a micro-batch needs on each device at the same time
    most_later: Floats  # that one of a row's micro-batch and the later ones of its path needs there
    held: Floats  # by each device until I or B
    held_for_w: Floats  # until W, which can run whenever its room is needed
    row_held: Floats  # by each row until I or B
    to_come: Floats  # that each row will still take
    backwards: Ints  # that each row has still to run; -1 before its first F
    started_end: Ints  # of each entry: one more than the last micro-batch that has started
    oldest: Ints  # of each entry: no more than the first micro-batch that has not ended


def new_held_bytes(problem: Problem) -> HeldBytes:
    """Return the bytes of devices that have not started."""
    shape = problem.n_devices, problem.n_paths
    n_rows = problem.n_devices * problem.n_microbatches
    needed, n_chunks = np.zeros((problem.n_devices, problem.n_microbatches)), np.zeros(shape, int)
    most_later = np.empty_like(needed)
    path = np.arange(len(problem.home)) % problem.n_paths
    for copy, (home, own) in enumerate(zip(problem.home, path, strict=True)):
        first = problem.first[own]
        nbytes = problem.f_bytes[problem.lane_ptr[copy] : problem.lane_ptr[copy + 1]]
        needed[home, first : first + problem.n_of_path[own]] += nbytes
    np.add.at(n_chunks, (problem.home, path), 1)
    for first, count in zip(problem.first, problem.n_of_path, strict=True):
        columns = slice(first, first + count)
        backwards = needed[:, columns][:, ::-1]
        most_later[:, columns] = np.maximum.accumulate(backwards, axis=1)[:, ::-1]
    return HeldBytes(
        limit=problem.limits * (1 + _ROUNDING),
        n_chunks=n_chunks.ravel(),
        most_needed=needed.max(axis=1),
        most_later=most_later.ravel(),
        held=np.zeros(problem.n_devices),
        held_for_w=np.zeros(problem.n_devices),
        row_held=np.zeros(n_rows),
        to_come=needed.ravel(),
        backwards=np.full(n_rows, -1),
        started_end=np.zeros(n_chunks.size, int),
        oldest=np.zeros(n_chunks.size, int),
    )


def has_room(memory: HeldBytes, device: int, nbytes: float) -> bool:
    """Return whether there is room now."""
    return bool(memory.held[device] + memory.held_for_w[device] + nbytes <= memory.limit[device])


def could_have_room(memory: HeldBytes, device: int, nbytes: float) -> bool:
    """Return whether there is room once every W that can run has run."""
    return bool(memory.held[device] + nbytes <= memory.limit[device])


def is_safe(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float
) -> bool:
    """Return whether all micro-batches can still finish after this one takes ``nbytes``."""
    limit = memory.limit[device]
    if memory.held[device] + nbytes + memory.most_needed[device] <= limit:
        return True
    held_by_later = 0.0
    for other in range(problem.n_paths - 1, -1, -1):
        entry = device * problem.n_paths + other
        row = device * problem.n_microbatches + problem.first[other]
        taker = microbatch if other == path else -1
        end = max(memory.started_end[entry], taker + 1)
        # Of those that have not started, behind all others: the largest one.
        if end < problem.n_of_path[other] and held_by_later + memory.most_later[row + end] > limit:
            return False
        for number in range(end - 1, memory.oldest[entry] - 1, -1):
            if memory.backwards[row + number] == 0:
                continue
            held, to_come = memory.row_held[row + number], memory.to_come[row + number]
            if number == taker:
                held, to_come = held + nbytes, to_come - nbytes
            held_by_later += held
            if held_by_later + to_come > limit:
                return False
    return True


def count_forward(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float
) -> None:
    """Count an F, which takes ``nbytes``."""
    entry = device * problem.n_paths + path
    row = device * problem.n_microbatches + problem.first[path] + microbatch
    memory.held[device] += nbytes
    memory.row_held[row] += nbytes
    memory.to_come[row] -= nbytes
    if memory.backwards[row] >= 0:
        return
    memory.backwards[row] = memory.n_chunks[entry]
    memory.started_end[entry] = max(memory.started_end[entry], microbatch + 1)


def count_backward(
    problem: Problem, memory: HeldBytes, device: int, path: int, microbatch: int, nbytes: float,
    w_bytes: float,
) -> None:  # fmt: skip
    """Count an I or a B, which releases ``nbytes``, except ``w_bytes`` that W needs."""
    entry = device * problem.n_paths + path
    first = device * problem.n_microbatches + problem.first[path]
    memory.held[device] -= nbytes
    memory.held_for_w[device] += w_bytes
    memory.row_held[first + microbatch] -= nbytes
    memory.backwards[first + microbatch] -= 1
    oldest, started_end = memory.oldest[entry], memory.started_end[entry]
    while oldest < started_end and memory.backwards[first + oldest] == 0:
        oldest += 1
    memory.oldest[entry] = oldest


# The action that a free device starts: the first of those that are ready and fit.

#: No action.
NONE = -1


class Progress(NamedTuple):
    """Progress of devices and copies."""

    free: Floats  # time at which each device is free (s)
    wake: Floats  # time at which it next looks for an action (s)
    n_in_flight: Ints  # micro-batches between F and their backward, of the first copy that shares
    started: NDArray[np.bool_]  # whether each F has
    next_in_order: Ints  # first micro-batch of each copy whose F has not started
    n_needed: Ints  # actions that each action waits for
    arrival: Floats  # time at which the messages of those that have started arrive (s)
    end: Ints  # of the filled part of each device's order, in ``order``
    order: Ints  # actions, those of device 0 first


def _first_ready(problem: Problem, ranks: Ranks, queues: Queues, device: int, phase: int) -> int:
    """Return the first of a device's ready actions of a phase, or `NONE`."""
    first = NONE
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        lane = phase * len(problem.home) + problem.copies[k]
        if queues.ready[lane] < queues.future[lane]:
            action = queues.action[queues.ready[lane]]
            if first == NONE or goes_before(ranks, action, first):
                first = action
    return first


def _in_flight_allows(problem: Problem, progress: Progress, copy: int, microbatch: int) -> bool:
    """Reserve the last place in flight for the micro-batch that is next in order."""
    shared, n_paths = problem.shared[copy], problem.n_paths
    if problem.in_flight[copy // n_paths] - progress.n_in_flight[shared] >= 2:
        return True
    own = copy % n_paths
    for path in range(n_paths):  # paths that share the stage take turns
        other = copy - own + path
        turn = progress.next_in_order[other]
        is_earlier = turn < microbatch or (turn == microbatch and path < own)
        if is_earlier and problem.shared[other] == shared and turn < problem.n_of_path[path]:
            return False
    return True


def _allows(problem: Problem, progress: Progress, memory: HeldBytes, action: int) -> bool:
    """Return whether an F may start."""
    copy = problem.lane[action]  # as lanes of F come first
    device, nbytes = problem.home[copy], problem.f_bytes[action]
    microbatch = action - problem.lane_ptr[copy]
    if not has_room(memory, device, nbytes):
        return False
    if not _in_flight_allows(problem, progress, copy, microbatch):
        return False
    return is_safe(problem, memory, device, copy % problem.n_paths, microbatch, nbytes)


def _first_allowed(
    problem: Problem, progress: Progress, queues: Queues, memory: HeldBytes, copy: int
) -> int:
    """Return the F of lowest rank that has room and may start, or `NONE`."""
    ready, future = queues.ready[copy], queues.future[copy]
    first = queues.action[ready]
    if _allows(problem, progress, memory, first):
        return int(first)
    if problem.has_equal_bytes:
        if not has_room(memory, problem.home[copy], problem.f_bytes[first]):
            return NONE
        oldest = first
        if first - problem.lane_ptr[copy] != progress.next_in_order[copy]:
            for k in range(ready + 1, future):
                oldest = min(oldest, queues.action[k])
        if oldest == first or not _allows(problem, progress, memory, oldest):
            return NONE  # no other F is allowed either
    for k in range(ready + 1, future):
        if _allows(problem, progress, memory, queues.action[k]):
            return int(queues.action[k])
    return NONE


def _first_blocked(problem: Problem, queues: Queues, memory: HeldBytes, copy: int) -> int:
    """Return the ready F of lowest rank that waits for the room of a W, or `NONE`."""
    ready, future = queues.ready[copy], queues.future[copy]
    device = problem.home[copy]
    if problem.has_equal_bytes:  # then all of them wait, or none
        future = min(future, ready + 1)
    for k in range(ready, future):
        nbytes = problem.f_bytes[queues.action[k]]
        if not has_room(memory, device, nbytes) and could_have_room(memory, device, nbytes):
            return int(queues.action[k])
    return NONE


def _weight_may_start(
    problem: Problem,
    ranks: Ranks,
    patience: float,
    progress: Progress,
    queues: Queues,
    memory: HeldBytes,
    device: int,
    weight: int,
    now: float,
) -> bool:
    """Return whether W would not delay the next F or backward too much."""
    soonest, forward = math.inf, NONE
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        copy = problem.copies[k]
        lane = BACKWARD * len(problem.home) + copy
        if queues.future[lane] < queues.unknown[lane]:
            soonest = min(soonest, queues.arrival[queues.action[queues.future[lane]]])
        if queues.future[copy] < queues.unknown[copy]:
            action = queues.action[queues.future[copy]]
            if forward == NONE or queues.arrival[action] < queues.arrival[forward] or (
                queues.arrival[action] == queues.arrival[forward]
                and goes_before(ranks, action, forward)
            ):  # fmt: skip
                forward = action
    if forward != NONE:
        copy = problem.lane[forward]
        if (
            has_room(memory, device, problem.f_bytes[forward])
            and progress.n_in_flight[problem.shared[copy]]
            < problem.in_flight[copy // problem.n_paths]
        ):
            soonest = min(soonest, queues.arrival[forward])
    return bool(soonest - now >= patience * problem.seconds[weight])


def choose(
    problem: Problem,
    ranks: Ranks,
    patience: float,
    progress: Progress,
    queues: Queues,
    memory: HeldBytes,
    device: int,
    now: float,
) -> int:
    """Return the action that a device starts now; `NONE`: wait for the next event."""
    best = _first_ready(problem, ranks, queues, device, BACKWARD)
    blocked = NONE  # the first F that waits for the room of a W
    for k in range(problem.copies_ptr[device], problem.copies_ptr[device + 1]):
        copy = problem.copies[k]
        if (
            queues.ready[copy] == queues.future[copy]
            or progress.n_in_flight[problem.shared[copy]]
            >= problem.in_flight[copy // problem.n_paths]
        ):
            continue
        action = _first_allowed(problem, progress, queues, memory, copy)
        if action != NONE and (best == NONE or ranks_below(ranks, action, best)):
            best = action
        action = _first_blocked(problem, queues, memory, copy)
        if action != NONE and (blocked == NONE or goes_before(ranks, action, blocked)):
            blocked = action
    weight = NONE
    if problem.n_phases > WEIGHT:
        weight = _first_ready(problem, ranks, queues, device, WEIGHT)
    if weight == NONE:
        return best
    if blocked != NONE and (best == NONE or ranks_below(ranks, blocked, best)):
        return weight
    if best != NONE:
        return weight if ranks_below(ranks, weight, best) else best
    may_start = _weight_may_start(
        problem, ranks, patience, progress, queues, memory, device, weight, now
    )
    return weight if may_start else NONE


#: Functions that `choose` calls, for kernels that call it.
HELPERS = (
    ranks_below, goes_before, has_room, could_have_room, is_safe, _first_ready, _in_flight_allows,
    _allows, _first_allowed, _first_blocked, _weight_may_start,
)  # fmt: skip


# The loop over events.

T = TypeVar("T")


def list_orders(problem: Problem, ranks: Ranks, patience: float = 0.0) -> tuple[Ints, Ints]:
    """Return the order of each device.

    A free device starts the action of lowest rank among those that are ready and fit.

    - An F fits if `is_safe` allows its bytes, and if fewer than ``in_flight`` micro-batches are
      in flight on its stage.
    - A W takes the rank of an F that needs its room. Otherwise it starts only if no F or I that is
      known to come has to wait for more than ``1 - patience`` of its seconds.

    No limit can make devices wait for each other forever: the oldest micro-batch that has not
    passed the whole pipeline always finds room, and a place in flight is reserved for it.

    Return ``actions`` and ``ptr``: device ``d`` runs ``actions[ptr[d]:ptr[d + 1]]``.
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
        n_needed=problem.n_needed[problem.lane],
        arrival=np.zeros(n_actions),
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
    """Count data for the action of a lane's micro-batch, there at ``time`` (s); add it if last."""
    action = problem.lane_ptr[lane] + number
    if problem.n_needed[lane] > 1:
        progress.n_needed[action] -= 1
        time = progress.arrival[action] = max(progress.arrival[action], time)
        if progress.n_needed[action] > 0:
            return
    add(queues, ranks, lane, action, time)
    device = problem.home[lane % len(problem.home)]
    progress.wake[device] = min(progress.wake[device], max(time, progress.free[device]))


def _start_forward(
    problem: Problem, progress: Progress, memory: HeldBytes, copy: int, number: int
) -> None:
    """Count a micro-batch that begins on a copy."""
    path, action = copy % problem.n_paths, problem.lane_ptr[copy] + number
    count_forward(problem, memory, problem.home[copy], path, number, problem.f_bytes[action])
    progress.n_in_flight[problem.shared[copy]] += 1
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
    device = problem.home[copy]
    start_ready(queues, lane, action)
    progress.order[progress.end[device]] = action
    progress.end[device] += 1
    free = now + problem.seconds[action]
    progress.free[device] = progress.wake[device] = free
    for arc in range(problem.arc_ptr[lane], problem.arc_ptr[lane + 1]):
        time = free + problem.delay[problem.delay_ptr[arc] + number]
        _arrive(problem, ranks, progress, queues, problem.arc_to[arc], number, time)
    if lane < n_copies:
        _start_forward(problem, progress, memory, copy, number)
    elif lane < WEIGHT * n_copies:
        forward = problem.lane_ptr[copy] + number
        f_bytes, w_bytes = problem.f_bytes[forward], problem.w_bytes[forward]
        count_backward(problem, memory, device, copy % n_paths, number, f_bytes, w_bytes)
        progress.n_in_flight[problem.shared[copy]] -= 1
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
    for lane in range(n_copies):
        if problem.n_needed[lane] == 0:
            for number in range(problem.n_of_path[lane % problem.n_paths]):
                _arrive(problem, ranks, progress, queues, lane, number, 0.0)
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
