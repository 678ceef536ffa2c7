"""Timelines to draw, and the artists of figures by their gid."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import pipesim as ps
from pipesim.plot.fitting_labels import BoxLabels
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


def edges(paths: Iterable[Any]) -> np.ndarray:
    """Left, right, low y and high y of each box, from its path."""
    corners = np.array([path.vertices[:4] for path in paths])
    x, y = corners[..., 0], corners[..., 1]
    return np.column_stack([x.min(1), x.max(1), y.min(1), y.max(1)])


def boxes(ax: Axes, gid: str) -> np.ndarray:
    """`edges` of each cell of a collection, in data coordinates."""
    return edges(artist_of(ax, gid).get_paths())


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
