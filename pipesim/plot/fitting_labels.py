"""Artists of matplotlib that draw only labels that fit: numbers in boxes, texts of nodes, devices.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axes._base import _AxesBase
from matplotlib.backend_bases import RendererBase
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import Locator
from matplotlib.transforms import IdentityTransform
from numpy.typing import NDArray

from pipesim.errors import LegibilityWarning
from pipesim.plot.figure_style import SMALLEST_TEXT, text_points
from pipesim.plot.paper_figure import axes_size, thinned_ticks
from pipesim.utils.caller_warnings import caller_line

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Relative to the size of a number: the width of a digit with its margin, the height of a digit
#: with its margins, and half the height of a digit.
WIDTH, HEIGHT, MIDDLE = 0.66, 0.85, 0.365
#: Margin of a box at its sides together (points).
MARGIN = 1.0
#: Share of the boxes, by length, that must have a number, and share of all that must have room for
#: it at the size of all; else numbers are smaller.
MIN_FITTING, MIN_AT_SIZE = 0.9, 0.98
#: Where numbers of all micro-batches do not fit: those of every second, fifth, ..., if that many of
#: them are as far apart as needed. They reach into neighbours: a number is at most four times as
#: long as its box.
EVERY, MIN_APART, MOST_LENGTHS = (2, 5, 10, 20, 50, 100), 0.8, 4.0


def points_per_unit(ax: _AxesBase) -> tuple[float, float]:
    """Return the points of one unit of each axis, at the current size and limits."""
    corners = np.asarray(ax.transData.transform(np.array([(0.0, 0.0), (1.0, 1.0)])), np.float64)
    x, y = np.abs(corners[1] - corners[0]) * (72.0 / ax.figure.dpi)
    return float(x), float(y)


class Labels(NamedTuple):
    """Labels that are drawn: their indices, and the size of all (points).

    ``every`` is the step from one micro-batch with a number to the next, ``n_missing`` the boxes
    of the whole figure that lack a label which a reader would look for.
    """

    indices: Indices
    size: float
    every: int = 1
    n_missing: int = 0


class BoxLabels(Artist):
    """Labels in the middle of boxes, each drawn only if it fits its box.

    The choice is made when drawing, so that labels appear and disappear as a figure is resized or
    zoomed. All have one size, between ``smallest`` and that of ticks. Drawing gives a
    `LegibilityWarning` if more than a few do not fit. Centre and size of boxes are in data
    coordinates.
    """

    #: Smallest size (points), the shares of boxes described above, and the names of both.
    smallest, at_size, min_fitting = SMALLEST_TEXT, MIN_AT_SIZE, MIN_FITTING
    boxes, labels = "boxes", "number"

    def __init__(
        self,
        x: Floats,
        y: Floats,
        width: Floats,
        height: Floats,
        texts: list[str],
        colours: list[str],
    ) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.set_zorder(3)
        self.centre, self.width, self.height = np.column_stack([x, y]), width, height
        self.texts, self.colours = texts, colours
        self.digits = np.array([len(text) for text in texts])
        self.largest = text_points()
        self._warned: tuple[object, ...] | None = None
        self._line = caller_line()  # what warnings name: figures are drawn by code of matplotlib

    def room(self) -> Floats:
        """Return the size (points) up to which each label fits its box."""
        assert self.axes is not None
        x, y = points_per_unit(self.axes)
        wide = (self.width * x - MARGIN) / (WIDTH * self.digits)
        room: Floats = np.minimum(wide, (self.height * y - MARGIN) / HEIGHT)
        return room

    def size_and_share(self, room: Floats, length: Floats) -> tuple[float, float]:
        """Return the size of labels in boxes of a room (points), and how much of them fits."""
        size = float(np.quantile(room, 1 - self.at_size, method="lower"))
        size = max(min(size, self.largest), self.smallest)
        return size, float(length[_fits(room, size)].sum() / length.sum())

    def fitting(self) -> Labels:
        """Return the labels that are drawn now."""
        if self.axes is None or not self.texts:
            return Labels(np.empty(0, np.int64), self.smallest)
        room = self.room()
        size, share = self.size_and_share(room, self.width)
        shown = np.flatnonzero(_fits(room, size))
        return Labels(shown, size, 1, (len(room) - len(shown)) * (share < self.min_fitting))

    def draw(self, renderer: RendererBase) -> None:
        """Draw the labels that fit and are within the axes, and warn of missing ones."""
        axes = self.axes
        if axes is None or not self.get_visible():
            return
        labels = self.fitting()
        if labels.n_missing and self._warned != labels[1:]:
            self._warned = labels[1:]
            self.warn(labels)
        pixels = np.asarray(axes.transData.transform(self.centre[labels.indices]))
        pixel = axes.figure.dpi / 72.0
        drop = MIDDLE * labels.size * pixel
        text = Text(ha="center", va="baseline", fontsize=labels.size)
        text.set_figure(axes.figure)
        for index, (x, y) in zip(labels.indices.tolist(), pixels.tolist(), strict=True):
            if axes.bbox.contains(x, y):
                self.draw_ground(renderer, index, labels, (x, y))
                text.set_text(self.texts[index])
                text.set_color(self.colours[index])
                text.set_position((x, y - drop))
                text.draw(renderer)
        self.stale = False

    def draw_ground(
        self, renderer: RendererBase, index: int, labels: Labels, place: tuple[float, float]
    ) -> None:
        """Draw what is behind a label, whose middle is at ``place`` (pixels); here nothing."""

    def group(self) -> Sequence[BoxLabels]:
        """Return all artists whose labels have one size."""
        return [self]

    def warn(self, labels: Labels) -> None:
        """Warn of missing labels, with the size of a figure that has room for all."""
        assert self.axes is not None
        figure = self.axes.figure.figure
        members, sizes = self.group(), []
        for size, along in zip(figure.get_size_inches().tolist(), (0, 1), strict=True):
            factor = 1.0
            for member in members:
                assert member.axes is not None
                boxes = (member.width, member.height)[along]
                have = np.maximum(boxes * points_per_unit(member.axes)[along], 1e-9)
                need = self.smallest * (HEIGHT if along else WIDTH * member.digits) + MARGIN
                factor = max(factor, float(np.quantile(need / have, self.min_fitting)))
            sizes.append(np.ceil(10.5 * size * factor) / 10 if factor > 1 else size)
        total = sum(len(member.texts) for member in members)
        warnings.warn_explicit(
            f"{labels.n_missing} of {total} {self.boxes} of this figure have no {self.labels}: "
            f"letters of {self.smallest:g} points do not fit; {self.advice(*sizes)}",
            LegibilityWarning,
            *self._line,
        )

    def advice(self, width: float, height: float) -> str:
        """Return what to do, where a figure of this size (inches) has room."""
        return f"give axes of a figure of about {width:.1f} by {height:.1f} inches"


def _fits(room: Floats, size: float) -> NDArray[np.bool_]:
    # Boxes of equal length differ in the last digits of their times.
    return room >= 0.999 * size


class MicrobatchNumbers(BoxLabels):
    """Numbers of micro-batches in the boxes of tasks; all of one figure have one size.

    Where those of all do not fit, every second, fifth, ... micro-batch has numbers, in all axes of
    the figure. These reach into neighbours, on a ground of the colour of their own box. Where this
    does not suffice either, boxes that have room have numbers, unless these were of one of
    ``kinds`` (operations) and not of another.
    """

    def __init__(
        self,
        x: Floats,
        y: Floats,
        width: Floats,
        height: Floats,
        texts: list[str],
        colours: list[str],
        *,
        microbatch: Indices,
        kinds: Indices,
        fills: Floats,
        hatched: NDArray[np.bool_],
    ) -> None:
        super().__init__(x, y, width, height, texts, colours)
        self.microbatch, self.kinds = microbatch, kinds
        self.fills, self.hatched = fills, hatched

    def group(self) -> Sequence[MicrobatchNumbers]:
        """Return the artists with numbers of all axes of the figure."""
        assert self.axes is not None
        return [
            artist
            for axes in self.axes.figure.figure.axes
            for artist in axes.artists
            if isinstance(artist, MicrobatchNumbers) and artist.get_visible() and artist.texts
        ]

    def fitting(self) -> Labels:
        """Return the numbers that are drawn now."""
        if self.axes is None or not self.texts:
            return Labels(np.empty(0, np.int64), self.smallest)
        members = self.group()
        rooms, lengths = [member.room() for member in members], []
        for member in members:
            assert member.axes is not None
            lengths.append(member.width * points_per_unit(member.axes)[0])
        own_room = rooms[members.index(self)]
        room = np.concatenate(rooms)
        size, share = self.size_and_share(room, np.concatenate(lengths))
        if share >= self.min_fitting:
            return Labels(np.flatnonzero(_fits(own_room, size)), size)
        size = self.smallest
        for every in EVERY:
            apart = [member.apart(every) for member in members]
            n_kept = sum(kept for _, kept in apart)
            if n_kept and sum(len(shown) for shown, _ in apart) >= MIN_APART * n_kept:
                return Labels(apart[members.index(self)][0], size, every)
        fits = _fits(room, size)
        kinds = np.concatenate([member.kinds for member in members])
        shares = [fits[kinds == kind].mean() for kind in np.unique(kinds)]
        # Either operation alone with numbers would look as if the other had none.
        is_fair = min(shares) >= 0.5 * max(shares)
        n_missing = len(room) - is_fair * int(fits.sum())
        shown = np.flatnonzero(_fits(own_room, size) & is_fair)
        is_first = members[0] is self  # one warning for the figure
        return Labels(shown, size, 1, n_missing * is_first)

    def apart(self, every: int) -> tuple[Indices, int]:
        """Return which numbers of every k-th micro-batch do not meet, and how many there are."""
        assert self.axes is not None
        x, y = points_per_unit(self.axes)
        kept = np.flatnonzero((self.microbatch % every == 0) | (self.microbatch < 0))
        if not (self.microbatch[kept] > 0).any():
            return kept[:0], len(kept)
        width = self.smallest * WIDTH * self.digits + MARGIN
        fits = (width - MARGIN <= MOST_LENGTHS * self.width * x) & (
            self.smallest * HEIGHT + MARGIN <= 1.001 * self.height * y
        )
        candidates = kept[fits[kept]]
        if len(candidates) < MIN_APART * len(kept):
            return kept[:0], len(kept)
        order = candidates[np.lexsort((self.centre[candidates, 0], self.centre[candidates, 1]))]
        left, right = (self.centre[order, 0] * x + side * width[order] / 2 for side in (-1, 1))
        shown, lane, end = [], np.nan, -np.inf
        for k, row in enumerate(self.centre[order, 1].tolist()):
            if row != lane or left[k] >= end:
                shown.append(int(order[k]))
                lane, end = row, right[k]
        return np.array(sorted(shown), np.int64), len(kept)

    def draw_ground(
        self, renderer: RendererBase, index: int, labels: Labels, place: tuple[float, float]
    ) -> None:
        """Draw a ground behind a number that reaches into neighbours, or is on a hatch."""
        if labels.every == 1 and not self.hatched[index]:
            return
        assert self.axes is not None
        pixel = labels.size * self.axes.figure.dpi / 72.0
        width, height = WIDTH * self.digits[index] * pixel, HEIGHT * pixel
        ground = Rectangle((place[0] - width / 2, place[1] - height / 2), width, height,
                           facecolor=self.fills[index], edgecolor="none", linewidth=0,
                           transform=IdentityTransform())  # fmt: skip
        ground.set_figure(self.axes.figure)
        ground.draw(renderer)

    def advice(self, width: float, height: float) -> str:
        """Return what to do, where a figure of this size (inches) has room."""
        return (
            f"a figure of about {width:.1f} by {height:.1f} inches has room for all (height=, or "
            "ax= of such a figure); numbers=False draws none"
        )


class NodeTexts(BoxLabels):
    """Texts in the middle of nodes, or shorter codes where the texts do not fit.

    All nodes have ``codes`` if any of ``texts`` does not fit. Drawing gives a `LegibilityWarning`
    for nodes into which neither fits.
    """

    #: Graphs have more texts than timelines of the same width, and all must fit.
    smallest, at_size, min_fitting = 4.5, 1.0, 1.0
    boxes, labels = "nodes", "text"

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
        super().__init__(x, y, width, height, texts, colours)
        self._choices = texts, codes

    def fitting(self) -> Labels:
        """Choose texts or codes; return those that are drawn now."""
        for texts in self._choices:
            self.texts, self.digits = texts, np.array([len(text) for text in texts])
            labels = super().fitting()
            if len(labels.indices) == len(texts):
                break
        return labels

    def advice(self, width: float, height: float) -> str:
        """Return what to do, where a figure of this size (inches) has room."""
        return (
            f"give axes of a figure of about {width:.1f} by {height:.1f} inches, "
            f"graph.plot(ax=plt.figure(figsize=({width:.1f}, {height:.1f}), "
            'layout="constrained").add_subplot()), or lower fewer micro-batches'
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
