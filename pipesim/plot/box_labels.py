"""Numbers in cells, as an artist of matplotlib's that knows which of them fit.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes._base import _AxesBase
from matplotlib.backend_bases import RendererBase
from matplotlib.text import Text
from numpy.typing import NDArray

__all__ = ["Numbers", "points_per_unit"]

Floats = NDArray[np.float64]

#: Points: the least and the most that a number measures.
SMALLEST, LARGEST = 4.5, 8.0
#: Of the size of a number: the width of a digit with room beside it, its height with room above
#: and below, and half its height.
WIDTH, HEIGHT, MIDDLE = 0.66, 0.9, 0.365
#: Share of a kind's numbers that must fit for any of them to be drawn, and the share that the
#: size of all is chosen for.
MOST, NEARLY_ALL = 0.85, 0.98


def points_per_unit(ax: _AxesBase) -> tuple[float, float]:
    """Return how many points one unit of each axis measures now."""
    corners = np.asarray(ax.transData.transform(np.array([(0.0, 0.0), (1.0, 1.0)])), np.float64)
    x, y = np.abs(corners[1] - corners[0]) * (72.0 / ax.figure.dpi)
    return float(x), float(y)


class Numbers(Artist):
    """Numbers in the middle of cells, each drawn only if it fits its cell at that moment.

    What fits is decided when drawing, so that numbers come and go as a figure is resized or
    zoomed. All have one size, between 4.5 and 8 points.

    Parameters
    ----------
    x, y, width, height
        Centre and size of each cell, in data coordinates.
    texts, colours
        Number and its colour.
    kinds
        Numbers of one kind are drawn all or none, apart from the few cells that are too narrow.
    """

    def __init__(
        self,
        x: Floats,
        y: Floats,
        width: Floats,
        height: Floats,
        texts: list[str],
        colours: list[str],
        kinds: NDArray[np.int8],
    ) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.set_zorder(3)
        self.centre, self.width, self.height = np.column_stack([x, y]), width, height
        self.texts, self.colours, self.kinds = texts, colours, kinds
        self.digits = np.array([len(text) for text in texts])

    def fitting(self) -> tuple[NDArray[np.int64], float]:
        """Return which numbers fit into their cells now, and the size of all in points."""
        if self.axes is None or not self.texts:
            return np.empty(0, np.int64), SMALLEST
        x, y = points_per_unit(self.axes)
        room = np.minimum(
            (self.width * x - 1.0) / (WIDTH * self.digits), (self.height * y - 1.0) / HEIGHT
        )
        size, legible = LARGEST, []
        for kind in np.unique(self.kinds):
            of_kind = room[self.kinds == kind]
            if np.quantile(of_kind, 1 - MOST) >= SMALLEST:
                legible.append(kind)
                size = min(size, float(np.quantile(of_kind, 1 - NEARLY_ALL, method="lower")))
        size = max(size, SMALLEST)
        # Cells of equal length differ in the last digits of their times.
        return np.flatnonzero(np.isin(self.kinds, legible) & (room >= 0.999 * size)), size

    def draw(self, renderer: RendererBase) -> None:
        """Draw those that fit and are within the axes."""
        axes = self.axes
        if axes is None or not self.get_visible():
            return
        fitting, size = self.fitting()
        pixels = np.asarray(axes.transData.transform(self.centre[fitting]))
        drop = MIDDLE * size * axes.figure.dpi / 72.0
        text = Text(ha="center", va="baseline", fontsize=size)
        text.set_figure(axes.figure)
        for index, (x, y) in zip(fitting.tolist(), pixels.tolist(), strict=True):
            if axes.bbox.contains(x, y):
                text.set_text(self.texts[index])
                text.set_color(self.colours[index])
                text.set_position((x, y - drop))
                text.draw(renderer)
        self.stale = False
