"""Texts of a graph's nodes: a matplotlib artist that warns of texts that do not fit.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import warnings

import numpy as np
from matplotlib.backend_bases import RendererBase
from numpy.typing import NDArray

from pipesim.errors import LegibilityWarning
from pipesim.plot.box_labels import HEIGHT, WIDTH, BoxLabels, Floats, points_per_unit


class NodeTexts(BoxLabels):
    """Texts in the middle of nodes, or shorter codes where the texts do not fit.

    Parameters
    ----------
    x, y, width, height
        Centre and size of each node, in data coordinates.
    texts, colours
        Text of each node, and its colour.
    codes
        Shorter texts. All nodes have them if any of ``texts`` does not fit.

    Warns
    -----
    LegibilityWarning
        When drawn, if neither fits into a node.
    """

    #: Graphs have more texts than timelines of the same width.
    smallest = 4.5

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
        """Warn of ``missing`` nodes without text, and name the size of a figure that has room."""
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
        warnings.warn(
            f"{missing} of {len(self.texts)} nodes of this figure have no text: letters of "
            f"{self.smallest:g} points do not fit; give axes of a figure of about {width:.1f} by "
            f"{height:.1f} inches, graph.plot(ax=plt.figure(figsize=({width:.1f}, {height:.1f}), "
            'layout="constrained").add_subplot()), or lower fewer micro-batches',
            LegibilityWarning,
            stacklevel=2,
        )
