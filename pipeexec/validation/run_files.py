"""Write the rows of a validation to a run directory, and read them back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeexec.profiling.files import (
    FITS,
    TABLE,
    TRANSFERS,
    host_shares,
    load_profile,
    read_shares,
    save_profile,
)
from pipeexec.profiling.profile import Profile
from pipeexec.run_directory import (
    RECORD,
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipeexec.run_lock import check_file_names
from pipeexec.validation.result_row import Row
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, RunDirectoryError, check_flag
from pipesim.timeline.timeline import Timeline
from pipesim.utils.files import check_path
from pipesim.utils.texts import CHECKSUM

if TYPE_CHECKING:
    from pipeexec.validation.result import Validation


#: Files of a row's tables.
_PARTS, _OPS = "parts.csv", "ops.csv"
#: Files of a run directory beside the rows' folders.
_FILES = (RECORD, "costs.json", "table.csv", "overlay.png", "overlay.pdf", TABLE, TRANSFERS, FITS,
          "transfers.png")  # fmt: skip

#: Entries of a record that are fields of a validation, or about files.
_OTHER_ENTRIES = ("rows", "clocks", "notes", "files", CHECKSUM)


def check_rows(names: Iterable[object]) -> None:
    """Raise unless each row of a validation can have its own folder."""
    names = list(names)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ArgumentError(f"names of graphs must be texts, got {wrong[0]!r}")
    check_file_names("folder of a graph", [_folder(str(name)) for name in names], _FILES)


def _folder(name: str) -> str:
    return name.replace("/", "-").replace(" ", "-")


def write_run(
    validation: Validation, path: Path | str, record: Mapping[str, Any] | None, *, figures: bool
) -> None:
    """Write a run directory, as `Validation.save` documents."""
    path = check_path("path", path, "write")
    check_rows(validation.rows)
    check_flag("figures", figures)
    content: dict[str, Any] = {
        "clocks": validation.clocks,
        "notes": validation.notes,
        "rows": {name: _row_record(row) for name, row in validation.rows.items()},
    }
    if validation.profile is not None:
        content |= host_shares(validation.profile)
    content = {"command": command(), **checked_record(record), **content}
    with write_directory(path, content) as folder:
        _write_shared_files(validation, folder, figures=figures)
        for name, row in validation.rows.items():
            row_folder = folder / _folder(name)
            row_folder.mkdir()
            row.measured.save(row_folder / "timeline.csv")
            row.predicted.save(row_folder / "predicted.csv")
            for file, table in ((_PARTS, row.parts), (_OPS, row.ops)):
                if table is not None:
                    table.to_csv(row_folder / file, index=file == _OPS)


def _row_record(row: Row) -> dict[str, Any]:
    """Return the entries of a row in the record of a run."""
    return {
        "makespans": row.makespans,
        "replayed": row.replayed,
        "peak_memory": row.peak_memory,
        "losses": row.losses,
        **({"predictions": row.predictions} if row.predictions else {}),
        **({"host_seconds": row.host_seconds} if row.host_seconds else {}),
    }


def _write_shared_files(validation: Validation, folder: Path, *, figures: bool) -> None:
    """Write the files of a run that all rows share."""
    from pipesim.plot.paper_figure import save

    validation.costs.save(folder / "costs.json")
    validation.table.to_csv(folder / "table.csv")
    profile = validation.profile
    if profile is not None:
        save_profile(folder, profile.table, profile.transfers, profile.fits, figures=figures)
    if figures:
        save(validation.figure(), *(folder / f"overlay.{suffix}" for suffix in ("png", "pdf")))


def read_run(path: Path | str) -> dict[str, Any]:
    """Return the fields of the `Validation` of a run directory, by name.

    Raises
    ------
    RunDirectoryError
        If a file is missing, truncated or edited.
    """
    path = check_path("path", path)
    record = read_record(path)
    if "rows" not in record:
        raise RunDirectoryError(f"{path} holds no validation: {RECORD} lists no rows")
    costs = Costs.load(listed_file(path, record, "costs.json"))
    rows = {
        name: _read_row(path, record, name, entries, costs)
        for name, entries in record["rows"].items()
    }
    profile = None
    if FITS in record["files"]:
        profile = Profile(costs, *load_profile(path, record), **read_shares(record))
    return {
        "rows": rows,
        "costs": costs,
        "profile": profile,
        "clocks": tuple(record.get("clocks", ())),
        "notes": tuple(record.get("notes", ())),
        "record": {name: value for name, value in record.items() if name not in _OTHER_ENTRIES},
    }


def _read_row(
    path: Path, record: Mapping[str, Any], name: str, entries: Mapping[str, Any], costs: Costs
) -> Row:
    """Return a row from its folder and its entries in the record."""
    from pipesim.utils.packages import pandas as pd

    folder = _folder(name)
    predicted, measured = (
        Timeline.load(listed_file(path, record, f"{folder}/{file}"), costs=costs, name=name)
        for file in ("predicted.csv", "timeline.csv")
    )
    parts, ops = (
        pd.read_csv(path / folder / file, index_col=index)
        if f"{folder}/{file}" in record["files"]
        else None
        for file, index in ((_PARTS, None), (_OPS, [0, 1]))
    )
    values = {key: tuple(value) for key, value in entries.items()}
    return Row(predicted, measured, **values, parts=parts, ops=ops)
