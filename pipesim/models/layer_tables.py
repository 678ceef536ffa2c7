"""Tables of layers for `pipesim.Layers`: their columns, their checks, and CSV files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipesim.costs.costs import VALUE_FIELDS
from pipesim.errors import CostsError, number, suggestion
from pipesim.utils.files import read_text
from pipesim.utils.texts import csv_rows, parse_float

#: Columns that a profile may have. Of the seconds, `forward` is needed, and `backward` or both
#: `input_grad` and `weight_grad`.
COLUMNS = tuple(name for name in VALUE_FIELDS if name != "launch")
#: A column of names for readers, which is ignored.
NAMES = "layer"
#: Columns to suggest in messages.
EXAMPLE = '{"forward": [1e-3, 1e-3], "backward": [2e-3, 2e-3]}'


def read_columns(path: Path) -> dict[str, list[float]]:
    """Return the columns of a CSV file; see `pipesim.Layers.read` for its form and errors."""
    text = read_text(path, "layers from", CostsError)
    try:
        lines = [(line, row) for line, row in csv_rows(text) if any(map(str.strip, row))]
    except ValueError as error:
        raise CostsError(f"cannot read layers from {path}: {error}") from error
    if not lines:
        raise CostsError(f"{path} is empty; its first line must name columns, of {COLUMNS}")
    header = [name.strip() for name in lines[0][1]]
    check_header(f"{path}, line {lines[0][0]}", header)
    columns: dict[str, list[float]] = {name: [] for name in header if name != NAMES}
    for line, row in lines[1:]:
        if len(row) != len(header):
            raise CostsError(
                f"{path}, line {line}: {len(row)} values for {len(header)} columns; give one "
                "value a column"
            )
        for name, text in zip(header, row, strict=True):
            if name != NAMES:
                where = f"{path}, line {line}, column {name!r}"
                columns[name].append(checked_value(where, name, text))
    return columns


def check_header(where: str, names: list[str], allowed: Sequence[str] = (NAMES, *COLUMNS)) -> None:
    """Raise `CostsError` for columns that are unknown, named twice or missing."""
    for name in names:
        if name not in allowed:
            raise CostsError(
                f"{where}: unknown column {name!r}{suggestion(name, COLUMNS)} "
                f"(known: {', '.join((NAMES, *COLUMNS))})"
            )
        if names.count(name) > 1:
            raise CostsError(f"{where}: column {name!r} occurs twice; give it once")
    if "forward" not in names:
        raise CostsError(f"{where}: column 'forward' is missing; give the seconds of F")
    halves = {"input_grad", "weight_grad"} - set(names)
    if len(halves) == 1 or (halves and "backward" not in names):
        missing = "backward" if len(halves) == 2 else min(halves)
        raise CostsError(
            f"{where}: column {missing!r} is missing; give the seconds of B in 'backward', or "
            "those of I and W in 'input_grad' and 'weight_grad'"
        )


def column_values(where: str, name: str, values: object) -> tuple[object, ...]:
    """Return the values of a column as a tuple; raise `CostsError` if they are no sequence."""
    try:
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError  # their elements are letters, numbers and keys
        return tuple(values)  # type: ignore[arg-type]  # raises if it has no elements
    except TypeError:
        raise CostsError(
            f"{where}, column {name!r} must be a sequence of one value a layer, got "
            f"{values!r:.60}; give a list, such as {EXAMPLE}"
        ) from None


def checked_value(where: str, name: str, value: object) -> float:
    """Return a value, or the number in a text, as a float; raise `CostsError` for others."""
    result = number(parse_float(value) if isinstance(value, str) else value)
    if result is None or not 0 <= result < math.inf:
        unit = "bytes" if name.endswith("bytes") else "seconds"
        raise CostsError(f"{where}: must be finite {unit} >= 0, got {value!r}")
    return result


def joint_values(where: str, rows: object, n: int) -> tuple[tuple[float, ...], ...]:
    """Return the bytes of stages by first and last layer; raise `CostsError` for others."""
    name = "joint_activation_bytes"
    checked = tuple(
        tuple(
            checked_value(f"{where}, {name}, layers {a} to {b}", name, value)
            for b, value in enumerate(column_values(where, name, row))
        )
        for a, row in enumerate(column_values(where, name, rows))
    )
    shape = [len(checked), *{len(row) for row in checked}]
    if shape != [n, n]:
        raise CostsError(
            f"{where}: {name} must be {n} rows of {n} values, for {n} layers, got {len(checked)} "
            f"rows of {', '.join(map(str, shape[1:]))} values"
        )
    return checked
