"""`style`: how figures look, for a publisher or of one's own: sizes, font, colours, names.

matplotlib is imported when needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import (
    ArgumentError,
    UnknownNameError,
    check_count,
    check_name,
    check_text,
    suggestion,
    wrong_type,
)
from pipesim.ops import Op
from pipesim.plot.palette import (
    DEVICES,
    GREY_HATCHES,
    GREYS,
    HATCHES,
    LABELS,
    PALETTE,
    UNFINISHED,
    Floats,
    rgb,
)
from pipesim.scheduling.registry import schedule_labels
from pipesim.utils.checks import Positive, Range, checked

#: Widths of one and of two columns of an IEEE paper, inches.
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
#: Height or width of a figure: no renderer takes more than 2**16 dots.
Inches = Annotated[float, Range(0, 200, above=True)]
Publisher = Literal["ieee", "acm", "neurips", "nature"]
#: Size of labels and titles, and how much smaller ticks and legends are (points).
TEXT, SMALLER = 8.0, 1.0
#: Smallest text that publishers print (points): Nature's guide.
SMALLEST_TEXT = 5.0

_TIMES = ("Times New Roman", "Times", "Liberation Serif", "Nimbus Roman", "STIXGeneral")
_LIBERTINE = ("Linux Libertine O", "Linux Libertine", "Libertinus Serif", *_TIMES)
_HELVETICA = ("Helvetica", "Arial", "Liberation Sans", "Nimbus Sans")
_MM = 1 / 25.4
#: Of each publisher: widths of one and two columns (inches), size of labels (points), fonts.
_PRESETS: Mapping[str, tuple[tuple[float, float], float, tuple[str, ...]]] = {
    # journals.ieeeauthorcenter.ieee.org, "Create graphics": 3.5 or 7.16 inches, about 9 points.
    "ieee": ((ONE_COLUMN, TWO_COLUMNS), 9.0, _TIMES),
    # acmart, sigconf: columnwidth 241.1 pt, textwidth 506.3 pt (72.27 pt an inch); Libertine.
    "acm": ((3.33, 7.0), 8.0, _LIBERTINE),
    # neurips.sty: one column, textwidth 5.5 inches; Times of 10 points, captions too.
    "neurips": ((5.5, 5.5), 9.0, _TIMES),
    # research-figure-guide.nature.com: 89 and 183 mm; 5 to 7 points; Helvetica or Arial; solid
    # colours in place of patterns.
    "nature": ((89 * _MM, 183 * _MM), 7.0, _HELVETICA),
}
#: Colour (by operation), dashes and marker of successive lines. Each alone tells lines apart.
_LINES: tuple[tuple[Op, Any, str], ...] = (
    (Op.REDUCE_GRAD, "-", "o"),
    (Op.SEND_F, "--", "s"),
    (Op.B, "-.", "^"),
    (Op.SEND_B, (0, (1.2, 1.2)), "D"),
    (Op.F, (0, (6, 1.5, 1, 1.5, 1, 1.5)), "v"),
    (Op.W, (0, (8, 2)), "P"),
    (Op.STEP, (0, (3, 1)), "X"),
)


@dataclass(frozen=True)
class Style:
    """How figures look; `style` makes and checks one.

    ``with`` it, or after its `use`, the figures of `pipesim.plot` follow it, and
    ``matplotlib.rcParams`` have its `settings`, so that plain plots of matplotlib look alike.

    Attributes
    ----------
    widths
        Of one and of two columns (inches).
    columns
        Width of new figures in columns; None is one for plain figures of matplotlib, and for
        others that of each function.
    height
        Height of new figures (inches); None is 2.2 for plain figures, and for others a height that
        suits the rows.
    text_size
        Size of labels and titles (points). Ticks and legends are a point smaller.
    font
        Families by preference; empty for that of ``matplotlib.rcParams``.
    palette, hatches
        Colour (``"#74B9E7"``), and hatch of matplotlib, of operations.
    operations
        Names of operations in legends.
    schedules
        Names of schedules in titles, labels and legends, where these differ from their papers'.
    grey
        Whether devices and warnings have greys, too.
    patterns
        Whether causes of idle time have hatches.
    """

    widths: tuple[float, float] = (ONE_COLUMN, TWO_COLUMNS)
    columns: int | None = None
    height: float | None = None
    text_size: float = TEXT
    font: tuple[str, ...] = ()
    palette: Mapping[Op, str] = field(default_factory=lambda: PALETTE)
    hatches: Mapping[Op, str] = field(default_factory=lambda: HATCHES)
    operations: Mapping[Op, str] = field(default_factory=lambda: LABELS)
    schedules: Mapping[str, str] = field(default_factory=dict)
    grey: bool = False
    patterns: bool = True
    _entered: list[ExitStack] = field(default_factory=list, init=False, repr=False, compare=False)

    def width(self, columns: int | None, usual: int = 2) -> float:
        """Return the width of figures (inches) of so many columns.

        Parameters
        ----------
        columns
            1 or 2; None is ``columns`` of the style.
        usual
            Columns if neither has any.

        Returns
        -------
        float
            Inches.
        """
        for name, value in (("usual", usual), ("columns", columns)):
            if value is not None and check_count(name, value) > 2:
                raise ArgumentError(f"{name} must be 1 or 2, got {value}")
        return self.widths[(columns or self.columns or usual) - 1]

    @property
    def settings(self) -> dict[str, Any]:
        """Values of ``matplotlib.rcParams`` by name.

        Sizes, fonts that publishers take (type 42) in PDF files, and lines that differ in dashes
        and markers, too.
        """
        from cycler import cycler

        operations, dashes, markers = zip(*_LINES, strict=True)
        small = max(min(SMALLEST_TEXT, self.text_size), self.text_size - SMALLER)
        return {
            "figure.figsize": (self.width(None, 1), self.height or 2.2),
            "figure.constrained_layout.use": True,
            "savefig.dpi": 300.0,
            "pdf.fonttype": 42,
            "ps.fonttype": 42,
            "svg.fonttype": "none",
            **({"font.family": list(self.font)} if self.font else {}),
            **({"mathtext.fontset": "stix"} if self.font[-1:] == ("DejaVu Serif",) else {}),
            **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "figure.titlesize",
                             "figure.labelsize"), self.text_size),
            **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize",
                             "legend.title_fontsize"), small),
            **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width",
                             "grid.linewidth", "patch.linewidth"), 0.6),
            **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
            **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 1.5),
            "lines.linewidth": 1.2,
            "lines.markersize": 4.0,
            "axes.titlelocation": "left",
            "axes.titlepad": 3.0,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(
                color=[self.palette[op] for op in operations], linestyle=dashes, marker=markers
            ),
            "legend.frameon": False,
            "legend.handlelength": 2.8,
        }  # fmt: skip

    def use(self) -> None:
        """Draw all that follows in this style, as ``plt.style.use`` does."""
        from pipesim.utils.packages import matplotlib as mpl

        settings: Any = self.settings
        mpl.rcParams.update(settings)
        _CURRENT.set(self)

    def __enter__(self) -> Style:
        """Draw the block in this style."""
        from pipesim.utils.packages import matplotlib as mpl

        settings: Any = self.settings
        with ExitStack() as stack:
            stack.enter_context(mpl.rc_context(settings))
            stack.callback(_CURRENT.reset, _CURRENT.set(self))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Return to the style before the block."""
        self._entered.pop().close()


_CURRENT: ContextVar[Style] = ContextVar("pipesim.plot.style", default=Style())  # noqa: B039  frozen


def current_style() -> Style:
    """Return the style that figures follow now."""
    return _CURRENT.get()


def line_colours(n_lines: int) -> list[Any]:
    """Return colours of the lines of as many devices; later ones are lighter."""
    from pipesim.utils.packages import matplotlib as mpl

    name, lightest = ("grey", 0.7) if current_style().grey else ("viridis", 0.85)
    colours = mpl.colormaps[name]
    return [colours(lightest * line / max(1, n_lines - 1)) for line in range(n_lines)]


def unfinished_colour() -> str:
    """Return the colour of outlines of tasks that never ended, and of phony edges."""
    return "#3A3A3A" if current_style().grey else UNFINISHED


def whiteness(chunk: NDArray[Any]) -> Floats:
    """Return the share of white in each chunk's colour, 0..1; later chunks are lighter.

    Greys become less light, so that an operation's later chunks are no other operation's grey.
    """
    one, most = (0.3, 0.3) if current_style().grey else (0.5, 0.75)
    return chunk.astype(np.float64) * min(one, most / max(1, int(chunk.max(initial=0))))


def shades(op: NDArray[Any], chunk: NDArray[Any], tint: float = 0.0) -> Floats:
    """Return red, green, blue (0..1) of each task, of its operation and its chunk.

    ``tint`` is the share of white to mix in besides, 0..1.
    """
    palette = current_style().palette
    table = rgb(palette[operation] for operation in Op)
    strength = ((1 - whiteness(chunk)) * (1 - tint))[:, None]
    colours: Floats = 1 - strength * (1 - table[op])
    return colours


def device_colours(n_devices: int) -> Floats:
    """Return red, green, blue (0..1) of each device: eight colours, repeated, or as many greys."""
    if current_style().grey:
        return np.repeat(np.linspace(0.85, 0.55, n_devices)[:, None], 3, axis=1)
    colours: Floats = rgb(DEVICES[k % len(DEVICES)] for k in range(n_devices))
    return colours


@checked
def style(
    publisher: Publisher | None = None,
    *,
    columns: int | None = None,
    height: Inches | None = None,
    text_size: Positive | None = None,
    font: str | Iterable[str] | None = None,
    palette: Mapping[Any, str] | None = None,
    operations: Mapping[Any, str] | None = None,
    schedules: Mapping[str, str] | None = None,
    hatches: Mapping[Any, str] | None = None,
    grey: bool = False,
) -> Style:
    """Return a style of figures: that of a publisher, or one's own.

    ============= ==================== =========== ===============================================
    publisher     columns (inches)     text        font, or the first that is installed
    ============= ==================== =========== ===============================================
    ``"ieee"``    3.5, 7.16            9 points    Times New Roman, Liberation Serif, STIX
    ``"acm"``     3.33, 7.0            8 points    Linux Libertine, Liberation Serif, STIX
    ``"neurips"`` 5.5 (the page)       9 points    Times New Roman, Liberation Serif, STIX
    ``"nature"``  89 mm, 183 mm        7 points    Helvetica, Arial, Liberation Sans
    None          3.5, 7.16            8 points    that of ``matplotlib.rcParams``
    ============= ==================== =========== ===============================================

    Parameters
    ----------
    publisher
        IEEE journals, ACM's acmart (sigconf), NeurIPS, or Nature; numbers are of their guides.
    columns
        Width of new figures in columns.
    height
        Height of new figures (inches).
    text_size
        Size of labels and titles (points). Ticks and legends are a point smaller.
    font
        A family, or several by preference, at least one of them installed.
    palette, operations, hatches
        Colour, name in legends, and hatch of matplotlib (``"//"``; ``""`` for none), of some
        operations: ``{"F": "tab:blue"}``. Others keep theirs.
    schedules
        Names of schedules in figures: ``{"zb_h1": "ours"}``. Others have those of their papers.
    grey
        Whether all is grey, for print without colour: operations differ in lightness and hatches.
        Nature's figures have no hatches; there R, F, I, W, B and the bubble differ in lightness.

    Returns
    -------
    Style
        For ``with plot.style(...):``, or ``plot.style(...).use()`` for all that follows.

    Raises
    ------
    UnknownNameError
        For an unknown operation, or if no font of ``font`` is installed.

    Examples
    --------
    >>> import pipesim as ps
    >>> from pipesim import plot
    >>> step = ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8)), ps.Costs(1, 2))
    >>> with plot.style("acm", columns=1, operations={"F": "fwd"}):
    ...     ax = step.plot()
    >>> float(ax.figure.get_figwidth()), ax.get_legend().get_texts()[0].get_text()
    (3.33, 'fwd')
    """
    widths, points, fonts = _PRESETS.get(publisher or "", ((ONE_COLUMN, TWO_COLUMNS), TEXT, ()))
    if font is not None:
        fonts = _asked_fonts(font)
    elif fonts:
        # The last has the letters that others lack.
        fonts = *_installed(fonts), f"DejaVu {'Sans' if 'Arial' in fonts else 'Serif'}"
    chosen = Style(
        widths=widths,
        columns=columns,
        height=height,
        text_size=points if text_size is None else text_size,
        font=fonts,
        palette={
            **(GREYS if grey else PALETTE),
            # A hue of its own, as no hatch tells it from F of a later chunk.
            **({Op.R: "#BFA38A"} if publisher == "nature" and not grey else {}),
            **_by_operation("palette", palette, _colour),
        },
        hatches={
            **({} if publisher == "nature" else GREY_HATCHES if grey else HATCHES),
            **_by_operation("hatches", hatches, _hatch),
        },
        operations={**LABELS, **_by_operation("operations", operations, check_text)},
        schedules={name: check_text(f"schedules[{name!r}]", label)
                   for name, label in (schedules or {}).items()},
        grey=grey,
        patterns=publisher != "nature",
    )  # fmt: skip
    chosen.width(columns)
    return chosen


def _by_operation(argument: str, values: Mapping[Any, str] | None, check: Any) -> dict[Op, str]:
    """Return values by operation, of a mapping by operation or by its name."""
    checked_values = {}
    for key, value in (values or {}).items():
        op = key if isinstance(key, Op) else Op[check_name("operation", key, Op.__members__)]
        checked_values[op] = check(f"{argument}[{op.name!r}]", value)
    return checked_values


def _colour(argument: str, value: object) -> str:
    from matplotlib.colors import to_hex

    try:
        return to_hex(value).upper()  # type: ignore[arg-type]  # it raises
    except ValueError:
        raise ArgumentError(
            f"{argument} must be a colour of matplotlib, such as '#74B9E7', got {value!r:.60}"
        ) from None


def _hatch(argument: str, value: object) -> str:
    if not re.fullmatch(r"[-/\\|+xoO.*]*", check_text(argument, value)):
        raise ArgumentError(
            f"{argument} must be a hatch of matplotlib, letters of '/\\|-+xoO.*', got {value!r:.60}"
        )
    return str(value)


def _installed(fonts: Iterable[str]) -> list[str]:
    """Return those of the families that have a TrueType file: others are no type 42 in PDF."""
    from matplotlib.font_manager import fontManager

    files = {entry.name for entry in fontManager.ttflist if entry.fname.endswith((".ttf", ".ttc"))}
    return [name for name in fonts if name in files]


def _asked_fonts(font: str | Iterable[str]) -> tuple[str, ...]:
    """Return those of a user's families that are installed."""
    from matplotlib.font_manager import fontManager

    if not isinstance(font, str | Iterable):
        raise wrong_type("font", "a family of fonts, or several", font)
    fonts = [check_text("font", name) for name in ([font] if isinstance(font, str) else font)]
    installed = {*fontManager.get_font_names(), "serif", "sans-serif", "monospace"}
    if not (families := [name for name in fonts if name in installed]):
        near = "".join(suggestion(name, installed) for name in fonts[:1])
        raise UnknownNameError(
            f"font {', '.join(map(repr, fonts))} is not installed{near}; "
            "matplotlib.font_manager.fontManager.get_font_names() lists those that are"
        )
    return (*families, "DejaVu Sans")


def shown_name(text: str) -> str:
    """Return a title or label with schedules named as in their papers, and ranks in two words."""
    labels = {**schedule_labels(), **current_style().schedules}
    if text in labels:
        return labels[text]
    words = re.sub(r"(?<![\w.-])rank(\d+)(?!\w)", r"rank \1", text)
    return re.sub(r"[\w.-]+", lambda word: labels.get(word[0], word[0]), words)


#: Sizes of texts (points) where ``matplotlib.rcParams`` are as matplotlib has them.
_USUAL = {
    "axes.labelsize": TEXT,
    "axes.titlesize": TEXT,
    "xtick.labelsize": TEXT - SMALLER,
    "ytick.labelsize": TEXT - SMALLER,
    "legend.fontsize": TEXT - SMALLER,
}


def text_points(name: str = "xtick.labelsize") -> float:
    """Return the size of a text (points) by the name of its setting in ``matplotlib.rcParams``.

    Sizes that the user has changed count, and 8 and 7 points for others. Numbers and notes in
    figures have the size of ticks, titles by default that of labels.
    """
    from matplotlib.font_manager import FontProperties

    from pipesim.utils.packages import matplotlib as mpl

    now: Any = mpl.rcParams
    usual: Any = mpl.rcParamsDefault
    if name == "axes.titlesize" and now[name] == usual[name]:
        name = "axes.labelsize"
    if all(now[key] == usual[key] for key in (name, "font.size")):
        return _USUAL[name]
    return float(FontProperties(size=now[name]).get_size_in_points())


def paper_style(columns: int = 1, height: float = 2.2) -> dict[str, Any]:
    """Return settings of matplotlib for figures as wide as columns of an IEEE paper.

    They are those of ``style(columns=columns, height=height)``, which also changes the figures of
    `pipesim.plot`.

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
    return style(columns=columns, height=height).settings
