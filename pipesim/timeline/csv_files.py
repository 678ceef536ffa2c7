"""CSV files of timelines: tasks, settings of their graph as columns, and a checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipesim.costs.costs import Costs
from pipesim.errors import PipeError, TimelineError
from pipesim.timeline.task_rows import (
    COUNTS,
    INTEGERS,
    OPTIONAL,
    SECONDS_AND_BYTES,
    SETTINGS,
    check_rows,
    check_shape,
    from_rows,
    to_rows,
)
from pipesim.timeline.timeline import COLUMNS, Timeline
from pipesim.utils.files import check_path, read_text, write_text
from pipesim.utils.texts import (
    CHECKSUM,
    checksum,
    checksum_mismatch,
    csv_rows,
    parse_float,
    parse_int,
)

if TYPE_CHECKING:
    import pandas as pd


#: Line of the first task in a file.
_FIRST_LINE = 2


def save(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline; see `Timeline.save`."""
    path = check_path("path", path, "write")
    rows, settings = to_rows(timeline)
    issued = [rows.pop("issued")] if "issued" in rows else []
    rows = rows.assign(**settings)
    for column in issued:
        rows["issued"] = column
    write_text(path, _signed(rows.to_csv(index=False)))


def _signed(text: str) -> str:
    """Return a CSV with a column for its checksum, which the first row has; others are empty."""
    index = len(COLUMNS)
    lines = [line.split(",", index) for line in text.removesuffix("\n").split("\n")]
    column = [CHECKSUM, checksum(text), *[""] * (len(lines) - 2)]
    for line, value in zip(lines, column, strict=True):
        line.insert(index, value)
    return "".join(",".join(line) + "\n" for line in lines)


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a CSV; rows are as long as the header."""
    lines = [(line, cells) for line, cells in csv_rows(text) if cells]
    if not lines:
        raise TimelineError("it is empty")
    (_, header), *rows = lines
    for name in header:
        if header.count(name) > 1:
            raise TimelineError(f"column {name!r} occurs twice; give it once")
    for line, cells in rows:
        if len(cells) != len(header):
            raise TimelineError(
                f"line {line}: {len(cells)} values for {len(header)} columns; give one a column"
            )
    return header, [cells for _, cells in rows]


def _check_checksum(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise `TimelineError` if the file has a checksum that does not match its content."""
    if CHECKSUM not in header:
        return
    index = header.index(CHECKSUM)
    signature = "".join(row[index] for row in rows)
    text = "".join(",".join([*row[:index], *row[index + 1 :]]) + "\n" for row in (header, *rows))
    if signature and signature != checksum(text):
        raise TimelineError(checksum_mismatch("it", f"empty its column {CHECKSUM!r}"))


def is_header(line: str) -> bool:
    """Return whether the first line of a text is that of a saved timeline."""
    cells = [cell.strip() for cell in line.split(",")]
    return cells[0] == COLUMNS[0] or "stream" in cells


def load(path: Path | str, *, costs: Costs | None, name: str) -> Timeline:
    """Read a timeline; see `Timeline.load`."""
    path = check_path("path", path)
    text = read_text(path, "a timeline from", TimelineError)
    if not text.endswith("\n"):
        raise TimelineError(f"{path} is no whole timeline: its last line was cut")
    try:
        header, rows = _table(text)
        frame = _frame(header, rows)
        timeline = from_rows(frame, _settings(frame), costs=costs, name=name or path.stem)
        _check_checksum(header, rows)  # last: an error that names a cell is more helpful
    except (PipeError, ValueError) as error:
        raise TimelineError(f"{path} is no whole timeline: {error}") from error
    return timeline


def _frame(header: list[str], cells: list[list[str]]) -> pd.DataFrame:
    """Return a table with its columns of numbers converted, and lines of the file as index."""
    from pipesim.utils.packages import pandas as pd

    rows = pd.DataFrame(cells, columns=header, dtype=str)
    rows.index = pd.RangeIndex(_FIRST_LINE, _FIRST_LINE + len(rows), name="line")
    check_shape(rows)
    for column in INTEGERS:
        if column in rows or column not in OPTIONAL:
            rows[column] = _numbers(rows, column, parse_int)
    for column in SECONDS_AND_BYTES:
        if column in rows:
            rows[column] = _numbers(rows, column, lambda text: parse_float(text or "nan"))
    return rows


def _settings(rows: pd.DataFrame) -> dict[str, str]:
    """Return the settings, of which each is a column with one value in all rows."""
    settings = {name: rows[name].iloc[0] for name in SETTINGS if name in rows}
    for name, text in settings.items():
        check_rows(rows, rows[name] == text, f"has another {name} than the first")
        if name in COUNTS:
            _numbers(rows[:1], name, parse_int)
    return settings


def _numbers(rows: pd.DataFrame, column: str, parse: Callable[[str], float | None]) -> list[float]:
    """Convert a column of texts, exactly; raise `TimelineError` for the first that is no number."""
    values = []
    for line, text in zip(rows.index, rows[column], strict=True):
        value = parse(text)
        if value is None:
            raise TimelineError(f"line {line}: {column} is no number but {text!r}")
        values.append(value)
    return values
