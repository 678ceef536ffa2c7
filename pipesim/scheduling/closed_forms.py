"""`ClosedForm` and `Counts`: properties of a schedule as functions of its counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipesim.errors import ArgumentError, number


@dataclass(frozen=True)
class ClosedForm:
    """A formula of the number of devices ``p``, of micro-batches ``m``, and of options.

    Attributes
    ----------
    text
        The formula.
    value
        ``value(n_devices, n_microbatches, **options)``, the options by the names of the
        schedule's parameters; options that the formula does not have are left out.
    assumes
        Assumptions besides stages of equal cost and free transfers.
    exact
        Whether a simulation gives exactly this value; else it is a bound or an approximation.

    See Also
    --------
    pipesim.register : Register a schedule with its closed forms.
    pipesim.schedules : List the closed forms of all schedules, with their values.

    Examples
    --------
    >>> import pipesim as ps
    >>> bubble = ps.ClosedForm("(p - 1) / (m + p - 1)", lambda p, m: (p - 1) / (m + p - 1))
    >>> bubble.of(n_devices=4, n_microbatches=9)
    0.25
    """

    text: str
    value: Callable[..., float]
    assumes: str = ""
    exact: bool = True

    def of(self, n_devices: int, n_microbatches: int, **options: Any) -> float:
        """Return the value; NaN if the formula fails, so that others can still be listed.

        It raises no error.

        Parameters
        ----------
        n_devices, n_microbatches
            The numbers ``p`` and ``m``.
        **options
            Options of the schedule; those that the formula does not have are left out.

        Returns
        -------
        float
            The value; NaN if the formula raises, or returns no number.

        Examples
        --------
        >>> import pipesim as ps
        >>> form = ps.ClosedForm("(p - 1) / v", lambda p, m, n_chunks: (p - 1) / n_chunks)
        >>> form.of(5, 8, n_chunks=2), form.of(5, 8)  # the second lacks an option
        (2.0, nan)
        """
        try:
            value = number(call_with_known(self.value, n_devices, n_microbatches, options))
        except Exception:  # a user's formula may raise anything
            return math.nan
        return math.nan if value is None else value


class Counts(NamedTuple):
    """Numbers of devices and micro-batches that a schedule takes: in words, and as a test.

    Attributes
    ----------
    text
        The numbers in words, for error messages and tables.
    allow
        ``allow(n_devices, n_microbatches, **options)`` returns whether a schedule takes these
        numbers; options that it does not have are left out. By default any.

    See Also
    --------
    pipesim.register : Register a schedule with the counts that it takes.
    pipesim.ClosedForm : A formula of the same numbers.

    Examples
    --------
    >>> import pipesim as ps
    >>> counts = ps.Counts("an even number of devices", lambda p, m: p % 2 == 0)
    >>> counts.allow(4, 8), counts.allow(3, 8)
    (True, False)
    """

    text: str = "any"
    allow: Callable[..., bool] = lambda p, m: True


def call_with_known(function: Callable[..., Any], p: int, m: int, options: dict[str, Any]) -> Any:
    """Call a formula, or a test, with the counts and the options that it has parameters for."""
    parameters = inspect.signature(function).parameters if options else {}
    return function(p, m, **{name: value for name, value in options.items() if name in parameters})


def check_form(where: str, form: object) -> None:
    """Raise `ArgumentError` unless ``form`` is a `ClosedForm` of a text and a function."""
    _check_kind(where, form, ClosedForm, ("text", "value"))


def check_counts(where: str, counts: object) -> None:
    """Raise `ArgumentError` unless ``counts`` is a `Counts` of a text and a function."""
    _check_kind(where, counts, Counts, ("text", "allow"))


def _check_kind(where: str, value: object, kind: type, fields: tuple[str, str]) -> None:
    text, function = fields
    if not isinstance(value, kind):
        got = f"{value!r} ({type(value).__name__})"
    elif not isinstance(getattr(value, text), str):
        got = f"one with {text}={getattr(value, text)!r}"
    elif not callable(getattr(value, function)):
        got = f"one with {function}={getattr(value, function)!r}, which is no function"
    else:
        return
    raise ArgumentError(
        f'{where} must be a pipesim.{kind.__name__}("...", lambda p, m: ...), got {got}'
    )
