"""What a validation found: rows of predictions beside steps; tables, figure, run directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
from pipeexec.run_directory import RECORD, checked_record, command, read_record, write_directory
from pipeexec.run_lock import check_file_names
from pipeexec.validation.accuracy import interval_over
from pipeexec.validation.confidence import Interval
from pipesim.analysis.compare import Comparison
from pipesim.analysis.error_attribution import PARTS
from pipesim.costs.costs import Costs
from pipesim.errors import ArgumentError, RunDirectoryError, check_flag
from pipesim.timeline.timeline import Timeline
from pipesim.utils.atomic_write import check_path

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Row", "Validation", "check_rows", "load_run"]


@dataclass(frozen=True, eq=False)
class Row:
    """One graph, predicted once a repeat and measured in several steps.

    Attributes
    ----------
    predicted
        From the costs of the calibration steps; of the last repeat.
    measured
        The step whose makespan is the median.
    makespans, replayed
        Of every step, measured, and replayed from its own durations; seconds. Repeat after repeat.
    peak_memory
        Bytes that each device really held at most: parameters, gradients and optimizer state;
        activations, and gradients that wait for their reduction, counted task by task in a step of
        their own, at the times of ``measured``.
    losses
        Of every step.
    predictions
        Makespan predicted in each repeat (s); empty where there was one.
    host_seconds
        What the host took to issue each step, or to launch it as one CUDA graph (s); sums over
        processes. Empty for a `GPipe`, where it is not measured, and for older run directories.
    parts, ops
        What the error of each step consists of, and the error of each operation in each stage:
        tables of `pipeexec.validation.accuracy`. None where a run directory lacks them, as older
        ones do.
    """

    predicted: Timeline
    measured: Timeline
    makespans: tuple[float, ...]
    replayed: tuple[float, ...]
    peak_memory: tuple[float, ...]
    losses: tuple[float, ...]
    predictions: tuple[float, ...] = ()
    host_seconds: tuple[float, ...] = ()
    parts: pd.DataFrame | None = None
    ops: pd.DataFrame | None = None

    @property
    def prediction(self) -> float:
        """Predicted makespan, mean over the repeats; seconds."""
        return float(np.mean(self.predictions or [self.predicted.makespan]))

    @property
    def comparison(self) -> Comparison:
        """Prediction beside the median step."""
        return Comparison(self.predicted, self.measured)

    @property
    def errors(self) -> NDArray[np.float64]:
        """Predicted over measured makespan, minus 1, of every step."""
        said = np.array(self.predictions or [self.predicted.makespan])
        seconds = np.array(self.makespans).reshape(len(said), -1)
        errors: NDArray[np.float64] = (said[:, None] / seconds - 1.0).ravel()
        return errors

    @property
    def error_interval(self) -> Interval:
        """Mean of `errors` and its 95 % interval.

        By Student's t over the means of the repeats; of one repeat, over its steps, and then
        without what another calibration would have changed.
        """
        return interval_over(self.errors.reshape(len(self.predictions) or 1, -1).tolist())

    @property
    def replay_errors(self) -> NDArray[np.float64]:
        """Replayed over measured makespan, minus 1, of every step."""
        return np.array([a / b - 1.0 for a, b in zip(self.replayed, self.makespans, strict=True)])


@dataclass(frozen=True, eq=False)
class Validation:
    """Rows by name, and the costs and profile that their predictions come from.

    Of several repeats, those of the last. ``profile`` is None where costs were given, and for run
    directories of older versions. ``clocks`` says how each process's stands to rank 0's (see
    `pipeexec.distributed.process_clock.Alignment`), and ``notes`` what measured times mean that is
    not plain, such as imposed links.
    """

    rows: dict[str, Row]
    costs: Costs
    profile: Profile | None = None
    clocks: tuple[dict[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a graph.

        ``predicted`` (mean over repeats), ``measured`` (median) makespan in seconds; ``error``
        (median over steps), ``worst`` (of any step), ``replay`` (median error of the steps
        replayed), ``error_mean``, ``error_low`` and ``error_high`` (mean error and the ends of its
        95 % interval; see `Row.error_interval`), signed and relative; ``bubble_predicted``,
        ``bubble_measured`` (0..1); ``memory_predicted``, ``memory_measured`` (bytes of the fullest
        device).
        """
        import pandas as pd

        rows = {
            name: {
                "predicted": row.prediction,
                "measured": float(np.median(row.makespans)),
                "error": float(np.median(row.errors)),
                "worst": float(row.errors[np.abs(row.errors).argmax()]),
                "replay": float(np.median(row.replay_errors)),
                **dict(zip(_INTERVAL, row.error_interval, strict=True)),
                "bubble_predicted": row.predicted.bubble_fraction,
                "bubble_measured": row.measured.bubble_fraction,
                "memory_predicted": float(row.predicted.peak_memory.max()),
                "memory_measured": float(max(row.peak_memory)),
            }
            for name, row in self.rows.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("graph")

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Every pair of rows, and whether the prediction told which is faster.

        ``predicted`` and ``measured`` difference (s), ``noise`` (median absolute deviation of the
        difference over the rounds, s), ``beyond_noise``, and ``right`` (same sign).
        """
        import pandas as pd

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
        """What the error of each row consists of: means over its steps, seconds.

        Indexed by ``graph``: ``measured`` makespan, ``error`` (predicted less measured), and its
        parts, which `pipesim.analysis.error_attribution` explains. Rows of older run directories
        are left out.
        """
        import pandas as pd

        rows = {name: row.parts[["measured", *PARTS]].mean()
                for name, row in self.rows.items() if row.parts is not None}  # fmt: skip
        table = pd.DataFrame.from_dict(rows, orient="index", columns=["measured", *PARTS])
        table.insert(1, "error", table[list(PARTS)].sum(axis=1))
        return table.rename_axis("graph")

    @cached_property
    def ops(self) -> pd.DataFrame:
        """The error of each operation in each stage of each row.

        Indexed by ``graph``, ``op`` and ``stage``. Rows of older run directories are left out.
        """
        import pandas as pd

        tables = {name: row.ops for name, row in self.rows.items() if row.ops is not None}
        return pd.concat(tables, names=["graph"]) if tables else pd.DataFrame()

    def figure(self, **options: Any) -> Figure:
        """Draw every row's prediction over its median step; see `pipesim.plot.overlay`."""
        from pipesim.plot.comparisons import overlay

        return overlay({name: row.comparison for name, row in self.rows.items()}, **options)

    def save(
        self,
        path: Path | str,
        *,
        record: Mapping[str, Any] | None = None,
        figures: bool = True,
    ) -> None:
        """Write a run directory, whole or not at all.

        ``run.json``, ``costs.json``, ``table.csv``, ``overlay.png`` and ``overlay.pdf``; with a
        profile, what `Profile.save` writes; for each row a folder with ``timeline.csv`` (the median
        step), ``predicted.csv``, ``parts.csv`` (of each step's error) and ``ops.csv``.

        Parameters
        ----------
        path
            The folder.
        record
            Further entries of ``run.json``.
        figures
            Whether to draw: it takes seconds, and `load_run` returns a validation that can be
            drawn elsewhere.

        Raises
        ------
        RunDirectoryError
            If it cannot be written, something else is there, or another process is writing it.
        ArgumentError
            If two rows would have the same folder.
        """
        from pipesim.plot.paper_figure import save

        rows = {
            name: {
                "makespans": row.makespans,
                "replayed": row.replayed,
                "peak_memory": row.peak_memory,
                "losses": row.losses,
                **({"predictions": row.predictions} if row.predictions else {}),
                **({"host_seconds": row.host_seconds} if row.host_seconds else {}),
            }
            for name, row in self.rows.items()
        }
        path = check_path("path", path, "write")
        check_rows(self.rows)
        check_flag("figures", figures)
        said = {"clocks": self.clocks, "notes": self.notes, "rows": rows}
        if self.profile is not None:
            said |= host_shares(self.profile)
        with write_directory(path, {"command": command(), **checked_record(record), **said}) as to:
            self.costs.save(to / "costs.json")
            self.table.to_csv(to / "table.csv")
            if self.profile is not None:
                tables = self.profile.table, self.profile.transfers, self.profile.fits
                save_profile(to, *tables, figures=figures)
            if figures:
                save(self.figure(), *(to / f"overlay.{suffix}" for suffix in ("png", "pdf")))
            for name, row in self.rows.items():
                (to / _folder(name)).mkdir()
                row.measured.save(to / _folder(name) / "timeline.csv")
                row.predicted.save(to / _folder(name) / "predicted.csv")
                for file, table in ((_PARTS, row.parts), (_OPS, row.ops)):
                    if table is not None:
                        table.to_csv(to / _folder(name) / file, index=file == _OPS)


#: Columns of `Validation.table` that `Row.error_interval` fills, and files of a row's tables.
_INTERVAL = ("error_mean", "error_low", "error_high")
_PARTS, _OPS = "parts.csv", "ops.csv"


#: Files of a run directory that stand beside the rows' folders.
_FILES = (RECORD, "costs.json", "table.csv", "overlay.png", "overlay.pdf", TABLE, TRANSFERS, FITS,
          "transfers.png")  # fmt: skip


def check_rows(names: Iterable[object]) -> None:
    """Raise unless each row of a validation can have a folder of its own.

    Raises
    ------
    ArgumentError
        For a name that is no text, or whose folder is that of another.
    """
    names = list(names)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ArgumentError(f"names of graphs must be texts, got {wrong[0]!r}")
    check_file_names("folder of a graph", [_folder(str(name)) for name in names], _FILES)


def _folder(name: str) -> str:
    return name.replace("/", "-").replace(" ", "-")


def load_run(path: Path | str) -> Validation:
    """Read a run directory.

    Raises
    ------
    RunDirectoryError
        If a file is missing, truncated or edited.
    """
    import pandas as pd

    path = check_path("path", path)
    record = read_record(path)
    if "rows" not in record:
        raise RunDirectoryError(f"{path} holds no validation: {RECORD} lists no rows")
    costs = Costs.load(path / "costs.json")
    rows = {}
    for name, kept in record["rows"].items():
        predicted, measured = (
            Timeline.load(path / _folder(name) / file, costs=costs, name=name)
            for file in ("predicted.csv", "timeline.csv")
        )
        parts, ops = (
            pd.read_csv(file, index_col=index)
            if (file := path / _folder(name) / table).is_file() else None
            for table, index in ((_PARTS, None), (_OPS, [0, 1]))
        )  # fmt: skip
        values = {key: tuple(value) for key, value in kept.items()}
        rows[name] = Row(predicted, measured, **values, parts=parts, ops=ops)
    profile = None
    if (path / FITS).is_file():
        profile = Profile(costs, *load_profile(path), **read_shares(record))
    clocks, notes = (tuple(record.get(key, ())) for key in ("clocks", "notes"))
    return Validation(rows, costs, profile, clocks, notes)
