"""`improve`: a local search for a better order; `LocalSearch` runs it in parts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from pipesim.errors import ArgumentError, check_count, check_name
from pipesim.order_search.annealing import (
    BEST,
    FIRST_TEMPERATURE,
    LAST_TEMPERATURE,
    anneal,
    begin,
)
from pipesim.order_search.evaluate import keeps_limit
from pipesim.order_search.lane_order import LaneOrder
from pipesim.order_search.objective import OBJECTIVES, Objective
from pipesim.order_search.periods import best_copy, period_copy
from pipesim.order_search.problem import OrderProblem
from pipesim.order_search.state import lanes_of, new_state, order_of_state
from pipesim.utils.csr import Ints

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
    problem
        Lanes, costs and limits.
    order
        An order that keeps the limits.
    evaluations
        Number of moves to try.
    seed
        Seed of the random numbers; with the same number of evaluations and no deadline the answer
        is the same.
    objective
        ``"makespan"``, or ``"span"``: the longest time of a device from first start to last end.
    deadline
        Value of `time.perf_counter` at which to stop; None for none.
    target
        Value of the objective at which to stop, such as a lower bound.
    temperature
        As for `LocalSearch`.
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
