"""Artists of matplotlib that draw only labels that fit: numbers in boxes, texts of nodes, devices.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axes._base import _AxesBase
from matplotlib.backend_bases import RendererBase
from matplotlib.text import Text
from matplotlib.ticker import Locator
from numpy.typing import NDArray

from pipesim.errors import LegibilityWarning
from pipesim.plot.paper_figure import axes_size, thinned_ticks
from pipesim.utils.caller_warnings import warn_caller

Floats = NDArray[np.float64]

#: Smallest and largest size of a number (points). Publishers ask for 6 or more.
SMALLEST, LARGEST = 6.0, 8.0
#: Relative to the size of a number: the width of a digit with its margin, the height of a digit
#: with its margins, and half the height of a digit.
WIDTH, HEIGHT, MIDDLE = 0.66, 0.9, 0.365
#: Share of a kind's numbers that must fit for any of them to be drawn, and share of the numbers
#: that must fit at the size of all.
MIN_FITTING, MIN_AT_SIZE = 0.85, 0.98


def points_per_unit(ax: _AxesBase) -> tuple[float, float]:
    """Return the points of one unit of each axis, at the current size and limits."""
    corners = np.asarray(ax.transData.transform(np.array([(0.0, 0.0), (1.0, 1.0)])), np.float64)
    x, y = np.abs(corners[1] - corners[0]) * (72.0 / ax.figure.dpi)
    return float(x), float(y)


class BoxLabels(Artist):
    """Numbers in the middle of boxes, each drawn only if it fits its box.

    The choice is made when drawing, so that numbers appear and disappear as a figure is resized or
    zoomed. All have one size, between 6 and 8 points. Centre and size of boxes are in data
    coordinates. All or none of the numbers of one of ``kinds`` are drawn, apart from the few that
    do not fit.
    """

    #: Smallest size (points), and the share of numbers that must fit at the size of all.
    smallest, at_size = SMALLEST, MIN_AT_SIZE

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
        """Return the numbers that fit into their boxes now, and the size of all (points)."""
        if self.axes is None or not self.texts:
            return np.empty(0, np.int64), self.smallest
        x, y = points_per_unit(self.axes)
        room = np.minimum(
            (self.width * x - 1.0) / (WIDTH * self.digits), (self.height * y - 1.0) / HEIGHT
        )
        size, legible = LARGEST, []
        for kind in np.unique(self.kinds):
            kind_room = room[self.kinds == kind]
            if np.quantile(kind_room, 1 - MIN_FITTING) >= self.smallest:
                legible.append(kind)
                size = min(size, float(np.quantile(kind_room, 1 - self.at_size, method="lower")))
        size = max(size, self.smallest)
        # Boxes of equal length differ in the last digits of their times.
        return np.flatnonzero(np.isin(self.kinds, legible) & (room >= 0.999 * size)), size

    def draw(self, renderer: RendererBase) -> None:
        """Draw the numbers that fit and are within the axes."""
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


class NodeTexts(BoxLabels):
    """Texts in the middle of nodes, or shorter codes where the texts do not fit.

    All nodes have ``codes`` if any of ``texts`` does not fit. Drawing gives a `LegibilityWarning`
    for nodes into which neither fits.
    """

    #: Graphs have more texts than timelines of the same width, and all must fit.
    smallest, at_size = 4.5, 1.0

    def __init__(
        self,
        x: Floats,
        y: Floats,
        width: Floats,
        height: Floats,
        texts: list[str],
        colours: list[str],
        codes: list[str],
    ) -> None:
        super().__init__(x, y, width, height, texts, colours, np.zeros(len(texts), np.int8))
        self._choices = texts, codes

    def fitting(self) -> tuple[NDArray[np.int64], float]:
        """Choose texts or codes; return those that fit now, and the size of all (points)."""
        for texts in self._choices:
            self.texts, self.digits = texts, np.array([len(text) for text in texts])
            nodes, size = super().fitting()
            if len(nodes) == len(texts):
                break
        return nodes, size

    def draw(self, renderer: RendererBase) -> None:
        """Draw the texts that fit, and warn of the others."""
        if self.axes is not None and self.get_visible() and self.texts:
            missing = len(self.texts) - len(self.fitting()[0])
            if missing:
                self._warn(missing)
        super().draw(renderer)

    def _warn(self, missing: int) -> None:
        assert self.axes is not None
        figure = self.axes.figure.figure
        x, y = points_per_unit(self.axes)
        least = self.smallest
        need = least * WIDTH * self.digits + 1.0, np.full(len(self.texts), least * HEIGHT + 1.0)
        have = self.width * x, self.height * y
        factors = [float((n / h).max()) for n, h in zip(need, have, strict=True)]
        width, height = (
            np.ceil(10.5 * size * max(1.0, factor)) / 10
            for size, factor in zip(figure.get_size_inches().tolist(), factors, strict=True)
        )
        warn_caller(
            f"{missing} of {len(self.texts)} nodes of this figure have no text: letters of "
            f"{self.smallest:g} points do not fit; give axes of a figure of about {width:.1f} by "
            f"{height:.1f} inches, graph.plot(ax=plt.figure(figsize=({width:.1f}, {height:.1f}), "
            'layout="constrained").add_subplot()), or lower fewer micro-batches',
            LegibilityWarning,
        )


class DeviceTicks(Locator):
    """Ticks of a vertical axis with a row a device, whose labels have lines of ``line`` points.

    A layout may change the height of the axes after their ticks were set.
    """

    def __init__(self, ax: Axes, n_devices: int, line: float) -> None:
        self.ax = ax
        self.n_devices = n_devices
        self.line = line

    def __call__(self) -> list[int]:
        """Return the devices with a label."""
        return thinned_ticks(self.n_devices, max(1, int(axes_size(self.ax)[1] / self.line)))

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return the same devices for any limits of the axis."""
        return self()
