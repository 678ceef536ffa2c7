"""`RunLog`: a table of numbers that grows by a row a step, in memory and as a CSV file."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipesim.errors import RunDirectoryError
from pipesim.utils.files import read_text, write_errors, write_text
from pipesim.utils.texts import csv_rows, parse_float

if TYPE_CHECKING:
    import pandas as pd


#: Columns of whole numbers.
_WHOLE = ("step", "epoch", "skipped", "samples", "batches")


class RunLog:
    """Rows of numbers, in the order of their steps.

    A row is written to the file as soon as it is added. A kill at any moment loses at most the last
    line, which `read_log` leaves out.

    Parameters
    ----------
    path
        The file; None for a log in memory alone.

    Attributes
    ----------
    columns
        Values by name of the column; NaN where a row has none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.columns: dict[str, array[float]] = {}
        self._file: IO[str] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def append(self, row: Mapping[str, float]) -> None:
        """Add a row, whose columns may be new."""
        n = len(self)
        new = [name for name in row if name not in self.columns]
        self.columns |= {name: array("d", [math.nan]) * n for name in new}
        for name, column in self.columns.items():
            column.append(row.get(name, math.nan))
        if self.path is None:
            return
        if new:
            self.rewrite()
            return
        with write_errors(self.path):
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8", newline="\n")
            self._file.write(self._line(n))
            self._file.flush()

    def replace(self, columns: Mapping[str, Sequence[float]], n_steps: int) -> None:
        """Take the rows of another log up to a step, in place of all rows."""
        n = sum(step <= n_steps for step in columns.get("step", ()))
        self.columns = {name: array("d", values[:n]) for name, values in columns.items()}
        if self.path is not None and self.columns:
            self.rewrite()

    def rewrite(self) -> None:
        """Write the file with all rows, whole or not at all."""
        assert self.path is not None
        self.close()
        lines = [",".join(self.columns) + "\n", *map(self._line, range(len(self)))]
        write_text(self.path, "".join(lines))

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        if self.path is not None and self.path.exists():
            with write_errors(self.path), self.path.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _line(self, k: int) -> str:
        cells = (
            repr(int(column[k])) if name in _WHOLE and math.isfinite(column[k]) else repr(column[k])
            for name, column in self.columns.items()
        )
        return ",".join(cells) + "\n"

    @property
    def table(self) -> pd.DataFrame:
        """The rows, as a DataFrame."""
        import numpy as np

        from pipesim.utils.packages import pandas as pd

        if not self.columns:
            return pd.DataFrame(columns=["step", "epoch", "loss"], dtype=float)
        values = {name: np.array(column) for name, column in self.columns.items()}
        whole = {
            name: "int64" for name in _WHOLE if name in values and np.isfinite(values[name]).all()
        }
        return pd.DataFrame(values).astype(whole)


def read_log(path: Path) -> dict[str, array[float]]:
    """Return the columns of a log; empty if there is no file. The last line may be torn.

    Raises
    ------
    RunDirectoryError
        If a line is not a row of numbers.
    """
    if not path.exists():
        return {}
    text = read_text(path, "the log", RunDirectoryError)
    whole = text[: text.rfind("\n") + 1]
    try:
        rows = list(csv_rows(whole))
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    names = rows[0][1] if rows else []
    columns = {name: array("d") for name in names}
    if len(columns) < len(names):
        raise _unreadable(path, "a column is there twice")
    for line, cells in rows[1:]:
        values = [parse_float(cell) for cell in cells]
        if len(values) != len(names) or None in values:
            raise _unreadable(path, f"line {line} is no row of {len(names)} numbers")
        for name, value in zip(names, values, strict=True):
            columns[name].append(math.nan if value is None else value)
    return columns


def _unreadable(path: Path, reason: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot read {path}: {reason}; it was edited: restore it, or train in another directory"
    )
