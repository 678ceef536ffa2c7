"""Colours, hatches and names of operations in figures and tables, and chunks of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.graph.graph import TaskGraph
from pipesim.ops import Op

Floats = NDArray[np.float64]

#: One colour an operation: near Okabe and Ito's, and two of Tol's; colour-blind readers can tell
#: all apart.
#: F, B, I, W and the bubble also differ in print without colour: any two have a contrast of 1.3 or
#: more. So do SEND and RECV.
#: STEP is brown, not grey: legends have greys for chunks.
PALETTE: Mapping[Op, str] = {
    Op.F: "#74B9E7",
    Op.B: "#249069",
    Op.I: "#E6CE3C",
    Op.W: "#CF80AD",
    Op.R: "#C3DFF3",
    Op.SEND_F: "#E69F00",
    Op.RECV_F: "#F6D48B",
    Op.SEND_B: "#C8560A",
    Op.RECV_B: "#EDB08A",
    Op.REDUCE_GRAD: "#332288",
    Op.ALL_TO_ALL: "#882255",
    Op.STEP: "#5C3D00",
    Op.UNSHARD: "#6A5ACD",
    Op.DISPATCH: "#999933",
    Op.REORDER: "#DDCC77",
    Op.REDUCE_TIED: "#117733",
    Op.GRAD_NORM: "#CC6677",
    Op.RESHARD: "#B9B0E8",
    Op.OFFLOAD: "#0B5563",
    Op.RELOAD: "#8FBFC9",
}
#: Colours of devices, repeated after eight: Tol's light scheme, on which dark text is legible.
DEVICES = (
    "#77AADD",
    "#EE8866",
    "#EEDD88",
    "#44BB99",
    "#FFAABB",
    "#BBCC33",
    "#99DDFF",
    "#AAAA00",
)
#: Hatch of operations that have one. R is the same work as F, done again.
HATCHES: Mapping[Op, str] = {Op.R: "//////"}
#: Greys of operations, for print without colour: bubble, R, F, I, W, B are six steps of contrast.
GREYS: Mapping[Op, str] = {
    Op.R: "#CFCFCF",
    Op.F: "#B4B4B4",
    Op.I: "#9B9B9B",
    Op.W: "#848484",
    Op.B: "#6F6F6F",
    Op.SEND_F: "#9A9A9A",
    Op.RECV_F: "#CDCDCD",
    Op.SEND_B: "#555555",
    Op.RECV_B: "#8C8C8C",
    Op.REDUCE_GRAD: "#3A3A3A",
    Op.ALL_TO_ALL: "#4A4A4A",
    Op.STEP: "#262626",
    Op.UNSHARD: "#747474",
    Op.DISPATCH: "#8F8F8F",
    Op.REORDER: "#BBBBBB",
    Op.REDUCE_TIED: "#5E5E5E",
    Op.GRAD_NORM: "#474747",
    Op.RESHARD: "#B4B4B4",
    Op.OFFLOAD: "#656565",
    Op.RELOAD: "#A3A3A3",
}
#: Hatches beside these greys.
GREY_HATCHES: Mapping[Op, str] = {
    Op.R: "xxxx",
    Op.I: "////",
    Op.W: "\\\\\\\\",
    Op.ALL_TO_ALL: "xxxxxx",
    Op.UNSHARD: "++++++",
    Op.RESHARD: "++++++",
    Op.OFFLOAD: "------",
    Op.RELOAD: "------",
    Op.DISPATCH: "||||||",
    Op.REORDER: "||||||",
    Op.REDUCE_TIED: "oooo",
    Op.GRAD_NORM: "****",
}
#: Name of each operation in legends.
LABELS: Mapping[Op, str] = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
    Op.SEND_F: "send output",
    Op.RECV_F: "receive output",
    Op.SEND_B: "send gradient",
    Op.RECV_B: "receive gradient",
    Op.REDUCE_GRAD: "reduce gradients",
    Op.ALL_TO_ALL: "all-to-all",
    Op.STEP: "optimizer",
    Op.UNSHARD: "gather parameters",
    Op.DISPATCH: "group keys",
    Op.REORDER: "reorder",
    Op.REDUCE_TIED: "sum tied gradients",
    Op.GRAD_NORM: "gradient norm",
    Op.RESHARD: "free parameters",
    Op.OFFLOAD: "offload activations",
    Op.RELOAD: "reload activations",
}
#: Colour of text, arrows and lines; and of the outline of a task that never ended.
INK, UNFINISHED = "#1C1C1C", "#B22222"


def rgb(colours: Iterable[str]) -> Floats:
    """Return red, green, blue (0..1) of colours such as ``#74B9E7``, a row each."""
    rows = [[int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)] for colour in colours]
    return np.array(rows, np.float64)


def luminance(colours: Floats) -> Floats:
    """Return the relative luminance of colours (red, green, blue, 0..1), as WCAG 2.1 defines it."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    values: Floats = linear @ np.array([0.2126, 0.7152, 0.0722])
    return values


def chunks(device: NDArray[Any], stage: NDArray[Any]) -> NDArray[np.int64]:
    """Return the chunk of each task: the index of its stage among its device's, in stage order."""
    pairs, index = np.unique(np.column_stack([device, stage]), axis=0, return_inverse=True)
    first = np.searchsorted(pairs[:, 0], pairs[:, 0])
    return (np.arange(len(pairs)) - first)[index.ravel()]


def n_chunks(graph: TaskGraph) -> int:
    """Return the largest number of stages on one device."""
    return 1 + int(chunks(graph.device, graph.stage).max(initial=0))


def outline(colour: str) -> str:
    """Return the colour of the outline of a box: a pale box has a darker one."""
    values = rgb([colour])[0]
    red, green, blue = np.round(255 * values * (0.82 if luminance(values) > 0.65 else 1)).tolist()
    return f"#{int(red):02X}{int(green):02X}{int(blue):02X}"


def text_colours(colours: Floats) -> list[str]:
    """Return dark or white text for each background, whichever has more contrast."""
    return [INK if value > 0.18 else "#FFFFFF" for value in luminance(colours)]


def format_error(share: float) -> str:
    """Return a signed share, such as ``"+1.7%"``; ``"n/a"`` for NaN."""
    if math.isnan(share):
        return "n/a"
    return f"{share:+.1%}".replace("-", "\N{MINUS SIGN}")
