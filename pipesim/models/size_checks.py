"""Checks of the sizes and rates in the formulas of a transformer."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pipesim.errors import ArgumentError, check_count, number

if TYPE_CHECKING:
    from pipesim.models.tensor_parallel import Shard


#: Sizes, and bytes or FLOP/s, up to which no product in a formula overflows.
_LARGEST, _LARGEST_VALUE = 10**15, 1e100


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``, small enough that no formula overflows."""
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


def checked_documents(shard: Shard) -> tuple[int, ...]:
    """Return the tokens of each document packed into the one sequence of a shard, if any."""
    documents, length = shard.documents, shard.model.sequence_length
    if isinstance(documents, tuple) and not documents:
        return ()
    if not isinstance(documents, (tuple, list)):
        raise ArgumentError(
            f"documents must be the tokens of each document, such as (512, 1536), got "
            f"{documents!r:.60}"
        )
    sizes = tuple(check_size(f"documents[{k}]", size) for k, size in enumerate(documents))
    if sum(sizes) != length or shard.microbatch_size != 1:
        raise ArgumentError(
            f"documents have {sum(sizes)} tokens, but a micro-batch is {shard.microbatch_size} "
            f"sequences of {length}; pack one sequence, with as many tokens"
        )
    return sizes


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Raise `ArgumentError` if ``value`` does not divide ``whole``."""
    if whole % value:
        raise ArgumentError(
            f"{name}={value} does not divide {whole_name}={whole}; choose {name} such that it does"
        )


def checked_value(name: str, value: object, unit: str, *, above_zero: bool = False) -> float:
    """Return ``value`` as a float, checked to be finite and >= 0, or > 0 if ``above_zero``."""
    result = number(value)
    if result is None or not 0 <= result < inf or (result == 0 and above_zero):
        least = "> 0" if above_zero else ">= 0"
        raise ArgumentError(f"{name} must be finite {unit} {least}, got {_text(value)}")
    if result > _LARGEST_VALUE:
        raise ArgumentError(f"{name} must be at most {_LARGEST_VALUE:g} {unit}, got {_text(value)}")
    return result
