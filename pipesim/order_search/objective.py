"""What orders are compared by: the objectives, and when a time meets a lower bound."""

from __future__ import annotations

from typing import Literal

Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")

#: Relative error of sums of seconds: times that differ by less are equal.
ROUNDING = 1e-9


def meets(value: float, bound: float) -> bool:
    """Return whether a time is at most another (s), such as a lower bound, up to rounding."""
    return value <= bound * (1.0 + ROUNDING)


def checked_bound(bound: float, value: float, source: str) -> float:
    """Return a lower bound that is at most a time that an order reaches (s).

    Raises
    ------
    AssertionError
        If the bound is above the time by more than rounding. Then the bound is false, and proves
        nothing; ``source`` says where it is from.
    """
    if bound > value * (1.0 + ROUNDING):
        raise AssertionError(
            f"the lower bound of {source} is {bound!r} s, but an order takes {value!r} s. This is "
            "an error in pipesim; please report it with the placement, costs and arguments"
        )
    return min(bound, value)
