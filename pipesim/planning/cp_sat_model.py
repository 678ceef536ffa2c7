"""`OrderModel`: orders of a problem as a CP-SAT model, in ticks.

- Each task is an interval, and no two intervals of a device overlap.
- The tasks of a lane are in order of micro-batches, which are identical.
- A message is a delay. Where messages may wait for their channel, each is an interval too.
- A memory limit is precedence where that suffices (`memory_arcs`), else sums of booleans.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.analysis.lower_bounds.memory_arcs import ChainStep, releases
from pipesim.ops import Op
from pipesim.order_search import OrderProblem
from pipesim.order_search.lane_order import lanes_in_turn
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


# Ticks: a problem in whole numbers, as CP-SAT needs it, such that a bound in ticks holds in
# seconds.
#
# - If all seconds are multiples of one unit, a tick is that unit and nothing is rounded.
# - Otherwise all seconds are rounded down. An order then takes at most its real time.
#
# Bytes are treated alike: bytes of tasks are rounded down, and limits are rounded up.

Floats = NDArray[np.float64]

#: Parts of the smallest number that are tried as the unit of all numbers.
_MOST_PARTS = 1000
#: Relative distance from a multiple of the unit that counts as rounding of floats.
_FLOAT_NOISE = 1e-12
#: Ticks of the objective, if seconds have no common unit: a rounded task loses up to 2e-13 of it.
FINE_TICKS = 2**42
#: The same for spans between devices whose first starts vary. There, all times can shift together,
#: and CP-SAT may raise them tick by tick before it sees a contradiction.
COARSE_TICKS = 2**12
#: Largest whole number of bytes, in units of bytes.
_MOST_BYTES = 2**40


class TickProblem(NamedTuple):
    """Whole numbers of an `OrderProblem`; arrays have its shapes.

    ``tick`` is in seconds. ``exact``: whether no time was rounded. ``noise`` is the relative error
    of a sum of exact times, as floats add it; 0 if all are whole numbers. Units of bytes are
    ``held``, which a task of a lane leaves on its device (allocated less released), ``peak``, which
    it takes while it runs (allocated and workspace), and the ``limit`` of each device, -1 for none.
    """

    tick: float
    exact: bool
    noise: float
    seconds: Ints
    latency: Ints
    hold: Ints
    tail: Ints
    held: Ints
    peak: Ints
    limit: Ints

    def whole(self, seconds: float) -> int:
        """Return a time in ticks, rounded down."""
        ticks = seconds / self.tick
        return round(ticks) if self.exact else math.floor(ticks)


def tick_problem(problem: OrderProblem, objective: float, most: int = FINE_TICKS) -> TickProblem:
    """Return a problem in whole numbers, with at most ``most`` ticks in the objective (s)."""
    times = [problem.seconds, problem.latency, problem.hold, problem.tail]
    unit = common_unit(np.concatenate([[objective], *(x.ravel() for x in times)]), most)
    tick = unit or max(objective / most, float(np.finfo(np.float64).smallest_subnormal))
    change = np.rint if unit else np.floor
    seconds, latency, hold, tail = (change(x / tick).astype(np.int64) for x in times)
    held, peak, limit = _whole_bytes(problem)
    exact, whole_numbers = unit is not None, float(tick).is_integer()
    noise = 0.0 if whole_numbers else _FLOAT_NOISE
    return TickProblem(tick, exact, noise, seconds, latency, hold, tail, held, peak, limit)


def common_unit(numbers: Floats, most: float) -> float | None:
    """Return a unit of which all numbers are multiples, up to rounding of floats; else None.

    The unit is a whole part of the smallest number, and the largest has at most ``most`` units.

    >>> common_unit(np.array([0.2, 0.3, 0.0]), 1e9)
    0.1
    """
    positive = np.unique(numbers[numbers > 0.0])
    if not len(positive):
        return 1.0
    for parts in range(1, _MOST_PARTS + 1):
        multiples = positive * (parts / positive[0])
        noise = np.abs(multiples - np.rint(multiples))
        if (noise <= _FLOAT_NOISE * multiples).all() and multiples[-1] <= most:
            return float(positive[0] / parts)
    return None


def _whole_bytes(problem: OrderProblem) -> tuple[Ints, Ints, Ints]:
    """Return held and peak units of each lane, and the limit of each device.

    A micro-batch of a stage holds less and less: bytes after its F, after its I, none after its
    last operation. Each of these sums is rounded, so that rounding never adds up.
    """
    keys = np.stack([problem.path, problem.stage])
    stage_start = np.flatnonzero(np.r_[True, (np.diff(keys) != 0).any(axis=0)])
    net = problem.allocated - problem.released
    total = np.cumsum(net)
    size = np.diff(np.r_[stage_start, len(net)])
    held = np.maximum(total - np.repeat(total[stage_start] - net[stage_start], size), 0.0)
    held[np.r_[stage_start[1:], len(net)] - 1] = 0.0
    peak = problem.allocated + problem.workspace
    unit = common_unit(np.concatenate([held, peak]), _MOST_BYTES)
    whole = np.rint if unit else np.floor
    unit = unit or float(max(peak.max(), held.max())) / _MOST_BYTES
    held_units = whole(held / unit).astype(np.int64)
    net_units = np.diff(held_units, prepend=0)
    net_units[stage_start] = held_units[stage_start]
    limited = np.isfinite(problem.limit)
    # The margin keeps a sum of floats that rounding puts just above its limit.
    units = np.floor(np.where(limited, problem.limit, 0.0) / unit * (1.0 + _FLOAT_NOISE))
    limit = np.where(limited, np.maximum(units + (whole is np.floor), 0.0), -1.0)
    return net_units, whole(peak / unit).astype(np.int64), limit.astype(np.int64)


# Precedence between tasks: earliest starts, and times to the end.


class LaneArc(NamedTuple):
    """Precedence between the tasks of two lanes.

    Task ``i`` of ``target`` starts no earlier than ``delay`` ticks after task ``i - shift`` of
    ``source`` has ended.
    """

    source: int
    target: int
    shift: int
    delay: int


class Windows(NamedTuple):
    """Bounds on times of tasks, in ticks; shape ``(n_lanes, largest count)``.

    The earliest start of each task, and the least time from its start to the end of the step.
    """

    head: Ints
    to_end: Ints


def may_queue(problem: OrderProblem, ticks: TickProblem) -> NDArray[np.bool_]:
    """Return, for each lane, whether its messages may wait for their channel; shape (n_lanes,).

    They never wait if each message is through before the sender's next message can begin.
    """
    queues = np.zeros(len(problem.count), dtype=bool)
    for channel in np.unique(problem.channel[problem.channel >= 0]):
        lanes = np.flatnonzero(problem.channel[:, 0] == channel)
        senders = problem.needs[lanes, 0]
        queues[lanes] = ticks.hold[lanes, 0].max() > ticks.seconds[senders].min()
    return queues


def lane_arcs(problem: OrderProblem, ticks: TickProblem) -> list[LaneArc]:
    """Return the precedence of the dependencies; a message takes its hold and its latency."""
    arcs = []
    for lane, needs in enumerate(problem.needs.tolist()):
        arcs.append(LaneArc(lane, lane, 1, 0))
        for k, source in enumerate(needs):
            if source >= 0:
                delay = int(ticks.latency[lane, k] + ticks.hold[lane, k])
                arcs.append(LaneArc(source, lane, 0, delay))
    return arcs


def lane_reach(problem: OrderProblem) -> NDArray[np.bool_]:
    """Return whether a lane's task needs, at last, the other's of the same number: [from, to]."""
    n_lanes = len(problem.count)
    reach = np.zeros((n_lanes, n_lanes), dtype=bool)
    for lane in lanes_in_turn(problem):
        for source in problem.needs[lane]:
            if source >= 0:
                reach[:, lane] |= reach[:, source]
                reach[source, lane] = True
    return reach


def windows(problem: OrderProblem, ticks: TickProblem, arcs: list[LaneArc]) -> Windows:
    """Return bounds on times by the longest paths of arcs."""
    n_lanes, most = len(problem.count), int(problem.count.max())
    lanes = lanes_in_turn(problem).tolist()
    into: list[list[LaneArc]] = [[] for _ in range(n_lanes)]
    out: list[list[LaneArc]] = [[] for _ in range(n_lanes)]
    for arc in arcs:
        into[arc.target].append(arc)
        out[arc.source].append(arc)
    seconds, count = ticks.seconds.tolist(), problem.count.tolist()
    head = [[0] * most for _ in range(n_lanes)]
    for i in range(most):
        for lane in lanes:
            for source, _, shift, delay in into[lane]:
                if shift <= i < count[lane]:
                    end = head[source][i - shift] + seconds[source] + delay
                    head[lane][i] = max(head[lane][i], end)
    tail = ticks.tail[problem.device].tolist()
    to_end = [[seconds[lane] + tail[lane]] * most for lane in range(n_lanes)]
    for i in reversed(range(most)):
        for lane in reversed(lanes):
            for _, target, shift, delay in out[lane]:
                if i < count[lane] and i + shift < count[target]:
                    rest = seconds[lane] + delay + to_end[target][i + shift]
                    to_end[lane][i] = max(to_end[lane][i], rest)
    return Windows(np.array(head), np.array(to_end))


# Memory limits as counts: how many tasks of other lanes may, or must, come before a task.
#
# A device runs one task at a time. So the bytes that it holds before a task depend only on the
# number of tasks of each of its lanes that came before. A bound on such a number is a precedence.


class MemoryArcs(NamedTuple):
    """Precedence of every order within the limits; for each device, whether it is enough."""

    arcs: list[LaneArc]
    exact: list[bool]


def checked_lanes(problem: OrderProblem, ticks: TickProblem, device: int) -> list[int]:
    """Return the lanes of a device whose tasks may exceed its limit when they start."""
    lanes, limit = np.flatnonzero(problem.device == device), int(ticks.limit[device])
    held = np.maximum(ticks.held[lanes], 0) * problem.count[lanes]
    if limit < 0 or int(held.sum() + ticks.peak[lanes].max(initial=0)) <= limit:
        return []
    return [int(x) for x in lanes[ticks.peak[lanes] > 0]]


def memory_arcs(problem: OrderProblem, ticks: TickProblem) -> MemoryArcs:
    """Return the precedence that limits enforce between the lanes of one path on a device.

    The other paths of the device hold nothing, at best. An order within the limits must exist.
    """
    arcs: list[LaneArc] = []
    exact = [True] * problem.n_devices
    for device in range(problem.n_devices):
        checked = checked_lanes(problem, ticks, device)
        if not checked:
            continue
        limit = int(ticks.limit[device])
        if len({(problem.path[x], problem.stage[x]) for x in checked}) > 1:
            exact[device] = False
            for path in np.unique(problem.path[checked]):
                arcs += _chain_arcs(problem, ticks, device, int(path))
            continue
        for lane in checked:
            own = stage_lanes(problem, lane)
            room = limit - int(ticks.peak[lane])
            stage_arcs, complete = _stage_arcs(ticks, own, own.index(lane), room)
            arcs += stage_arcs
            exact[device] &= complete
    return MemoryArcs(arcs, exact)


def stage_lanes(problem: OrderProblem, lane: int) -> list[int]:
    """Return the lanes of a lane's stage, in order of their operations."""
    same = (problem.path == problem.path[lane]) & (problem.stage == problem.stage[lane])
    return [int(x) for x in np.flatnonzero(same)]


def _stage_arcs(
    ticks: TickProblem, own: list[int], phase: int, room: int
) -> tuple[list[LaneArc], bool]:
    """Return the arcs that keep a stage within ``room`` before ``phase``; and whether they suffice.

    Let ``k[q]`` be the number of micro-batches whose operation ``q`` is done, and ``q + 1`` not.
    Each holds ``size[q]``. So the limit is ``sum(k * size) <= room``, which bounds sums of k.
    Before operation ``phase`` of number i, later operations q have run ``i - sum(k[phase:q])``
    times, and earlier ones ``i + sum(k[q:phase])`` times.
    """
    lane, last = own[phase], len(own) - 1
    size = np.cumsum(ticks.held[own])[:-1].tolist()
    least = [int(q == phase - 1) for q in range(last)]
    spare = room - sum(k * s for k, s in zip(least, size, strict=True))
    most: dict[tuple[int, int], int] = {}  # of sum(k[first:end])
    arcs = []
    for q in range(last + 1):
        if q == phase:
            continue
        first, end = min(q, phase), max(q, phase)
        smallest = min(size[first:end])
        if smallest == 0:
            continue
        most[first, end] = bound = sum(least[first:end]) + spare // smallest
        if q > phase:
            arcs.append(LaneArc(own[q], lane, bound + 1, 0))
        else:
            arcs.append(LaneArc(lane, own[q], bound, 0))
    return arcs, _suffice(size, least, most, room)


def _suffice(
    size: list[int], least: list[int], most: dict[tuple[int, int], int], room: int
) -> bool:
    """Return whether the bounds on sums of k keep ``sum(k * size) <= room``.

    The largest sum is at a corner: each k is as small as it may be, or as large as others leave it.
    """
    held = [q for q in range(len(size)) if size[q] > 0]
    for corner in itertools.permutations(held):
        k = list(least)
        for q in corner:
            bounds = [
                bound - sum(k[first:end])
                for (first, end), bound in most.items()
                if first <= q < end
            ]
            if not bounds:
                return False
            k[q] += min(bounds)
            if sum(x * s for x, s in zip(k, size, strict=True)) > room:
                return False
    return True


def _chain_arcs(problem: OrderProblem, ticks: TickProblem, device: int, path: int) -> list[LaneArc]:
    """Return arcs between the lanes of several stages, as a micro-batch runs them.

    Before number i of a step starts, i micro-batches have passed it. Those that have not passed a
    later step hold at least ``lowest`` each, so that the limit bounds their number. Weight
    gradients have run as early as they can, unless the later step is their W.
    """
    same = (problem.device == device) & (problem.path == path)
    steps, before = [], 0
    for lane in lanes_in_turn(problem):
        if same[lane] and problem.op[lane] != Op.W:
            weight = lane + 1 if problem.op[lane] == Op.I else -1
            freed = -ticks.held[weight] if weight >= 0 else 0
            low = before + ticks.held[lane] - freed
            steps.append(ChainStep(lane, weight, before + ticks.peak[lane], low, freed))
            before = low
    return [
        LaneArc(int(lane), int(step.lane), int((ticks.limit[device] - step.own) // low) + 1, 0)
        for number, step in enumerate(steps)
        for lane, low, _ in releases(steps, number)
    ]


class OrderModel:
    """A CP-SAT model with the variables of a problem's tasks; times are in ticks.

    ``start[lane][number]`` is the start of each task, and ``messages[lane][number]`` that of each
    message that may wait, by its receiving lane. ``before[a, b]`` is the boolean "task a comes
    before task b"; tasks are (lane, number). The ``objective``, makespan or span, is from ``least``
    to ``most``, and no task ends after ``horizon``.
    """

    objective: cp_model.IntVar

    def __init__(
        self, problem: OrderProblem, ticks: TickProblem, least: int, most: int, horizon: int
    ) -> None:
        from pipesim.utils.packages import cp_model

        self.problem, self.ticks = problem, ticks
        self.least, self.most, self.horizon = least, most, horizon
        self.model = cp_model.CpModel()
        self.memory = memory_arcs(problem, ticks)
        self.arcs = [*lane_arcs(problem, ticks), *self.memory.arcs]
        self.bounds: Windows = windows(problem, ticks, self.arcs)
        self.start: list[list[cp_model.IntVar]] = []
        self.messages: dict[int, list[cp_model.IntVar]] = {}
        self.before: dict[tuple[tuple[int, int], tuple[int, int]], cp_model.IntVar] = {}


def order_model(
    problem: OrderProblem,
    ticks: TickProblem,
    least: int,
    most: int,
    first_starts: list[int | None] | None = None,
) -> OrderModel:
    """Return the model of a problem whose objective is from ``least`` to ``most`` ticks.

    Without ``first_starts``, the objective is the makespan. Else it is the span, and these are the
    starts of the first task of each device (ticks), or None where the first task may vary.
    """
    horizon = most
    if first_starts is not None:  # the latest end of an order whose tasks start early
        fixed = [x for x in first_starts if x is not None]
        in_turn = ticks.seconds + (ticks.latency + ticks.hold).sum(axis=1)
        is_fixed = len(fixed) == len(first_starts)
        horizon = max(fixed) + most if is_fixed else int((in_turn * problem.count).sum())
    built = OrderModel(problem, ticks, least, most, horizon)
    _add_tasks(built)
    _add_arcs(built)
    _add_messages(built)
    add_memory_sums(built)
    built.objective = built.model.new_int_var(least, most, "objective")
    if first_starts is None:
        tail = ticks.tail[problem.device] + ticks.seconds
        for lane, row in enumerate(built.start):
            built.model.add(built.objective >= row[-1] + int(tail[lane]))
    else:
        _add_span(built, first_starts)
    built.model.minimize(built.objective)
    return built


def _add_tasks(built: OrderModel) -> None:
    """Add the intervals of tasks, and that those of a device do not overlap."""
    model, problem = built.model, built.problem
    intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.n_devices)]
    seconds, device = built.ticks.seconds.tolist(), problem.device.tolist()
    latest = built.horizon - built.bounds.to_end
    for lane, count in enumerate(problem.count.tolist()):
        row = []
        for i in range(count):
            first, last = int(built.bounds.head[lane, i]), int(latest[lane, i])
            start = model.new_int_var(min(first, last), last, "")
            if first > last:  # no order ends by the horizon
                model.add_bool_or([])
            row.append(start)
            intervals[device[lane]].append(
                model.new_fixed_size_interval_var(start, seconds[lane], "")
            )
        built.start.append(row)
    for tasks in intervals:
        model.add_no_overlap(tasks)


def _add_arcs(built: OrderModel) -> None:
    """Add the precedence of dependencies, of lanes and of memory."""
    seconds = built.ticks.seconds.tolist()
    for source, target, shift, delay in built.arcs:
        for a, b in zip(built.start[source], built.start[target][shift:], strict=False):
            built.model.add(b >= a + seconds[source] + delay)


def _add_messages(built: OrderModel) -> None:
    """Add the intervals of messages that may wait for their channel.

    They are sent in any order, which is a relaxation: a channel keeps the order of its sender.
    """
    model, problem, ticks = built.model, built.problem, built.ticks
    channels: dict[int, list[cp_model.IntervalVar]] = {}
    for lane in np.flatnonzero(may_queue(problem, ticks)).tolist():
        source, hold = int(problem.needs[lane, 0]), int(ticks.hold[lane, 0])
        latency, seconds = int(ticks.latency[lane, 0]), int(ticks.seconds[source])
        row = []
        for a, b in zip(built.start[source], built.start[lane], strict=True):
            sent = model.new_int_var(0, built.horizon, "")
            model.add(sent >= a + seconds)
            model.add(b >= sent + hold + latency)
            interval = model.new_fixed_size_interval_var(sent, hold, "")
            channels.setdefault(int(problem.channel[lane, 0]), []).append(interval)
            row.append(sent)
        for a, b in itertools.pairwise(row):
            model.add(b >= a + hold)
        built.messages[lane] = row
    for intervals in channels.values():
        model.add_no_overlap(intervals)


def _add_span(built: OrderModel, first_starts: list[int | None]) -> None:
    """Make the objective at least the time from each device's first start to its last end."""
    model, problem = built.model, built.problem
    for device, fixed in enumerate(first_starts):
        lanes = np.flatnonzero(problem.device == device).tolist()
        first: cp_model.IntVar | int = 0 if fixed is None else fixed
        if fixed is None:
            first = model.new_int_var(0, built.horizon, "")
            for lane in lanes:
                model.add(first <= built.start[lane][0])
        for lane in lanes:
            end = built.start[lane][-1] + int(built.ticks.seconds[lane])
            model.add(built.objective + first >= end)


# Memory limits of devices with several stages: sums of booleans "this task comes before".

Task = tuple[int, int]


def add_memory_sums(built: OrderModel) -> None:
    """Add the limits of devices where precedence does not suffice."""
    problem, ticks = built.problem, built.ticks
    reach = lane_reach(problem)
    for device in range(problem.n_devices):
        if built.memory.exact[device]:
            continue
        lanes = np.flatnonzero((problem.device == device) & (ticks.held != 0)).tolist()
        for lane in checked_lanes(problem, ticks, device):
            room = int(ticks.limit[device] - ticks.peak[lane])
            others = [other for other in lanes if other != lane]
            counts = [_possible_counts(built, reach, lane, other) for other in others]
            _add_lane_sums(built, lane, others, counts, room)
    _add_monotony(built)


def _possible_counts(
    built: OrderModel, reach: Ints, lane: int, other: int
) -> tuple[list[int], list[int]]:
    """Return, for each task of a lane, the least and most tasks of another that come before."""
    problem, bounds, seconds = built.problem, built.bounds, built.ticks.seconds
    n, n_other = int(problem.count[lane]), int(problem.count[other])
    numbers = np.arange(n)
    least = np.where(reach[other, lane], numbers + 1, 0)
    most = np.where(reach[lane, other], numbers, n_other)
    latest = built.horizon - bounds.to_end
    # A task that must start before this one can end comes before it.
    ends = bounds.head[lane, :n] + seconds[lane]
    least = np.maximum(least, np.searchsorted(latest[other, :n_other], ends, side="left"))
    # One that cannot end before this one must start comes after it.
    other_ends = bounds.head[other, :n_other] + seconds[other]
    most = np.minimum(most, np.searchsorted(other_ends, latest[lane, :n], side="right"))
    for source, target, shift, _ in built.memory.arcs:
        if (source, target) == (other, lane):
            least = np.maximum(least, numbers - shift + 1)
        elif (source, target) == (lane, other):
            most = np.minimum(most, numbers + shift)
    least = np.minimum(least, n_other)
    return least.tolist(), np.maximum(np.minimum(most, n_other), least).tolist()


def _add_lane_sums(
    built: OrderModel,
    lane: int,
    others: list[int],
    counts: list[tuple[list[int], list[int]]],
    room: int,
) -> None:
    """Add the limit at the start of each task of a lane."""
    from pipesim.utils.packages import cp_model

    held = built.ticks.held.tolist()
    for i in range(int(built.problem.count[lane])):
        ranges = [
            (other, least[i], most[i]) for other, (least, most) in zip(others, counts, strict=True)
        ]
        worst = i * held[lane] + sum(
            held[other] * (most if held[other] > 0 else least) for other, least, most in ranges
        )
        if worst <= room:
            continue
        total = i * held[lane] + sum(held[other] * least for other, least, _ in ranges)
        pairs = [(other, j) for other, least, most in ranges for j in range(least, most)]
        terms = [_before(built, pair, (lane, i)) for pair in pairs]
        weights = [held[other] for other, _ in pairs]
        built.model.add(cp_model.LinearExpr.weighted_sum(terms, weights) <= room - total)


def _before(built: OrderModel, a: Task, b: Task) -> cp_model.LiteralT:
    """Return the boolean "task a comes before task b", made if it is new."""
    first, second = min(a, b), max(a, b)
    if (first, second) not in built.before:
        built.before[first, second] = literal = built.model.new_bool_var("")
        for x, y, condition in ((first, second, literal), (second, first, literal.negated())):
            end = built.start[x[0]][x[1]] + int(built.ticks.seconds[x[0]])
            built.model.add(built.start[y[0]][y[1]] >= end).only_enforce_if(condition)
    literal = built.before[first, second]
    return literal if a == first else literal.negated()


def _add_monotony(built: OrderModel) -> None:
    """Add that a task is before all later tasks of a lane if it is before one of them."""
    for (a, b), literal in built.before.items():
        later = built.before.get((a, (b[0], b[1] + 1)))
        if later is not None:
            built.model.add_implication(literal, later)
        earlier = built.before.get(((a[0], a[1] - 1), b))
        if earlier is not None:
            built.model.add_implication(literal, earlier)
