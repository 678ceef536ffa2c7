"""Files of a profile in a run directory: its tables, and the figure of the transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.profiling.link_fit import STATES, by_pair
from pipesim.errors import RunDirectoryError, number
from pipesim.plot.paper_figure import (
    add_legend,
    axes_or_new,
    figure_with_axes,
    label,
    save,
    set_title,
)
from pipesim.utils.units import time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


#: Files of `Profile.table`, `Profile.transfers` and `Profile.fits`.
TABLE, TRANSFERS, FITS = "profile.csv", "transfers.csv", "links.csv"
#: Attributes of a profile that are numbers; the record of the run has them.
_SHARES = ("host_share", "launch_share")
#: Number of leading columns that index each file.
_INDEX = {TABLE: 2, TRANSFERS: 0, FITS: 3}
#: Colour, marker and dashes of each state; the two colours of the palette differ in lightness.
_STYLES = {"idle": ("#74B9E7", "o", (0, (4, 1.5))), "loaded": ("#C8560A", "s", "-")}


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
    """Return the tables that `save_profile` wrote: table, transfers, fits.

    Raises
    ------
    RunDirectoryError
        If the record of the run lists no such table, as in a run without a profile, or in one of an
        older version.
    """
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
    """Return the shares of the host's time in a `pipeexec.Profile`, for the record of a run."""
    shares = {name: getattr(profile, name) for name in _SHARES}
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def read_shares(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shares of a record; records of older versions have none."""
    shares = {name: number(record.get(name)) for name in _SHARES}
    return {name: share for name, share in shares.items() if share is not None}


def plot_transfers(transfers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the seconds of messages by their bytes, both axes logarithmic.

    Markers are measurements, between idle devices and between loaded ones. Lines are the fits,
    ``latency + nbytes / bandwidth``, one per pair of devices.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    ax = axes_or_new(ax, 8)
    seconds = transfers[list(STATES)].to_numpy(np.float64)
    unit, scale = time_unit(float(seconds.min(initial=1.0)))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    for state in STATES:
        colour, marker, dashes = _STYLES[state]
        for position, (_, rows) in enumerate(by_pair(transfers).items()):
            ax.plot(
                rows["nbytes"], rows[state] * scale, marker, color=colour, markersize=3.5,
                alpha=0.8, label=None if position else f"{state}, measured",
            ).pop().set_gid(f"{state}:measured")  # fmt: skip
            nbytes, fitted = rows["nbytes"].to_numpy(), rows[f"{state}_fit"].to_numpy()
            dense = np.geomspace(nbytes.min(), nbytes.max(), 100)  # lines are curves on these axes
            ax.plot(
                dense, np.interp(dense, nbytes, fitted) * scale, color=colour,
                linestyle=dashes, linewidth=1.0, label=None if position else f"{state}, fit",
            ).pop().set_gid(f"{state}:fit")  # fmt: skip
    label(ax, "Message (bytes)", f"From sender to consumer ({unit})")
    ax.xaxis.set_major_formatter(lambda value, _: _size(value))
    n_pairs = len(by_pair(transfers))
    height = add_legend(ax, *ax.get_legend_handles_labels())
    pairs = "one pair of devices" if n_pairs == 1 else f"{n_pairs} pairs of devices"
    set_title(ax, "Messages by size", pairs, height)
    return ax


def _size(nbytes: float) -> str:
    for prefix, power in (("Mi", 20), ("Ki", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {prefix}B"
    return f"{nbytes:g} B"
