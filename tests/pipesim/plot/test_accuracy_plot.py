"""Measured over predicted seconds, by the geometry of the artists."""

from __future__ import annotations

import numpy as np
import pytest
from figure_artists import artist_of, axes, drawn, legend_of

from pipesim import plot
from pipesim.errors import ArgumentError, UnknownNameError

MEASURED, PREDICTED = [0.1, 0.2, 0.8], [0.11, 0.19, 0.6]


def test_a_point_a_step() -> None:
    ax = axes(3.5, 3.5)
    assert plot.accuracy(MEASURED, PREDICTED, ax=ax, unit="s") is ax
    points = artist_of(ax, "accuracy:steps").get_offsets()
    np.testing.assert_allclose(points, np.column_stack([PREDICTED, MEASURED]))
    assert ax.get_title(loc="right") == "error: mean 13.3%, worst 25.0%"


def test_axes_are_alike_logarithmic_and_hold_all_points() -> None:
    ax = plot.accuracy(MEASURED, PREDICTED, ax=axes(3.5, 3.5))
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert ax.get_xlim() == ax.get_ylim()
    assert ax.get_xlim()[0] < 100  # ms, the unit of the median
    assert ax.get_xlim()[1] > 800
    assert ax.get_aspect() == 1.0
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Predicted (ms)", "Measured (ms)")


def test_the_band_has_predictions_within_10_percent() -> None:
    """A prediction of 1.1 s for a step of 1 s is on its lower edge, one of 0.9 s on its upper."""
    ax = plot.accuracy(MEASURED, PREDICTED, ax=axes(3.5, 3.5), unit="s")
    assert drawn(ax) == {"accuracy:steps", "accuracy:equal", "accuracy:band"}
    x, y = artist_of(ax, "accuracy:equal").get_data()
    np.testing.assert_array_equal(x, y)
    corners = artist_of(ax, "accuracy:band").get_paths()[0].vertices
    ratios = corners[:, 0] / corners[:, 1]
    assert np.unique(ratios.round(9)).tolist() == pytest.approx([0.9, 1.1])
    assert legend_of(ax.get_legend()) == ["equal", "within 10%"]


@pytest.mark.parametrize("bad", [[], [0.1], [0.1, 0.2, 0.0], [0.1, 0.2, float("nan")], "0.1"])
def test_values_that_are_no_seconds_of_each_step(bad: object) -> None:
    with pytest.raises(ArgumentError, match="predicted"):
        plot.accuracy(MEASURED, bad, ax=axes())  # type: ignore[arg-type]


def test_an_unknown_unit_and_other_axes() -> None:
    with pytest.raises(UnknownNameError, match="unit of time"):
        plot.accuracy(MEASURED, PREDICTED, unit="h")
    with pytest.raises(ArgumentError, match="ax"):
        plot.accuracy(MEASURED, PREDICTED, ax="left")  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [1.02, 1.4, 5.0, 40.0, 900.0, 1e5])
def test_ticks_are_round_numbers_apart(longest: float) -> None:
    """At least two a range, without exponents; only these have texts."""
    ax = plot.accuracy([1.0, longest], [1.0, longest], ax=axes(3.5, 3.5), unit="s")
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    ticks = [x for x in ax.get_xticks() if low <= x <= high]
    texts = ax.xaxis.get_major_formatter().format_ticks(ticks)
    assert 2 <= len(ticks) <= 9
    assert not any("^" in text for text in texts)
    assert np.diff(np.log(ticks)).min() > np.log(high / low) / 20
    assert {text.get_text() for text in ax.get_xticklabels(minor=True)} <= {""}


def test_a_long_title_moves_the_errors_into_the_axes() -> None:
    ax = plot.accuracy(MEASURED, PREDICTED, ax=axes(3.5, 3.5), title="a100_80gb, left-out steps")
    assert ax.get_title(loc="left") == "a100_80gb, left-out steps"
    assert ax.get_title(loc="right") == ""
    assert [text.get_text() for text in ax.texts] == ["error: mean 13.3%, worst 25.0%"]
