"""Figures of dependency graphs, by the geometry of their artists."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from case_choice import covering
from figure_artists import edges
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, LegibilityWarning, UnknownNameError
from pipesim.ops import COMPUTE, Op
from pipesim.plot.dependency_plot import CODES
from pipesim.plot.figure_style import device_colours
from pipesim.plot.fitting_labels import BoxLabels, points_per_unit


def lowered(name: str = "gpipe", n: int = 3, m: int = 4, **options: Any) -> ps.TaskGraph:
    return ps.lower(ps.schedule(name, n, m), **options)


def drawn(graph: ps.TaskGraph, width: float = plot.TWO_COLUMNS, **options: Any) -> Axes:
    ax = Figure(figsize=(width, 3.0), layout="constrained").add_subplot()
    assert graph.plot(ax=ax, **options) is ax
    return ax


def boxes(ax: Axes) -> np.ndarray:
    """`edges` of each node."""
    nodes = [x for x in ax.collections if str(x.get_gid()).startswith("nodes")]
    return edges(path for artist in nodes for path in artist.get_paths())


def texts(ax: Axes) -> dict[tuple[float, float], str]:
    """What stands where: by column and row."""
    return {
        (float(x), float(y)): text
        for artist in ax.artists
        if isinstance(artist, BoxLabels)
        for (x, y), text in zip(artist.centre, artist.texts, strict=True)
    }


def arrows(ax: Axes, graph: ps.TaskGraph, sort: str) -> set[str]:
    """Both tasks of each arrow of a sort."""
    names = set()
    for patch in ax.patches:
        gid = str(patch.get_gid())
        if isinstance(patch, FancyArrowPatch) and gid.startswith(f"{sort}:"):
            tasks = gid.partition(":")[2].split(">")
            names.add(" ".join(str(graph.task(int(task))) for task in tasks))
    return names


def rows(ax: Axes, n: int) -> list[str]:
    """Each device's nodes, in columns, as text."""
    where = texts(ax)
    last = round(max(x for x, _ in where))
    return [" ".join(where.get((float(x), float(y)), ".") for x in range(last + 1))
            for y in range(n)]  # fmt: skip


def test_clock_cycles_are_columns_and_devices_are_rows() -> None:
    """GPipe with recompute: forwards to the left, backwards to the right; R fills the wait."""
    ax = drawn(lowered(n=2, m=2, recompute="always"))
    assert rows(ax, 2) == [
        "F0 F1 R1 . . B1 R0 B0 ST",
        ". F0 F1 R1 B1 R0 B0 ST .",
    ]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # device 0 on top
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Clock cycle", "Device")
    low, high = ax.get_xlim()
    assert low < boxes(ax)[:, 0].min()
    assert boxes(ax)[:, 1].max() < high


def test_rows_of_microbatches() -> None:
    """Figure 2 of the paper: four micro-batches, three partitions; arrows as it has them."""
    graph = lowered(step="none")
    ax = drawn(graph, rows="microbatch")
    assert rows(ax, 4) == [f"0F{i} 1F{i} 2F{i} 2B{i} 1B{i} 0B{i}" for i in range(4)]
    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert labels == ["0F", "1F", "2F", "2B", "1B", "0B"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Stage and operation", "Micro-batch")
    chain = [*itertools.pairwise(labels)]
    between = {f"{a}{i} {b}{i}" for a, b in chain for i in range(4)}
    assert arrows(ax, graph, "message") == {x for x in between if not x.startswith("2F")}
    down = {f"{j}F{i} {j}F{i + 1}" for j in range(3) for i in range(3)}
    up = {f"{j}B{i + 1} {j}B{i}" for j in range(3) for i in range(3)}
    assert arrows(ax, graph, "order") == down | up
    assert arrows(ax, graph, "data") == {"2F3 2B3"}
    skip = lowered(step="none", skips=[(0, 2)])
    passing = {f"0F{i} 2F{i}" for i in range(4)} | {f"2B{i} 0B{i}" for i in range(4)}
    ax = drawn(skip, rows="microbatch")
    assert arrows(ax, skip, "message") == passing | {x for x in between if x[:2] != "2F"}
    tops = np.unique(boxes(ax)[:, 2].round(6))  # of the nodes in each row
    for patch in ax.patches:  # they pass the node of the middle stage above it, in their own row
        ids = str(patch.get_gid()).partition(":")[2].split(">")
        if " ".join(str(skip.task(int(x))) for x in ids if x) in passing:
            height = patch.get_path().vertices[1:3, 1]
            row = int(np.ceil(height[0]))
            assert (row - 0.5 < height).all()
            assert (height < tops[row]).all()


def test_rows_of_microbatches_with_recompute_and_steps() -> None:
    """R right before its B; tasks of whole stages in the last row; rows of each replica."""
    ax = drawn(lowered(n=2, m=2, recompute="except_last"), rows="microbatch")
    assert rows(ax, 3) == [
        "0F0 1F0 1R0 1B0 0R0 0B0", "0F1 1F1 . 1B1 . 0B1", ". . . 1ST . 0ST"
    ]  # fmt: skip
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0", "1", "all"]
    ax = drawn(lowered("zb_h1", 2, 2, step="none"), rows="microbatch")
    assert rows(ax, 1) == ["0F0 1F0 1I0 0I0 1W0 0W0"]
    ax = drawn(lowered(n=2, m=1, n_replicas=2, step="none"), rows="microbatch")
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == ["0 of replica 0", "0 of replica 1", "all"]


def test_arrows_are_messages_data_and_order() -> None:
    graph = lowered(n=2, m=2, step="none")
    ax = drawn(graph)
    assert arrows(ax, graph, "message") == {"0F0 1F0", "0F1 1F1", "1B1 0B1", "1B0 0B0"}
    assert arrows(ax, graph, "order") == {
        "0F0 0F1", "0F1 0B1", "0B1 0B0", "1F0 1F1", "1B1 1B0"
    }  # fmt: skip
    assert arrows(ax, graph, "data") == {"1F1 1B1"}  # other arrows imply the rest
    ax = drawn(graph, order=False)
    assert arrows(ax, graph, "order") == set()
    assert arrows(ax, graph, "data") == {"1F0 1B0", "1F1 1B1"}


def test_arrows_lead_from_node_to_node() -> None:
    """From the border of the first to that of the second, to the right."""
    graph = lowered("1f1b", 3, 4, recompute="always", skips=[(0, 2)])
    ax = drawn(graph)
    edges = boxes(ax)
    centres = np.column_stack([edges[:, :2].mean(1), edges[:, 2:].mean(1)])
    for patch in ax.patches:
        if not isinstance(patch, FancyArrowPatch):
            continue
        ends = patch._path_original.vertices[[0, -1]]  # type: ignore[attr-defined]
        assert ends[0, 0] < ends[1, 0]
        for x, y in ends:
            near = (edges[:, 0] - 1e-9 <= x) & (x <= edges[:, 1] + 1e-9)
            near &= (edges[:, 2] - 1e-9 <= y) & (y <= edges[:, 3] + 1e-9)
            assert near.sum() == 1
            on_border = np.isclose([x, x, y, y], edges[near][0]).any()
            assert on_border
    assert len(centres) == len(np.unique(centres.round(6), axis=0))


#: Arguments of `lowered`.
GRAPHS: dict[str, dict[str, Any]] = {
    "recomputes": {"recompute": "always"},
    "1f1b": {"name": "1f1b"},
    "skips": {"recompute": "except_last", "skips": [(0, 2)], "portals": False},
    "compute streams": {"overlap": False, "recompute": "always"},
    "interleaved": {"name": "interleaved_1f1b", "n": 2, "m": 2},
    "buckets": {
        "name": "1f1b", "n": 2, "m": 2, "n_replicas": 2, "grad_sync": "bucketed", "n_buckets": 3,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "messages", "rows"),
    covering(itertools.product(GRAPHS, ["arrows", "labels", "nodes"], ["device", "microbatch"]), 2),
)
def test_nodes_do_not_overlap(name: str, messages: str, rows: str) -> None:
    graph = lowered(**GRAPHS[name])
    ax = drawn(graph, messages=messages, rows=rows)
    cells = boxes(ax)
    left, right, low, high = (column[:, None] for column in cells.T)
    both = (np.minimum(right, right.T) - np.maximum(left, left.T) > 1e-9) & (
        np.minimum(high, high.T) - np.maximum(low, low.T) > 1e-9
    )
    assert int(np.triu(both, 1).sum()) == 0
    n = len(graph) if messages == "nodes" else int((graph.pair < 0).sum())
    assert len(cells) == len(texts(ax)) == n


def test_messages_as_nodes_are_between_their_tasks() -> None:
    """SEND right behind what it sends, RECV right before what needs it, towards each other."""
    ax = drawn(lowered(n=2, m=2, step="none"), messages="nodes")
    where = texts(ax)
    messages = {key: text for key, text in where.items() if text[0] in "<>"}
    assert {(x, round(y)): text for (x, y), text in messages.items()} == {
        (0.5, 0): ">0", (1.5, 0): ">1", (0.5, 1): "<0", (1.5, 1): "<1",
        (3.5, 1): ">1", (4.5, 1): ">0", (3.5, 0): "<1", (4.5, 0): "<0",
    }  # fmt: skip
    assert all((y > 0 if y < 0.5 else y < 1) for _, y in messages)


def test_labels_are_the_microbatches_of_messages() -> None:
    graph = lowered(n=2, m=3)
    ax = drawn(graph, messages="labels")
    labels = [text for text in ax.texts if str(text.get_gid()).startswith("label:")]
    assert sorted(text.get_text() for text in labels) == ["0", "0", "1", "1", "2", "2"]
    assert all(0.28 < text.get_position()[1] < 0.72 for text in labels)  # between the rows


@pytest.mark.parametrize("width", [plot.ONE_COLUMN, plot.TWO_COLUMNS])
def test_texts_fit_their_nodes(width: float) -> None:
    """Four micro-batches on three devices can be read in a column."""
    for graph in (lowered(recompute="always"), lowered("1f1b", 4, 4)):
        ax = drawn(graph, width)
        ax.figure.canvas.draw()
        (numbers,) = (x for x in ax.artists if isinstance(x, BoxLabels) and x.texts)
        fitting, size, *_ = numbers.fitting()
        assert len(fitting) == len(numbers.texts)
        assert size >= 4.5
        assert (numbers.width * points_per_unit(ax)[0] > 1.3 * size).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"exchange_work": "compute"}, "D0 c0 k0 F0 v0 V0 G0 g0 B0 RG ST"),
        ({"sparse_grad_sync": "last"}, "c0 k0 F0 v0 B0 a RG ST"),
    ],
    ids=str,
)
def test_nodes_of_exchanges_are_told_apart(options: dict[str, Any], wanted: str) -> None:
    """All have a text, within the axes, and the legend and the docstring name each."""
    graph = lowered("1f1b", 2, 3, n_replicas=2, sharded=[0], **options)
    ax = graph.plot()
    ax.figure.canvas.draw()
    for artist in ax.artists:
        if isinstance(artist, BoxLabels):
            assert len(artist.fitting()[0]) == len(artist.texts)
    shown = set(texts(ax).values())
    assert set(wanted.split()) <= shown
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    for code in {text.rstrip("0123456789") for text in shown} - {"F", "B"}:
        assert len([entry for entry in legend if entry.startswith(f"{code} ")]) == 1
    cells, (low, high) = boxes(ax), ax.get_xlim()
    assert low < cells[:, 0].min()
    assert cells[:, 1].max() < high


#: Codes, before a number that their nodes do not show.
_WITHOUT_NUMBER = {"a0", "RG0", "ST0", "US0", "GN0"}


def test_the_docstring_lists_all_codes() -> None:
    words = str(plot.dependencies.__doc__).replace(",", " ").split()
    assert {f"{code}0" for code in CODES.values()} - set(words) == {
        "a0",
        "RG0",
        "ST0",
        "GN0",
    }
    assert {"a", "RG", "ST", "US", "GN", "t0"} <= set(words)


def test_small_nodes_have_a_sign_alone() -> None:
    ax = lowered("1f1b", 4, 8).plot(messages="nodes")
    ax.figure.canvas.draw()
    (small,) = (artist for artist in ax.artists if artist.get_gid() == "texts:beside")
    assert isinstance(small, BoxLabels)
    assert len(small.fitting()[0]) == len(small.texts)
    assert set(small.texts) == {">", "<"}


@pytest.mark.slow
def test_nodes_without_room_for_texts_are_warned_of() -> None:
    """With the size that has room."""
    graph = lowered("gpipe", 2, 18)
    ax = drawn(graph, plot.ONE_COLUMN)
    with pytest.warns(LegibilityWarning, match="74 of 74 nodes .* figure of about") as caught:
        FigureCanvasAgg(ax.figure.figure).draw()
    width, height = re.findall(r"([0-9.]+) by ([0-9.]+) inches", str(caught[0].message))[0]
    larger = Figure(figsize=(float(width), float(height)), layout="constrained")
    graph.plot(ax=larger.add_subplot())
    FigureCanvasAgg(larger).draw()  # warnings are errors


def test_devices_have_colours_of_their_own() -> None:
    """Recomputes are paler and hatched."""
    graph = lowered(n=4, recompute="always")
    ax = drawn(graph)
    plain, hatched = (next(c for c in ax.collections if c.get_gid() == gid)
                      for gid in ("nodes", "nodes:recompute"))  # fmt: skip
    assert len(np.unique(plain.get_facecolor(), axis=0)) == 4
    assert hatched.get_hatch()
    assert plain.get_hatch() is None
    assert len(hatched.get_paths()) == (graph.op == Op.R).sum()
    colours = device_colours(10)
    assert (colours[8:] == colours[:2]).all()
    for one, other in itertools.combinations(colours[:8], 2):
        assert np.abs(one - other).max() > 0.1


def test_the_legend_can_be_left_out() -> None:
    graph = lowered(recompute="always")
    names = [text.get_text() for text in drawn(graph).get_legend().get_texts()]
    assert names == [
        "recompute", "ST optimizer", "message", "data on one device", "order of a stream"
    ]  # fmt: skip
    assert drawn(graph, legend=False).get_legend() is None
    assert drawn(graph, title="GPipe").get_title(loc="left") == "GPipe"


def test_large_graphs_are_refused() -> None:
    graph = lowered("gpipe", 4, 38)
    assert graph.is_op(COMPUTE).sum() == 308
    with pytest.raises(ArgumentError, match=r"at most 300 tasks .* 'gpipe' has 308; lower fewer"):
        graph.plot()


def test_mistakes_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown messages 'node'; did you mean 'nodes'"):
        lowered().plot(messages="node")
    with pytest.raises(UnknownNameError, match="unknown rows 'stage'"):
        lowered().plot(rows="stage")
    with pytest.raises(ArgumentError, match=r"graph must be a pipesim\.TaskGraph, got 3"):
        plot.dependencies(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="ax must be a matplotlib Axes"):
        lowered().plot(ax=3)  # type: ignore[arg-type]
