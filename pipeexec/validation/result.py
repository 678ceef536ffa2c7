"""`Validation`: predictions beside measured steps, as tables, a figure and a run directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.profiling.profile import (
    FITS,
    TABLE,
    TRANSFERS,
    Profile,
    host_shares,
    load_profile,
    read_shares,
    save_profile,
)
from pipeexec.run_directory import (
    RECORD,
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipeexec.run_lock import check_file_names
from pipeexec.validation.accuracy import Row
from pipesim.analysis.error_attribution import PARTS
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, RunDirectoryError, check_flag
from pipesim.plot.html_tables import note_html, omitted_html, table_html
from pipesim.plot.palette import format_error
from pipesim.timeline.timeline import Timeline
from pipesim.utils.checks import checked_names
from pipesim.utils.files import check_path
from pipesim.utils.texts import CHECKSUM, align_columns, format_time

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Validation:
    """Predictions of graphs and their measured steps.

    Attributes
    ----------
    rows
        One row a graph, by name.
    costs, profile
        Costs and profile of the predictions, of the last repeat. ``profile`` is None if costs were
        given, and for run directories of older versions.
    clocks
        Offset of each process's clock from rank 0's; see
        `pipeexec.distributed.process_clock.Alignment`.
    notes
        Notes on the measured times, such as that links are imposed.
    record
        Entries of the ``run.json`` that `load_run` read: ``command``, ``date`` in UTC,
        ``versions``, ``hardware`` and the user's ``record`` of `save`. Empty for others.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 2, 4))}
    >>> stages, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.ones(8, 4)
    >>> batches, costs = [(x, x)] * 2, ps.Costs(forward=1e-3, backward=2e-3, output_bytes=32)
    >>> validation = px.validate(
    ...     stages, graphs, ["cpu"] * 2, mse_loss, batches, n_steps=1, costs=costs
    ... )
    >>> list(validation.rows), validation.table.columns[:3].tolist()
    (['1f1b'], ['predicted', 'measured', 'error'])
    """

    rows: dict[str, Row]
    costs: Costs
    profile: Profile | None = None
    clocks: tuple[dict[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return _validation_text(self)

    def _repr_html_(self) -> str:
        return _validation_html(self)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a graph.

        - ``predicted``, ``measured``: makespan (s); mean over repeats, median over steps.
        - ``error``, ``worst``, ``replay``: signed relative errors; median over steps, largest of
          a step, and median of the replayed steps.
        - ``error_mean``, ``error_low``, ``error_high``: mean of these errors and the ends of its
          95 % interval; see `Row.error_interval`.
        - ``bubble_predicted``, ``bubble_measured``: bubble fraction, 0 to 1.
        - ``memory_predicted``, ``memory_measured``: peak bytes of the fullest device.
        """
        from pipesim.utils.packages import pandas as pd

        rows = {
            name: {
                "predicted": row.prediction,
                "measured": row.measurement,
                "error": row.error,
                "worst": row.worst_error,
                "replay": float(np.median(row.replay_errors)),
                "error_mean": row.error_interval.mean,
                "error_low": row.error_interval.low,
                "error_high": row.error_interval.high,
                "bubble_predicted": row.predicted.bubble_fraction,
                "bubble_measured": row.measured.bubble_fraction,
                "memory_predicted": float(row.predicted.memory.peak.max()),
                "memory_measured": float(max(row.peak_memory)),
            }
            for name, row in self.rows.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("graph")

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences of every pair of rows, and whether the prediction names the faster one.

        - ``predicted``, ``measured``: difference of the makespans (s).
        - ``noise``: median absolute deviation of the measured difference over the rounds (s).
        - ``beyond_noise``: whether the measured difference is larger than the noise.
        - ``right``: whether both differences have the same sign.
        """
        from pipesim.utils.packages import pandas as pd

        rows = []
        for (a, first), (b, second) in itertools.combinations(self.rows.items(), 2):
            difference = np.array(first.makespans) - np.array(second.makespans)
            measured = float(np.median(difference))
            noise = float(np.median(np.abs(difference - measured)))
            predicted = first.prediction - second.prediction
            rows.append(
                {
                    "pair": f"{a} - {b}",
                    "predicted": predicted,
                    "measured": measured,
                    "noise": noise,
                    "beyond_noise": abs(measured) > noise,
                    "right": bool(np.sign(predicted) == np.sign(measured)),
                }
            )
        columns = ["pair", "predicted", "measured", "noise", "beyond_noise", "right"]
        return pd.DataFrame(rows, columns=columns).set_index("pair")

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Parts of the error of each row, means over its steps (s).

        Indexed by ``graph``: ``measured`` makespan, ``error`` (predicted minus measured), and the
        parts of the error that `pipesim.analysis.error_attribution` explains. Rows of older run
        directories are left out.
        """
        from pipesim.utils.packages import pandas as pd

        rows = {name: row.parts[["measured", *PARTS]].mean()
                for name, row in self.rows.items() if row.parts is not None}  # fmt: skip
        table = pd.DataFrame.from_dict(rows, orient="index", columns=["measured", *PARTS])
        table.insert(1, "error", table[list(PARTS)].sum(axis=1))
        return table.rename_axis("graph")

    @cached_property
    def ops(self) -> pd.DataFrame:
        """Errors of each operation in each stage of each row; see `accuracy.op_errors`.

        Indexed by ``graph``, ``op`` and ``stage``. Rows of older run directories are left out.
        """
        from pipesim.utils.packages import pandas as pd

        tables = {name: row.ops for name, row in self.rows.items() if row.ops is not None}
        return pd.concat(tables, names=["graph"]) if tables else pd.DataFrame()

    def figure(self, **options: Any) -> Figure:
        """Draw the prediction of every row over its median step.

        Parameters
        ----------
        **options
            Those of `pipesim.plot.overlay`, such as ``width`` (inches) and ``transfers``.

        Returns
        -------
        matplotlib.figure.Figure
            One axes a row, under each other, on one time axis.
        """
        from pipesim.plot.timelines import overlay

        return overlay({name: row.comparison for name, row in self.rows.items()}, **options)

    def save(
        self,
        path: Path | str,
        *,
        record: Mapping[str, Any] | None = None,
        figures: bool = True,
        transfers: bool = False,
    ) -> None:
        """Write a run directory, whole or not at all.

        - ``run.json``, ``costs.json``, ``table.csv``, ``overlay.png`` and ``overlay.pdf``;
        - with a profile, the files of `Profile.save`;
        - for each row, a folder with ``timeline.csv`` (the median step), ``predicted.csv``,
          ``parts.csv`` (parts of each step's error) and ``ops.csv``.

        Parameters
        ----------
        path
            Folder to write.
        record
            Further entries of ``run.json``.
        figures
            Whether to draw the figures, which takes seconds. The validation of `load_run` can draw
            them later.
        transfers
            Whether ``overlay.png`` and ``overlay.pdf`` have lanes for messages.

        Raises
        ------
        RunDirectoryError
            If the folder cannot be written, ``path`` is something else, or another process is
            writing it.
        """
        path = check_path("path", path, "write")
        check_rows(self.rows)
        check_flag("figures", figures)
        check_flag("transfers", transfers)
        content: dict[str, Any] = {
            "clocks": self.clocks,
            "notes": self.notes,
            "rows": {name: _row_record(row) for name, row in self.rows.items()},
        }
        if self.profile is not None:
            content |= host_shares(self.profile)
        content = {"command": command(), **checked_record(record), **content}
        with write_directory(path, content) as folder:
            _write_shared_files(self, folder, figures=figures, transfers=transfers)
            for name, row in self.rows.items():
                row_folder = folder / _folder(name)
                row_folder.mkdir()
                row.measured.save(row_folder / "timeline.csv")
                row.predicted.save(row_folder / "predicted.csv")
                for file, table in ((_PARTS, row.parts), (_OPS, row.ops)):
                    if table is not None:
                        table.to_csv(row_folder / file, index=file == _OPS)


@checked_names
def load_run(path: Path | str) -> Validation:
    """Read a run directory; the result prints its command, hardware, makespans and errors.

    Parameters
    ----------
    path
        Run directory that `Validation.save` or the command ``pipeexec validate`` has written.

    Returns
    -------
    Validation
        The validation, with the record of its run.

    Raises
    ------
    RunDirectoryError
        If a file is missing, truncated or edited.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graphs = {"1f1b": ps.lower(ps.schedule("1f1b", 1, 4))}
    >>> stages, x = [torch.nn.Linear(4, 4)], torch.ones(8, 4)
    >>> validation = px.validate(stages, graphs, ["cpu"], mse_loss, [(x, x)] * 2, n_steps=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     validation.save(f"{folder}/run", record={"seed": 0}, figures=False)
    ...     px.load_run(f"{folder}/run").record["seed"]
    0
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
    return Validation(
        rows=rows,
        costs=costs,
        profile=profile,
        clocks=tuple(record.get("clocks", ())),
        notes=tuple(record.get("notes", ())),
        record={name: value for name, value in record.items() if name not in _OTHER_ENTRIES},
    )


# Text and HTML

#: Most graphs that a text and a table show, and most letters of an entry of a record.
MAX_LINES, MAX_ROWS, MAX_LETTERS = 8, 32, 200


def _validation_text(validation: Validation) -> str:
    """Return the origin of a validation, and a line a graph: makespans and the error."""
    columns = _columns(validation, MAX_LINES)
    lines = [_title(validation), *_origin(validation.record)]
    if len(validation.rows):
        lines += align_columns(columns).splitlines()
    more = len(validation.rows) - MAX_LINES
    lines += [f"and {more} more (see .table)"] if more > 0 else []
    return "<" + "\n  ".join(lines) + ">"


def _validation_html(validation: Validation) -> str:
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
        names = list(map(_short, gpus)) if isinstance(gpus, list) else []
        parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        lines.append(f"hardware: {', '.join(parts)}")
    return lines


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


# Run directories

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


def _write_shared_files(
    validation: Validation, folder: Path, *, figures: bool, transfers: bool
) -> None:
    """Write the files of a run that all rows share."""
    from pipesim.plot.paper_figure import ignore_small_boxes, save

    validation.costs.save(folder / "costs.json")
    validation.table.to_csv(folder / "table.csv")
    profile = validation.profile
    if profile is not None:
        save_profile(folder, profile.table, profile.transfers, profile.fits, figures=figures)
    if figures:
        figure = validation.figure(transfers=transfers)
        with ignore_small_boxes():
            save(figure, folder / "overlay.png", folder / "overlay.pdf")


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
