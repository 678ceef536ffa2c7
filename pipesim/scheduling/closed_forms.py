"""`ClosedForm` and `Counts`: what is known of a schedule as functions of its counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipesim.errors import ArgumentError, number

__all__ = ["ClosedForm", "Counts", "called", "check_counts", "check_form"]


@dataclass(frozen=True)
class ClosedForm:
    """A formula of the number of devices ``p``, of micro-batches ``m``, and of options.

    Attributes
    ----------
    text
        The formula.
    value
        ``value(n_devices, n_microbatches, **options)``, the options by the names that the schedule
        takes; those that the formula does not know are left out.
    assumes
        What it takes for granted beside stages of equal cost and free transfers.
    exact
        Whether a simulation gives just that, or it is a bound or an approximation.
    """

    text: str
    value: Callable[..., float]
    assumes: str = ""
    exact: bool = True

    def of(self, n_devices: int, n_microbatches: int, **options: Any) -> float:
        """Return the number; NaN where the formula fails, so that one does not hide the rest."""
        try:
            value = number(called(self.value, n_devices, n_microbatches, options))
        except Exception:  # whatever a formula of the user's own may raise
            return math.nan
        return math.nan if value is None else value


class Counts(NamedTuple):
    """Which numbers of devices and micro-batches a schedule takes: in words, and as a test."""

    text: str = "any"
    allow: Callable[..., bool] = lambda p, m: True


def called(function: Callable[..., Any], p: int, m: int, options: dict[str, Any]) -> Any:
    """Call a formula, or a test, with the counts and those of the options that it knows."""
    known = inspect.signature(function).parameters
    return function(p, m, **{name: value for name, value in options.items() if name in known})


def check_form(where: str, form: object) -> None:
    """Raise `ArgumentError` unless ``form`` is a `ClosedForm` of a text and a function."""
    _check_kind(where, form, ClosedForm, ("text", "value"))


def check_counts(where: str, counts: object) -> None:
    """Raise `ArgumentError` unless ``counts`` is a `Counts` of a text and a function."""
    _check_kind(where, counts, Counts, ("text", "allow"))


def _check_kind(where: str, given: object, kind: type, fields: tuple[str, str]) -> None:
    text, function = fields
    if not isinstance(given, kind):
        got = f"{given!r} ({type(given).__name__})"
    elif not isinstance(getattr(given, text), str):
        got = f"one with {text}={getattr(given, text)!r}"
    elif not callable(getattr(given, function)):
        got = f"one with {function}={getattr(given, function)!r}, which is no function"
    else:
        return
    raise ArgumentError(
        f'{where} must be a pipesim.{kind.__name__}("...", lambda p, m: ...), got {got}'
    )
