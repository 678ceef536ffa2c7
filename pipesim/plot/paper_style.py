"""Settings of matplotlib for figures of a paper: size, fonts, lines that differ without colour.

matplotlib is imported when needed.
"""

from __future__ import annotations

from typing import Any

from pipesim.ops import Op
from pipesim.plot.paper_figure import FONT, SMALL, check_height, width_of
from pipesim.plot.style import PALETTE

#: Colour, dashes and marker of successive lines. Each of them alone tells lines apart.
_LINES: tuple[tuple[str, Any, str], ...] = (
    (PALETTE[Op.REDUCE_GRAD], "-", "o"),
    (PALETTE[Op.SEND_F], "--", "s"),
    (PALETTE[Op.B], "-.", "^"),
    (PALETTE[Op.SEND_B], (0, (1.2, 1.2)), "D"),
    (PALETTE[Op.F], (0, (6, 1.5, 1, 1.5, 1, 1.5)), "v"),
    (PALETTE[Op.W], (0, (8, 2)), "P"),
    (PALETTE[Op.STEP], (0, (3, 1)), "X"),
)
_THIN = 0.6


def paper_style(columns: int = 1, height: float = 2.2) -> dict[str, Any]:
    """Return settings of matplotlib for figures as wide as columns of a paper.

    Figures that are made under these settings have a print size, text of 7 and 8 points, fonts
    that publishers take (type 42) in PDF files, and lines that differ in dashes and markers, too.

    Parameters
    ----------
    columns
        1 or 2: `ONE_COLUMN` or `TWO_COLUMNS` wide.
    height
        Height of new figures, inches.

    Returns
    -------
    dict
        Values of `matplotlib.rcParams` by name.

    Notes
    -----
    ``plt.rcParams.update(paper_style())`` sets them for all that follows, and
    ``with plt.rc_context(paper_style()):`` for a part.

    Examples
    --------
    >>> import matplotlib.pyplot as plt
    >>> from pipesim import plot
    >>> with plt.rc_context(plot.paper_style(columns=1, height=2)):
    ...     fig, ax = plt.subplots()
    >>> fig.get_size_inches().tolist(), ax.xaxis.label.get_size()
    ([3.5, 2.0], 8.0)
    >>> plt.close(fig)
    """
    from cycler import cycler

    size = width_of(columns), check_height(height)
    colours, dashes, markers = zip(*_LINES, strict=True)
    sizes = {
        **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "figure.titlesize",
                         "figure.labelsize"), FONT),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize",
                         "legend.title_fontsize"), SMALL),
        **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width",
                         "grid.linewidth", "patch.linewidth"), _THIN),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
        **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 1.5),
        "lines.linewidth": 1.2,
        "lines.markersize": 4.0,
    }  # fmt: skip
    return {
        "figure.figsize": size,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 300.0,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.fonttype": "none",
        **sizes,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 3.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=colours, linestyle=dashes, marker=markers),
        "legend.frameon": False,
        "legend.handlelength": 2.8,
    }
