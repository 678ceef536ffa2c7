"""Figures, by the geometry of their artists."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figure_artists import (
    MIB,
    artist_of,
    axes,
    boxes,
    drawn,
    legend_of,
    measured,
    partial,
    simulated,
)
from html_cells import cells_of, parsed
from matplotlib.figure import Figure
from PIL import Image

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, TimelineError, UnknownNameError
from pipesim.ops import SENDS, TRANSFERS, Op
from pipesim.plot import figure_style
from pipesim.plot import palette as style
from pipesim.utils.texts import format_bytes, format_time

# The palette and the units.


def test_every_op_has_a_colour_of_its_own_and_a_label() -> None:
    assert set(style.PALETTE) == set(style.LABELS) == set(Op)
    assert len(set(style.PALETTE.values())) == len(set(style.LABELS.values())) == len(Op)


def test_forward_and_backward_differ_in_print_without_colour() -> None:
    grey = figure_style.shades(np.array([Op.F, Op.B]), np.zeros(2, int)) @ [0.299, 0.587, 0.114]
    assert abs(grey[0] - grey[1]) > 0.1


def test_later_chunks_are_lighter() -> None:
    colours = figure_style.shades(np.full(4, Op.B), np.arange(4))
    assert (np.diff(colours, axis=0) > 0).all()
    assert (colours < 1).all()


def test_chunks_count_the_stages_of_a_device() -> None:
    device, stage = np.array([1, 0, 0, 1, 0]), np.array([1, 3, 0, 2, 3])
    assert style.chunks(device, stage).tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (2.0, "2.00 s"), (1234.5, "1234 s"), (0.0412, "41.2 ms"), (0.9999, "1.00 s"),
     (3.2e-5, "32.0 µs"), (5e-9, "5.00 ns"), (5e-12, "0.005 ns"), (float("nan"), "n/a")],
)  # fmt: skip
def test_times_are_written_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3.25 * 2**30, "3.25 GiB")],
)
def test_bytes_are_written_in_a_fitting_unit(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_errors_are_written_with_their_sign() -> None:
    assert [style.format_error(e) for e in (0.017, -0.02, float("nan"))] == [
        "+1.7%",
        "\N{MINUS SIGN}2.0%",
        "n/a",
    ]


# Predicted over measured.


def test_predicted_is_above_measured_on_the_same_axis() -> None:
    predicted = simulated("gpipe", 3, 4, recompute="always")
    run = measured(predicted)
    comparison = ps.Comparison(predicted, run)
    ax = axes()
    assert comparison.plot(ax=ax, unit="s") is ax
    for op in ("F", "B", "R", "STEP"):
        above, below = boxes(ax, f"predicted:{op}"), boxes(ax, f"measured:{op}")
        for cells, timeline in ((above, predicted), (below, run)):
            tasks = timeline.frame[timeline.frame["op"] == op]
            np.testing.assert_allclose(cells[:, :2], tasks[["start", "end"]], atol=1e-12)
            assert (np.round(cells[:, 2:].mean(axis=1)) == tasks["device"]).all()
        # The y axis points down.
        assert (above[:, 3] < below[:, 2]).all()
        assert (above[:, 3] - below[:, 2] > -0.5).all()


def test_predictions_are_paler() -> None:
    predicted = simulated()
    ax = ps.Comparison(predicted, measured(predicted)).plot(ax=axes())
    pale, full = (artist_of(ax, f"{name}:F").get_facecolors() for name in ("predicted", "measured"))
    assert (pale[:, :3].sum(axis=1) > full[:, :3].sum(axis=1)).all()


def test_the_legend_of_a_comparison_shows_what_is_drawn() -> None:
    """Pale boxes with a frame of their colour, full ones without; a dashed and a solid line."""
    predicted = simulated()
    ax = ps.Comparison(predicted, measured(predicted)).plot(ax=axes())
    legend = ax.get_legend()
    handles = dict(zip(legend_of(legend), legend.legend_handles, strict=True))
    pale, full = handles["predicted"], handles["measured"]
    assert pale.get_linestyle() == "solid"
    assert pale.get_edgecolor()[:3] == full.get_facecolor()[:3] < pale.get_facecolor()[:3]
    assert (pale.get_linewidth(), full.get_linewidth()) == (0.7, 0)
    for name in ("predicted", "measured"):
        line = artist_of(ax, f"{name}:makespan")
        assert handles[f"{name} makespan"].get_linestyle() == line.get_linestyle()


def test_makespans_are_marked_and_the_error_is_in_the_title() -> None:
    predicted = simulated()
    comparison = ps.Comparison(predicted, measured(predicted))
    ax = comparison.plot(ax=axes(), unit="s")
    for name, timeline in (("predicted", predicted), ("measured", comparison.measured)):
        assert artist_of(ax, f"{name}:makespan").get_xdata()[0] == timeline.makespan
        assert ax.get_xlim()[1] >= timeline.makespan
    error = style.format_error(comparison.makespan_error)
    assert ax.get_title(loc="right").endswith(f"error {error}")
    assert ax.get_title(loc="left") == "run"
    narrow = comparison.plot(ax=axes(plot.ONE_COLUMN), title="1f1b, recompute never")
    assert narrow.get_title(loc="right") == f"error {error}"


@pytest.mark.parametrize("width", [plot.ONE_COLUMN, plot.TWO_COLUMNS])
def test_titles_do_not_overlap(width: float) -> None:
    predicted = simulated()
    ax = ps.Comparison(predicted, measured(predicted)).plot(
        ax=axes(width), title="1f1b/except_last"
    )
    ax.figure.canvas.draw()
    left, right = (getattr(ax, f"_{side}_title").get_window_extent() for side in ("left", "right"))
    assert left.x1 < right.x0
    assert left.y0 >= ax.get_legend().get_window_extent().y1


def test_overlay_stacks_comparisons_on_one_axis_of_time() -> None:
    rows = {
        f"{name}, {recompute}": simulated(name, 2, 4, recompute=recompute)
        for name in ("gpipe", "1f1b")
        for recompute in ("never", "always")
    }
    comparisons = {title: ps.Comparison(t, measured(t)) for title, t in rows.items()}
    figure = plot.overlay(comparisons, width=plot.TWO_COLUMNS)
    assert plt.get_fignums() == []
    assert figure.get_figwidth() == plot.TWO_COLUMNS
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "GPipe, never", "GPipe, always", "1F1B, never", "1F1B, always"
    ]  # fmt: skip
    figure.canvas.draw()
    tops = [ax.bbox.y1 for ax in figure.axes]
    assert tops == sorted(tops, reverse=True)
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    assert len({(ax.bbox.x0, ax.bbox.x1) for ax in figure.axes}) == 1
    longest = max(t.makespan for c in comparisons.values() for t in (c.predicted, c.measured))
    assert figure.axes[0].get_xlim()[1] >= longest * 1e3
    assert [ax.get_xlabel() for ax in figure.axes] == ["", "", "", "Time (ms)"]
    assert [ax.get_legend() for ax in figure.axes] == [None] * 4
    (legend,) = figure.legends
    assert legend_of(legend) == [
        "predicted", "measured", "forward", "backward", "recompute", "optimizer",
        "predicted makespan", "measured makespan",
    ]  # fmt: skip
    assert legend.get_window_extent().y0 >= figure.axes[0]._left_title.get_window_extent().y1


def test_compared_transfers_have_lanes_of_their_own() -> None:
    """Under the compute lane of each, those of the prediction above the measured device."""
    predicted = simulated()
    comparison = ps.Comparison(predicted, measured(predicted))
    assert not any("SEND" in gid for gid in drawn(comparison.plot(ax=axes())))
    ax = comparison.plot(ax=axes(), transfers=True, unit="s")
    lanes: dict[str, list[Any]] = {"predicted": [], "measured": []}
    for name, timeline in (("predicted", predicted), ("measured", comparison.measured)):
        frame = timeline.frame[timeline.duration > 0]
        for op in sorted({Op[op] for op in frame["op"]}):
            tasks, cells = frame[frame["op"] == op.name], boxes(ax, f"{name}:{op.name}")
            np.testing.assert_allclose(cells[:, :2], tasks[["start", "end"]], atol=1e-12)
            for device in range(4):
                of_device = cells[tasks["device"] == device, 2:]
                lanes[name] += [(device, op in TRANSFERS, *lane) for lane in of_device.tolist()]
    for device in range(4):
        above, below = (np.array([x[1:] for x in lanes[n] if x[0] == device]) for n in lanes)
        assert device - 0.5 < above[:, 1].min() < above[:, 2].max() < below[:, 1].min()
        assert below[:, 2].max() < device + 0.5
        for one in (above, below):
            assert one[one[:, 0] == 0, 2].max() < one[one[:, 0] == 1, 1].min()


def test_an_overlay_makes_room_for_transfers_where_there_are_lanes_for_them() -> None:
    timelines = {str(overlap): simulated(n=2, m=4, overlap=overlap) for overlap in (False, True)}
    comparisons = {name: ps.Comparison(t, measured(t)) for name, t in timelines.items()}
    plain, figure = (plot.overlay(comparisons, transfers=shown) for shown in (False, True))
    assert figure.get_figheight() > plain.get_figheight()
    without, with_lanes = figure.axes
    np.testing.assert_array_equal(
        boxes(without, "predicted:F"), boxes(plain.axes[0], "predicted:F")
    )
    assert "measured:SEND_F" in drawn(with_lanes)
    figure.canvas.draw()
    assert with_lanes.bbox.height > 1.5 * without.bbox.height


# Memory and bars.


def test_memory_steps_up_to_each_devices_peak() -> None:
    timeline = simulated("1f1b", 3, 6)
    ax = axes()
    assert plot.memory(timeline, ax=ax) is ax
    peaks = [artist_of(ax, f"memory:{device}").get_ydata().max() for device in range(3)]
    np.testing.assert_allclose(np.array(peaks) * MIB, timeline.memory.peak)
    assert ax.get_ylabel() == "Memory held (MiB)"
    assert legend_of(ax.get_legend()) == ["device 0", "device 1", "device 2"]
    line = artist_of(ax, "memory:2")
    assert line.get_drawstyle() == "steps-post"
    assert line.get_xdata()[-1] == timeline.makespan * 1e3


def test_memory_keeps_what_the_axes_hold() -> None:
    ax = axes()
    for name in ("gpipe", "1f1b"):
        plot.memory(simulated(name, 2, 8), ax=ax)
    highest = max(line.get_ydata().max() for line in ax.lines)
    assert ax.get_ylim()[1] > highest


def test_memory_without_bytes_says_so() -> None:
    """An empty panel would be taken for a model without memory."""
    drawn, empty = (
        plot.memory(ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), costs), ax=axes())
        for costs in (ps.Costs(1, 2, activation_bytes=1), ps.Costs(1, 2))
    )
    assert [text.get_text() for text in empty.texts] == ["no bytes in the costs"]
    assert not drawn.texts


@pytest.mark.parametrize("layout", [None, "constrained", "tight"])
def test_labels_of_devices_do_not_overlap(layout: Any) -> None:
    """The height that counts is that of the axes as drawn, which a layout may make less."""
    figure, ax = plt.subplots(figsize=(3.3, 1.2), layout=layout)
    plot.timeline(simulated("1f1b", 12, 8), ax=ax)
    figure.draw_without_rendering()
    labels = [tick.label1.get_window_extent() for tick in ax.yaxis.get_major_ticks()]
    assert len(labels) >= 3
    for low, high in pairwise(sorted(labels, key=lambda box: box.y0)):
        assert low.y1 <= high.y0
    plt.close(figure)


@pytest.mark.slow
def test_few_of_many_devices_are_named() -> None:
    ax = plot.memory(simulated("1f1b", 20, 2), ax=axes())
    assert legend_of(ax.get_legend()) == [f"device {d}" for d in (0, 4, 8, 12, 16)]


def test_bars_are_as_long_as_the_column_says() -> None:
    table = ps.compare({name: simulated(name) for name in ("gpipe", "1f1b")})
    for column in table:
        ax = axes()
        assert plot.bars(table, ax=ax, column=str(column)) is ax
        assert [bar.get_width() for bar in ax.patches] == table[column].tolist()
        assert [tick.get_text() for tick in ax.get_yticklabels()] == ["GPipe", "1F1B"]
        assert ax.patches[0].get_y() < ax.patches[1].get_y()
        assert ax.yaxis_inverted()
    assert [text.get_text() for text in ax.texts] == ["0.0%", "7.2%"], "gaps"


def test_bars_without_numbers_have_an_axis() -> None:
    table = ps.compare({name: simulated(name) for name in ("gpipe", "1f1b")})
    ax = plot.bars(table, ax=axes(), numbers=False, title="steps")
    ticks = [float(tick.get_text()) for tick in ax.get_xticklabels()]
    np.testing.assert_allclose(ax.get_xticks() * 1e3, ticks)
    assert (ax.get_xlabel(), ax.get_title("left"), len(ax.texts)) == ("ms", "steps", 0)


def test_a_value_that_is_not_known_is_marked() -> None:
    simulation = simulated()
    unknown = dataclasses.replace(simulation, costs=None)
    ax = plot.bars(ps.compare({"a": simulation, "b": unknown}), ax=axes(), column="peak_memory")
    assert [text.get_text() for text in ax.texts] == ["456 MiB", "n/a"]


# Figures and files.


def test_figures_have_a_papers_widths() -> None:
    for columns, width in ((1, 3.5), (2, 7.16)):
        figure, ax = plot.figure(columns, rows=4)
        assert figure.get_figwidth() == width
        assert ax.figure is figure
    low, high = (plot.figure(1, rows=rows)[0].get_figheight() for rows in (2, 8))
    assert low < high
    assert plot.figure(1, height=1.5)[0].get_figheight() == 1.5


@pytest.mark.slow
def test_files_have_editable_text_and_enough_dots(tmp_path: Path) -> None:
    ax = simulated().plot(ax=axes(3.5))
    paths = [tmp_path / f"figure.{kind}" for kind in ("pdf", "png", "svg")]
    plot.save(ax, *paths)
    pdf = paths[0].read_bytes()
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    with Image.open(paths[1]) as image:
        assert image.width >= 3.5 * 200
        assert image.info["dpi"][0] >= 200
    assert "<text" in paths[2].read_text()
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pdf", "png", "svg"])
def test_the_same_figure_is_the_same_file(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        plot.save(simulated().plot(ax=axes()).figure, tmp_path / f"{name}.{kind}")
    one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ax, path = simulated().plot(ax=axes()), tmp_path / "figure.png"
    path.write_text("what was there before")

    def broken(self: Figure, file: Path, **_: Any) -> None:
        file.write_text("half of a fig")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(ArgumentError, match="disk full"):
        plot.save(ax, path)
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


# Mistakes.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: simulated().plot(unit="hours"), UnknownNameError, "unit of time 'hours'"),
        (lambda: simulated().plot(ax=plt), ArgumentError, "ax must be a matplotlib Axes"),
        (
            lambda: plot.timeline(simulated().graph),
            ArgumentError,
            "timeline must be a pipesim.Timeline",
        ),
        (
            lambda: plot.comparison(simulated()),
            ArgumentError,
            "comparison must be a pipesim.Comparison",
        ),
        (lambda: plot.overlay({}), ArgumentError, "at least one comparison"),
        (lambda: plot.overlay({"a": simulated()}), ArgumentError, "no Comparison"),
        (lambda: plot.overlay([simulated()]), ArgumentError, "mapping"),
        (
            lambda: plot.overlay({"a": ps.Comparison(simulated(), simulated())}, width=0),
            ArgumentError,
            "width",
        ),
        (lambda: plot.memory("1f1b"), ArgumentError, "timeline must be a pipesim.Timeline"),
        (
            lambda: plot.memory(dataclasses.replace(simulated(), costs=None)),
            TimelineError,
            "no costs",
        ),
        (
            lambda: plot.bars(ps.compare({"a": simulated()}), column="makspan"),
            UnknownNameError,
            "did you mean 'makespan'",
        ),
        (lambda: plot.bars(simulated()), ArgumentError, "pipesim.compare"),
        (lambda: plot.bars(ps.compare({"a": simulated()})[:0]), ArgumentError, "at least one row"),
        (lambda: plot.figure(3), ArgumentError, "1 or 2"),
        (lambda: plot.figure(True), ArgumentError, "columns"),
        (lambda: plot.figure(1, height=-1.0), ArgumentError, "height"),
        (lambda: plot.figure(1, rows=float("nan")), ArgumentError, "rows"),
        (lambda: plot.save(axes(), "figure.jpeg2000"), ArgumentError, ".pdf, .png or .svg"),
        (lambda: plot.save(axes(), "/no/such/folder/figure.png"), ArgumentError, "/no/such"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert plt.get_fignums() == [] or error is ArgumentError


# What notebooks show.


def test_a_schedule_shows_itself_in_clock_cycles() -> None:
    html = ps.schedule("gpipe", 2, 2)._repr_html_()
    assert cells_of(html) == [
        ["device 0", "0", "1", "", "", "1", "0"],
        ["device 1", "", "0", "1", "1", "0", ""],
    ]
    titles = [cell.get("title") for cell in parsed(html).iter("td") if cell.get("title")]
    assert titles == ["0F0", "0F1", "0B1", "0B0", "1F0", "1F1", "1B1", "1B0"]


@pytest.mark.slow
def test_a_large_schedule_is_cut() -> None:
    html = ps.schedule("1f1b", 40, 256)._repr_html_()
    rows = cells_of(html)
    assert len(rows) == 32
    assert {len(row) for row in rows} == {65}
    assert "devices 32 to 39" in html
    assert "cycles 64 to " in html


def test_a_schedule_that_cannot_run_shows_itself_by_position() -> None:
    schedule = ps.Schedule.from_orders([["0F0", "0B0"], ["1B0", "1F0"]])
    html = schedule._repr_html_()
    assert cells_of(html)[1] == ["device 1", "0", "0"]
    assert "It cannot run" in html
    misplaced = ps.Schedule.from_orders(
        [["0F0", "1F0", "0B0"], ["1B0"]], placement=ps.Placement.linear(2)
    )
    assert "It cannot run" in misplaced._repr_html_()


def test_a_graph_shows_its_counts() -> None:
    graph = ps.lower(ps.schedule("1f1b", 2, 3), recompute="always")
    rows = {row[0].split()[0]: row[1:] for row in cells_of(graph._repr_html_())}
    assert rows["tasks"] == ["device 0", "device 1", "all"]
    assert rows["F"] == ["3", "3", "6"]
    assert rows["R"] == ["3", "3", "6"]
    assert rows["SEND_F"] == ["3", "0", "3"]
    assert rows["all"][-1] == str(len(graph))
    wide = ps.lower(ps.schedule("1f1b", 20, 2))._repr_html_()
    assert "devices 16 to 19" in wide


@pytest.mark.slow
def test_timelines_and_comparisons_show_a_figure_without_leaving_one_open() -> None:
    predicted = simulated()
    comparison = ps.Comparison(predicted, measured(predicted))
    for html in (predicted._repr_html_(), comparison._repr_html_()):
        (image,) = parsed(html).iter("img")
        assert image.attrib["src"].startswith("data:image/png;base64,")
    assert "makespan 3" in predicted._repr_html_()
    assert "peak memory 456 MiB" in predicted._repr_html_()
    assert [row[0].split()[0] for row in cells_of(html)][1:3] == ["F", "SEND_F"]
    assert plt.get_fignums() == []
    stopped = partial(predicted, 0.09)
    assert f"of {len(stopped)} tasks ran" in stopped._repr_html_()


@pytest.mark.slow
def test_names_cannot_break_out_of_html() -> None:
    evil = '"><script>alert(1)</script>'
    timeline = simulated(n=2, m=2).with_name(evil)
    schedule = dataclasses.replace(ps.schedule("1f1b", 2, 2), name=evil)
    comparison = ps.Comparison(timeline, timeline)
    graph = timeline.graph.with_name(evil)
    for what in (timeline, schedule, comparison, graph):
        assert "<script>" not in what._repr_html_()


def test_everything_that_is_named_exists() -> None:
    assert all(hasattr(plot, name) for name in plot.__all__)
    assert set(SENDS) <= set(Op)
