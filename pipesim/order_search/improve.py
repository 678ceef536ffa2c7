"""`improve`: a local search for a better order; `LocalSearch` runs it in parts."""

from __future__ import annotations

import math
import time
from typing import Literal

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
from pipesim.order_search.problem import OrderProblem
from pipesim.order_search.state import lanes_of, new_state, order_of_state

__all__ = ["OBJECTIVES", "LocalSearch", "Objective", "improve"]

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
#: Temperatures at which rounds begin, in turn, and at which they end, in mean seconds of a task.
_HOT, _COLD = (1.0, 0.3), 0.02
#: Moves of the first round and of the longest ones, for each task; a round has twice as many moves
#: as the one before.
_FIRST_MOVES, _MOST_MOVES = 100, 2000
#: Seconds of a call of the kernel, after which the deadline is checked.
_CALL_SECONDS = 0.05
#: Moves times tasks that run as Python, at about a microsecond each, before kernels are compiled.
_PLAIN_TASKS = 200_000


class LocalSearch:
    """Simulated annealing in rounds, each from the best order so far.

    The orders depend on the seed and on the number of moves alone, and not on the parts in which
    they are made.

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
        from a good order. By default two high ones in turn.

    Raises
    ------
    ArgumentError
        For an order that does not keep the limits, or deadlocks.
    """

    def __init__(
        self,
        problem: OrderProblem,
        order: LaneOrder,
        *,
        seed: int,
        objective: Objective,
        temperature: float | None = None,
    ) -> None:
        self.problem, self.order = problem, order
        self.moves = 0
        self._hot = _HOT if temperature is None else (temperature,)
        self._span = check_name("objective", objective, OBJECTIVES) == "span"
        self._lanes = lanes_of(problem, order.ptr)
        self._state = new_state(problem, order, check_count("seed", seed, 0))
        self._round, self._move, self._length = 0, 0, _FIRST_MOVES * len(order.lanes)
        self._rate = 1000.0
        if not keeps_limit(problem, order):
            raise ArgumentError("the order holds more bytes than a device may; give one that fits")
        if not begin(self._lanes, self._state, self._span):
            raise ArgumentError("tasks of the order wait for each other; give one that runs")
        self.value = float(self._state.values[BEST])
        self._begin_round()

    def advance(self, n_moves: int, target: float = -math.inf) -> None:
        """Make moves, fewer if the objective reaches the target."""
        end = self.moves + n_moves
        while self.moves < end and self.value > target:
            if self._move == self._length:
                self._round += 1
                self._move, self._length = 0, min(2 * self._length, _MOST_MOVES * self._n_tasks)
                self._state.task[:] = self._state.best
                self._restart()
            last = min(self._length, self._move + end - self.moves)
            if (self.moves + last - self._move) * self._n_tasks > _PLAIN_TASKS:
                self.compile()
            anneal(self._lanes, self._state, self._span, self._move, last, self._length, target)
            self.moves += last - self._move
            self._move = last
            self._keep_best()

    def advance_for(self, seconds: float, most: int, target: float = -math.inf) -> int:
        """Make as many moves as take some seconds, at most ``most`` of them; return how many."""
        n_moves = min(most, max(1, int(self._rate * seconds)))
        began = time.perf_counter()
        self.advance(n_moves, target)
        rate = n_moves / max(time.perf_counter() - began, 1e-6)
        self._rate = min(rate, 4 * self._rate)
        return n_moves

    @staticmethod
    def compile() -> None:
        """Compile the kernels now, which takes some seconds if they are not cached."""
        begin.compile()
        anneal.compile()

    @property
    def _n_tasks(self) -> int:
        return len(self.order.lanes)

    def _begin_round(self) -> None:
        """Set the temperatures of the round."""
        mean = float(self.problem.seconds.mean()) or 1.0
        hot = self._hot[self._round % len(self._hot)]
        limits = hot * mean, min(_COLD, hot) * mean
        self._state.values[[FIRST_TEMPERATURE, LAST_TEMPERATURE]] = limits

    def _restart(self) -> None:
        """Begin a round with the best order."""
        state = self._state
        state.position[state.task] = np.arange(self._n_tasks)
        begin(self._lanes, state, self._span)
        self._begin_round()

    def _keep_best(self) -> None:
        """Note a better order; sums of bytes are checked anew, since searching rounds them."""
        value = float(self._state.values[BEST])
        if value < self.value:
            order = order_of_state(self.problem, self._state.best, self.order.ptr)
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

    Raises
    ------
    ArgumentError
        For arguments out of range, and for an order that does not keep the limits or deadlocks.
    """
    most = check_count("evaluations", evaluations, 0)
    search = LocalSearch(problem, order, seed=seed, objective=objective, temperature=temperature)
    while search.moves < most and search.value > target:
        if deadline is not None and time.perf_counter() >= deadline:
            break
        search.advance_for(_CALL_SECONDS, most - search.moves, target)
    return search.order
