"""Figures from the run directories that the steps on a GPU leave; drawn later, without a GPU.

``python benchmarks/on_gpu/figures.py RUN OUT`` draws the ablation of step ``gpipe``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pipesim as ps
from pipeexec.validation import Row, load_run
from pipesim.plot import overlay, save


def draw_overlays(comparisons: Mapping[str, ps.Comparison], out: Path) -> list[Path]:
    """Draw predictions over measurements, one panel below the other.

    Parameters
    ----------
    comparisons
        By title.
    out
        Path of the figure without suffix.

    Returns
    -------
    list of Path
        A PNG and a PDF.
    """
    figure = overlay(comparisons)
    paths = [out.with_name(f"{out.name}.{suffix}") for suffix in ("png", "pdf")]
    for path in paths:
        save(figure, path)
    return paths


def draw_ablation(run_directory: Path, out: Path) -> list[Path]:
    """Draw the rows of a run directory; titles say how many times as fast as the row above.

    Parameters
    ----------
    run_directory
        As `Validation.save` writes it.
    out
        Path of the figure without suffix.
    """
    rows = load_run(run_directory).rows
    titles = {name: name for name in rows}
    for above, name in pairwise(rows):
        predicted, measured = gains(rows[above], rows[name])
        titles[name] += f": {measured:.2f}x (predicted {predicted:.2f}x)"
    return draw_overlays({titles[name]: row.comparison for name, row in rows.items()}, out)


def gains(above: Row, row: Row) -> tuple[float, float]:
    """Return how many times as fast a row is as the one above: predicted, and measured."""
    return (
        above.prediction / row.prediction,
        above.measured.makespan / row.measured.makespan,
    )


if __name__ == "__main__":
    for path in draw_ablation(*(Path(argument) for argument in sys.argv[1:3])):
        print(path)
