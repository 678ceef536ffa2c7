"""Priorities of the list scheduler: which of the ready actions a device starts first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ArgumentError, PipeError, check_name, number
from pipesim.list_scheduling.changed_problems import microbatch_seconds
from pipesim.list_scheduling.problem import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Problem,
    action_columns,
)
from pipesim.list_scheduling.queues import Ranks
from pipesim.ops import Action, Op
from pipesim.utils.csr import Ints

Floats = NDArray[np.float64]
#: ``priority(action, ready)`` ranks an action that is ready at ``ready`` seconds; lowest first.
Priority = Callable[[Action, float], Any]


def action_ranks(priority: object, problem: Problem, ops: Sequence[Op]) -> Ranks:
    """Return the ranks of all actions by a priority, which is a name or a user's function.

    Parameters
    ----------
    priority
        The user's argument: a name of `PRIORITIES`, or a `Priority`.
    problem
        Actions to order.
    ops
        Operation of each phase.
    """
    if callable(priority):
        _check_takes_two(priority)
        scores = cast(Floats, _UserScores(priority, problem, ops))
        return Ranks(scores, np.zeros(len(problem.lane), int), by_arrival=True)
    return PRIORITIES[check_name("priority", priority, PRIORITIES)](problem)


def _by_phase(*phases: int) -> Callable[[Problem], Ranks]:
    """Return a priority: phases in this order, then micro-batches, then deep stages first."""

    def make_ranks(problem: Problem) -> Ranks:
        phase, stage, microbatch = action_columns(problem)
        position = np.argsort(phases)[phase].astype(float)
        return Ranks(position, microbatch * problem.n_stages - stage, by_arrival=False)

    return make_ranks


def _first_come(problem: Problem) -> Ranks:
    phase, stage, microbatch = action_columns(problem)
    tie = (microbatch * 3 + phase) * problem.n_stages - stage
    return Ranks(np.zeros(len(tie)), tie, by_arrival=True)


#: Priorities that take micro-batches by length, and its sign.
_BY_LENGTH = {"longest_first": -1.0, "critical_path": -1.0, "shortest_first": 1.0}


def _critical_path(problem: Problem) -> Ranks:
    """Rank by the seconds of the longest chain of actions that begins with this one."""
    phase, stage, microbatch = action_columns(problem)
    shape = problem.n_phases, problem.n_stages, problem.n_microbatches
    seconds = np.empty(shape)
    seconds[phase, stage, microbatch] = problem.seconds
    weight = seconds[WEIGHT] if problem.n_phases > WEIGHT else np.zeros(shape[1:])
    # A backward is followed by those of all earlier stages, and a W may follow any of them.
    backward = weight + seconds[BACKWARD]
    for s in range(1, problem.n_stages):
        backward[s] = seconds[BACKWARD][s] + np.maximum(weight[s], backward[s - 1])
    down = np.cumsum(seconds[FORWARD][::-1], axis=0)[::-1]
    chain = np.stack([down + backward[-1], backward, weight])
    return Ranks(-chain[phase, stage, microbatch], microbatch * 3 + phase, by_arrival=False)


def microbatch_order(priority: object, problem: Problem) -> Ints | None:
    """Return the micro-batches in the order in which a priority starts them; None for their own.

    Equally long ones stay in order, and each path has its own ones.
    """
    if not isinstance(priority, str) or priority not in _BY_LENGTH:
        return None
    length = _BY_LENGTH[priority] * microbatch_seconds(problem)
    path = np.repeat(np.arange(problem.n_paths), problem.n_of_path)
    order: Ints = np.lexsort((length, path))
    is_own = bool((order[1:] > order[:-1]).all())
    return None if is_own else order


#: The priorities that have a name.
PRIORITIES: dict[str, Callable[[Problem], Ranks]] = {
    "backward_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "forward_first": _by_phase(FORWARD, BACKWARD, WEIGHT),
    "first_come": _first_come,
    "critical_path": _critical_path,
    # For micro-batches in this order, see `microbatch_order`.
    "longest_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "shortest_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
}


def _check_takes_two(priority: Callable[..., Any]) -> None:
    try:
        inspect.signature(priority).bind(Action(0, Op.F, 0), 0.0)
    except TypeError as error:
        raise ArgumentError(
            f"priority must be a function of (action, ready), got {priority!r}: {error}"
        ) from error
    except ValueError:  # some functions in C have no signature: their call shows what they take
        return


class _UserScores:
    """The scores of a user's priority, computed when the time of an action is known.

    Every score is a tuple of numbers.
    """

    def __init__(self, priority: Priority, problem: Problem, ops: Sequence[Op]) -> None:
        phase, stage, microbatch = (column.tolist() for column in action_columns(problem))
        self._columns = phase, stage, microbatch
        self._priority, self._ops = priority, ops
        self._scores: list[tuple[float, ...]] = [()] * len(phase)

    def __getitem__(self, action: int) -> tuple[float, ...]:
        return self._scores[action]

    def __setitem__(self, index: int, ready: float) -> None:
        phase, stage, microbatch = (column[index] for column in self._columns)
        action = Action(stage, self._ops[phase], microbatch)
        try:
            rank = self._priority(action, float(ready))
        except PipeError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, raised {type(error).__name__}: "
                f"{error}"
            ) from error
        numbers = [number(x) for x in (rank if isinstance(rank, tuple) else (rank,))]
        if not numbers or None in numbers:
            raise ArgumentError(
                f"priority of {action}, ready at {ready:.6g} s, must be a number or a tuple of "
                f"numbers, got {rank!r}"
            )
        self._scores[index] = tuple(x for x in numbers if x is not None)
