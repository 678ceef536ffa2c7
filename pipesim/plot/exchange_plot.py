"""Draw an exchange of a sharded embedding: its keys, or their numbers for each pair of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipesim.errors import ArgumentError, check_type
from pipesim.plot.figure_style import Inches, current_style, device_colours, text_points
from pipesim.plot.palette import INK, Floats, text_colours
from pipesim.plot.paper_figure import (
    axes_or_new,
    axes_size,
    label,
    set_title,
    text_width,
    thinned_ticks,
)
from pipesim.utils.checks import checked
from pipesim.utils.csr import Ints

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Columns of the table that are drawn.
_COLUMNS = ("rank", "table", "key", "owner", "row", "sent")
#: Width and height of a box; space between the messages of a rank, and between ranks (boxes).
WIDTH, HEIGHT, GAP, BAND_GAP = 0.9, 0.56, 0.3, 1.0
#: Width of the names of phases (points), and height of a phase (inches).
_NAMES, _PHASE = 92.0, 0.4
#: Most keys of a figure with a box for each.
_MOST_KEYS = 100


class _Phase(NamedTuple):
    """Boxes of a phase, in order: positions in the table, rank, message; and a letter for texts."""

    name: str
    letter: str
    entries: Ints
    rank: Ints
    message: Ints


class _Boxes(NamedTuple):
    """Phases from the top, ``x`` of each box of each, and left and right end of each rank."""

    phases: list[_Phase]
    x: list[Floats]
    ends: Floats


@checked
def exchange(
    table: pd.DataFrame,
    *,
    ax: Axes | None = None,
    height: Inches | None = None,
    title: str | None = None,
) -> Axes:
    """Draw an exchange of keys, as ``explain`` of `pipeexec.ShardedEmbedding` returns it.

    A box is a key (k), a row (r), a vector (v) or a gradient (g), in the colour of the rank that
    owns the row; those of padding keys are white. Phases follow each other from top to bottom.

    ====================  =======================================================================
    keys                  keys of each rank, in the order of its input
    grouped by owner      the same, each as often as it is sent: a message for each owner
    rows looked up        rows of the owner, in the messages of the ranks that asked for them
    vectors received      vectors of the keys that the rank has sent
    vectors in order      vectors in the order of its input
    gradients of keys     gradients, summed over the keys that were sent as one
    gradients received    the same, in the messages of the ranks
    rows updated          rows of the owner; each adds up its gradients
    ====================  =======================================================================

    If the axes have no room for a box a key, cells have the number of keys that each rank sends to
    each owner.

    Parameters
    ----------
    table
        A row for each key of each rank, with the columns ``rank``, ``table``, ``key``, ``owner``,
        ``row`` and ``sent`` of ``explain``, also read from a file.
    ax
        Axes to draw into; its limits are set. New axes by default, of a column's width for numbers.
    height, title
        As for `pipesim.plot.timeline`.

    Returns
    -------
    matplotlib.axes.Axes
        The axes of the drawing, neither shown nor saved.
    """
    columns = _checked_columns(table)
    n_ranks = 1 + int(max(columns["rank"].max(), columns["owner"].max()))
    boxes = _boxes(columns, n_ranks) if len(table) <= _MOST_KEYS else None
    n_letters, longest = 0, max(map(len, _key_texts(columns)))
    if boxes is not None:
        points = (
            current_style().width(None) * 72 - _NAMES
            if ax is None
            else _width_beside_names(ax, boxes)
        )
        # The smallest size of labels in boxes is 6 points.
        n_letters = int((WIDTH * points / boxes.ends[-1, 1] - 1.0) / (6.0 * 0.66))
    if boxes is None or n_letters < longest:
        ax = axes_or_new(ax, height=height, usual_height=2.6, columns=1)
        _draw_counts(ax, columns, n_ranks)
    else:
        usual = _PHASE * len(boxes.phases) + 0.5
        ax = axes_or_new(ax, height=height, usual_height=usual)
        _draw_boxes(ax, columns, boxes, letters=n_letters > longest)
    if title:
        set_title(ax, title)
    return ax


def _width_beside_names(ax: Axes, boxes: _Boxes) -> float:
    """Name the phases at the axes; return the width that these have then (points)."""
    axes_or_new(ax, 1)  # checks the type
    ax.set_yticks(range(len(boxes.phases)), [phase.name for phase in boxes.phases])
    ax.tick_params(labelsize=text_points())
    if (engine := ax.figure.figure.get_layout_engine()) is not None:
        engine.execute(ax.figure.figure)
    return axes_size(ax)[0]


def _checked_columns(table: pd.DataFrame) -> dict[str, Ints]:
    """Return the columns that are drawn, by name."""
    from pipesim.utils.packages import pandas as pd

    missing = [x for x in _COLUMNS if x not in check_type("table", table, pd.DataFrame)]
    if missing:
        raise ArgumentError(
            f"table has no column {missing[0]!r}; give the result of embedding.explain(keys), of "
            "pipeexec.ShardedEmbedding"
        )
    if not len(table):
        raise ArgumentError("table is empty: an exchange without keys has no figure")
    try:
        columns = {name: table[name].to_numpy(np.int64) for name in _COLUMNS}
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"columns of table must be whole numbers: {error}") from None
    lowest_owner = np.where(columns["sent"], 0, -1)
    bad = (columns["rank"] < 0) | (columns["table"] < 0) | (columns["owner"] < lowest_owner)
    for line in np.flatnonzero(bad)[:1].tolist():
        raise ArgumentError(
            f"row {line} of table has rank, table or owner below 0, and only a key that is not "
            f"sent may have owner -1: { ({name: int(x[line]) for name, x in columns.items()}) }"
        )
    order = np.argsort(columns["rank"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _key_texts(columns: dict[str, Ints]) -> list[str]:
    """Return the number of each key, after that of its table if there are several."""
    keys, tables = columns["key"].tolist(), columns["table"].tolist()
    return [f"{t}:{k}" if max(tables) else f"{k}" for t, k in zip(tables, keys, strict=True)]


def _boxes(columns: dict[str, Ints], n_ranks: int) -> _Boxes:
    """Return the boxes of each phase."""
    rank, owner, row = (columns[name] for name in ("rank", "owner", "row"))
    keys, sent = np.arange(len(rank)), np.flatnonzero(columns["sent"])
    by_sender = sent[np.lexsort((row[sent], owner[sent], rank[sent]))]
    by_owner = sent[np.lexsort((row[sent], rank[sent], owner[sent]))]
    _, first = np.unique(np.stack([owner[sent], row[sent]]), axis=1, return_index=True)
    rows = sent[first]
    phases = [
        _Phase("keys", "k", keys, rank, rank),
        _Phase("grouped by owner", "k", by_sender, rank[by_sender], owner[by_sender]),
        _Phase("rows looked up", "r", by_owner, owner[by_owner], rank[by_owner]),
        _Phase("vectors received", "v", by_sender, rank[by_sender], owner[by_sender]),
        _Phase("vectors in order", "v", keys, rank, rank),
        _Phase("gradients of keys", "g", by_sender, rank[by_sender], owner[by_sender]),
        _Phase("gradients received", "g", by_owner, owner[by_owner], rank[by_owner]),
        _Phase("rows updated", "r", rows, owner[rows], owner[rows]),
    ]
    places, widths = [], np.zeros((len(phases), n_ranks))
    for phase, width in zip(phases, widths, strict=True):
        last, place = np.full(n_ranks, -1), np.empty(len(phase.entries))
        for k, (own, message) in enumerate(zip(phase.rank, phase.message, strict=True)):
            width[own] += GAP * (last[own] not in (-1, message))
            last[own], place[k] = message, width[own] + 0.5
            width[own] += 1
        places.append(place)
    bands = np.maximum(widths.max(axis=0), 2.0)  # room for the name of a rank without keys
    begin = np.cumsum(bands + BAND_GAP) - bands - BAND_GAP
    x = [
        place + (begin + (bands - width) / 2)[phase.rank]
        for phase, place, width in zip(phases, places, widths, strict=True)
    ]
    return _Boxes(phases, x, np.stack([begin, begin + bands], axis=1))


def _sources(columns: dict[str, Ints]) -> tuple[Ints, Ints]:
    """Return, for each key, the position of the key that is sent for it, and of its row's first.

    The former is -1 for padding keys, which nothing is sent for.
    """
    is_sent = columns["sent"].astype(bool)
    of_rows = np.stack([columns["owner"], columns["row"]])
    _, request = np.unique(np.vstack([columns["rank"], of_rows]), axis=1, return_inverse=True)
    sent = np.full(len(is_sent), -1)
    sent[request[is_sent]] = np.flatnonzero(is_sent)
    _, first, row = np.unique(of_rows, axis=1, return_index=True, return_inverse=True)
    return np.where(is_sent, np.arange(len(is_sent)), sent[request]), first[row]


def _draw_boxes(ax: Axes, columns: dict[str, Ints], boxes: _Boxes, *, letters: bool) -> None:
    """Draw the boxes with their texts, and lines from each phase to the next."""
    from matplotlib.collections import LineCollection, PolyCollection

    from pipesim.plot.fitting_labels import BoxLabels

    owner, n_ranks = columns["owner"], len(boxes.ends)
    palette = np.vstack([device_colours(n_ranks), np.ones(3)])  # the last one is that of owner -1
    keys, names = _key_texts(columns), {"r": columns["row"].tolist()}
    corners: Any = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (WIDTH / 2, HEIGHT / 2)
    middles, texts, colours = [], [], []
    for level, (phase, x) in enumerate(zip(boxes.phases, boxes.x, strict=True)):
        middle, colour = np.column_stack([x, np.full(len(x), level)]), palette[owner[phase.entries]]
        patches = PolyCollection(
            middle[:, None] + corners, facecolors=colour, edgecolors=INK, linewidths=0.5, zorder=2
        )
        patches.set_gid(f"exchange:{phase.name}")
        ax.add_collection(patches, autolim=False)
        of_phase, letter = names.get(phase.letter, keys), phase.letter * letters
        texts += ["0" if phase.letter == "v" and owner[k] < 0 else f"{letter}{of_phase[k]}"
                  for k in phase.entries.tolist()]  # fmt: skip
        middles.append(middle)
        colours.append(colour)
    heads = PolyCollection(
        [[(a, -1.3), (b, -1.3), (b, -0.7), (a, -0.7)] for a, b in boxes.ends],
        facecolors=palette[:-1], linewidths=0.0, zorder=2,
    )  # fmt: skip
    heads.set_gid("exchange:ranks")
    ax.add_collection(heads, autolim=False)
    for k, middle_of_rank in enumerate(boxes.ends.mean(axis=1).tolist()):
        ax.text(middle_of_rank, -1.0, f"rank {k}", ha="center", va="center", fontsize=text_points(),
                color=INK)  # fmt: skip
    x, y = np.concatenate(middles).T
    width, height, inks = (
        *np.full((2, len(x)), [[WIDTH], [HEIGHT]]),
        text_colours(np.vstack(colours)),
    )
    ax.add_artist(BoxLabels(x, y, width, height, texts, inks))
    request, first = _sources(columns)
    for level in range(len(middles) - 1):
        source = first if level == len(middles) - 2 else request
        above, below = (source[boxes.phases[k].entries] for k in (level, level + 1))
        pairs = np.argwhere((above[:, None] == below) & (above >= 0)[:, None])
        middles_of_lines = [middles[level + k][pairs[:, k]] for k in (0, 1)]
        edges = [[(0, HEIGHT / 2)], [(0, -HEIGHT / 2)]]  # below a box, above the next
        segments: Any = np.stack(middles_of_lines, axis=1) + np.stack(edges, axis=1)
        lines = LineCollection(
            segments, colors=0.75 * palette[owner[above[pairs[:, 0]]]], linewidths=0.8, zorder=1,
        )  # fmt: skip
        lines.set_gid(f"exchange:lines:{level}")
        ax.add_collection(lines, autolim=False)
    ax.set_xlim(0.0, boxes.ends[-1, 1])
    ax.set_ylim(len(middles) - 0.5, -1.5)
    ax.set_yticks(range(len(middles)), [phase.name for phase in boxes.phases])
    ax.set_xticks([])
    label(ax, "", "")
    ax.tick_params(axis="y", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


def _draw_counts(ax: Axes, columns: dict[str, Ints], n_ranks: int) -> None:
    """Draw the numbers of keys that each rank sends to each owner, and their sums at the axes."""
    from matplotlib.collections import PolyCollection

    from pipesim.plot.fitting_labels import BoxLabels

    sent = columns["sent"].astype(bool)
    counts = np.zeros((n_ranks, n_ranks), np.int64)
    np.add.at(counts, (columns["rank"][sent], columns["owner"][sent]), 1)
    x, y = (z.ravel().astype(float) for z in np.meshgrid(*[np.arange(n_ranks)] * 2))
    strength = counts.ravel() / max(1, counts.max())
    colours = 1 - strength[:, None] * (1 - np.tile(device_colours(n_ranks), (n_ranks, 1)))
    corners: Any = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    cells = PolyCollection(np.column_stack([x, y])[:, None] + corners, facecolors=colours,
                           edgecolors="white", linewidths=0.5, zorder=2)  # fmt: skip
    cells.set_gid("exchange:counts")
    ax.add_collection(cells, autolim=False)
    texts = [f"{count:,}" for count in counts.ravel().tolist()]
    ones = np.ones(len(x))
    ax.add_artist(BoxLabels(x, y, ones, ones, texts, text_colours(colours)))
    ax.set_xlim(-0.5, n_ranks - 0.5)
    ax.set_ylim(n_ranks - 0.5, -0.5)
    received, senders = (
        [f"{rank}{between}({total:,})" for rank, total in enumerate(counts.sum(axis=k).tolist())]
        for k, between in ((0, "\n"), (1, " "))
    )
    width, height = axes_size(ax)
    widest = max(text_width(text, text_points()) for text in received) + 4.0
    for axis, names, limit in (
        (ax.xaxis, received, width / widest),
        (ax.yaxis, senders, height / 9),
    ):
        ticks = thinned_ticks(n_ranks, max(1, int(limit)))
        axis.set_ticks(ticks, [names[k] for k in ticks])
    label(ax, "Owner (keys received)", "Rank (keys sent)")
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
