"""Timelines as figures: cells, numbers, legends, transfers and dependencies."""

from __future__ import annotations

import dataclasses
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
from figure_artists import (
    COSTS,
    artist_of,
    axes,
    boxes,
    drawn,
    legend_of,
    measured,
    numbers_in,
    overlapping,
    partial,
    simulated,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, LegibilityWarning
from pipesim.ops import COMPUTE, TRANSFERS, Op
from pipesim.plot.fitting_labels import BoxLabels, points_per_unit
from pipesim.timeline.timeline import Timeline
from pipesim.utils.texts import TIME_UNITS

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


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", None])
@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_cells_are_where_and_when_their_tasks_ran(unit: str | None, recompute: str) -> None:
    timeline = simulated("gpipe", 3, 4, recompute=recompute)
    ax = timeline.plot(ax=axes(), unit=unit)
    frame, scale = timeline.frame, TIME_UNITS[unit or "ms"]
    assert ("cells:R" in drawn(ax)) == (recompute != "never")
    for op in sorted(COMPUTE & {Op[name] for name in frame["op"]}):
        tasks, cells = frame[frame["op"] == op.name], boxes(ax, f"cells:{op.name}")
        np.testing.assert_allclose(cells[:, 0], tasks["start"] * scale, atol=1e-12)
        np.testing.assert_allclose(cells[:, 1], tasks["end"] * scale)
        np.testing.assert_allclose(cells[:, 2:].mean(axis=1), tasks["device"])
        assert (np.abs(cells[:, 2:] - tasks["device"].to_numpy()[:, None]) < 0.5).all()


@pytest.mark.parametrize("draw", ["plot", "memory", "idle"])
def test_shared_axes_are_as_long_as_the_longest(draw: str) -> None:
    """Whichever is drawn last; and as high as that of most devices."""
    steps = [simulated(n=n, m=m) for n, m in ((2, 2), (4, 8), (3, 4))]
    figure = Figure(layout="constrained")
    alone, shared = Figure().subplots(3, 1), figure.subplots(3, 1, sharex=True, sharey=True)
    for both in (alone, shared):
        for ax, step in zip(both, steps, strict=True):
            (step.plot if draw == "plot" else getattr(step.plot, draw))(ax=ax, unit="s")
    for limits in ("get_xlim", "get_ylim"):
        longest = max((getattr(ax, limits)() for ax in alone), key=max)
        assert {getattr(ax, limits)() for ax in shared} == {longest}
    if draw == "plot":
        assert len(shared[0].get_yticks()) == 4


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


@pytest.mark.parametrize("place", ["top", "bottom", "right"])
def test_a_legend_is_beside_the_axes(place: Any) -> None:
    """Of one axes, and of the axes of panels; and nothing is cut."""
    figure = plot.panels({"a": simulated(), "b": simulated()}, legend=place, height=3)
    ax = simulated().plot(ax=axes(), legend=place)
    assert figure.get_figheight() == 3
    for whole, legend, inner in ((ax.figure, ax.get_legend(), [ax]),
                                 (figure, figure.legends[0], figure.axes)):  # fmt: skip
        whole.draw_without_rendering()
        box = legend.get_window_extent()
        labels = [inner[-1].xaxis.label.get_window_extent(), *(x.bbox for x in inner)]
        assert {
            "top": box.y0 >= max(label.y1 for label in labels),
            "bottom": box.y1 <= min(label.y0 for label in labels),
            "right": box.x0 >= max(label.x1 for label in labels),
        }[place]
        assert 0 <= box.x0 < box.x1 <= whole.bbox.x1
        assert 0 <= box.y0 < box.y1 <= whole.bbox.y1


def test_a_height_is_that_of_a_new_figure() -> None:
    timeline = simulated(n=2, m=2)
    drawings = [timeline.plot(height=2.5), plot.memory(timeline, height=2.5),
                timeline.plot.idle(height=2.5), timeline.graph.plot(height=2.5),
                plot.bars(ps.compare({"1f1b": timeline}), height=2.5),
                plot.accuracy([1.0], [1.0], height=2.5),
                ps.Comparison(timeline, timeline).plot(height=2.5)]  # fmt: skip
    assert [ax.figure.get_figheight() for ax in drawings] == [2.5] * 7
    assert plot.overlay({"a": ps.Comparison(timeline, timeline)}, height=2.5).get_figheight() == 2.5
    with plot.style(height=1.5):
        assert timeline.plot().figure.get_figheight() == 1.5
        assert timeline.plot(height=2.5).figure.get_figheight() == 2.5
    with pytest.raises(ArgumentError, match="give one of both"):
        timeline.plot(ax=axes(), height=2)


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
    schedule = ps.Schedule.from_orders(orders, placement=ps.Placement.v_shaped(2))
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
    assert len(numbers.fitting().indices) == 12


def test_cells_of_collectives_say_which_they_are() -> None:
    """``.1`` is a bucket of gradients, ``0k`` the keys of micro-batch 0."""
    network, schedule = ps.Network(bandwidth=1), ps.schedule("gpipe", 2, 1)
    costs = ps.Costs(1, 2, parameter_bytes=4, key_bytes=4, vector_bytes=4, network=network)
    options = {"n_replicas": 2, "overlap": False, "n_buckets": 2, "sharded": [0]}
    graph = ps.lower(schedule, grad_sync="bucketed", **options)
    texts = numbers_in(ps.simulate(graph, costs).plot(ax=axes())).texts
    assert sorted(set(texts)) == [".0", ".1", "0", "0c", "0g", "0k", "0v"]


def test_numbers_vanish_with_a_warning_and_come_back() -> None:
    """The warning names a size of figure that has room."""
    ax = simulated("1f1b", 8, 64).plot(ax=axes(3.5, 2.0), unit="ms")
    numbers = numbers_in(ax)
    assert len(numbers.fitting().indices) == 0
    with pytest.warns(LegibilityWarning, match="1024 of 1024 boxes .* have no number") as caught:
        ax.figure.draw_without_rendering()
    assert caught[0].filename == __file__, "where it was plotted, not code of matplotlib that draws"
    size = re.search(r"about ([0-9.]+) by ([0-9.]+) inches", str(caught[0].message))
    assert size is not None
    ax.figure.set_size_inches(*map(float, size.groups()))
    ax.figure.draw_without_rendering()
    assert len(numbers.fitting().indices) == len(numbers.texts) == 2 * 8 * 64
    ax.figure.set_size_inches(3.5, 2.0)
    ax.set_xlim(0, 100)
    ax.set_ylim(2.5, -0.5)
    assert len(numbers.fitting().indices) > 0


@pytest.mark.parametrize("height", [1.0, 2.0, 3.0])
def test_numbers_do_not_vanish_without_a_warning(height: float) -> None:
    """In figures that are ever lower and narrower, and of every operation alike."""
    for width in (1.8, 2.4, 3.5, 7.16):
        ax = simulated("1f1b", 4, 16).plot(ax=axes(width, height))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ax.figure.draw_without_rendering()
        numbers = numbers_in(ax)
        shown = numbers.fitting()
        assert 5 <= shown.size <= 7
        if not caught:
            of_op = [np.isin(shown.indices, np.flatnonzero(kind)).sum()
                     for kind in (numbers.width < 15, numbers.width > 15)]  # fmt: skip
            assert min(of_op) >= 0.5 * max(of_op) > 0


def test_every_fifth_micro_batch_has_numbers_where_not_all_fit() -> None:
    """The same ones in all axes of a figure, and no two numbers meet."""
    steps = {"1f1b": simulated("1f1b", 4, 16), "gpipe": simulated("gpipe", 4, 24)}
    figure = plot.panels(steps, columns=1, height=2.5)
    figure.draw_without_rendering()
    shown = {name: numbers_in(ax).fitting() for name, ax in zip(steps, figure.axes, strict=True)}
    assert {labels.every for labels in shown.values()} == {5}
    assert {labels.size for labels in shown.values()} == {5}
    for ax, labels in zip(figure.axes, shown.values(), strict=True):
        numbers, points = numbers_in(ax), points_per_unit(ax)[0]
        texts = np.array(numbers.texts)[labels.indices]
        assert {int(text) % 5 for text in texts} == {0}
        for device in range(4):
            row = labels.indices[numbers.centre[labels.indices, 1] == device]
            x = np.sort(numbers.centre[row, 0]) * points
            widths = 0.6 * 5 * numbers.digits[row][np.argsort(numbers.centre[row, 0])]
            assert (np.diff(x) >= (widths[1:] + widths[:-1]) / 2).all()


def test_numbers_have_one_size_in_a_figure_and_a_smallest_one() -> None:
    predicted = simulated("1f1b", 4, 12)
    ax = ps.Comparison(predicted, measured(predicted)).plot(ax=axes(5, 2))
    ax.figure.draw_without_rendering()
    sizes = {numbers_in(ax, f"{name}:numbers").fitting().size for name in ("predicted", "measured")}
    assert len(sizes) == 1
    with pytest.warns(LegibilityWarning, match="letters of 14 points"):
        simulated("1f1b", 4, 12).plot(ax=axes(3.5, 2), numbers=14).figure.draw_without_rendering()


def test_numbers_vanish_in_rows_that_are_too_low() -> None:
    ax = simulated("gpipe", 32, 2).plot(ax=axes(7, 1))
    assert len(numbers_in(ax).fitting().indices) == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [3.5, 5.0, 7.16, 20.0])
def test_numbers_that_are_drawn_lie_within_their_cells(width: float) -> None:
    """By the outlines of the very glyphs."""
    for timeline in (simulated("1f1b", 4, 12), measured(simulated("gpipe", 4, 12))):
        ax = timeline.plot(ax=axes(width))
        ax.figure.canvas.draw()
        numbers = numbers_in(ax)
        fitting, size, every, _ = numbers.fitting()
        assert 5 <= size <= 7
        if every > 1:
            continue
        x, y = points_per_unit(ax)
        for index in fitting:
            text = TextPath((0, 0), numbers.texts[index], prop=FontProperties(size=size))
            extent = text.get_extents()
            assert extent.width < numbers.width[index] * x
            assert extent.height < numbers.height[index] * y


def test_a_number_that_does_not_fit_its_cell_is_left_out() -> None:
    ax = axes(7, 1)
    ax.set_xlim(0, 61)
    width = np.append(np.full(60, 1.0), 0.5)
    numbers = BoxLabels(np.arange(61.0), np.zeros(61), width, np.ones(61), ["7"] * 61, ["k"] * 61)
    ax.add_artist(numbers)
    assert numbers.fitting().indices.tolist() == list(range(60))


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


@pytest.mark.slow
def test_a_large_timeline_is_a_few_artists() -> None:
    timeline = simulated("1f1b", 32, 256)
    ax = timeline.plot(ax=axes(7.16, 6), transfers=True, dependencies=True)
    assert len(ax.get_children()) < 40
    assert len(boxes(ax, "cells:F")) == 32 * 256
    assert len(numbers_in(ax).fitting().indices) == 0
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


def test_streams_without_lasting_messages_have_no_lane_beside_others() -> None:
    """Ticks would distract from collectives, and leave little room for them."""
    network = ps.Network(bandwidth=1.0)
    costs = ps.Costs(1, 2, parameter_bytes=4, network=network)
    ax = simulated("1f1b", 2, 2, costs, n_replicas=2).plot(ax=axes(), transfers=True)
    assert "cells:REDUCE_GRAD" in drawn(ax)
    assert not artist_of(ax, "cells:instant").get_segments()
    lane = boxes(ax, "cells:REDUCE_GRAD")[0]
    assert lane[3] - lane[2] > 0.2
    assert legend_of(ax.get_legend()) == ["forward", "backward", "reduce gradients"]
