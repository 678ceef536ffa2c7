"""Figures of an exchange of keys, by the geometry of their artists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipesim import plot
from pipesim.errors import ArgumentError
from pipesim.plot.fitting_labels import BoxLabels

#: Of HugeCTR's example, and a second key 5 and a padding key of rank 1.
KEYS = [[0, 1, 3, 5], [4, 5, 6, 7, 5, -1]]
PHASES = ("keys", "grouped by owner", "rows looked up", "vectors received", "vectors in order",
          "gradients of keys", "gradients received", "rows updated")  # fmt: skip


def exchanged(batches: Sequence[Sequence[int]]) -> pd.DataFrame:
    """Return the table of an exchange by modulo, each key once."""
    n = len(batches)
    rows = [
        (rank, 0, key, key % n if key >= 0 else -1, key >= 0 and key not in keys[:place],
         key // n if key >= 0 else -1)
        for rank, keys in enumerate(batches) for place, key in enumerate(keys)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["rank", "table", "key", "owner", "sent", "row"])


def drawn(table: pd.DataFrame, width: float = plot.TWO_COLUMNS) -> Axes:
    ax = Figure(figsize=(width, 4.0), layout="constrained").add_subplot()
    assert plot.exchange(table, ax=ax) is ax
    ax.figure.draw_without_rendering()
    return ax


def lines_of_texts(ax: Axes) -> list[str]:
    """Return the texts of each line of boxes, from left to right."""
    (labels,) = (x for x in ax.artists if isinstance(x, BoxLabels))
    assert len(labels.fitting()[0]) == len(labels.texts)  # all are legible
    levels = labels.centre[:, 1].astype(int)
    order = np.lexsort((labels.centre[:, 0], levels))
    lines: list[list[str]] = [[] for _ in range(max(levels) + 1)]
    for k in order.tolist():
        lines[levels[k]].append(labels.texts[k])
    return [" ".join(line) for line in lines]


def links(ax: Axes, level: int) -> list[tuple[int, int]]:
    """Return which boxes of a phase lines join to which of the next, counted from the left."""
    (lines,) = (x for x in ax.collections if x.get_gid() == f"exchange:lines:{level}")
    ends = np.array([path.vertices[:, 0] for path in lines.get_paths()])
    levels = np.array([path.vertices[:, 1] for path in lines.get_paths()]) - level
    assert np.ptp(levels, axis=0).max() == 0
    assert 0.25 < levels[0, 0] < levels[0, 1] < 0.75  # between the boxes, behind none
    above, below = (np.sort(middles(ax, PHASES[level + k])) for k in (0, 1))
    return [(int(np.argmin(abs(above - a))), int(np.argmin(abs(below - b)))) for a, b in ends]


def middles(ax: Axes, phase: str) -> np.ndarray:
    (boxes,) = (x for x in ax.collections if x.get_gid() == f"exchange:{phase}")
    return np.array([path.vertices[:4, 0].mean() for path in boxes.get_paths()])


def test_phases_of_an_exchange() -> None:
    """Key 5 of rank 1 is sent once and comes back twice; row 2 of rank 1 has two gradients."""
    ax = drawn(exchanged(KEYS))
    assert [tick.get_text() for tick in ax.get_yticklabels()] == list(PHASES)
    assert lines_of_texts(ax) == [
        "k0 k1 k3 k5 k4 k5 k6 k7 k5 k-1",
        "k0 k1 k3 k5 k4 k6 k5 k7",
        "r0 r2 r3 r0 r1 r2 r2 r3",
        "v0 v1 v3 v5 v4 v6 v5 v7",
        "v0 v1 v3 v5 v4 v5 v6 v7 v5 0",
        "g0 g1 g3 g5 g4 g6 g5 g7",
        "g0 g4 g6 g1 g3 g5 g5 g7",
        "r0 r2 r3 r0 r1 r2 r3",
    ]
    assert sorted(links(ax, 0)) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 5), (7, 7),
                                    (8, 6)]  # fmt: skip
    across = [(0, 0), (1, 3), (2, 4), (3, 5), (4, 1), (5, 2), (6, 6), (7, 7)]
    assert sorted(links(ax, 1)) == sorted(links(ax, 5)) == across
    assert sorted(links(ax, 2)) == sorted((b, a) for a, b in across)
    assert sorted(links(ax, 6)) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 5), (7, 6)]


def test_boxes_have_the_colour_of_the_owner() -> None:
    ax = drawn(exchanged(KEYS))
    colours = {x.get_gid(): x.get_facecolor()[:, :3].tolist() for x in ax.collections}
    zero, one = colours["exchange:ranks"]
    assert colours["exchange:keys"][:9] == [zero, one, one, one, zero, one, zero, one, one]
    assert colours["exchange:keys"][9] == [1, 1, 1]  # padding
    assert colours["exchange:rows looked up"] == [zero] * 3 + [one] * 5


@pytest.mark.parametrize("batches", [
    [range(8), range(8, 16)], np.random.default_rng(0).integers(0, 32, (4, 8)).tolist(), [[3], []]
])  # fmt: skip
def test_boxes_do_not_overlap(batches: Sequence[Sequence[int]]) -> None:
    """For 2 and 4 ranks of 8 keys, in axes two columns wide, with a legible number in each."""
    ax = drawn(exchanged(batches))
    lines_of_texts(ax)
    for phase in PHASES:
        gaps = np.diff(np.sort(middles(ax, phase)))
        assert (gaps >= 0.99).all(), phase


def test_many_keys_are_counted() -> None:
    """Of 1,000 keys a rank 3/4 are rank 0's; the axes have the sums."""
    ax = drawn(exchanged([[2 * k for k in range(750)] + [2 * k + 1 for k in range(250)]] * 2))
    assert lines_of_texts(ax) == ["750 250"] * 2
    assert [x.get_text() for x in ax.get_xticklabels()] == ["0\n(1,500)", "1\n(500)"]
    assert [x.get_text() for x in ax.get_yticklabels()] == ["0 (1,000)", "1 (1,000)"]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (exchanged(KEYS).drop(columns="owner"), "table has no column 'owner'; give the result"),
        (exchanged([]), "table is empty"),
        (exchanged(KEYS).assign(owner=-1), "row 0 of table has rank, table or owner below 0"),
        (exchanged(KEYS).assign(key="a"), "columns of table must be whole numbers"),
        ([1], "table must be a pandas.*DataFrame, got"),
    ],
)
def test_tables_that_are_refused(table: pd.DataFrame, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        plot.exchange(table)
