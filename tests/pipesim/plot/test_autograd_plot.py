"""Figures of autograd graphs, by the geometry of their artists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import pipesim as ps
from pipesim import plot
from pipesim.errors import ArgumentError, LegibilityWarning
from pipesim.graph import AutogradGraph, AutogradNode
from pipesim.ops import Op
from pipesim.plot.autograd_layout import name_lines
from pipesim.plot.fitting_labels import NodeTexts


def fork_and_join(m: int, n: int, *, dependencies: bool, position: int | None = 0) -> AutogradGraph:
    """Return torchgpipe's nodes of m micro-batches and n partitions, all recomputed."""
    nodes: list[AutogradNode] = []
    edges: list[tuple[int, int, bool]] = []

    def add(
        name: str, i: int | None, j: int | None, *sources: int, phony: Sequence[int] = ()
    ) -> int:
        place = None if position is None else len(nodes)
        nodes.append(AutogradNode(name, i, j, position=place, thread=place and 0))
        edges.extend((s, len(nodes) - 1, s in phony) for s in sources)
        return len(nodes) - 1

    ends = [add("Gather", None, None)] * m
    for j in range(n)[::-1]:
        join = -1
        for i in range(m)[::-1]:
            if dependencies and i < m - 1:
                ends[i] = add("Fork", i, j, ends[i], join, phony=[join])
            ends[i] = add("Join", i, j, ends[i])
            again = add("Recompute", i, j, ends[i], phony=[ends[i]])
            ends[i] = add("Fork", i, j, ends[i], again, phony=[again])
            ends[i] = add("Wait", i, j, add("Layers", i, j, ends[i]))
            ends[i] = add("Copy", i, j, ends[i])
            if dependencies and i:
                join = ends[i] = add("Join", i, j, ends[i])
    return AutogradGraph(nodes, edges)


def drawn(graph: AutogradGraph, **options: Any) -> Axes:
    ax = graph.plot(**options)
    ax.figure.figure.draw_without_rendering()
    return ax


def boxes(ax: Axes) -> dict[str, list[tuple[float, float, float, float]]]:
    """Left, top, right and bottom of the boxes of each node."""
    by_node: dict[str, list[tuple[float, float, float, float]]] = {}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and str(patch.get_gid()).startswith("node:"):
            (x, y), width, height = patch.get_xy(), patch.get_width(), patch.get_height()
            by_node.setdefault(str(patch.get_gid()), []).append((x, y, x + width, y + height))
    return by_node


def texts(ax: Axes) -> list[str]:
    (artist,) = (x for x in ax.artists if isinstance(x, NodeTexts))
    assert len(artist.fitting()[0]) == len(artist.texts)
    return artist.texts


GRAPHS = {
    "without": fork_and_join(4, 3, dependencies=False),
    "with": fork_and_join(4, 3, dependencies=True),
    "folded": fork_and_join(4, 6, dependencies=True),
    "chains": AutogradGraph(
        [AutogradNode(f"N{k}") for k in range(60)],
        [(k, k + d) for d in (1, 3, 20) for k in range(0, 60 - d, d)],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_and_arrow_heads_are_visible(name: str) -> None:
    """No two boxes overlap; no arrow passes through a box; all texts fit."""
    ax = drawn(GRAPHS[name])
    every = np.array([box for own in boxes(ax).values() for box in own])
    assert len(every) == len(GRAPHS[name])
    left, top, right, bottom = every.T
    overlap = (left[:, None] < right) & (left < right[:, None])
    overlap &= (top[:, None] < bottom) & (top < bottom[:, None])
    assert overlap.sum() == len(every)
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) >= len(GRAPHS[name].edges)
    for arrow in arrows:
        points = np.asarray(arrow._path_original.vertices)  # type: ignore[attr-defined]
        part = np.linspace(0, len(points) - 1, 201)
        x, y = (np.interp(part, range(len(points)), z)[:, None] for z in points.T)
        inside = (left + 0.01 < x) & (x < right - 0.01) & (top + 0.01 < y) & (y < bottom - 0.01)
        assert not inside.any()
    assert len(texts(ax)) >= len(every)


def test_lanes_and_partitions() -> None:
    """A lane a micro-batch, a block a partition, whose equal nodes are in one column."""
    graph = GRAPHS["with"]
    ax = drawn(graph)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"micro-batch {i}" for i in range(4)
    ]
    labels = sorted((label.get_position()[0], label.get_text()) for label in ax.get_xticklabels())
    assert [text for _, text in labels] == [f"partition {j}" for j in range(3)]
    places = {k: boxes(ax)[f"node:{k}"][0] for k in range(len(graph))}
    for j in range(3):
        for name in ("Layers", "Copy", "Recompute"):
            members = [k for k, x in enumerate(graph.nodes) if (x.name, x.partition) == (name, j)]
            assert len({places[k][0] for k in members}) == 1
            rows = [places[k][1] for k in sorted(members, key=lambda k: graph.nodes[k].microbatch)]
            assert rows == sorted(set(rows))
    left = [places[k][0] for k, x in enumerate(graph.nodes) if x.name == "Layers"]
    assert left == sorted(left, reverse=True)  # the engine goes from right to left
    _, top, _, bottom = places[0]  # Gather spans all lanes
    assert top <= min(place[1] for place in places.values()) + 1e-9
    assert bottom >= max(place[3] for k, place in places.items() if graph.nodes[k].name == "Copy")


def test_edges_from_fork_to_join_are_dashed() -> None:
    ax = drawn(GRAPHS["with"])
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    dashed = [arrow for arrow in arrows if arrow.get_linestyle() != "-"]
    assert {arrow.get_gid() for arrow in dashed} == {"phony"}
    assert len(dashed) == 2 * 12 + 3 * 3  # of each recompute; between four micro-batches
    assert sum(arrow.get_gid() == "phony" for arrow in arrows) == len(dashed)


def test_name_and_position_stand_in_two_lines() -> None:
    """Before a backward there are names alone, and the figure says so."""
    graph = fork_and_join(2, 1, dependencies=False)
    ax = drawn(graph)
    assert texts(ax)[:4] == ["Gather", "0", "Join", "1"]
    assert ax.get_title("right") == "13 nodes; numbers: order of the engine"
    ax = drawn(fork_and_join(2, 1, dependencies=False, position=None))
    assert texts(ax)[:2] == ["Gather", "Join"]
    assert ax.get_title("right") == "13 nodes; no backward has run it yet"


def test_nodes_of_several_tasks() -> None:
    """A frame holds the node, above the lanes, and a box for each micro-batch and partition."""
    tasks = [ps.Action(1, Op.R, 0), ps.Action(1, Op.B, 0), ps.Action(0, Op.R, 1)]
    nodes = [AutogradNode("Gather"), AutogradNode("Tasks", tasks=tuple(tasks))]
    ax = drawn(AutogradGraph(nodes, [(0, 1)]))
    assert texts(ax) == ["Gather", "Tasks", "R B", "R"]
    node, first, second = boxes(ax)["node:1"]
    assert node[1] < first[1] < second[1]
    (frame,) = (patch for patch in ax.patches if patch.get_gid() == "frame")
    assert isinstance(frame, Rectangle)
    assert frame.get_y() < node[1]
    assert frame.get_y() + frame.get_height() > second[3]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Copy", ["Copy"]),
        ("AccumulateGrad", ["Accumulate", "Grad"]),
        ("NativeLayerNorm", ["NativeLayer", "Norm"]),
        ("ScaledDotProductFlashAttentionForCpu", ["ScaledDot", "Product…"]),
        ("CompiledFunction", ["Compiled", "Function"]),
        ("a_function_of_the_user", ["a_function…"]),
        ("MM", ["MM"]),
    ],
)
def test_long_names_have_two_lines(name: str, lines: list[str]) -> None:
    assert name_lines(name) == lines


def test_small_axes_warn() -> None:
    ax = Figure(figsize=(4.0, 2.0), layout="constrained").add_subplot()
    GRAPHS["with"].plot(ax=ax)
    with pytest.warns(LegibilityWarning, match="nodes of this figure have no text"):
        FigureCanvasAgg(ax.figure.figure).draw()


def test_graphs_that_are_not_drawn() -> None:
    large = AutogradGraph([AutogradNode("Add")] * 301, [])
    with pytest.raises(ArgumentError, match="at most 300 nodes, this graph has 301"):
        plot.autograd_graph(large)
    assert "301 nodes" in plot.autograd_graph_html(large)
    assert "<img" not in plot.autograd_graph_html(large)
    with pytest.raises(ArgumentError, match="needs a node"):
        plot.autograd_graph(AutogradGraph([], []))


def test_a_page_has_the_drawing_and_all_nodes(tmp_path: Path) -> None:
    """Each box tells its node's attributes; names are escaped; nothing is loaded."""
    nodes = [AutogradNode("<b>&", 1, 2, position=0, thread=0), AutogradNode("Add")]
    path = tmp_path / "graph.html"
    AutogradGraph(nodes, [(0, 1)]).to_html(path, title="<i>")
    text = path.read_text()
    assert "<title>name &lt;b&gt;&amp;, microbatch 1, partition 2, device cpu, position 0" in text
    assert "<title>&lt;i&gt;</title>" in text
    assert "default-src 'none'" in text
    assert "<b>&" not in text
    assert text.count("<tr") == 3
    with pytest.raises(ArgumentError, match="a page's file ends in"):
        AutogradGraph(nodes, []).to_html(tmp_path / "graph.svg")


def test_notebooks_show_a_picture_and_numbers() -> None:
    html = plot.autograd_graph_html(fork_and_join(2, 1, dependencies=False))
    assert "<img" in html
    assert "13 nodes, " in html
