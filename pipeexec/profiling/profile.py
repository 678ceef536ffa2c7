"""`Profile`: measured costs of a pipeline and their tables, kept in a run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.profiling.link_speed import STATES, by_pair
from pipeexec.run_directory import (
    checked_record,
    command,
    listed_file,
    read_record,
    write_directory,
)
from pipesim.costs.costs import Costs
from pipesim.errors import RunDirectoryError, number
from pipesim.ops import Op
from pipesim.plot.figure_style import Inches, current_style, text_points
from pipesim.plot.paper_figure import (
    LegendPlace,
    add_legend,
    axes_or_new,
    axes_size,
    figure_with_axes,
    label,
    save,
    set_title,
)
from pipesim.utils.checks import checked
from pipesim.utils.files import check_path
from pipesim.utils.texts import time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured costs of a pipeline, and the tables that they were computed from.

    Attributes
    ----------
    costs
        Costs for the simulator.
    table
        One row per operation and stage, durations in seconds: ``loaded`` (mean over the tasks of
        all steps), ``spread`` (standard deviation of the steps' means over ``loaded``),
        ``isolated`` (mean with all other devices idle), ``slow_down`` (loaded over isolated).
        ``isolated`` is NaN for I and W, which two stages may run at the same time.
    transfers
        Seconds of messages, one row per pair of devices (``source``, ``target``) and size
        (``nbytes``): medians between ``idle`` devices, and ``loaded``, while they compute.
        ``idle_fit`` and ``loaded_fit`` are the seconds by the fit of that pair.
    fits
        ``latency`` (s), ``bandwidth`` (bytes/s), ``residual`` (mean relative deviation) and ``r2``
        of each pair in each state, indexed by ``source``, ``target`` and ``state``. Source and
        target are -1 for all pairs together.
    host_share
        Seconds in which the host issued the tasks of a loaded step, over its makespan: a mean over
        the steps, and over the hosts of several processes. NaN for runs of older versions.
    launch_share
        ``launch`` of all tasks over the makespan: ``host_share`` without the seconds in which the
        full queues of GPUs blocked the host. A share close to 1 means that the host was the
        bottleneck.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> import pipeexec as px, pipesim as ps
    >>> graph = ps.lower(ps.schedule("1f1b", 1, 4))
    >>> x = torch.ones(8, 4)
    >>> with px.Pipeline([torch.nn.Linear(4, 4)], graph, ["cpu"], mse_loss) as pipeline:
    ...     profile = px.measure(pipeline, x, x, n_steps=1)
    >>> profile.table.columns.tolist(), 0 < profile.host_share < 1
    (['loaded', 'spread', 'isolated', 'slow_down'], True)
    """

    costs: Costs
    table: pd.DataFrame
    transfers: pd.DataFrame
    fits: pd.DataFrame
    host_share: float = math.nan
    launch_share: float = math.nan

    @checked
    def plot(
        self,
        *,
        ax: Axes | None = None,
        legend: bool | LegendPlace = True,
        height: Inches | None = None,
    ) -> Axes:
        """Draw the seconds of messages by size, idle and loaded, with their fits.

        Parameters
        ----------
        ax
            Axes to draw into; new ones by default.
        legend, height
            As for `pipesim.plot.timeline`.

        Returns
        -------
        matplotlib.axes.Axes
            The axes; sizes in bytes and times in a fitting unit, both logarithmic.
        """
        return plot_transfers(self.transfers, ax=ax, legend=legend, height=height)

    def save(self, path: Path | str, *, record: Mapping[str, Any] | None = None) -> None:
        """Write a complete run directory, or nothing.

        Its files are ``run.json``, ``costs.json``, ``profile.csv`` (`table`), ``transfers.csv``,
        ``links.csv`` (`fits`), and ``transfers.png`` if there are transfers.

        Parameters
        ----------
        path
            Folder to write. An older run directory at this path is replaced.
        record
            Further entries of ``run.json``, which JSON can hold.

        Raises
        ------
        RunDirectoryError
            If it cannot be written, ``path`` exists and is no run directory, or another process is
            writing it.
        """
        with write_directory(
            check_path("path", path, "write"),
            {"command": command(), **checked_record(record), **host_shares(self)},
        ) as folder:
            self.costs.save(folder / "costs.json")
            save_profile(folder, self.table, self.transfers, self.fits)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read a run directory of `save`, or one of a validation that has a profile.

        Parameters
        ----------
        path
            Run directory.

        Returns
        -------
        Profile
            Costs, tables and shares of the host, as they were saved.

        Raises
        ------
        RunDirectoryError
            If a file is missing, truncated or edited, or the run has no profile.
        """
        path = check_path("path", path)
        record = read_record(path)
        costs = Costs.load(listed_file(path, record, "costs.json"))
        return cls(costs, *load_profile(path, record), **read_shares(record))


# Files of a profile: its tables, and the figure of the transfers.

#: Files of `Profile.table`, `Profile.transfers` and `Profile.fits`.
TABLE, TRANSFERS, FITS = "profile.csv", "transfers.csv", "links.csv"
#: Attributes of a profile that are numbers; the record of the run has them.
_SHARES = ("host_share", "launch_share")
#: Number of leading columns that index each file.
_INDEX = {TABLE: 2, TRANSFERS: 0, FITS: 3}
#: Colour, marker and dashes of each state; the two colours of the palette differ in lightness.
_STYLES: Mapping[str, tuple[Op, str, Any]] = {
    "idle": (Op.F, "o", (0, (4, 1.5))),
    "loaded": (Op.SEND_B, "s", "-"),
}
#: Marker and dashes of each of a few pairs of devices.
_PAIRS: tuple[tuple[str, Any], ...] = (
    ("o", "-"),
    ("s", (0, (4, 1.5))),
    ("^", (0, (1, 1))),
    ("D", (0, (4, 1, 1, 1))),
)


def save_profile(
    folder: Path,
    table: pd.DataFrame,
    transfers: pd.DataFrame,
    fits: pd.DataFrame,
    *,
    figures: bool = True,
) -> None:
    """Write the tables of a profile, and the figure of its transfers if it has any."""
    table.to_csv(folder / TABLE)
    transfers.to_csv(folder / TRANSFERS, index=False)
    fits.to_csv(folder / FITS)
    if figures and len(transfers):
        from pipesim.utils.packages import Figure

        figure, ax = figure_with_axes(Figure, 7.16, 1, height=3.0)
        plot_transfers(transfers, ax=ax)
        save(figure, folder / "transfers.png")


def load_profile(
    folder: Path, record: Mapping[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables that `save_profile` wrote: table, transfers, fits."""
    from pipesim.utils.packages import pandas as pd

    tables = []
    for name, n_index in _INDEX.items():
        if name not in record["files"]:
            raise RunDirectoryError(
                f"{folder} holds no complete profile: {name} is missing; measure one with "
                "`pipeexec profile`"
            )
        index = list(range(n_index)) or None
        tables.append(pd.read_csv(folder / name, index_col=index))
    table, transfers, fits = tables
    return table, transfers, fits


def host_shares(profile: object) -> dict[str, Any]:
    """Return the shares of the host's time in a `Profile`, for the record of a run."""
    shares = {name: getattr(profile, name) for name in _SHARES}
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def read_shares(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shares of a record; records of older versions have none."""
    shares = {name: number(record.get(name)) for name in _SHARES}
    return {name: share for name, share in shares.items() if share is not None}


def plot_transfers(
    transfers: pd.DataFrame,
    *,
    ax: Axes | None = None,
    legend: bool | LegendPlace = True,
    height: float | None = None,
) -> Axes:
    """Draw the seconds of messages by their bytes, both axes logarithmic.

    Markers are measurements, between idle devices and between loaded ones. Lines are the fits,
    ``latency + nbytes / bandwidth``, one per pair of devices. Up to four pairs differ in markers
    and dashes.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    ax = axes_or_new(ax, 8, height)
    seconds = transfers[list(STATES)].to_numpy(np.float64)
    unit, scale = time_unit(float(seconds.min(initial=1.0)))
    ax.set_xscale("log", base=2)
    n_ticks = max(2, int(axes_size(ax)[0] // (4.5 * text_points())))
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=n_ticks))
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    n_pairs = len(by_pair(transfers))
    entries: dict[str, Any] = {}
    for state in STATES:
        op, marker, dashes = _STYLES[state]
        colour = current_style().palette[op]
        for position, (pair, rows) in enumerate(by_pair(transfers).items()):
            name = f"{state}, and fit"
            if 1 < n_pairs <= len(_PAIRS):
                marker, dashes = _PAIRS[position]
                name = f"{state}, device {pair[0]} to {pair[1]}"
            (points,) = ax.plot(
                rows["nbytes"], rows[state] * scale, marker, color=colour, markersize=3.5, alpha=0.8
            )
            points.set_gid(f"{state}:measured")
            nbytes, fitted = rows["nbytes"].to_numpy(), rows[f"{state}_fit"].to_numpy()
            dense = np.geomspace(nbytes.min(), nbytes.max(), 100)  # lines are curves on these axes
            (line,) = ax.plot(
                dense, np.interp(dense, nbytes, fitted) * scale, color=colour, linestyle=dashes,
                linewidth=1.0, marker="",
            )  # fmt: skip
            line.set_gid(f"{state}:fit")
            entries.setdefault(name, (points, line))
    label(ax, "Message (bytes)", f"From sender to consumer ({unit})")
    ax.xaxis.set_major_formatter(lambda value, _: _size(value))
    above = add_legend(ax, [*entries.values()], [*entries], legend)
    pairs = "one pair of devices" if n_pairs == 1 else f"{n_pairs} pairs of devices"
    set_title(ax, "Messages by size", pairs, above)
    return ax


def _size(nbytes: float) -> str:
    for prefix, power in (("Mi", 20), ("Ki", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {prefix}B"
    return f"{nbytes:g} B"
