"""Seconds and bytes as text, in fitting units, and bytes from text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

from pipesim.errors import ArgumentError, check_name
from pipesim.utils.texts import parse_float

T = TypeVar("T")
#: Bytes as a number, or as a text such as ``"80GiB"``.
Bytes: TypeAlias = float | str
#: Units in a second.
TIME_UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
#: Bytes of each unit that a text of bytes may have, by its lower case.
_SIZES = {unit.lower(): 1024.0**k for k, unit in enumerate(_BYTE_UNITS)} | {
    unit.lower(): 1000.0**k for k, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))
}


def time_unit(seconds: float, unit: str | None = None) -> tuple[str, float]:
    """Return a unit's sign and its number in a second; by default the unit fits ``seconds``."""
    if unit is None:
        small = (name for name, scale in TIME_UNITS.items() if abs(seconds) * scale >= 0.9995)
        unit = next(small, "ns") if seconds else "s"
    name = check_name("unit of time", unit, TIME_UNITS)
    return {"us": "µs"}.get(name, name), TIME_UNITS[name]


def byte_unit(nbytes: float) -> tuple[str, float]:
    """Return the unit that fits ``nbytes``, and its size in bytes."""
    power = 0
    while abs(nbytes) >= 1023.5 * 1024.0**power and power < len(_BYTE_UNITS) - 1:
        power += 1
    return _BYTE_UNITS[power], 1024.0**power


def significant(value: float) -> str:
    """Return a value with three digits, without an exponent."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.9995 else f"{value:.3g}"


def format_time(seconds: float) -> str:
    """Return seconds in a fitting unit, such as ``"412 ms"``; ``"n/a"`` for NaN."""
    if math.isnan(seconds):
        return "n/a"
    sign, scale = time_unit(seconds)
    return f"{significant(seconds * scale)} {sign}"


def format_bytes(nbytes: float) -> str:
    """Return bytes in a fitting unit, such as ``"3.25 GiB"``."""
    sign, size = byte_unit(nbytes)
    return f"{significant(nbytes / size)} {sign}"


def format_decimal(value: float, unit: str) -> str:
    """Return a value with a decimal prefix, such as ``"450 GB/s"`` or ``"312 TFLOP/s"``."""
    power = 0
    while abs(value) >= 999.5 * 1000.0**power and power < len(_PREFIXES) - 1:
        power += 1
    scaled = value / 1000.0**power
    number = significant(scaled) if abs(scaled) < 999.5 else f"{scaled:.3g}"
    return f"{number} {_PREFIXES[power]}{unit}"


def format_numbers(values: Iterable[float], unit: float = 1.0) -> list[str]:
    """Return values in ``unit``, all with as many decimals as show five digits of the largest.

    NaN is ``-``.
    """
    scaled = [float(value) / unit for value in values]
    largest = max((value for value in scaled if not math.isnan(value)), default=0.0)
    digits = math.floor(math.log10(largest)) if 0 < largest < math.inf else 4
    decimals = min(max(4 - digits, 0), 9)
    return ["-" if math.isnan(value) else f"{value:.{decimals}f}" for value in scaled]


def parse_bytes(text: str) -> float | None:
    """Parse bytes such as ``"80GiB"``, ``"80 GB"`` or ``"8e10"``; None if the text is none."""
    parts = re.fullmatch(r"([-+.\deE]+) ?([kmgtpKMGTP]?i?[bB])?", text.strip(), re.ASCII)
    value = parse_float(parts[1]) if parts else None
    if parts is None or value is None:
        return None
    size = _SIZES.get((parts[2] or "B").lower())
    return None if size is None else value * size


def in_bytes(name: str, value: T | str) -> T | float:
    """Return a text such as ``"80GiB"`` as a number of bytes, and other values as they are."""
    if not isinstance(value, str):
        return value
    nbytes = parse_bytes(value)
    if nbytes is None:
        raise ArgumentError(
            f"{name} must be bytes such as 80e9 or 80GiB, got {value!r:.60}; units are B, "
            "kB, MB, GB, TB and KiB, MiB, GiB, TiB"
        )
    return nbytes
