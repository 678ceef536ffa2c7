"""What a profile leaves in a run directory: its tables, and the figure of the transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeexec.profiling.link_fit import STATES, by_pair
from pipesim.errors import RunDirectoryError, number
from pipesim.plot.paper_figure import SMALL, axes_or_new, figure_with_axes, label, save, set_title
from pipesim.plot.style import time_unit

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "FITS",
    "TABLE",
    "TRANSFERS",
    "host_shares",
    "load_profile",
    "plot_transfers",
    "read_shares",
    "save_profile",
]

#: The file of `Profile.table`, and how many of the first columns index it; then of the others.
TABLE, TRANSFERS, FITS = "profile.csv", "transfers.csv", "links.csv"
#: Attributes of a profile that are numbers; its record has them.
_SHARES = ("host_share", "launch_share")
_INDEX = {TABLE: 2, TRANSFERS: 0, FITS: 3}
#: How each state is drawn: two of the palette's colours that differ in lightness, and markers.
_LOOKS = {"idle": ("#74B9E7", "o", (0, (4, 1.5))), "loaded": ("#C8560A", "s", "-")}


def save_profile(
    folder: Path,
    table: pd.DataFrame,
    transfers: pd.DataFrame,
    fits: pd.DataFrame,
    *,
    figures: bool = True,
) -> None:
    """Write the tables of a profile, and the figure of its transfers where there are any."""
    table.to_csv(folder / TABLE)
    transfers.to_csv(folder / TRANSFERS, index=False)
    fits.to_csv(folder / FITS)
    if figures and len(transfers):
        from matplotlib.figure import Figure

        figure, ax = figure_with_axes(Figure, 7.16, 1, height=3.0)
        plot_transfers(transfers, ax=ax)
        save(figure, folder / "transfers.png")


def load_profile(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return what `save_profile` wrote: table, transfers, fits.

    Raises
    ------
    RunDirectoryError
        If a table is not there, as in a run without a profile, or one of an older version.
    """
    import pandas as pd

    found = []
    for name, n_index in _INDEX.items():
        if not (folder / name).is_file():
            raise RunDirectoryError(
                f"{folder} holds no whole profile: it has no {name}; measure one with "
                "`pipeexec profile`"
            )
        index = list(range(n_index)) or None
        found.append(pd.read_csv(folder / name, index_col=index))
    return found[0], found[1], found[2]


def host_shares(profile: object) -> dict[str, Any]:
    """Return the shares of the host's time that a `pipeexec.Profile` has, for a record."""
    found = {name: getattr(profile, name) for name in _SHARES}
    return {name: share for name, share in found.items() if math.isfinite(share)}


def read_shares(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shares that a record has; those of older versions have none."""
    found = {name: number(record.get(name)) for name in _SHARES}
    return {name: share for name, share in found.items() if share is not None}


def plot_transfers(transfers: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the seconds of messages by their bytes, both axes logarithmic.

    Markers are what was measured, between idle devices and loaded ones; lines are the fits,
    ``latency + nbytes / bandwidth``, one a pair of devices.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    ax = axes_or_new(ax, 8)
    seconds = transfers[list(STATES)].to_numpy(np.float64)
    sign, scale = time_unit(float(seconds.min(initial=1.0)))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    for state in STATES:
        colour, marker, dashes = _LOOKS[state]
        for position, (_, rows) in enumerate(by_pair(transfers).items()):
            ax.plot(
                rows["nbytes"], rows[state] * scale, marker, color=colour, markersize=3.5,
                alpha=0.8, label=None if position else f"{state}, measured",
            ).pop().set_gid(f"{state}:measured")  # fmt: skip
            nbytes, fitted = rows["nbytes"].to_numpy(), rows[f"{state}_fit"].to_numpy()
            between = np.geomspace(nbytes.min(), nbytes.max(), 100)  # where a line is a curve
            ax.plot(
                between, np.interp(between, nbytes, fitted) * scale, color=colour,
                linestyle=dashes, linewidth=1.0, label=None if position else f"{state}, fit",
            ).pop().set_gid(f"{state}:fit")  # fmt: skip
    label(ax, "Message (bytes)", f"From sender to consumer ({sign})")
    ax.xaxis.set_major_formatter(lambda value, _: _size(value))
    n_pairs = len(by_pair(transfers))
    ax.legend(fontsize=SMALL, frameon=False)
    pairs = "one pair of devices" if n_pairs == 1 else f"{n_pairs} pairs of devices"
    set_title(ax, "Messages by size", pairs)
    return ax


def _size(nbytes: float) -> str:
    for sign, power in (("Mi", 20), ("Ki", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {sign}B"
    return f"{nbytes:g} B"
