"""`improve`: a local search for a better order; `LocalSearch` runs it in parts.

Besides moves of single tasks, the search copies periods of an order: stretches in which each device
runs each of its lanes equally often. A device holds as many bytes behind a period as before it. So
a period can be left out, or repeated, and only the times change.

Of micro-batches that differ, `anneal_microbatches` searches the order in which all lanes run them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.order_search.annealing import (
    BEST,
    FIRST_TEMPERATURE,
    LAST_TEMPERATURE,
    anneal,
    begin,
    lanes_of,
    new_state,
    order_of_state,
)
from pipesim.order_search.evaluate import (
    OBJECTIVES,
    Objective,
    evaluate,
    fill_peaks,
    fill_times,
    keeps_limit,
    receivers,
)
from pipesim.order_search.lane_order import LaneOrder, path_counts, rows_of
from pipesim.order_search.problem import OrderProblem
from pipesim.utils.csr import Ints
from pipesim.utils.jit import kernel

#: Temperatures at which rounds begin, in turn, and at which they end, in mean seconds of a task.
_HOT, _COLD = (1.0, 0.3, 3.0), 0.02
#: Least moves for each task in a round that begins so hot; shorter rounds begin cooler.
_COOLER = ((30.0, 3.0), (8.0, 0.3), (0.0, 0.05))
#: Moves of the first rounds for each task, as a share of the budget, and the growth of rounds.
_FIRST_MOVES, _FIRST_SHARE, _GROWTH = 100, 0.05, 1.5
#: Every how many later rounds one starts from a copy of a period. Even: a copy of the best order's.
_COPY_ROUNDS = 4
#: Moves of a round for each pair of periods that is tried before it, which takes some percent of
#: its time.
_MOVES_A_PAIR = 20
#: Most orders from which rounds start.
_MOST_ORDERS = 8
#: Seconds of a call of the kernel, after which the deadline is checked.
_CALL_SECONDS = 0.05
#: Moves times tasks that run as Python, at about a microsecond each, before kernels are compiled.
_PLAIN_TASKS = 200_000


class LocalSearch:
    """Simulated annealing in rounds.

    The first rounds start from the given orders, one each. A later round starts from the result of
    an earlier one: every second round from the best, the others from the next best ones. Every
    fourth round starts from the best after one of its periods was copied over another. Rounds get
    longer, and begin at temperatures that alternate.

    The answer depends on the arguments and on the number of moves alone, and not on the parts in
    which they are made.

    Parameters
    ----------
    problem, order
        Lanes, and the first order; it must keep the limits.
    seed
        Seed of the random numbers.
    objective
        ``"makespan"``, or ``"span"``: the longest time of a device from first start to last end.
    temperature
        Temperature at which rounds begin, in mean seconds of a task. A low one suits few moves
        from a good order. By default several in turn.
    others
        More orders that keep the limits, the most promising first. Of micro-batches that differ,
        they must have the same order.
    budget
        Number of moves that will be made, about; the length of rounds follows from it. None: many.
    """

    def __init__(
        self,
        problem: OrderProblem,
        order: LaneOrder,
        *,
        seed: int,
        objective: Objective,
        temperature: float | None = None,
        others: Sequence[LaneOrder] = (),
        budget: int | None = None,
    ) -> None:
        self.problem, self.order = problem, order
        self.moves = 0
        self._seed = seed
        self._temperature = temperature
        self._objective = objective
        self._span = check_name("objective", objective, OBJECTIVES) == "span"
        self._lanes = lanes_of(problem, order)
        self._state = new_state(problem, order, check_count("seed", seed, 0))
        n_tasks = len(order.lanes)
        most = math.inf if budget is None else _FIRST_SHARE * budget
        self._first_length = max(1, int(min(_FIRST_MOVES * n_tasks, max(most, n_tasks))))
        n_others = _MOST_ORDERS - 1
        if budget is not None:
            n_others = min(n_others, int(0.5 * budget / self._first_length))
        self._others = [new_state(problem, x, 0).task for x in others[:n_others]]
        self._results: list[tuple[float, int, Ints]] = []
        self._round, self._move, self._length = 0, 0, self._first_length
        self._rate = 1000.0
        if not keeps_limit(problem, order):
            raise ArgumentError("the order holds more bytes than a device may; give one that fits")
        if not begin(self._lanes, self._state, self._span):
            raise ArgumentError("tasks of the order wait for each other; give one that runs")
        self.value = float(self._state.values[BEST])
        self._set_temperatures()

    def advance(self, n_moves: int, target: float = -math.inf) -> None:
        """Make moves, fewer if the objective reaches the target."""
        end = self.moves + n_moves
        while self.moves < end and self.value > target:
            if self._move == self._length:
                self._next_round()
            last = min(self._length, self._move + end - self.moves)
            if (self.moves + last - self._move) * len(self.order.lanes) > _PLAIN_TASKS:
                self.compile()
            following = anneal(
                self._lanes, self._state, self._span, self._move, last, self._length, target
            )
            if following == self._move:  # rounding: the best order exceeds a limit
                following = last
            self.moves += following - self._move
            self._move = following
            self._keep_best()

    def advance_for(self, seconds: float, most: int, target: float = -math.inf) -> int:
        """Make as many moves as take some seconds, at most ``most`` of them; return how many."""
        before = self.moves
        n_moves = min(most, max(1, int(self._rate * seconds)))
        began = time.perf_counter()
        self.advance(n_moves, target)
        rate = (self.moves - before) / max(time.perf_counter() - began, 1e-6)
        self._rate = max(1.0, min(rate, 4 * self._rate))
        return self.moves - before

    @property
    def rate(self) -> float:
        """Moves a second of the last `advance_for`."""
        return self._rate

    @staticmethod
    def compile() -> None:
        """Compile the kernels now, which takes some seconds if they are not cached."""
        begin.compile()
        anneal.compile()
        best_copy.compile()

    def _set_temperatures(self) -> None:
        """Set the temperatures of the round."""
        mean = float(self.problem.seconds.mean()) or 1.0
        moves_a_task = self._length / len(self.order.lanes)
        hottest = next(hot for least, hot in _COOLER if moves_a_task >= least)
        hot = min(hottest, _HOT[self._round % len(_HOT)])
        if self._temperature is not None:
            hot = self._temperature
        limits = hot * mean, min(_COLD, hot) * mean
        self._state.values[[FIRST_TEMPERATURE, LAST_TEMPERATURE]] = limits

    def _next_round(self) -> None:
        """Keep the result of a round, and begin the next one."""
        state = self._state
        result = float(state.values[BEST]), self._round, state.best.copy()
        self._results = sorted([*self._results, result], key=lambda x: x[:2])[:_MOST_ORDERS]
        self._round += 1
        self._move = 0
        later = self._round - len(self._others)
        if later <= 0:
            state.task[:] = self._others[self._round - 1]
        else:
            rank = (later & -later).bit_length() - 1  # 0 1 0 2 0 1 0 3 ...
            state.task[:] = self._results[rank % len(self._results)][2]
            if later % _COPY_ROUNDS == _COPY_ROUNDS - 1:
                self._copy_period()
            cycle = later // _MOST_ORDERS
            self._length = int(self._first_length * _GROWTH**cycle)
        state.position[state.task] = np.arange(len(state.task))
        begin(self._lanes, state, self._span)
        self._keep_best()
        self._set_temperatures()

    def _copy_period(self) -> None:
        """Replace the order of the state by one that leaves out a period and repeats another."""
        order = self._order_of(self._state.task)
        random = np.random.default_rng((self._seed, self._round))
        n_pairs = 1 + self._length // _MOVES_A_PAIR
        copy = period_copy(self.problem, order, self._objective, n_pairs, random)
        if copy is not None:
            self._state.task[:] = new_state(self.problem, copy, 0).task

    def _order_of(self, task: Ints) -> LaneOrder:
        """Return the order of these tasks."""
        return order_of_state(self.problem, task, self.order.ptr, self.order.microbatches)

    def _keep_best(self) -> None:
        """Note a better order; sums of bytes are checked anew, since searching rounds them."""
        value = float(self._state.values[BEST])
        if value < self.value:
            order = self._order_of(self._state.best)
            if keeps_limit(self.problem, order):
                self.order, self.value = order, value


def improve(
    problem: OrderProblem,
    order: LaneOrder,
    *,
    evaluations: int,
    seed: int,
    objective: Objective = "makespan",
    deadline: float | None = None,
    target: float = -math.inf,
    temperature: float | None = None,
) -> LaneOrder:
    """Return a better order, found by simulated annealing; never a worse one.

    Parameters
    ----------
    problem, order, seed, objective, temperature
        As for `LocalSearch`. Without a deadline, the answer is the same for the same arguments.
    evaluations
        Number of moves to try.
    deadline
        Value of `time.perf_counter` at which to stop; None for none.
    target
        Value of the objective (s) at which to stop, such as a lower bound.
    """
    most = check_count("evaluations", evaluations, 0)
    search = LocalSearch(
        problem,
        order,
        seed=seed,
        objective=objective,
        temperature=temperature,
        budget=most if temperature is None else None,
    )
    while search.moves < most and search.value > target:
        if deadline is not None and time.perf_counter() >= deadline:
            break
        search.advance_for(_CALL_SECONDS, most - search.moves, target)
    return search.order


# Periods of an order.

Floats = NDArray[np.float64]
#: Micro-batches of the periods that are copied.
_PERIOD_LENGTHS = (1, 2, 3, 4, 5, 6, 8)


def periods_of(problem: OrderProblem, order: LaneOrder, length: int) -> Ints:
    """Return where periods of ``length`` micro-batches begin; shape ``(n_periods, n_devices)``.

    A period begins, on each device, at the first position at a moment or later from which the
    device runs each lane ``length`` times; or at the last such position, if all are earlier. There
    is no period if a device has no such position.
    """
    start = evaluate(problem, order).start
    begins = [_period_begins(problem, order, device, length) for device in range(problem.n_devices)]
    if not all(map(len, begins)):
        return np.empty((0, problem.n_devices), dtype=np.int64)
    moments = np.unique(np.concatenate([start[x] for x in begins]))
    columns = [x[np.minimum(np.searchsorted(start[x], moments), len(x) - 1)] for x in begins]
    return np.unique(np.stack(columns, axis=1), axis=0)


def _period_begins(problem: OrderProblem, order: LaneOrder, device: int, length: int) -> Ints:
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
    another part. The length of both periods and the pairs that are tried are random. None: no order
    that was tried runs and keeps the limits.
    """
    length = int(random.choice(_PERIOD_LENGTHS))
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


def _fill_copy(
    lanes: Ints, ptr: Ints, left_out: Ints, repeated: Ints, size: Ints, other: Ints
) -> bool:
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


def _objective_of_times(
    problem: OrderProblem, ptr: Ints, start: Floats, end: Floats, span: bool
) -> float:
    """Return the objective (s), infinity for a deadlock."""
    value = 0.0
    for device in range(problem.n_devices):
        first, last = ptr[device], ptr[device + 1] - 1
        if first <= last:
            if np.isnan(end[last]):
                return math.inf
            value = max(value, end[last] + (-start[first] if span else problem.tail[device]))
    return value


@kernel(fill_times, fill_peaks, _fill_copy, _objective_of_times)
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
        if not _fill_copy(lanes, ptr, begins[pairs[k, 0]], begins[pairs[k, 1]], size, other):
            continue
        end[:], done[:], ready[:], channel_free[:], peak[:] = np.nan, 0, 0.0, 0.0, 0.0
        fill_times(problem, other, ptr, receiver, row, first, start, end, done, ready, channel_free)
        value = _objective_of_times(problem, ptr, start, end, span)
        if value < least:
            done[:] = first
            fill_peaks(problem, other, ptr, row, done, peak)
            if (peak <= problem.limit).all():
                least = value
                best[:] = other
    return least


# Orders of micro-batches that differ.

#: Share of swaps among moves.
_SHARE_OF_SWAPS = 0.5


def first_microbatch_orders(problem: OrderProblem) -> list[Ints]:
    """Return orders of micro-batches to begin with: their own one, and three by length.

    These are the longest first, the shortest first, and the short ones at both ends, which fill
    and drain the pipeline. The length is the seconds over all stages. Paths keep their own ones.
    """
    n_lanes, counts = len(problem.count), path_counts(problem)
    path = np.repeat(np.arange(len(counts)), counts)
    seconds = problem.seconds.reshape(-1, n_lanes)[problem.class_of[: len(path)]]
    length = (seconds * (problem.path == path[:, None])).sum(axis=1)
    shortest = np.lexsort((length, path))
    longest = np.lexsort((-length, path))
    ends = [
        np.concatenate([own[::2], own[1::2][::-1]])
        for own in np.split(shortest, np.cumsum(counts)[:-1])
    ]
    return [np.arange(len(path)), longest, shortest, np.concatenate(ends)]


def anneal_microbatches(
    problem: OrderProblem,
    order: LaneOrder,
    *,
    n_moves: int,
    random: np.random.Generator,
    objective: Objective,
    temperature: float,
    target: float = -math.inf,
) -> LaneOrder:
    """Return an order with other micro-batches in turn that takes no longer.

    Simulated annealing, as `pipesim.order_search.annealing`, with two moves: two micro-batches of a
    path change places, or one moves to another place. The lanes of each device stay as they are.
    Arguments are as for `improve`.
    """
    counts = path_counts(problem)
    first_of_path = np.cumsum(counts) - counts
    path = np.repeat(np.arange(len(counts)), counts)
    microbatches = np.arange(len(path)) if order.microbatches is None else order.microbatches
    best = current = order._replace(microbatches=microbatches)
    least = value = float(getattr(evaluate(problem, order), objective))
    mean = float(problem.seconds.mean()) or 1.0
    for move, (x, y, kind, threshold) in enumerate(random.random((n_moves, 4)).tolist()):
        if least <= target:
            break
        place = int(x * len(path))
        other = int(first_of_path[path[place]] + int(y * counts[path[place]]))
        changed = current._replace(
            microbatches=_with_moved_microbatch(
                current.microbatches, place, other, kind < _SHARE_OF_SWAPS
            )
        )
        now = 0.0
        if temperature > 0.0:
            now = temperature * (min(_COLD, temperature) / temperature) ** (move / n_moves)
        most = value - mean * now * math.log(1.0 - threshold)
        result = float(getattr(evaluate(problem, changed), objective))
        if place == other or result > most or not keeps_limit(problem, changed):
            continue
        current, value = changed, result
        if value < least:
            best, least = current, value
    return best


def _with_moved_microbatch(microbatches: Ints | None, place: int, other: int, swap: bool) -> Ints:
    """Return micro-batches of which two change places, or one moves to the place of another."""
    assert microbatches is not None
    if swap:
        changed = microbatches.copy()
        changed[[place, other]] = microbatches[[other, place]]
        return changed
    rest = np.delete(microbatches, place)
    inserted: Ints = np.insert(rest, other, microbatches[place])
    return inserted
