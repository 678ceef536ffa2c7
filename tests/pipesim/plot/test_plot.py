"""Figures, by the geometry of their artists."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from PIL import Image

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, TimelineError, UnknownNameError
from pipesim.ops import COMPUTE, SENDS, TRANSFERS, Op
from pipesim.plot import style
from pipesim.plot.box_labels import LARGEST, SMALLEST, BoxLabels, points_per_unit
from pipesim.timeline.timeline import Timeline

MIB = 1 << 20
COSTS = ps.Costs(
    forward=0.010,
    backward=0.020,
    optimizer_step=0.004,
    output_bytes=4 * MIB,
    activation_bytes=64 * MIB,
    parameter_bytes=100 * MIB,
    network=ps.Network(latency=0.0004, bandwidth=2e9),
)


@pytest.fixture(autouse=True)
def _no_figures_left() -> Any:
    """Pyplot draws into memory; what a test opens through it is closed."""
    mpl.use("Agg")
    yield
    plt.close("all")


def simulated(
    name: str = "1f1b", n: int = 4, m: int = 8, costs: ps.Costs = COSTS, **options: Any
) -> Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, n, m), **options), costs)


def measured(timeline: Timeline, seed: int = 0) -> Timeline:
    """A run of the same tasks, noisier and slower."""
    assert timeline.costs is not None
    tasks = timeline.costs.of(timeline.graph)
    noise = np.random.default_rng(seed).normal(0.05, 0.05, len(tasks.duration))
    return ps.simulate(
        timeline.graph, dataclasses.replace(tasks, drawn=tasks.duration * np.exp(noise))
    ).with_name("run")


def axes(width: float = 7.16, height: float = 2.0) -> Axes:
    return Figure(figsize=(width, height), layout="constrained").add_subplot()


def artist_of(ax: Axes, gid: str) -> Any:
    """The one artist with this gid."""
    (artist,) = [artist for artist in ax.get_children() if artist.get_gid() == gid]
    return artist


def drawn(ax: Axes) -> set[str]:
    return {str(artist.get_gid()) for artist in ax.get_children() if artist.get_gid()}


def boxes(ax: Axes, gid: str) -> np.ndarray:
    """Left, right, low y and high y of each cell of a collection, in data coordinates."""
    corners = np.array([path.vertices[:4] for path in artist_of(ax, gid).get_paths()])
    return np.column_stack(
        [corners[..., 0].min(1), corners[..., 0].max(1), corners[..., 1].min(1),
         corners[..., 1].max(1)]
    )  # fmt: skip


def overlapping(cells: np.ndarray) -> int:
    """How many pairs of cells share more than an edge."""
    left, right, low, high = (column[:, None] for column in cells.T)
    both = (np.minimum(right, right.T) - np.maximum(left, left.T) > 1e-9) & (
        np.minimum(high, high.T) - np.maximum(low, low.T) > 1e-9
    )
    return int(np.triu(both, 1).sum())


def numbers_in(ax: Axes, gid: str = "cells:numbers") -> BoxLabels:
    artist = artist_of(ax, gid)
    assert isinstance(artist, BoxLabels)
    return artist


def legend_of(what: Any) -> list[str]:
    return [text.get_text() for text in what.get_texts()]


def partial(timeline: Timeline, until: float) -> Timeline:
    """The same timeline, stopped at ``until``."""
    start, end = timeline.start.copy(), timeline.end.copy()
    end[end > until] = np.nan
    start[start > until] = np.nan
    return Timeline(timeline.graph, start, end, timeline.nbytes, timeline.costs)


# The palette and the units.


def test_every_op_has_a_colour_of_its_own_and_a_label() -> None:
    assert set(style.PALETTE) == set(style.LABELS) == set(Op)
    assert len(set(style.PALETTE.values())) == len(set(style.LABELS.values())) == len(Op)


def test_forward_and_backward_differ_in_print_without_colour() -> None:
    grey = style.shades(np.array([Op.F, Op.B]), np.zeros(2, int)) @ [0.299, 0.587, 0.114]
    assert abs(grey[0] - grey[1]) > 0.1


def test_later_chunks_are_lighter() -> None:
    colours = style.shades(np.full(4, Op.B), np.arange(4))
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
    assert style.format_time(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3.25 * 2**30, "3.25 GiB")],
)
def test_bytes_are_written_in_a_fitting_unit(nbytes: float, text: str) -> None:
    assert style.format_bytes(nbytes) == text


def test_errors_are_written_with_their_sign() -> None:
    assert [style.format_error(e) for e in (0.017, -0.02, float("nan"))] == [
        "+1.7%",
        "\N{MINUS SIGN}2.0%",
        "n/a",
    ]


# Timelines.


def test_draws_into_the_callers_axes_and_returns_them() -> None:
    ax = axes()
    assert simulated().plot(ax=ax) is ax
    assert plt.get_fignums() == []


def test_makes_a_figure_of_a_papers_width() -> None:
    ax = plot.timeline(simulated())
    assert ax.figure.get_figwidth() == plot.TWO_COLUMNS
    assert plt.get_fignums() == [1]


def test_device_0_is_on_top() -> None:
    ax = simulated(n=3).plot(ax=axes())
    heights = ax.transData.transform([(0, device) for device in range(3)])[:, 1]
    assert heights[0] > heights[1] > heights[2]
    ticks = [tick.get_text() for tick in ax.get_yticklabels()]
    assert ticks == ["0", "1", "2"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", None])
@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_cells_are_where_and_when_their_tasks_ran(unit: str | None, recompute: str) -> None:
    timeline = simulated("gpipe", 3, 4, recompute=recompute)
    ax = timeline.plot(ax=axes(), unit=unit)
    frame, scale = timeline.frame, style.TIME_UNITS[unit or "ms"]
    assert ("cells:R" in drawn(ax)) == (recompute != "never")
    for op in sorted(COMPUTE & {Op[name] for name in frame["op"]}):
        tasks, cells = frame[frame["op"] == op.name], boxes(ax, f"cells:{op.name}")
        np.testing.assert_allclose(cells[:, 0], tasks["start"] * scale, atol=1e-12)
        np.testing.assert_allclose(cells[:, 1], tasks["end"] * scale)
        np.testing.assert_allclose(cells[:, 2:].mean(axis=1), tasks["device"])
        assert (np.abs(cells[:, 2:] - tasks["device"].to_numpy()[:, None]) < 0.5).all()


def test_the_unit_fits_the_makespan_unless_it_is_given() -> None:
    unit_free = ps.Costs(forward=1, backward=2)
    assert simulated(costs=unit_free).plot(ax=axes()).get_xlabel() == "Time (s)"
    assert simulated().plot(ax=axes()).get_xlabel() == "Time (ms)"
    short = ps.Costs(forward=1e-6, backward=2e-6)
    assert simulated(costs=short).plot(ax=axes()).get_xlabel() == "Time (µs)"
    assert simulated().plot(ax=axes(), unit="s").get_xlabel() == "Time (s)"


def test_bubbles_are_what_no_cell_covers() -> None:
    timeline = simulated(n=2)
    ax = timeline.plot(ax=axes(), unit="s")
    bands = boxes(ax, "bubbles")
    assert bands[:, 1].tolist() == [timeline.makespan] * 2
    assert artist_of(ax, "bubbles").get_zorder() < artist_of(ax, "cells:F").get_zorder()


def test_recompute_is_hatched_and_other_work_is_not() -> None:
    ax = simulated("gpipe", 2, 4, recompute="always").plot(ax=axes())
    assert artist_of(ax, "cells:R").get_hatch()
    assert not artist_of(ax, "cells:F").get_hatch()
    assert ax.get_legend() is not None
    assert legend_of(ax.get_legend()) == ["forward", "backward", "recompute", "optimizer"]


def test_the_legend_is_outside_the_cells_and_can_be_left_out() -> None:
    ax = simulated().plot(ax=axes(), title="1F1B")
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    assert legend.y0 >= ax.bbox.y1
    assert legend.y1 <= ax._left_title.get_window_extent().y0  # type: ignore[attr-defined]
    assert ax.get_title(loc="left") == "1F1B"
    assert simulated().plot(ax=axes(), legend=False).get_legend() is None


def test_a_legend_of_four_is_one_line_of_a_column() -> None:
    ax = simulated("gpipe", 4, 4, recompute="always").plot(ax=axes(plot.ONE_COLUMN))
    ax.figure.canvas.draw()
    assert len({text.get_window_extent().y0 for text in ax.get_legend().get_texts()[:2]}) == 1
    assert ax.get_legend().get_window_extent().height < 15 / 72 * ax.figure.dpi


def test_a_legend_stays_within_a_column() -> None:
    timeline = simulated("gpipe", 4, 4, recompute="always")
    for make in (timeline.plot, ps.Comparison(timeline, measured(timeline)).plot):
        ax = make(
            ax=axes(plot.ONE_COLUMN), **({"transfers": True} if make == timeline.plot else {})
        )
        ax.figure.canvas.draw()
        extent = ax.get_legend().get_window_extent()
        assert extent.x0 >= 0
        assert extent.x1 <= ax.figure.bbox.x1


def two_chunks() -> Timeline:
    """Two devices in a V: device 0 holds stages 0 and 3, device 1 holds 1 and 2."""
    orders = [["0F0", "3F0", "3I0", "3W0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]
    schedule = ps.Schedule.from_orders(orders, placement=ps.v_shaped(2))
    costs = ps.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)
    return ps.simulate(ps.lower(schedule), costs)


def test_stages_of_one_device_are_told_apart() -> None:
    ax = two_chunks().plot(ax=axes())
    faces = artist_of(ax, "cells:F").get_facecolors()
    stages = [task.stage for task in map(two_chunks().graph.task, range(99)[:len(two_chunks())])
              if task.op == Op.F]  # fmt: skip
    brightness = dict(zip(stages, faces[:, :3].sum(axis=1), strict=True))
    assert brightness[0] == brightness[1] < brightness[2] == brightness[3]
    assert legend_of(ax.get_legend())[-2:] == ["chunk 0", "chunk 1"]


def test_what_takes_no_time_is_not_drawn() -> None:
    ax = simulated(costs=ps.Costs(forward=1, backward=2)).plot(ax=axes(), transfers=True)
    assert "cells:STEP" not in drawn(ax)
    assert "optimizer" not in legend_of(ax.get_legend())


# Numbers in boxes.


def test_cells_carry_the_numbers_of_their_microbatches() -> None:
    timeline = simulated("gpipe", 2, 3)
    numbers = numbers_in(timeline.plot(ax=axes(), unit="s"))
    frame = timeline.frame
    frame = frame[frame["op"].isin(["F", "B"])]
    expected = zip((frame["start"] + frame["end"]) / 2, frame["device"], frame["microbatch"],
                   strict=True)  # fmt: skip
    got = zip(*numbers.centre.T, map(int, numbers.texts), strict=True)
    np.testing.assert_allclose(sorted(got), sorted(expected))
    assert len(numbers.fitting()[0]) == 12


def test_cells_of_collectives_say_which_they_are() -> None:
    """``.1`` is a bucket of gradients, ``0k`` the keys of micro-batch 0."""
    network, schedule = ps.Network(bandwidth=1), ps.schedule("gpipe", 2, 1)
    costs = ps.Costs(1, 2, parameter_bytes=4, key_bytes=4, vector_bytes=4, network=network)
    options = {"n_replicas": 2, "overlap": False, "n_buckets": 2, "sharded": [0]}
    graph = ps.lower(schedule, grad_sync="bucketed", **options)
    texts = numbers_in(ps.simulate(graph, costs).plot(ax=axes())).texts
    assert sorted(set(texts)) == [".0", ".1", "0", "0c", "0g", "0k", "0v"]


def test_numbers_vanish_when_they_do_not_fit_and_come_back() -> None:
    ax = simulated("1f1b", 8, 64).plot(ax=axes(3.5, 2.0), unit="ms")
    numbers = numbers_in(ax)
    assert len(numbers.fitting()[0]) == 0
    ax.figure.set_size_inches(60, 6)
    assert len(numbers.fitting()[0]) == len(numbers.texts) == 2 * 8 * 64
    ax.figure.set_size_inches(3.5, 2.0)
    ax.set_xlim(0, 100)
    ax.set_ylim(2.5, -0.5)
    assert len(numbers.fitting()[0]) > 0


def test_numbers_vanish_in_rows_that_are_too_low() -> None:
    assert len(numbers_in(simulated("gpipe", 32, 2).plot(ax=axes(7, 1))).fitting()[0]) == 0


@pytest.mark.parametrize("width", [3.5, 5.0, 7.16, 20.0])
def test_numbers_that_are_drawn_lie_within_their_cells(width: float) -> None:
    """By the outlines of the very glyphs."""
    for timeline in (simulated("1f1b", 4, 12), measured(simulated("gpipe", 4, 12))):
        ax = timeline.plot(ax=axes(width))
        ax.figure.canvas.draw()
        numbers = numbers_in(ax)
        fitting, size = numbers.fitting()
        assert SMALLEST <= size <= LARGEST
        x, y = points_per_unit(ax)
        for index in fitting:
            text = TextPath((0, 0), numbers.texts[index], prop=FontProperties(size=size))
            extent = text.get_extents()
            assert extent.width < numbers.width[index] * x
            assert extent.height < numbers.height[index] * y


def test_numbers_of_an_operation_are_drawn_all_or_none() -> None:
    """Twelve micro-batches in a column: B has room for two digits, F has not."""
    ax = simulated("1f1b", 4, 16).plot(ax=axes(4.5))
    numbers = numbers_in(ax)
    of_drawn = numbers.kinds[numbers.fitting()[0]].tolist()
    assert of_drawn == [Op.B] * (4 * 16)


def test_a_number_that_does_not_fit_its_cell_is_left_out() -> None:
    ax = axes(7, 1)
    ax.set_xlim(0, 61)
    width, kinds = np.append(np.full(60, 1.0), 0.7), np.zeros(61, np.int8)
    numbers = BoxLabels(
        np.arange(61.0), np.zeros(61), width, np.ones(61), ["7"] * 61, ["k"] * 61, kinds
    )
    ax.add_artist(numbers)
    assert numbers.fitting()[0].tolist() == list(range(60))


def texts_in(ax: Axes, path: Path) -> list[str]:
    plot.save(ax, path)
    texts = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts]


def test_numbers_are_drawn_as_text(tmp_path: Path) -> None:
    timeline = simulated("1f1b", 2, 2)
    with_numbers = texts_in(timeline.plot(ax=axes()), tmp_path / "with.svg")
    without = texts_in(timeline.plot(ax=axes(), numbers=False), tmp_path / "without.svg")
    for text in without:
        with_numbers.remove(text)
    assert sorted(with_numbers) == ["0"] * 4 + ["1"] * 4


def test_a_large_timeline_is_a_few_artists() -> None:
    timeline = simulated("1f1b", 32, 256)
    ax = timeline.plot(ax=axes(7.16, 6), transfers=True, dependencies=True)
    assert len(ax.get_children()) < 40
    assert len(boxes(ax, "cells:F")) == 32 * 256
    assert len(numbers_in(ax).fitting()[0]) == 0
    ax.figure.canvas.draw()
    extents = [tick.get_window_extent() for tick in ax.get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(extents))


# Transfers and dependencies.


@pytest.mark.parametrize("streams", ["per_peer", "single", "per_microbatch"])
def test_transfers_have_lanes_of_their_own(streams: str) -> None:
    timeline = simulated(streams=streams)
    assert not any("SEND" in gid for gid in drawn(timeline.plot(ax=axes())))
    ax = timeline.plot(ax=axes(), transfers=True, unit="s")
    frame = timeline.frame
    everything = []
    for op in sorted({Op[name] for name in frame["op"]}):
        tasks, cells = frame[frame["op"] == op.name], boxes(ax, f"cells:{op.name}")
        everything.append(cells)
        np.testing.assert_allclose(cells[:, :2], tasks[["start", "end"]], atol=1e-12)
        assert (np.abs(cells[:, 2:].mean(axis=1) - tasks["device"]) < 0.5).all()
        below = cells[:, 2:].mean(axis=1) > tasks["device"]
        assert (below == (op in TRANSFERS)).all()
    # No two lanes share any height, whatever the times of their messages.
    lanes = np.unique(np.round(np.concatenate(everything)[:, 2:], 9), axis=0)
    assert overlapping(np.column_stack([np.zeros(len(lanes)), np.ones(len(lanes)), lanes])) == 0


def test_messages_of_pure_latency_are_ticks() -> None:
    costs = dataclasses.replace(COSTS, network=ps.Network(latency=0.001))
    timeline = simulated(n=2, m=3, costs=costs)
    ax = timeline.plot(ax=axes(), transfers=True, unit="s")
    ticks = np.array([path.vertices for path in artist_of(ax, "cells:instant").get_paths()])
    frame = timeline.frame
    messages = frame[frame["op"].isin(op.name for op in TRANSFERS)]
    np.testing.assert_allclose(sorted(ticks[:, 0, 0]), sorted(messages["start"]))
    assert len(ticks) == 12
    assert "send output" in legend_of(ax.get_legend())


def test_transfers_on_the_compute_stream_are_drawn_there() -> None:
    timeline = simulated(overlap=False)
    for transfers in (False, True):
        ax = timeline.plot(ax=axes(), transfers=transfers)
        gids = sorted(gid for gid in drawn(ax) if gid.split(":")[1:] and gid[6:] in Op.__members__)
        cells = np.concatenate([boxes(ax, gid) for gid in gids])
        assert len(cells) == (timeline.duration > 0).sum() > (timeline.graph.is_op(COMPUTE)).sum()
        assert set(np.round(cells[:, 2:].mean(axis=1), 9)) == {0.0, 1.0, 2.0, 3.0}
        assert overlapping(cells) == 0


def test_messages_next_to_nothing_long_take_no_gaps_away() -> None:
    fast = dataclasses.replace(COSTS, network=ps.Network(bandwidth=1e15))
    ax = simulated(overlap=False, costs=fast, recompute="always").plot(ax=axes())
    assert artist_of(ax, "cells:F").get_linewidth()[0] > 0.2
    assert artist_of(ax, "cells:R").get_hatch()


def test_one_device_has_no_transfers_to_draw() -> None:
    ax = simulated(n=1).plot(ax=axes(), transfers=True, dependencies=True)
    assert boxes(ax, "cells:F")[:, 2:].mean() == 0
    assert "dependencies" not in drawn(ax)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"recompute": "always"}])
def test_an_arrow_for_each_output_and_gradient(options: dict[str, Any]) -> None:
    timeline = simulated("1f1b", 3, 4, **options)
    ax = timeline.plot(ax=axes(), dependencies=True, unit="s")
    arrows = artist_of(ax, "dependencies")
    frame = timeline.frame.set_index(["op", "stage", "microbatch"])
    expected = []
    for m in range(4):
        for stage in range(2):
            for op, first, second in (("F", stage, stage + 1), ("B", stage + 1, stage)):
                begin, end = frame.loc[(op, first, m), "end"], frame.loc[(op, second, m), "start"]
                expected.append((begin, end, second - first))
    got = zip(arrows.X, arrows.X + arrows.U, np.sign(arrows.V), strict=True)
    np.testing.assert_allclose(sorted(got), sorted(expected), atol=1e-12)
    # Each begins on the device of its producer, and ends on that of its consumer.
    producers = np.round(arrows.Y)
    assert (np.round(arrows.Y + arrows.V) == producers + np.sign(arrows.V)).all()


# What did not end, and what never began.


def test_unfinished_tasks_are_open_cells() -> None:
    timeline = partial(simulated(), 0.09)
    ax = timeline.plot(ax=axes(), unit="s")
    frame = timeline.frame
    unfinished = frame[frame["end"].isna() & (frame["stream"] == "compute")]
    cells = boxes(ax, "cells:unfinished")
    assert len(cells) > 0
    np.testing.assert_allclose(cells[:, 0], unfinished["start"])
    assert (cells[:, 0] < 0.99 * ax.get_xlim()[1]).all()
    assert (cells[:, 1] > ax.get_xlim()[1]).all()
    assert "unfinished" in legend_of(ax.get_legend())
    assert "cells:unfinished" not in drawn(simulated().plot(ax=axes()))
    ax.figure.canvas.draw()


def test_a_timeline_in_which_nothing_ran() -> None:
    nothing = partial(simulated(), -1.0)
    for ax in (
        nothing.plot(ax=axes(), transfers=True, dependencies=True),
        ps.Comparison(simulated(), nothing).plot(ax=axes()),
    ):
        ax.figure.canvas.draw()
    assert nothing.plot(ax=axes()).get_xlim() == (0, 1)
    assert "nothing ran" in ax.get_title(loc="right")


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
    assert legend_of(ax.get_legend())[:2] == ["predicted", "measured"]


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
    assert [ax.get_title(loc="left") for ax in figure.axes] == list(comparisons)
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
        "predicted", "measured", "forward", "backward", "recompute", "optimizer"
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
    np.testing.assert_allclose(np.array(peaks) * MIB, timeline.peak_memory)
    assert ax.get_ylabel() == "Memory held (MiB)"
    assert legend_of(ax.get_legend()) == ["device 0", "device 1", "device 2"]
    line = artist_of(ax, "memory:2")
    assert line.get_drawstyle() == "steps-post"
    assert line.get_xdata()[-1] == timeline.makespan * 1e3


def test_few_of_many_devices_are_named() -> None:
    ax = plot.memory(simulated("1f1b", 20, 2), ax=axes())
    assert legend_of(ax.get_legend()) == [f"device {d}" for d in (0, 4, 8, 12, 16)]


def test_bars_are_as_long_as_the_column_says() -> None:
    table = ps.compare({name: simulated(name) for name in ("gpipe", "1f1b")})
    for column in table:
        ax = axes()
        assert plot.bars(table, ax=ax, column=str(column)) is ax
        assert [bar.get_width() for bar in ax.patches] == table[column].tolist()
        assert [tick.get_text() for tick in ax.get_yticklabels()] == ["gpipe", "1f1b"]
        assert ax.patches[0].get_y() < ax.patches[1].get_y()
        assert ax.yaxis_inverted()
    assert [text.get_text() for text in ax.texts] == ["712 MiB", "456 MiB"]


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
        (lambda: plot.timeline(simulated().graph), ArgumentError, "no Timeline"),
        (lambda: plot.comparison(simulated()), ArgumentError, "no Comparison"),
        (lambda: plot.overlay({}), ArgumentError, "at least one comparison"),
        (lambda: plot.overlay({"a": simulated()}), ArgumentError, "no Comparison"),
        (lambda: plot.overlay([simulated()]), ArgumentError, "mapping"),
        (
            lambda: plot.overlay({"a": ps.Comparison(simulated(), simulated())}, width=0),
            ArgumentError,
            "width",
        ),
        (lambda: plot.memory("1f1b"), ArgumentError, "no Timeline"),
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


def parsed(html: str) -> ElementTree.Element:
    """The elements of HTML that must be well-formed."""
    return ElementTree.fromstring(f"<div>{html}</div>")


def cells_of(html: str) -> list[list[str]]:
    """The texts of a table's cells, row by row."""
    return [[cell.text or "" for cell in row] for row in parsed(html).iter("tr")]


def test_a_schedule_shows_itself_in_clock_cycles() -> None:
    html = ps.schedule("gpipe", 2, 2)._repr_html_()
    assert cells_of(html) == [
        ["device 0", "0", "1", "", "", "1", "0"],
        ["device 1", "", "0", "1", "1", "0", ""],
    ]
    titles = [cell.get("title") for cell in parsed(html).iter("td") if cell.get("title")]
    assert titles == ["0F0", "0F1", "0B1", "0B0", "1F0", "1F1", "1B1", "1B0"]


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
    misplaced = ps.Schedule.from_orders([["0F0", "1F0", "0B0"], ["1B0"]], placement=ps.linear(2))
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


def test_names_cannot_break_out_of_html() -> None:
    evil = '"><script>alert(1)</script>'
    timeline = simulated(n=2, m=2).with_name(evil)
    schedule = dataclasses.replace(ps.schedule("1f1b", 2, 2), name=evil)
    comparison = ps.Comparison(timeline, timeline)
    graph = timeline.graph.with_name(evil)
    for what in (timeline, schedule, comparison, graph):
        assert "<script>" not in what._repr_html_()


def test_importing_plot_loads_no_matplotlib() -> None:
    code = "import pipesim.plot, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_everything_that_is_named_exists() -> None:
    assert all(hasattr(plot, name) for name in plot.__all__)
    assert set(SENDS) <= set(Op)
