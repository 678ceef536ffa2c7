"""Run every script of the gallery, and check that a paper could print its figure.

``python tools/gallery.py [--out FOLDER] [NAME...]`` runs the scripts ``docs/gallery/*/plot_*.py``,
or only those whose folder and file, such as ``choices/plot_plan.py``, have a NAME in them. It
prints a line a script, with its seconds of CPU time, and exits with 1 if any figure fails a check.
The build of the site checks the figures, too.

- at most 40 lines, a docstring with a title, and public imports alone;
- exactly one figure, as wide as one or two columns;
- text of at least 6 points, of 5 in boxes, and within the figure;
- fonts of type 42 in the PDF;
- curves of one axes differ in dashes, marker or lightness.

With ``--out`` it writes each figure as PNG, and contact sheets in colour and in grey.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import runpy
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

from pipesim import plot
from pipesim.plot.figure_style import SMALLEST_TEXT
from pipesim.plot.fitting_labels import BoxLabels

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "docs" / "gallery"
#: Limits: lines of a script, points of a text, difference of two lightnesses (0..1).
LINES, POINTS, LIGHTNESS = 40, 6.0, 0.15
#: Dots an inch of PNG files, and width of a contact sheet in pixels.
DPI, SHEET = 200, 2000


def scripts(names: Sequence[str] = ()) -> list[Path]:
    """Return the scripts of the gallery, or only those whose path in it has one of ``names``."""
    paths = {str(path.relative_to(GALLERY)): path for path in sorted(GALLERY.glob("*/plot_*.py"))}
    return [path for text, path in paths.items() if not names or any(x in text for x in names)]


def problems_of_text(path: Path) -> Iterator[str]:
    """Yield the faults of a script's text."""
    source = path.read_text()
    if (count := len(source.splitlines())) > LINES:
        yield f"{count} lines, at most {LINES} are allowed"
    tree = ast.parse(source)
    for module in (node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        parts = str(module).split(".")
        if parts[0] in ("pipesim", "pipeexec") and len(parts) > 2:
            yield f"imports from {module}; take names from the package or from a room"
    lines = (ast.get_docstring(tree) or "").splitlines()
    if len(lines) < 4 or set(lines[1]) != {"="} or len(lines[1]) < len(lines[0]):
        yield "the docstring must begin with a title, underlined by ==="


def problems_of_figure(figure: Figure) -> Iterator[str]:
    """Yield the faults of a figure at its print size."""
    width = figure.get_figwidth()
    if not np.isclose(width, (plot.ONE_COLUMN, plot.TWO_COLUMNS)).any():
        yield f"{width:g} inches wide, not {plot.ONE_COLUMN} or {plot.TWO_COLUMNS}"
    figure.draw_without_rendering()
    yield from _problems_of_texts(figure)
    for ax in figure.axes:
        yield from _problems_of_lines(ax)
    file = io.BytesIO()
    with mpl.rc_context({"pdf.compression": 0}):
        figure.savefig(file, format="pdf")
    if b"/Type3" in file.getvalue() or b"/CIDFontType2" not in file.getvalue():
        yield "the PDF has fonts that are not of type 42: use plot.paper_style"


def _problems_of_texts(figure: Figure) -> Iterator[str]:
    """Yield texts that are too small, cut at the edge, or that cover each other."""
    page, hidden = figure.bbox, _hidden_labels(figure)
    shown = []
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if not text.get_text().strip() or not text.get_visible() or text in hidden:
            continue
        if text.get_fontsize() < POINTS - 1e-6:
            yield f"text {text.get_text()!r} has {text.get_fontsize():.1f} points"
        box = text.get_window_extent()
        if (
            box.x0 < page.x0 - 1
            or box.y0 < page.y0 - 1
            or box.x1 > page.x1 + 1
            or (box.y1 > page.y1 + 1)
        ):
            yield f"text {text.get_text()!r} is cut at the edge of the figure"
        shown.append((text, box.padded(-1)))
    for (one, first), (other, second) in combinations(shown, 2):
        if first.overlaps(second) and one.get_rotation() == other.get_rotation() == 0:
            yield f"texts {one.get_text()!r} and {other.get_text()!r} overlap"
    for labels in figure.findobj(BoxLabels):
        assert isinstance(labels, BoxLabels)
        if len((fitting := labels.fitting()).indices) and fitting.size < SMALLEST_TEXT:
            yield f"texts in boxes have {fitting.size:.1f} points"


def _hidden_labels(figure: Figure) -> set[Text]:
    """Return the labels of ticks that are not drawn: those beyond the limits of their axis."""
    hidden = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        margin = 1e-9 * (high - low)
        for tick in [*axis.majorTicks, *axis.minorTicks]:
            if not (low - margin <= tick.get_loc() <= high + margin and axis.get_visible()):
                hidden |= {tick.label1, tick.label2}
    return hidden


def _problems_of_lines(ax: Axes) -> Iterator[str]:
    """Yield pairs of curves with a label that look alike in print without colour."""
    curves = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    for one, other in combinations(curves, 2):
        if _look(one) == _look(other) and abs(_lightness(one) - _lightness(other)) < LIGHTNESS:
            yield f"curves {one.get_label()!r} and {other.get_label()!r} look alike in grey"


def _look(line: Line2D) -> tuple[Any, ...]:
    """Return the dashes and the marker of a line."""
    dashes = (line.get_linestyle(), str(line._unscaled_dash_pattern))  # type: ignore[attr-defined]
    return (*dashes, str(line.get_marker()), line.get_linewidth() > 1.8)


def _lightness(line: Line2D) -> float:
    """Return the lightness of a line's colour, 0 (black) to 1."""
    return float(np.dot(to_rgb(line.get_color()), (0.299, 0.587, 0.114)))


def run(path: Path) -> tuple[list[str], float, Image.Image | None]:
    """Run a script; return its faults, its seconds of CPU time, and its figure as an image."""
    problems = list(problems_of_text(path))
    plt.close("all")
    began = time.process_time()
    with mpl.rc_context(), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("default")
        mpl.rcdefaults()
        mpl.use("agg")
        image, kept = None, {}
        try:
            with contextlib.chdir(path.parent):  # as sphinx-gallery does
                kept = runpy.run_path(str(path))  # an animation warns if it ends before it is drawn
        except Exception as error:
            problems.append(f"raises {type(error).__name__}: {error}")
        if len(plt.get_fignums()) != 1:
            problems.append(f"{len(plt.get_fignums())} figures, not one")
        else:
            figure = plt.gcf()
            problems += problems_of_figure(figure)
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=DPI)
            image = Image.open(file).convert("RGB")
    del kept
    plt.close("all")
    seconds = time.process_time() - began
    problems += [f"warns: {warning.message}" for warning in raised]
    return problems, seconds, image


def contact_sheet(images: Sequence[Image.Image]) -> Image.Image:
    """Return one image of all, in lines as wide as `SHEET`, at their own size."""
    x = y = line = 0
    places = []
    for image in images:
        if x and x + image.width > SHEET:
            x, y, line = 0, y + line + 20, 0
        places.append((x, y))
        x, line = x + image.width + 20, max(line, image.height)
    sheet = Image.new("RGB", (SHEET, y + line), "white")
    for image, place in zip(images, places, strict=True):
        sheet.paste(image, place)
    return sheet


def save(image: Image.Image, folder: Path, name: str) -> None:
    """Write an image in colour and in grey."""
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / f"{name}.png")
    image.convert("L").save(folder / f"{name}-grey.png")


def main(arguments: list[str]) -> int:
    """Check the scripts; return the exit status."""
    parser = argparse.ArgumentParser(description="check the figures of the gallery")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write PNG files there")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(arguments)
    images: list[Image.Image] = []
    wrong = 0
    if not (paths := scripts(options.names)):
        parser.error(f"no script of the gallery has a name with {' or '.join(options.names)}")
    for path in paths:
        problems, seconds, image = run(path)
        print(f"{path.relative_to(GALLERY)}: {seconds:.1f} s", flush=True)
        for text in problems:
            print(f"    {text}", flush=True)
        wrong += bool(problems)
        if image is not None and options.out is not None:
            name = f"{path.parent.name}-{path.stem.removeprefix('plot_')}"
            save(image, options.out, name)
            images.append(image)
    if images:
        save(contact_sheet(images), options.out, "sheet")
    print(f"{len(paths)} scripts, {wrong} with faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
