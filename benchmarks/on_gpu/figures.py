"""Figures of the results of steps, drawn from their run directories."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

import pipeexec as px
import pipesim as ps
from on_gpu.gpipe import gains
from pipeexec.executor.allocator_memory import Allocated
from pipesim.errors import RunDirectoryError
from pipesim.plot.paper_figure import figure_with_axes, save, set_title
from pipesim.plot.timelines import overlay

_SUFFIXES = (".png", ".pdf")
#: Schedules from the top of an overlay on.
_ORDER = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")


def draw_overlays(runs: Iterable[Path], to: Path) -> bool:
    """Draw measured over predicted for each row of some run directories, one below the other.

    Returns False if none of them is whole.
    """
    comparisons: dict[str, ps.Comparison] = {}
    for run in runs:
        try:
            rows = px.load_run(run).rows
        except RunDirectoryError:  # its step was cut
            continue
        comparisons |= {name: row.comparison for name, row in rows.items()}
    if comparisons:
        order = [name for name in _ORDER if name in comparisons]
        order += [name for name in comparisons if name not in order]
        _save(overlay({name: comparisons[name] for name in order}), to)
    return bool(comparisons)


def draw_overlap(folder: Path, schedule: str, to: Path) -> bool:
    """Draw a step with copies beside compute over one with copies behind it; False without both."""
    files = [folder / f"{schedule}-{way}.csv" for way in ("on", "off")]
    if not all(file.is_file() for file in files):
        return False
    lines = [ps.Timeline.load(file) for file in files]
    figure = Figure(figsize=(7.16, 1.0 + 0.55 * 2 * lines[0].n_devices), layout="constrained")
    last = max(line.makespan for line in lines)
    for ax, line, words in zip(figure.subplots(2), lines,
                               ("copies beside compute", "copies between compute"),
                               strict=True):  # fmt: skip
        line.plot(ax=ax, transfers=True, legend=line is lines[1], unit="ms",
                  title=f"{schedule}, {words}: {line.makespan * 1e3:.1f} ms")  # fmt: skip
        ax.set_xlim(0, last * 1e3 * 1.01)
    _save(figure, to)
    return True


def draw_memory(folder: Path, schedule: str, to: Path) -> bool:
    """Draw the memory that the allocator counted and the simulator's; False without both."""
    files = [folder / f"{schedule}-{name}" for name in
             ("allocated.csv", "timeline.csv", "predicted.csv", "costs.json")]  # fmt: skip
    if not all(file.is_file() for file in files):
        return False
    measured = ps.Timeline.load(files[1])
    predicted = ps.Timeline.load(files[2], costs=ps.Costs.load(files[3]))
    frame = pd.read_csv(files[0])
    gpus = tuple([str(frame["gpu"].iloc[0])] * measured.n_devices)
    figure, ax = figure_with_axes(Figure, 7.16, 1, height=3.0)
    Allocated(frame, measured, gpus).plot(predicted, ax=ax)
    set_title(ax, schedule, "one GPU, all slices")
    _save(figure, to)
    return True


def draw_ablation(run: Path, to: Path) -> bool:
    """Draw measured over predicted for each row of a run directory; False if it is not whole.

    Titles say how many times as fast a row is as the one above, measured and predicted.
    """
    try:
        rows = px.load_run(run).rows
    except RunDirectoryError:  # its step was cut
        return False
    titles = {name: name for name in rows}
    for above, name in pairwise(rows):
        predicted, measured = gains(rows[above], rows[name])
        titles[name] += f": {measured:.2f}x (predicted {predicted:.2f}x)"
    _save(overlay({titles[name]: row.comparison for name, row in rows.items()}), to)
    return True


def _save(figure: Figure, to: Path) -> None:
    save(figure, *(to.with_name(to.name + suffix) for suffix in _SUFFIXES))
