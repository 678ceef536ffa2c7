"""Parse texts of files and of the command line: numbers, CSV, JSON, and their checksums.

Python accepts more than these formats allow: ``1_0`` and digits of every script as numbers, and
JSON that has a key twice.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipesim.errors import CapacityError

#: JSON key or CSV column of a checksum.
CHECKSUM = "checksum"


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

    Raises
    ------
    ValueError
        For a row that is no CSV. The message has its line number, after the word ``line``.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"{line} {reader.line_num}: {error}") from error


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text; ``options`` are those of `json.loads`.

    Raises
    ------
    ValueError
        For a text that is no JSON (`json.JSONDecodeError` if the error has a position), a key that
        an object has twice, and nesting that is too deep to parse.
    CapacityError
        If there is not enough memory.
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
