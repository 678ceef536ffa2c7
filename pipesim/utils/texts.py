"""Text of numbers, units, tables, CSV and JSON, and back.

Python accepts more than these formats allow: ``1_0`` and digits of every script as numbers, and
JSON that has a key twice.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from pipesim.errors import ArgumentError, CapacityError, check_name

#: JSON key or CSV column of a checksum.
CHECKSUM = "checksum"
#: Characters of a line of text, beyond which sentences are wrapped.
COLUMNS = 88


def parse_int(text: str) -> int | None:
    """Parse a whole number in the digits 0 to 9; return None if the text is none."""
    try:
        return int(text) if _plain(text) else None
    except ValueError:
        return None


def parse_float(text: str) -> float | None:
    """Parse a number, ``inf`` and ``nan`` included; return None if the text is none."""
    try:
        return float(text) if _plain(text) else None
    except ValueError:
        return None


def parse_floats(texts: Sequence[str]) -> list[float] | None:
    """Parse many numbers fast; return None if one of the texts is none."""
    try:
        return [*map(float, texts)] if _plain("".join(texts)) else None
    except ValueError:
        return None


def _plain(text: str) -> bool:
    return text.isascii() and "_" not in text


def csv_rows(text: str, line: str = "line") -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV, empty lines included.

    For a row that is no CSV, a `ValueError` has its number, after the word ``line``.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"{line} {reader.line_num}: {error}") from error


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; ``options`` are those of `json.loads`.

    A text that is no JSON, a key that an object has twice and nesting that is too deep raise a
    `ValueError`; it is a `json.JSONDecodeError` if it has a position.
    """
    try:
        return json.loads(text, **{"object_pairs_hook": unique_keys, **options})
    except RecursionError as error:
        raise ValueError("it is nested too deeply to be read") from error
    except MemoryError as error:
        raise CapacityError(f"{len(text)} characters of JSON are more than memory holds") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise `ValueError` for a key that it has twice."""
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice; give it once")
    return unique_pairs


def checksum(content: Mapping[str, Any] | str) -> str:
    """Return the SHA-256 of a text, or of a JSON object without its key ``checksum``.

    The checksum of an object depends on its values and the order of its keys, not on white space.
    """
    if not isinstance(content, str):
        content = json.dumps({key: value for key, value in content.items() if key != CHECKSUM})
    return hashlib.sha256(content.encode()).hexdigest()


def checksum_mismatch(where: object, remedy: str) -> str:
    """Return the error message for a checksum that does not match."""
    return (
        f"{where} was changed after it was written: its checksum does not match; restore it, or if "
        f"the change is meant, {remedy}"
    )


# Seconds and bytes, in fitting units

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


def parse_rate(text: str) -> float | None:
    """Parse bytes a second such as ``"25GB/s"``, or bits such as ``"400 Gb/s"``; None if none."""
    amount, slash, second = text.strip().partition("/")
    if second != "s":
        return None if slash else parse_float(amount)
    value = parse_bytes(amount)
    is_bits = amount.endswith("b")  # data sheets of networks write b for bits, and B for bytes
    return value if value is None or not is_bits else value / 8


def in_bytes(name: str, value: Any) -> Any:
    """Return texts such as ``"80GiB"``, or in lists, as numbers of bytes; others as they are."""
    if isinstance(value, list | tuple):
        return [in_bytes(name, part) for part in value]
    if not isinstance(value, str):
        return value
    nbytes = parse_bytes(value)
    if nbytes is None:
        raise ArgumentError(
            f"{name} must be bytes such as 80e9 or 80GiB, got {value!r:.60}; units are B, "
            "kB, MB, GB, TB and KiB, MiB, GiB, TiB"
        )
    return nbytes


def align_columns(columns: Mapping[str, Sequence[str]], align: str = ">") -> str:
    """Return a table as text: its first column aligned left, the others by ``align``.

    ``align`` is one of ``<`` and ``>`` for all other columns, or one for each.
    """
    widths = [max(map(len, [head, *cells])) for head, cells in columns.items()]
    aligns = ["<", *(align * (len(widths) - 1) if len(align) == 1 else align)]
    return "\n".join(
        "  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths, strict=True)).rstrip()
        for row in [tuple(columns), *zip(*columns.values(), strict=True)]
    )
