"""The texts of a graph's nodes, as an artist of matplotlib's that warns of those that do not fit.

Imported when something is drawn, since it loads matplotlib.
"""

from __future__ import annotations

import warnings

import numpy as np
from matplotlib.backend_bases import RendererBase
from numpy.typing import NDArray

from pipesim.errors import LegibilityWarning
from pipesim.plot.box_labels import HEIGHT, SMALLEST, WIDTH, Floats, Numbers, points_per_unit

__all__ = ["NodeTexts"]


class NodeTexts(Numbers):
    """Texts in the middle of nodes; where they do not fit, codes alone.

    Parameters
    ----------
    x, y, width, height
        Centre and size of each node, in data coordinates.
    texts, colours
        Text and its colour.
    codes
        Shorter texts, drawn of all nodes where a text does not fit.

    Warns
    -----
    LegibilityWarning
        When drawn, if a node has no room for either.
    """

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
        """Choose between texts and codes; return which fit now, and the size of all in points."""
        for texts in self._choices:
            self.texts, self.digits = texts, np.array([len(text) for text in texts])
            nodes, size = super().fitting()
            if len(nodes) == len(texts):
                break
        return nodes, size

    def draw(self, renderer: RendererBase) -> None:
        """Draw those that fit, and warn of others."""
        if self.axes is not None and self.get_visible() and self.texts:
            missing = len(self.texts) - len(self.fitting()[0])
            if missing:
                self._warn(missing)
        super().draw(renderer)

    def _warn(self, missing: int) -> None:
        assert self.axes is not None
        figure = self.axes.figure.figure
        x, y = points_per_unit(self.axes)
        need = SMALLEST * WIDTH * self.digits + 1.0, np.full(len(self.texts), SMALLEST * HEIGHT + 1)
        have = self.width * x, self.height * y
        factors = [float((n / h).max()) for n, h in zip(need, have, strict=True)]
        width, height = (
            np.ceil(10.5 * size * max(1.0, factor)) / 10
            for size, factor in zip(figure.get_size_inches().tolist(), factors, strict=True)
        )
        warnings.warn(
            f"{missing} of {len(self.texts)} nodes of this figure have no text: letters of "
            f"{SMALLEST:g} points do not fit; give axes of a figure of about {width:.1f} by "
            f"{height:.1f} inches, graph.plot(ax=plt.figure(figsize=({width:.1f}, {height:.1f}), "
            'layout="constrained").add_subplot()), or lower fewer micro-batches',
            LegibilityWarning,
            stacklevel=2,
        )
