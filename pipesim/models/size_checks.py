"""Checks of the sizes and rates in the formulas of a transformer."""

from __future__ import annotations

from math import inf

from pipesim.errors import ArgumentError, check_count, number

__all__ = ["check_divides", "check_size", "checked_rate"]

#: Sizes, and bytes or FLOP/s, up to which no product in a formula overflows.
_LARGEST, _FASTEST = 10**15, 1e100


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
    return f"{value}" if value < 10**30 else "a number of more than 30 digits"


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Raise `ArgumentError` if ``value`` does not divide ``whole``."""
    if whole % value:
        raise ArgumentError(
            f"{name}={value} does not divide {whole_name}={whole}; choose {name} such that it does"
        )


def checked_rate(name: str, value: object, unit: str) -> float:
    """Return ``value`` as a float, checked to be finite and >= 0; a rate (FLOP/s) must be > 0.

    Raises
    ------
    ArgumentError
        For anything else.
    """
    result = number(value)
    least = "> 0" if unit == "FLOP/s" else ">= 0"
    if result is None or not 0 <= result < inf or (result == 0 and unit == "FLOP/s"):
        raise ArgumentError(f"{name} must be finite {unit} {least}, got {value!r}")
    if result > _FASTEST:
        raise ArgumentError(f"{name} must be at most {_FASTEST:g} {unit}, got {value!r}")
    return result
