"""Priorities of the list scheduler: which of the ready actions a device starts first."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipesim.errors import ArgumentError, PipeError, check_name, number
from pipesim.list_scheduling.problem import BACKWARD, FORWARD, WEIGHT, Problem
from pipesim.list_scheduling.scheduler import PriorityKey
from pipesim.ops import Action, Op

__all__ = ["PRIORITIES", "Priority", "priority_key"]

#: ``priority(action, ready)`` ranks an action that is ready at ``ready`` seconds; lowest first.
Priority = Callable[[Action, float], Any]


def priority_key(priority: object, problem: Problem, ops: Sequence[Op]) -> PriorityKey:
    """Return the list scheduler's key of a priority, which is a name or a user's function.

    Parameters
    ----------
    priority
        The user's argument: a name of `PRIORITIES`, or a `Priority`.
    problem
        Actions to order.
    ops
        Operation of each phase.

    Raises
    ------
    ArgumentError
        For another name, and for a function that does not take an action and a time.
    """
    if callable(priority):
        _check_takes_two(priority)
        return _UserKey(priority, ops)
    return PRIORITIES[check_name("priority", priority, PRIORITIES)](problem)


def _by_phase(*phases: int) -> Callable[[Problem], PriorityKey]:
    """Return a priority: phases in this order, then micro-batches, then deep stages first."""
    rank = {phase: position for position, phase in enumerate(phases)}

    def make_key(problem: Problem) -> PriorityKey:
        return lambda phase, stage, microbatch, ready: (rank[phase], microbatch, -stage)

    return make_key


def _first_come(problem: Problem) -> PriorityKey:
    return lambda phase, stage, microbatch, ready: (ready, microbatch, phase, -stage)


def _critical_path(problem: Problem) -> PriorityKey:
    """Rank by the seconds of the longest chain of actions that begins with this one."""
    n_stages = problem.placement.n_stages
    weight = list(problem.seconds[WEIGHT]) if problem.is_split else [0.0] * n_stages
    # A backward is followed by those of all earlier stages, and a W may follow any of them.
    backward = [weight[0] + problem.seconds[BACKWARD][0]]
    for stage in range(1, n_stages):
        backward.append(problem.seconds[BACKWARD][stage] + max(weight[stage], backward[-1]))
    down = list(itertools.accumulate(reversed(problem.seconds[FORWARD])))[::-1]
    chain = ([x + backward[-1] for x in down], backward, weight)
    return lambda phase, stage, microbatch, ready: (-chain[phase][stage], microbatch, phase)


#: The priorities that have a name.
PRIORITIES: dict[str, Callable[[Problem], PriorityKey]] = {
    "backward_first": _by_phase(BACKWARD, FORWARD, WEIGHT),
    "forward_first": _by_phase(FORWARD, BACKWARD, WEIGHT),
    "first_come": _first_come,
    "critical_path": _critical_path,
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


@dataclass(frozen=True)
class _UserKey:
    """The key of a user's priority; every rank is a tuple of numbers."""

    priority: Priority
    ops: Sequence[Op]

    def __call__(self, phase: int, stage: int, microbatch: int, ready: float) -> tuple[float, ...]:
        action = Action(stage, self.ops[phase], microbatch)
        try:
            rank = self.priority(action, ready)
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
        return tuple(x for x in numbers if x is not None)
