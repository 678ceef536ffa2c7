"""Validations in a few lines of text, and as notebooks show them: HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipesim.plot.html_parts import note_html, omitted_html, table_html
from pipesim.plot.style import format_error
from pipesim.utils.text_tables import align_columns
from pipesim.utils.units import format_time

if TYPE_CHECKING:
    from pipeexec.validation.result import Validation


#: Most graphs that a text and a table show, and most letters of an entry of a record.
MAX_LINES, MAX_ROWS, MAX_LETTERS = 8, 32, 200


def validation_text(validation: Validation) -> str:
    """Return the origin of a validation, and a line a graph: makespans and the error."""
    columns = _columns(validation, MAX_LINES)
    lines = [_title(validation), *_origin(validation.record)]
    if len(validation.rows):
        lines += align_columns(columns).splitlines()
    more = len(validation.rows) - MAX_LINES
    lines += [f"and {more} more (see .table)"] if more > 0 else []
    return "<" + "\n  ".join(lines) + ">"


def validation_html(validation: Validation) -> str:
    """Return the origin of a validation, and a table with a row a graph, as HTML."""
    columns = _columns(validation, MAX_ROWS)
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    more = len(validation.rows) - len(rows)
    notes = [_title(validation), *_origin(validation.record), *map(str, validation.notes)]
    return (
        "".join(map(note_html, notes))
        + table_html(list(columns), rows)
        + omitted_html([f"{more} more graphs (see .table)"] if more > 0 else [])
    )


def _title(validation: Validation) -> str:
    """Return the number of graphs."""
    n = len(validation.rows)
    return f"Validation of {n} graph{'s' * (n != 1)}"


def _origin(record: Mapping[str, Any]) -> list[str]:
    """Return lines with command, date and hardware of a run, as far as its record has them."""
    lines = [f"{name}: {_short(record[name])}" for name in ("command", "date") if name in record]
    hardware = record.get("hardware")
    if isinstance(hardware, Mapping):
        parts = [_short(hardware.get("cpu") or hardware.get("machine") or "unknown processor")]
        if cores := hardware.get("cores"):
            parts.append(f"{_short(cores)} cores")
        gpus = hardware.get("gpus")
        parts += _gpu_texts(gpus) if isinstance(gpus, list) else []
        lines.append(f"hardware: {', '.join(parts)}")
    return lines


def _gpu_texts(gpus: list[Any]) -> list[str]:
    """Return each kind of GPU with its number."""
    names = list(map(_short, gpus))
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _short(value: object) -> str:
    """Return an entry of a record as one line, of at most `MAX_LETTERS` letters."""
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_LETTERS else f"{text[:MAX_LETTERS]}..."


def _columns(validation: Validation, n_rows: int) -> dict[str, list[str]]:
    """Return makespans and errors of the first rows as text."""
    rows = dict(list(validation.rows.items())[:n_rows])
    return {
        "graph": list(map(_short, rows)),
        "predicted": [format_time(row.prediction) for row in rows.values()],
        "measured": [format_time(row.measurement) for row in rows.values()],
        "error": [format_error(row.error) for row in rows.values()],
        "worst step": [format_error(row.worst_error) for row in rows.values()],
        "steps": [str(len(row.makespans)) for row in rows.values()],
    }
