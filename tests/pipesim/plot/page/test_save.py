"""Sizes of pages, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipesim as ps
import pipesim.plot.page.save as save
from pipesim.errors import ArgumentError, CapacityError, UnknownNameError
from pipesim.simulation import LogNormal

COSTS = ps.Costs(
    forward=1.2345e-3, backward=2.3456e-3, output_bytes=3e7, activation_bytes=1e9,
    network=ps.Network(latency=5e-6, bandwidth=1e11),
)  # fmt: skip
NOISE = ps.Noise(task=LogNormal(0.05), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "limit"), [((8, 22), 60_000), ((16, 1080), 600_000)])
def test_sizes(tmp_path: Path, shape: tuple[int, int], limit: int) -> None:
    """Pages of 1,000 and 100,000 tasks, all of whose durations differ, are small."""
    graph = ps.lower(ps.schedule("1f1b", *shape))
    assert len(graph) > 0.97 * {60_000: 1_000, 600_000: 100_000}[limit]
    predicted, measured = ps.simulate(graph, COSTS), ps.simulate(graph, COSTS, noise=NOISE)
    for item in (predicted, measured, ps.Comparison(predicted, measured)):
        item.to_html(tmp_path / "page.html")
        assert (tmp_path / "page.html").stat().st_size <= limit


def test_too_many_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), COSTS)
    monkeypatch.setattr(save, "MAX_TASKS", 2 * len(timeline))
    ps.plot.to_html(tmp_path / "page.html", [timeline, timeline])
    with pytest.raises(CapacityError, match=r"a page of 54 tasks .* timeline.plot\(\) draws any"):
        ps.plot.to_html(tmp_path / "page.html", [timeline] * 3)


def test_bad_arguments(tmp_path: Path) -> None:
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", 2, 2)), COSTS)
    with pytest.raises(ArgumentError, match=r"path: a page's file ends in .html"):
        timeline.to_html(tmp_path / "page.json")
    with pytest.raises(ArgumentError, match="items: 'x' is a int"):
        ps.plot.to_html(tmp_path / "page.html", {"x": 3})
    with pytest.raises(UnknownNameError, match="layout 'grid'"):
        timeline.to_html(tmp_path / "page.html", layout="grid")
    custom = ps.Schedule.from_orders([["0F0", "0B0"]])
    other = ps.simulate(ps.lower(custom), COSTS)
    with pytest.raises(ArgumentError, match="only a named schedule is known"):
        other.to_html(tmp_path / "page.html", microbatches=[4])
    assert not (tmp_path / "page.html").exists()
