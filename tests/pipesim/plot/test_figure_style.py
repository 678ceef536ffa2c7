"""Styles of figures: sizes, fonts, colours, names; and that figures can be read without colour."""

from __future__ import annotations

import logging
from contextvars import copy_context
from itertools import combinations
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from figure_artists import artist_of, axes, legend_of, simulated
from matplotlib.colors import to_rgb

from pipesim import plot
from pipesim.errors import ArgumentError, UnknownNameError
from pipesim.ops import Op
from pipesim.plot.figure_style import shades
from pipesim.plot.palette import luminance, rgb
from pipesim.plot.task_boxes import BUBBLE

#: Widths (inches) and size of labels (points) that the publishers' guides give.
GUIDES = {
    "ieee": ((3.5, 7.16), 9.0),
    "acm": ((3.33, 7.0), 8.0),
    "neurips": ((5.5, 5.5), 9.0),
    "nature": ((89 / 25.4, 183 / 25.4), 7.0),
}


def sizes_of(ax: Any) -> dict[str, float]:
    return {
        "label": ax.xaxis.label.get_size(),
        "title": ax.title.get_size(),
        "tick": ax.get_xticklabels()[0].get_size(),
        "legend": ax.get_legend().get_texts()[0].get_size(),
    }


def test_sizes_follow_the_settings_that_a_user_changed() -> None:
    """Each of those that matplotlib derives from another, too; 8 and 7 points without any."""
    usual = {"label": 8, "title": 8, "tick": 7, "legend": 7}
    changes: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
        "none": ({}, usual),
        "all": ({"font.size": 12}, dict.fromkeys(usual, 12)),
        "labels": ({"axes.labelsize": 6.5}, usual | {"label": 6.5, "title": 6.5}),
        "ticks": ({"xtick.labelsize": 5}, usual | {"tick": 5}),
        "legend": ({"font.size": 10.5, "legend.fontsize": "small"},
                   dict.fromkeys(usual, 10.5) | {"legend": 10.5 * 0.833}),
    }  # fmt: skip
    for settings, expected in changes.values():
        with mpl.rc_context(settings):
            ax = simulated().plot(ax=axes(), title="title")
            ax.title.set_size(ax._left_title.get_size())  # type: ignore[attr-defined]
            assert sizes_of(ax) == pytest.approx(expected)


@pytest.mark.parametrize("publisher", GUIDES)
def test_styles_are_those_of_the_guides(publisher: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Also of plain figures; and no font is missing."""
    widths, points = GUIDES[publisher]
    for columns, width in enumerate(widths, 1):
        with plot.style(publisher, columns=columns), caplog.at_level(logging.WARNING):
            ax = plot.timeline(simulated(n=2, m=2), title="µ \N{MINUS SIGN}1")
            plain = plt.figure().get_figwidth()
            ax.figure.draw_without_rendering()
        assert ax.figure.get_figwidth() == plain == pytest.approx(width)
        assert sizes_of(ax) | {"title": points} == {
            "label": points, "title": points, "tick": points - 1, "legend": points - 1
        }  # fmt: skip
        assert ("DejaVu Sans" in ax.xaxis.label.get_family()) == (publisher == "nature")
    assert not caplog.records


def test_a_style_lasts_for_its_block_or_for_all_that_follows() -> None:
    def face() -> Any:
        return artist_of(simulated(n=1, m=1).plot(ax=axes()), "cells:F").get_facecolor()[0, :3]

    usual, settings, red = face(), dict(mpl.rcParams), plot.style(palette={"F": "red"})
    with red, plot.style(palette={Op.F: "#00FF00"}), red:
        assert face().tolist() == [1, 0, 0]
    assert (face() == usual).all()
    assert dict(mpl.rcParams) == settings

    def use() -> None:
        red.use()
        assert face().tolist() == [1, 0, 0]
        assert mpl.rcParams["font.size"] == 8

    with mpl.rc_context():
        copy_context().run(use)
    assert (face() == usual).all()


def test_names_and_hatches_are_those_of_the_style() -> None:
    with plot.style(operations={"F": "fwd"}, hatches={"B": "xx", "R": ""}, text_size=6):
        ax = simulated("gpipe", 2, 2, recompute="always").plot(ax=axes())
    assert legend_of(ax.get_legend()) == ["fwd", "backward", "recompute", "optimizer"]
    hatches = [artist_of(ax, f"cells:{op}").get_hatch() for op in "FBR"]
    assert hatches == [None, "xx", None]
    assert sizes_of(ax)["tick"] == 5


@pytest.mark.parametrize("grey", [False, True])
def test_forward_backward_gradients_and_bubbles_differ_in_grey(grey: bool) -> None:
    """Contrast of 1.3 (WCAG 2.1) between any two; of greys, recomputes too. No hatch is needed."""
    palette = plot.style(grey=grey).palette
    ops = (Op.F, Op.B, Op.I, Op.W, *[Op.R] * grey)
    looks = {str(op): palette[op] for op in ops} | {"bubble": BUBBLE}
    for (one, first), (other, second) in combinations(looks.items(), 2):
        low, high = sorted((luminance(rgb([first, second])) + 0.05).tolist())
        assert high / low >= 1.3, (one, other)
    assert set(palette) == set(Op)


def test_chunks_differ_in_grey() -> None:
    """F and B of two chunks and the bubble have a contrast of 1.25 between any two."""
    with plot.style(grey=True):
        boxes = shades(np.array([Op.F, Op.F, Op.B, Op.B]), np.array([0, 1, 0, 1]))
    levels = np.sort(luminance(np.vstack([boxes, rgb([BUBBLE])])) + 0.05)
    assert (levels[1:] / levels[:-1]).min() >= 1.25


def test_a_style_of_greys_has_no_colour() -> None:
    step = simulated("gpipe", 2, 2, recompute="always")
    with plot.style(grey=True):
        kinds = step.plot, step.graph.plot, step.plot.memory
        ax, graph, held = (draw(ax=axes()) for draw in kinds)
    faces = [artist_of(ax, f"cells:{op}") for op in ("F", "B", "R", "STEP")]
    for artist in (*faces, artist_of(graph, "nodes"), artist_of(graph, "nodes:recompute")):
        assert np.ptp(artist.get_facecolor()[:, :3], axis=1).max() == 0
    for line in held.lines:
        assert np.ptp(to_rgb(line.get_color())) == 0


@pytest.mark.parametrize("grey", [False, True])
def test_figures_for_nature_have_no_patterns(grey: bool) -> None:
    step = simulated("gpipe", 2, 2, recompute="always")
    with plot.style("nature", grey=grey):
        figures = [draw(ax=axes()) for draw in (step.plot, step.graph.plot, step.plot.idle)]
    artists = [artist for ax in figures for artist in ax.findobj()]
    assert not any(artist.get_hatch() for artist in artists if hasattr(artist, "get_hatch"))


def test_lines_of_charts_have_no_markers_of_the_style() -> None:
    """They would hide steps and fits."""
    table = pd.DataFrame({"step": [1.0], "memory": [1.0], "schedule": "1f1b", "low": 1, "high": 2})
    with plot.style("ieee"):
        held, points = plot.memory(simulated(), ax=axes()), plot.accuracy([1, 2], [1, 3], ax=axes())
        front = plot.plan_front(table, [0], {}, ax=axes())
    assert {line.get_marker() for ax in (held, points, front) for line in ax.lines} == {"", "|"}
    assert {line.get_linestyle() for line in front.lines} == {"-"}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot.style("iee"), UnknownNameError, "did you mean 'ieee'"),
        (lambda: plot.style(columns=3), ArgumentError, "columns must be 1 or 2, got 3"),
        (lambda: plot.style(text_size=0), ArgumentError, "text_size"),
        (lambda: plot.style(font="Times Old Roman"), UnknownNameError, "is not installed"),
        (lambda: plot.style(font=3), ArgumentError, "font must be"),
        (lambda: plot.style(palette={"F": "blu"}), ArgumentError, r"palette\['F'\] must be a col"),
        (lambda: plot.style(palette={"FF": "blue"}), UnknownNameError, "unknown operation 'FF'"),
        (lambda: plot.style(hatches={"F": "abc"}), ArgumentError, "hatch of matplotlib"),
        (lambda: plot.style(operations={"F": 3}), ArgumentError, r"operations\['F'\]"),
        (lambda: plot.style(schedules={"1f1b": 3}), ArgumentError, "schedules"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
