"""Measured steps from a CSV file, a DataFrame or mappings: settings of each, and its seconds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipesim.errors import ArgumentError, ArgumentTypeError, UnknownNameError, number, suggestion
from pipesim.lowering.lower import lower
from pipesim.models.transformer import Transformer
from pipesim.scheduling.registry import options_of_schedules
from pipesim.sweeps.settings import LOWERING
from pipesim.sweeps.transformer_costs import COST_OPTIONS, MODEL
from pipesim.utils.files import check_path, read_text
from pipesim.utils.texts import csv_rows, parse_float, parse_int

if TYPE_CHECKING:
    import pandas as pd


#: Columns that are counts of the run, besides the arguments of `pipesim.lower`.
_RUN = ("schedule", "n_devices", "n_microbatches", "global_batch")
#: Columns without an effect on the prediction: the measured time, and a name for readers.
_OTHERS = ("seconds", "label")
_TRUTHS = {"true": True, "false": False, "yes": True, "no": False}
#: Columns that are true or false, where 1 and 0 mean the same.
_FLAGS = frozenset(
    name
    for function in (Transformer, Transformer.costs, lower)
    for name, parameter in signature(function).parameters.items()
    if isinstance(parameter.default, bool)
)


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Attributes
    ----------
    where
        Its place in the source, for messages.
    settings
        Value of each column but ``seconds``, without empty cells.
    seconds
        Measured seconds.
    """

    where: str
    settings: dict[str, Any]
    seconds: float

    @property
    def label(self) -> str:
        """Name for readers: the column ``label``, or the row or line."""
        return str(self.settings.get("label", self.where.rpartition(", ")[2]))


def known_columns() -> tuple[str, ...]:
    """Return the columns that a table of measured steps may have."""
    options = {option for options in options_of_schedules().values() for option in options}
    columns = (*_OTHERS, *MODEL, "layers_per_stage", *COST_OPTIONS, *_RUN, *LOWERING.values(),
               *sorted(options))  # fmt: skip
    return tuple(dict.fromkeys(columns))


def measured_steps(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]] | Path | str, *, need_seconds: bool = True
) -> list[MeasuredStep]:
    """Return the steps of a table; see `pipesim.GPU.fit` for its columns.

    Without ``need_seconds``, steps without seconds have NaN.
    """
    from pipesim.utils.packages import pandas as pd

    if isinstance(rows, str | os.PathLike):
        tables = _read(check_path("rows", rows), need_seconds)
    elif isinstance(rows, pd.DataFrame):
        names = [str(name) for name in rows.columns]
        _check_columns("rows", names, need_seconds)
        records = rows.set_axis(names, axis=1).to_dict("records")
        tables = [(f"row {number}", record) for number, record in enumerate(records)]
    elif isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        tables = [(f"row {number}", row) for number, row in enumerate(rows)]
    else:
        raise ArgumentTypeError(
            "rows must be the path of a CSV file, a DataFrame or a list of mappings, got "
            f"{rows!r:.60} ({type(rows).__name__})"
        )
    if not tables:
        raise ArgumentError("rows has no measured step; give one a row")
    return [_step(where, table, need_seconds) for where, table in tables]


def _read(path: Path, need_seconds: bool) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the place and the values of each line of a CSV file below its header."""
    text = read_text(path, "rows from", ArgumentError)
    try:
        lines = [(line, row) for line, row in csv_rows(text) if any(map(str.strip, row))]
    except ValueError as error:
        raise ArgumentError(f"cannot read rows from {path}: {error}") from error
    if not lines:
        raise ArgumentError(f"{path} is empty; its first line must name columns, such as "
                            "model,microbatch_size,global_batch,n_devices,seconds")  # fmt: skip
    header = [name.strip() for name in lines[0][1]]
    _check_columns(str(path), header, need_seconds)
    tables: list[tuple[str, Mapping[Any, Any]]] = []
    for line, cells in lines[1:]:
        where = f"{path}, line {line}"
        if len(cells) != len(header):
            raise ArgumentError(
                f"{where}: {len(cells)} values for {len(header)} columns; give one value a "
                'column, and quote lists, as "8,8,7"'
            )
        tables.append((where, dict(zip(header, map(_parsed, cells), strict=True))))
    if not tables:
        raise ArgumentError(f"{path} has no measured step; give one a line")
    return tables


def _parsed(text: str) -> Any:
    """Return the number, truth value or list of them in a cell; None for an empty cell."""
    text = text.strip()
    if "," in text:
        return [_parsed(part) for part in text.split(",")]
    for parse in (parse_int, parse_float):
        if (value := parse(text)) is not None:
            return value
    return _TRUTHS.get(text.lower(), text) if text else None


def _check_columns(where: str, names: Sequence[str], need_seconds: bool) -> None:
    """Raise for columns that are unknown or named twice, and for missing ``seconds`` if needed."""
    columns = known_columns()
    for name in names:
        if name not in columns:
            raise UnknownNameError(
                f"{where}: unknown column {name!r}{suggestion(name, columns)} "
                "(pipesim calibrate --help lists all columns)"
            )
        if names.count(name) > 1:
            raise ArgumentError(f"{where}: column {name!r} occurs twice; give it once")
    if need_seconds and "seconds" not in names:
        raise ArgumentError(
            f"{where}: column 'seconds' is missing; give the measured seconds of each step "
            f"(columns: {', '.join(names)})"
        )


def _step(where: str, table: Mapping[Any, Any], need_seconds: bool) -> MeasuredStep:
    """Return the step of a row, without empty cells."""
    _check_columns(where, [str(name) for name in table], need_seconds)
    settings = {str(name): _plain(value) for name, value in table.items()}
    for name in _FLAGS & settings.keys():
        if settings[name] in (0, 1):
            settings[name] = bool(settings[name])
    value = settings.pop("seconds", None)
    seconds = math.nan if value is None and not need_seconds else number(value)
    if seconds is None or not (0 < seconds < math.inf or math.isnan(seconds)):
        raise ArgumentError(
            f"{where}: seconds must be a finite number above 0, got {table['seconds']!r}"
        )
    return MeasuredStep(where, {k: v for k, v in settings.items() if v is not None}, seconds)


def _plain(value: Any) -> Any:
    """Return a value as Python's types; None for NaN, and an int for a whole float.

    A column of pandas with an empty cell has floats.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() else value
    return value
