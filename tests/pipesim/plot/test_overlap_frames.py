"""Frames around what runs as one action, by the geometry of their artists."""

from __future__ import annotations

import numpy as np
import pytest
from figure_artists import axes
from matplotlib.axes import Axes
from simulated_runs import run_schedule

import pipesim as ps
from pipesim.ops import Overlapped

COSTS = ps.Costs(forward=1, backward=2, input_grad=1, weight_grad=1)


def frames(ax: Axes, gid: str = "cells:overlapped") -> list[tuple[float, ...]]:
    """Return left, right, top and bottom of each frame, in order."""
    artists = [artist for artist in ax.collections if artist.get_gid() == gid]
    corners = [path.vertices[:4] for artist in artists for path in artist.get_paths()]
    sides = [(*np.sort(c[:, 0])[[0, -1]], *np.sort(c[:, 1])[[0, -1]]) for c in corners]
    return sorted(tuple(np.round(side, 9).tolist()) for side in sides)


def labels(ax: Axes) -> list[str]:
    """Return what the legend says."""
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_a_pair_has_one_frame() -> None:
    """By hand: on one device, F of the second micro-batch with B of the first, from 1 to 4 s."""
    timeline = run_schedule(
        ps.Schedule.from_orders([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]), COSTS
    )
    ax = timeline.plot(ax=axes())
    assert frames(ax) == [(1.0, 4.0, -0.4, 0.4)]
    assert labels(ax) == ["forward", "backward", "overlapped"]


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("transfers", [False, True])
def test_every_pair_is_framed(name: str, transfers: bool) -> None:
    """From the start of its F to the end of its B, on its device."""
    schedule = ps.schedule(name, 4, 10)
    timeline = run_schedule(schedule, COSTS)
    table = timeline.frame.query("op in ('F', 'B')")
    cells = table.set_index(["device", "op", "stage", "microbatch"])
    expected = []
    for device, order in enumerate(schedule.orders):
        for pair in order:
            if isinstance(pair, Overlapped):
                f, b = pair.forward, pair.backward
                start = cells.loc[device, "F", f.stage, f.microbatch]["start"]
                end = cells.loc[device, "B", b.stage, b.microbatch]["end"]
                expected.append((device, start, end))
    ax = timeline.plot(ax=axes(), transfers=transfers)
    actual = [(round((y0 + y1) / 2 + 0.17 * transfers), x0, x1) for x0, x1, y0, y1 in frames(ax)]
    np.testing.assert_allclose(sorted(actual), sorted(expected))


def test_no_frames_without_pairs() -> None:
    """Nor does the legend name them."""
    ax = run_schedule(ps.schedule("chimera", 4, 8), COSTS).plot(ax=axes())
    assert frames(ax) == []
    assert "overlapped" not in labels(ax)


def test_a_pair_that_did_not_end_has_no_frame() -> None:
    """Its F or its B is drawn as unfinished already."""
    whole = run_schedule(ps.Schedule.from_orders([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]), COSTS)
    start, end = whole.start.copy(), whole.end.copy()
    start[start > 2.5] = np.nan
    end[end > 2.5] = np.nan
    cut = ps.Timeline(whole.graph, start, end, whole.nbytes, whole.costs)
    assert frames(cut.plot(ax=axes())) == []


def test_overlays_frame_both_runs() -> None:
    """The predicted and the measured one, each in its lane."""
    schedule = ps.schedule("dualpipe", 2, 4)
    timeline = run_schedule(schedule, COSTS)
    ax = ps.Comparison(predicted=timeline, measured=timeline).plot(ax=axes())
    n_pairs = sum(isinstance(a, Overlapped) for o in schedule.orders for a in o)
    gids = {str(artist.get_gid()) for artist in ax.collections}
    framed = sorted(gid for gid in gids if gid.endswith(":overlapped"))
    assert len(framed) == 2
    assert [len(frames(ax, gid)) for gid in framed] == [n_pairs, n_pairs]
    assert "overlapped" in labels(ax)
