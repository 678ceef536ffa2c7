"""Configurations of a plan as points, by the geometry of the artists."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from figure_artists import artist_of, axes, drawn, legend_of
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pipesim import plot
from pipesim.errors import ArgumentError, UnknownNameError

GIB = 2.0**30
TABLE = pd.DataFrame(
    {
        "step": [0.1, 0.2, 0.3, 0.4],
        "memory": [40 * GIB, 50 * GIB, 20 * GIB, 30 * GIB],
        "schedule": ["1f1b", "gpipe", "1f1b", "zbv"],
    }
)
NAMES = {0: "tp8 pp2 dp1", 2: "tp8 pp1 dp2"}


def test_points_of_schedules_on_and_off_the_front() -> None:
    ax = axes()
    assert plot.plan_front(TABLE, [0, 2], NAMES, ax=ax, unit="ms") is ax
    points = artist_of(ax, "plan:front:1f1b").get_offsets()
    np.testing.assert_allclose(points, [[100, 40], [300, 20]])
    np.testing.assert_allclose(artist_of(ax, "plan:gpipe").get_offsets(), [[200, 50]])
    assert len(artist_of(ax, "plan:front:zbv").get_offsets()) == 0
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Step (ms)", "Memory of the fullest device (GiB)")
    assert legend_of(ax.get_legend()) == ["1F1B", "GPipe", "ZB-V", "front"]
    assert "plan:limit" not in drawn(ax)


def test_schedules_differ_in_marker_and_colour() -> None:
    """Colour is never the only cue."""
    ax = plot.plan_front(TABLE, [0, 2], NAMES, ax=axes())
    artists = [artist_of(ax, f"plan:front:{name}") for name in ("1f1b", "gpipe", "zbv")]
    shapes = {artist.get_paths()[0].vertices.tobytes() for artist in artists}
    handles = ax.get_legend().legend_handles[:3]
    colours = {tuple(handle.get_facecolor()[0]) for handle in handles}  # type: ignore[union-attr]
    assert len(shapes) == len(colours) == 3


def test_the_front_is_a_staircase_and_the_best_has_a_ring() -> None:
    ax = plot.plan_front(TABLE, [0, 2], NAMES, ax=axes(), unit="s")
    line = artist_of(ax, "plan:front")
    np.testing.assert_allclose(line.get_xydata(), [[0.1, 40], [0.3, 20]])
    assert line.get_drawstyle() == "steps-post"
    np.testing.assert_allclose(artist_of(ax, "plan:best").get_offsets(), [[0.1, 40]])
    assert "tp8 pp2 dp1" in [text.get_text() for text in ax.texts]


def test_labels_are_inside_and_apart() -> None:
    """Of twenty points of a front six at most are labelled, each label in a line of its own."""
    steps = np.linspace(1, 2, 20)
    table = pd.DataFrame({"step": steps, "memory": GIB * 30 / steps**3, "schedule": "1f1b"})
    names = {rank: f"tp8 pp{rank} dp16, 4 chunks" for rank in range(20)}
    ax = plot.plan_front(table, list(range(20)), names, ax=axes())
    renderer = FigureCanvasAgg(ax.figure).get_renderer()  # type: ignore[arg-type]  # no subfigure
    boxes = [text.get_window_extent(renderer) for text in ax.texts]
    assert 3 <= len(boxes) <= 6
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
    frame = ax.get_window_extent(renderer)
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)


def test_the_limit_is_a_line_with_its_bytes() -> None:
    ax = plot.plan_front(TABLE, [0, 2], {}, ax=axes(), memory_limit=80 * GIB, title="plan")
    assert artist_of(ax, "plan:limit").get_ydata()[0] == 80
    assert [text.get_text() for text in ax.texts] == ["limit 80.0 GiB"]
    assert ax.get_ylim()[1] > 80
    assert ax.get_title(loc="left") == "plan"


@pytest.mark.parametrize("table", [None, TABLE[:0], TABLE.drop(columns="memory")])
def test_what_is_no_table(table: object) -> None:
    with pytest.raises(ArgumentError, match="table must have columns step, memory, schedule"):
        plot.plan_front(table, [0], NAMES)  # type: ignore[arg-type]


def test_other_wrong_arguments() -> None:
    for limit in (-1.0, "eighty", float("nan")):
        with pytest.raises(ArgumentError, match="memory_limit"):
            plot.plan_front(TABLE, [0], NAMES, memory_limit=limit)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="front"):
        plot.plan_front(TABLE, [0, 7], NAMES)
    with pytest.raises(ArgumentError, match="ax"):
        plot.plan_front(TABLE, [0], NAMES, ax="left")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unit of time"):
        plot.plan_front(TABLE, [0], NAMES, unit="h")
