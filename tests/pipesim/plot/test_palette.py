"""Colours as readers with each kind of colour blindness see them.

Matrices are those of Machado et al., "A Physiologically-based Model for Simulation of Color Vision
Deficiency", IEEE TVCG 15(6), 2009, for a severity of 1; they apply to linear red, green, blue.
Distances are Euclidean in CIELAB (CIE76), in which about 2 can just be seen side by side.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipesim.ops import Op
from pipesim.plot import figure_style
from pipesim.plot import palette as style
from pipesim.plot.task_boxes import BUBBLE, GREY

Floats = NDArray[np.float64]

VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
#: From linear red, green, blue to CIE XYZ, relative to the white of sRGB (D65).
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
) / np.array([[0.95047], [1.0], [1.08883]])
#: Pages around a figure: white, and two common dark ones.
PAGES = ("#FFFFFF", "#1E1E1E", "#0D1117")


def rgb(colour: str) -> Floats:
    return np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])


def linear(colours: Floats) -> Floats:
    low = colours / 12.92
    return np.where(colours <= 0.04045, low, ((colours + 0.055) / 1.055) ** 2.4)


def lab(colours: Floats, vision: str) -> Floats:
    """Return CIELAB of colours (red, green, blue, 0..1) as this vision sees them."""
    xyz = np.clip(linear(colours) @ VISIONS[vision].T, 0, 1) @ TO_XYZ.T
    x, y, z = np.moveaxis(
        np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29), -1, 0
    )
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def chunk_greys() -> Floats:
    """Return the greys of two chunks in legends, on white, and the bubble's."""
    white = figure_style.whiteness(np.arange(2))
    greys = [(1 - share) * rgb(GREY) + share for share in white]
    return np.array([*greys, rgb(BUBBLE)])


def test_distances_in_lab() -> None:
    """White, black and sRGB's red, as in tables."""
    white, black, red = lab(np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0]], float), "normal")
    np.testing.assert_allclose(white, [100, 0, 0], atol=0.02)
    np.testing.assert_allclose(black, [0, 0, 0], atol=0.02)
    np.testing.assert_allclose(red, [53.24, 80.09, 67.20], atol=0.02)


@pytest.mark.parametrize("vision", VISIONS)
def test_optimizer_steps_resemble_no_other_operation_and_no_page(vision: str) -> None:
    others = [colour for op, colour in style.PALETTE.items() if op != Op.STEP]
    colours = lab(np.array([*map(rgb, others), *map(rgb, PAGES)]), vision)
    distances = np.linalg.norm(colours - lab(rgb(style.PALETTE[Op.STEP]), vision), axis=1)
    assert distances.min() > 15


@pytest.mark.parametrize("vision", VISIONS)
def test_optimizer_steps_are_not_grey(vision: str) -> None:
    """Nor are those of the second of two chunks: legends have greys for chunks."""
    steps = figure_style.shades(np.full(2, Op.STEP), np.arange(2))
    distances = lab(steps, vision)[:, None] - lab(chunk_greys(), vision)
    assert np.linalg.norm(distances, axis=-1).min() > 10


def test_text_on_optimizer_steps_is_legible() -> None:
    """Contrast of at least 4.5, as WCAG 2.1 asks for."""
    steps = figure_style.shades(np.full(2, Op.STEP), np.arange(2))
    ink = np.array([rgb(colour) for colour in style.text_colours(steps)])
    weights = np.array([0.2126, 0.7152, 0.0722])
    pair = np.sort(np.stack([linear(steps) @ weights, linear(ink) @ weights]), axis=0) + 0.05
    assert (pair[1] / pair[0] >= 4.5).all()
