"""Checks of the sizes and rates in the formulas of a transformer."""

from __future__ import annotations

from math import inf

from pipesim.errors import ArgumentError, check_count, number

__all__ = ["check_divides", "check_size", "checked_value"]

#: Sizes, and bytes or FLOP/s, up to which no product in a formula overflows.
_LARGEST, _LARGEST_VALUE = 10**15, 1e100


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``, small enough that no formula overflows.

    Raises
    ------
    ArgumentError
        For anything else.
    """
    size = check_count(name, value, minimum)
    if size > _LARGEST:
        raise ArgumentError(f"{name} must be at most {_LARGEST:g}, got {_shortened(size)}")
    return size


def _shortened(value: int) -> str:
    """Return an integer as text; those of more than 30 digits are not written out."""
    return f"{value}" if abs(value) < 10**30 else "a number of more than 30 digits"


def _text(value: object) -> str:
    """Return any value as a short text."""
    return _shortened(value) if isinstance(value, int) else f"{value!r:.60}"


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Raise `ArgumentError` if ``value`` does not divide ``whole``."""
    if whole % value:
        raise ArgumentError(
            f"{name}={value} does not divide {whole_name}={whole}; choose {name} such that it does"
        )


def checked_value(name: str, value: object, unit: str, *, above_zero: bool = False) -> float:
    """Return ``value`` as a float, checked to be finite and >= 0, or > 0 if ``above_zero``.

    Raises
    ------
    ArgumentError
        For anything else.
    """
    result = number(value)
    if result is None or not 0 <= result < inf or (result == 0 and above_zero):
        least = "> 0" if above_zero else ">= 0"
        raise ArgumentError(f"{name} must be finite {unit} {least}, got {_text(value)}")
    if result > _LARGEST_VALUE:
        raise ArgumentError(f"{name} must be at most {_LARGEST_VALUE:g} {unit}, got {_text(value)}")
    return result
