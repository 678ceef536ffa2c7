"""Messages priced in seconds: latency holds nothing, ``output_seconds`` hold stream and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipesim as ps
from pipesim.timeline.timeline import Timeline

FREE = ps.Costs(1, 2, network=ps.Network(latency=0.5))
HELD = replace(FREE, output_seconds=0.5, network=ps.Network())
#: Pairs of devices that share a link each way.
SHARED = ps.Network(links=[ps.Link(0.0, 1e9, ((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)))])


def simulated(costs: ps.Costs, engine: str = "compiled", **options: Any) -> Timeline:
    return ps.simulate(ps.lower(ps.schedule("1f1b", 4, 8), **options), costs, engine=engine)


def test_a_blocking_message_by_hand() -> None:
    """Device 0 computes during a latency, and not while its stream is held (rules 4 and 5)."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), overlap=False, step="none")
    free, held = (ps.simulate(graph, costs).frame for costs in (FREE, HELD))
    for frame, second in ((free, 1.0), (held, 1.5)):
        forwards = frame[(frame["op"] == "F") & (frame["device"] == 0)]
        assert forwards["start"].tolist() == [0, second]
        first = frame[(frame["op"] == "F") & (frame["device"] == 1)]
        assert first["start"].iloc[0] == 1.5


def test_overlap_matters_where_messages_hold() -> None:
    """And only there."""
    assert simulated(FREE).makespan == simulated(FREE, overlap=False).makespan
    assert simulated(HELD).makespan < simulated(HELD, overlap=False).makespan


@pytest.mark.parametrize("network", [ps.Network(), ps.Network(0.25, 8.0), SHARED])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"streams": "single"}])
def test_engines_agree(network: ps.Network, options: dict[str, Any]) -> None:
    """Exactly, with bytes beside them and links that messages wait for."""
    costs = replace(HELD, output_bytes=2, network=network, output_seconds=(0.5, 0, 0.75, 0))
    fast, slow = (simulated(costs, engine, **options) for engine in ("compiled", "simpy"))
    assert (fast.start == slow.start).all()
    assert (fast.end == slow.end).all()
    assert simulated(replace(costs, output_seconds=0), **options).makespan < fast.makespan


def test_saved_and_taken_from_a_timeline(tmp_path: Path) -> None:
    """Costs keep them in files, from timelines, in chunks and scaled."""
    HELD.save(tmp_path / "costs.json")
    assert ps.Costs.load(tmp_path / "costs.json") == HELD
    for costs in (HELD, replace(HELD, output_bytes=4, network=ps.Network(0.25, 8.0))):
        timeline = simulated(costs, overlap=False)
        again = simulated(ps.Costs.from_timeline(timeline), overlap=False)
        assert again.makespan == pytest.approx(timeline.makespan)
    assert HELD.in_chunks(ps.Placement.v_shaped(2)).output_seconds == 0.5
    assert HELD.scaled(2).output_seconds == 0.5


def test_orders_know_of_them() -> None:
    """A message of seconds delays what an order waits for, as latency does."""
    orders = [
        ps.order_by(
            ps.Placement.linear(3), 6, replace(costs, backward=None, input_grad=1, weight_grad=1)
        )
        for costs in (FREE, HELD)
    ]
    assert orders[0] == orders[1]
