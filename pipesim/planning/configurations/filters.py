"""Functions of users that say which configurations a plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipesim.errors import ArgumentError, check_function, check_list
from pipesim.planning.configurations.choice import PlanChoice

#: Functions that all must keep a configuration.
Filters = Sequence[Callable[[PlanChoice], bool]]


def checked_filters(where: Any) -> Filters:
    """Return the functions that configurations must pass."""
    listed = [] if where is None else [where] if callable(where) else where
    functions = check_list("where", listed, "a function, or a list of functions")
    for function in functions:
        check_function("where", function, "where(choice)")
    return functions


def keeps(filters: Filters, choice: PlanChoice) -> bool:
    """Return whether all functions keep a configuration."""
    return all(_answer(function, choice) for function in filters)


def _answer(function: Callable[[PlanChoice], bool], choice: PlanChoice) -> bool:
    """Return what one function says of a configuration."""
    try:
        answer: object = function(choice)
    except Exception as error:
        raise ArgumentError(
            f"where raised {type(error).__name__} for {choice}: {error}; it must return True or "
            "False"
        ) from error
    if not isinstance(answer, (bool, np.bool_)):
        raise ArgumentError(
            f"where must return True or False, got {answer!r:.60} for {choice}"
            + "; it may lack a return" * (answer is None)
        )
    return bool(answer)
