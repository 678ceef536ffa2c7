"""What timelines show of messages whose RECV shares its stream, and of reductions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import without_costs

import pipesim as ps
from pipesim.errors import AccuracyWarning

#: Ways to lower in which a RECV may have to wait for its own stream.
SHARED = ({"overlap": False}, {"streams": "single"})


@pytest.mark.parametrize("options", [{}, *SHARED])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_time_on_a_busy_stream_is_no_latency(name: str, options: dict[str, Any]) -> None:
    """A RECV behind a task of its stream ends late, however soon its message came."""
    network = ps.Network(latency=1e-4, bandwidth=1e10)
    costs = ps.Costs(1e-3, backward=2e-3, output_bytes=1e6, network=network)
    timeline = ps.simulate(ps.lower(ps.schedule(name, 4, 8), **options), costs)
    assert ps.Costs.from_timeline(timeline).network.latency == pytest.approx(1e-4)


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]),
    st.integers(2, 4),
    st.integers(2, 3),
    st.sampled_from([0.0, 0.125, 2.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([{}, *SHARED]),
)
def test_costs_of_a_run_predict_it(
    name: str, p: int, rounds: int, latency: float, nbytes: float, options: dict[str, Any]
) -> None:
    """Simulating from them gives the makespan of what they were taken from."""
    network = ps.Network(latency=latency, bandwidth=8)
    costs = ps.Costs(1, None, 0.75, 0.5, output_bytes=nbytes, network=network)
    timeline = ps.simulate(ps.lower(ps.schedule(name, p, rounds * p), **options), costs)
    back = ps.Costs.from_timeline(without_costs(timeline))
    assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)


def test_no_recv_was_ready() -> None:
    """Both devices have sent when a message comes: the least that one took, which is at most it."""
    graph = ps.lower(ps.schedule("chimera", 2, 4), overlap=False)
    timeline = ps.simulate(graph, ps.Costs(1, 2, output_bytes=1))
    assert ps.Costs.from_timeline(timeline).network.latency == 0


def reduced(**costs: float) -> ps.Timeline:
    """Simulate two replicas of two stages whose gradients take 1 s to reduce."""
    graph = ps.lower(ps.schedule("gpipe", 2, 2), n_replicas=2)
    network = ps.Network(bandwidth=8.0)
    return ps.simulate(graph, ps.Costs(1, 2, parameter_bytes=8, network=network, **costs))


def test_reductions_without_bytes() -> None:
    """Their seconds would vanish: a warning says so, and what to give."""
    timeline = without_costs(reduced())
    free = ps.Network()
    with pytest.warns(AccuracyWarning, match=r"took up to 1\.00e\+00 s .*; give parameter_bytes="):
        ps.Costs.from_timeline(timeline, network=free)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ps.Costs.from_timeline(timeline).reduce_grad == (1.0, 1.0)
        assert ps.Costs.from_timeline(timeline, parameter_bytes=0).reduce_grad is None
        ps.Costs.from_timeline(timeline, network=free, parameter_bytes=0)
        ps.Costs.from_timeline(reduced(), network=free)
        back = ps.Costs.from_timeline(
            timeline, parameter_bytes=8, network=ps.Network(bandwidth=8.0)
        )
        short = np.where(timeline.graph.op == ps.ops.Op.REDUCE_GRAD, timeline.start, timeline.end)
        ps.Costs.from_timeline(replace(timeline, end=short), network=free)
    assert ps.simulate(timeline.graph, back).makespan == pytest.approx(timeline.makespan)


def test_scaled_by_position() -> None:
    """The factor comes first, as the README writes it."""
    assert ps.Costs((1, 2), 4).scaled(0.5, stage=1).forward == (1, 1)
