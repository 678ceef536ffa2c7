"""Settings for figures of papers, and timelines below each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from figure_artists import COSTS, artist_of, boxes, drawn, legend_of, simulated
from matplotlib.figure import Figure

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.ops import Op

SPLIT = replace(COSTS, input_grad=0.01, weight_grad=0.01)


@pytest.mark.parametrize("columns", [1, 2])
def test_figures_have_the_size_of_columns(columns: int) -> None:
    with plt.rc_context(plot.paper_style(columns, 1.5)):
        size = plt.figure().get_size_inches().tolist()
    assert size == [(plot.ONE_COLUMN, plot.TWO_COLUMNS)[columns - 1], 1.5]


def test_settings_last_no_longer_than_their_context() -> None:
    before = dict(mpl.rcParams)
    with plt.rc_context(plot.paper_style()):
        assert dict(mpl.rcParams) != before
    assert dict(mpl.rcParams) == before


def test_every_text_can_be_read_in_print() -> None:
    with plt.rc_context(plot.paper_style()):
        figure, ax = plt.subplots()
        ax.plot([0, 1], label="curve")
        ax.set(title="title", xlabel="x", ylabel="y")
        ax.legend(title="legend")
        figure.suptitle("all")
    sizes = {text.get_fontsize() for text in figure.findobj(mpl.text.Text)}
    assert sizes == {7.0, 8.0}


def test_lines_differ_without_colour() -> None:
    """Any two by their dashes, and by their markers."""
    with plt.rc_context(plot.paper_style()):
        lines = [plt.subplots()[1].plot([0, 1])[0]]
        lines += lines[0].axes.plot([[0] * 6, [1] * 6])
        saved = [(line.get_linestyle(), line._unscaled_dash_pattern) for line in lines]
    assert len(lines) == 7
    for one, other in combinations(range(7), 2):
        assert saved[one] != saved[other]
        assert lines[one].get_marker() != lines[other].get_marker()
        assert lines[one].get_color() != lines[other].get_color()


@pytest.mark.slow
def test_files_of_plain_matplotlib_have_fonts_of_type_42(tmp_path: Path) -> None:
    path = tmp_path / "figure.pdf"
    with plt.rc_context(plot.paper_style()):
        figure, ax = plt.subplots()
        ax.set_title("title")
        figure.savefig(path)
    assert b"/CIDFontType2" in path.read_bytes()
    assert b"/Type3" not in path.read_bytes()


def test_panels_share_one_axis_of_time_and_one_legend() -> None:
    timelines = {name: simulated(name, costs=SPLIT) for name in ("gpipe", "zb_h1")}
    figure = plot.panels(timelines)
    assert figure.get_figwidth() == plot.TWO_COLUMNS
    assert [ax.get_title("left") for ax in figure.axes] == ["GPipe", "ZB-H1"]
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "Time (ms)"]
    longest = max(timeline.makespan for timeline in timelines.values())
    for ax, timeline in zip(figure.axes, timelines.values(), strict=True):
        assert ax.get_xlim() == pytest.approx((0, 1005 * longest))
        assert max(boxes(ax, "cells:F")[:, 1]) == pytest.approx(
            1e3 * max(timeline.end[timeline.graph.op == Op.F])
        )
        assert ax.get_legend() is None
    (legend,) = figure.legends
    assert legend_of(legend) == [
        "forward", "backward", "input gradient", "weight gradient", "optimizer",
    ]  # fmt: skip


def test_panels_are_as_high_as_their_devices_and_a_column_wide() -> None:
    figure = plot.panels({"2": simulated(n=2), "6": simulated(n=6)}, columns=1)
    figure.draw_without_rendering()
    low, high = (ax.bbox.height for ax in figure.axes)
    assert high == pytest.approx(3 * low)
    assert figure.get_figwidth() == plot.ONE_COLUMN


def test_chunks_of_the_deepest_panel_are_in_the_legend() -> None:
    figure = plot.panels({"v": simulated("zbv", costs=SPLIT), "flat": simulated()})
    assert legend_of(figure.legends[0])[-2:] == ["chunk 0", "chunk 1"]


def test_panels_have_lanes_only_for_messages_that_take_time() -> None:
    """If any panel has such messages; ticks alone are drawn if none has."""
    quick, slow = simulated(costs=ps.Costs(1, 2)), simulated()
    both = plot.panels({"quick": quick, "slow": slow}, transfers=True)
    assert ["cells:SEND_F" in drawn(ax) for ax in both.axes] == [False, True]
    (alone,) = plot.panels({"quick": quick}, transfers=True).axes
    assert len(artist_of(alone, "cells:instant").get_segments()) == 4 * 8 * 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot.paper_style(3), ArgumentError, "columns must be 1 or 2, got 3"),
        (lambda: plot.paper_style(1, 0), ArgumentError, "height must be a finite number"),
        (lambda: plot.panels({}), ArgumentError, "at least one timeline"),
        (lambda: plot.panels([simulated()]), ArgumentError, "mapping"),
        (lambda: plot.panels({"a": Figure()}), ArgumentError, "no Timeline"),
        (lambda: plot.panels({"a": simulated()}, columns=0), ArgumentError, "columns"),
        (lambda: plot.panels({"a": simulated()}, unit="hours"), UnknownNameError, "hours"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
